"""Sessions of the C API on the toy, whose answers depend on all that a session must get right."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bessemer.artifact.manifest import RopeSwitch
from tests.embedding import c_api
from tests.embedding.c_api import Api, CError, CModel, CSession
from tests.embedding.toys import write_c_toy
from tests.runtime import toy
from tests.runtime.toy import expected


def text(count: int, seed: int = 0) -> list[int]:
    """Ids without the toy's special ones."""
    ids = np.random.default_rng(seed).integers(14, toy.VOCAB, count)
    return [int(i) for i in ids]


def open_toy(folder: Path, threads: int = 2, **options: Any) -> CModel:
    path = write_c_toy(folder / "toy", **options)
    return CModel(Api(path / "model.so"), path, threads=threads)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CModel:
    return open_toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def named_model(tmp_path_factory: pytest.TempPathFactory) -> CModel:
    return open_toy(tmp_path_factory.mktemp("toy"), named=True)


@pytest.fixture
def session(model: CModel) -> CSession:
    return model.session()


def same(got: np.ndarray, tokens: list[int], named: bool = False) -> None:
    np.testing.assert_array_equal(got, expected(tokens, named=named))


def refused(status: int, words: str, call: Callable[[], object]) -> None:
    with pytest.raises(CError, match=words) as caught:
        call()
    assert caught.value.status == status


@pytest.mark.parametrize("size", [1, 3, 8, 9, 16, 100])
def test_any_split_of_a_prompt(session: CSession, size: int) -> None:
    ids = text(100)
    for at in range(0, 100, size):
        same(session.prefill(ids[at : at + size]), ids[: at + size])
    assert session.position == 100
    assert session.tokens == ids


def test_decoding_from_the_first_token(named_model: CModel) -> None:
    session = named_model.session()
    ids = text(120)
    for end in range(1, 121):
        same(session.decode(ids[end - 1]), ids[:end], named=True)


def test_chosen_rows(session: CSession) -> None:
    """Any ascending rows, across chunks; the last count by number; none at all."""
    ids = text(40)
    session.prefill(ids[:7])
    rows = [0, 3, 8, 9, 10, 31]
    got = session.prefill_rows(ids[7:], rows)
    for row, logits in zip(rows, got, strict=True):
        np.testing.assert_array_equal(logits, expected(ids[: 7 + row + 1]))
    assert session.logits is None
    session.rewind(7)
    got = session.prefill_rows(ids[7:], 33)
    for row, logits in enumerate(got):
        np.testing.assert_array_equal(logits, expected(ids[: 7 + row + 1]))
    found = session.logits
    assert found is not None
    same(found, ids)
    session.rewind(7)
    assert session.prefill_rows(ids[7:], 0).shape == (0, toy.VOCAB)
    assert session.logits is None
    same(session.decode(5), [*ids, 5])


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([3, 3], "must ascend"),
        ([3, 2], "must ascend"),
        ([-1], "must ascend"),
        ([5], "must ascend from 0 to 4"),
        (6, "6 rows of 5 tokens"),
        (-1, "-1 rows"),
    ],
)
def test_bad_rows(session: CSession, rows: list[int] | int, words: str) -> None:
    refused(c_api.ARGUMENT, words, lambda: session.prefill_rows(text(5), rows))
    assert session.position == 0


@pytest.mark.parametrize("ids", [[], [-1], [toy.VOCAB], [1, 2, toy.VOCAB + 5]])
def test_bad_ids_never_reach_the_code(session: CSession, ids: list[int]) -> None:
    session.prefill(text(3))
    words = "at least one" if not ids else "none of this model: they go from 0 to 49"
    refused(c_api.ARGUMENT, words, lambda: session.prefill(ids))
    if ids:
        refused(c_api.ARGUMENT, words, lambda: session.decode(ids[-1]))
    same(session.decode(3), [*text(3), 3])


