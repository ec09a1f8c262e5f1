"""Where parameters come from: readers, and the tensors of a checkpoint that make up a parameter.

transformers renames and merges some tensors when it loads them (per-expert matrices become one
stacked tensor). A graph refers to what the file holds: such a parameter is an expression.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import numpy as np
import torch

from bessemer.errors import CheckpointError
from bessemer.graph import DType, Size, TensorType, Value, emit, param
from bessemer.importer.checkpoint import TensorInfo

log = logging.getLogger(__name__)


class WeightReader(Protocol):
    """Tensors by name, read one at a time, or some rows of their leading axis."""

    def names(self) -> list[str]: ...

    def info(self, name: str) -> TensorInfo: ...

    def read(self, name: str, rows: range | None = None) -> np.ndarray: ...

    def read_stored(self, name: str, rows: range | None = None) -> np.ndarray: ...

    def fingerprint(self) -> str: ...

    def require(self, names: Iterable[str]) -> None: ...


_DTYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


def _rows(tensor: torch.Tensor, rows: range | None) -> torch.Tensor:
    return tensor if rows is None else tensor[rows.start : rows.stop]


def _array(tensor: torch.Tensor) -> np.ndarray:
    """float32, or the integers, of a tensor; never a view of it."""
    tensor = tensor.detach().to("cpu")
    if tensor.is_floating_point():
        tensor = tensor.to(torch.float32)
    return np.array(tensor.numpy(), order="C")


def _bits(tensor: torch.Tensor) -> np.ndarray:
    """The stored form of a tensor: f16 and bf16 as uint16 bit patterns, other floats as f32."""
    tensor = tensor.detach().to("cpu").contiguous()
    if tensor.dtype in (torch.float16, torch.bfloat16):
        return np.array(tensor.view(torch.int16).numpy().view(np.uint16))
    return _array(tensor)


class ModuleWeights:
    """The parameters and persistent buffers of a module in memory, by their state-dict names."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._tensors: dict[str, torch.Tensor] = dict(module.state_dict(keep_vars=True))
        self._rest = {n: b for n, b in module.named_buffers() if n not in self._tensors}
        self._kind = f"{type(module).__module__}.{type(module).__qualname__}"

    def names(self) -> list[str]:
        return sorted(self._tensors)

    def _tensor(self, name: str) -> torch.Tensor:
        if name not in self._tensors:
            raise CheckpointError(f"the module has no parameter or buffer {name!r}")
        return self._tensors[name]

    def info(self, name: str) -> TensorInfo:
        tensor = self._tensor(name)
        kind = _DTYPES.get(tensor.dtype, "f32" if tensor.is_floating_point() else "i64")
        return TensorInfo(name, tuple(tensor.shape), kind)

    def read(self, name: str, rows: range | None = None) -> np.ndarray:
        return _array(_rows(self._tensor(name), rows))

    def read_stored(self, name: str, rows: range | None = None) -> np.ndarray:
        return _bits(_rows(self._tensor(name), rows))

    def require(self, names: Iterable[str]) -> None:
        for name in names:
            self._tensor(name)

    def fingerprint(self) -> str:
        """SHA-256 over the class, and every tensor's name, type, shape and values."""
        digest = hashlib.sha256(f"bessemer module 1\n{self._kind}\n".encode())
        for name, tensor in sorted({**self._tensors, **self._rest}.items()):
            digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\n".encode())
            digest.update(np.ascontiguousarray(_bits(tensor)).data)
        return digest.hexdigest()


class WithExtra:
    """A reader with some more tensors: large tables that the model computes and no file holds.

    Everything else of the inner reader (path, tokenizer, ...) stays reachable.
    """

    def __init__(self, inner: WeightReader, extra: Mapping[str, torch.Tensor]) -> None:
        self._inner = inner
        self._extra = dict(extra)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def names(self) -> list[str]:
        return sorted({*self._inner.names(), *self._extra})

    def info(self, name: str) -> TensorInfo:
        if name in self._extra:
            return TensorInfo(name, tuple(self._extra[name].shape), "f32")
        return self._inner.info(name)

    def read(self, name: str, rows: range | None = None) -> np.ndarray:
        if name in self._extra:
            return _array(_rows(self._extra[name], rows))
        return self._inner.read(name, rows)

    def read_stored(self, name: str, rows: range | None = None) -> np.ndarray:
        held = name in self._extra
        return self.read(name, rows) if held else self._inner.read_stored(name, rows)

    def require(self, names: Iterable[str]) -> None:
        self._inner.require(n for n in names if n not in self._extra)

    def fingerprint(self) -> str:
        return self._inner.fingerprint()


# --- names ---------------------------------------------------------------------------------------

# Module name -> the name that files of some architectures have.
_RENAMES = (
    (re.compile(r"\.mlp\.gate\.weight$"), ".block_sparse_moe.gate.weight"),  # mixtral
    (re.compile(r"\.mlp\.router\.weight$"), ".block_sparse_moe.gate.weight"),  # phimoe
    # granitemoe
    (re.compile(r"\.router\.weight$"), ".router.layer.weight"),
    (re.compile(r"\.experts\.gate_up_proj$"), ".input_linear.weight"),
    (re.compile(r"\.experts\.down_proj$"), ".output_linear.weight"),
    (re.compile(r"^lm_head\.weight$"), "embed_out.weight"),  # gpt_neox
)
_EXPERTS = re.compile(r"^(?P<block>.*)\.(?P<mlp>\w+)\.experts\.(?P<which>gate_up_proj|down_proj)$")
# Where one expert's matrices lie in files: the block's name (None: as in the module), then the
# matrices of the stacked parameter. Some files have the matrices of all experts in one tensor.
_EXPERT_FILES: tuple[tuple[str | None, dict[str, tuple[str, ...]]], ...] = (
    (None, {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}),
    ("block_sparse_moe", {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}),
    (None, {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}),
)


