"""scripts/check_layers.py: the checkout is clean, and every rule catches what it is there for."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import script

ROOT = Path(__file__).parent.parent
INCLUDE = "deep_kernels/include/deep_kernels"
FOLDERS = {
    "contract": f"{INCLUDE}/contract",
    "ptx": f"{INCLUDE}/ptx",
    "tile": f"{INCLUDE}/tile",
    "kernels": f"{INCLUDE}/kernels",
    "runtime": "csrc/runtime",
    "ops": "csrc/ops",
    "cpu": "csrc/cpu",
    "bindings": "csrc",
}


check_layers = script.load("check_layers")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A checkout with one clean file per layer and one op."""
    files = {
        f"{INCLUDE}/contract/types.h": "struct Words {};\nconstexpr int shared_word = 1;\n",
        f"{INCLUDE}/contract/fold.h": "struct FoldArgs {};\ninline constexpr int kFoldUnit = 2;\nenum class Wipe {};\n",
    }
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    for folder in FOLDERS.values():
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    return tmp_path


def findings(root: Path) -> list[tuple[str, int, str]]:
    """Path, line and rule of all findings; the exceptions of the real checkout do not count here."""
    found, _ = check_layers.check(root)
    return [(one.path, one.line, one.rule) for one in found if one.rule != "stale-exception"]


def put(root: Path, layer: str, text: str, name: str = "") -> str:
    suffix = {"contract": ".h", "ptx": ".cuh", "tile": ".cuh", "kernels": ".cuh"}.get(layer, ".cpp")
    path = f"{FOLDERS[layer]}/{name or 'probe' + suffix}"
    (root / path).write_text(text)
    return path


def test_this_checkout_is_clean() -> None:
    found, _ = check_layers.check(ROOT)
    assert [str(one) for one in found] == []


def test_command_says_where_and_what_and_fails(tree: Path) -> None:
    put(tree, "tile", '\nvoid f() { asm volatile(""); }\n')
    path = str(ROOT / "scripts" / "check_layers.py")
    done = subprocess.run([sys.executable, path, str(tree)], capture_output=True, text=True)
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert f"{INCLUDE}/tile/probe.cuh:2: [inline-asm] asm: inline asm lives in ptx/" in lines
    assert lines[-1].startswith("largest: kernel file 3 of 600 ")


