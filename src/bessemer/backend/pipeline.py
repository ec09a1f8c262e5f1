"""The MLIR pass pipelines, from what codegen emits to LLVM IR text.

Two kinds of function may share a module. A *payload* is linalg on tensors; `PAYLOAD` turns it into
loops over memrefs. A *kernel* is vector/scf/memref code; `KERNEL` turns it, and what is left of the
payloads, into the LLVM dialect. Between bufferization and the loops the caller's hook may rewrite
the module (it places buffers in the arena): no `memref.alloc` may be left after it.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from bessemer.backend import float_conversion, math_library
from bessemer.errors import CompileError

if TYPE_CHECKING:
    import mlir.ir as ir

    from bessemer.backend.target import Target

# A temporary of a payload up to this size (an accumulator, one row's statistics) may live on the
# stack; anything larger belongs to the session's arena.
STACK_BUFFER_BYTES = 1024

# linalg on tensors -> linalg on memrefs. Function boundaries have identity layouts, so that a
# memref argument is a plain dense array and a tensor argument has the same ABI.
BUFFERIZE: tuple[str, ...] = (
    "canonicalize",
    "cse",
    "linalg-fuse-elementwise-ops",
    "canonicalize",
    "cse",
    "eliminate-empty-tensors",
    "empty-tensor-to-alloc-tensor",
    "one-shot-bufferize{bufferize-function-boundaries=true "
    "function-boundary-type-conversion=identity-layout-map}",
    "drop-equivalent-buffer-results",
    "canonicalize",
    "cse",
    "func.func(buffer-hoisting)",
    "func.func(buffer-loop-hoisting)",
    f"func.func(promote-buffers-to-stack{{max-alloc-size-in-bytes={STACK_BUFFER_BYTES} "
    "max-rank-of-allocated-memref=0})",
    "canonicalize",
    "cse",
)

# linalg on memrefs -> scf loops.
LOOPS: tuple[str, ...] = (
    "convert-linalg-to-loops",
    "fold-memref-alias-ops",
    "canonicalize",
    "cse",
)

PAYLOAD: tuple[str, ...] = BUFFERIZE + LOOPS

# Half-width arithmetic is done in f32; what remains are conversions and the functions that
# `math_library` and `float_conversion` then write out.
WIDEN: tuple[str, ...] = (
    "math-extend-to-supported-types{target-type=f32}",
    "arith-emulate-unsupported-floats{source-types=f16,bf16 target-type=f32}",
    "canonicalize",
)

# vector/scf/memref/arith/math -> LLVM dialect. Reductions keep their order unless the op itself
# carries `fastmath<reassoc>`.
KERNEL: tuple[str, ...] = (
    "canonicalize",
    "cse",
    "convert-vector-to-scf",
    "lower-affine",
    "convert-scf-to-cf",
    "memref-expand",
    "expand-strided-metadata",
    "lower-affine",
    "convert-vector-to-llvm{reassociate-fp-reductions=false}",
    "convert-math-to-llvm",
    "convert-math-to-libm",
    "convert-index-to-llvm",
    "arith-expand",
    "convert-arith-to-llvm",
    "finalize-memref-to-llvm",
    "convert-func-to-llvm",
    "convert-cf-to-llvm",
    "convert-ub-to-llvm",
    "reconcile-unrealized-casts",
    "canonicalize",
    "cse",
)

# Operations that an error message shows in full.
_LISTED_OPERATIONS = 8

_ALLOCATIONS = ("memref.alloc", "memref.realloc", "memref.dealloc")
_LOOPS_WITH_BODY = ("scf.for", "scf.while", "scf.parallel", "scf.forall", "affine.for")


def lower(
    mlir_text: str,
    target: Target,
    name: str,
    on_bufferized: Callable[[ir.Module], None] | None = None,
    dump: dict[str, str] | None = None,
) -> str:
    """Lower a module of payloads and kernels to LLVM IR text.

    `on_bufferized` receives the module when tensors have become memrefs and linalg ops are still
    whole; it rewrites in place. `dump` receives the text after each stage, under the names
    `payload`, `bufferized`, `planned`, `loops`, `math` and `llvm`.

    Raises CompileError for a syntax error, a failed pass (it names the pass, saves the IR that the
    pass was given and prints the command that runs it again), or an allocation that is left.
    """
    import mlir.ir as ir

    def record(stage: str, module: ir.Module) -> None:
        if dump is not None:
            dump[stage] = str(module)

    with ir.Context() as context, ir.Location.unknown():
        context.enable_multithreading(False)
        module = _parse(mlir_text, name)
        record("payload", module)
        _read_inits_as_inputs(module)
        run_passes(module, BUFFERIZE, name)
        record("bufferized", module)
        if on_bufferized is not None:
            on_bufferized(module)
            _verify(module, name, "after the buffers were placed")
            record("planned", module)
        _check_allocations(module, name)
        _copies_to_linalg(module)
        run_passes(module, LOOPS, name)
        record("loops", module)
        run_passes(module, WIDEN, name)
        math_library.expand(module)
        float_conversion.expand(module, target)
        _verify(module, name, "after the math functions were written out")
        record("math", module)
        run_passes(module, KERNEL, name)
        module.operation.attributes["llvm.target_triple"] = ir.StringAttr.get(target.triple)
        record("llvm", module)
        return _translate(module, name)


def run_passes(module: ir.Module, passes: tuple[str, ...], name: str) -> None:
    """Run `passes` on `module`; a failure is a CompileError that names the pass."""
    import mlir.ir as ir
    from mlir.passmanager import PassManager

    before = module.operation.clone()
    try:
        PassManager.parse(pipeline_text(passes)).run(module.operation)
    except ir.MLIRError as error:
        failed, text, message = _blame(before, passes, str(error))
        raise CompileError(
            f"MLIR pass '{failed}' failed on module '{name}':\n{message}\n"
            + reproducer(text, name, (failed,))
        ) from error


def pipeline_text(passes: tuple[str, ...]) -> str:
    """The pass list in the syntax of `mlir-opt --pass-pipeline`."""
    return f"builtin.module({','.join(passes)})"


def reproducer(text: str, name: str, passes: tuple[str, ...]) -> str:
    """Save `text` to a file and return the lines that say how to run `passes` on it."""
    path = save_ir(text, name, "mlir")
    pipeline = pipeline_text(passes)
    command = [_mlir_opt() or "mlir-opt", f"--pass-pipeline={pipeline}", str(path)]
    python = [sys.executable, "-m", "bessemer.backend.replay", pipeline, str(path)]
    return (
        f"The IR that the pass was given is in {path}\nReproduce with:\n  {shlex.join(command)}\n"
        f"or, where mlir-opt is not installed:\n  {shlex.join(python)}"
    )


def save_ir(text: str, name: str, suffix: str) -> Path:
    """Write IR to a new file under TMPDIR, for a report of a failure."""
    stem = "".join(c if c.isalnum() or c in "-_" else "_" for c in name) or "module"
    handle, path = tempfile.mkstemp(prefix=f"bessemer-{stem}-", suffix=f".{suffix}")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    return Path(path)


def _mlir_opt() -> str | None:
    """Path of mlir-opt: on PATH, or in the wheel of MLIR's tools."""
    from bessemer.backend.tools import mlir_tool

    return shutil.which("mlir-opt") or mlir_tool("mlir-opt")


