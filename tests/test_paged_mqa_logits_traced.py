"""fp8_fp4_paged_mqa_logits under torch.compile, torch.export, fake tensors, modes, and torch.library.opcheck."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import Backend
from mqa_cases import assert_same_bits, word
from paged_mqa_cases import Case, Inputs, call, is_refused, make_inputs, metadata
from test_mqa_logits_traced import ALL_OPCHECKS, WITHOUT_SCHEMA, CountingDispatch, CountingFunction, Wrapped
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import deep_kernels as dk
from deep_kernels import formats

OP = torch.ops.deep_kernels.fp8_fp4_paged_mqa_logits.default
OP_OUT = torch.ops.deep_kernels.fp8_fp4_paged_mqa_logits_out.default
METADATA_OP = torch.ops.deep_kernels.get_paged_mqa_logits_metadata.default


def flat(inputs: Inputs, case: Case, backend: Backend, schedule: Tensor | None = None) -> tuple[Any, ...]:
    """The arguments of the registered op."""
    tensors = (inputs.q, inputs.q_scale, inputs.kv_cache, inputs.weights, inputs.context_lens, inputs.block_table)
    return (*tensors, schedule, case.width, case.clean, case.logits_dtype, inputs.indices, backend.arch)


# ------------------------------------------------------------------------------------------ opcheck


@pytest.mark.parametrize("lens", ("1d", "2d", "indices"))
@pytest.mark.parametrize("format", formats.FORMATS)
def test_opcheck(backend: Backend, format: str, lens: str) -> None:
    """Unspecified columns would differ between two runs and are no fault: only clean logits are compared."""
    case = Case(format=format, lens=lens, next_n=1 if lens == "indices" else 2)
    inputs = make_inputs(case, backend.device)
    if is_refused(backend, inputs):
        return
    checks = ALL_OPCHECKS if format == "mxfp4" else WITHOUT_SCHEMA
    torch.library.opcheck(OP, flat(inputs, case, backend, metadata(backend, inputs)), test_utils=checks)
    out = torch.zeros(case.batch * case.next_n, case.width, device=backend.device)
    torch.library.opcheck(OP_OUT, (*flat(inputs, case, backend), out), test_utils=checks)
    torch.library.opcheck(METADATA_OP, (inputs.context_lens, 64, 5, inputs.indices, backend.arch))


# ------------------------------------------------------------------------------------------ fake tensors


def as_fake(mode: FakeTensorMode, inputs: Inputs) -> Inputs:
    return Inputs(**{name: None if x is None else mode.from_tensor(x) for name, x in vars(inputs).items()})


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=word)
@pytest.mark.parametrize("format", formats.FORMATS)
def test_fake_results_look_like_real_ones(backend: Backend, format: str, dtype: torch.dtype) -> None:
    for batch, next_n, width in ((0, 1, 0), (0, 2, 70), (3, 1, 0), (1, 1, 1), (2, 3, 256), (2, 1, 257)):
        case = Case(batch=batch, next_n=next_n, format=format)
        inputs = make_inputs(case, backend.device)
        if is_refused(backend, inputs):
            return
        real = call(backend, inputs, width, dtype=dtype)
        real_schedule = metadata(backend, inputs, 7)
        mode = FakeTensorMode()
        with mode:
            fake = call(backend, as_fake(mode, inputs), width, dtype=dtype)
            fake_schedule = metadata(backend, as_fake(mode, inputs), 7)
        for one, other in ((fake, real), (fake_schedule, real_schedule)):
            assert type(one) is not Tensor  # it did not run
            for look in ("shape", "dtype", "device"):
                assert getattr(one, look) == getattr(other, look)
            assert one.stride() == other.stride()
            assert one.storage_offset() == other.storage_offset()


def test_fake_out_is_returned(backend: Backend) -> None:
    inputs = make_inputs(Case(), backend.device)
    mode = FakeTensorMode()
    with mode:
        out = torch.empty(3, 200, device=backend.device)
        assert call(backend, as_fake(mode, inputs), 200, out=out) is out


def test_meta_tensors_are_checked_too(backend: Backend) -> None:
    inputs = make_inputs(Case(), "meta")
    assert call(backend, inputs, 70).shape == (3, 70)
    wrong = replace(inputs, weights=inputs.weights[:, :23])
    with pytest.raises(ValueError, match=r"weights must be .* \[num_q=3, num_heads=24\], got float32 \[3, 23\]"):
        call(backend, wrong, 70)


# ------------------------------------------------------------------------------------------ modes


@pytest.mark.parametrize("make_mode", (CountingDispatch, CountingFunction))
def test_modes_see_the_op(backend: Backend, make_mode: Any) -> None:
    inputs = make_inputs(Case(), backend.device)
    wanted = call(backend, inputs, 200)
    out = torch.zeros_like(wanted)
    schedule = metadata(backend, inputs)
    with make_mode() as mode:
        logits = call(backend, inputs, 200, schedule=schedule)
        call(backend, inputs, 200, out=out)
        again = metadata(backend, inputs)
    seen = {str(getattr(func, "default", func)).removesuffix(".default") for func in mode.seen}
    names = ("fp8_fp4_paged_mqa_logits", "fp8_fp4_paged_mqa_logits_out", "get_paged_mqa_logits_metadata")
    assert {f"deep_kernels.{name}" for name in names} <= seen
    assert_same_bits(logits, wanted)
    assert_same_bits(out, wanted)
    assert torch.equal(schedule, again)


def test_subclasses(backend: Backend) -> None:
    inputs = make_inputs(Case(), backend.device)
    wanted = call(backend, inputs, 200)
    logits = call(backend, replace(inputs, weights=inputs.weights.as_subclass(Wrapped)), 200)
    assert_same_bits(logits.as_subclass(Tensor), wanted)
    parameter = torch.nn.Parameter(inputs.weights, requires_grad=False)
    assert_same_bits(call(backend, replace(inputs, weights=parameter), 200), wanted)


# ------------------------------------------------------------------------------------------ compile and export


class Scores(torch.nn.Module):
    """A call with something before and after it, as in a model."""

    def __init__(self, backend: Backend, case: Case, with_out: bool) -> None:
        super().__init__()
        self.backend, self.case, self.with_out = backend, case, with_out

    def forward(
        self,
        q: Tensor,
        q_scale: Tensor | None,
        kv_cache: Tensor,
        weights: Tensor,
        context_lens: Tensor,
        block_table: Tensor,
        indices: Tensor | None,
    ) -> Tensor:
        inputs = Inputs(q, q_scale, kv_cache, weights * 2, context_lens - 1, block_table, indices)
        schedule = metadata(self.backend, inputs, 5) if self.case.metadata else None
        out = None
        if self.with_out:
            out = torch.zeros(weights.shape[0], self.case.width, dtype=self.case.logits_dtype, device=q.device)
        return call(
            self.backend, inputs, self.case.width, dtype=self.case.logits_dtype, schedule=schedule, out=out
        ) - 1  # fmt: skip


TRACED = (
    Case(batch=5),
    Case(batch=5, next_n=2, lens="2d", format="mxfp8", metadata=True, logits_dtype=torch.bfloat16),
    Case(batch=5, lens="indices", format="mxfp4", head_dim=128, strided=True, metadata=True),
)


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch.compiler.reset()


@pytest.mark.parametrize("with_out", (False, True), ids=("", "out"))
@pytest.mark.parametrize("case", TRACED, ids=str)
def test_compile(backend: Backend, case: Case, with_out: bool) -> None:
    inputs = make_inputs(case, backend.device)
    if is_refused(backend, inputs):
        return
    module = Scores(backend, case, with_out)
    wanted = module(*vars(inputs).values())
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert_same_bits(compiled(*vars(inputs).values()), wanted)
    for last in (4, 2):  # sizes that change make them symbols
        fewer = inputs.requests(slice(0, last))
        assert_same_bits(compiled(*vars(fewer).values()), wanted[: last * case.next_n])


def test_compile_writes_into_an_out_of_the_caller(backend: Backend) -> None:
    """Guarded on both sides: a functionalized copy must come back, and nothing beside it."""
    inputs = make_inputs(Case(), backend.device)
    wanted = call(backend, inputs, 200)
    storage = torch.full((9, 208), 7.0, device=backend.device)
    out = storage[3:6, 3:203]

    @torch.compile(fullgraph=True, backend="aot_eager")
    def write(out: Tensor, *arguments: Tensor) -> None:
        call(backend, Inputs(*arguments), 200, out=out)

    write(out, *vars(inputs).values())
    assert_same_bits(out, wanted)
    out.fill_(7.0)
    assert (storage == 7.0).all()


@pytest.mark.parametrize("with_out", (False, True), ids=("", "out"))
@pytest.mark.parametrize("case", TRACED, ids=str)
def test_export_with_any_batch(backend: Backend, case: Case, with_out: bool) -> None:
    inputs = make_inputs(case, backend.device)
    if is_refused(backend, inputs):
        return
    module = Scores(backend, case, with_out)
    wanted = module(*vars(inputs).values())
    batch = torch.export.Dim("batch", min=2)
    shapes: dict[str, Any] = {name: {0: batch} for name in ("q", "q_scale", "context_lens", "block_table", "indices")}
    shapes |= {"kv_cache": None, "weights": {0: case.next_n * batch}}
    shapes = {name: shapes[name] if value is not None else None for name, value in vars(inputs).items()}
    program = torch.export.export(module, tuple(vars(inputs).values()), dynamic_shapes=shapes)
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert any("deep_kernels.fp8_fp4_paged_mqa_logits" in target for target in targets)
    exported = program.module()
    assert_same_bits(exported(*vars(inputs).values()), wanted)
    fewer = inputs.requests(slice(0, 3))
    assert_same_bits(exported(*vars(fewer).values()), wanted[: 3 * case.next_n])


def test_widths_need_no_second_compilation(backend: Backend) -> None:
    """Also where rows are as wide as the unit that they are padded to."""
    compiles = 0

    def count(module: torch.fx.GraphModule, _: Any) -> Any:
        nonlocal compiles
        compiles += 1
        return module.forward

    inputs = make_inputs(Case(), backend.device)
    compiled = torch.compile(lambda x, width: call(backend, x, width) - 1, backend=count, dynamic=True)
    for width in (200, 256, 512, 70):
        assert_same_bits(compiled(inputs, width), call(backend, inputs, width) - 1)
    assert compiles == 1


def test_metadata_with_any_num_sms(backend: Backend) -> None:
    inputs = make_inputs(Case(), backend.device)

    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=True)
    def schedule(lens: Tensor, num_sms: int) -> Tensor:
        return dk.get_paged_mqa_logits_metadata(lens, 64, num_sms, arch=backend.arch) + 0

    for num_sms in (3, 5, 132):
        assert torch.equal(schedule(inputs.context_lens, num_sms), metadata(backend, inputs, num_sms))
