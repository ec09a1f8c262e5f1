"""Shared libraries, archives, renamed symbols, and linkers that are missing."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bessemer.backend import link
from bessemer.backend.codegen import compile_module
from bessemer.backend.target import Target
from bessemer.backend.tools import require_llvm_tool, run_tool
from bessemer.errors import CompileError

from .support import elementwise, memref

TEXT = elementwise("%y = math.exp %x : {S}\n%r = math.tan %y : {S}")
ODD_NAME = "-a 'b\" \\ é модель @x"


def tool(name: str, *arguments: str) -> str:
    return run_tool([require_llvm_tool(name), *arguments])


def symbols(path: Path, *flags: str) -> set[str]:
    return set(tool("llvm-nm", "--just-symbol-name", *flags, str(path)).split())


@pytest.fixture
def objects(tmp_path: Path) -> list[Path]:
    target = Target.native()
    path = tmp_path / "group.o"
    path.write_bytes(compile_module(TEXT, target, "group", exports=["_mlir_ciface_f"]).object)
    return [path, *link.compile_native(target, tmp_path)]


@pytest.fixture(params=["system", "zig"])
def linker(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    monkeypatch.delenv("CC", raising=False)
    if request.param == "zig":
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return str(request.param)


def check(library: Path) -> None:
    loaded = ctypes.CDLL(str(library))
    x, y = np.linspace(-2, 2, 16, dtype=np.float32), np.zeros(16, np.float32)
    loaded._mlir_ciface_f(memref(x), memref(y))
    np.testing.assert_allclose(y, np.tan(np.exp(x)), rtol=1e-5, atol=1e-6)


def test_shared_library(linker: str, tmp_path: Path) -> None:
    """Odd paths, both linkers, cold caches: it loads, and needs libc and libm alone."""
    target = Target.native()
    folder = tmp_path / ODD_NAME
    folder.mkdir()
    source = folder / "-group.o"
    source.write_bytes(compile_module(TEXT, target, "group", exports=["_mlir_ciface_f"]).object)
    library = folder / "-model.so"
    link.link_shared([source, *link.compile_native(target, folder)], library, target, "model.so")
    check(library)
    headers = tool("llvm-readelf", "-d", "-l", "-W", str(library))
    needed = {line.split("[")[1].split("]")[0] for line in headers.splitlines() if "NEEDED" in line}
    assert needed <= {"libc.so.6", "libm.so.6", "libpthread.so.0", "ld-linux-x86-64.so.2"} | {
        "ld-linux-aarch64.so.1"
    }
    assert "Library soname: [model.so]" in headers
    assert "TEXTREL" not in headers
    stack = next(line for line in headers.splitlines() if "GNU_STACK" in line)
    assert " RW " in stack
    exported = symbols(library, "-D", "--defined-only")
    assert "_mlir_ciface_f" in exported
    assert "f" not in exported
    assert {s for s in exported if not s.startswith(("_init", "_fini"))} == {
        "_mlir_ciface_f",
        "bsm_pool_create",
        "bsm_pool_destroy",
        "bsm_pool_size",
        "bsm_fork",
        "bsm_barrier",
        "bsm_poll_cancel",
        "bsm_parallel_for",
    }


def test_undefined_symbol_is_an_error(linker: str, tmp_path: Path) -> None:
    text = """
    func.func private @not_there(f32) -> f32
    func.func @f(%a: f32) -> f32 {
      %b = func.call @not_there(%a) : (f32) -> f32
      return %b : f32
    }"""
    path = tmp_path / "a.o"
    path.write_bytes(compile_module(text, Target.native(), "a").object)
    with pytest.raises(CompileError, match="not_there"):
        link.link_shared([path], tmp_path / "a.so", Target.native())


def test_archive_is_reproducible_and_links(objects: list[Path], tmp_path: Path) -> None:
    first, second = tmp_path / "liba.a", tmp_path / "libb.a"
    link.archive(objects, first)
    link.archive(objects, second)
    link.archive(objects, second)
    assert first.read_bytes() == second.read_bytes()
    members = tool("llvm-ar", "t", str(first)).split()
    assert members == [path.name for path in objects]


def test_prefix(objects: list[Path], tmp_path: Path) -> None:
    """All our global symbols get the prefix, references follow, libc's keep their names."""
    renamed = link.prefix_symbols(objects, "qwen_", tmp_path / "renamed")
    defined = set.union(*(symbols(p, "--extern-only", "--defined-only") for p in renamed))
    assert defined
    assert all(name.startswith("qwen_") for name in defined)
    undefined = set.union(*(symbols(p, "--undefined-only") for p in renamed))
    assert {"tanf", "pthread_create"} <= undefined
    library = tmp_path / "renamed.so"
    link.link_shared(renamed, library, Target.native())
    assert ctypes.CDLL(str(library)).qwen_bsm_pool_size(None) == 1
    both = tmp_path / "both.so"
    link.link_shared([*renamed, *objects], both, Target.native())
    check(both)
    with pytest.raises(CompileError, match="C identifier"):
        link.prefix_symbols(objects, "a-b", tmp_path / "x")


