"""Work that tests of one run share, since many of them compile the same things.

Machine code: two models with equal MLIR have equal objects, in whatever test and in whatever
process of the run. Captures: models of equal configurations export to equal programs, since their
parameters are stand-ins. Everything is still made once in every run, by the code under test.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import shutil
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

# Programs that a process keeps: the graph of one takes some MiB.
PROGRAMS = 64
# Entries of a configuration that only say where a model comes from and how it is stored.
NOT_CAPTURED = frozenset({"_name_or_path", "architectures", "dtype", "transformers_version"})


def digest(*parts: object) -> str:
    """A key for values whose text says all of them."""
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()


class Store:
    """Pickled results in a folder that all processes of a test run see."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def get(self, key: str, make: Callable[[], Any]) -> Any:
        path = self.folder / key
        if path.exists():
            return pickle.loads(path.read_bytes())
        made = make()
        scratch = path.with_name(f".{uuid.uuid4().hex}")
        scratch.write_bytes(pickle.dumps(made))
        scratch.replace(path)
        return made


@contextmanager
def shared_objects(folder: Path) -> Iterator[None]:
    """Within it the compiler makes each object once a run. Dumps of intermediate forms are made
    anew. What is replaced is there as `__wrapped__`.
    """
    from bessemer.backend import codegen, link

    objects, natives = Store(folder / "objects"), folder / "native"
    compile_module, compile_all = codegen.compile_module, link._compile_all

    @wraps(compile_module)
    def module(text: str, target: Any, name: str, **options: Any) -> Any:
        if options.get("dump") is not None or options.get("on_bufferized") is not None:
            return compile_module(text, target, name, **options)
        key = digest(text, target, name, sorted(options.items()))
        return objects.get(key, lambda: compile_module(text, target, name, **options))

    @wraps(compile_all)
    def native(sources: Sequence[Path], into: Path, target: Any) -> list[Path]:
        kept = natives / digest(target, link._compiler(target), *sources)
        if not kept.exists():
            scratch = natives / f".{uuid.uuid4().hex}"
            compile_all(sources, scratch, target)
            with suppress(OSError):  # another process was faster
                scratch.rename(kept)
        into.mkdir(parents=True, exist_ok=True)
        names = [f"{source.stem}.o" for source in sources]
        return [Path(shutil.copy2(kept / name, into / name)) for name in names]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codegen, "compile_module", module)
        patch.setattr(link, "_compile_all", native)
        yield


def share_captures() -> None:
    """From now on this process captures a transformers model once for each configuration."""
    from bessemer.importer import api
    from bessemer.importer.capture import CausalLM

    export = api.export
    programs: OrderedDict[str, Any] = OrderedDict()

    def shared(module: Any, capture: str, **options: Any) -> Any:
        if not isinstance(module, CausalLM):
            return export(module, capture, **options)
        model: Any = module.model
        config = {k: v for k, v in model.config.to_dict().items() if k not in NOT_CAPTURED}
        stored = model.state_dict()
        key = digest(
            type(model).__qualname__,
            json.dumps(config, sort_keys=True, default=str),
            capture,
            sorted(options.items()),
            [name for name, part in model.named_modules() if part._forward_hooks],
            *((name, list(tensor.shape)) for name, tensor in stored.items()),
            # Values that are part of a program: frequencies, mostly.
            *((n, b.numpy().tobytes()) for n, b in model.named_buffers() if n not in stored),
        )
        if key not in programs:
            programs[key] = export(module, capture, **options)
            while len(programs) > PROGRAMS:
                programs.popitem(last=False)
        programs.move_to_end(key)
        return programs[key]

    api.export = shared
