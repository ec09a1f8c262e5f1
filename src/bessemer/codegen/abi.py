"""`model.h`: the C declarations of a compiled model, generated from the same tables as its code."""

from __future__ import annotations

from bessemer.artifact.manifest import abi_hash
from bessemer.codegen.generate import Generated
from bessemer.codegen.main_graph import ARGUMENTS
from bessemer.native import prefixed_header

_MEMORY = """\
/* -- below the API: the entry points of the compiled code ------------------------------------ */

/* MLIR's memref descriptors. offset is 0 and strides are dense, rows first. */
#ifndef BSM_MEMREFS
#define BSM_MEMREFS
typedef struct { void *allocated, *aligned; int64_t offset, size[1], stride[1]; } bsm_memref1;
typedef struct { void *allocated, *aligned; int64_t offset, size[2], stride[2]; } bsm_memref2;
#endif
"""

_CALL = """\
/* One step over T token rows. weights: weights.bin, mapped at a page boundary. ids, positions,
 * slots: [T] int64; the rows of a slot are consecutive, slot 0 is the only one today. output_rows:
 * [R] int64, indices of the rows whose logits are wanted. state: {prefix}STATE_BYTES, at a page
 * boundary, its header filled from the manifest. scratch: {prefix}SCRATCH_SHARED_BYTES +
 * threads * {prefix}SCRATCH_THREAD_BYTES, at 64 bytes. logits: [R, {prefix}VOCAB] float.
 * prefill: 1 <= T <= {prefix}CHUNK and 0 <= R <= T. decode: T == 1 and R == 1.
 * After it ctx->status is BSM_OK, or BSM_CANCELLED and the step has to be repeated. */
"""


def _declaration(symbol: str) -> str:
    args = ["bsm_context *ctx"]
    for name, type_ in ARGUMENTS:
        rank = 2 if "?x?" in type_ else 1
        args.append(f"bsm_memref{rank} *{name}")
    return f"void {symbol}({', '.join(args)});\n"


def emit_header(generated: Generated, name: str, prefix: str = "") -> str:
    """The header: sizes, the C API of `native/`, and the entry points below it. With a prefix every
    function and every size is named with it, so that two models fit one program.
    """
    guard = f"{prefix}MODEL_H".upper()
    tag = (prefix or "BSM_").upper()
    sizes = {
        "VOCAB": generated.vocab_size,
        "HIDDEN": generated.hidden_size,
        "CONTEXT": generated.state.capacity,
        "CHUNK": generated.state.chunk,
        "STATE_BYTES": generated.state.nbytes,
        "STATE_HEADER_WORDS": generated.state.header_words,
        "SCRATCH_SHARED_BYTES": generated.scratch.shared_bytes,
        "SCRATCH_THREAD_BYTES": generated.scratch.thread_bytes,
        "WEIGHTS_BYTES": max((w.offset + w.nbytes for w in generated.weights), default=0),
    }
    defines = "".join(f"#define {tag}{key} {value}LL\n" for key, value in sizes.items())
    defines += f'#define {tag}ABI_HASH "{header_hash(generated)}"\n'
    calls = "".join(
        _declaration(f"{prefix}_mlir_ciface_{entry}")
        for entry in ("forward_prefill", "forward_decode")
    )
    return (
        f"/* {_comment(name)}: compiled by Bessemer. */\n#ifndef {guard}\n#define {guard}\n\n"
        f"{defines}\n{prefixed_header(prefix)}\n"
        f'{_MEMORY}\n#ifdef __cplusplus\nextern "C" {{\n#endif\n'
        f"{_CALL.replace('{prefix}', tag)}{calls}"
        "#ifdef __cplusplus\n}\n#endif\n#endif\n"
    )


def header_hash(generated: Generated) -> str:
    """The ABI hash of the manifest that this model gets."""
    return abi_hash(
        generated.weights,
        generated.state,
        generated.scratch,
        generated.vocab_size,
        generated.hidden_size,
    )


def _comment(text: str) -> str:
    """Text that can't end a comment."""
    return text.replace("*/", "* /").replace("\n", " ")
