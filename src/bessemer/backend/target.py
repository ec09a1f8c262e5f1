"""What code is made for: a triple, a CPU name (scheduling) and an explicit feature list."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from typing import Any

from bessemer.backend import features as feature_tables
from bessemer.errors import TargetError

NATIVE = "native"
BASELINE = "baseline"
# x86-64's levels by their short names. Each has all that the one before has.
LEVELS = {"v2": "x86-64-v2", "v3": "x86-64-v3", "v4": "x86-64-v4"}
# What makes 512-bit vectors worth while: all of x86-64-v4, not AVX-512's first half alone.
_WIDE = {"avx512f", "avx512bw", "avx512dq", "avx512vl"}

_SHORT_TRIPLES = {
    "x86_64": "x86_64-unknown-linux-gnu",
    "amd64": "x86_64-unknown-linux-gnu",
    "aarch64": "aarch64-unknown-linux-gnu",
    "arm64": "aarch64-unknown-linux-gnu",
    "riscv64": "riscv64-unknown-linux-gnu",
}
_ARCH_ALIASES = {"amd64": "x86_64", "arm64": "aarch64"}
_SYSTEMS = ("linux", "darwin", "macos")
# The oldest macOS that runs on these processors; LLVM wants a number.
_MACOS = "macosx11.0.0"


@dataclass(frozen=True)
class Target:
    """A machine to compile for.

    `features` are the LLVM names of what the code may use, sorted; what is not named is not used,
    even where the CPU's name would imply it. `cpu` only tunes instruction choice and scheduling.
    """

    triple: str
    cpu: str
    features: tuple[str, ...]

    @staticmethod
    def native() -> Target:
        """The machine this runs on, with the features that its CPU reports."""
        import llvmlite.binding as llvm

        triple = llvm.get_default_triple()
        arch = _arch_of(triple)
        reported = llvm.get_host_cpu_features()
        known = feature_tables.known(arch)
        enabled = {name for name, on in reported.items() if on and name in known}
        return Target(
            triple,
            llvm.get_host_cpu_name(),
            tuple(sorted(enabled | feature_tables.baseline(arch))),
        )

    @staticmethod
    def parse(target: str = NATIVE, cpu: str | None = None) -> Target:
        """A target from what a user writes.

        `target` is `native`, an architecture (`aarch64`) or a triple. `cpu` is `native` (only for
        this machine), `baseline` (every CPU of the architecture), `v2`, `v3`, `v4` (a level of
        x86-64), an LLVM CPU name, or None: the machine itself for `native`, else the baseline.
        Features may follow: `baseline+v`, `neoverse-n1+bf16`. Of several, by comma (see
        `parse_levels`), it is the least. Raises TargetError for an unknown one.
        """
        if cpu is not None and "," in cpu:
            return Target.parse_levels(target, cpu)[0]
        host = Target.native()
        triple = host.triple if target == NATIVE else _normalise(target)
        arch = _arch_of(triple)
        if cpu is None:
            cpu = NATIVE if target == NATIVE else BASELINE
        if cpu == NATIVE:
            if triple != host.triple:
                raise TargetError(
                    f"--cpu native is this machine ({host.triple}), but the target is {triple}: "
                    "name a CPU, or use --cpu baseline"
                )
            return host
        level, plus, more = cpu.partition("+")
        if level in LEVELS and arch == "x86_64":
            cpu = LEVELS[level] + plus + more
        smallest = feature_tables.BASELINE_CPU[arch]
        if cpu == BASELINE:
            return Target(triple, smallest, tuple(sorted(feature_tables.baseline(arch))))
        name, plus, _ = cpu.partition("+")
        if plus and name == NATIVE:
            raise TargetError(f"--cpu {cpu}: native has what this machine has; name a CPU instead")
        found = feature_tables.of_cpu(arch, cpu)
        return Target(triple, smallest if name == BASELINE else name, tuple(sorted(found)))

    @staticmethod
    def parse_levels(target: str = NATIVE, cpu: str | None = None) -> tuple[Target, ...]:
        """The targets of one artifact, the least first: one, or the levels of x86-64 that `cpu`
        lists by comma (`v2,v3,v4`; `baseline` is v1). Raises TargetError.
        """
        names = [] if cpu is None else [name.strip() for name in cpu.split(",")]
        if len(names) < 2:
            return (Target.parse(target, cpu),)
        known = {BASELINE, "x86-64", *LEVELS, *LEVELS.values()}
        triple = Target.native().triple if target == NATIVE else _normalise(target)
        if _arch_of(triple) != "x86_64" or not known.issuperset(names):
            raise TargetError(
                f"--cpu {cpu}: only levels of x86-64 can be listed: {BASELINE}, "
                + ", ".join(LEVELS)
            )
        # For `native` too it is the levels that count, not what this machine has.
        found = {Target.parse(triple, BASELINE if n == "x86-64" else n) for n in names}
        return tuple(sorted(found, key=lambda t: len(t.features)))

    @property
    def arch(self) -> str:
        """`x86_64`, `aarch64` or `riscv64`."""
        return _arch_of(self.triple)

    @property
    def system(self) -> str:
        """`linux` or `darwin`."""
        return "darwin" if "darwin" in self.triple or "macos" in self.triple else "linux"

    @property
    def is_native(self) -> bool:
        """Whether code for this target links and loads on this machine (its triple is ours)."""
        import llvmlite.binding as llvm

        return self.triple == llvm.get_default_triple() and sys.maxsize > 2**32

    @property
    def f32_lanes(self) -> int:
        """f32 values of the vectors that kernels are written in.

        16 with x86-64-v4's AVX-512, 8 with AVX2. 8 with RISC-V's V too, as pairs of registers
        (LMUL 2) where they have 128 bits: so wider registers are filled as well. Else 4.
        """
        if set(self.features) >= _WIDE:
            return 16
        return 8 if "avx2" in self.features or self._has_v else 4

    @property
    def pair_dot(self) -> str:
        """LLVM's name of x86's instruction that multiplies pairs of i16 into `f32_lanes` i32, or ""
        (see `codegen.kernels.integer_rows`).
        """
        if self.arch != "x86_64":
            return ""
        # The 256-bit form is one instruction of two features, of which processors have either.
        vnni = {8: "avxvnni", 16: "avx512vnni"}.get(self.f32_lanes)
        if vnni in self.features:
            return f"llvm.x86.avx512.vpdpwssd.{32 * self.f32_lanes}"
        by_lanes = {4: "sse2.pmadd.wd", 8: "avx2.pmadd.wd", 16: "avx512.pmaddw.d.512"}
        return f"llvm.x86.{by_lanes[self.f32_lanes]}"

    @property
    def vector_registers(self) -> int:
        """How many vectors of `f32_lanes` the processor holds."""
        if self.arch == "x86_64":
            return 32 if "avx512f" in self.features else 16
        return 16 if self._has_v else 32

    @property
    def _has_v(self) -> bool:
        return self.arch == "riscv64" and "v" in self.features

    @property
    def has_fma(self) -> bool:
        """Whether multiply-add is one instruction."""
        if self.arch == "x86_64":
            return "fma" in self.features
        return True  # in the baseline of aarch64, and in riscv64's F extension

    @property
    def has_f16c(self) -> bool:
        """Whether f16 is converted from and to f32 by an instruction."""
        if self.arch == "x86_64":
            return "f16c" in self.features
        if self.arch == "riscv64":
            vectors = "zvfhmin" in self.features or not self._has_v
            return "zfhmin" in self.features and vectors
        return True

    @property
    def loads_halves(self) -> bool:
        """Whether loads that widen f16 and bf16 to f32 take (next to) no time from multiply-adds:
        x86 has instructions that load and convert, and ports for them beside those of arithmetic.
        """
        return self.arch == "x86_64" and self.has_f16c

    @property
    def abi_name(self) -> str:
        """The ABI where LLVM has to be told (riscv64), else empty."""
        return "lp64d" if self.arch == "riscv64" else ""

    def llvm_features(self) -> str:
        """The feature string for LLVM: everything that is known is switched on or off by name."""
        known = feature_tables.known(self.arch)
        off = sorted(known - set(self.features))
        return ",".join([*(f"+{f}" for f in self.features), *(f"-{f}" for f in off)])

    @property
    def level(self) -> str:
        """`v2`, `v3`, `v4` where the target is one of these levels, else `v1`."""
        return next((short for short, name in LEVELS.items() if name == self.cpu), "v1")

    def required_features(self) -> list[str]:
        """What a CPU must have to run the code, by the names of /proc/cpuinfo.

        Features that every CPU of the architecture has are left out. Loading an artifact compares
        the list with `bessemer.runtime.cpu.missing_features`.
        """
        wanted = set(self.features) - feature_tables.baseline(self.arch)
        names = feature_tables.cpuinfo_names(self.arch)
        return sorted(names[f] for f in wanted if f in names)

    def to_json(self) -> dict[str, Any]:
        """The manifest's `target` entry."""
        return {
            "triple": self.triple,
            "arch": self.arch,
            "cpu": self.cpu,
            "features": list(self.features),
            "required_features": self.required_features(),
        }

    @staticmethod
    def from_json(data: dict[str, Any]) -> Target:
        """The inverse of `to_json`. Raises CompileError where an entry is missing or malformed."""
        try:
            triple, cpu, names = data["triple"], data["cpu"], data["features"]
            good = isinstance(triple, str) and isinstance(cpu, str)
            if not good or not all(isinstance(n, str) for n in names):
                raise TypeError("not strings")
        except (KeyError, TypeError) as error:
            raise TargetError(f"The target entry is malformed ({error}): {data!r}") from error
        return Target(triple, cpu, tuple(names))


