"""Tokenizer files with wrong bytes, under AddressSanitizer and UndefinedBehaviorSanitizer."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bessemer.artifact.text.build import build_tokenizer_file
from bessemer.native import FOLDER
from tests.native.text_library import text_sources
from tests.native.tokenizer_zoo import ZOO, wrap

HARNESS = Path(__file__).with_name("fuzz_tokenizer.c")
ROUNDS, SEED = 800, 20240607
UNDEFINED = ("-fsanitize=undefined", "-fno-sanitize-recover=all")
TEMPLATE = (
    "{{ strftime_now('%d %b') }}{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}"
    "{% endfor %}[assistant]"
)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz")
    trial = folder / "trial.c"
    trial.write_text("int main(void) { return 0; }\n")
    # The harness has this file inside.
    sources = [path for path in text_sources() if path.stem != "token_file"]
    system = [[path] for name in ("gcc", "clang", "cc") if (path := shutil.which(name))]
    choices = [([*command, "-fsanitize=address"], command) for command in system]
    # zig has no runtime of AddressSanitizer.
    choices.append(([sys.executable, "-m", "ziglang", "cc"], []))
    for command, _ in choices:
        words = [*command, "-std=c11", "-O1", "-g", *UNDEFINED, f"-I{FOLDER}", "-Wall", "-Wextra"]
        tried = subprocess.run([*words, trial, "-o", folder / "trial"], capture_output=True)
        if tried.returncode == 0 and subprocess.run([folder / "trial"]).returncode == 0:
            out = folder / "fuzz"
            subprocess.run([*words, HARNESS, *sources, "-o", out], check=True)
            return out
    pytest.skip("no C compiler here has the runtime of a sanitizer")


@pytest.mark.parametrize("name", ["qwen2", "falcon", "llama2", "unigram bytes", "t5"])
def test_wrong_bytes(program: Path, tmp_path: Path, name: str) -> None:
    path = tmp_path / "tokenizer.bin"
    path.write_bytes(build_tokenizer_file(wrap(ZOO[name](), TEMPLATE)).content)
    command = [program, path, str(ROUNDS), str(SEED)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    opened, encoded = (int(word) for word in done.stdout.split() if word.isdigit())
    # The harness tries something: most files are opened, and most texts still encoded.
    assert opened > ROUNDS // 3
    assert encoded > opened
