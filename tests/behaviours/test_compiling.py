"""BEHAVIOURS, Compiling, with real compilations."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bessemer import api
from bessemer.cli import main
from bessemer.compile_options import CompileOptions
from bessemer.compiler import compile_model, generate_model
from bessemer.errors import ArtifactError, UnsupportedError
from bessemer.runtime.model import Model
from tests.behaviours.forked import command_line
from tests.behaviours.models import (
    bessemer,
    build,
    causal_lm,
    save_folder,
    scripted,
    stepwise,
    text_model,
)
from tests.e2e.compiled import F32_ERROR, compiled, error, reference, token_ids


class Unknown(torch.nn.Module):
    """Two ops that no table has."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(7, 8)
        self.inner = torch.nn.ModuleDict({"odd": Odd()})

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return torch.special.bessel_j0(self.inner["odd"](self.table(ids)))


class Odd(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.special.erfcx(x)


def test_c01_every_unknown_op_at_once(tmp_path: Path) -> None:
    """One error names both: op, node, module path, source line; nothing is left behind."""
    with pytest.raises(UnsupportedError) as caught:
        api.compile(Unknown(), output=tmp_path / "model")
    text = str(caught.value)
    for line, op, path in (
        ("return torch.special.bessel_j0", "special_bessel_j0", "special_bessel_j0"),
        ("return torch.special.erfcx", "special_erfcx", "inner.odd"),
    ):
        number = next(
            i + 1
            for i, source in enumerate(Path(__file__).read_text().splitlines())
            if source.strip().startswith(line)
        )
        shown = next(part for part in text.splitlines() if op in part)
        assert f"test_compiling.py:{number}" in shown, text
        assert path in shown
    assert list(tmp_path.iterdir()) == []


LENGTHS = (1, 5, 7, 8, 9, 1024)


def test_c02_every_length() -> None:
    """Captured with an example of 6 tokens; run at others, in one chunk and in several."""
    model = causal_lm("llama", num_hidden_layers=2)
    ids = token_ids(LENGTHS[-1])
    want = reference(model, ids)
    session = build(model, context=1024, chunk=500).session()
    for length in LENGTHS:
        session.rewind(0)
        got = session.prefill(ids[:length], all_logits=True)
        assert error(got, want[:length]) < F32_ERROR, length


# 64 MiB in f32, in two layers; and four times as wide a vocabulary and MLP.
WIDE = {"hidden_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8, "head_dim": 64}
IR_LIMIT = 2 << 20


def test_c03_ir_holds_no_weights() -> None:
    sizes = []
    for scale in (1, 4):
        model = text_model("llama", **{**WIDE, "intermediate_size": 5120 * scale})
        nbytes = sum(p.numel() * 4 for p in model.parameters())
        assert nbytes >= 64 << 20
        compilation = generate_model(model, CompileOptions("f32"))
        by_graph: dict[str, int] = {}
        for stem, text in compilation.generated.modules.items():
            entry = stem.rsplit("_", 1)[-1]
            by_graph[entry] = by_graph.get(entry, 0) + len(text)
        assert max(by_graph.values()) < IR_LIMIT
        sizes.append(sum(by_graph.values()))
    assert sizes[1] < sizes[0] * 1.01


_PEAK = """
import sys
from pathlib import Path
from bessemer import api
from bessemer.compile_options import CompileOptions
peaks = {}
def progress(stage, done, total):
    # Not getrusage: its maximum is inherited from the process that started this one.
    lines = Path("/proc/self/status").read_text().splitlines()
    (peaks[stage],) = (1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
api.compile_to(sys.argv[1], CompileOptions("f32"), Path(sys.argv[2]), progress=progress)
print(peaks["link"], peaks["weights"])
"""
# One tensor as it is stored, one being packed, and pages that the system hasn't taken back yet.
TENSORS_HELD = 6


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system tells no peak")
def test_c03_memory_of_a_compilation(tmp_path: Path) -> None:
    """Writing 90 MiB of weights adds some tensors' worth of memory and no more."""
    model = text_model("llama", **{**WIDE, "intermediate_size": 4608, "num_hidden_layers": 3})
    sizes = [parameter.numel() * 4 for parameter in model.parameters()]
    assert sum(sizes) > 1.5 * TENSORS_HELD * max(sizes)
    save_folder(tmp_path / "model", model)
    command = [sys.executable, "-c", _PEAK, str(tmp_path / "model"), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    before, after = map(int, done.stdout.split())
    assert after - before < TENSORS_HELD * max(sizes)


def copy(model_type: str, folder: Path) -> Path:
    return Path(shutil.copytree(compiled(model_type), folder))


@pytest.mark.parametrize(
    ("name", "message"),
    [("model.so", "model.so"), ("weights.bin", "weights.bin"), ("manifest.json", "model")],
)
def test_c08_files_of_another_model(name: str, message: str, tmp_path: Path) -> None:
    """A real library, weights or manifest of another model is refused when it is loaded."""
    folder = copy("llama", tmp_path / "model")
    shutil.copyfile(compiled("olmo2") / name, folder / name)
    with pytest.raises(ArtifactError, match=message):
        Model.load(folder)


def test_c08_a_weight_of_another_shape_dtype_or_hash(tmp_path: Path) -> None:
    for number, (key, value) in enumerate(
        [("shape", [1, 2]), ("dtype", "f16"), ("sha256", "0" * 64)]
    ):
        folder = copy("llama", tmp_path / str(number))
        path = folder / "manifest.json"
        manifest = json.loads(path.read_text())
        entry = next(iter(manifest["weights"])) if isinstance(manifest["weights"], list) else None
        assert entry is not None
        assert key in entry
        entry[key] = value
        path.write_text(json.dumps(manifest))
        with pytest.raises(ArtifactError):
            Model.load(folder)


# Rounding of the weights alone; see tests/e2e/test_architectures.py.
ROUNDING = {torch.float32: F32_ERROR, torch.float16: 2e-2, torch.bfloat16: 1.5e-1}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_c09_checkpoints_of_every_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    """Stored in 16 bits: equal to transformers in f32 on those numbers, and within the rounding of
    the f32 model.
    """
    model = causal_lm("llama", num_hidden_layers=2)
    ids = token_ids(37)
    want = reference(model, ids)
    model.to(dtype).save_pretrained(tmp_path)
    # Not the model itself: its rotary frequencies are in 16 bits now.
    stored = causal_lm("llama", num_hidden_layers=2)
    stored.load_state_dict({k: v.to(torch.float32) for k, v in model.state_dict().items()})
    same = reference(stored, ids)
    kept = "bf16" if dtype == torch.bfloat16 else "f16"
    got = stepwise(build(tmp_path, weights=kept).session(), ids, 20)
    assert error(got, same) < F32_ERROR
    assert F32_ERROR < error(got, want) < ROUNDING[dtype]


def test_c10_a_cpu_that_this_one_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code for AVX-512, or for what a virtual machine hides: an error at load, never a signal."""
    from bessemer.backend.target import Target
    from bessemer.runtime import cpu

    if Target.native().arch == "x86_64":
        # sapphirerapids has AMX and AVX512-FP16 besides AVX-512; where this machine has all, hide.
        options = CompileOptions("f32", context=32, cpu="sapphirerapids")
        folder = compile_model(causal_lm("llama", num_hidden_layers=1), options, tmp_path / "m")
        manifest = json.loads((folder / "manifest.json").read_text())
        assert {"avx512f", "avx512_fp16"} <= set(manifest["required_features"])
        have = cpu.host_features() - {"avx512f"}
        monkeypatch.setattr(cpu, "host_features", lambda *_: have)
        with pytest.raises(ArtifactError, match=r"compiled for a CPU with .*avx512f.*lacks"):
            Model.load(folder)
        assert main(["run", str(folder), "-p", "x", "--raw"]) == 1
    native = compiled("llama")
    required = json.loads((native / "manifest.json").read_text())["required_features"]
    hidden = frozenset(cpu.host_features() - {required[0]})
    monkeypatch.setattr(cpu, "host_features", lambda *_: hidden)
    with pytest.raises(ArtifactError, match=rf"{required[0]}.*lacks"):
        Model.load(native)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with text that says `a`, and `b` after `x`."""
    model = scripted(text_model(), b"a", {ord("x"): b"b"})
    return save_folder(tmp_path_factory.mktemp("compiling") / "checkpoint", model)


def test_c11_eight_processes_at_once(checkpoint: Path, tmp_path: Path) -> None:
    """A cold cache: all succeed, and one of them compiles."""
    environment = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    arguments = ("-p", "x", "--raw", "--max-tokens", 3, "--threads", 1, "--json")
    running = [command_line("run", checkpoint, *arguments, env=environment) for _ in range(8)]
    outcomes = [child.wait() for child in running]
    for done in outcomes:
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["text"] == "baa"
    times = [json.loads(done.stdout)["compile_s"] for done in outcomes]
    assert sum(t > 0 for t in times) == 1


def test_c12_no_linker(checkpoint: Path, tmp_path: Path) -> None:
    """One line that says what is missing and how to set it, before minutes of work."""
    done = bessemer(
        "compile", checkpoint, "-o", tmp_path / "out", env={"CC": str(tmp_path / "nothing")}
    )
    assert done.returncode == 1
    errors = [line for line in done.stderr.splitlines() if "error" in line]
    assert len(errors) == 1
    assert "reading the model" not in done.stderr
    assert "CC is set to" in errors[0]
    assert "nothing" in errors[0]
    assert not (tmp_path / "out").exists()


ODD = "a b'c\"d\\e"


def test_c13_l07_odd_names(checkpoint: Path, tmp_path: Path) -> None:
    """TMPDIR with a space, quotes and a backslash; folders with such names, with letters beyond
    ASCII, and with a leading dash: compiled, loaded and run.
    """
    (tmp_path / ODD).mkdir()
    work = tmp_path / "модель é b"
    work.mkdir()
    shutil.copytree(checkpoint, work / "-dash")
    environment = {"TMPDIR": str(tmp_path / ODD), "XDG_CACHE_HOME": str(tmp_path / ODD / "cache")}
    where: dict[str, Any] = {"cwd": work, "env": environment}
    done = command_line("compile", '-o=-it\'s "out"', "--", "-dash", **where).wait()
    assert done.returncode == 0, done.stderr
    assert not [p for p in (tmp_path / ODD).iterdir() if p.name != "cache"]
    arguments = ("-p", "x", "--raw", "--max-tokens", 3)
    done = command_line("run", *arguments, "--", '-it\'s "out"', **where).wait()
    assert (done.returncode, done.stdout) == (0, "baa\n"), done.stderr


def test_c14_no_recompilation_and_the_same_buffers(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(checkpoint, context=128)
    monkeypatch.setattr("bessemer.compiler.compile_model", None)
    monkeypatch.setattr("bessemer.runtime.session.allocate", model_allocates := Counting())
    assert model.generate("y", max_tokens=16) == "a" * 16
    after_first = model_allocates.count
    assert model.generate("y", max_tokens=32) == "a" * 32
    assert model.generate("y" * 40, max_tokens=32) == "a" * 32
    assert model_allocates.count == after_first > 0


class Counting:
    """`allocate`, counted."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, *arguments: object, **options: object) -> np.ndarray:
        from bessemer.runtime.memory import allocate

        self.count += 1
        return allocate(*arguments, **options)  # type: ignore[arg-type]


def test_c15_one_changed_byte(
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """At the same path, with the same size and times as before: compiled anew."""
    folder = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    weights = folder / "model.safetensors"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def run() -> tuple[str, bool]:
        """The answer, and whether something was compiled."""
        arguments = ["-p", "x", "--raw", "--max-tokens", "2", "--json"]
        assert main(["run", str(folder), *arguments]) == 0
        report = json.loads(capsys.readouterr().out)
        return report["text"], report["compile_s"] > 0

    assert run() == ("ba", True)
    status, data = weights.stat(), bytearray(weights.read_bytes())
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    head = header["lm_head.weight"]
    # The sign bit of the channel that says `b`: row b, channel 1, as little-endian f32.
    at = 8 + length + head["data_offsets"][0] + (ord("b") * head["shape"][1] + 1) * 4 + 3
    data[at] ^= 0x80
    weights.write_bytes(data)
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))
    text, compiled_again = run()
    assert compiled_again
    assert text != "ba"
    assert run() == (text, False)
