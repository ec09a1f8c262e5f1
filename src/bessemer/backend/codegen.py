"""LLVM IR to objects: optimisation and instruction selection by llvmlite."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from bessemer.backend.pipeline import lower, save_ir
from bessemer.errors import CompileError

if TYPE_CHECKING:
    import mlir.ir as ir

    from bessemer.backend.target import Target

_OPTIMISATION_LEVEL = 3
# Functions that C libraries provide but that would mean memory from the heap.
_HEAP_FUNCTIONS = frozenset({"malloc", "calloc", "realloc", "free", "aligned_alloc"})
_initialised = threading.Lock()
# Instructions that can name the registers 0 to 15 only, with another one: see `_trusted_machine`.
_WRONG_REGISTER = re.compile(r"\tv?p?movmsk(?:ps|pd|b)\t%[xy]mm(?:1[6-9]|2\d|3[01])\b")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CompiledModule:
    """One object file and what it came from. `timings` are seconds per step."""

    name: str
    object: bytes
    llvm_ir: str
    assembly: str | None = None
    timings: dict[str, float] = field(default_factory=dict)


def compile_module(
    mlir_text: str,
    target: Target,
    name: str,
    *,
    exports: Collection[str] | None = None,
    on_bufferized: Callable[[ir.Module], None] | None = None,
    dump: dict[str, str] | None = None,
    assembly: bool = False,
) -> CompiledModule:
    """Compile MLIR text to an object file for `target`.

    `exports` are the symbols that stay visible outside the shared library; the other global ones
    are hidden (objects of one library still see each other). None exports all. `on_bufferized` and
    `dump` as in `pipeline.lower`; `dump` also gets `optimised` and, with `assembly`, `assembly`.

    Raises CompileError.
    """
    start = time.perf_counter()
    llvm_ir = lower(mlir_text, target, name, on_bufferized, dump)
    lowered = time.perf_counter()
    compiled = compile_llvm(llvm_ir, target, name, exports=exports, assembly=assembly)
    if dump is not None:
        dump["optimised"] = compiled.llvm_ir
        if compiled.assembly is not None:
            dump["assembly"] = compiled.assembly
    return CompiledModule(
        name,
        compiled.object,
        compiled.llvm_ir,
        compiled.assembly,
        {"mlir": lowered - start, **compiled.timings},
    )


def compile_llvm(
    llvm_ir: str,
    target: Target,
    name: str,
    *,
    exports: Collection[str] | None = None,
    assembly: bool = False,
) -> CompiledModule:
    """Optimise LLVM IR text at O3 and make an object file of it; see `compile_module`."""
    machine = target_machine(target)
    timings: dict[str, float] = {}
    start = time.perf_counter()
    module = _parse(llvm_ir, machine, target, name, exports)
    timings["parse"] = time.perf_counter() - start

    start = time.perf_counter()
    _optimise(module, machine, slp=True)
    if not _is_valid(module):
        # LLVM 22's SLP vectoriser can leave shuffles before the values they use; code generation
        # then aborts the process. The loop vectoriser alone is safe.
        module = _parse(llvm_ir, machine, target, name, exports)
        _optimise(module, machine, slp=False)
        _verify(module, llvm_ir, name)
    timings["optimise"] = time.perf_counter() - start

    start = time.perf_counter()
    machine = _trusted_machine(module, target, machine)
    code = bytes(machine.emit_object(module))
    text = machine.emit_assembly(module) if assembly else None
    timings["emit"] = time.perf_counter() - start
    return CompiledModule(name, code, str(module), text, timings)


def _parse(
    llvm_ir: str, machine: Any, target: Target, name: str, exports: Collection[str] | None
) -> Any:
    """llvmlite's module, for the target. Raises CompileError where LLVM rejects the text."""
    import llvmlite.binding as llvm

    try:
        module = llvm.parse_assembly(llvm_ir)
    except RuntimeError as error:
        raise _rejected(llvm_ir, name, error) from error
    module.triple = target.triple
    module.data_layout = str(machine.target_data)
    module.name = name
    _set_visibility(module, name, exports)
    _verify(module, llvm_ir, name)
    return module


def _optimise(module: Any, machine: Any, *, slp: bool) -> None:
    import llvmlite.binding as llvm

    options = llvm.create_pipeline_tuning_options(speed_level=_OPTIMISATION_LEVEL)
    options.loop_vectorization = True
    options.slp_vectorization = slp
    options.loop_interleaving = True
    options.loop_unrolling = True
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)


def _is_valid(module: Any) -> bool:
    try:
        module.verify()
    except RuntimeError:
        return False
    return True


def _verify(module: Any, llvm_ir: str, name: str) -> None:
    try:
        module.verify()
    except RuntimeError as error:
        raise _rejected(llvm_ir, name, error) from error


def _rejected(llvm_ir: str, name: str, error: RuntimeError) -> CompileError:
    path = save_ir(llvm_ir, name, "ll")
    return CompileError(
        f"LLVM rejects the IR of module '{name}':\n{error}\nThe IR is in {path}\n"
        f"Reproduce with:\n  opt -passes=verify -disable-output {path}"
    )


def target_machine(target: Target) -> Any:
    """llvmlite's target machine: position-independent code, the explicit CPU and features."""
    import llvmlite.binding as llvm

    with _initialised:
        llvm.initialize_all_targets()
        llvm.initialize_all_asmprinters()
    try:
        found = llvm.Target.from_triple(target.triple)
    except RuntimeError as error:
        raise CompileError(f"LLVM has no code generator for '{target.triple}': {error}") from error
    return found.create_target_machine(
        cpu=target.cpu,
        features=target.llvm_features(),
        opt=_OPTIMISATION_LEVEL,
        reloc="pic",
        codemodel="default",
        abiname=target.abi_name,
    )


def _trusted_machine(module: Any, target: Target, machine: Any) -> Any:
    """`machine`, or one without AVX-512's short vectors where LLVM would write a wrong instruction.

    LLVM 22.1.0 turns vpmovd2m and its like, with a move from the mask, into vmovmskps and its like
    even where the vector is in one of the registers 16 to 31, which these can't name: another
    register's bits are taken (llvm/llvm-project#191304). Without AVX512VL it does not do that. What
    it would write is looked at in a copy, since writing changes the module.
    """
    import llvmlite.binding as llvm

    if "avx512vl" not in target.features:
        return machine
    text = machine.emit_assembly(llvm.parse_bitcode(module.as_bitcode()))
    if not _WRONG_REGISTER.search(text):
        return machine
    log.debug("%s: without AVX512VL, for LLVM's sake", module.name)
    kept = tuple(name for name in target.features if name != "avx512vl")
    return target_machine(replace(target, features=kept))


def _set_visibility(module: Any, name: str, exports: Collection[str] | None) -> None:
    """Hide what is defined here and not exported; refuse calls of the heap's functions."""
    symbols = [*module.functions, *module.global_variables]
    heap = sorted(s.name for s in symbols if s.is_declaration and s.name in _HEAP_FUNCTIONS)
    if heap:
        raise CompileError(f"Module '{name}' would call {', '.join(heap)} while it runs")
    if exports is None:
        return
    defined = {s.name for s in symbols if not s.is_declaration}
    for symbol in symbols:
        local = symbol.linkage.name in ("internal", "private")
        if not symbol.is_declaration and not local and symbol.name not in exports:
            symbol.visibility = "hidden"
    missing = sorted(set(exports) - defined)
    if missing:
        raise CompileError(f"Module '{name}' does not define {', '.join(missing)}")
