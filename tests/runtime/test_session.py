"""Sessions over a real library: feeding, moving back, forking, cancelling, threads."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bessemer.artifact.manifest import RopeSwitch
from bessemer.errors import ContextLengthError, GenerationError, UsageError
from bessemer.runtime.interrupt import StepCancelled
from bessemer.runtime.session import Session

from . import toy


def text(count: int, seed: int = 0) -> list[int]:
    """Tokens without the ones that do something special."""
    rng = np.random.default_rng(seed)
    plain = [t for t in range(toy.VOCAB) if t not in (toy.NAN, toy.SLOW, toy.STRAY)]
    return [int(t) for t in rng.choice(plain, count)]


def same(logits: np.ndarray, tokens: Sequence[int], **options: bool) -> None:
    assert logits.dtype == np.float32
    assert np.array_equal(logits, toy.expected(tokens, **options))


@pytest.fixture
def session(tmp_path: Path) -> Session:
    return toy.toy_session(tmp_path)


# -- feeding --------------------------------------------------------------------------------------


def test_k01_prefill_generate_append(session: Session) -> None:
    ids = text(12)
    same(session.prefill(ids[:5]), ids[:5])
    for count in (6, 7, 8):
        same(session.decode(ids[count - 1]), ids[:count])
    same(session.prefill(ids[8:]), ids)
    assert session.position == 12
    assert session.tokens == ids


@pytest.mark.parametrize("size", [1, 7, 8, 9, 64, 200])
def test_k14_any_split_of_a_prompt(session: Session, size: int) -> None:
    ids = text(200)
    for start in range(0, 200, size):
        logits = session.prefill(ids[start : start + size])
        same(logits, ids[: start + size])
    assert session.position == 200


@pytest.mark.parametrize("named", [False, True])
def test_decoding_from_the_first_token(tmp_path: Path, named: bool) -> None:
    session = toy.toy_session(tmp_path, named=named)
    ids = text(100)
    for count in range(1, 101):
        same(session.decode(ids[count - 1]), ids[:count], named=named)


def test_all_logits(session: Session) -> None:
    ids = text(40)
    session.prefill(ids[:11])
    logits = session.prefill(ids[11:], all_logits=True)
    assert logits.shape == (29, toy.VOCAB)
    for row in range(29):
        same(logits[row], ids[: 12 + row])


def test_logits_are_copies(session: Session) -> None:
    first = session.decode(3)
    kept = first.copy()
    second = session.decode(4)
    assert np.array_equal(first, kept)
    second[:] = 0
    assert session.decode(5).any()


def test_numpy_ids(session: Session) -> None:
    for kind in (np.int64, np.int32, np.uint8):
        session.rewind(0)
        same(session.prefill(np.array([1, 2, 3], kind)), [1, 2, 3])
    same(session.decode(np.int64(4)), [1, 2, 3, 4])


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1, toy.VOCAB], "id 50 is none of this model: they go from 0 to 49"),
        ([-1], "id -1"),
        ([1 << 40], "id 1099511627776"),
        ([], "at least one"),
        ([[1, 2]], "sequence"),
        ([1, 1.5], "token id 1 is 1.5; it must be a whole number"),
        (np.array([1.0]), "token id 0 is 1.0"),
        (["a"], "token id 0 is 'a'"),
        ([True], "token id 0 is True"),
        ([3, 1 << 70], f"id {1 << 70} is none"),
        ([[1], [2, 3]], "sequence of whole numbers"),
        ("12", "token ids are '12'"),
        (b"12", "sequence of whole numbers"),
        (None, "token ids are None"),
        ({1: 2}, "token ids are"),
    ],
)
def test_bad_ids_never_reach_the_code(session: Session, ids: Any, message: str) -> None:
    session.prefill([1, 2])
    with pytest.raises(UsageError, match=message):
        session.prefill(ids)
    assert session.position == 2
    same(session.decode(3), [1, 2, 3])


def test_the_end_of_the_context(tmp_path: Path) -> None:
    session = toy.toy_session(tmp_path, capacity=64)
    ids = text(70)
    with pytest.raises(ContextLengthError, match=r"65 more tokens after 0 .* holds 64"):
        session.prefill(ids[:65])
    assert session.position == 0
    same(session.prefill(ids[:64]), ids[:64])
    for call in (lambda: session.decode(1), lambda: session.prefill([1])):
        with pytest.raises(ContextLengthError, match=r"1 more tokens after 64 make 65.* holds 64"):
            call()
    assert session.position == 64
    session.rewind(63)
    same(session.decode(ids[63]), ids[:64])


def test_nan_is_an_error_and_the_session_lives(session: Session) -> None:
    ids = text(6)
    session.prefill(ids)
    with pytest.raises(GenerationError, match=r"NaN at position 6"):
        session.decode(toy.NAN)
    with pytest.raises(GenerationError, match=r"NaN at position 16"):
        session.prefill([*text(10), toy.NAN])
    assert session.tokens == ids
    same(session.decode(3), [*ids, 3])


# -- moving back ----------------------------------------------------------------------------------


@pytest.mark.parametrize("named", [False, True])
def test_k11_rewind_to_zero(tmp_path: Path, named: bool) -> None:
    session = toy.toy_session(tmp_path, named=named)
    session.prefill(text(5))
    session.rewind(0)
    assert session.position == 0
    same(session.prefill([1, 2, 3]), [1, 2, 3], named=named)


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("keep", [1, 60, 150, 190, 199, 200])
def test_rewind_keeps_the_first(tmp_path: Path, keep: int, named: bool) -> None:
    session = toy.toy_session(tmp_path, named=named)
    ids = text(200)
    session.prefill(ids)
    session.rewind(keep)
    assert session.tokens == ids[:keep]
    same(session.decode(5), [*ids[:keep], 5], named=named)
    # And from there on, over the ring's end, as if nothing had been.
    more = text(50, seed=2)
    same(session.prefill(more), [*ids[:keep], 5, *more], named=named)


def test_logits_again_of_the_last_kept(session: Session) -> None:
    ids = text(20)
    first = session.prefill(ids)
    session.rewind(19)
    assert np.array_equal(session.decode(ids[19]), first)


def test_a_short_rewind_feeds_nothing_again(session: Session) -> None:
    ids = text(200)
    session.prefill(ids)
    steps = counted(session)
    session.rewind(180)
    same(session.decode(1), [*ids[:180], 1])
    assert steps == [1]
    session.rewind(30)  # beyond the ring of 64 rows
    same(session.decode(1), [*ids[:30], 1])
    assert sum(steps) == 1 + 31


def test_many_rewinds_one_after_the_other(session: Session) -> None:
    rng = np.random.default_rng(5)
    held: list[int] = []
    for round_ in range(60):
        new = text(int(rng.integers(1, 60)), seed=round_)
        if len(held) + len(new) <= toy.CAPACITY:
            same(session.prefill(new), [*held, *new])
            held += new
        keep = int(rng.integers(max(0, len(held) - 70), len(held) + 1))
        session.rewind(keep)
        held = held[:keep]
    assert session.tokens == held


@pytest.mark.parametrize("bad", [-1, 4, 1.5, True, None])
def test_a_bad_rewind(session: Session, bad: object) -> None:
    session.prefill([1, 2, 3])
    with pytest.raises(UsageError, match=r"rewind to|tokens to keep"):
        session.rewind(bad)  # type: ignore[arg-type]
    assert session.position == 3


@pytest.mark.parametrize("bad", ["a", None, 1.5, [1], True])
def test_a_bad_token(session: Session, bad: object) -> None:
    with pytest.raises(UsageError, match="token"):
        session.decode(bad)  # type: ignore[arg-type]
    assert session.position == 0


@pytest.mark.parametrize("bad", [None, 5, "", b"x", "a\0b"])
def test_a_path_that_is_none(session: Session, bad: object) -> None:
    for call in (session.save, session.load):
        with pytest.raises(UsageError, match="it must be a path"):
            call(bad)  # type: ignore[arg-type]


# -- rotary factors that depend on the length ----------------------------------------------------


def counted(session: Session) -> list[int]:
    """Record the number of tokens of each step from now on."""
    steps: list[int] = []
    original = session._step

    def step(function: object, start: int, end: int, out: np.ndarray) -> None:
        steps.append(end - start)
        original(function, start, end, out)

    session._step = step  # type: ignore[method-assign]
    return steps


def test_longrope_feeds_again_once_when_crossing(tmp_path: Path) -> None:
    # The toy's regime is the length beyond the threshold: with "dynamic" each step differs.
    session = toy.toy_session(tmp_path, rope=RopeSwitch("dynamic", 20))
    ids = text(30)
    steps = counted(session)
    same(session.prefill(ids[:19]), ids[:19])
    same(session.decode(ids[19]), ids[:20])
    assert sum(steps) == 20
    same(session.decode(ids[20]), ids[:21])
    assert sum(steps) == 20 + 21
    same(session.decode(ids[21]), ids[:22])
    assert sum(steps) == 20 + 21 + 22
    same(session.prefill(ids[22:]), ids)
    session.rewind(10)
    same(session.decode(ids[10]), ids[:11])


def test_the_regimes_of_ropes() -> None:
    long = RopeSwitch("longrope", 20)
    assert long.regime(1) == long.regime(20) != long.regime(21) == long.regime(4000)
    dynamic = RopeSwitch("dynamic", 20)
    assert dynamic.regime(1) == dynamic.regime(20)
    assert len({dynamic.regime(n) for n in (20, 21, 22)}) == 3


def test_longrope_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = toy.toy_session(tmp_path)
    session._rope = RopeSwitch("longrope", 20)
    ids = text(40)
    steps = counted(session)
    session.prefill(ids[:20])
    for token in ids[20:25]:
        session.decode(token)
    assert sum(steps) == 20 + 21 + 4
    session.rewind(15)
    session.decode(1)
    assert sum(steps) == 20 + 21 + 4 + 16


# -- copies ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 5, 33, 200])
@pytest.mark.parametrize("named", [False, True])
def test_a_fork_goes_its_own_way(tmp_path: Path, count: int, named: bool) -> None:
    session = toy.toy_session(tmp_path, named=named)
    ids = text(count)
    if ids:
        session.prefill(ids)
    other = session.fork()
    assert other.tokens == ids
    same(other.prefill([1, 2]), [*ids, 1, 2], named=named)
    same(session.decode(3), [*ids, 3], named=named)
    same(other.decode(4), [*ids, 1, 2, 4], named=named)
    assert session.tokens == [*ids, 3]


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("keep", [0, 50, 190, 200])
def test_save_and_load(tmp_path: Path, named: bool, keep: int) -> None:
    engine = toy.toy_engine(tmp_path, named=named)
    session = Session(engine)
    ids = text(200)
    session.prefill(ids)
    session.rewind(keep)
    session.save(tmp_path / "kept.session")
    other = Session(engine)
    other.prefill([9, 9, 9])
    other.load(tmp_path / "kept.session")
    assert other.tokens == ids[:keep]
    same(other.decode(2), [*ids[:keep], 2], named=named)
    assert sorted(p.name for p in tmp_path.iterdir() if "kept" in p.name) == ["kept.session"]


def test_a_session_file_that_is_not_right(tmp_path: Path) -> None:
    session = toy.toy_session(tmp_path)
    session.prefill(text(20))
    path = tmp_path / "kept"
    session.save(path)
    data = path.read_bytes()
    for at in (3, 60, len(data) - 5):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(UsageError, match=r"damaged|no saved session"):
            session.load(path)
    for cut in (10, 100, len(data) - 1):
        path.write_bytes(data[:cut])
        with pytest.raises(UsageError, match=r"damaged|no saved session"):
            session.load(path)
    path.write_bytes(data)
    other = toy.toy_session(tmp_path, capacity=128)
    with pytest.raises(UsageError, match="another model"):
        other.load(path)
    with pytest.raises(UsageError, match="can't be read"):
        session.load(tmp_path / "nothing")
    with pytest.raises(UsageError, match="can't be written"):
        session.save(tmp_path / "no" / "folder")
    assert session.position == 20
    same(session.decode(1), [*text(20), 1])


# -- cancelling -----------------------------------------------------------------------------------


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("held", [6, 150])
@pytest.mark.parametrize("before", [0, 20])
def test_cancel_from_another_thread(tmp_path: Path, held: int, named: bool, before: int) -> None:
    session = toy.toy_session(tmp_path, named=named)
    ids = text(held)
    session.prefill(ids)
    timer = threading.Timer(0.1, session.cancel)
    timer.start()
    with pytest.raises(StepCancelled):
        session.prefill([*text(before), toy.SLOW, *text(5)])
    assert session.tokens == ids
    same(session.decode(3), [*ids, 3], named=named)


def test_a_cancel_of_nothing_is_forgotten(session: Session) -> None:
    session.cancel()
    same(session.decode(3), [3])


def test_a_stray_signal_does_not_stop_a_step(session: Session) -> None:
    # The toy reports a cancelled step that nobody asked for: it is run again.
    same(session.prefill([1, toy.STRAY, 2]), [1, toy.STRAY, 2])
    same(session.decode(toy.STRAY), [1, toy.STRAY, 2, toy.STRAY])


def interrupt_after(seconds: float) -> None:
    threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)).start()


@pytest.mark.parametrize("call", ["prefill", "decode"])
def test_r04_ctrl_c_inside_a_step(session: Session, call: str) -> None:
    ids = text(40)
    session.prefill(ids)

    def slow() -> None:
        interrupt_after(0.1)
        session.decode(toy.SLOW) if call == "decode" else session.prefill([1, toy.SLOW, 2])

    for _ in range(2):
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            slow()
        assert time.monotonic() - began < 10  # the step would take 20 s by itself
        assert session.tokens == ids
    same(session.decode(3), [*ids, 3])
    assert signal.set_wakeup_fd(-1) == -1


def test_a_handler_that_goes_on(session: Session) -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        interrupt_after(0.1)
        interrupt_after(0.3)
        stop = threading.Timer(0.6, session.cancel)
        stop.start()
        with pytest.raises(StepCancelled):
            session.prefill([1, toy.SLOW])
        assert len(seen) == 2
    finally:
        signal.signal(signal.SIGINT, before)
    same(session.decode(3), [3])


def test_under_asyncio_the_loop_keeps_its_wakeup(session: Session) -> None:
    import asyncio

    async def work() -> np.ndarray:
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, lambda: None)
        before = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(before)
        assert before != -1
        logits = session.prefill([1, 2, 3])
        assert signal.set_wakeup_fd(before) == before
        return logits

    same(asyncio.run(work()), [1, 2, 3])


# -- threads and processes ------------------------------------------------------------------------


def test_a_second_call_at_once_is_an_error(session: Session) -> None:
    outcome: list[BaseException] = []

    def run() -> None:
        try:
            session.prefill([1, toy.SLOW])
        except BaseException as error:
            outcome.append(error)

    worker = threading.Thread(target=run)
    worker.start()
    time.sleep(0.1)
    for call in (
        lambda: session.decode(1),
        lambda: session.rewind(0),
        session.fork,
    ):
        with pytest.raises(UsageError, match="in use by another call"):
            call()
    session.cancel()
    worker.join()
    assert isinstance(outcome[0], StepCancelled)
    same(session.prefill([1, 2]), [1, 2])


def test_sessions_in_several_threads(tmp_path: Path) -> None:
    engine = toy.toy_engine(tmp_path)
    errors: list[BaseException] = []

    def run(seed: int) -> None:
        try:
            session = Session(engine)
            ids = text(60, seed)
            same(session.prefill(ids[:30]), ids[:30])
            for count in range(31, 61):
                same(session.decode(ids[count - 1]), ids[:count])
        except BaseException as error:
            errors.append(error)

    workers = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not errors


@pytest.mark.parametrize("threads", [1, 5])
def test_thread_counts(tmp_path: Path, threads: int) -> None:
    session = toy.toy_session(tmp_path, threads=threads)
    ids = text(30)
    logits = session.prefill(ids, all_logits=True)
    for row in range(30):
        same(logits[row], ids[: row + 1])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_goes_on(tmp_path: Path) -> None:
    script = f"""
