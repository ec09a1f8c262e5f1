"""The thread pool, by ctypes and by a stress test in C (plain, and under ThreadSanitizer)."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bessemer.backend.link import NATIVE_SOURCES, compile_native, link_shared
from bessemer.backend.target import Target

STRESS = Path(__file__).parent / "stress.c"
TASK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
BODY = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)


class Context(ctypes.Structure):
    """bsm_context"""

    _fields_ = (
        ("pool", ctypes.c_void_p),
        ("threads", ctypes.c_int64),
        ("sequence_length", ctypes.c_int64),
        ("hidden", ctypes.c_void_p),
        ("cancel", ctypes.c_int32),
        ("status", ctypes.c_int32),
        ("reserved", ctypes.c_uint64 * 8),
    )


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("pool")
    target = Target.native()
    link_shared(compile_native(target, folder), folder / "pool.so", target)
    lib = ctypes.CDLL(str(folder / "pool.so"))
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    lib.bsm_pool_create.restype, lib.bsm_pool_create.argtypes = pointer, [number]
    lib.bsm_pool_size.restype, lib.bsm_pool_size.argtypes = number, [pointer]
    lib.bsm_pool_destroy.restype, lib.bsm_pool_destroy.argtypes = None, [pointer]
    lib.bsm_fork.argtypes = [ctypes.POINTER(Context), TASK, pointer]
    lib.bsm_barrier.argtypes = [ctypes.POINTER(Context), number]
    lib.bsm_poll_cancel.argtypes = [ctypes.POINTER(Context), number]
    lib.bsm_poll_cancel.restype = ctypes.c_int32
    lib.bsm_parallel_for.argtypes = [pointer, number, number, number, BODY, pointer]
    return lib


@pytest.fixture
def pool(library: ctypes.CDLL) -> Iterator[int]:
    handle = library.bsm_pool_create(3)
    yield handle
    library.bsm_pool_destroy(handle)


def fork_ids(library: ctypes.CDLL, context: Context) -> list[tuple[int, int]]:
    """(thread, threads) of every worker of one fork, sorted."""
    seen: list[tuple[int, int]] = []
    library.bsm_fork(context, TASK(lambda _, t, n: seen.append((t, n))), None)
    return sorted(seen)


def test_header_layout() -> None:
    """Compiled code loads the fields by these offsets."""
    offsets = [getattr(Context, name).offset for name, *_ in Context._fields_]
    assert offsets == [0, 8, 16, 24, 32, 36, 40]
    assert ctypes.sizeof(Context) == 104


@pytest.mark.parametrize("size", range(1, 9))
def test_every_worker_runs_once(library: ctypes.CDLL, size: int) -> None:
    pool = library.bsm_pool_create(size)
    assert library.bsm_pool_size(pool) == size
    for threads in (size, 1, size + 5, 0, -3, size):
        expected = max(1, min(threads, size))
        context = Context(pool=pool, threads=threads)
        assert fork_ids(library, context) == [(t, expected) for t in range(expected)]
    library.bsm_pool_destroy(pool)


def test_odd_sizes_and_null(library: ctypes.CDLL) -> None:
    pool = library.bsm_pool_create(-7)
    assert library.bsm_pool_size(pool) == 1
    library.bsm_pool_destroy(pool)
    library.bsm_pool_destroy(None)
    assert library.bsm_pool_size(None) == 1
    assert fork_ids(library, Context(threads=4)) == [(0, 1)]


def test_caller_is_worker_zero(library: ctypes.CDLL, pool: int) -> None:
    names: dict[int, int] = {}
    task = TASK(lambda _, t, n: names.__setitem__(t, threading.get_ident()))
    library.bsm_fork(Context(pool=pool, threads=3), task, None)
    assert names[0] == threading.get_ident()
    assert len(set(names.values())) == 3


def test_cancel_is_uniform_and_status_is_reset(library: ctypes.CDLL, pool: int) -> None:
    context = Context(pool=pool, threads=3, cancel=1)
    answers: list[int] = []
    poll = TASK(lambda _, t, n: answers.append(library.bsm_poll_cancel(context, t)))
    library.bsm_fork(context, poll, None)
    assert (answers, context.status) == ([1, 1, 1], 1)
    context.cancel = 0
    answers.clear()
    library.bsm_fork(context, poll, None)
    assert (answers, context.status) == ([0, 0, 0], 0)


def test_parallel_for_covers_the_range_once(library: ctypes.CDLL, pool: int) -> None:
    pieces: list[tuple[int, int]] = []
    library.bsm_parallel_for(pool, 5, 47, 4, BODY(lambda _, b, e: pieces.append((b, e))), None)
    assert sorted(pieces) == [(b, min(b + 4, 47)) for b in range(5, 47, 4)]
    pieces.clear()
    library.bsm_parallel_for(pool, 5, 5, 4, BODY(lambda _, b, e: pieces.append((b, e))), None)
    assert pieces == []


def _in_child(function: object) -> int:
    """Exit status of a forked child that runs `function`; 99 when it hangs."""
    child = os.fork()
    if child == 0:
        signal.alarm(0)
        try:
            os._exit(0 if function() else 1)  # type: ignore[operator]
        except BaseException:
            os._exit(2)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return 99


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_after_fork(library: ctypes.CDLL, pool: int) -> None:
    """A child makes its own threads, a grandchild too; destroying in a child is harmless."""
    context = Context(pool=pool, threads=3)
    all_three = [(0, 3), (1, 3), (2, 3)]
    assert fork_ids(library, context) == all_three

    def grandchild() -> bool:
        return fork_ids(library, context) == all_three

    def child() -> bool:
        works = all(fork_ids(library, context) == all_three for _ in range(20))
        return works and _in_child(grandchild) == 0

    def destroyer() -> bool:
        library.bsm_pool_destroy(pool)
        return True

    assert _in_child(child) == 0
    assert _in_child(destroyer) == 0
    assert fork_ids(library, context) == all_three


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_fork_while_a_job_runs(library: ctypes.CDLL, pool: int) -> None:
    """The child inherits a locked queue and a half-done job, and works all the same."""
    started, finish = threading.Event(), threading.Event()

    def wait(_: object, thread: int, threads: int) -> None:
        started.set()
        finish.wait(20)

    task = TASK(wait)
    busy = threading.Thread(
        target=lambda: library.bsm_fork(Context(pool=pool, threads=3), task, None)
    )
    busy.start()
    started.wait(20)
    status = _in_child(lambda: len(fork_ids(library, Context(pool=pool, threads=3))) == 3)
    finish.set()
    busy.join()
    assert status == 0
    assert len(fork_ids(library, Context(pool=pool, threads=3))) == 3


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_destroy_ends_the_threads_and_idle_ones_sleep(library: ctypes.CDLL) -> None:
    def tasks() -> int:
        return len(os.listdir("/proc/self/task"))

    before = tasks()
    pool = library.bsm_pool_create(4)
    assert tasks() == before + 3
    fork_ids(library, Context(pool=pool, threads=4))
    time.sleep(0.05)
    start = time.process_time()
    time.sleep(0.2)
    assert time.process_time() - start < 0.1
    library.bsm_pool_destroy(pool)
    assert tasks() == before


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="needs POSIX signals")
def test_workers_leave_signals_to_the_program(library: ctypes.CDLL) -> None:
    """Ctrl-C must reach Python's main thread, never interrupt a kernel."""
    path = Path("/proc/self/task")
    if not path.exists():
        pytest.skip("reads /proc")
    before = set(os.listdir(path))
    pool = library.bsm_pool_create(2)
    (worker,) = set(os.listdir(path)) - before
    status = (path / worker / "status").read_text()
    blocked = int(next(line for line in status.splitlines() if "SigBlk" in line).split()[1], 16)
    assert blocked >> (signal.SIGINT - 1) & 1
    library.bsm_pool_destroy(pool)


