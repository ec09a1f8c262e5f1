"""What is said when torch can't capture a model: which source lines, and why, all at once."""

from __future__ import annotations

import contextlib
import io
import logging
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from bessemer.errors import UnsupportedError

# Characters of torch's own explanation that are shown.
_SHOWN = 600


class CaptureError(UnsupportedError):
    """torch.export or TorchDynamo can't make one graph of the model."""


class ModelRaised(CaptureError):
    """The model itself raised when it was called with the example inputs, or torch failed."""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without torch's log lines, warnings and prints: what went wrong is in the exception."""
    names = [n for n in logging.root.manager.loggerDict if n.startswith("torch")]
    loggers = [logging.getLogger(n) for n in ("torch", *names)]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    sink = io.StringIO()
    try:
        with (
            contextlib.redirect_stdout(sink),
            contextlib.redirect_stderr(sink),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled


def _chain(error: BaseException) -> list[BaseException]:
    """An exception and what caused it, outermost first."""
    chain: list[BaseException] = []
    at: BaseException | None = error
    while at is not None and at not in chain:
        chain.append(at)
        at = at.__cause__ or at.__context__
    return chain


def _is_model_code(filename: str) -> bool:
    ours, torchs = Path(__file__).parent, Path(torch.__file__).parent
    return not filename.startswith((str(ours), str(torchs), "<"))


def _user_line(error: BaseException) -> str:
    """The innermost source line of the model in a traceback or in those of its causes."""
    for one in reversed(_chain(error)):
        for frame in reversed(traceback.extract_tb(one.__traceback__)):
            if _is_model_code(frame.filename):
                return f" ({Path(frame.filename).name}:{frame.lineno})"
    return ""


def graph_breaks(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> list[str]:
    """Every place where TorchDynamo can't go on, as `file:line: code: reason`."""
    found: dict[str, str] = {}
    try:
        explained: Any = torch._dynamo.explain(module)(*inputs)
    except Exception:  # the first error is reported by the caller
        return []
    finally:
        torch._dynamo.reset()
    for reason in explained.break_reasons:
        own = [f for f in reason.user_stack if _is_model_code(f.filename)]
        text = str(reason.reason).splitlines()[0]
        if text.startswith("generic_jump"):
            text = "control flow depends on the data"
        if own:
            place = f"{Path(own[-1].filename).name}:{own[-1].lineno}: {own[-1].line}"
            found[place] = text
    return [f"{place}: {text}" for place, text in found.items()]


def capture_error(
    error: Exception, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], capture: str
) -> UnsupportedError:
    """The error to raise for what `torch.export` raised."""
    for cause in _chain(error):
        if isinstance(cause, UnsupportedError):
            return cause
    breaks = graph_breaks(module, inputs)
    name = type(module).__name__
    if breaks:
        return CaptureError(
            f"{name}: the model can't be captured as one graph; {len(breaks)} "
            f"place{'s' * (len(breaks) > 1)} break it:\n" + "\n".join(f"  {b}" for b in breaks)
        )
    tool = "TorchDynamo" if capture == "dynamo" else "torch.export"
    text = str(error).strip()[:_SHOWN]
    return ModelRaised(
        f"{name}: {tool} can't capture it{_user_line(error)}: {type(error).__name__}: {text}"
    )