def test_missing_export_is_an_error() -> None:
    with pytest.raises(CompileError, match="does not define forward_decode"):
        compile_module(TEXT, Target.native(), "group", exports=["forward_decode"])


def test_no_linker_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(CompileError) as caught:
        link.compile_native(Target.native(), tmp_path)
    message = str(caught.value)
    assert "\n" not in message
    assert "set CC" in message
    assert "pip install ziglang" in message


def test_cc_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "/no/such/cc -O1")
    with pytest.raises(CompileError, match="CC is set to '/no/such/cc -O1'"):
        link.compile_native(Target.native(), tmp_path)


def test_cc_with_spaces_and_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CC may be a path with spaces, or a command with options. It is run, not a shell."""
    folder = tmp_path / "my tools"
    folder.mkdir()
    script = folder / "cc $(x)"
    log = tmp_path / "log"
    script.write_text(
        f"#!{sys.executable}\nimport sys\n"
        f"open({str(log)!r}, 'a').write(repr(sys.argv[1:]) + chr(10))\n"
        "sys.exit(3 if '-fail' in sys.argv else 0)\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("CC", str(script))
    link.compile_native(Target.native(), tmp_path)
    assert "'-c'" in log.read_text()
    monkeypatch.setenv("CC", f"'{script}' -fail")
    with pytest.raises(CompileError, match=r"failed \(3\)"):
        link.compile_native(Target.native(), tmp_path)


@pytest.mark.parametrize("arch", ["aarch64", "riscv64"])
def test_native_sources_cross_compile(
    arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    objects = link.compile_native(Target.parse(arch), tmp_path)
    assert "pool.o" in {path.name for path in objects}
    machine = {"aarch64": 183, "riscv64": 243}[arch]
    libc_only = ("pthread_", "sched_", "__sched_", "sig", "get", "sysconf", "posix_", "mem")
    libc_only += ("clock_gettime",)
    for path in objects:
        assert int.from_bytes(path.read_bytes()[18:20], "little") == machine
        undefined = symbols(path, "--undefined-only") - {"calloc", "free", "__tls_get_addr"}
        assert all(name.startswith(libc_only) for name in undefined), undefined


def test_replay_command_line(tmp_path: Path) -> None:
    path = tmp_path / "m.mlir"
    path.write_text("func.func @f() { return }")
    command = [sys.executable, "-m", "bessemer.backend.replay"]
    done = subprocess.run(
        [*command, "builtin.module(convert-func-to-llvm)", str(path)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "llvm.func @f()" in done.stdout
    usage = subprocess.run(command, capture_output=True, text=True, check=False)
    assert usage.returncode == 2