def build_stress(folder: Path, flags: list[str]) -> Path:
    """Build the stress test with the system's compiler, else with zig."""
    system = shutil.which("gcc") or shutil.which("cc") or shutil.which("clang")
    compiler = [system] if system else [sys.executable, "-m", "ziglang", "cc"]
    program = folder / "stress"
    command = [*compiler, "-std=c11", "-Wall", "-Wextra", "-Werror", f"-I{NATIVE_SOURCES}", *flags]
    command += [str(STRESS), str(NATIVE_SOURCES / "pool.c"), "-o", str(program), "-lpthread"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0 and "tsan" in done.stderr:
        pytest.skip("the compiler has no ThreadSanitizer runtime")
    assert done.returncode == 0, done.stderr
    return program


def run_stress(program: Path, rounds: int, seed: int) -> None:
    done = subprocess.run(
        [str(program), str(rounds), str(seed)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("ThreadSanitizer does not work with this kernel's address space layout")
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr[-4000:]


def test_stress(tmp_path: Path) -> None:
    program = build_stress(tmp_path, ["-O2"])
    for seed in (1, 2):
        run_stress(program, 200, seed)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs CPU affinity")
def test_stress_on_one_core(tmp_path: Path) -> None:
    """More workers than processors: nobody spins while the awaited one has no processor."""
    program = build_stress(tmp_path, ["-O2"])
    mask = os.sched_getaffinity(0)
    os.sched_setaffinity(0, [min(mask)])
    try:
        run_stress(program, 50, 3)
    finally:
        os.sched_setaffinity(0, mask)


def test_stress_under_thread_sanitizer(tmp_path: Path) -> None:
    program = build_stress(tmp_path, ["-O1", "-g", "-fsanitize=thread"])
    for seed in (4, 5):
        run_stress(program, 60, seed)


def test_header_compiles_as_cpp(tmp_path: Path) -> None:
    compiler = shutil.which("g++") or shutil.which("clang++")
    command = [compiler] if compiler else [sys.executable, "-m", "ziglang", "c++"]
    source = tmp_path / "a.cpp"
    source.write_text('#include "bessemer.h"\nbsm_context context{};\n')
    flags = ["-std=c++11", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", f"-I{NATIVE_SOURCES}"]
    done = subprocess.run(
        [*command, *flags, str(source)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
