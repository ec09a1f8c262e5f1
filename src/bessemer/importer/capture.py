"""From a module to torch's ExportedProgram: one export with the number of tokens symbolic.

The default way is non-strict `torch.export`; the strict one goes through TorchDynamo. Both give
the same graph. Branches on the number of tokens are errors, also those on `length == 1` that
torch would take silently.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import sympy
import torch
import torch.fx.experimental._config as symbolic_config

from bessemer.errors import UsageError
from bessemer.importer.capture_errors import CaptureError, capture_error, quiet

CAPTURES = ("export", "dynamo")
# Any length above 1 would do: the size is symbolic. Not a size that models have elsewhere.
EXAMPLE_LENGTH = 6
# Lengths at which a guard has to hold to count as "for every length".
_PROBES = sorted({*range(1, 130), *(2**n + d for n in range(7, 20) for d in (-1, 0, 1))})
# Torch code that asks about sizes only to compute shapes and strides: no branch of the model. A
# length of 1 may differ there (broadcasting), which leaves the values as they are.
_SHAPE_CODE = (
    "torch/_ops.py",
    "torch/_meta_registrations.py",
    "torch/_subclasses/",
    "torch/_refs/",
    "torch/_prims",
    "torch/_decomp/",
    "torch/_library/",
    "torch/_export/",
    "torch/_dynamo/utils.py",
    "torch/_dynamo/guards.py",
    "torch/fx/",
    "torch/utils/_stats.py",
)


class CausalLM(torch.nn.Module):
    """A transformers model as `(ids, positions) -> logits`, without cache."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        out = self.model(input_ids=ids, position_ids=positions, use_cache=False, return_dict=True)
        return out.logits


def example_inputs(rank: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and positions of the example call, [1, T] or [T]."""
    ids = torch.zeros(EXAMPLE_LENGTH, dtype=torch.long)
    positions = torch.arange(EXAMPLE_LENGTH)
    return (ids[None], positions[None]) if rank == 2 else (ids, positions)


def export(module: torch.nn.Module, capture: str, *, rank: int = 2) -> torch.export.ExportedProgram:
    """Export `module(ids, positions)`; both inputs i64[1, T] (rank 2) or i64[T] (rank 1).

    Raises:
        UsageError: an unknown capture way.
        CaptureError: the model branches on data or on the number of tokens, or breaks the
            graph; the message names the source lines.
    """
    if capture not in CAPTURES:
        raise UsageError(f"capture {capture!r} is not one of {', '.join(CAPTURES)}")
    axis = {rank - 1: torch.export.Dim.AUTO}
    inputs = example_inputs(rank)
    with torch.no_grad(), quiet(), symbolic_config.patch(backed_size_oblivious=True):
        try:
            program = torch.export.export(
                module, inputs, dynamic_shapes=(axis, axis), strict=capture == "dynamo"
            )
        except Exception as error:
            raise capture_error(error, module, inputs, capture) from error
    _check_guards(program)
    return program


def shape_env(program: torch.export.ExportedProgram) -> Any:
    """The symbolic shape environment of a program, or None when nothing is symbolic."""
    for node in program.graph.nodes:
        value = node.meta.get("val")
        for size in getattr(value, "shape", ()):
            if isinstance(size, torch.SymInt):
                return size.node.shape_env
    return None


def _check_guards(program: torch.export.ExportedProgram) -> None:
    """Raises CaptureError when the trace took a branch that some length does not take."""
    env = shape_env(program)
    if env is None:
        return
    found = []
    for guard in env.guards:
        frame = str(guard.sloc.framework_loc).replace("\\", "/")
        least = 2 if any(part in frame for part in _SHAPE_CODE) else 1
        if not _always(guard.expr, least):
            tokens = dict.fromkeys(guard.expr.free_symbols, sympy.Symbol("T"))
            found.append(f"{guard.expr.subs(tokens)} ({_place(guard.sloc)})")
    if found:
        raise CaptureError(
            "the model branches on the number of tokens, so one graph can't serve every length: "
            + "; ".join(sorted(set(found)))
        )


def _place(sloc: Any) -> str:
    if sloc.maybe_user_loc:
        return str(sloc.maybe_user_loc).split("#")[-1].strip()
    frame = sloc.framework_loc
    if hasattr(frame, "filename"):
        return f"{Path(frame.filename).name}:{frame.lineno}"
    return str(frame)


def _always(guard: Any, least: int) -> bool:
    """Whether a guard holds for every number of tokens from `least` on."""
    symbols = list(guard.free_symbols)
    lengths = [n for n in _PROBES if n >= least]
    return all(guard.subs(dict.fromkeys(symbols, n)) == sympy.true for n in lengths)
