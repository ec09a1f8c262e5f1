"""Writes docs/a-model-on-its-way.md: a tiny model at every stage, with what is really there.

    python docs/make_travel_page.py [--output FILE]

The excerpts follow one norm of the first layer. Code is for x86-64 with AVX2, whatever machine
this runs on, so that the page is the same everywhere.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bessemer.backend.tools import require_llvm_tool, run_tool
from bessemer.compile_options import CompileOptions
from bessemer.compiler import compile_model
from bessemer.importer.capture import CausalLM, export
from bessemer.importer.masks import note_windows
from bessemer.importer.skeleton import use_ops, without_weights
from bessemer.inspect.graphs import graph
from bessemer.inspect.groups import groups, sequence_text
from bessemer.inspect.modules import code
from bessemer.inspect.page import columns
from bessemer.inspect.subject import Subject, open_subject
from bessemer.verify import verify

PAGE = Path(__file__).parent / "a-model-on-its-way.md"
LAYERS = 6  # enough that some of them are a loop
OPTIONS = CompileOptions(
    context=64,
    chunk=16,
    target="x86_64",
    cpu="x86-64-v3",
    emit=("graph", "mlir", "llvm", "asm"),
)
LENGTHS = (1, 7)  # prompts that the last section compares with PyTorch
NORM = "model.layers.0.post_attention_layernorm"
KERNEL = "decode_rms_norm_0"
PAYLOAD = "decode_generic_0"
# Longer lines of code are cut, so that the page can be read.
WIDTH = 150
CUT = "..."
PROSE_WIDTH = 100


@dataclass(frozen=True)
class Travel:
    """The tiny model, and the folder that it is compiled to."""

    module: torch.nn.Module
    subject: Subject
    folder: Path


def tiny_llama() -> LlamaForCausalLM:
    """A llama of 6 layers and 60 thousand random parameters."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    return LlamaForCausalLM(config).eval()


# --- pieces of text -------------------------------------------------------------------------------


def block(text: str, language: str = "") -> str:
    """A code block; long lines are cut, and the common indent is taken off."""
    lines = text.strip("\n").splitlines()
    indent = min((len(s) - len(s.lstrip()) for s in lines if s.strip()), default=0)
    cut = [s[indent:].rstrip().expandtabs() for s in lines]
    cut = [s if len(s) <= WIDTH else s[: WIDTH - len(CUT)] + CUT for s in cut]
    return f"```{language}\n" + "\n".join(cut) + "\n```\n"


def wrapped(text: str) -> str:
    """The paragraphs outside code blocks, wrapped."""
    parts = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)
    for i in range(0, len(parts), 2):
        paragraphs = parts[i].split("\n\n")
        filled = [
            textwrap.fill(p, PROSE_WIDTH, break_long_words=False) if p.strip() else p
            for p in paragraphs
        ]
        parts[i] = "\n\n".join(filled)
    return "".join(parts)


def lines_between(text: str, first: str, last: str) -> str:
    """The lines from the first that matches `first` to the next that matches `last`."""
    found: list[str] = []
    for line in text.splitlines():
        if found or re.search(first, line):
            found.append(line)
            if re.search(last, line):
                return "\n".join(found)
    raise ValueError(f"no lines from {first!r} to {last!r}")


def lines_with(text: str, pattern: str) -> str:
    found = [line for line in text.splitlines() if re.search(pattern, line)]
    if not found:
        raise ValueError(f"no line has {pattern!r}")
    return "\n".join(found)


# --- the stages -----------------------------------------------------------------------------------


def pytorch(travel: Travel) -> str:
    """The module as PyTorch prints it, and the norm that is followed."""
    shown = lines_between(str(travel.module), r"LlamaForCausalLM", r"rotary_emb")
    count = sum(p.numel() for p in travel.module.parameters())
    return (
        f"A llama with {LAYERS} layers, {count:,} parameters and random weights. The excerpts "
        f"below follow one of its norms, `{NORM}`: x / sqrt(mean(x²) + eps) · w.\n\n" + block(shown)
    )


