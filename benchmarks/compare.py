"""Bessemer and other engines side by side: the same weights, threads and token counts, in turns.

    python benchmarks/compare.py MODEL [--peer-python PATH] [--precision f32,f16] [--out DIR]

Every engine keeps the model in a process of its own. Each turn measures all of them, one after the
other, beginning with another one; what is reported is the median of the turns. The machine's
multiply-add and read peaks are measured beside each. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engines import (
    BESSEMER,
    ENGINES,
    PRECISIONS,
    Engine,
    Running,
    Source,
    bessemer_precisions,
    describe,
    huggingface_folder,
    start_all,
    start_bessemer,
)
from tables import markdown

from bessemer.artifact.work import Work
from bessemer.bench.machine import Peaks, Probes, describe_machine
from bessemer.bench.plan import Demand, Trial, plan
from bessemer.bench.protocol import WorkerError
from bessemer.bench.results import Result
from bessemer.errors import BessemerError, UsageError

# Between two engines, for the threads of the first to stop spinning.
PAUSE = 0.5
# Fewer turns than this say nothing on a machine that has anything else to do.
LEAST_REPEAT = 5


@dataclass
class Round:
    """One precision on one number of threads: who takes part, and what was measured."""

    precision: str
    threads: int
    trials: Sequence[Trial]
    running: list[Running]
    absent: dict[str, str]
    work: Work
    chunk: int
    seconds: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    # What the machine reached right before or after each of them.
    peaks: dict[tuple[str, str], list[Peaks]] = field(default_factory=dict)
    best: Peaks | None = None
    load: list[float] = field(default_factory=list)

    def measure(self, turn: int, probes: Probes) -> None:
        """All engines, all trials. Turn 0 is not kept: it warms up."""
        self.load.append(os.getloadavg()[0])
        for trial in self.trials:
            order = self.running[turn % len(self.running) :] + self.running
            for engine in order[: len(self.running)]:
                time.sleep(PAUSE)
                peaks = probes.measure(self.threads)
                try:
                    seconds = engine.seconds(trial.op, trial.tokens, trial.depth)
                except WorkerError as error:
                    self._leave_out(engine, f"{trial.name}: {error}")
                    continue
                peaks = peaks.best(probes.measure(self.threads))
                self.best = peaks.best(self.best or peaks)
                if turn:
                    self.seconds.setdefault((engine.name, trial.name), []).append(seconds)
                    self.peaks.setdefault((engine.name, trial.name), []).append(peaks)

    def _leave_out(self, engine: Running, reason: str) -> None:
        say(f"{engine.name} is left out: {reason}")
        self.absent[engine.name] = reason.splitlines()[-1]
        engine.worker.close()
        self.running.remove(engine)

    def results(self) -> list[dict[str, Any]]:
        """An entry for each engine and trial. Shares are by Bessemer's count of operations and
        bytes, for every engine.
        """
        found = []
        for trial in self.trials:
            demand = Demand.of(trial, self.work, self.chunk)
            for engine in self.running:
                seconds = self.seconds.get((engine.name, trial.name), [])
                if seconds:
                    peaks = tuple(self.peaks[engine.name, trial.name])
                    result = Result(trial, self.threads, tuple(seconds), demand, peaks)
                    entry = {"engine": engine.name, "precision": self.precision}
                    found.append(entry | result.to_json() | {"intensity": _intensity(demand)})
        return found

    def close(self) -> None:
        for engine in self.running:
            engine.worker.close()


def _intensity(demand: Demand) -> float:
    """Operations per byte read."""
    return demand.flops / max(1, demand.weight_bytes + demand.cache_bytes)


def say(text: str) -> None:
    """Progress."""
    print(f"compare: {text}", file=sys.stderr, flush=True)


def run_round(
    source: Source,
    precision: str,
    threads: int,
    trials: Sequence[Trial],
    engines: tuple[Engine, ...],
    arguments: argparse.Namespace,
    probes: Probes,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Results of one precision on one number of threads, and a description of the round."""
    say(f"{precision} on {threads} threads: starting {BESSEMER}")
    ours, work, chunk = start_bessemer(source, precision, threads)
    pythons = python_table(arguments.peer_python)

    def python_of(engine: Engine) -> str:
        return pythons.get(Path(engine.script).stem.removesuffix("_peer"), pythons[""])

    peers, absent = start_all(source, precision, threads, engines, python_of, say)
    this = Round(precision, threads, trials, [ours, *peers], dict(absent), work, chunk)
    try:
        for turn in range(arguments.repeat + 1):
            say(f"{precision} on {threads} threads: " + (f"turn {turn}" if turn else "warm-up"))
            this.measure(turn, probes)
        peak = this.best
        described = {
            "precision": precision,
            "threads": threads,
            "engines": [describe(engine) for engine in this.running],
            "absent": this.absent,
            "flops_per_second": peak.flops if peak else 0.0,
            "read_bytes_per_second": peak.bytes if peak else 0.0,
            "load_average": this.load,
        }
        return this.results(), described
    finally:
        this.close()


