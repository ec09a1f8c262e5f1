"""`bench`: find or compile a model, measure it in turns with itself, and the machine around it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bessemer.arguments import checked_model
from bessemer.artifact.manifest import is_artifact
from bessemer.artifact.reader import Artifact, open_artifact
from bessemer.artifact.work import Work, read_work
from bessemer.bench.machine import Peaks, Probes, describe_machine
from bessemer.bench.plan import Demand, Trial, plan
from bessemer.bench.profile import Profile, profile_of
from bessemer.bench.protocol import Worker, WorkerError
from bessemer.bench.results import MemoryUse, Report, Result
from bessemer.errors import ArtifactError, BessemerError, UsageError
from bessemer.runtime.cpu import default_threads

if TYPE_CHECKING:
    from bessemer.compile_options import CompileOptions
    from bessemer.compiler import Progress

DEFAULT_PROMPT = (512,)
DEFAULT_GENERATE = (64,)
DEFAULT_REPEAT = 5

Announce = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """What a run measures. threads: empty for as many as this process may use."""

    prompt: Sequence[int] = DEFAULT_PROMPT
    generate: Sequence[int] = DEFAULT_GENERATE
    depth: Sequence[int] = (0,)
    threads: Sequence[int] = ()
    repeat: int = DEFAULT_REPEAT
    profile: bool = False

    def thread_counts(self) -> list[int]:
        """Without repeats. Raises UsageError for a number below 1."""
        counts = list(dict.fromkeys(self.threads)) or [default_threads()]
        if min(counts) < 1:
            raise UsageError("--threads takes numbers from 1")
        return counts


@dataclass
class _Runs:
    """What the measuring process said of one test on one number of threads."""

    test: Trial
    threads: int
    seconds: list[float] = field(default_factory=list)
    peaks: list[Peaks] = field(default_factory=list)
    profiles: list[list[list[int]]] = field(default_factory=list)

    def take(self, worker: Worker, probes: Probes | None, *, keep: bool) -> None:
        """Run it once, between two looks at what the machine reaches. keep: not for a warm-up,
        which takes no probes either.
        """
        before = probes.measure(self.threads) if probes else None
        answer = worker.ask(
            self.test.op, tokens=self.test.tokens, depth=self.test.depth, threads=self.threads
        )
        if probes and before:
            self.peaks.append(before.best(probes.measure(self.threads)))
        if keep:
            self.seconds.append(answer["seconds"])
            if "profile" in answer:
                self.profiles.append(answer["profile"])


def bench(
    model: str | Path,
    wanted: Plan,
    *,
    options: CompileOptions | None = None,
    progress: Progress | None = None,
    announce: Announce = lambda text: None,
) -> Report:
    """Measure a compiled folder, or a model that is compiled into the cache first.

    announce: told what is being measured. Every test runs once unmeasured on each number of
    threads, then `repeat` times in turns, so that a change in the machine's mood meets all alike.

    Raises UsageError, and what finding, compiling and loading the model raise.
    """
    counts = wanted.thread_counts()
    if wanted.repeat < 1:
        raise UsageError(f"--repeat {wanted.repeat}: at least 1")
    artifact = _artifact(model, options, wanted.profile, progress)
    manifest, work = artifact.manifest, read_work(artifact.folder)
    tests = plan(wanted.prompt, wanted.generate, wanted.depth, manifest.context_length)
    announce("the machine")
    probes = _probes()
    runs = [_Runs(test, n) for test in tests for n in counts]
    with Worker([sys.executable, "-m", "bessemer.bench.worker"], worker_environment()) as worker:
        load, use = _measure(worker, artifact, counts, runs, wanted, probes, announce)
    chunk = manifest.state.chunk
    results = [
        Result(
            r.test,
            r.threads,
            tuple(r.seconds),
            Demand.of(r.test, work, chunk),
            tuple(r.peaks),
        )
        for r in runs
    ]
    return Report(
        describe_model(artifact),
        describe_machine() | {"peaks": _best_peaks(runs, counts)},
        results,
        use,
        load,
        _profiles(runs, work, chunk) if wanted.profile else (),
    )


def _measure(
    worker: Worker,
    artifact: Artifact,
    counts: list[int],
    runs: list[_Runs],
    wanted: Plan,
    probes: Probes | None,
    announce: Announce,
) -> tuple[float, MemoryUse]:
    """Fill the runs; gives the seconds of loading and the memory at the end."""
    manifest = artifact.manifest
    try:
        loaded = worker.ask(
            "load", folder=str(artifact.folder), threads=counts, profile=wanted.profile
        )
        if loaded["threads"] != counts:
            raise BessemerError(f"the system allows {loaded['threads']} threads, not {counts}")
        for one in runs:
            announce(f"{one.test.name} on {one.threads} threads, to warm up")
            one.take(worker, None, keep=False)
        for turn in range(wanted.repeat):
            announce(f"all of them, turn {turn + 1} of {wanted.repeat}")
            for one in runs:
                one.take(worker, probes, keep=True)
        memory = worker.ask("memory")
    except WorkerError as error:
        raise BessemerError(f"measuring {manifest.name} failed: {error}") from None
    held = max(memory["held"], sum(_most_held(runs, n) for n in counts))
    cache = manifest.state.kv_bytes_per_token() * held
    use = MemoryUse(memory["rss_peak"], memory.get("private"), manifest.weights_nbytes, cache)
    return float(loaded["load_s"]), use


def _most_held(runs: list[_Runs], threads: int) -> int:
    """The most tokens that the session of this many threads held."""
    return max(r.test.depth + r.test.tokens for r in runs if r.threads == threads)


def _artifact(
    model: str | Path, options: CompileOptions | None, profile: bool, progress: Progress | None
) -> Artifact:
    """The model's artifact; with `profile` one that measures itself, made from the same source."""
    from bessemer.api import prepare
    from bessemer.compile_options import CompileOptions

    asked = options or CompileOptions()
    extra: dict[str, Any] = {} if progress is None else {"progress": progress}
    if not is_artifact(checked_model(model)):
        return prepare(model, replace(asked, profile=profile), **extra).artifact
    artifact = prepare(model, asked).artifact
    if not profile or read_work(artifact.folder).profile is not None:
        return artifact
    return _profiled_twin(artifact, extra)


