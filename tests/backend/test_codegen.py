"""What LLVM writes wrongly is noticed."""

from __future__ import annotations

import re

import pytest

from bessemer.backend import codegen
from bessemer.backend.codegen import compile_llvm
from bessemer.backend.target import Target

# The signs of a vector that the call leaves nowhere but in xmm16 to xmm31.
SIGNS = """
define i64 @signs(ptr %from, i64 %a, i64 %b, i64 %c) {
  %x = load <2 x i32>, ptr %from
  call void asm sideeffect "", "BUSY"()
  %negative = icmp slt <2 x i32> %x, zeroinitializer
  %first = extractelement <2 x i1> %negative, i64 0
  %second = extractelement <2 x i1> %negative, i64 1
  %one = select i1 %first, i64 %a, i64 %b
  %other = select i1 %second, i64 %one, i64 %c
  ret i64 %other
}
""".replace("BUSY", ",".join(f"~{{xmm{i}}}" for i in range(16)))
# An instruction of VEX with a register that it can't name: LLVM encodes another one.
WRONG = re.compile(r"vmovmskps\t%xmm(1[6-9]|[23]\d)")


def written(cpu: str) -> str:
    machine = Target.parse("x86_64-linux-gnu", cpu)
    text = compile_llvm(SIGNS, machine, "signs", assembly=True).assembly
    assert text is not None
    return text


@pytest.mark.parametrize("cpu", ["v3", "v4", "icelake-client"])
def test_signs_are_taken_from_registers_that_can_be_named(
    cpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not WRONG.search(written(cpu))
    if cpu != "v3":
        # LLVM has the fault still: once this fails, `_trusted_machine` has no more to do.
        monkeypatch.setattr(codegen, "_trusted_machine", lambda module, target, machine: machine)
        assert WRONG.search(written(cpu))