def aten(travel: Travel) -> str:
    """The norm's nodes in the exported program."""
    copied = without_weights(travel.module)
    assert isinstance(copied, LlamaForCausalLM)
    use_ops(copied)
    note_windows(copied)
    program = export(CausalLM(copied), "export")
    calls = [n for n in program.graph.nodes if n.op == "call_function"]
    rows = []
    for node in calls:
        modules = [path for path, _ in node.meta.get("nn_module_stack", {}).values()]
        if modules and modules[-1].endswith(NORM):
            value = node.meta["val"]
            sizes = ", ".join(map(str, value.shape)) if value is not None else ""
            dtype = str(value.dtype).removeprefix("torch.") if value is not None else ""
            rows.append(f"%{node.name} = {node.target}{_arguments(node.args)} : {dtype}[{sizes}]")
    return (
        f"`torch.export` gives {len(calls)} ATen calls, not decomposed. The number of tokens is a "
        "symbol. Attention is one call, `bessemer.attention`: the cache and the mask are its "
        "meaning and are never traced. Source: `src/bessemer/importer/capture.py`; the other way "
        "is `--capture dynamo`.\n\n" + block("\n".join(rows))
    )


def _arguments(args: Sequence[Any]) -> str:
    return "(" + ", ".join(f"%{a}" if hasattr(a, "op") else str(a) for a in args) + ")"


def imported(travel: Travel) -> str:
    text = graph(travel.subject, "imported", None).text
    ops = sum(travel.subject.compilation.imported.graph.op_counts().values())
    return (
        f"Typed ops with symbolic sizes, {ops} of them; weights by name, without values. Each op "
        "knows the module and the source line that it came from. Source: "
        "`src/bessemer/importer/aten*.py`, `src/bessemer/graph/`.\n\n"
        + block(lines_with(text, rf"// {re.escape(NORM)} |attention.*\{{layer = 0\b"))
        + "\n`bessemer inspect MODEL graph` shows all of it.\n"
    )


def passes(travel: Travel) -> str:
    rows: list[list[object]] = [["phase", "pass", "ops", "", "", "changes"]]
    for record in travel.subject.compilation.lowered.trace:
        changes = ", ".join(f"{op} {d:+}" for op, d in record.changed.items())
        if changes:
            before, left = sum(record.before.values()), sum(record.after.values())
            rows.append([record.phase, record.name, before, "->", left, changes])
    after = graph(travel.subject, "imported", "rms_norm").text
    return (
        "Each pass is a named rewrite, verified after it ran. These changed something. "
        "The whole sequence is `src/bessemer/passes/pipeline.py`.\n\n"
        + block(columns(rows, right=(2, 4)))
        + "\nThe norm after the pass `rms_norm`:\n\n"
        + block(lines_between(after, rf"{re.escape(NORM)}\.weight", r"rms_norm\("))
        + "\n`bessemer inspect MODEL passes` shows this table with times; "
        "`inspect MODEL graph --after rms_norm` the graph after a pass.\n"
    )


def lowered(travel: Travel) -> str:
    text = graph(travel.subject, "prefill", None).text
    layer = lines_between(text, r"layers\.0\.input_layernorm", r"layers\.1\.input_layernorm")
    return (
        "Two graphs are left, `forward_prefill` for T rows and `forward_decode` for one. The first "
        "layer of the former: q, k and v are one matrix, gate and up another; residuals are part "
        "of the projections.\n\n" + block("\n".join(layer.splitlines()[:-1]))
    )