def _blame(operation: ir.Operation, passes: tuple[str, ...], message: str) -> tuple[str, str, str]:
    """Run the passes one at a time: the first that fails, the IR it was given, its message."""
    import mlir.ir as ir
    from mlir.passmanager import PassManager

    text = str(operation)
    for one in passes:
        text = str(operation)
        try:
            PassManager.parse(pipeline_text((one,))).run(operation)
        except ir.MLIRError as error:
            return one, text, str(error)
    return ",".join(passes), text, message


def _parse(text: str, name: str) -> ir.Module:
    import mlir.ir as ir

    try:
        return ir.Module.parse(text)
    except ir.MLIRError as error:
        raise CompileError(
            f"The MLIR of module '{name}' does not parse:\n{error}\n" + reproducer(text, name, ())
        ) from error


def _verify(module: ir.Module, name: str, when: str) -> None:
    import mlir.ir as ir

    try:
        module.operation.verify()
    except ir.MLIRError as error:
        text = module.operation.get_asm(assume_verified=True)
        raise CompileError(
            f"Module '{name}' is invalid {when}:\n{error}\n" + reproducer(text, name, ())
        ) from error


def _translate(module: ir.Module, name: str) -> str:
    """LLVM IR text. MLIR's translation crashes on foreign operations, so they are sought first."""
    from mlir.dialects import llvm

    foreign = [op for op in operations(module) if not op.name.startswith(("llvm.", "builtin.mod"))]
    if foreign:
        path = save_ir(str(module), name, "mlir")
        command = shlex.join(["mlir-translate", "--mlir-to-llvmir", str(path)])
        listed = "\n".join(f"  {op}" for op in foreign[:_LISTED_OPERATIONS])
        raise CompileError(
            f"Module '{name}': {len(foreign)} operation(s) have no LLVM form "
            f"({', '.join(sorted({op.name for op in foreign}))}):\n{listed}\n"
            f"The IR is in {path}\nReproduce with:\n  {command}"
        )
    return str(llvm.translate_module_to_llvmir(module.operation))