class Resolver:
    """Finds the checkpoint tensors of each parameter of a model.

    aliases: parameter name -> names of the same (tied) tensor, itself included, in order.
    file_names: further names that a parameter (or the start of its name) may have in files.
    """

    def __init__(
        self,
        checkpoint: WeightReader,
        aliases: Mapping[str, list[str]],
        file_names: Callable[[str], list[str]] | None = None,
    ) -> None:
        self._checkpoint = checkpoint
        self._file_names = file_names
        self._held = set(checkpoint.names())
        self._aliases = aliases
        self.missing: list[str] = []

    def __call__(self, name: str, type_: TensorType) -> Value:
        """An expression over `param` nodes for a parameter; a missing one is noted and named."""
        names = self._aliases.get(name, [name])
        if name != names[0] and self._differs(name, names[0]):
            log.warning("%s is tied by the config, but stored with other values: not tied", name)
            names = [name]
        for candidate in (c for n in names for c in self._candidates(n)):
            if candidate in self._held:
                self._same_shape(candidate, name, type_.shape)
                return param(candidate, type_)
        stacked = self._stacked(name, type_)
        if stacked is None:
            self.missing.append(name)
            return param(name, type_)
        return stacked

    def names(self, name: str) -> set[str]:
        """All names that a file may have a parameter under, those of tied ones among them."""
        return {c for n in self._aliases.get(name, [name]) for c in self._candidates(n)}

    def _candidates(self, name: str) -> list[str]:
        return [name, *_renamed(name), *(self._file_names(name) if self._file_names else [])]

    def _differs(self, name: str, first: str) -> bool:
        """Whether both names of a tied tensor are stored, with different values."""
        if name not in self._held or first not in self._held:
            return False
        if self._checkpoint.info(name).shape != self._checkpoint.info(first).shape:
            return True
        stored = self._checkpoint.read_stored
        return not np.array_equal(stored(name), stored(first))

    def _same_shape(self, candidate: str, name: str, shape: tuple) -> None:
        info = self._checkpoint.info(candidate)
        if tuple(info.shape) != tuple(shape):
            raise CheckpointError(
                f"tensor {candidate}: its shape {list(info.shape)} is not {list(shape)}, which the "
                f"config asks for {name}; the checkpoint belongs to another configuration"
            )

    def _stacked(self, name: str, type_: TensorType) -> Value | None:
        """A stacked expert parameter [E, N, K] from one file tensor per expert and matrix."""
        found = _EXPERTS.match(name)
        if not found:
            return None
        experts, rows, columns = type_.shape
        assert isinstance(experts, int)
        assert isinstance(rows, int)
        for mlp, matrices in _EXPERT_FILES:
            parts = matrices[found["which"]]
            for stem in self._candidates(f"{found['block']}.{mlp or found['mlp']}.experts"):
                shape = (rows // len(parts), columns)
                result = self._of_all(name, stem, parts, (experts, *shape)) or self._of_each(
                    name, stem, parts, (experts, *shape)
                )
                if result is not None:
                    return result
        return None

    def _of_all(
        self, name: str, stem: str, parts: tuple[str, ...], shape: tuple[int, int, Size]
    ) -> Value | None:
        """Matrices of `shape` [E, N, K] that hold all experts, one above the other."""
        names = [f"{stem}.{part}" for part in parts]
        if names[0] not in self._held:
            return None
        for each in names:
            self._noted(each, name, shape)
        return emit("concat", *(param(n, TensorType(DType.F32, shape)) for n in names), axis=-2)

    def _of_each(
        self, name: str, stem: str, parts: tuple[str, ...], shape: tuple[int, int, Size]
    ) -> Value | None:
        """Matrices [N, K] of one expert each, for `shape` [E, N, K]."""
        experts, rows, columns = shape
        names = [f"{stem}.{e}.{part}.weight" for e in range(experts) for part in parts]
        if names[0] not in self._held:
            return None
        for each in names:
            self._noted(each, name, (rows, columns))
        one = TensorType(DType.F32, (rows, columns))
        together = emit("concat", *(param(n, one) for n in names), axis=-2)
        return emit("reshape", together, shape=(experts, len(parts) * rows, columns))

    def _noted(self, each: str, name: str, shape: tuple) -> None:
        """Checks a tensor's shape, or notes that it is missing."""
        if each not in self._held:
            self.missing.append(each)
        else:
            self._same_shape(each, name, shape)


def _renamed(name: str) -> list[str]:
    return [p.sub(new, name) for p, new in _RENAMES if p.search(name)]


def tied_names(module: torch.nn.Module) -> dict[str, list[str]]:
    """Parameter name -> all names of the same tensor, in the module's order."""
    groups: dict[int, list[str]] = {}
    for name, tensor in module.named_parameters(remove_duplicate=False):
        groups.setdefault(id(tensor), []).append(name)
    return {name: names for names in groups.values() for name in names}


Leaf = Callable[[str, TensorType], Value]