# Rule, layers, one line that breaks it.
VIOLATIONS = [
    ("inline-asm", "contract tile kernels", 'void f() { asm volatile("nop;"); }'),
    ("inline-asm", "tile", 'void f() { asm("mov.b32 %0, 1;" : "=r"(x)); }'),
    ("cuda-builtin", "tile kernels", "int f() { return threadIdx.x; }"),
    ("cuda-builtin", "tile kernels", "int f() { return blockIdx.y + gridDim.x * blockDim.z; }"),
    ("cuda-builtin", "tile kernels", "int f(int v) { return __shfl_xor_sync(~0u, v, 1); }"),
    ("cuda-builtin", "tile kernels", "int f(const int* p) { return __ldg(p); }"),
    ("cuda-builtin", "tile kernels", "void f() { __syncthreads(); }"),
    ("cuda-builtin", "tile kernels", "void f() { __shared__ int memory[32]; }"),
    ("cuda-builtin", "contract tile kernels", "__device__ void f() {}"),
    ("cuda-builtin", "tile kernels", "void f(int* p) { atomicAdd(p, 1); }"),
    ("cuda-builtin", "tile kernels", "void f(int* p) { atomicCAS(p, 0, 1); }"),
    ("cuda-builtin", "tile kernels", "float f(u32 x) { return __uint_as_float(x); }"),
    ("cuda-builtin", "tile kernels", "float f(float x) { return exp2f(x); }"),
    ("cuda-builtin", "tile kernels", "float f(float x) { return fmaf(x, x, x); }"),
    ("cuda-builtin", "tile kernels", "float f(float a, float b) { return fmaxf(a, b); }"),
    ("cuda-builtin", "tile kernels", "void f(float4* p) { *p = make_float4(0, 0, 0, 0); }"),
    ("cuda-builtin", "tile kernels", "cudaError_t f();"),
    ("cuda-builtin", "kernels", 'void f() { printf("%d", 1); }'),
    ("pointer-cast", "tile kernels", "u64 f(int* p) { return reinterpret_cast<u64>(p); }"),
    ("pointer-cast", "tile kernels", "float* f(int* p) { return reinterpret_cast<float*>(p); }"),
    ("pointer-cast", "tile kernels", "u64 f(int* p) { return (u64)p; }"),
    ("pointer-cast", "tile kernels", "u64 f(int* p) { return (unsigned long long)&p[1]; }"),
    ("pointer-cast", "tile kernels", "float* f(u64 p) { return (float*)p; }"),
    ("pointer-cast", "tile kernels", "float* f(u64 p) { return (const u8 *)(p + 1); }"),
    ("std-in-device-code", "contract ptx tile kernels", "std::size_t f();"),
    ("op-in-tile", "ptx tile", "template <class S, class Args> void f(const LogitsArgs& a);"),
    ("op-in-tile", "tile", "template <FoldSpec S> void f();"),
    ("op-name", "ptx tile runtime", "Wipe f();"),
    ("op-name", "ptx tile runtime", "int f() { return kFoldUnit; }"),
    ("op-name", "runtime", 'const char* f() { return "DEEP_KERNELS_MQA_CLEAN"; }'),
    ("op-name", "runtime tile", "void mqa_logits();"),
    ("op-name", "runtime", "void run(const FlashAttentionCall& call);"),
    ("slow-or-clashing", "runtime ops cpu bindings", "std::regex f();"),
    ("slow-or-clashing", "runtime ops cpu bindings", "void f() { std::cout << 1; }"),
    ("slow-or-clashing", "runtime ops cpu bindings", "#include <iostream>"),
    ("slow-or-clashing", "runtime ops cpu bindings", "#include <sstream>"),
    ("helper-program", "runtime ops cpu bindings", 'void f() { popen("nvcc", "r"); }'),
    ("helper-program", "runtime ops", 'int f() { return std::system("ls"); }'),
    ("helper-program", "runtime", "void f() { execvp(name, argv); }"),
    ("helper-program", "runtime", "int f() { return posix_spawn(0, 0, 0, 0, 0, 0); }"),
    ("environment", "runtime ops cpu bindings", 'const char* f() { return std::getenv("HOME"); }'),
    ("dlopen", "ops cpu bindings", 'void f() { dlopen("libcuda.so.1", 2); }'),
    ("ops-below-store", "ops", "void f() { driver::api(); }"),
    ("ops-below-store", "ops", "void f() { Nvrtc::get(); }"),
    ("ops-below-store", "ops", "auto f() { return settings::cache_dir(); }"),
    ("ops-below-store", "ops", "auto f() { return cache::load(file); }"),
    ("logic-in-bindings", "bindings", "bool f(const Tensor& q) { return q.is_cuda(); }"),
    ("logic-in-bindings", "bindings", "auto f(const Tensor& q) { return q.size(0); }"),
    ("logic-in-bindings", "bindings", "void f(Backend backend);"),
    ("logic-in-bindings", "bindings", "auto f(const Tensor& q) { return q.data_ptr(); }"),
    ("logic-in-bindings", "bindings", "auto f() { return at::empty({1}); }"),
    # includes
    ("include", "contract", "#include <cstdint>"),
    ("include", "contract", '#include "deep_kernels/ptx/base.cuh"'),
    ("include", "contract", "#include <ATen/core/Tensor.h>"),
    ("include", "ptx", '#include "deep_kernels/tile/layout.cuh"'),
    ("include", "ptx tile", '#include "deep_kernels/contract/fold.h"'),
    ("include", "tile", '#include "deep_kernels/kernels/fold_sm90.cuh"'),
    ("include", "kernels", '#include "runtime/driver.h"'),
    ("include", "kernels", "#include <type_traits>"),
    ("include", "runtime", "#include <ATen/core/Tensor.h>"),
    ("include", "runtime", "#include <c10/core/Device.h>"),
    ("include", "runtime", "#include <torch/library.h>"),
    ("include", "runtime", '#include "ops/case.h"'),
    ("include", "runtime", '#include "cpu/decode.h"'),
    ("include", "runtime", '#include "deep_kernels/contract/fold.h"'),
    ("include", "ops", '#include "runtime/nvrtc.h"'),
    ("include", "ops", '#include "runtime/cache.h"'),
    ("include", "ops", '#include "runtime/include_tree.h"'),
    ("include", "ops", "#include <dlfcn.h>"),
    ("include", "ops runtime", "#include <Python.h>"),
    ("include", "runtime", '#include "python_args.h"'),
    ("include", "cpu", "#include <sys/mman.h>"),
    ("include", "cpu", '#include "runtime/errors.h"'),
    ("include", "cpu", '#include "ops/checks.h"'),
    ("include", "bindings", '#include "cpu/mqa_logits.h"'),
    ("include", "bindings", '#include "deep_kernels/contract/types.h"'),
    ("cuda-header", "runtime ops cpu bindings kernels ptx", "#include <cuda.h>"),
    ("cuda-header", "runtime ops", "#include <cuda_runtime.h>"),
    ("cuda-header", "ops bindings", "#include <c10/cuda/CUDAStream.h>"),
    ("cuda-header", "ops", "#include <ATen/cuda/CUDAContext.h>"),
    ("cuda-header", "runtime", "#include <nvrtc.h>"),
    ("cuda-header", "kernels", "#include <cuda_fp8.h>"),
    # comments that are code
    ("commented-code", "ops", "// return x;"),
    ("commented-code", "kernels", "//   ptx::sync_warp();"),
    ("commented-code", "runtime", "// const int size = 3;"),
    ("commented-code", "cpu", "// sum += a[i] * b[i];"),
    ("commented-code", "tile", "// if (lane == 0) store(x);"),
    ("commented-code", "contract", "// for (int i = 0; i < 3; ++i) {"),
    ("commented-code", "ops", "// #include <vector>"),
    ("commented-code", "ops", "/* void f(int x) { */"),
    ("commented-code", "bindings", "// }"),
    ("commented-code", "ptx", "// struct Old {"),
    ("commented-code", "kernels", "// } else {"),
]