def operations(module: ir.Module) -> list[ir.Operation]:
    """Every operation of the module in post-order, safe to rewrite while iterating."""
    import mlir.ir as ir

    found: list[ir.Operation] = []

    def visit(op: ir.Operation) -> ir.WalkResult:
        found.append(op)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    return found


def _check_allocations(module: ir.Module, name: str) -> None:
    """No allocation is left, and nothing on the stack grows with a loop."""
    problems = []
    for op in operations(module):
        if op.name in _ALLOCATIONS:
            problems.append(f"  in @{_function_of(op)}: {op}")
        elif op.name == "memref.alloca":
            for parent in _ancestors(op):
                if parent.name == "memref.alloca_scope":
                    break
                if parent.name in _LOOPS_WITH_BODY:
                    problems.append(f"  in @{_function_of(op)}, inside {parent.name}: {op}")
                    break
    if problems:
        path = save_ir(str(module), name, "mlir")
        raise CompileError(
            f"Module '{name}' would allocate memory while it runs:\n"
            + "\n".join(problems)
            + "\nBuffers belong to the arena, and small fixed ones outside loops. "
            f"The IR is in {path}"
        )


def _ancestors(op: ir.Operation) -> Iterator[ir.Operation]:
    parent = op.parent
    while parent is not None:
        yield parent.operation
        parent = parent.operation.parent


def _function_of(op: ir.Operation) -> str:
    for parent in _ancestors(op):
        if parent.name == "func.func":
            return str(parent.attributes["sym_name"]).strip('"')
    return "?"


def _read_inits_as_inputs(module: ir.Module) -> None:
    """An elementwise `linalg.generic` that reads its `outs` gets the same tensors as `ins` too.

    MLIR's fusion of such an op into one with more loops (x * rsqrt(sum) over a row) is wrong: it
    keeps the read and the write of `outs` and repeats both in every iteration of the new loops.
    Read through `ins`, the update is still in place where nothing is fused.
    """
    import mlir.ir as ir

    for op in operations(module):
        if op.name != "linalg.generic" or "parallel" not in str(op.attributes["iterator_types"]):
            continue
        inputs, outputs = ir.DenseI32ArrayAttr(op.attributes["operandSegmentSizes"])
        body = op.regions[0].blocks[0]
        reads = any(list(argument.uses) for argument in list(body.arguments)[inputs:])
        if not reads or "reduction" in str(op.attributes["iterator_types"]) or not op.results:
            continue
        attributes = {name: op.attributes[name] for name in op.attributes.keys()}  # noqa: SIM118
        maps = list(ir.ArrayAttr(attributes["indexing_maps"]))
        attributes["indexing_maps"] = ir.ArrayAttr.get(maps + maps[inputs:])
        attributes["operandSegmentSizes"] = ir.DenseI32ArrayAttr.get([inputs + outputs, outputs])
        operands = list(op.operands)
        replacement = ir.Operation.create(
            op.name,
            [result.type for result in op.results],
            operands + operands[inputs:],
            attributes,
            regions=1,
            ip=ir.InsertionPoint(op),
            loc=op.location,
        )
        # The block's arguments for `outs` now stand for the new inputs; new ones follow them.
        for argument in list(body.arguments)[inputs:]:
            body.add_argument(argument.type, op.location)
        body.append_to(replacement.regions[0])
        for old, new in zip(op.results, replacement.results, strict=True):
            old.replace_all_uses_with(new)
        op.erase()


def _copies_to_linalg(module: ir.Module) -> None:
    """`memref.copy` becomes `linalg.copy`: a strided copy would call MLIR's runtime library."""
    import mlir.ir as ir
    from mlir.dialects import linalg

    for op in operations(module):
        if op.name == "memref.copy":
            source, destination = op.operands
            with ir.InsertionPoint(op), op.location:
                linalg.copy(source, outs=[destination])
            op.erase()
