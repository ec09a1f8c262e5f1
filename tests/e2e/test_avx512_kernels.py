"""Every kernel in AVX-512, run by an emulated processor: the bits that its generic lowering leaves.

The tests of the kernels run here with 16 lanes, which holds their results against NumPy; each call
is then made again there. Needs Debian's packages bochs and bochsbios.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
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


def sources() -> Iterator[tuple[Callable[..., None], tuple[Any, ...]]]:
    """Tests whose kernels are run: odd sizes of each kind, small integers where there are any."""
    for dtype in linear.FORMATS:
        yield linear.test_small_integers_are_exact, (dtype,)
        yield linear.test_embedding_and_row_selection, (dtype,)
    for size in ((17, 33, "f16"), (40, 96, "bf16"), (7, 40, "q8_0"), (320, 33, "q8_0")):
        yield linear.test_linear_sizes, (*size, 16)
    for rows in (linear.ROWS, 1):
        yield linear.test_epilogue, ("gelu_tanh", rows)
        for activation in ("silu", "swiglu_clamped"):
            yield linear.test_gated, (activation, rows)
    yield linear.test_few_rows, ("glu_linear", "q8_0")
    yield linear.test_one_row_in_parts_of_the_depth, ("f16",)
    yield linear.test_rows_with_a_stride, ()
    for op in ("rms_norm", "layer_norm"):
        for width in (7, 40):
            yield linear.test_norms, (op, width)
    for style in ("half", "interleaved"):
        yield rope.test_small_integers_have_the_same_bits, (style,)
        for shape in ((2, 80, 16), (5, 6, 3)):
            yield rope.test_against_the_reference, (style, 16, *shape)
    for shape in ((2, 33), (13, 64), (4, 3, 47)):
        yield integer_rows.test_rows, (shape, 16)
    for kv in ("f32", "f16"):
        yield kv_update.test_rows_land_where_the_layout_says, (kv, 16, 40, 20)
    for module in (prefill, decode):
        yield module.test_uniform_weights_have_the_same_bits, ()
    for name in ("odd widths", "softcap", "small window, sinks", "16 lanes"):
        yield prefill.test_chunks_against_the_reference, (name,)
        yield decode.test_lengths_against_the_reference, (name,)
    for one_row in (False, True):
        yield experts.test_small_integers_have_the_same_bits, (one_row, "f16")
    for name in ("gpt-oss up", "mixtral down"):
        yield experts.test_rows_against_the_reference, (name, 16)
    yield streams.test_streams, (3, 37, 16)
    yield streams.test_round_trip_has_the_same_bits, ("e4m3", 3, 16)
    yield compressed.test_compressed_rows, (3, True, False)
    yield compressed.test_choice, (3, (5,), False)
    yield compressed.test_attention, (5, 36, 16)


def noted_calls() -> list[Call]:
    """What the tests above call, noted while they run here."""
    wide = CodegenTarget(16, 32, 64, "f32", "", True)
    with pytest.MonkeyPatch.context() as patch:
        recorder = Recorder(patch, MODULES, wide)
        for test, arguments in sources():
            recorder.test = f"{test.__module__}.{test.__name__}{arguments}"
            test(*arguments)
    return recorder.calls


def test_same_bits(tmp_path: Path) -> None:
    """All memory of every call, by a processor with VNNI."""
    bochs.require()
    calls = noted_calls()
    machine = Target.parse(TRIPLE, "v4+avx512vnni")
    program, file = replay_program(calls, machine, tmp_path / "program")
    files = {"/replay": program, "/calls.bin": file}
    (done,) = bochs.run(files, [["/replay", "/calls.bin"]], tmp_path / "pc")
    assert done.status == 0, done
    *lines, last = done.stdout.decode().splitlines()
    assert last == f"{len(calls)} calls"
    assert [f"{calls[int(line.split()[1].rstrip(','))].test}: {line}" for line in lines] == []
