"""The engines that `compare.py` knows: what each one's process is and which precisions it has."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bessemer.artifact.reader import open_artifact
from bessemer.artifact.work import Work, read_work
from bessemer.bench.protocol import Worker, WorkerError
from bessemer.bench.run import worker_environment
from bessemer.compile_options import CompileOptions
from bessemer.weight_formats import WEIGHT_FORMATS

PEERS = Path(__file__).resolve().parent / "peers"
PRECISIONS = ("f32", "f16", "q8_0")
# Seconds after which an engine is given up: exporting and compiling take minutes.
CONVERT_TIMEOUT = 3600.0
RUN_TIMEOUT = 900.0

BESSEMER = "Bessemer"
REFERENCE = "llama.cpp"


@dataclass(frozen=True)
class Engine:
    """script: under peers/.  precisions: what it is compared in; PyTorch's f16 on CPUs, for one, is
    no precision that anybody would choose.
    """

    name: str
    script: str
    precisions: tuple[str, ...]
    arguments: tuple[str, ...] = ()


ENGINES = (
    Engine("llama.cpp", "llamacpp_peer.py", ("f32", "f16", "q8_0")),
    Engine("OpenVINO GenAI", "openvino_peer.py", ("f32", "f16", "q8_0")),
    Engine("ONNX Runtime GenAI", "onnxruntime_peer.py", ("f32", "q8_0")),
    Engine("CTranslate2", "ctranslate2_peer.py", ("f32", "q8_0")),
    Engine("PyTorch eager", "pytorch_peer.py", ("f32",)),
    Engine("PyTorch compiled", "pytorch_peer.py", ("f32",), ("compile",)),
)


@dataclass
class Running:
    """An engine's process with the model in memory."""

    name: str
    version: str
    worker: Worker
    threads: int

    def seconds(self, op: str, tokens: int, depth: int) -> float:
        """One measurement."""
        answer = self.worker.ask(
            op, timeout=RUN_TIMEOUT, tokens=tokens, depth=depth, threads=self.threads
        )
        return float(answer["seconds"])


@dataclass(frozen=True)
class Source:
    """model: what Bessemer compiles.  folder: the same weights as a Hugging Face folder.
    work: where converted models are kept.
    """

    model: str
    folder: Path
    work: Path


def huggingface_folder(model: str, work: Path) -> Path:
    """The checkpoint as a Hugging Face folder: itself, or its weights in f32."""
    import numpy as np
    from safetensors.numpy import save_file

    from bessemer.importer.checkpoint import open_checkpoint

    with open_checkpoint(model) as checkpoint:
        if checkpoint.path.is_dir():
            return checkpoint.path
        folder = work / f"{checkpoint.path.stem}-hf"
        if (folder / "config.json").exists():
            return folder
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {n: np.ascontiguousarray(checkpoint.read(n)) for n in checkpoint.names()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        if checkpoint.has_tokenizer():
            checkpoint.write_tokenizer(folder)
        config = {**checkpoint.config, "torch_dtype": "float32"}
        (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return folder


def start_bessemer(source: Source, precision: str, threads: int) -> tuple[Running, Work, int]:
    """Bessemer's process, the work of its compiled model, and its chunk."""
    import bessemer
    from bessemer.api import prepare

    artifact = prepare(source.model, CompileOptions(weights=precision)).artifact
    worker = Worker([sys.executable, "-m", "bessemer.bench.worker"], worker_environment())
    worker.ask("load", folder=str(artifact.folder), threads=[threads])
    running = Running(BESSEMER, f"Bessemer {bessemer.__version__}", worker, threads)
    chunk = open_artifact(artifact.folder).manifest.state.chunk
    return running, read_work(artifact.folder), chunk


def start_peer(
    engine: Engine, source: Source, precision: str, threads: int, python: str
) -> Running:
    """A peer's process with the model loaded. Raises WorkerError where it isn't installed or fails.

    The model is converted by a process of its own, so that it leaves nothing in memory.
    """
    command = [python, str(PEERS / engine.script), *engine.arguments]
    target = source.work / f"{Path(engine.script).stem}-{source.folder.name}-{precision}"
    with Worker(command) as converter:
        version = converter.ask("version")
        found = converter.ask(
            "convert",
            timeout=CONVERT_TIMEOUT,
            source=str(source.folder),
            precision=precision,
            target=str(target),
        )
    worker = Worker(command)
    try:
        worker.ask(
            "load", timeout=RUN_TIMEOUT, path=found["path"], threads=threads, **found["load"]
        )
    except WorkerError:
        worker.close()
        raise
    return Running(engine.name, version, worker, threads)


def start_all(
    source: Source,
    precision: str,
    threads: int,
    chosen: tuple[Engine, ...],
    python_of: Callable[[Engine], str],
    say: Callable[[str], None],
) -> tuple[list[Running], Mapping[str, str]]:
    """The peers that run, and why the others don't."""
    running: list[Running] = []
    absent: dict[str, str] = {}
    for engine in chosen:
        if precision not in engine.precisions:
            continue
        say(f"starting {engine.name}")
        try:
            running.append(start_peer(engine, source, precision, threads, python_of(engine)))
        except (WorkerError, OSError) as error:
            absent[engine.name] = str(error).splitlines()[-1]
            say(f"{engine.name} is left out: {absent[engine.name]}")
    return running, absent


def bessemer_precisions() -> list[str]:
    """The precisions of the comparison that this Bessemer has."""
    return [p for p in PRECISIONS if p in WEIGHT_FORMATS]


def describe(running: Running) -> dict[str, Any]:
    """An entry of the results' list of engines."""
    from bessemer.bench.memory import process_memory

    memory = process_memory(Path(f"/proc/{running.worker.pid}"))
    return {"name": running.name, "version": running.version, "memory": memory}
