"""From a module to torch's ExportedProgram: one export with the number of tokens symbolic.

The default way is non-strict `torch.export`; the strict one goes through TorchDynamo. Both give
the same graph. Branches on the number of tokens are errors, also those on `length == 1` that
torch would take silently.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sympy
import torch
import torch.fx.experimental._config as symbolic_config

from bessemer.errors import UnsupportedError, UsageError

CAPTURES = ("export", "dynamo")
# Any length above 1 would do: the size is symbolic. Not a size that models have elsewhere.
EXAMPLE_LENGTH = 6
MAX_LENGTH = 1 << 20
# Lengths at which a guard has to hold to count as "for every length".
_PROBES = sorted({*range(1, 130), *(2**n + d for n in range(7, 20) for d in (-1, 0, 1))})
# Torch code that asks about sizes only to compute shapes and strides: no branch of the model.
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
        UnsupportedError: the model branches on data or on the number of tokens, or breaks the
            graph; the message names the source line.
    """
    if capture not in CAPTURES:
        raise UsageError(f"capture {capture!r} is not one of {', '.join(CAPTURES)}")
    tokens = torch.export.Dim("T", min=1, max=MAX_LENGTH)
    axis = {rank - 1: tokens}
    try:
        with (
            torch.no_grad(),
            _quiet(),
            symbolic_config.patch(backed_size_oblivious=True),
        ):
            program = torch.export.export(
                module,
                example_inputs(rank),
                dynamic_shapes=(axis, axis),
                strict=capture == "dynamo",
            )
    except UnsupportedError:
        raise
    except Exception as error:
        raise _export_error(error, capture) from error
    _check_guards(program)
    return program


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's own log lines: what went wrong is in the exception."""
    names = [n for n in logging.root.manager.loggerDict if n.startswith("torch")]
    loggers = [logging.getLogger(n) for n in ("torch", *names)]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled


def _user_line(error: BaseException) -> str:
    """The innermost source line of the traceback (or of its causes) that is not torch's."""
    chain: list[BaseException] = []
    at: BaseException | None = error
    while at is not None and at not in chain:
        chain.append(at)
        at = at.__cause__ or at.__context__
    here = str(Path(__file__).parent)
    torch_home = str(Path(torch.__file__).parent)
    for one in reversed(chain):
        frames = traceback.extract_tb(one.__traceback__)
        for frame in reversed(frames):
            if not frame.filename.startswith((here, torch_home, "<")):
                return f" ({Path(frame.filename).name}:{frame.lineno})"
    return ""


def _export_error(error: Exception, capture: str) -> UnsupportedError:
    inner: BaseException | None = error
    while inner is not None:
        if isinstance(inner, UnsupportedError):
            return inner
        inner = inner.__cause__ or inner.__context__
    text = str(error).strip()
    where = _user_line(error)
    if "onstraints violated" in text:
        guards = [line.strip(" -") for line in text.splitlines() if "satisfy" in line]
        detail = "; ".join(guards) or text.splitlines()[0]
        return UnsupportedError(
            f"the model behaves differently for some numbers of tokens{where}: {detail}"
        )
    if "data-dependent" in text.lower():
        first = text.splitlines()[0]
        lines = [line.strip() for line in text.splitlines() if line.strip().startswith("# File")]
        return UnsupportedError(
            f"the model's control flow depends on the data{where}: {first} {' '.join(lines[-1:])}"
        )
    name = "TorchDynamo" if capture == "dynamo" else "torch.export"
    return UnsupportedError(
        f"{name} can't capture the model{where}: {type(error).__name__}: {text[:1000]}"
    )


def shape_env(program: torch.export.ExportedProgram) -> Any:
    """The symbolic shape environment of a program, or None when nothing is symbolic."""
    for node in program.graph.nodes:
        value = node.meta.get("val")
        for size in getattr(value, "shape", ()):
            if isinstance(size, torch.SymInt):
                return size.node.shape_env
    return None


def _check_guards(program: torch.export.ExportedProgram) -> None:
    """Raises UnsupportedError when the trace took a branch that some length does not take."""
    env = shape_env(program)
    if env is None:
        return
    found = []
    for guard in env.guards:
        frame = str(guard.sloc.framework_loc).replace("\\", "/")
        if not any(part in frame for part in _SHAPE_CODE) and not _always(guard.expr):
            found.append(f"{guard.expr} ({_place(guard.sloc)})")
    if found:
        raise UnsupportedError(
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


def _always(guard: Any) -> bool:
    """Whether a guard holds for every number of tokens."""
    symbols = list(guard.free_symbols)
    return all(guard.subs(dict.fromkeys(symbols, n)) == sympy.true for n in _PROBES)
