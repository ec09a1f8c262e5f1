"""Weights stored as q8_0, end to end: numbers against transformers on the very weights that are
stored, and quantised checkpoints that keep theirs.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bessemer.artifact.packing import unpack
from bessemer.artifact.reader import open_artifact
from bessemer.artifact.writer import weight_blocks
from bessemer.artifact_parts import stored_reader
from bessemer.compile_options import CompileOptions
from bessemer.compiler import compile_model
from bessemer.graph import evaluate_value
from bessemer.importer.checkpoint import open_checkpoint
from bessemer.runtime.model import Model
from bessemer.verify.reference import kept_graphs
from bessemer.verify.stored import StoredTensors
from tests.e2e.compiled import compiled, error, load, reference, tiny_pair, token_ids
from tests.importer.checkpoint.builders import LLAMA_METADATA, llama_tensors, tiny_gguf

# Of logits: activations are off by 2^-15 of the largest of their block, and the attention of these
# models is peaked. Typical is 2e-4; with activations of 8 bits it would be 5e-2.
INTEGER_ERROR = 2e-3
STORAGE: dict[str, Any] = {"weights": "q8_0", "chunk": 64}
COUNT = 70
# Experts, a tied head, and depths (48, 56) that end within a block.
MODELS = ("llama", "gemma2", "qwen3_moe")
FORMS = ("q8_0", "q4_0", "q5_0")


def on_stored_weights(model_type: str) -> torch.nn.Module:
    """transformers' model with what the artifact stores, decoded."""
    artifact = open_artifact(compiled(model_type, **STORAGE))
    read = StoredTensors(artifact, kept_graphs(artifact).expressions).read
    model = copy.deepcopy(tiny_pair(model_type)[1])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(read(name)))
    return model


@pytest.mark.parametrize("model_type", MODELS)
def test_prefill_and_decode(model_type: str) -> None:
    ids = token_ids(COUNT)
    want = reference(on_stored_weights(model_type), ids)
    session = load(model_type, **STORAGE).session()
    for length in (1, 3, 33, 65):
        session.rewind(0)
        got = session.prefill(ids[:length], all_logits=True)
        assert error(got, want[:length]) < INTEGER_ERROR, length
    for i in range(65, COUNT):
        assert error(session.decode(ids[i]), want[i]) < INTEGER_ERROR, i
    for piece in (1, 7, 64):
        session.rewind(0)
        rows = [
            session.prefill(ids[at : at + piece], all_logits=True) for at in range(0, COUNT, piece)
        ]
        assert error(np.concatenate(rows), want) < INTEGER_ERROR, piece


@pytest.mark.parametrize("model_type", MODELS)
def test_same_bits_for_every_thread_count_and_run(model_type: str) -> None:
    ids = token_ids(40)
    found = []
    for threads in (1, 2, 3, 2):
        session = load(model_type, threads, **STORAGE).session()
        rows = [session.prefill(ids[:-5], all_logits=True)]
        found.append(np.concatenate([*rows, *(session.decode(i)[None] for i in ids[-5:])]))
    for other in found[1:]:
        assert np.array_equal(found[0], other)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """GGUF files of one llama whose matrices are all of one format, small enough that its attention
    is no choice of single tokens.
    """
    folder = tmp_path_factory.mktemp("gguf")
    found = {}
    for form in FORMS:
        tensors = {
            name: (values * np.float32(0.2 if values.ndim == 2 else 1), kind)
            for name, (values, kind) in llama_tensors(form).items()
        }
        found[form] = tiny_gguf(folder / f"{form}.gguf", tensors, LLAMA_METADATA)
    return found


@pytest.fixture(scope="module")
def folder(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Q4_0 file, compiled without a word about weights."""
    options = CompileOptions(kv="f32", context=40, chunk=16)
    return compile_model(checkpoints["q4_0"], options, tmp_path_factory.mktemp("default") / "q4_0")


def test_a_quantised_checkpoint_is_stored_as_q8_0(
    folder: Path, checkpoints: dict[str, Path]
) -> None:
    """Unasked, with its own numbers; and the compiled model computes with these."""
    from bessemer.importer.reference import reference_logits

    assert open_artifact(folder).manifest.options["weights"] == "q8_0"
    ids = [i % 50 for i in token_ids(21)]
    want = reference_logits(checkpoints["q4_0"])(ids)
    session = Model.load(folder, threads=2).session()
    got = [session.prefill(ids[:15], all_logits=True), *(session.decode(i)[None] for i in ids[15:])]
    assert error(np.concatenate(got), want) < INTEGER_ERROR


@pytest.mark.parametrize("form", FORMS)
def test_no_number_of_a_quantised_checkpoint_is_changed(
    form: str, folder: Path, checkpoints: dict[str, Path]
) -> None:
    artifact = open_artifact(folder)
    expressions = kept_graphs(artifact).expressions
    checkpoint = open_checkpoint(checkpoints[form])
    blocks_of = weight_blocks(expressions, checkpoint.read, stored_reader(checkpoint))
    quantised = 0
    for weight in artifact.manifest.weights:
        data = np.concatenate(list(blocks_of(weight)))
        held = evaluate_value(expressions[weight.name], checkpoint.read)
        assert np.array_equal(unpack(data, weight), held), weight.name
        quantised += weight.dtype == "q8_0"
    # The table, which is the head as well; of each layer q/k/v, out, gate/up and down.
    assert quantised == 1 + 2 * 4