def _profiled_twin(artifact: Artifact, extra: dict[str, Any]) -> Artifact:
    """What the artifact was made from, compiled again in the same way but for the profile."""
    from bessemer.api import prepare
    from bessemer.verify.model import find_source, options_of

    manifest = artifact.manifest
    origin = find_source(manifest, None)
    if origin.source is None:
        raise ArtifactError(
            f"{artifact.folder} was not compiled to measure itself, and {origin.reason}: give "
            "`bench --profile` the checkpoint"
        )
    options = replace(options_of(manifest.options), profile=True, emit=())
    twin = prepare(origin.source, options, **extra).artifact
    if twin.manifest.source.get("fingerprint") != manifest.source.get("fingerprint"):
        raise ArtifactError(
            f"{origin.source} has changed since {artifact.folder} was compiled from it: give "
            "`bench --profile` the checkpoint"
        )
    return open_artifact(twin.folder)


def _probes() -> Probes | None:
    """None where nothing can be compiled: then there are no shares."""
    try:
        return Probes()
    except (ImportError, BessemerError):
        return None


def worker_environment() -> dict[str, str]:
    """Variables with which another process of this interpreter finds this package."""
    import bessemer

    here = str(Path(bessemer.__file__).resolve().parent.parent)
    return {"PYTHONPATH": os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH", "")]))}


def describe_model(artifact: Artifact) -> dict[str, Any]:
    """What was measured."""
    manifest = artifact.manifest
    return {
        "name": manifest.name,
        "weights": manifest.options.get("weights") or "f16",
        "kv": manifest.state.kv_dtype,
        "weights_bytes": manifest.weights_nbytes,
        "context": manifest.context_length,
        "bessemer": manifest.versions.get("bessemer"),
        "compile_s": manifest.compile_seconds,
    }


def _best_peaks(runs: list[_Runs], counts: list[int]) -> list[dict[str, Any]]:
    """The best of all that were measured, for each number of threads."""
    found = []
    for threads in counts:
        peaks = [p for r in runs if r.threads == threads for p in r.peaks]
        if peaks:
            best = reduce(Peaks.best, peaks)
            found.append(
                {
                    "threads": threads,
                    "flops_per_second": best.flops,
                    "read_bytes_per_second": best.bytes,
                }
            )
    return found


def _profiles(runs: list[_Runs], work: Work, chunk: int) -> list[Profile]:
    return [profile_of(r.test, r.threads, r.profiles, work, chunk) for r in runs]
