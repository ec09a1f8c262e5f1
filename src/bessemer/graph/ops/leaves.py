"""Leaves: inputs of a call, checkpoint parameters, constants, and named state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bessemer.graph.core import TensorType
from bessemer.graph.dims import evaluate_size
from bessemer.graph.dtypes import DType
from bessemer.graph.schema import REQUIRED, Env, OpSchema, register


def _declared(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> TensorType:
    return TensorType(DType(attrs["dtype"]), tuple(attrs["shape"]))


def _constant_type(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> TensorType:
    value = attrs["value"]
    return TensorType(DType.of(value.dtype), tuple(value.shape))


def _input(attrs: Mapping[str, Any], env: Env) -> np.ndarray:
    return np.asarray(env.inputs[attrs["name"]])


def _param(attrs: Mapping[str, Any], env: Env) -> np.ndarray:
    if env.read is None:
        raise ValueError(f"no reader for param {attrs['name']}")
    return env.read(attrs["name"])


def _state(attrs: Mapping[str, Any], env: Env) -> np.ndarray:
    if attrs["name"] not in env.states:
        shape = [evaluate_size(s, env.sizes) for s in attrs["shape"]]
        env.states[attrs["name"]] = np.zeros(shape, DType(attrs["dtype"]).numpy)
    return env.states[attrs["name"]]


_TYPED = {"name": REQUIRED, "dtype": REQUIRED, "shape": REQUIRED}
register(
    OpSchema("input", (0, 0), _TYPED, _declared, _input, needs_env=True, doc="Given by a call.")
)
register(
    OpSchema("param", (0, 0), _TYPED, _declared, _param, needs_env=True, doc="A weight, by name.")
)
register(
    OpSchema("state", (0, 0), _TYPED, _declared, _state, needs_env=True, doc="Zeros at the start.")
)
register(
    OpSchema(
        "constant",
        (0, 0),
        {"value": REQUIRED},
        _constant_type,
        lambda attrs: attrs["value"],
        doc="A small array, kept in the graph.",
    )
)