def group_stage(travel: Travel) -> str:
    data: Any = groups(travel.subject).data
    rows: list[list[object]] = [["function", "calls", "split", "first of"]]
    for row in data["forward_decode"]["functions"]:
        rows.append([row[k] for k in ("function", "calls", "split", "first")])
    entry = travel.subject.compilation.generated.entries["forward_decode"]
    return (
        "Ops with a scheduled kernel are a group each; what is left is clustered. Equal groups are "
        "one function, whatever the layer. Of `forward_decode`:\n\n"
        + block(columns(rows, right=(1,)))
        + "\nThe order of the calls. A bar is a barrier before the call, where data crosses "
        "threads.\n\n" + block(sequence_text(entry)) + "\nSource: `src/bessemer/codegen/"
        "clusters.py`, `program.py`, `barriers.py`; `bessemer inspect MODEL groups`.\n"
    )


def payload(travel: Travel) -> str:
    text = travel.subject.compilation.generated.payloads[PAYLOAD]
    return (
        "What has no kernel is a payload: a function on tensors in linalg, which stands for "
        "itself and is lowered generically. Here the rotary tables, cos and sin of position times "
        "frequency. Source: `src/bessemer/codegen/payload/`; "
        f"`bessemer inspect MODEL mlir --form payload --group {PAYLOAD}`.\n\n" + block(text, "mlir")
    )


def kernel(travel: Travel) -> str:
    text = code(travel.subject, "mlir", "groups_decode", KERNEL).text
    return (
        "The norm's kernel, for one row: eight partial sums, then the scaled row. `%begin` and "
        "`%end` are the thread's share of the rows. Source: `src/bessemer/codegen/kernels/norm.py`;"
        f" `bessemer inspect MODEL mlir --group {KERNEL}`.\n\n" + block(_body(text), "mlir")
    )


def _body(text: str) -> str:
    """Without the line that names the module."""
    return text.split("\n", 1)[1]


def main_graph(travel: Travel) -> str:
    text = travel.subject.compilation.generated.modules["forward_decode"]
    loop = lines_between(text, r"scf\.for .* iter_args", r"^    }$")
    start = "\n".join(loop.splitlines()[:2])
    call = loop.splitlines()
    at = next(i for i, line in enumerate(call) if f"@{KERNEL}(" in line)
    begin = max(i for i in range(at) if "@bsm_barrier" in call[i])
    poll = next(line for line in call if "@bsm_poll_cancel" in line)
    shown = [start, "      // ...", *call[begin : at + 2], "      // ...", poll]
    size = sum(len(m.encode()) for m in travel.subject.compilation.generated.modules.values())
    return (
        "Every worker of the thread pool walks the main graph and takes its share of each group. "
        "The layers are a loop over a table of numbers, weight offsets among them; this is the "
        "norm's call in it. All MLIR of this model together is "
        f"{size / 1024:.0f} KiB, and each further layer adds a row to the table. Source: "
        "`src/bessemer/codegen/main_graph.py`.\n\n" + block("\n".join(shown), "mlir")
    )