def test_the_end_of_the_context(tmp_path: Path) -> None:
    session = open_toy(tmp_path, capacity=20).session()
    ids = text(20)
    session.prefill(ids[:15])
    refused(c_api.CONTEXT, "6 more tokens after 15 .* holds 20", lambda: session.prefill(text(6)))
    same(session.prefill(ids[15:]), ids)
    refused(c_api.CONTEXT, "1 more tokens after 20", lambda: session.decode(1))
    assert session.position == 20
    session.rewind(19)
    same(session.decode(ids[19]), ids)


def test_nan_is_an_error_and_the_session_lives(session: CSession) -> None:
    ids = text(6)
    session.prefill(ids)
    refused(c_api.NUMERIC, "NaN at position 6", lambda: session.decode(toy.NAN))
    assert session.logits is None
    refused(c_api.NUMERIC, "NaN at position 16", lambda: session.prefill([*text(10), toy.NAN]))
    assert session.tokens == ids
    same(session.decode(3), [*ids, 3])


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("keep", [0, 1, 60, 150, 190, 199, 200])
def test_rewind_keeps_the_first(model: CModel, named_model: CModel, keep: int, named: bool) -> None:
    session = (named_model if named else model).session()
    ids = text(200)
    session.prefill(ids)
    session.rewind(keep)
    assert session.tokens == ids[:keep]
    assert (session.logits is None) == (keep < 200)
    same(session.decode(5), [*ids[:keep], 5], named=named)
    more = text(50, seed=2)
    same(session.prefill(more), [*ids[:keep], 5, *more], named=named)


def test_bad_rewinds(session: CSession) -> None:
    session.prefill([1, 2, 3])
    for n in (-1, 4):
        refused(
            c_api.ARGUMENT, rf"rewind to {n}: the session holds 3", lambda n=n: session.rewind(n)
        )
    assert session.position == 3


@pytest.mark.parametrize("kind", ["plain", "named", "dynamic"])
def test_anything_in_any_order(tmp_path: Path, kind: str) -> None:
    """Prefills, decodes, rewinds, NaNs and cancels at random: always as if from the start."""
    rope = RopeSwitch("dynamic", 40) if kind == "dynamic" else None
    named = kind == "named"
    session = open_toy(tmp_path, rope=rope, named=named).session()
    rng = np.random.default_rng(3)
    held: list[int] = []
    for turn in range(150):
        new = text(int(rng.integers(1, 50)), seed=turn)
        match rng.integers(0, 6):
            case 0 if len(held) < toy.CAPACITY:
                held.append(new[0])
                same(session.decode(new[0]), held, named)
            case 1 | 2 if len(held) + len(new) <= toy.CAPACITY:
                held += new
                same(session.prefill(new), held, named)
            case 3 if len(held) + len(new) < toy.CAPACITY:
                refused(c_api.NUMERIC, "NaN", lambda new=new: session.prefill([*new, toy.NAN]))
            case 4 if len(held) + len(new) <= toy.CAPACITY:
                session.cancel()
                refused(c_api.CANCELLED, "cancelled", lambda new=new: session.prefill(new))
            case _:
                held = held[: int(rng.integers(max(0, len(held) - 70), len(held) + 1))]
                session.rewind(len(held))
        assert session.tokens == held


def test_longrope_feeds_again_when_crossing(tmp_path: Path) -> None:
    """The toy's regime is the length beyond the threshold, so only one beyond it is held: what a
    crossing feeds again is right, and a step without a crossing feeds nothing again.
    """
    session = open_toy(tmp_path, rope=RopeSwitch("longrope", 20)).session()
    ids = text(30)
    same(session.prefill(ids[:20]), ids[:20])
    same(session.decode(ids[20]), ids[:21])
    assert session.decode(ids[21])[0] == -1e9  # not fed again: the toy sees the other regime
    session.rewind(10)
    same(session.decode(ids[10]), ids[:11])


@pytest.mark.parametrize("held", [6, 150])
def test_cancel_from_another_thread(model: CModel, held: int) -> None:
    session = model.session()
    ids = text(held)
    session.prefill(ids)
    timer = threading.Timer(0.05, session.cancel)
    timer.start()
    slow = [*text(20), toy.SLOW, *text(5)]
    refused(c_api.CANCELLED, "cancelled", lambda: session.prefill(slow))
    assert session.tokens == ids
    same(session.decode(3), [*ids, 3])