@pytest.mark.parametrize(
    ("rule", "layer", "line"), [(rule, layer, line) for rule, layers, line in VIOLATIONS for layer in layers.split()]
)
def test_violation_is_caught_where_it_stands(tree: Path, rule: str, layer: str, line: str) -> None:
    assert findings(tree) == []
    path = put(tree, layer, f"// A file.\n#pragma once\n\n{line}\n")
    assert (path, 4, rule) in findings(tree)


def test_every_rule_has_a_violation_here() -> None:
    tested = {rule for rule, _, _ in VIOLATIONS}
    assert {ban.rule for ban in check_layers.BANS} <= tested


# What looks like a violation and is none.
INNOCENT = [
    ("kernels", "float f(float x) { return ptx::fma(ptx::max(x, 0.0f), x, ptx::exp2(x)); }"),
    ("kernels", "int f() { return ptx::lane_index(); }  // threadIdx.x & 31, by __shfl_sync"),
    ("kernels", "// One asm volatile per function; atomicAdd is not used.\nint f();"),
    ("kernels", "u32 f(i32 x) { return static_cast<u32>(x) + u32{3}; }"),
    ("kernels", "int f(int a, int b) { return min_of(a, b) + sizeof(float) * (a); }"),
    ("tile", "template <int kStages> struct Ring { int slot = 0; };"),
    ("ptx", 'DK_DEVICE void f() { asm volatile("bar.sync 0;"); __syncthreads(); }'),
    ("ptx", "DK_DEVICE u64 f(void* p) { return reinterpret_cast<u64>(p); }"),
    ("runtime", '#include <dlfcn.h>\n#include <sys/stat.h>\n#include "runtime/nvrtc.h"\nvoid f();'),
    ("runtime", "// Of an mqa kernel, for example.\nvoid f(const std::string& op);"),
    ("runtime", "void f(Filesystem& s) { s.system(); state.fork(); }"),
    ("ops", '#include "runtime/driver.h"\nint f() { return driver::device_facts(0).num_sms; }'),
    ("cpu", "#include <ATen/ops/mm_cpu_dispatch.h>\n#include <vector>\nvoid f();"),
    ("bindings", "auto f(const std::string& s) { return s.size(); }"),
    ("ops", "// logits[i, j] = sum_h weights[i, h] * relu(dot(q[i, h, :], kv[j, :]))\nvoid f();"),
    ("ops", "// Blocks over kv (and tokens); the rest follows from it;\nvoid f();"),
    ("ops", "// for start[i] <= j < end[i], if it exists\nvoid f();"),
    ("ops", "// values [num_kv, head_dim], see runtime/store.h {n} times\nvoid f();"),
    ("ops", 'const char* f() { return "std::regex // popen( __shared__"; }'),
    ("ops", 'const char* f() { return R"(std::regex " popen()"; }'),
]


@pytest.mark.parametrize(("layer", "text"), INNOCENT)
def test_innocent_text_is_let_pass(tree: Path, layer: str, text: str) -> None:
    put(tree, layer, f"{text}\n")
    assert findings(tree) == []


def test_settings_may_read_the_environment(tree: Path) -> None:
    put(tree, "runtime", 'const char* f() { return std::getenv("HOME"); }\n', name="settings.cpp")
    assert findings(tree) == []


def test_kernel_reads_one_contract(tree: Path) -> None:
    (tree / INCLUDE / "contract" / "other.h").write_text("struct OtherArgs {};\n")
    own = '#include "deep_kernels/contract/types.h"\n#include "deep_kernels/contract/fold.h"\n'
    path = put(tree, "kernels", own)
    assert findings(tree) == []
    put(tree, "kernels", own + '#include "deep_kernels/contract/other.h"\n')
    assert findings(tree) == [(path, 3, "include")]


