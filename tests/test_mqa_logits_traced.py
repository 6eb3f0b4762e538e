"""fp8_fp4_mqa_logits under torch.compile, torch.export, fake tensors, modes, and torch.library.opcheck."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import Backend
from modes import CountingDispatch, CountingFunction, Wrapped
from mqa_cases import MODES, Case, Inputs, assert_same_bits, call, is_refused, make_inputs, metadata, word
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import deep_kernels as dk
from deep_kernels import formats

OP = torch.ops.deep_kernels.fp8_fp4_mqa_logits.default
OP_OUT = torch.ops.deep_kernels.fp8_fp4_mqa_logits_out.default
METADATA_OP = torch.ops.deep_kernels.get_mqa_logits_metadata.default
# opcheck's schema test compares inputs before and after, which torch cannot do for float8;
# test_inputs_stay_as_they_are stands for it.
WITHOUT_SCHEMA = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
ALL_OPCHECKS = ("test_schema", *WITHOUT_SCHEMA)


def flat(inputs: Inputs, case: Case, backend: Backend, schedule: Tensor | None = None) -> tuple[Any, ...]:
    """The arguments of the registered op."""
    options = (case.clean, case.width, case.logits_dtype, schedule, "exact", backend.arch)
    return (*vars(inputs).values(), *options)


def new_out(case: Case, device: str) -> Tensor:
    return torch.zeros(case.num_q, case.width or case.num_kv, dtype=case.logits_dtype, device=device)


# ------------------------------------------------------------------------------------------ opcheck


@pytest.mark.parametrize("mode", ("clean", "compressed"))
@pytest.mark.parametrize("format", formats.FORMATS)
def test_opcheck(backend: Backend, format: str, mode: str) -> None:
    """Unspecified columns would differ between two runs and are no fault: only clean logits are compared."""
    case = Case(format=format, mode=mode, num_kv=40)
    inputs = make_inputs(case, backend.device)
    if is_refused(backend, inputs):
        return
    checks = ALL_OPCHECKS if format == "mxfp4" else WITHOUT_SCHEMA
    torch.library.opcheck(OP, flat(inputs, case, backend, metadata(backend, inputs)), test_utils=checks)
    out = new_out(case, backend.device)
    torch.library.opcheck(OP_OUT, (*flat(inputs, case, backend), out), test_utils=checks)


def test_opcheck_of_metadata(backend: Backend) -> None:
    inputs = make_inputs(Case(), backend.device)
    torch.library.opcheck(METADATA_OP, (inputs.start, inputs.end, 260, 24, 5, backend.arch))


# ------------------------------------------------------------------------------------------ fake tensors


def as_fake(mode: FakeTensorMode, inputs: Inputs) -> Inputs:
    return Inputs(**{name: None if x is None else mode.from_tensor(x) for name, x in vars(inputs).items()})


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=word)
@pytest.mark.parametrize("mode", MODES)
def test_fake_results_look_like_real_ones(backend: Backend, mode: str, dtype: torch.dtype) -> None:
    for format in formats.FORMATS:
        for num_q, num_kv in ((0, 0), (0, 260), (3, 0), (1, 1), (17, 256), (17, 257), (3, 4100)):
            case = Case(format=format, mode=mode, num_q=num_q, num_kv=num_kv, logits_dtype=dtype, seed=num_q)
            inputs = make_inputs(case, backend.device)
            if is_refused(backend, inputs):
                continue
            options = {"clean": case.clean, "width": case.width, "dtype": dtype}
            real = call(backend, inputs, **options)
            fake_mode = FakeTensorMode()
            with fake_mode:
                fake = call(backend, as_fake(fake_mode, inputs), **options)
            assert type(fake) is not Tensor  # it did not run
            for look in ("shape", "dtype", "device"):
                assert getattr(fake, look) == getattr(real, look)
            assert fake.stride() == real.stride()
            assert fake.storage_offset() == real.storage_offset()


def test_fake_metadata_looks_like_real(backend: Backend) -> None:
    inputs = make_inputs(Case(), backend.device)
    for num_sms in (0, 1, 5):
        try:
            dk.set_num_sms(num_sms)
            real = metadata(backend, inputs)
            fake_mode = FakeTensorMode()
            with fake_mode:
                fake = metadata(backend, as_fake(fake_mode, inputs))
        finally:
            dk.set_num_sms(0)
        assert type(fake) is not Tensor
        assert (fake.shape, fake.dtype, fake.stride(), fake.device) == (
            real.shape, real.dtype, real.stride(), real.device,
        )  # fmt: skip


def test_fake_out_is_returned(backend: Backend) -> None:
    case = Case()
    inputs = make_inputs(case, backend.device)
    fake_mode = FakeTensorMode()
    with fake_mode:
        out = torch.empty(case.num_q, case.num_kv, device=backend.device)
        assert call(backend, as_fake(fake_mode, inputs), out=out) is out


def test_grad_is_refused_while_tracing(backend: Backend) -> None:
    inputs = make_inputs(Case(), backend.device)
    fake_mode = FakeTensorMode()
    with fake_mode:
        fake = as_fake(fake_mode, inputs)
        fake = replace(fake, weights=torch.empty_like(fake.weights).requires_grad_())
        with pytest.raises(ValueError, match="weights requires grad, but the op is forward only"):
            call(backend, fake)
        with torch.no_grad():
            call(backend, fake)


# ------------------------------------------------------------------------------------------ modes


@pytest.mark.parametrize("make_mode", (CountingDispatch, CountingFunction))
def test_modes_see_the_op(backend: Backend, make_mode: Callable[[], Any]) -> None:
    inputs = make_inputs(Case(), backend.device)
    wanted = call(backend, inputs)
    out = torch.zeros_like(wanted)
    schedule = metadata(backend, inputs)
    with make_mode() as mode:
        logits = call(backend, inputs, schedule=schedule)
        call(backend, inputs, out=out)
        again = metadata(backend, inputs)
    seen = {str(getattr(func, "default", func)).removesuffix(".default") for func in mode.seen}
    assert {f"deep_kernels.{name}" for name in ("fp8_fp4_mqa_logits", "get_mqa_logits_metadata")} <= seen
    assert "deep_kernels.fp8_fp4_mqa_logits_out" in seen
    assert_same_bits(logits, wanted)
    assert_same_bits(out, wanted)
    assert torch.equal(schedule, again)


def test_subclasses(backend: Backend) -> None:
    inputs = make_inputs(Case(), backend.device)
    wanted = call(backend, inputs)
    logits = call(backend, replace(inputs, weights=inputs.weights.as_subclass(Wrapped)))
    assert_same_bits(logits.as_subclass(Tensor), wanted)
    parameter = torch.nn.Parameter(inputs.weights, requires_grad=False)
    assert_same_bits(call(backend, replace(inputs, weights=parameter)), wanted)


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
        kv: Tensor,
        kv_scale: Tensor,
        weights: Tensor,
        start: Tensor,
        end: Tensor,
    ) -> Tensor:
        inputs = Inputs(q, q_scale, kv, kv_scale, weights * 2, start + 1, end)
        schedule = metadata(self.backend, inputs) if self.case.metadata else None
        out = None
        if self.with_out:
            width = self.case.width or kv.shape[0]
            out = torch.zeros(q.shape[0], width, dtype=self.case.logits_dtype, device=q.device)
        options = {"clean": self.case.clean, "width": self.case.width, "dtype": self.case.logits_dtype}
        return call(self.backend, inputs, schedule=schedule, out=out, **options) - 1


TRACED = (
    Case(),
    Case(format="mxfp8", mode="compressed", metadata=True, logits_dtype=torch.bfloat16),
    Case(format="mxfp4", head_dim=128, strided=True),
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
    for rows in (slice(0, 9), slice(0, 5)):  # sizes that change make them symbols
        fewer = inputs.rows(rows)
        assert_same_bits(compiled(*vars(fewer).values()), wanted[rows])


def test_compile_with_the_default_compiler(backend: Backend) -> None:
    """Nothing beside the op, so that no C++ or Triton code has to be generated and compiled."""
    inputs = make_inputs(Case(), backend.device)

    @torch.compile(fullgraph=True)
    def score(*arguments: Tensor) -> Tensor:
        x = Inputs(*arguments)
        return call(backend, x, schedule=metadata(backend, x))

    assert_same_bits(score(*vars(inputs).values()), call(backend, inputs))


def test_compile_writes_into_an_out_of_the_caller(backend: Backend) -> None:
    """Guarded on both sides: a functionalized copy must come back, and nothing beside it."""
    case = Case()
    inputs = make_inputs(case, backend.device)
    wanted = call(backend, inputs)
    storage = torch.full((3 * case.num_q, case.num_kv + 8), 7.0, device=backend.device)
    out = storage[case.num_q : 2 * case.num_q, 3 : 3 + case.num_kv]

    @torch.compile(fullgraph=True, backend="aot_eager")
    def write(out: Tensor, *arguments: Tensor) -> None:
        call(backend, Inputs(*arguments), out=out)

    write(out, *vars(inputs).values())
    assert_same_bits(out, wanted)
    out.fill_(7.0)
    assert (storage == 7.0).all()


@pytest.mark.parametrize("with_out", (False, True), ids=("", "out"))
@pytest.mark.parametrize("case", TRACED, ids=str)
def test_export(backend: Backend, case: Case, with_out: bool) -> None:
    inputs = make_inputs(case, backend.device)
    if is_refused(backend, inputs):
        return
    module = Scores(backend, case, with_out)
    wanted = module(*vars(inputs).values())
    num_q = torch.export.Dim("num_q", min=2)
    shapes = {name: {0: num_q} for name in ("q", "weights", "start", "end")}
    shapes |= {"q_scale": None if inputs.q_scale is None else {0: num_q}, "kv": None, "kv_scale": None}
    program = torch.export.export(module, tuple(vars(inputs).values()), dynamic_shapes=shapes)
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert any("deep_kernels.fp8_fp4_mqa_logits" in target for target in targets)
    exported = program.module()
    assert_same_bits(exported(*vars(inputs).values()), wanted)
    assert_same_bits(exported(*vars(inputs.rows(slice(0, 6))).values()), wanted[:6])


@pytest.mark.parametrize("strict", (False, True), ids=("", "strict"))
@pytest.mark.parametrize("width", (0, 70), ids=("", "compressed"))
def test_export_with_any_num_kv(backend: Backend, width: int, strict: bool) -> None:
    """Also where rows are as wide as the unit that they are padded to."""
    inputs = make_inputs(Case(windows="full"), backend.device)

    class Module(torch.nn.Module):
        def forward(self, *arguments: Tensor) -> Tensor:
            x = Inputs(arguments[0], None, *arguments[1:])
            return call(backend, x, width=width, schedule=metadata(backend, x)) - 1

    num_q, num_kv = (torch.export.Dim(name, min=2) for name in ("num_q", "num_kv"))
    first = {"q": num_q, "kv": num_kv, "kv_scale": num_kv, "weights": num_q, "start": num_q, "end": num_q}
    shapes = (tuple({0: dim} for dim in first.values()),)
    arguments = tuple(inputs.tensors().values())
    program = torch.export.export(Module(), arguments, dynamic_shapes=shapes, strict=strict).module()
    for sizes in ((17, 260), (6, 256), (2, 512), (17, 3)):
        x = make_inputs(Case(num_q=sizes[0], num_kv=sizes[1], windows="full"), backend.device)
        assert_same_bits(program(*x.tensors().values()), call(backend, x, width=width) - 1)


def test_unaligned_rows_need_no_second_compilation(backend: Backend) -> None:
    compiles = 0

    def count(module: torch.fx.GraphModule, _: Any) -> Any:
        nonlocal compiles
        compiles += 1
        return module.forward

    compiled = torch.compile(lambda x: call(backend, x) - 1, backend=count, dynamic=True)
    for num_kv in (260, 512, 1024, 700):
        x = make_inputs(Case(num_kv=num_kv), backend.device)
        assert_same_bits(compiled(x), call(backend, x) - 1)
    assert compiles == 1


@pytest.fixture
def any_num_sms() -> Iterator[None]:
    yield
    dk.set_num_sms(0)


def test_set_num_sms_after_compile(backend: Backend, any_num_sms: None) -> None:
    inputs = make_inputs(Case(), backend.device)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def schedule(start: Tensor, end: Tensor) -> Tensor:
        cuts = dk.get_mqa_logits_metadata(start, end, 260, 24, arch=backend.arch)
        return cuts.view(-1, 2) + 0

    for num_sms in (3, 5, 0, 7, 3):
        dk.set_num_sms(num_sms)
        assert torch.equal(schedule(inputs.start, inputs.end), metadata(backend, inputs).view(-1, 2)), num_sms


def test_exported_schedules_keep_their_length(backend: Backend, any_num_sms: None) -> None:
    inputs = make_inputs(Case(), backend.device)

    class Module(torch.nn.Module):
        def forward(self, start: Tensor, end: Tensor) -> Tensor:
            return dk.get_mqa_logits_metadata(start, end, 260, 24, arch=backend.arch)

    dk.set_num_sms(3)
    wanted = metadata(backend, inputs)
    program = torch.export.export(Module(), (inputs.start, inputs.end)).module()
    dk.set_num_sms(5)
    schedule = program(inputs.start, inputs.end)
    assert torch.equal(schedule, wanted)
    assert_same_bits(call(backend, inputs, schedule=schedule), call(backend, inputs))


def test_sizes_that_are_known_are_checked_beside_those_that_are_not(backend: Backend) -> None:
    inputs = make_inputs(Case(), backend.device)

    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=True)
    def score(*arguments: Tensor) -> Tensor:
        return call(backend, Inputs(arguments[0], None, *arguments[1:]))

    tensors = list(inputs.tensors().values())
    for tensor in tensors:
        torch._dynamo.mark_dynamic(tensor, 0)
    torch._dynamo.mark_static(tensors[1], 1)
    tensors[3] = tensors[3].double()
    with pytest.raises(Exception, match=r"weights must be float32 or bfloat16 or float16 .*, got float64"):
        score(*tensors)


def test_meta_tensors_are_checked_too(backend: Backend) -> None:
    inputs = make_inputs(Case(), "meta")
    wrong = replace(inputs, weights=inputs.weights[:, :23])
    with pytest.raises(ValueError, match=r"weights must be .* \[num_q=17, num_heads=24\], got float32 \[17, 23\]"):
        call(backend, wrong)
    with pytest.raises(ValueError, match="max_seqlen_k must be from 0 to 2147482623, got -1"):
        call(backend, inputs, width=-1)
