"""The whole network on one token, without a cache: what each stage gives, as numbers.

Two runs side by side. The reference is the NumPy reference of the graph that the artifact keeps, on
the weights that it stores, read tensor by tensor. The other is compiled code: the same groups as in
the artifact's `forward_prefill`, generated again so that no two values share memory, and read out
of the arena after the call. No session is touched.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from bessemer.artifact.layout import StoredWeight, matrix_format
from bessemer.artifact.reader import Artifact
from bessemer.errors import ArtifactError, BessemerError, UsageError
from bessemer.graph import Env, Graph, GraphError, Node, Value, parse_graph
from bessemer.graph.evaluate import bind_sizes, evaluate_node
from bessemer.runtime.cpu import default_threads, missing_features
from bessemer.runtime.engine import Engine
from bessemer.verify.compare import relative_l2, tolerance_of
from bessemer.verify.model import options_of
from bessemer.verify.rebuild import ProbeSession, link_part
from bessemer.verify.reference import PREFILL_GRAPH, graph_inputs
from bessemer.verify.stage_names import name_stages
from bessemer.verify.stored import StoredParts, read_weight

if TYPE_CHECKING:
    from bessemer.artifact.manifest import Manifest
    from bessemer.backend.target import Target
    from bessemer.codegen.generate import Generated
    from bessemer.codegen.program import Program

Progress = Callable[[str, int, int], None]  # stage, done, total

ENTRY = "forward_prefill"
# Digits of a SHA-256 that are kept: two values that differ share them by chance once in 2^64.
DIGEST_DIGITS = 16
# Ops that read a part of a weight alone, with the index of that operand.
_PART_OPERAND = {"embedding": 0, "expert_linear": 2}
_ELEMENTS = {"f32": "<f4", "f16": "<f2", "i64": "<i8", "i32": "<i4", "i8": "?"}


@dataclass(frozen=True)
class Numbers:
    """norm: the L2 norm.  digest: the first digits of the SHA-256 of the little-endian bytes."""

    norm: float
    digest: str

    @classmethod
    def of(cls, values: np.ndarray) -> Numbers:
        dense = np.ascontiguousarray(values)
        plain = dense.astype(dense.dtype.newbyteorder("<"), copy=False)
        digest = hashlib.sha256(plain.tobytes()).hexdigest()[:DIGEST_DIGITS]
        return cls(float(np.linalg.norm(dense.astype(np.float64).reshape(-1))), digest)

    def to_json(self) -> dict[str, Any]:
        return {"norm": _finite(self.norm), "hash": self.digest}


@dataclass(frozen=True)
class Stage:
    """One value of the network.

    layer: None outside of the layers.  name, of: what it is, and of which weight or op.  shape: for
    the one token.  compiled: None where compiled code was not run.  error: relative L2 error of the
    compiled value against the reference; NaN where it is not finite.
    """

    layer: int | None
    name: str
    of: str
    shape: tuple[int, ...]
    reference: Numbers
    compiled: Numbers | None = None
    error: float | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "layer": self.layer,
            "stage": self.name,
            "of": self.of,
            "shape": list(self.shape),
            "reference": self.reference.to_json(),
            "compiled": None if self.compiled is None else self.compiled.to_json(),
            "relative_l2": _finite(self.error),
        }


def _finite(number: float | None) -> float | None:
    """JSON has no NaN."""
    return number if number is not None and np.isfinite(number) else None


@dataclass(frozen=True)
class Diagnosis:
    """All stages of one token, in the order in which they are computed; the last two are the
    logits, of the code that was generated again and of the artifact's own library.

    tolerance: relative L2 error up to which compiled code and reference agree.
    note: why compiled code was not run stage by stage, if it was not.
    """

    model: str
    token: int
    stages: tuple[Stage, ...]
    tolerance: float
    note: str = ""

    @property
    def parting(self) -> Stage | None:
        """The first stage at which compiled code and reference part."""
        return next((s for s in self.stages if self.parts(s)), None)

    def parts(self, stage: Stage) -> bool:
        """Whether a stage differs by more than the tolerance, or is not finite."""
        return stage.error is not None and not stage.error <= self.tolerance

    def to_json(self) -> dict[str, Any]:
        parting = self.parting
        return {
            "model": self.model,
            "token": self.token,
            "tolerance": self.tolerance,
            "agree": parting is None,
            "first_difference": None if parting is None else self.stages.index(parting),
            "note": self.note,
            "stages": [stage.to_json() for stage in self.stages],
        }


def diagnose_first_token(
    artifact: Artifact,
    token: int,
    *,
    threads: int | None = None,
    progress: Progress = lambda stage, done, total: None,
) -> Diagnosis:
    """Run the network of an artifact on one token at position 0.

    threads: of the compiled code; the cores that this process may use when None.
    Raises UsageError for a token that the model doesn't have, ArtifactError when the artifact keeps
    no graph.
    """
    manifest = artifact.manifest
    if not 0 <= token < manifest.vocab_size:
        raise UsageError(
            f"token id {token} is none of this model: they go from 0 to {manifest.vocab_size - 1}"
        )
    graph = _kept_graph(artifact)
    generated = _generate(artifact, graph)
    values = written_values(generated.entries[ENTRY].program)
    logits = graph.outputs["logits"]
    engine = Engine.load(artifact, threads or default_threads(), "map")
    expected = reference_values(artifact, graph, token, [*values, logits], progress)
    note, ours = "", None
    try:
        progress("compiling the stages", 0, 1)
        ours = compiled_values(artifact, generated, engine, token, values)
    except (BessemerError, ModuleNotFoundError) as error:
        note = f"compiled code was not run stage by stage: {error}"
    progress("compiling the stages", 1, 1)
    names = name_stages(graph, values)
    stages = [
        _stage(n.layer, n.name, n.of, expected[v], None if ours is None else ours[i])
        for i, (n, v) in enumerate(zip(names, values, strict=True))
    ]
    if ours is not None:
        stages.append(_stage(None, "logits", "generated again", expected[logits], ours[-1]))
    own = ProbeSession(engine).prefill([token])
    stages.append(_stage(None, "logits", "the artifact's library", expected[logits], own))
    return Diagnosis(manifest.name, token, tuple(stages), tolerance_of(manifest), note)


def _stage(
    layer: int | None, name: str, of: str, expected: np.ndarray, ours: np.ndarray | None
) -> Stage:
    reference = Numbers.of(expected)
    if ours is None:
        return Stage(layer, name, of, expected.shape, reference)
    ours = ours.reshape(expected.shape)
    return Stage(
        layer, name, of, expected.shape, reference, Numbers.of(ours), relative_l2(ours, expected)
    )


def _kept_graph(artifact: Artifact) -> Graph:
    """The lowered prefill graph, its params as they are stored."""
    path = artifact.folder / PREFILL_GRAPH
    try:
        graph = parse_graph(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ArtifactError(
            f"{artifact.folder} keeps no {PREFILL_GRAPH}: compile the model again"
        ) from None
    except (GraphError, OSError, UnicodeDecodeError) as error:
        raise ArtifactError(f"{path} can't be read: {error}: compile the model again") from None
    return replace(graph, weights={})


def _generate(artifact: Artifact, graph: Graph) -> Generated:
    """Code for one row a call, in which no two values share memory."""
    from bessemer.codegen.generate import generate
    from bessemer.compile_options import codegen_options

    manifest = artifact.manifest
    options = replace(options_of(manifest.options), chunk=1, profile=False)
    how = codegen_options(options, _target(manifest), manifest.context_length)
    stored = matrix_format(manifest.weights) or how.weights
    return generate(graph, graph, replace(how, weights=stored, keep=True))


def _target(manifest: Manifest) -> Target:
    """What the artifact was compiled for; of several levels the best that this machine has."""
    from bessemer.backend.target import Target

    options = options_of(manifest.options)
    levels = Target.parse_levels(options.target, options.cpu)
    usable = [t for t in levels if not missing_features(t.required_features())]
    return (usable or list(levels[:1]))[-1]


def written_values(program: Program) -> list[Value]:
    """The values that calls write to memory of their own, in the order of the calls."""
    by_buffer: dict[Any, Value] = {}
    for value, view in program.values.items():
        if view.buffer.kind == "arena":
            by_buffer.setdefault(view.buffer, value)
    written = [
        access.view.buffer
        for call in program.calls
        for access in call.accesses
        if access.role == "out" and access.view.buffer in by_buffer
    ]
    return [by_buffer[buffer] for buffer in dict.fromkeys(written)]


# -- the reference ---------------------------------------------------------------------------------


def reference_values(
    artifact: Artifact,
    graph: Graph,
    token: int,
    wanted: Sequence[Value],
    progress: Progress = lambda stage, done, total: None,
) -> dict[Value, np.ndarray]:
    """The NumPy reference of `wanted` for one token at position 0. Of a table the one row is read,
    of experts the chosen ones; any other weight is read when it is used, and dropped.
    """
    weights = {w.name: w for w in artifact.manifest.weights}
    inputs = graph_inputs(graph, [token], 0)
    env = Env(inputs=inputs, sizes=bind_sizes(graph, inputs))
    nodes = graph.nodes()
    left = Counter(value for node in nodes for value in node.inputs)
    kept = frozenset(wanted)
    values: dict[Value, np.ndarray] = {}
    found: dict[Value, np.ndarray] = {}
    stage = "running the reference"
    for i, node in enumerate(nodes):
        if node.op == "param":
            continue
        operands = [
            _operand(artifact, weights, node, at, v) if v.op == "param" else values[v]
            for at, v in enumerate(node.inputs)
        ]
        values.update(zip(node.outputs, evaluate_node(node, operands, env), strict=True))
        found.update({v: values[v] for v in node.outputs if v in kept})
        for value in node.inputs:
            left[value] -= 1
            if not left[value]:
                values.pop(value, None)
        progress(stage, i + 1, len(nodes))
    return found


def _operand(
    artifact: Artifact, weights: dict[str, StoredWeight], node: Node, at: int, value: Value
) -> Any:
    """A weight as the op reads it: all of it, or its parts when they are asked for."""
    name = str(value.node.attrs["name"])
    weight = weights.get(name)
    if weight is None:
        raise ArtifactError(
            f"{artifact.folder} stores no weight {name!r}, which its graph reads: compile the "
            "model again"
        )
    if _PART_OPERAND.get(node.op) == at:
        return StoredParts(artifact, weight)
    return read_weight(artifact, weight)


# -- compiled code ---------------------------------------------------------------------------------


def compiled_values(
    artifact: Artifact, generated: Generated, engine: Engine, token: int, values: Sequence[Value]
) -> list[np.ndarray]:
    """What compiled code computes for `values`, and after them the logits, as flat arrays.

    engine: of the artifact, whose weights and number of threads are used.
    Raises CompileError, or ArtifactError when the artifact's weights lie elsewhere than this
    version of the compiler would put them.
    """
    if tuple(generated.weights) != tuple(artifact.manifest.weights):
        raise ArtifactError("it was compiled by another version, which stores other weights")
    manifest, library = link_part(artifact, _target(artifact.manifest), generated, [ENTRY])
    part = Engine(manifest, library, library.create_pool(engine.threads), engine.weights)
    session = ProbeSession(part)
    logits = session.prefill([token])
    scratch = session.scratch
    plan = generated.entries[ENTRY]
    found = []
    for value in values:
        view = plan.program.values[value]
        start, size = plan.arena.offsets[view.buffer], plan.arena.sizes[view.buffer]
        kind = np.dtype(_ELEMENTS[view.buffer.element])
        found.append(scratch[start : start + size].view(kind).copy())
    return [*found, logits]
