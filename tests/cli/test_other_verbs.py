"""`bessemer compile`, `models`, `pull`, `env`, and what all verbs share."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import bessemer as package
from bessemer.artifact.reader import open_artifact

from .conftest import Run


def test_help_and_version(bessemer: Run) -> None:
    assert bessemer("--version").out == f"{package.__version__}\n"
    text = bessemer("--help").out
    for verb in ("compile", "run", "chat", "verify", "inspect", "models", "pull", "env"):
        assert f"│ {verb}  " in text
    assert "Talk to a model." in text
    text = bessemer("run", "--help").out
    assert "a line of statistics to standard" in text
    for option in ("--prompt -p", "--file -f", "--max-tokens", "--top-k", "--stop", "--json"):
        assert option in text


# -- compile --------------------------------------------------------------------------------------


def test_compile_to_a_folder(bessemer: Run, checkpoint: Path, tmp_path: Path) -> None:
    done = bessemer("compile", checkpoint, "-o", tmp_path / "out", "--weights", "bf16")
    assert (done.code, done.out) == (0, f"{tmp_path / 'out'}\n")
    assert open_artifact(tmp_path / "out").manifest.options["weights"] == "bf16"
    assert "reading the model" in done.err
    again = bessemer("run", tmp_path / "out", "-p", "x", "--max-tokens", 2)
    assert again.out == "aa\n"


def test_compile_to_the_cache(
    bessemer: Run, checkpoint: Path, compilations: Callable[[], int], cache_home: Path
) -> None:
    first = bessemer("compile", checkpoint, "--json")
    assert first.json["compiled"] is True
    assert Path(first.json["path"]).parent == cache_home / "models"
    second = bessemer("compile", checkpoint, "--json")
    assert second.json["compiled"] is False
    assert compilations() == 1
    bessemer("run", checkpoint, "-p", "x", "--max-tokens", 1)
    assert compilations() == 1


def test_compile_passes_its_options(bessemer: Run, checkpoint: Path, tmp_path: Path) -> None:
    options = ("--kv", "f32", "--context", 77, "--emit", "mlir, asm", "--prefix", "one_")
    bessemer("compile", checkpoint, "-o", tmp_path / "out", *options)
    found = open_artifact(tmp_path / "out").manifest.options
    assert (found["kv"], found["context"], found["prefix"]) == ("f32", 77, "one_")
    assert found["emit"] == ["mlir", "asm"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--weights", "f8"), "--weights f8: choose one of f32, f16, bf16"),
        (("--emit", "mlir,bytecode"), "--emit bytecode"),
        (("--context", "0"), "--context 0: it must be"),
        (("--capture", "magic"), "--capture magic"),
        (("--target", "aarch64"), "with -o DIR"),
    ],
)
def test_compile_refuses(
    bessemer: Run, checkpoint: Path, options: tuple[str, ...], message: str
) -> None:
    done = bessemer("compile", checkpoint, *options)
    assert done.code == 2
    assert message in done.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("bench", "-p", "x"), "-p x: whole numbers from 0, separated by commas"),
        (("bench", "--threads=0"), "--threads 0: whole numbers from 1, separated by commas"),
        (("bench", "-r", "0"), "-r 0: it must be a whole number of at least 1"),
        (("verify", "--lengths", "3,0"), "--lengths 3,0: whole numbers from 1"),
        (("verify", "--decode-steps", "-1"), "--decode-steps -1: it must be a whole number"),
        (("verify", "--threads", "0"), "--threads 0: it must be from 1 to"),
        (("inspect", "memory", "--bandwidth", "0"), "--bandwidth 0: it must be above 0"),
        (("compile", "--output="), "--output '': it must be a path"),
        (("chat", "--json"), "unknown option --json"),
    ],
)
def test_options_are_named_as_they_were_typed(
    bessemer: Run, checkpoint: Path, words: tuple[str, ...], message: str
) -> None:
    verb, *rest = words
    done = bessemer(verb, checkpoint, *rest)
    assert (done.code, done.out) == (2, "")
    first, see = done.err.splitlines()
    assert first.startswith(f"bessemer: error: {message}")
    assert see == f"see: bessemer {verb} --help"


@pytest.mark.parametrize("absent", ["torch", "llvmlite.binding"])
def test_an_installation_that_only_runs_models(
    bessemer: Run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, absent: str
) -> None:
    """What compiling needs and isn't there is an error that says what to install."""

    def compile_model(*arguments: object, **options: object) -> None:
        raise ModuleNotFoundError(f"No module named {absent!r}", name=absent)

    monkeypatch.setattr("bessemer.api.compile_model", compile_model)
    done = bessemer("compile", checkpoint)
    assert done.code == 1
    assert f"{absent} is not installed; to compile models: pip install" in done.err


