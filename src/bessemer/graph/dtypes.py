"""Element types of graph values. Storage types of weights and KV are not graph types."""

from __future__ import annotations

from enum import Enum

import numpy as np


class DType(str, Enum):
    """Element type of a value. Activations are f32; indices i64; conditions bool."""

    F32 = "f32"
    F16 = "f16"
    I64 = "i64"
    I32 = "i32"
    BOOL = "bool"

    def __str__(self) -> str:
        return self.value

    @property
    def numpy(self) -> np.dtype:
        """The NumPy dtype with the same values."""
        return np.dtype(_NUMPY[self.value])

    @property
    def is_float(self) -> bool:
        return self in (DType.F32, DType.F16)

    @property
    def size(self) -> int:
        """Bytes of one element in memory."""
        return self.numpy.itemsize

    @classmethod
    def of(cls, dtype: np.dtype | type) -> DType:
        """The graph type of a NumPy dtype; f64 counts as f32, small integers as i64."""
        kind = np.dtype(dtype)
        if kind == np.bool_:
            return cls.BOOL
        if kind == np.float16:
            return cls.F16
        if kind.kind == "f":
            return cls.F32
        if kind == np.int32:
            return cls.I32
        if kind.kind in "iu":
            return cls.I64
        raise TypeError(f"no graph type for NumPy dtype {kind}")


_NUMPY = {"f32": np.float32, "f16": np.float16, "i64": np.int64, "i32": np.int32, "bool": np.bool_}