def test_a_cancel_waits_for_the_next_call(session: CSession) -> None:
    session.cancel()
    refused(c_api.CANCELLED, "cancelled", lambda: session.decode(3))
    same(session.decode(3), [3])
    session.cancel()
    session.rewind(1)  # withdraws it
    same(session.decode(4), [3, 4])


def test_a_second_call_at_once_is_refused(session: CSession, tmp_path: Path) -> None:
    session.prefill([1, 2])
    failure: list[BaseException] = []

    def slow() -> None:
        try:
            session.decode(toy.SLOW)
        except CError as error:
            failure.append(error)

    thread = threading.Thread(target=slow)
    thread.start()
    error, end = c_api.Error(), time.monotonic() + 20
    while session.api.rewind(session.handle, 2, error) != c_api.BUSY:
        assert time.monotonic() < end
        time.sleep(0.001)
    for call in (
        lambda: session.decode(1),
        lambda: session.prefill([1]),
        lambda: session.prefill_rows([1], 1),
        lambda: session.rewind(0),
        lambda: session.sample(),
        lambda: session.fork(),
        lambda: session.save(tmp_path / "kept"),
        lambda: session.load(tmp_path / "kept"),
        lambda: session.steer(None),
    ):
        refused(c_api.BUSY, "in use by another call", call)
    assert session.position == 2
    session.cancel()
    thread.join()
    assert [type(error) for error in failure] == [CError]
    same(session.decode(5), [1, 2, 5])


def test_sessions_in_several_threads(model: CModel) -> None:
    wrong: list[int] = []

    def work(seed: int) -> None:
        session, ids = model.session(), text(60, seed)
        session.prefill(ids[:20])
        for end in range(21, 61):
            if not np.array_equal(session.decode(ids[end - 1]), expected(ids[:end])):
                wrong.append(seed)
        session.destroy()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_greedy_sampling(session: CSession) -> None:
    refused(c_api.ARGUMENT, "no logits to sample from", session.sample)
    ids = text(9)
    logits = session.prefill(ids)
    assert session.sample() == int(logits.argmax())
    assert session.position == 9


def test_ties_go_to_the_lowest_id(tmp_path: Path) -> None:
    bias = np.zeros(toy.VOCAB, np.float32)
    bias[[20, 30]] = 1000.0
    session = open_toy(tmp_path, bias=bias).session()
    for ids in (text(3), text(9, 1)):
        session.prefill(ids)
        logits = session.logits
        assert logits is not None
        assert session.sample() == int(logits.argmax())


@pytest.mark.parametrize("value", [np.inf, -np.inf])
def test_nothing_to_sample(tmp_path: Path, value: float) -> None:
    bias = np.full(toy.VOCAB, value, np.float32)
    session = open_toy(tmp_path, bias=bias).session()
    session.prefill([1, 2])
    refused(c_api.NUMERIC, "the largest logit is infinite", session.sample)


def test_null_handles_are_errors(model: CModel) -> None:
    api, error = model.api, c_api.Error()
    assert api.prefill(None, None, 1, error) == c_api.ARGUMENT
    assert b"session must not be NULL" in error.message
    assert api.session_create(None, None, error) == c_api.ARGUMENT
    assert api.session_create(model.handle, None, error) == c_api.ARGUMENT
    assert api.prefill(model.session().handle, None, 1, None) == c_api.ARGUMENT
    assert (api.position(None), bool(api.tokens(None)), bool(api.logits(None))) == (0, False, False)
    api.cancel(None)
    api.session_destroy(None)
    api.close(None)


def test_sessions_outlive_the_handle_of_their_model(tmp_path: Path) -> None:
    model = open_toy(tmp_path)
    first, second = model.session(), model.session()
    model.close()
    first.destroy()
    same(second.prefill(text(30)), text(30))
    second.destroy()