def test_compile_into_somebodys_folder(
    bessemer: Run, checkpoint: Path, tmp_path: Path, compilations: Callable[[], int]
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    done = bessemer("compile", checkpoint, "-o", tmp_path / "mine")
    assert done.code == 1
    assert "not a Bessemer artifact" in done.err
    assert compilations() == 0


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="Linux's own")
@pytest.mark.parametrize(
    ("output", "message"),
    [("/proc/model", "no folder can be made in /proc"), ("", "-o '': it must be a path")],
)
def test_compile_where_nothing_can_be_written(
    bessemer: Run, checkpoint: Path, compilations: Callable[[], int], output: str, message: str
) -> None:
    """Said before the work, also to root, whom no permission stops."""
    done = bessemer("compile", checkpoint, "-o", output)
    assert done.code == (1 if output else 2)
    assert message in done.err
    assert compilations() == 0


def test_compile_of_a_compiled_model(bessemer: Run, compiled: Path, tmp_path: Path) -> None:
    done = bessemer("compile", compiled, "-o", tmp_path / "out")
    assert done.code == 2
    assert "compiled model already" in done.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--top-p", 7), "--top-p 7: it must be"),
        (("--max-tokens", -1), "--max-tokens -1: it must be"),
        (("--stop", ""), "--stop '': it must be some text"),
        (("--threads", 0), "--threads 0: it must be from 1 to"),
    ],
)
@pytest.mark.parametrize("verb", ["run", "chat"])
def test_wrong_options_are_said_before_anything_is_compiled(
    bessemer: Run,
    checkpoint: Path,
    compilations: Callable[[], int],
    verb: str,
    options: tuple,
    message: str,
) -> None:
    prompt = ("-p", "x") if verb == "run" else ()
    done = bessemer(verb, checkpoint, *prompt, *options)
    assert done.code == 2
    assert message in done.err
    assert compilations() == 0


# -- models, pull, env ----------------------------------------------------------------------------


def test_models(bessemer: Run, checkpoint: Path) -> None:
    assert "No compiled models" in bessemer("models").out
    key = Path(bessemer("compile", checkpoint).out.strip()).name
    listed = bessemer("models", "--json").json
    assert [m["key"] for m in listed["compiled"]] == [key]
    assert listed["compiled"][0]["name"] == "checkpoint"
    assert {a["name"] for a in listed["aliases"]} == {"smollm2"}
    text = bessemer("models").out
    assert "checkpoint" in text
    assert key[:12] in text


