"""The pass pipelines: payloads and kernels end to end, placed buffers, and what is refused."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bessemer.backend import pipeline
from bessemer.backend.codegen import compile_module
from bessemer.backend.target import Target
from bessemer.errors import CompileError

from .support import apply, elementwise, load, memref

HIDDEN = 576

RMS_NORM = f"""
#row = affine_map<(d0, d1) -> (d0)>
#col = affine_map<(d0, d1) -> (d1)>
#all = affine_map<(d0, d1) -> (d0, d1)>
#one = affine_map<(d0) -> (d0)>
func.func @rms_norm(%xm: memref<?x{HIDDEN}xf32>, %wm: memref<{HIDDEN}xf32>,
                    %scale: memref<?xf32>, %out: memref<?x{HIDDEN}xf32>)
    attributes {{llvm.emit_c_interface}} {{
  %x = bufferization.to_tensor %xm restrict : memref<?x{HIDDEN}xf32> to tensor<?x{HIDDEN}xf32>
  %w = bufferization.to_tensor %wm restrict : memref<{HIDDEN}xf32> to tensor<{HIDDEN}xf32>
  %s = bufferization.to_tensor %scale restrict writable : memref<?xf32> to tensor<?xf32>
  %o = bufferization.to_tensor %out restrict writable
    : memref<?x{HIDDEN}xf32> to tensor<?x{HIDDEN}xf32>
  %zero = arith.constant 0.0 : f32
  %n = arith.constant {HIDDEN}.0 : f32
  %eps = arith.constant 1.0e-5 : f32
  %f = linalg.fill ins(%zero : f32) outs(%s : tensor<?xf32>) -> tensor<?xf32>
  %sum = linalg.generic {{indexing_maps = [#all, #row], iterator_types = ["parallel", "reduction"]}}
      ins(%x : tensor<?x{HIDDEN}xf32>) outs(%f : tensor<?xf32>) {{
    ^bb0(%a: f32, %acc: f32):
      %p = arith.mulf %a, %a : f32
      %t = arith.addf %acc, %p : f32
      linalg.yield %t : f32 }} -> tensor<?xf32>
  %inv = linalg.generic {{indexing_maps = [#one], iterator_types = ["parallel"]}}
      outs(%sum : tensor<?xf32>) {{
    ^bb0(%a: f32):
      %m = arith.divf %a, %n : f32
      %q = arith.addf %m, %eps : f32
      %i = math.rsqrt %q : f32
      linalg.yield %i : f32 }} -> tensor<?xf32>
  %y = linalg.generic {{indexing_maps = [#all, #row, #col, #all],
                        iterator_types = ["parallel", "parallel"]}}
      ins(%x, %inv, %w : tensor<?x{HIDDEN}xf32>, tensor<?xf32>, tensor<{HIDDEN}xf32>)
      outs(%o : tensor<?x{HIDDEN}xf32>) {{
    ^bb0(%a: f32, %i: f32, %g: f32, %old: f32):
      %t = arith.mulf %a, %i : f32
      %u = arith.mulf %t, %g : f32
      linalg.yield %u : f32 }} -> tensor<?x{HIDDEN}xf32>
  bufferization.materialize_in_destination %y in restrict writable %out
    : (tensor<?x{HIDDEN}xf32>, memref<?x{HIDDEN}xf32>) -> ()
  return
}}"""


def gemm(rows: int, columns: int, depth: int, tile: int = 6, width: int = 16) -> str:
    """y[rows, columns] = x[rows, depth] w^T, w as f16 panels [columns/width, depth, width]."""
    accumulators = [f"%a{r}_{v}" for r in range(tile) for v in range(width // 8)]
    lines: list[str] = []
    for v in range(width // 8):
        lines.append(f"%j{v} = arith.constant {8 * v} : index")
        lines.append(f"%h{v} = vector.load %w[%p, %k, %j{v}] : !w, vector<8xf16>")
        lines.append(f"%b{v} = arith.extf %h{v} : vector<8xf16> to vector<8xf32>")
    for r in range(tile):
        lines.append(f"%s{r} = memref.load %x[%m{r}, %k] : !x")
        lines.append(f"%e{r} = vector.broadcast %s{r} : f32 to vector<8xf32>")
        for v in range(width // 8):
            fma = f"vector.fma %e{r}, %b{v}, %a{r}_{v} : vector<8xf32>"
            lines.append(f"%n{r}_{v} = {fma}")
    stores = []
    for i, name in enumerate(accumulators):
        r, v = divmod(i, width // 8)
        stores.append(f"%o{i} = arith.constant {8 * v} : index")
        stores.append(f"%q{i} = arith.addi %first, %o{i} : index")
        stores.append(f"vector.store %sum#{i}, %y[%m{r}, %q{i}] : !y, vector<8xf32>")
        assert name == f"%a{r}_{v}"
    body, ends = "\n".join(lines), "\n".join(stores)
    row_indices = "\n".join(
        f"%r{r} = arith.constant {r} : index\n%m{r} = arith.addi %m, %r{r} : index"
        for r in range(tile)
    )
    types = ", ".join(["vector<8xf32>"] * len(accumulators))
    return f"""
    !x = memref<{rows}x{depth}xf32>
    !w = memref<{columns // width}x{depth}x{width}xf16>
    !y = memref<{rows}x{columns}xf32>
    func.func @gemm(%x: !x, %w: !w, %y: !y) attributes {{llvm.emit_c_interface}} {{
      %c0 = arith.constant 0 : index
      %c1 = arith.constant 1 : index
      %tile = arith.constant {tile} : index
      %width = arith.constant {width} : index
      %rows = arith.constant {rows} : index
      %depth = arith.constant {depth} : index
      %panels = arith.constant {columns // width} : index
      %zero = arith.constant dense<0.0> : vector<8xf32>
      scf.for %p = %c0 to %panels step %c1 {{
        %first = arith.muli %p, %width : index
        scf.for %m = %c0 to %rows step %tile {{
          {row_indices}
          %sum:{len(accumulators)} = scf.for %k = %c0 to %depth step %c1
              iter_args({", ".join(f"{a} = %zero" for a in accumulators)}) -> ({types}) {{
            {body}
            scf.yield {", ".join(a.replace("%a", "%n") for a in accumulators)} : {types}
          }}
          {ends}
        }}
      }}
      return
    }}"""


@pytest.mark.parametrize("rows", [1, 7, 33])
def test_rms_norm_payload(rows: int, tmp_path: Path) -> None:
    library = load(RMS_NORM, tmp_path)
    rng = np.random.default_rng(rows)
    x = rng.standard_normal((rows, HIDDEN), np.float32)
    w = rng.standard_normal(HIDDEN, np.float32)
    scale, out = np.zeros(rows, np.float32), np.zeros_like(x)
    library._mlir_ciface_rms_norm(memref(x), memref(w), memref(scale), memref(out))
    expected = x / np.sqrt((x.astype(np.float64) ** 2).mean(1, keepdims=True) + 1e-5) * w
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("cpu", ["native", "baseline"])
def test_gemm_kernel(cpu: str, tmp_path: Path) -> None:
    rows, columns, depth = 12, 64, 96
    library = load(gemm(rows, columns, depth), tmp_path, Target.parse("native", cpu))
    rng = np.random.default_rng(0)
    # Small integers: every sum is exact, so the bits must be equal.
    x = rng.integers(-8, 9, (rows, depth)).astype(np.float32)
    weight = rng.integers(-8, 9, (columns, depth)).astype(np.float16)
    panels = np.ascontiguousarray(weight.reshape(columns // 16, 16, depth).transpose(0, 2, 1))
    y = np.zeros((rows, columns), np.float32)
    library._mlir_ciface_gemm(memref(x), memref(panels), memref(y))
    assert np.array_equal(y, x @ weight.astype(np.float32).T)


def test_one_module_of_both_kinds_and_its_stages(tmp_path: Path) -> None:
    dump: dict[str, str] = {}
    library = load(RMS_NORM + gemm(6, 16, 8), tmp_path, dump=dump, assembly=True)
    assert library._mlir_ciface_rms_norm
    assert library._mlir_ciface_gemm
    stages = ["payload", "bufferized", "loops", "math", "llvm", "optimised", "assembly"]
    assert list(dump) == stages
    assert "tensor<" in dump["payload"]
    assert "linalg.generic" in dump["bufferized"]
    assert "tensor<" not in dump["bufferized"]
    assert "linalg" not in dump["loops"]
    assert "llvm.func" in dump["llvm"]


TEMPORARY = """
func.func @f(%in: memref<?xf32>, %out: memref<?xf32>, %arena: memref<?xf32>)
    attributes {llvm.emit_c_interface} {
  %c0 = arith.constant 0 : index
  %x = bufferization.to_tensor %in restrict : memref<?xf32> to tensor<?xf32>
  %n = tensor.dim %x, %c0 : tensor<?xf32>
  %e = tensor.empty(%n) : tensor<?xf32>
  %y = linalg.exp ins(%x : tensor<?xf32>) outs(%e : tensor<?xf32>) -> tensor<?xf32>
  %o = bufferization.to_tensor %out restrict writable : memref<?xf32> to tensor<?xf32>
  %z = linalg.add ins(%y, %y : tensor<?xf32>, tensor<?xf32>) outs(%o : tensor<?xf32>)
    -> tensor<?xf32>
  %w = linalg.sub ins(%z, %y : tensor<?xf32>, tensor<?xf32>) outs(%o : tensor<?xf32>)
    -> tensor<?xf32>
  bufferization.materialize_in_destination %w in restrict writable %out
    : (tensor<?xf32>, memref<?xf32>) -> ()
  return
}"""


def _place_in_arena(module: Any) -> None:
    """What codegen's hook does, for one buffer: the allocation becomes the last argument."""
    for op in pipeline.operations(module):
        if op.name == "memref.alloc":
            arena = op.parent.regions[0].blocks[0].arguments[2]
            op.results[0].replace_all_uses_with(arena)
            op.erase()


def test_temporaries_are_refused_until_placed(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match=r"would allocate memory[\s\S]*@f: .*memref.alloc"):
        compile_module(TEMPORARY, Target.native(), "temporary")
    dump: dict[str, str] = {}
    library = load(TEMPORARY, tmp_path, on_bufferized=_place_in_arena, dump=dump)
    assert "memref.alloc" not in dump["planned"]
    x = np.linspace(-1, 1, 24, dtype=np.float32)
    out, arena = np.zeros_like(x), np.zeros_like(x)
    library._mlir_ciface_f(memref(x), memref(out), memref(arena))
    np.testing.assert_allclose(out, np.exp(x), rtol=1e-6)
    np.testing.assert_allclose(arena, np.exp(x), rtol=1e-6)


def test_small_fixed_temporary_lives_on_the_stack() -> None:
    text = """
    func.func @f(%in: memref<8xf32>, %out: memref<8xf32>, %n: index) {
      %c0 = arith.constant 0 : index
      %c1 = arith.constant 1 : index
      scf.for %i = %c0 to %n step %c1 {
        %t = memref.alloc() : memref<8xf32>
        linalg.exp ins(%in : memref<8xf32>) outs(%t : memref<8xf32>)
        linalg.add ins(%t, %in : memref<8xf32>, memref<8xf32>) outs(%out : memref<8xf32>)
      }
      return
    }"""
    dump: dict[str, str] = {}
    pipeline.lower(text, Target.native(), "stack", dump=dump)
    assert "memref.alloc()" not in dump["bufferized"]
    before_loop = dump["bufferized"].split("scf.for")[0]
    assert "memref.alloca()" in before_loop


def test_stack_that_grows_with_a_loop_is_refused() -> None:
    text = """
    func.func @f(%out: memref<?xf32>, %n: index) {
      %c0 = arith.constant 0 : index
      %c1 = arith.constant 1 : index
      scf.for %i = %c0 to %n step %c1 {
        %t = memref.alloca(%i) : memref<?xf32>
        %v = memref.load %t[%c0] : memref<?xf32>
        memref.store %v, %out[%i] : memref<?xf32>
      }
      return
    }"""
    with pytest.raises(CompileError, match=r"inside scf\.for"):
        pipeline.lower(text, Target.native(), "stack")


def test_heap_calls_are_refused() -> None:
    text = """
    func.func private @malloc(i64) -> !llvm.ptr
    func.func @f(%n: i64) -> !llvm.ptr {
      %p = func.call @malloc(%n) : (i64) -> !llvm.ptr
      return %p : !llvm.ptr
    }"""
    with pytest.raises(CompileError, match="would call malloc"):
        compile_module(text, Target.native(), "heap")


def test_strided_copy_needs_no_runtime(tmp_path: Path) -> None:
    text = """
    func.func @f(%a: memref<4x8xf32>, %b: memref<4x8xf32>) attributes {llvm.emit_c_interface} {
      %s = memref.subview %a[0, 0][4, 4][1, 1] : memref<4x8xf32> to memref<4x4xf32, strided<[8, 1]>>
      %t = memref.subview %b[0, 4][4, 4][1, 1]
        : memref<4x8xf32> to memref<4x4xf32, strided<[8, 1], offset: 4>>
      memref.copy %s, %t
        : memref<4x4xf32, strided<[8, 1]>> to memref<4x4xf32, strided<[8, 1], offset: 4>>
      return
    }"""
    library = load(text, tmp_path)
    a, b = np.arange(32, dtype=np.float32).reshape(4, 8), np.zeros((4, 8), np.float32)
    library._mlir_ciface_f(memref(a), memref(b))
    assert np.array_equal(b[:, 4:], a[:, :4])
    assert not b[:, :4].any()


@pytest.mark.parametrize(("flags", "changed"), [("", False), (" fastmath<reassoc>", True)])
def test_reductions_keep_their_order_unless_asked(
    flags: str, changed: bool, tmp_path: Path
) -> None:
    """1e8 + 1 - 1e8 + ... from left to right loses the ones; a tree of sums does not."""
    text = f"""
    func.func @f(%in: memref<8xf32>, %out: memref<1xf32>) attributes {{llvm.emit_c_interface}} {{
      %c0 = arith.constant 0 : index
      %zero = arith.constant 0.0 : f32
      %v = vector.load %in[%c0] : memref<8xf32>, vector<8xf32>
      %s = vector.reduction <add>, %v, %zero{flags} : vector<8xf32> into f32
      memref.store %s, %out[%c0] : memref<1xf32>
      return
    }}"""
    library = load(text, tmp_path)
    x = np.array([1e8, 1, 1, 1, -1e8, 1, 1, 1], np.float32)
    out = np.zeros(1, np.float32)
    library._mlir_ciface_f(memref(x), memref(out))
    assert (out[0] != 3.0) == changed


def _reproducer(error: CompileError) -> tuple[list[str], Path]:
    """The Python command of the message, and the file that it names."""
    line = next(line for line in str(error).splitlines() if "bessemer.backend.replay" in line)
    command = shlex.split(line)
    assert any(line.strip().startswith(("mlir-opt", "/")) for line in str(error).splitlines())
    return command, Path(command[-1])


def test_syntax_error_has_a_reproducer(odd_tmpdir: Path) -> None:
    with pytest.raises(CompileError, match=r"module 'broken' does not parse") as caught:
        compile_module("func.func @f( { return }", Target.native(), "broken")
    command, path = _reproducer(caught.value)
    assert path.parent == odd_tmpdir
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "expected" in done.stderr


def test_failed_pass_is_named_and_reproduced(odd_tmpdir: Path) -> None:
    text = """
    func.func @f(%a: tensor<4xf32>) -> tensor<4xf32> {
      %b = tosa.exp %a : (tensor<4xf32>) -> tensor<4xf32>
      return %b : tensor<4xf32>
    }"""
    with pytest.raises(CompileError, match=r"MLIR pass 'one-shot-bufferize.*tosa|tosa") as caught:
        compile_module(text, Target.native(), "group_3")
    assert "MLIR pass 'one-shot-bufferize" in str(caught.value)
    assert "op was not bufferized" in str(caught.value)
    command, path = _reproducer(caught.value)
    assert path.exists()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "not bufferized" in done.stderr


def test_operation_without_llvm_form_is_named(odd_tmpdir: Path) -> None:
    text = """
    func.func @f(%a: memref<?xf32>) {
      %i = gpu.thread_id x
      %v = memref.load %a[%i] : memref<?xf32>
      memref.store %v, %a[%i] : memref<?xf32>
      return
    }"""
    with pytest.raises(CompileError, match=r"no LLVM form \(.*gpu\.thread_id") as caught:
        compile_module(text, Target.native(), "gpu")
    assert "mlir-translate --mlir-to-llvmir" in str(caught.value)


def test_unknown_operation() -> None:
    with pytest.raises(CompileError, match="unregistered dialect"):
        compile_module('func.func @f() { "foo.bar"() : () -> () \n return }', Target.native(), "x")


def test_hook_that_breaks_the_module_is_caught() -> None:
    def break_it(module: Any) -> None:
        import mlir.ir as ir

        for op in pipeline.operations(module):
            if op.name == "linalg.generic":
                del op.attributes["indexing_maps"]
                assert isinstance(op, ir.OpView | ir.Operation)
                return

    with pytest.raises(CompileError, match="after the buffers were placed"):
        pipeline.lower(RMS_NORM, Target.native(), "hooked", on_bufferized=break_it)


def test_no_fast_math_of_our_own() -> None:
    text = elementwise("%y = arith.mulf %x, %x : {S}\n%r = arith.addf %y, %x : {S}")
    llvm_ir = pipeline.lower(text, Target.native(), "plain")
    assert not re.search(r"f(add|mul) (fast|nnan|ninf|reassoc|contract)", llvm_ir)
    finite_only = elementwise("%y = math.exp %x : {S}\n%r = math.log %y : {S}")
    assert not re.search(r"\b(fast|nnan|ninf)\b", pipeline.lower(finite_only, Target.native(), "f"))


def test_no_module_state(tmp_path: Path) -> None:
    """Two compilations in a row give the same bytes."""
    first = compile_module(RMS_NORM, Target.native(), "same").object
    assert first == compile_module(RMS_NORM, Target.native(), "same").object


def test_apply_is_what_it_says(tmp_path: Path) -> None:
    x = np.arange(16, dtype=np.float32)
    assert np.array_equal(apply(load(elementwise("%r = arith.negf %x : {S}"), tmp_path), x), -x)
