"""Flash attention under torch.compile, torch.export, fake tensors, modes, and torch.library.opcheck."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases import Case, Inputs, Packed, attend, attend_packed, laid_out, make_inputs, pack, with_kernels
from conftest import Backend
from modes import CountingDispatch, CountingFunction, Wrapped
from mqa_cases import assert_same_bits
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

OPS = torch.ops.deep_kernels
CASE = Case(2, 20, 50, (4, 2), causal=True, ex2=(4, 3))
LENGTHS = [(20, 50), (0, 3), (7, 7)]


@pytest.fixture
def backend(backend: Backend) -> Backend:
    return with_kernels(backend)


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch.compiler.reset()


def assert_same(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert_same_bits(one, other)


def packed_arguments(packed: Packed) -> tuple[Any, ...]:
    return (*packed.inputs.tensors(), packed.cu_q, packed.cu_k, packed.max_q, packed.max_k)


# ------------------------------------------------------------------------------------------ opcheck


@pytest.mark.parametrize("num_splits", (1, 2))
def test_opcheck(backend: Backend, num_splits: int) -> None:
    inputs = make_inputs(CASE, backend.device)
    options = (True, 0.2, 4, 3, None, num_splits, backend.arch)
    torch.library.opcheck(OPS.flash_attn_fwd.default, (*inputs.tensors(), *options))
    torch.library.opcheck(OPS.flash_attn_fwd_out.default, (*inputs.tensors(), *options, torch.zeros_like(inputs.q)))
    packed = pack(CASE, LENGTHS, backend.device)
    torch.library.opcheck(OPS.flash_attn_varlen_fwd.default, (*packed_arguments(packed), *options))
    torch.library.opcheck(
        OPS.flash_attn_varlen_fwd_out.default,
        (*packed_arguments(packed), *options, torch.zeros_like(packed.inputs.q)),
    )


def test_registered_ops_always_return_lse(backend: Backend) -> None:
    inputs = make_inputs(CASE, backend.device)
    wanted = attend(backend, inputs, **CASE.options)
    options = (True, None, 4, 3, None, 1, backend.arch)
    assert_same(OPS.flash_attn_fwd(*inputs.tensors(), *options), wanted)
    out = torch.empty_like(inputs.q)
    assert_same((out, OPS.flash_attn_fwd_out(*inputs.tensors(), *options, out)), wanted)


# ------------------------------------------------------------------------------------------ fake tensors


def assert_looks_like(fake: Tensor, real: Tensor) -> None:
    assert type(fake) is not Tensor  # it did not run
    for look in ("shape", "dtype", "device"):
        assert getattr(fake, look) == getattr(real, look)
    assert fake.stride() == real.stride() and fake.storage_offset() == real.storage_offset()


@pytest.mark.parametrize("layout", ("rows", "heads-first"))
def test_fake_results_look_like_real_ones(backend: Backend, layout: str) -> None:
    for num_q, num_kv, dtype in ((0, 5, torch.bfloat16), (1, 0, torch.float16), (20, 50, torch.bfloat16)):
        case = Case(2, num_q, num_kv, dtype=dtype, layout=layout)
        inputs = make_inputs(case, backend.device)
        packed = pack(case, [(num_q, num_kv), (3, 4)], backend.device)
        real = (*attend(backend, inputs), *attend_packed(backend, packed))
        mode = FakeTensorMode()
        with mode:
            fakes = Inputs(*map(mode.from_tensor, inputs.tensors()))
            fake_packed = replace(
                packed,
                inputs=Inputs(*map(mode.from_tensor, packed.inputs.tensors())),
                cu_q=mode.from_tensor(packed.cu_q),
                cu_k=mode.from_tensor(packed.cu_k),
            )
            found = (*attend(backend, fakes), *attend_packed(backend, fake_packed))
        for one, other in zip(found, real, strict=True):
            assert_looks_like(one, other)


def test_fake_out_is_returned(backend: Backend) -> None:
    inputs = make_inputs(CASE, backend.device)
    mode = FakeTensorMode()
    with mode:
        fakes = Inputs(*map(mode.from_tensor, inputs.tensors()))
        out = torch.empty_like(fakes.q)
        found, lse = attend(backend, fakes, out=out)
        assert found is out and lse.shape == (2, 4, 20)


# ------------------------------------------------------------------------------------------ modes


@pytest.mark.parametrize("make_mode", (CountingDispatch, CountingFunction))
def test_modes_see_the_ops(backend: Backend, make_mode: Callable[[], Any]) -> None:
    inputs, packed = make_inputs(CASE, backend.device), pack(CASE, LENGTHS, backend.device)
    wanted = attend(backend, inputs), attend_packed(backend, packed)
    out = torch.empty_like(inputs.q)
    with make_mode() as mode:
        found = attend(backend, inputs), attend_packed(backend, packed)
        attend(backend, inputs, out=out)
        attend_packed(backend, packed, out=torch.empty_like(packed.inputs.q))
    seen = {str(getattr(func, "default", func)).removesuffix(".default") for func in mode.seen}
    names = ("flash_attn_fwd", "flash_attn_fwd_out", "flash_attn_varlen_fwd", "flash_attn_varlen_fwd_out")
    assert {f"deep_kernels.{name}" for name in names} <= seen
    for one, other in zip(found, wanted, strict=True):
        assert_same(one, other)
    assert_same_bits(out, wanted[0][0])


def test_subclasses(backend: Backend) -> None:
    inputs = make_inputs(CASE, backend.device)
    wanted = attend(backend, inputs)
    found = attend(backend, replace(inputs, k=inputs.k.as_subclass(Wrapped)))
    assert_same(tuple(part.as_subclass(Tensor) for part in found), wanted)
    parameter = torch.nn.Parameter(inputs.v, requires_grad=False)
    assert_same(attend(backend, replace(inputs, v=parameter)), wanted)


def test_inputs_stay_as_they_are(backend: Backend) -> None:
    inputs, packed = make_inputs(CASE, backend.device), pack(CASE, LENGTHS, backend.device)
    before = inputs.clone(), packed.inputs.clone()
    attend(backend, inputs)
    attend_packed(backend, packed)
    for now, then in zip((inputs, packed.inputs), before, strict=True):
        assert_same(now.tensors(), then.tensors())


# ------------------------------------------------------------------------------------------ compile and export


class Layer(torch.nn.Module):
    """A call with something before and after it, as in a model."""

    def __init__(self, backend: Backend, case: Case) -> None:
        super().__init__()
        self.backend, self.case = backend, case

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = attend(self.backend, Inputs(q * 2, k, v + 0), **self.case.options)
        return out.transpose(1, 2) + 1, lse * 2


TRACED = (CASE, replace(CASE, layout="heads-first", dtype=torch.float16), replace(CASE, num_splits=2, ex2=None))
by_case = pytest.mark.parametrize("case", TRACED, ids=str)


@by_case
def test_compile(backend: Backend, case: Case) -> None:
    module = Layer(backend, case)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for num_q, num_kv in ((20, 50), (9, 50), (5, 31)):  # sizes that change make them symbols
        tensors = make_inputs(replace(case, num_q=num_q, num_kv=num_kv), backend.device).tensors()
        assert_same(compiled(*tensors), module(*tensors))


def test_compile_without_lse_and_with_the_default_compiler(backend: Backend) -> None:
    """Nothing beside the op, so that no C++ or Triton code has to be generated and compiled."""
    inputs = make_inputs(CASE, backend.device)
    compiled = torch.compile(lambda *tensors: attend(backend, Inputs(*tensors))[0], fullgraph=True)
    assert_same_bits(compiled(*inputs.tensors()), attend(backend, inputs)[0])


def test_compile_of_packed_members(backend: Backend) -> None:
    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=True)
    def run(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int) -> Any:
        return attend_packed(backend, Packed(Inputs(q, k, v), cu_q, cu_k, max_q, max_k), **CASE.options)

    for lengths in (LENGTHS, [(5, 9), (4, 4)], [(31, 40), (2, 2), (1, 70), (8, 8)]):
        packed = pack(CASE, lengths, backend.device)
        assert_same(run(*packed_arguments(packed)), attend_packed(backend, packed, **CASE.options))


def test_compile_writes_into_an_out_of_the_caller(backend: Backend) -> None:
    inputs = make_inputs(CASE, backend.device)
    wanted, wanted_lse = attend(backend, inputs)
    storage = torch.full((2, 22, 5, 80), 7.0, dtype=inputs.q.dtype, device=backend.device)
    out = storage[:, 1:21, :4, 8:72]

    @torch.compile(fullgraph=True, backend="aot_eager")
    def write(out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(backend, Inputs(q, k, v), out=out)[1]

    assert_same((write(out, *inputs.tensors()), out), (wanted_lse, wanted))
    out.fill_(7.0)
    assert (storage == 7.0).all(), "written beside the result"


@by_case
def test_export_with_any_lengths(backend: Backend, case: Case) -> None:
    module = Layer(backend, case)
    num_q, num_kv = torch.export.Dim("num_q", min=2), torch.export.Dim("num_kv", min=2)
    shapes = {"q": {1: num_q}, "k": {1: num_kv}, "v": {1: num_kv}}
    tensors = tuple(laid_out(x, "rows") for x in make_inputs(case, backend.device).tensors())
    program = torch.export.export(module, tensors, dynamic_shapes=shapes)
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert any("deep_kernels.flash_attn_fwd" in target for target in targets)
    for sizes in ((20, 50), (6, 13)):
        changed = replace(case, num_q=sizes[0], num_kv=sizes[1])
        tensors = make_inputs(changed, backend.device).tensors()
        assert_same(program.module()(*tensors), module(*tensors))