def test_models_of_the_hub(bessemer: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def repository(name: str, *files: str) -> None:
        root = tmp_path / "hub" / f"models--{name.replace('/', '--')}"
        (root / "refs").mkdir(parents=True)
        (root / "refs" / "main").write_text("0" * 40)
        (root / "blobs").mkdir()
        snapshot = root / "snapshots" / ("0" * 40)
        snapshot.mkdir(parents=True)
        for file in files:
            (root / "blobs" / file).write_text("x")
            (snapshot / file).symlink_to(f"../../blobs/{file}")

    repository("some/llm", "config.json", "model.safetensors")
    repository("some/gguf", "small.gguf")
    repository("some/tokenizer", "tokenizer.json")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    import huggingface_hub

    scan = huggingface_hub.scan_cache_dir
    monkeypatch.setattr("huggingface_hub.scan_cache_dir", lambda: scan(tmp_path / "hub"))
    names = [m["name"] for m in bessemer("models", "--json").json["hub"]]
    assert names == ["some/gguf/small.gguf", "some/llm"]


def test_models_remove(bessemer: Run, checkpoint: Path) -> None:
    key = Path(bessemer("compile", checkpoint).out.strip()).name
    wrong = bessemer("models", "--remove", "nothing")
    assert wrong.code == 2
    assert "the keys of no compiled models begin so" in wrong.err
    assert "--remove needs a key" in bessemer("models", "--remove", "").err
    assert "removed checkpoint (" in bessemer("models", "--remove", key[:10]).err
    assert bessemer("models", "--json").json["compiled"] == []


def test_pull(bessemer: Run, checkpoint: Path) -> None:
    assert bessemer("pull", checkpoint).out == f"{checkpoint}\n"
    assert bessemer("pull", checkpoint, "--json").json["path"] == str(checkpoint)
    offline = bessemer("pull", "nobody/nothing")
    assert offline.code == 1
    assert "nobody/nothing" in offline.err


def test_env(bessemer: Run, cache_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BESSEMER_THREADS", "3")
    found = bessemer("env", "--json").json
    assert found["threads"] == 3
    assert found["cache"]["path"] == str(cache_home)
    assert found["versions"]["numpy"]
    assert found["missing"] == []
    text = bessemer("env").out
    assert str(cache_home) in text
    assert "threads" in text


def test_env_says_what_is_missing(bessemer: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from bessemer.cli import env

    real = env._version
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr(env, "_version", lambda n: None if n in ("torch", "ziglang") else real(n))
    done = bessemer("env")
    assert done.code == 0
    assert "missing: torch, needed to compile models: pip install" in done.out
    assert "missing: a C compiler" in done.out


# -- the Python API -------------------------------------------------------------------------------


def test_the_api_loads_what_it_compiled(
    checkpoint: Path, tmp_path: Path, compilations: Callable[[], int]
) -> None:
    model = package.compile(checkpoint, output=tmp_path / "out", kv="f32", threads=2)
    assert model.generate("x", max_tokens=3) == "aaa"
    assert model.path == tmp_path / "out"
    assert model.threads == 2
    again = package.load(tmp_path / "out", threads=1)
    assert again.chat([{"role": "user", "content": "x"}], max_tokens=2) == "aa"
    cached = [package.compile(checkpoint) for _ in range(2)]
    assert cached[0].path == cached[1].path != model.path
    assert compilations() == 2


def test_the_api_takes_objects(checkpoint: Path, compilations: Callable[[], int]) -> None:
    class Module:
        def __repr__(self) -> str:
            return "module"

    model = package.compile(Module())
    folder = model.path
    assert open_artifact(folder).manifest.name == "checkpoint"
    assert model.generate("x", max_tokens=2) == "aa"
    del model
    assert not folder.parent.exists()
    assert compilations() == 1


def test_the_api_names_what_it_does_not_know(checkpoint: Path) -> None:
    with pytest.raises(package.UsageError, match=r"no option wieghts; known: weights"):
        package.compile(checkpoint, wieghts="f16")
    with pytest.raises(AttributeError, match="nothing"):
        package.nothing  # noqa: B018
    assert set(package.__all__) <= set(dir(package))
    for name in package.__all__:
        assert getattr(package, name) is not None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context": "many"}, "--context is 'many'"),
        ({"context": 0}, "--context is 0"),
        ({"weights": 8}, "--weights 8: choose one of"),
        ({"emit": "mlir"}, "--emit 'mlir'"),
        ({"emit": ["mlir", 3]}, "--emit 3: choose one of"),
        ({"target": 3}, "--target 3"),
        ({"cpu": 3}, "--cpu 3"),
        ({"prefix": 3}, "--prefix 3"),
        ({"chunk": 1.5}, "--chunk is 1.5"),
        ({"threads": "x"}, "threads is 'x'"),
        ({"output": ""}, "output is ''"),
        ({"output": 3}, "output is 3"),
        ({"progress": 3}, "progress is 3"),
    ],
    ids=str,
)
def test_the_api_names_what_makes_no_sense(
    checkpoint: Path, compilations: Callable[[], int], options: dict, message: str
) -> None:
    with pytest.raises(package.UsageError, match=message):
        package.compile(checkpoint, **options)
    assert compilations() == 0


def test_sources_that_are_none() -> None:
    with pytest.raises(package.UsageError, match="MODEL is ''"):
        package.compile("")
    for load in (None, 5, b"x", ""):
        with pytest.raises(package.UsageError, match="it must be a path"):
            package.load(load)  # type: ignore[arg-type]


def test_the_api_for_another_machine(checkpoint: Path, tmp_path: Path) -> None:
    model = package.compile(checkpoint, output=tmp_path / "out", target="aarch64")
    assert model.manifest.options["target"] == "aarch64"
    with pytest.raises(package.ArtifactError, match="no compiled model"):
        package.load(tmp_path)


def test_progress_on_a_terminal(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from bessemer.cli.progress import StageProgress

    with StageProgress() as progress:
        progress._terminal = True
        for stage in ("import", "weights"):
            progress(stage, 0, 4)
            progress(stage, 4, 4)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "reading the model" in shown.err
    assert "writing weights" in shown.err


def test_saved_json_is_one_object(bessemer: Run, compiled: Path) -> None:
    out = bessemer("run", compiled, "-p", "é\u2028", "--max-tokens", 1, "--json").out
    assert len(out.splitlines()) == 1
    json.loads(out)


# -- what is said, and when -----------------------------------------------------------------------


def test_a_steering_file_is_looked_for_before_the_work(
    bessemer: Run, checkpoint: Path, compilations: Callable[[], int], tmp_path: Path
) -> None:
    done = bessemer("run", checkpoint, "-p", "x", "--steering", tmp_path / "none.f32")
    assert (done.code, compilations()) == (2, 0)
    assert "can't be read" in done.err


def test_log_probabilities_want_a_file(bessemer: Run, compiled: Path) -> None:
    done = bessemer("run", compiled, "-p", "x", "--dump-logprobs", "-")
    assert done.code == 2
    assert "name a file" in done.err
    assert not Path("-").exists()


def test_a_damaged_manifest_is_called_so(bessemer: Run, compiled: Path) -> None:
    (compiled / "manifest.json").write_text("{")
    done = bessemer("run", compiled, "-p", "x")
    assert done.code == 1
    assert "manifest.json" in done.err
    assert "safetensors" not in done.err


def test_a_file_is_no_compiled_folder(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(package.BessemerError, match="is a file, and no compiled model"):
        package.load(tmp_path / "m.gguf")


def test_a_name_that_is_nearly_an_alias(bessemer: Run) -> None:
    done = bessemer("compile", "SmolM2")
    assert done.code == 1
    assert "did you mean smollm2?" in done.err


def test_a_compiled_folder_that_lost_its_manifest(bessemer: Run, compiled: Path) -> None:
    (compiled / "config.json").write_text('{"model_type": "llama"}')
    (compiled / "manifest.json").unlink()
    others = (("compile",), ("bench",), ("inspect",))
    for verb in (("run", "-p", "x"), ("run", "-p", "x", "--dump-tokens"), *others):
        done = bessemer(verb[0], compiled, *verb[1:])
        assert (done.code, done.out) == (1, "")
        assert "a compiled model whose manifest.json is missing" in done.err


def test_a_list_without_a_number(bessemer: Run, compiled: Path) -> None:
    for option in ("-p", "-n", "-d", "-t"):
        done = bessemer("bench", compiled, option, ",")
        assert (done.code, done.out) == (2, "")
        assert "there is no number" in done.err


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--top-k", -2, "from 1, or 0 or -1 to switch it off"),
        ("--repeat-penalty", 1e300, "from 1.2e-38 to 8.5e+37"),
    ],
)
def test_limits_of_sampling(
    bessemer: Run, compiled: Path, option: str, value: float, message: str
) -> None:
    done = bessemer("run", compiled, "-p", "x", option, value)
    assert done.code == 2
    assert message in done.err
    assert (
        bessemer("run", compiled, "-p", "x", "--max-tokens", 1, "--repeat-penalty", "8.5e37").code
        == 0
    )