def _arch_of(triple: str) -> str:
    arch = triple.split("-", 1)[0]
    arch = _ARCH_ALIASES.get(arch, arch)
    if arch not in feature_tables.BASELINE_CPU:
        raise _unknown(triple)
    return arch


def _unknown(target: str) -> TargetError:
    return TargetError(
        f"--target {target}: unknown; write native, an architecture "
        f"({', '.join(feature_tables.BASELINE_CPU)}) or a triple of Linux or macOS such as "
        "aarch64-unknown-linux-gnu"
    )


def _normalise(text: str) -> str:
    """A full LLVM triple from an architecture, `arch-os[-abi]`, or a full triple."""
    if text in _SHORT_TRIPLES:
        return _SHORT_TRIPLES[text]
    arch = _arch_of(text)
    parts = text.split("-")
    if not re.fullmatch(r"[A-Za-z0-9_.\-]+", text) or not any(
        part.startswith(_SYSTEMS) for part in parts[1:3]
    ):
        raise _unknown(text)
    if parts[1].startswith(_SYSTEMS):
        parts.insert(1, "apple" if parts[1].startswith(("darwin", "macos")) else "unknown")
    if parts[2] in ("macos", "macosx"):
        parts[2] = _MACOS
    return "-".join([arch, *parts[1:]])