def test_file_outside_of_every_layer(tree: Path) -> None:
    (tree / "csrc" / "utils").mkdir()
    (tree / "csrc" / "utils" / "misc.h").write_text("int f();\n")
    assert findings(tree) == [("csrc/utils/misc.h", 1, "layer")]


@pytest.mark.parametrize(
    ("layer", "limit", "rule"),
    [("kernels", 600, "file-budget"), ("ops", 300, "file-budget"), ("cpu", 300, "file-budget")],
)
def test_file_budget(tree: Path, layer: str, limit: int, rule: str) -> None:
    path = put(tree, layer, "\n" * limit)
    assert findings(tree) == []
    put(tree, layer, "\n" * (limit + 1))
    assert findings(tree) == [(path, 1, rule)]


FUNCTION_HEADS = [
    "int f(int a) {",
    "template <class T, int kN = 3>\nDK_DEVICE void f(const T& a) {",
    "template <Spec S, class Maps>\nvoid Math<S>::run(int a,\n                  int b) const {",
    "TORCH_LIBRARY(name, m) {",
    "struct A {\n  A(int x) : x_(x) {",
    "namespace a {\nnamespace {\nclass B : public C {\n public:\n  static auto f() -> int {",
]


@pytest.mark.parametrize("head", FUNCTION_HEADS)
def test_function_budget(tree: Path, head: str) -> None:
    first = next(i for i, line in enumerate(head.split("\n"), start=1) if "(" in line or line.startswith("template"))
    closing = "}\n" * head.count("{")
    num_lines = 80 - (head.count("\n") + 3 - first)  # between the head and the closing brace
    path = put(tree, "ops", f"{head}\n" + "  call([&] { if (x) { y(); } });\n" * num_lines + closing)
    assert findings(tree) == []
    put(tree, "ops", f"{head}\n" + "  call([&] { if (x) { y(); } });\n" * (num_lines + 1) + closing)
    assert findings(tree) == [(path, first, "function-budget")]


def test_function_budget_of_python_leaves_docstrings_out(tree: Path) -> None:
    docstring = '    """' + "word\n" * 200 + '    """\n'
    (tree / "deep_kernels" / "ops.py").write_text("def f():\n" + docstring + "    x = 1\n" * 80)
    assert findings(tree) == []
    (tree / "deep_kernels" / "ops.py").write_text("def f():\n" + docstring + "    x = 1\n" * 81)
    assert [(path, rule) for path, _, rule in findings(tree)] == [("deep_kernels/ops.py", "function-budget")]


def test_kernels_that_copy_each_other(tree: Path) -> None:
    common = "".join(f"int common_{i}();\n" for i in range(30))
    own = [f"int own_{side}_{i}();\n" for side in range(2) for i in range(70)]
    one = put(tree, "kernels", common + "".join(own[:70]), name="fold_sm89.cuh")
    put(tree, "kernels", common + "".join(own[70:]), name="fold_sm90.cuh")
    assert findings(tree) == []
    put(tree, "kernels", common + "".join(own[70:100]), name="fold_sm90.cuh")
    assert findings(tree) == [(one, 1, "overlap")]


def test_exception_excuses_its_rule_and_file_only(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = put(tree, "ops", "\n" * 301)
    other = put(tree, "ops", "std::regex f();\n" + "\n" * 300, name="other.cpp")
    monkeypatch.setattr(check_layers, "ALLOWED", {("file-budget", path): "a reason"})
    found, _ = check_layers.check(tree)
    assert [(one.path, one.rule) for one in found] == [(other, "file-budget"), (other, "slow-or-clashing")]


def test_exception_that_is_needed_no_more_is_a_finding(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_layers, "ALLOWED", {("file-budget", "csrc/ops/gone.cpp"): "a reason"})
    found, _ = check_layers.check(tree)
    assert [(one.path, one.rule) for one in found] == [("csrc/ops/gone.cpp", "stale-exception")]


def test_violation_in_the_real_tree_is_caught(tmp_path: Path) -> None:
    """The rules see through the real files, not only through small ones."""
    for folder in ("csrc", INCLUDE):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    before = findings(tmp_path)
    path = tmp_path / INCLUDE / "kernels" / "mqa_logits_sm90.cuh"
    text = path.read_text()
    path.write_text(text.replace("ptx::lane_index()", "(threadIdx.x & 31)", 1))
    new = set(findings(tmp_path)) - set(before)
    assert {rule for _, _, rule in new} == {"cuda-builtin"}
