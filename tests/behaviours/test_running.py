"""BEHAVIOURS, Running, on compiled models."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from bessemer.runtime.generate import Generation
from bessemer.runtime.model import Model
from bessemer.runtime.session import Session
from tests.behaviours.models import bessemer, build, save_folder, scripted, text_model
from tests.e2e.compiled import F32_ERROR, error, load, reference, tiny_pair, token_ids
from tests.processes import wait_for_library

LONG = 8192  # tokens of a prompt that takes many steps


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Says `a`; a long context in short steps."""
    made = scripted(text_model(max_position_embeddings=LONG + 512), b"a")
    folder = save_folder(tmp_path_factory.mktemp("running") / "checkpoint", made)
    return build(folder, context=LONG + 512, chunk=64)


_THREADS = """
import json, sys
from pathlib import Path
import bessemer
model = bessemer.load(sys.argv[1])
session = model.session()
session.prefill([1, 2, 3])
session.decode(4)
masks = []
for task in Path("/proc/self/task").iterdir():
    status = dict(line.split(":\\t", 1) for line in (task / "status").read_text().splitlines()
                  if ":\\t" in line)
    masks.append(status["Cpus_allowed_list"])
print(json.dumps({"threads": model.threads, "masks": sorted(set(masks))}))
"""


def pinned(folder: Path, cpus: set[int], **environment: str) -> subprocess.Popen:
    """A process that runs the model on these CPUs, and says its thread count and its masks."""
    return subprocess.Popen(
        [sys.executable, "-c", _THREADS, str(folder)],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: os.sched_setaffinity(0, cpus),
        env={**{k: v for k, v in os.environ.items() if k != "BESSEMER_THREADS"}, **environment},
    )


def told(process: subprocess.Popen) -> dict:
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return json.loads(out)


linux = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="CPUs can't be chosen")


@linux
def test_r01_threads_of_a_pinned_process(model: Model) -> None:
    """One CPU, one thread; BESSEMER_THREADS wins. Quotas of cgroups: tests/runtime/test_cpu.py."""
    one = {min(os.sched_getaffinity(0))}
    assert told(pinned(model.path, one))["threads"] == 1
    assert told(pinned(model.path, one, BESSEMER_THREADS="3"))["threads"] == 3
    everything = os.sched_getaffinity(0)
    assert told(pinned(model.path, everything))["threads"] <= len(everything)


@linux
def test_r02_disjoint_processes_stay_apart(model: Model) -> None:
    """Two at once, each with more threads than CPUs: no thread leaves its process's mask."""
    cpus = sorted(os.sched_getaffinity(0))
    halves = [{cpus[0]}, {cpus[-1]}]
    running = [pinned(model.path, half, BESSEMER_THREADS="4") for half in halves]
    for process, (cpu,) in zip(running, halves, strict=True):
        assert told(process) == {"threads": 4, "masks": [str(cpu)]}


# A signal can come too early or too late on a busy machine; then the case is tried again.
ATTEMPTS = 20


def interrupted(call: Callable[[], object], ready: Callable[[], object]) -> float | None:
    """Run `call`, with SIGINT when `ready` returns, in another thread.

    Returns how long the call then went on; None if it was over before the signal.
    """
    sent: list[float] = []
    over = False

    def send() -> None:
        ready()
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    sender = threading.Thread(target=send)
    try:
        sender.start()
        call()
        over = True
        sender.join()
        time.sleep(60)  # until the signal is handled
        raise AssertionError("the signal never came")
    except KeyboardInterrupt:
        went_on = time.monotonic() - sent[0]
    sender.join()
    return None if over else went_on


def test_r04_ctrl_c_during_prefill(model: Model) -> None:
    """Stops within a step, not at the end; the session is as before and goes on."""
    ids = np.random.default_rng(0).integers(0, 250, LONG).tolist()
    session = model.session()
    session.prefill(ids[:5])
    want = session.prefill(ids[5:])
    for _ in range(ATTEMPTS):
        session.rewind(5)
        began = time.monotonic()
        session.prefill(ids[5:])
        whole = time.monotonic() - began
        session.rewind(5)
        went_on = interrupted(lambda: session.prefill(ids[5:]), partial(time.sleep, whole / 4))
        if went_on is not None:
            assert session.tokens == ids[:5]
            assert np.array_equal(session.prefill(ids[5:]), want)
            if went_on < whole / 2:
                return
    raise AssertionError(f"no signal of {ATTEMPTS} stopped the prefill before its end")