def compare(
    arguments: argparse.Namespace, keep: Callable[[dict[str, Any]], object]
) -> dict[str, Any]:
    """Everything that is written down. keep: called after each round with what there is so far."""
    trials = all_trials(arguments)
    work = arguments.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    source = Source(arguments.model, huggingface_folder(arguments.model, work), work)
    wanted = [e for e in ENGINES if arguments.engines is None or e.name in arguments.engines]
    probes = Probes()
    results: list[dict[str, Any]] = []
    rounds: list[dict[str, Any]] = []
    everything = {
        "model": arguments.model,
        "machine": describe_machine(),
        "rounds": rounds,
        "results": results,
    }
    for threads in arguments.threads:
        for precision in arguments.precision:
            if precision not in bessemer_precisions():
                say(f"{precision} is left out: this Bessemer doesn't have it")
                continue
            found, described = run_round(
                source, precision, threads, trials, tuple(wanted), arguments, probes
            )
            results += found
            rounds.append(described)
            keep(everything)
    return everything


def all_trials(arguments: argparse.Namespace) -> list[Trial]:
    """Prompts from the start, and tokens generated after each depth: what all engines can do."""
    trials: list[Trial] = []
    if any(arguments.prompt):
        trials += plan(arguments.prompt, [], [0], arguments.context)
    if any(arguments.generate):
        trials += plan([], arguments.generate, arguments.depth, arguments.context)
    if not trials or (any(arguments.generate) and min(arguments.depth) < 1):
        raise UsageError("give a --prompt or --generate above 0, and every --depth at least 1")
    return trials


def python_table(values: Sequence[str]) -> dict[str, str]:
    """`PATH` for all peers (key ""), `NAME=PATH` for one: llamacpp, openvino, pytorch, ..."""
    table = {"": sys.executable}
    for value in values:
        name, equals, path = value.partition("=")
        table[name if equals else ""] = path if equals else value
    return table


def write(found: dict[str, Any], folder: Path) -> Path:
    """results.json, whose path is returned, and results.md."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "results.json"
    path.write_text(json.dumps(found, indent=1), encoding="utf-8")
    (folder / "results.md").write_text(markdown(found), encoding="utf-8")
    return path


def draw(results: Path, pythons: Sequence[str]) -> None:
    """Plots beside the results, by the first Python that has matplotlib; a line where none has."""
    script = Path(__file__).resolve().parent / "plots.py"
    for python in pythons:
        probe = [python, "-c", "import matplotlib"]
        if subprocess.run(probe, capture_output=True, check=False).returncode == 0:
            subprocess.run([python, str(script), str(results)], check=True)
            return
    say(
        "no speed.png and no roofline.png: no Python here has matplotlib; run "
        f"`python benchmarks/plots.py {results}` where one has"
    )


def _numbers(text: str) -> list[int]:
    found = [int(part) for part in text.split(",") if part]
    if not found:
        raise argparse.ArgumentTypeError("numbers by comma are needed")
    return found


def _python(text: str) -> str:
    """[NAME=]PATH of a program that is there: a wrong one would be found out after the compile."""
    path = text.partition("=")[2] or text
    if shutil.which(path) is None:
        raise argparse.ArgumentTypeError(f"{path} is no program that can be run")
    return text


def _names(text: str, known: Collection[str]) -> list[str]:
    """Names by comma. An unknown one would be left out in silence."""
    names = [part.strip() for part in text.split(",") if part.strip()]
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        what = f"unknown: {', '.join(unknown)}" if unknown else "names are needed"
        raise argparse.ArgumentTypeError(f"{what}; known: {', '.join(known)}")
    return names


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = found.add_argument
    add("model", help="what `bessemer compile` takes")
    add(
        "--peer-python",
        action="append",
        type=_python,
        default=[],
        metavar="[NAME=]PATH",
        help="the Python that has the other engines, or one of them (may be repeated)",
    )
    names = [engine.name for engine in ENGINES]
    add(
        "--engines",
        type=lambda text: _names(text, names),
        help=f"by comma, of {', '.join(names)}; all by default",
    )
    add(
        "--precision",
        type=lambda text: _names(text, PRECISIONS),
        default=["f32", "f16"],
        help=f"by comma, of {', '.join(PRECISIONS)}",
    )
    add("--threads", type=_numbers, default=[os.cpu_count() or 1], help="numbers of threads")
    add("--prompt", type=_numbers, default=[512], help="lengths of prompts")
    add("--generate", type=_numbers, default=[64], help="tokens to generate")
    add("--depth", type=_numbers, default=[16, 2000], help="tokens held before generating")
    add("--context", type=int, default=4096, help="tokens that a session can hold")
    add("--repeat", type=int, default=LEAST_REPEAT, help="turns that count")
    add("--work", type=Path, default=Path("build/compare"), help="for converted models")
    add("--out", type=Path, default=Path("build/compare/results"), help="for the results")
    return found  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Compare, write, and show the table. Exit codes as of `bessemer`: 1 failed, 2 wrong usage."""
    arguments = parser().parse_args(argv)
    try:
        return _main(arguments)
    except BessemerError as error:
        print(f"compare: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1


def _main(arguments: argparse.Namespace) -> int:
    if arguments.repeat < LEAST_REPEAT:
        say(f"--repeat {arguments.repeat}: medians of fewer than {LEAST_REPEAT} are only a look")
    found = compare(arguments, lambda so_far: write(so_far, arguments.out))
    sys.stdout.write(markdown(found))
    sys.stdout.flush()
    if found["results"]:  # the table is shown first: drawing may fail
        pythons = [sys.executable, *python_table(arguments.peer_python).values()]
        draw(write(found, arguments.out), pythons)
    return 0


if __name__ == "__main__":
    sys.exit(main())