import os, sys, pathlib
sys.path.append({str(Path(__file__).parents[1])!r})
from tests.runtime import toy
session = toy.toy_session(pathlib.Path({str(tmp_path)!r}))
session.prefill([1, 2, 3])
child = os.fork()
good = (session.decode(4) == toy.expected([1, 2, 3, 4])).all()
if child == 0:
    os._exit(0 if good else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) or not good)
"""
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0


def resident() -> int:
    with open("/proc/self/statm") as stream:
        return int(stream.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
def test_r06_memory_stays_flat(tmp_path: Path) -> None:
    engine = toy.toy_engine(tmp_path, capacity=8192, chunk=64)

    def rounds(count: int) -> None:
        for _ in range(count):
            session = Session(engine)
            session.prefill([1] * 300)
            session.decode(1)

    rounds(200)
    gc.collect()
    before = resident()
    rounds(1800)
    gc.collect()
    assert resident() - before < 4 << 20


def test_c14_the_same_buffers(session: Session) -> None:
    addresses = [m.allocated for m in session._memrefs]
    session.prefill(text(16))
    session.prefill(text(32))
    session.rewind(0)
    session.prefill(text(5))
    assert [m.allocated for m in session._memrefs] == addresses
    for memref in session._memrefs:
        # What compiled code sees of each lies inside.
        assert memref.allocated <= memref.aligned < memref.allocated + 8 * session.capacity


def test_a_session_is_not_saved_over_the_model(tmp_path: Path) -> None:
    session = toy.toy_session(tmp_path)
    for name in ("weights.bin", "manifest.json"):
        before = (tmp_path / "toy" / name).read_bytes()
        (tmp_path / f"to {name}").symlink_to(tmp_path / "toy" / name)
        for file in (tmp_path / "toy" / name, tmp_path / f"to {name}"):
            with pytest.raises(UsageError, match="a file of the model"):
                session.save(file)
        assert (tmp_path / "toy" / name).read_bytes() == before