def test_r04_ctrl_c_during_decode() -> None:
    """Stops before the next step; what was fed is held, and decoding goes on from there."""
    _, torch_model = tiny_pair("llama")
    session = load("llama").session()
    ids = token_ids(80)
    fed = [ids[0]]
    session.prefill(fed)

    def decode() -> None:
        while True:  # round and round, so that the signal finds it decoding
            if session.position == 60:
                session.rewind(1)
                del fed[1:]
            session.decode(ids[session.position])
            fed.append(ids[session.position - 1])

    assert interrupted(decode, lambda: time.sleep(0.3)) is not None
    held = session.tokens
    assert held == ids[: len(held)]
    assert len(held) - len(fed) in (0, 1)
    rest = ids[len(held) : len(held) + 6]
    want = reference(torch_model, held + rest)
    assert error(session.decode(rest[0]), want[len(held)]) < F32_ERROR
    assert error(session.prefill(rest[1:]), want[-1]) < F32_ERROR


def interrupted_answer(stream: Generation, seconds: float | None) -> str:
    """All that a stream shows with a Ctrl-C after so many seconds; None: after the first piece."""
    shown: list[str] = []
    begun = threading.Event()

    def take() -> None:
        try:
            for piece in stream:
                shown.append(piece)
                begun.set()
        except KeyboardInterrupt:  # between two steps
            stream.cancel()
            shown.extend(stream)
            raise
        if stream.result.finish_reason == "cancelled":  # inside a step
            raise KeyboardInterrupt

    interrupted(take, lambda: begun.wait(60) if seconds is None else time.sleep(seconds))
    return "".join(shown)


@pytest.mark.parametrize("where", ["prompt", "answer"])
def test_r04_ctrl_c_during_an_answer(model: Model, where: str) -> None:
    """A stream ends with what it has, also inside the prompt, and the model answers again."""
    prompt = "y" * LONG if where == "prompt" else "y"
    began = time.monotonic()
    model.generate(prompt, max_tokens=1)
    whole = time.monotonic() - began
    for _ in range(ATTEMPTS):
        stream = model.stream(prompt, max_tokens=400)
        shown = interrupted_answer(stream, whole / 4 if where == "prompt" else None)
        result = stream.result
        assert shown == result.text == "a" * len(result.tokens)
        assert result.finish_reason in ("cancelled", "length")
        assert model.generate("y", max_tokens=3) == "aaa"
        if result.finish_reason == "cancelled" and bool(result.tokens) == (where == "answer"):
            return
    raise AssertionError(f"no signal of {ATTEMPTS} stopped the {where}")


@linux
def test_r04_ctrl_c_on_the_command_line(model: Model, tmp_path: Path) -> None:
    """Exit code 130 during the prompt, without a traceback, and one object for --json."""
    (tmp_path / "prompt.txt").write_text("y" * LONG)
    command = [sys.executable, "-m", "bessemer", "run", str(model.path), "--raw", "--json"]
    command += ["-f", str(tmp_path / "prompt.txt"), "--max-tokens", "400"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    # The library is loaded; next it feeds the prompt.
    wait_for_library(process)
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, (out, err)
    assert "Traceback" not in err
    if out:
        assert json.loads(out)["finish_reason"] == "cancelled"
    done = bessemer("run", model.path, "-p", "y", "--raw", "--max-tokens", 2)
    assert (done.returncode, done.stdout) == (0, "aa\n")


GENERATIONS, WARM_UP = 2000, 200
# What the allocator of Python may keep beside; a leak of 2 KiB a generation would be more.
SLACK = 4 << 20


def resident() -> int:
    """Bytes of this process in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@linux
def test_r06_two_thousand_generations(model: Model) -> None:
    for number in range(GENERATIONS):
        options = {"temperature": 1.0, "seed": number} if number % 2 else {}
        model.generate("y" * (1 + number % 5), max_tokens=3, **options)
        if number == WARM_UP:
            before = resident()
    assert resident() - before < SLACK


@linux
def test_sessions_give_their_memory_back(model: Model) -> None:
    """A session that is dropped frees its cache: R06 for programs that open their own."""

    def use(session: Session) -> None:
        session.prefill(token_ids(200))

    use(model.session())
    before = resident()
    for _ in range(20):
        use(model.session())
    assert resident() - before < SLACK
