"""Objects to libraries: the C of `native/`, the shared library, the archive, renamed symbols.

Tools, in order: `$CC` if it is set; the system's C compiler where the target is this machine (it
links in 20 ms); else zig. Zig compiles C at once, but its first link against a libc that it builds
from source takes 20 s, so for this machine its linker is called directly with the system's libc.
No tool is ever run through a shell.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from bessemer.backend.tools import require_llvm_tool, run_tool
from bessemer.errors import CompileError
from bessemer.native import FOLDER

if TYPE_CHECKING:
    from bessemer.backend.target import Target

NATIVE_SOURCES = FOLDER
# What compiled code itself calls; the other sources are the C API above it.
_RUNTIME = ("pool", "profile")
# Oldest C library that an artifact cross-compiled for Linux asks for.
_GLIBC = {"riscv64": "2.27"}
_GLIBC_OTHERS = "2.17"
_C_FLAGS = ("-std=c11", "-O2", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra")
# No executable stack, no relocations in code, read-only relocation tables, no undefined symbols.
_ELF_LINK_FLAGS = ("noexecstack", "text", "relro", "defs")
# First bytes of a 64-bit object of macOS.
_MACHO_MAGIC = b"\xcf\xfa\xed\xfe"
_SYSTEM_LIBRARIES = ("libm.so.6", "libpthread.so.0", "libc.so.6")


def require_tools(target: Target) -> None:
    """Raise CompileError when there is no C compiler, linker or archiver for `target`: asked for
    before minutes of work.
    """
    _compiler(target)
    require_llvm_tool("llvm-ar")


def link_shared(
    objects: Sequence[Path], out: Path, target: Target, soname: str | None = None
) -> None:
    """Link objects into a shared library that needs libc, libm and libpthread alone.

    `soname` is the name recorded in the library (default: none). Raises CompileError when no linker
    is found, or with the linker's words (an undefined symbol is an error).
    """
    inputs = [_operand(path) for path in objects]
    compiler, is_zig = _compiler(target)
    if is_zig and target.is_native and target.system == "linux":
        libraries = _system_libraries()
        if libraries:
            command = [*_zig("ld.lld"), "-shared", "--as-needed", "--hash-style=gnu"]
            command += [word for flag in _ELF_LINK_FLAGS for word in ("-z", flag)]
            command += ["-soname", soname] if soname else []
            run_tool([*command, "-o", _operand(out), *inputs, *libraries], env=_environment())
            return
    command = [*compiler, "-shared", "-o", _operand(out), *inputs]
    if target.system == "linux":
        # zig knows no `-z text`: it is what its linker does anyway.
        wanted = [flag for flag in _ELF_LINK_FLAGS if not (is_zig and flag == "text")]
        command += [f"-Wl,-z,{flag}" for flag in wanted]
        command += [f"-Wl,-soname,{soname}"] if soname else []
        command += ["-Wl,--as-needed", "-lm", "-lpthread"]
    elif target.system == "darwin":
        # Unnamed, a library is known by the path at which it was made.
        command += [f"-Wl,-install_name,{soname or '@rpath/' + out.name}"]
    run_tool(command, env=_environment())


def archive(objects: Sequence[Path], out: Path) -> None:
    """Write a static library with an index. The same objects give the same bytes."""
    out.unlink(missing_ok=True)
    inputs = [_operand(path) for path in objects]
    run_tool([require_llvm_tool("llvm-ar"), "rcsD", _operand(out), *inputs])


def compile_native(target: Target, folder: Path) -> list[Path]:
    """Compile what compiled code calls (the thread pool) for `target` into `folder`; returns the
    objects in name order.
    """
    return _compile_all([NATIVE_SOURCES / f"{stem}.c" for stem in _RUNTIME], folder, target)


def compile_api(target: Target, folder: Path) -> list[Path]:
    """Compile the C API of `native/` for `target` into `folder`; returns the objects in name order.

    It refers to the description of a model (`codegen.description`), to be linked with it.
    """
    sources = [path for path in sorted(NATIVE_SOURCES.glob("*.c")) if path.stem not in _RUNTIME]
    return _compile_all(sources, folder, target)


def compile_runner(target: Target, folder: Path) -> list[Path]:
    """Compile the standalone program of `native/runner/` for `target` into `folder`; returns the
    objects in name order. It is to be linked with the C API and its own identity, see `standalone`.
    """
    sources = sorted((NATIVE_SOURCES / "runner").glob("*.c"))
    return _compile_all(sources, folder / "program", target)


def link_program(objects: Sequence[Path], out: Path, target: Target, static: bool) -> None:
    """Link objects into a program that needs libc, libm and libpthread alone; `static`: nothing.

    Raises CompileError when no linker is found, or with the linker's words.
    """
    compiler, is_zig = _compiler(target)
    command = [*compiler, "-o", _operand(out), *(_operand(path) for path in objects)]
    if target.system == "linux":
        wanted = [flag for flag in _ELF_LINK_FLAGS if not (is_zig and flag == "text")]
        command += [f"-Wl,-z,{flag}" for flag in wanted]
        # Without a table of symbols: it is half the size.
        command += ["-Wl,--as-needed", "-Wl,-s", "-lm", "-lpthread"]
        command += ["-static"] if static else []
    elif target.system == "darwin":
        command += ["-Wl,-dead_strip", "-Wl,-x"]
    run_tool(command, env=_environment())


def _compile_all(sources: Sequence[Path], folder: Path, target: Target) -> list[Path]:
    objects = [folder / f"{source.stem}.o" for source in sources]
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        done = [
            pool.submit(compile_c, source, out, target)
            for source, out in zip(sources, objects, strict=True)
        ]
        for future in done:
            future.result()
    return objects


def compile_c(source: Path, out: Path, target: Target, flags: Sequence[str] = ()) -> None:
    """Compile one C file to an object. Raises CompileError with the compiler's words.

    The object is written beside `out` and renamed, so that parallel processes may share a folder.
    """
    compiler, is_zig = _compiler(target)
    # Objects must not need the compiler's own runtime: no sanitizer (zig's default), no calls for
    # atomics (gcc's default on aarch64).
    extra = ["-fno-sanitize=undefined", "-g0"] if is_zig else []
    extra += ["-mno-outline-atomics"] if target.arch == "aarch64" else []
    out.parent.mkdir(parents=True, exist_ok=True)
    handle, scratch = tempfile.mkstemp(dir=out.parent, prefix=f".{out.stem}-", suffix=".o")
    os.close(handle)
    try:
        command = [*compiler, *_C_FLAGS, *extra, *flags]
        run_tool([*command, "-c", _operand(source), "-o", _operand(Path(scratch))], _environment())
        os.replace(scratch, out)
    finally:
        Path(scratch).unlink(missing_ok=True)


def prefix_symbols(objects: Sequence[Path], prefix: str, folder: Path) -> list[Path]:
    """Copies of the objects in which every global symbol that they define starts with `prefix`.

    References between the objects follow; those to libc stay. With it two models can be linked
    into one program. Raises CompileError when `prefix` is not a C identifier.
    """
    if not prefix.isidentifier() or not prefix.isascii():
        raise CompileError(f"--prefix '{prefix}' must be a C identifier")
    names: set[str] = set()
    for path in objects:
        listing = run_tool(
            [
                require_llvm_tool("llvm-nm"),
                "--extern-only",
                "--defined-only",
                "--just-symbol-name",
                _operand(path),
            ]
        )
        names.update(line.strip() for line in listing.splitlines() if line.strip())
    folder.mkdir(parents=True, exist_ok=True)
    renames = folder / "symbols.txt"
    pairs = sorted((name, _prefixed(name, prefix, objects[0])) for name in names)
    renames.write_text("".join(f"{old} {new}\n" for old, new in pairs), encoding="utf-8")
    renamed = []
    for path in objects:
        out = folder / path.name
        run_tool(
            [
                require_llvm_tool("llvm-objcopy"),
                f"--redefine-syms={renames}",
                _operand(path),
                _operand(out),
            ]
        )
        renamed.append(out)
    return renamed


def _prefixed(name: str, prefix: str, path: Path) -> str:
    """The symbol of a C name with the prefix: Mach-O writes an underscore before every C name."""
    with path.open("rb") as stream:
        is_macho = stream.read(len(_MACHO_MAGIC)) == _MACHO_MAGIC
    return f"_{prefix}{name[1:]}" if is_macho and name.startswith("_") else f"{prefix}{name}"


def _operand(path: Path) -> str:
    """The absolute path: a name that starts with a dash or an @ is no option then."""
    return str(path.resolve())


def _compiler(target: Target) -> tuple[list[str], bool]:
    """The command that compiles and links C for `target`, and whether it is zig."""
    chosen = os.environ.get("CC", "").strip()
    if chosen:
        # A path may contain spaces; otherwise CC may carry options ("clang -m64").
        words = [chosen] if Path(chosen).is_file() else shlex.split(chosen)
        if shutil.which(words[0]) is None:
            raise CompileError(f"CC is set to '{chosen}', but there is no such program")
        return words, False
    if target.is_native:
        system = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
        if system:
            return [system], False
    if importlib.util.find_spec("ziglang") is None:
        raise CompileError(
            f"No C compiler and linker for {target.triple}: set CC to one, or pip install ziglang"
        )
    return [*_zig("cc"), "-target", _zig_triple(target)], True


def _zig(tool: str) -> list[str]:
    return [sys.executable, "-m", "ziglang", tool]


def _zig_triple(target: Target) -> str:
    if target.system == "linux":
        abi = "musl" if "musl" in target.triple else f"gnu.{_GLIBC.get(target.arch, _GLIBC_OTHERS)}"
        return f"{target.arch}-linux-{abi}"
    # The system that the triple names (macosx11.0.0), not the newest that zig knows.
    version = re.search(r"macos\D*(\d+(?:\.\d+){0,2})", target.triple)
    return f"{target.arch}-macos" + (f".{version[1]}" if version else "")


def _environment() -> dict[str, str]:
    """The environment, with zig's caches beside ours rather than in the home folder."""
    env = dict(os.environ)
    cache = env.get("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())
    folder = Path(cache) / "bessemer" / "zig"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except (OSError, RuntimeError):
        writable = False
    if not writable:
        user = os.getuid() if hasattr(os, "getuid") else 0
        folder = Path(tempfile.gettempdir()) / f"bessemer-zig-{user}"
    env.setdefault("ZIG_GLOBAL_CACHE_DIR", str(folder))
    env.setdefault("ZIG_LOCAL_CACHE_DIR", str(folder))
    return env


def _system_libraries() -> list[str]:
    """Paths of this process's own libm, libpthread, libc and loader; empty for another libc."""
    import ctypes

    for name in _SYSTEM_LIBRARIES:
        try:
            ctypes.CDLL(name)
        except OSError:
            return []
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return []
    fields = (line.split(maxsplit=5) for line in maps.splitlines())
    loaded = {Path(words[5]).name: words[5] for words in fields if len(words) == 6}
    # The loader comes last: it has __tls_get_addr.
    names = [*_SYSTEM_LIBRARIES, *(name for name in loaded if name.startswith("ld-linux"))]
    return [loaded[name] for name in names if name in loaded]
