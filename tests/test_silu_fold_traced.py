"""The ops of the FP8 prefill MLP under torch.compile, torch.export, fake tensors, modes, and torch.library.opcheck."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import Backend
from modes import CountingDispatch, CountingFunction, Wrapped
from silu_cases import Case, Inputs, assert_same_pair, block_gemm, fold, make_gate_up, make_inputs, silu_mul
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from deep_kernels import formats

OPS = torch.ops.deep_kernels
# opcheck's schema test compares inputs before and after, which torch cannot do for float8;
# test_inputs_stay_as_they_are stands for it.
WITHOUT_SCHEMA = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
CASE = Case(37, 272, 272)


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch.compiler.reset()


def new_pair(case: Case, device: str) -> tuple[Tensor, Tensor]:
    scale_dtype = torch.float32 if case.scale_fmt == "fp32" else torch.uint8
    y = torch.zeros(case.num_tokens, case.num_columns, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    y_scale = torch.zeros(case.num_tokens, -(-case.num_columns // 128), dtype=scale_dtype, device=device)
    return y, y_scale if case.scale_fmt == "fp32" else y_scale.view(torch.float8_e8m0fnu)


# ------------------------------------------------------------------------------------------ opcheck


@pytest.mark.parametrize("scale_fmt", formats.SCALE_FORMATS)
def test_opcheck(backend: Backend, scale_fmt: str) -> None:
    case = replace(CASE, scale_fmt=scale_fmt)
    inputs = make_inputs(case, backend.device)
    tensors = inputs.tensors()
    activation = ("silu", 7.0, 1.702, 1.0)
    out = new_pair(case, backend.device)
    for fused in (None, True, False):
        options = (*activation, True, scale_fmt, fused, backend.arch)
        torch.library.opcheck(OPS.fp8_silu_fold_prefill.default, (*tensors, *options), test_utils=WITHOUT_SCHEMA)
        torch.library.opcheck(
            OPS.fp8_silu_fold_prefill_out.default, (*tensors, *options, *out), test_utils=WITHOUT_SCHEMA
        )
    gate_up = make_gate_up(case, backend.device)
    options = (*activation, scale_fmt, backend.arch)
    torch.library.opcheck(OPS.silu_mul_to_fp8_block128.default, (gate_up, *options), test_utils=WITHOUT_SCHEMA)
    torch.library.opcheck(
        OPS.silu_mul_to_fp8_block128_out.default, (gate_up, *options, *out), test_utils=WITHOUT_SCHEMA
    )
    gemm = (inputs.x, inputs.x_scale, *inputs.half(0))
    residual = gate_up[:, :272]
    for dtype in (torch.float32, torch.bfloat16):
        arguments = (*gemm, dtype, residual, backend.arch)
        torch.library.opcheck(OPS.fp8_block_gemm_nt.default, arguments, test_utils=WITHOUT_SCHEMA)
        product = torch.zeros(37, 272, dtype=dtype, device=backend.device)
        torch.library.opcheck(OPS.fp8_block_gemm_nt_out.default, (*arguments, product), test_utils=WITHOUT_SCHEMA)


def test_inputs_stay_as_they_are(backend: Backend) -> None:
    inputs = make_inputs(CASE, backend.device)
    gate_up = make_gate_up(CASE, backend.device)
    before = [tensor.view(torch.uint8).clone() for tensor in (*inputs.tensors(), gate_up)]
    for fused in (True, False):
        fold(backend, inputs, fused=fused)
    silu_mul(backend, gate_up)
    block_gemm(backend, (inputs.x, inputs.x_scale), inputs.half(1), residual=gate_up[:, :272])
    for tensor, bytes_ in zip((*inputs.tensors(), gate_up), before, strict=True):
        assert torch.equal(tensor.view(torch.uint8), bytes_)


# ------------------------------------------------------------------------------------------ fake tensors


def as_fake(mode: FakeTensorMode, inputs: Inputs) -> Inputs:
    return Inputs(*(mode.from_tensor(tensor) for tensor in inputs.tensors()))


def assert_looks_like(fake: Tensor, real: Tensor) -> None:
    assert type(fake) is not Tensor  # it did not run
    for look in ("shape", "dtype", "device"):
        assert getattr(fake, look) == getattr(real, look)
    assert fake.stride() == real.stride() and fake.storage_offset() == real.storage_offset()


@pytest.mark.parametrize("scale_fmt", formats.SCALE_FORMATS)
def test_fake_results_look_like_real_ones(backend: Backend, scale_fmt: str) -> None:
    for num_tokens, num_columns in ((0, 272), (1, 16), (37, 128), (129, 400)):
        case = Case(num_tokens, 144, num_columns, scale_fmt=scale_fmt)
        inputs, gate_up = make_inputs(case, backend.device), make_gate_up(case, backend.device)

        def all_of(inputs: Inputs, gate_up: Tensor) -> list[Tensor]:
            x = (inputs.x, inputs.x_scale)
            gemms = [block_gemm(backend, x, inputs.half(0), dtype) for dtype in (torch.float32, torch.bfloat16)]
            pairs = [fold(backend, inputs, fused=fused, scale_fmt=scale_fmt) for fused in (None, True, False)]
            pairs += [silu_mul(backend, gate_up, scale_fmt=scale_fmt)]
            return gemms + [part for pair in pairs for part in pair]

        mode = FakeTensorMode()
        with mode:
            fakes = all_of(as_fake(mode, inputs), mode.from_tensor(gate_up))
        for fake, real in zip(fakes, all_of(inputs, gate_up), strict=True):
            assert_looks_like(fake, real)


def test_fake_out_is_returned(backend: Backend) -> None:
    inputs, gate_up = make_inputs(CASE, backend.device), make_gate_up(CASE, backend.device)
    mode = FakeTensorMode()
    with mode:
        fake = as_fake(mode, inputs)
        pair = tuple(mode.from_tensor(part) for part in new_pair(CASE, backend.device))
        for found in (fold(backend, fake, out=pair), silu_mul(backend, mode.from_tensor(gate_up), out=pair)):
            assert found[0] is pair[0] and found[1] is pair[1]
        product = torch.empty(37, 272, dtype=torch.bfloat16, device=backend.device)
        assert block_gemm(backend, (fake.x, fake.x_scale), fake.half(0), out=product) is product


# ------------------------------------------------------------------------------------------ modes


@pytest.mark.parametrize("make_mode", (CountingDispatch, CountingFunction))
def test_modes_see_the_ops(backend: Backend, make_mode: Callable[[], Any]) -> None:
    inputs, gate_up = make_inputs(CASE, backend.device), make_gate_up(CASE, backend.device)
    x, w = (inputs.x, inputs.x_scale), inputs.half(0)
    wanted = fold(backend, inputs), silu_mul(backend, gate_up), block_gemm(backend, x, w)
    out = new_pair(CASE, backend.device)
    with make_mode() as mode:
        found = fold(backend, inputs), silu_mul(backend, gate_up), block_gemm(backend, x, w)
        fold(backend, inputs, out=out)
    seen = {str(getattr(func, "default", func)).removesuffix(".default") for func in mode.seen}
    names = ("fp8_silu_fold_prefill", "fp8_silu_fold_prefill_out", "silu_mul_to_fp8_block128", "fp8_block_gemm_nt")
    assert {f"deep_kernels.{name}" for name in names} <= seen
    assert_same_pair(found[0], wanted[0])
    assert_same_pair(out, wanted[0])
    assert_same_pair(found[1], wanted[1])
    assert torch.equal(found[2], wanted[2])


def test_subclasses(backend: Backend) -> None:
    inputs = make_inputs(CASE, backend.device)
    wanted = fold(backend, inputs)
    found = fold(backend, replace(inputs, x_scale=inputs.x_scale.as_subclass(Wrapped)))
    assert_same_pair(tuple(part.as_subclass(Tensor) for part in found), wanted)
    parameter = torch.nn.Parameter(inputs.w_scale, requires_grad=False)
    assert_same_pair(fold(backend, replace(inputs, w_scale=parameter)), wanted)


# ------------------------------------------------------------------------------------------ compile and export


class Layer(torch.nn.Module):
    """Calls with something before and after them, as in a model."""

    def __init__(self, backend: Backend, case: Case, fused: bool | None) -> None:
        super().__init__()
        self.backend, self.case, self.fused = backend, case, fused

    def forward(self, x: Tensor, x_scale: Tensor, w: Tensor, w_scale: Tensor) -> tuple[Tensor, ...]:
        inputs = Inputs(x, x_scale * 2, w, w_scale)
        y, y_scale = fold(self.backend, inputs, fused=self.fused, **self.case.options)
        product = block_gemm(self.backend, (x, x_scale + 0), inputs.half(1))
        again = silu_mul(self.backend, torch.cat((product, product - 1), dim=1), **self.case.options)
        codes = [part.view(torch.uint8) for part in (y, again[0])]
        return (*codes, y_scale.view(torch.uint8), again[1].view(torch.uint8), product * 2)


TRACED = (CASE, replace(CASE, scale_fmt="ue8m0", activation="oss"), replace(CASE, layout="strided", activation="gelu"))
by_case = pytest.mark.parametrize("case", TRACED, ids=str)
by_fused = pytest.mark.parametrize("fused", (None, False), ids=("", "two"))


def assert_equal(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)


@by_fused
@by_case
def test_compile(backend: Backend, case: Case, fused: bool | None) -> None:
    inputs = make_inputs(case, backend.device)
    module = Layer(backend, case, fused)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for part in (slice(0, 37), slice(0, 9), slice(0, 5)):  # sizes that change make them symbols
        tensors = inputs.rows(part).tensors()
        assert_equal(compiled(*tensors), module(*tensors))


def test_compile_with_the_default_compiler(backend: Backend) -> None:
    """Nothing beside the op, so that no C++ or Triton code has to be generated and compiled."""
    inputs = make_inputs(CASE, backend.device)
    compiled = torch.compile(lambda *tensors: fold(backend, Inputs(*tensors)), fullgraph=True)
    assert_same_pair(compiled(*inputs.tensors()), fold(backend, inputs))


def test_compile_writes_into_an_out_of_the_caller(backend: Backend) -> None:
    inputs = make_inputs(CASE, backend.device)
    wanted = fold(backend, inputs)
    storage = torch.full((39, 272 + 32), 0x5A, dtype=torch.uint8, device=backend.device)
    y = storage.view(torch.float8_e4m3fn)[1:38, 16:288]
    y_scale = torch.zeros(37, 3, device=backend.device)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def write(y: Tensor, y_scale: Tensor, *tensors: Tensor) -> None:
        fold(backend, Inputs(*tensors), out=(y, y_scale))

    write(y, y_scale, *inputs.tensors())
    assert_same_pair((y, y_scale), wanted)
    y.view(torch.uint8).fill_(0x5A)
    assert (storage == 0x5A).all(), "written beside the result"


@by_fused
@by_case
def test_export_with_any_num_tokens(backend: Backend, case: Case, fused: bool | None) -> None:
    inputs = make_inputs(case, backend.device)
    module = Layer(backend, case, fused)
    num_tokens = torch.export.Dim("num_tokens", min=2)
    shapes = {"x": {0: num_tokens}, "x_scale": {0: num_tokens}, "w": None, "w_scale": None}
    program = torch.export.export(module, inputs.tensors(), dynamic_shapes=shapes)
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert any("deep_kernels.fp8_silu_fold_prefill" in target for target in targets)
    for part in (slice(0, 37), slice(0, 6)):
        tensors = inputs.rows(part).tensors()
        assert_equal(program.module()(*tensors), module(*tensors))
