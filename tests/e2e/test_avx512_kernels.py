"""Every kernel in AVX-512, run by an emulated processor: the bits that its generic lowering leaves.

The tests of the kernels run here with 16 lanes, which holds their results against NumPy; each call
is then made again there. Needs Debian's packages bochs and bochsbios.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from bessemer.backend.target import Target
from bessemer.codegen.group import CodegenTarget
from tests.codegen import attention_case, compressed_case
from tests.codegen import test_kernel_attention_decode as decode
from tests.codegen import test_kernel_attention_prefill as prefill
from tests.codegen import test_kernel_compressed as compressed
from tests.codegen import test_kernel_experts as experts
from tests.codegen import test_kernel_integer_rows as integer_rows
from tests.codegen import test_kernel_kv_update as kv_update
from tests.codegen import test_kernel_linear as linear
from tests.codegen import test_kernel_rope as rope
from tests.codegen import test_kernel_streams as streams
from tests.e2e import bochs
from tests.e2e.kernel_replay import Call, Recorder, replay_program

TRIPLE = "x86_64-linux-musl"
MODULES = (
    *(attention_case, compressed_case, decode, prefill, experts),
    *(integer_rows, kv_update, linear, rope, streams),
)


def sources() -> Iterator[tuple[str, Callable[..., None], tuple[Any, ...]]]:
    """Tests whose kernels are run: odd sizes of each kind, small integers where there are any."""
    for dtype in linear.FORMATS:
        yield "linear", linear.test_small_integers_are_exact, (dtype,)
        yield "linear", linear.test_embedding_and_row_selection, (dtype,)
    for size in ((17, 33, "f16"), (40, 96, "bf16"), (7, 40, "q8_0"), (320, 33, "q8_0")):
        yield "linear", linear.test_linear_sizes, (*size, 16)
    for rows in (linear.ROWS, 1):
        yield "linear", linear.test_epilogue, ("gelu_tanh", rows)
        for activation in ("silu", "swiglu_clamped"):
            yield "linear", linear.test_gated, (activation, rows)
    yield "linear", linear.test_few_rows, ("glu_linear", "q8_0")
    yield "linear", linear.test_one_row_in_parts_of_the_depth, ("f16",)
    yield "linear", linear.test_rows_with_a_stride, ()
    for op in ("rms_norm", "layer_norm"):
        for width in (7, 40):
            yield "norm", linear.test_norms, (op, width)
    for style in ("half", "interleaved"):
        yield "rope", rope.test_small_integers_have_the_same_bits, (style,)
        for shape in ((2, 80, 16), (5, 6, 3)):
            yield "rope", rope.test_against_the_reference, (style, 16, *shape)
    for shape in ((2, 33), (13, 64), (4, 3, 47)):
        yield "integer rows", integer_rows.test_rows, (shape, 16)
    for kv in ("f32", "f16"):
        yield "cache", kv_update.test_rows_land_where_the_layout_says, (kv, 16, 40, 20)
    for module in (prefill, decode):
        yield "attention", module.test_uniform_weights_have_the_same_bits, ()
    for name in ("odd widths", "softcap", "small window, sinks", "16 lanes"):
        yield "attention", prefill.test_chunks_against_the_reference, (name,)
        yield "attention", decode.test_lengths_against_the_reference, (name,)
    for one_row in (False, True):
        yield "experts", experts.test_small_integers_have_the_same_bits, (one_row, "f16")
    for name in ("gpt-oss up", "mixtral down"):
        yield "experts", experts.test_rows_against_the_reference, (name, 16)
    yield "streams", streams.test_streams, (3, 37, 16)
    yield "streams", streams.test_round_trip_has_the_same_bits, ("e4m3", 3, 16)
    yield "compressed", compressed.test_compressed_rows, (3, True, False)
    yield "compressed", compressed.test_choice, (3, (5,), False)
    yield "compressed", compressed.test_attention, (5, 36, 16)


KINDS = sorted({kind for kind, _, _ in sources()})


@pytest.fixture(scope="module")
def calls() -> list[Call]:
    """What the tests above call, noted while they run here."""
    bochs.require()
    wide = CodegenTarget(16, 32, 64, "f32", "", True)
    with pytest.MonkeyPatch.context() as patch:
        recorder = Recorder(patch, MODULES, wide)
        for kind, test, arguments in sources():
            recorder.test = f"{kind}: {test.__name__}{arguments}"
            test(*arguments)
    return recorder.calls


@pytest.fixture(scope="module")
def differences(calls: list[Call], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Where the kernels of a processor with VNNI left other bytes, by the names of the tests."""
    out = tmp_path_factory.mktemp("kernels")
    machine = Target.parse(TRIPLE, "v4+avx512vnni")
    program, file = replay_program(calls, machine, out / "program")
    files = {"/replay": program, "/calls.bin": file}
    (done,) = bochs.run(files, [["/replay", "/calls.bin"]], out / "pc")
    assert done.status == 0, done
    *lines, last = done.stdout.decode().splitlines()
    assert last == f"{len(calls)} calls"
    return [f"{calls[int(line.split()[1].rstrip(','))].test}: {line}" for line in lines]


@pytest.mark.parametrize("kind", KINDS)
def test_same_bits(differences: list[str], calls: list[Call], kind: str) -> None:
    assert any(call.test.startswith(f"{kind}: ") for call in calls)
    assert [line for line in differences if line.startswith(f"{kind}: ")] == []
