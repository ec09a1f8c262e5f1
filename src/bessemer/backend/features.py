"""The CPU features that code generation may use, by architecture.

Only features that change the instructions LLVM picks for ordinary code are listed (not, say, SHA
or RDRAND). Each has the name that /proc/cpuinfo gives it.
"""

from __future__ import annotations

import re
import subprocess
import sys

from bessemer.errors import TargetError

# CPU name of the architecture's smallest member.
BASELINE_CPU = {"x86_64": "x86-64", "aarch64": "generic", "riscv64": "generic-rv64"}

_X86 = {
    "sse3": "pni",
    "ssse3": "ssse3",
    "sse4.1": "sse4_1",
    "sse4.2": "sse4_2",
    "sse4a": "sse4a",
    "popcnt": "popcnt",
    "lzcnt": "abm",
    "movbe": "movbe",
    "bmi": "bmi1",
    "bmi2": "bmi2",
    "avx": "avx",
    "avx2": "avx2",
    "fma": "fma",
    "f16c": "f16c",
    "fma4": "fma4",
    "xop": "xop",
    "tbm": "tbm",
    "gfni": "gfni",
    "avxvnni": "avx_vnni",
    "avxifma": "avx_ifma",
    "avxvnniint8": "avx_vnni_int8",
    "avxneconvert": "avx_ne_convert",
    "avx512f": "avx512f",
    "avx512bw": "avx512bw",
    "avx512cd": "avx512cd",
    "avx512dq": "avx512dq",
    "avx512vl": "avx512vl",
    "avx512ifma": "avx512ifma",
    "avx512vbmi": "avx512vbmi",
    "avx512vbmi2": "avx512_vbmi2",
    "avx512vnni": "avx512_vnni",
    "avx512bitalg": "avx512_bitalg",
    "avx512vpopcntdq": "avx512_vpopcntdq",
    "avx512bf16": "avx512_bf16",
    "avx512fp16": "avx512_fp16",
}
_AARCH64 = {
    "fp-armv8": "fp",
    "neon": "asimd",
    "lse": "atomics",
    "rdm": "asimdrdm",
    "dotprod": "asimddp",
    "fullfp16": "asimdhp",
    "fp16fml": "asimdfhm",
    "rcpc": "lrcpc",
    "jsconv": "jscvt",
    "complxnum": "fcma",
    "bf16": "bf16",
    "i8mm": "i8mm",
    "sve": "sve",
    "sve2": "sve2",
}
# /proc/cpuinfo writes the extensions into the ISA string; `runtime.cpu` splits it.
_RISCV64 = {
    name: name
    for name in ("m", "a", "f", "d", "c", "v", "zfhmin", "zfh", "zvfhmin", "zba", "zbb", "zbs")
}
_TABLES = {"x86_64": _X86, "aarch64": _AARCH64, "riscv64": _RISCV64}
_BASELINES = {
    "x86_64": frozenset[str](),
    "aarch64": frozenset({"fp-armv8", "neon"}),
    "riscv64": frozenset("mafdc"),
}


def known(arch: str) -> frozenset[str]:
    """LLVM names of the features that code generation switches on or off."""
    return frozenset(_TABLES[arch])


def baseline(arch: str) -> frozenset[str]:
    """Known features that every CPU of the architecture has."""
    return _BASELINES[arch]


def cpuinfo_names(arch: str) -> dict[str, str]:
    """LLVM name -> name in /proc/cpuinfo."""
    return dict(_TABLES[arch])


def of_cpu(arch: str, cpu: str) -> frozenset[str]:
    """The known features that LLVM's model of `cpu` has, with those that it names (`NAME+a+b`)
    and what they imply.

    LLVM's library does not tell, so this asks zig, which carries the same tables. Raises
    TargetError for an unknown name.
    """
    if not re.fullmatch(r"[A-Za-z0-9_\-.]+(\+[A-Za-z0-9_\-.]+)*", cpu):
        raise TargetError(f"--cpu {cpu}: no name of a CPU")
    wrong = [name for name in cpu.split("+")[1:] if name not in _TABLES[arch]]
    if wrong:
        raise TargetError(
            f"--cpu {cpu}: {arch} has no feature {', '.join(wrong)}; known: "
            + ", ".join(sorted(_TABLES[arch]))
        )
    command = [sys.executable, "-m", "ziglang", "build-obj", "--show-builtin"]
    command += ["-target", f"{arch}-linux", f"-mcpu={_plain(cpu)}"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, start_new_session=True
    )
    if "No module named" in done.stderr:
        raise TargetError(
            f"--cpu {cpu}: its features are looked up with ziglang, which is missing: "
            "pip install ziglang, or use native or baseline"
        )
    found = re.search(r"featureSet\(&\.\{(.*?)\}\)", done.stdout, re.DOTALL)
    if done.returncode != 0 or found is None:
        names = ", ".join(re.findall(r"^ (\S+)$", done.stderr, re.MULTILINE)).replace("_", "-")
        levels = ", v2, v3, v4 (or several of these levels: v2,v3,v4)" if arch == "x86_64" else ""
        raise TargetError(
            f"--cpu {cpu}: unknown for {arch}; use native, baseline{levels}"
            + (f", or one of {names}" if names else "")
        )
    reported = {_plain(n) for n in re.findall(r"\.(?:@\")?([A-Za-z0-9_]+)", found.group(1))}
    return frozenset(n for n in _TABLES[arch] if _plain(n) in reported) | baseline(arch)


def _plain(name: str) -> str:
    return name.replace(".", "_").replace("-", "_")