def llvm_ir(travel: Travel) -> str:
    text = _body(code(travel.subject, "llvm", "groups_decode", KERNEL).text)
    lines = text.splitlines()
    return (
        "MLIR's passes lower both kinds to LLVM IR, and LLVM optimises it. Memrefs have become "
        "pointers, sizes and strides. The kernel again, its first half. Source: "
        f"`src/bessemer/backend/`; `bessemer inspect MODEL llvm --group {KERNEL}`.\n\n"
        + block("\n".join([*lines[: len(lines) // 2], "  ; ..."]), "llvm")
    )


def assembly(travel: Travel) -> str:
    text = _body(code(travel.subject, "asm", "groups_decode", KERNEL).text)
    return (
        "And as machine code of its CPU: a row of 32 is four vectors of eight. "
        f"`bessemer inspect MODEL asm --group {KERNEL}`.\n\n" + block(text, "asm")
    )


def artifact(travel: Travel) -> str:
    folder = travel.folder
    rows: list[list[object]] = []
    for path in sorted(p for p in folder.iterdir() if p.is_file()):
        rows.append([path.name, f"{path.stat().st_size:,} bytes"])
    nm = [require_llvm_tool("llvm-nm"), "--dynamic", "--defined-only", "--just-symbol-name"]
    symbols = run_tool([*nm, str(folder / "model.so")])
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    return (
        "A folder: code, weights and state layout, described by the manifest.\n\n"
        + block(columns(rows, right=(1,)))
        + "\nWhat `model.so` exports:\n\n"
        + block(symbols)
        + "\nOf the manifest: where the norm's weight lies, the entry points and the state.\n\n"
        + block(_manifest_excerpt(manifest), "json")
        + "\nSource: `src/bessemer/artifact/`; `bessemer inspect MODEL weights`, `abi`, "
        "`memory`.\n"
    )


def _manifest_excerpt(manifest: dict[str, Any]) -> str:
    weight = next(w for w in manifest["weights"] if w["name"] == f"{NORM}.weight")
    shown = {
        "abi": manifest["abi"],
        "target": {k: v for k, v in manifest["target"].items() if k != "features"},
        "weights": [CUT, weight, CUT],
        "state": {**manifest["state"], "layers": [*manifest["state"]["layers"][:1], CUT]},
        "scratch": manifest["scratch"],
    }
    text = json.dumps(shown, indent=1).replace(f'"{CUT}"', CUT)
    # Lists of plain values on one line.
    flat = re.compile(r"\[\s+([^\[\]{}]+?)\s+\]")
    return flat.sub(lambda found: f"[{' '.join(found[1].split())}]", text)


def numbers(travel: Travel) -> str:
    report = verify(travel.folder, checkpoint=travel.subject.source, lengths=LENGTHS, threads=2)
    rows: list[list[object]] = []
    for check in report.to_json()["checks"]:
        rows.append([check["name"], "ok" if check["ok"] else "FAILED", check["detail"]])
    shown = [row for row in rows if str(row[0]).startswith("numbers: ")]
    return (
        "`bessemer verify` holds the compiled model against PyTorch in float32 on the very weights "
        "that the artifact stores; the KV cache here is f16. The rows about numbers:\n\n"
        + block(columns(shown))
    )


STAGES = {
    "PyTorch": pytorch,
    "ATen": aten,
    "The imported graph": imported,
    "The passes": passes,
    "The lowered graphs": lowered,
    "Groups": group_stage,
    "A payload": payload,
    "A kernel": kernel,
    "The main graph": main_graph,
    "LLVM IR": llvm_ir,
    "Assembly": assembly,
    "The artifact": artifact,
    "The numbers": numbers,
}
INTRODUCTION = """\
# A model on its way

What becomes of a tiny model, stage by stage, with the real intermediate forms. This page is made by
`python docs/make_travel_page.py`; don't edit it. [ARCHITECTURE.md](ARCHITECTURE.md) says why things
are as they are. Any model shows the same with `bessemer inspect`, and
`bessemer compile MODEL -o DIR --emit graph,mlir,llvm,asm` keeps all forms under `DIR/ir/`.
"""


def make_page() -> str:
    """The whole page, as Markdown."""
    module = tiny_llama()
    with tempfile.TemporaryDirectory(prefix="bessemer-travel-") as name:
        checkpoint, folder = Path(name) / "llama", Path(name) / "compiled"
        module.save_pretrained(checkpoint)
        compile_model(checkpoint, OPTIONS, folder)
        travel = Travel(module, open_subject(folder), folder)
        parts = [INTRODUCTION]
        for number, (title, stage) in enumerate(STAGES.items(), 1):
            parts.append(f"## {number}. {title}\n\n{wrapped(stage(travel)).rstrip()}\n")
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=PAGE, help="the file to write")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.output.write_text(make_page(), encoding="utf-8")


if __name__ == "__main__":
    main()
