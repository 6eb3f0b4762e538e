"""fp8_fp4_mqa_logits and its metadata: every refusal, word for word."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from conftest import BACKENDS, Backend
from mqa_cases import OP, Case, call, is_refused, make_inputs
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

import deep_kernels as dk
from deep_kernels import formats

METADATA = "get_mqa_logits_metadata"
CPU = BACKENDS[0]


@dataclass
class Arguments:
    """The arguments of the public function as keywords; 17 queries, 260 kv tokens, 24 heads of 64."""

    q: Any
    kv: Any
    weights: Any
    cu_seq_len_k_start: Any
    cu_seq_len_k_end: Any
    others: dict[str, Any] = field(default_factory=dict)

    def call(self, backend: Backend) -> Tensor:
        keywords = {name: value for name, value in vars(self).items() if name != "others"}
        return dk.fp8_fp4_mqa_logits(**{**keywords, "arch": backend.arch, **self.others})


def arguments(backend: Backend, format: str = "fp8", **others: Any) -> Arguments:
    x = make_inputs(Case(format=format), backend.device)
    return Arguments((x.q, x.q_scale), (x.kv, x.kv_scale), x.weights, x.start, x.end, others)


Change = Callable[[Arguments], Arguments]


@dataclass(frozen=True)
class Refusal:
    name: str
    change: Change
    sentence: str
    error: type[Exception] = ValueError
    format: str = "fp8"


def q(change: Callable[[Tensor], Any]) -> Change:
    return lambda a: replace(a, q=(change(a.q[0]), a.q[1]))


def q_scale(change: Callable[[Tensor], Any]) -> Change:
    return lambda a: replace(a, q=(a.q[0], change(a.q[1])))


def kv(change: Callable[[Tensor], Any]) -> Change:
    return lambda a: replace(a, kv=(change(a.kv[0]), a.kv[1]))


def kv_scale(change: Callable[[Tensor], Any]) -> Change:
    return lambda a: replace(a, kv=(a.kv[0], change(a.kv[1])))


def argument(name: str, change: Callable[[Any], Any]) -> Change:
    return lambda a: replace(a, **{name: change(getattr(a, name))})


def other(**others: Any) -> Change:
    return lambda a: replace(a, others={**a.others, **others})


def schedule(view: Callable[[Tensor], Tensor]) -> Change:
    """A view of a schedule that is on the device already: moving one there would pack it."""
    return lambda a: other(schedule_meta=view(torch.zeros(16, dtype=torch.int32, device=a.weights.device)))(a)


def out(make: Callable[[Arguments], Any]) -> Change:
    return lambda a: replace(a, others={**a.others, "out": make(a)})


def as_e4m3(x: Tensor) -> Tensor:
    return x.view(torch.uint8).contiguous().view(torch.float8_e4m3fn)


def head_stride_8(x: Tensor) -> Tensor:
    """[17, 24, 64] with 72 bytes from head to head."""
    storage = torch.zeros(17 * 24 * 72, dtype=torch.uint8, device=x.device).view(x.dtype)
    return storage.as_strided((17, 24, 64), (24 * 72, 72, 1))


def at_byte_8(x: Tensor) -> Tensor:
    storage = torch.zeros(x.numel() + 16, dtype=torch.uint8, device=x.device).view(x.dtype)
    return storage[8 : 8 + x.numel()].view(x.shape)


def every_second(x: Tensor) -> Tensor:
    """The same shape with stride 2 in the last dimension."""
    wide = torch.zeros(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype, device=x.device)
    return wide[..., ::2]


def needing_grad(x: Tensor) -> Tensor:
    return x.clone().requires_grad_()


def empty_out(a: Arguments, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=a.weights.device)


def out_over_kv(a: Arguments) -> Tensor:
    """An `out` that starts within the memory of kv, which is put there."""
    storage = torch.zeros(1 << 16, dtype=torch.uint8, device=a.weights.device)
    a.kv = (storage[: 260 * 64].view(torch.float8_e4m3fn).view(260, 64), a.kv[1])
    return storage[64 * 64 :].view(torch.float32)[: 17 * 260].view(17, 260)


def out_over_weights(a: Arguments) -> Tensor:
    storage = torch.zeros(17 * 260 + 17 * 24 - 1, device=a.weights.device)
    a.weights = storage[17 * 260 - 1 :].view(17, 24)
    return storage[: 17 * 260].view(17, 260)


Q_EXPECTED = "float8_e4m3fn [num_q, num_heads, head_dim]"
FORWARD_ONLY = "requires grad, but the op is forward only: call it under torch.no_grad() or detach the input"

REFUSALS = (
    # q
    Refusal("q-float32", q(lambda x: x.float()),
            f"q must be {Q_EXPECTED} or int8, uint8 or float4_e2m1fn_x2 [num_q, num_heads, head_dim / 2], "
            "got float32 [17, 24, 64]"),
    Refusal("q-e5m2", q(lambda x: x.float().to(torch.float8_e5m2)),
            f"q must be {Q_EXPECTED} or int8, uint8 or float4_e2m1fn_x2 [num_q, num_heads, head_dim / 2], "
            "got float8_e5m2 [17, 24, 64]"),
    Refusal("q-rank", q(lambda x: x[0]), f"q must be {Q_EXPECTED}, got float8_e4m3fn [24, 64]"),
    Refusal("q-pairs-without-scale", q(lambda x: x.view(torch.int8)),
            "q scale must be given with int8 values (MXFP4), got None"),
    Refusal("q-last-stride", q(every_second),
            "q must have stride 1 in its last dimension, got strides [3072, 128, 2]"),
    Refusal("q-head-stride", q(head_stride_8),
            "q must have strides that are positive multiples of 16 bytes, got 72 bytes in dimension 1"),
    Refusal("q-expanded", q(lambda x: x[:, :1].expand(17, 24, 64)),
            "q must have strides that are positive multiples of 16 bytes, got 0 bytes in dimension 1"),
    Refusal("q-address", q(at_byte_8),
            "q must start at a multiple of 16 bytes, got an address 8 bytes past one"),
    # q scale
    Refusal("q-scale-dtype", q_scale(lambda x: x.float()),
            "q scale must be int32 [num_q=17, num_heads=24], got float32 [17, 24]",
            format="mxfp8"),
    Refusal("q-scale-shape", q_scale(lambda x: x[:, :23]),
            "q scale must be int32 [num_q=17, num_heads=24], got int32 [17, 23]", format="mxfp4"),
    Refusal("q-scale-e8m0-shape", q_scale(lambda x: x.view(torch.uint8).view(17, 24, 4).view(torch.float8_e8m0fnu)),
            "q scale must be float8_e8m0fnu [num_q=17, num_heads=24, head_dim / 32=2], "
            "got float8_e8m0fnu [17, 24, 4]", format="mxfp8"),
    # kv
    Refusal("kv-dtype", kv(lambda x: x.view(torch.uint8)),
            "kv must be float8_e4m3fn [num_kv, head_dim=64], got uint8 [260, 64]"),
    Refusal("kv-other-format", kv(as_e4m3),
            "kv must be int8 or uint8 or float4_e2m1fn_x2 [num_kv, head_dim / 2=32], got float8_e4m3fn [260, 32]",
            format="mxfp4"),
    Refusal("kv-rank", kv(lambda x: x.unsqueeze(0)),
            "kv must be float8_e4m3fn [num_kv, head_dim=64], got float8_e4m3fn [1, 260, 64]"),
    Refusal("kv-head-dim", kv(lambda x: x[:, :32]),
            "kv must be float8_e4m3fn [num_kv, head_dim=64], got float8_e4m3fn [260, 32]"),
    Refusal("kv-last-stride", kv(every_second), "kv must have stride 1 in its last dimension, got strides [128, 2]"),
    Refusal("kv-expanded", kv(lambda x: x[:1].expand(260, 64)),
            "kv must have strides that are positive multiples of 16 bytes, got 0 bytes in dimension 0"),
    Refusal("kv-address", kv(at_byte_8), "kv must start at a multiple of 16 bytes, got an address 8 bytes past one"),
    # kv scale
    Refusal("kv-scale-dtype", kv_scale(lambda x: x.half()),
            "kv scale must be float32 [num_kv=260], got float16 [260]"),
    Refusal("kv-scale-shape", kv_scale(lambda x: x[:259]), "kv scale must be float32 [num_kv=260], got float32 [259]"),
    Refusal("kv-scale-rank", kv_scale(lambda x: x.unsqueeze(1)),
            "kv scale must be float32 [num_kv=260], got float32 [260, 1]"),
    Refusal("kv-scale-of-mx", kv_scale(lambda x: x.view(torch.int32)),
            "kv scale must be float32 [num_kv=260], got int32 [260]"),
    Refusal("kv-scale-of-fp8", kv_scale(lambda x: x.float()),
            "kv scale must be int32 [num_kv=260], got float32 [260]", format="mxfp8"),
    Refusal("kv-scale-stride", kv_scale(every_second),
            "kv scale must have stride 1 in its last dimension, got strides [2]"),
    # weights
    Refusal("weights-dtype", argument("weights", lambda x: x.double()),
            "weights must be float32 or bfloat16 or float16 [num_q=17, num_heads=24], got float64 [17, 24]"),
    Refusal("weights-heads", argument("weights", lambda x: x[:, :23]),
            "weights must be float32 or bfloat16 or float16 [num_q=17, num_heads=24], got float32 [17, 23]"),
    Refusal("weights-rows", argument("weights", lambda x: x[:16]),
            "weights must be float32 or bfloat16 or float16 [num_q=17, num_heads=24], got float32 [16, 24]"),
    Refusal("weights-stride", argument("weights", every_second),
            "weights must have stride 1 in its last dimension, got strides [48, 2]"),
    Refusal("weights-grad", argument("weights", needing_grad), f"weights {FORWARD_ONLY}"),
    Refusal("weights-sparse", argument("weights", lambda x: x.to_sparse()),
            "weights must be a dense tensor, got one that is sparse"),
    # windows
    Refusal("start-dtype", argument("cu_seq_len_k_start", lambda x: x.long()),
            "cu_seq_len_k_start must be int32 [num_q=17], got int64 [17]"),
    Refusal("start-shape", argument("cu_seq_len_k_start", lambda x: x[1:]),
            "cu_seq_len_k_start must be int32 [num_q=17], got int32 [16]"),
    Refusal("end-dtype", argument("cu_seq_len_k_end", lambda x: x.short()),
            "cu_seq_len_k_end must be int32 [num_q=17], got int16 [17]"),
    Refusal("end-rank", argument("cu_seq_len_k_end", lambda x: x.unsqueeze(0)),
            "cu_seq_len_k_end must be int32 [num_q=17], got int32 [1, 17]"),
    # options
    Refusal("width-negative", other(max_seqlen_k=-1), "max_seqlen_k must be from 0 to 2147482623, got -1"),
    Refusal("width-too-large", other(max_seqlen_k=2**31), "max_seqlen_k must be from 0 to 2147482623, got 2147483648"),
    Refusal("width-beyond-64-bits", other(max_seqlen_k=2**70), f"max_seqlen_k must fit into 64 bits, got {2**70}"),
    Refusal("width-beyond-words", other(max_seqlen_k=2**99999),
            "max_seqlen_k must fit into 64 bits, got one of 100000 bits"),
    Refusal("reduction-nul", other(reduction="exact\0"), "reduction must be text that UTF-8 can write, without NUL"),
    Refusal("arch-nul", other(arch="sm89\0"), "arch must be text that UTF-8 can write, without NUL"),
    Refusal("arch-surrogate", other(arch="\udc80"), "arch must be text that UTF-8 can write, without NUL"),
    Refusal("logits-dtype", other(logits_dtype=torch.float16),
            "logits_dtype must be float32 or bfloat16, got float16"),
    Refusal("reduction", other(reduction="fast"), "reduction must be 'exact' or 'folded', got 'fast'"),
    Refusal("schedule-dtype", other(schedule_meta=torch.zeros(4)),
            "schedule_meta must be int32 [length], got float32 [4]"),
    Refusal("schedule-rank", other(schedule_meta=torch.zeros(2, 2, dtype=torch.int32)),
            "schedule_meta must be int32 [length], got int32 [2, 2]"),
    Refusal("schedule-stride", schedule(lambda zeros: zeros[::2]),
            "schedule_meta must have stride 1 in its last dimension, got strides [2]"),
    Refusal("schedule-odd", other(schedule_meta=torch.zeros(7, dtype=torch.int32)),
            "schedule_meta must be int32 [2 * (num_sms + 1)] of get_mqa_logits_metadata, got int32 [7]"),
    Refusal("schedule-short", other(schedule_meta=torch.zeros(2, dtype=torch.int32)),
            "schedule_meta must be int32 [2 * (num_sms + 1)] of get_mqa_logits_metadata, got int32 [2]"),
    # out
    Refusal("out-dtype", out(lambda a: empty_out(a, 17, 260, dtype=torch.bfloat16)),
            "out must be float32 [num_q=17, width=260], got bfloat16 [17, 260]"),
    Refusal("out-shape", out(lambda a: empty_out(a, 17, 261)),
            "out must be float32 [num_q=17, width=260], got float32 [17, 261]"),
    Refusal("out-shape-compressed",
            lambda a: replace(a, others={"max_seqlen_k": 99, "out": empty_out(a, 17, 260)}),
            "out must be float32 [num_q=17, width=99], got float32 [17, 260]"),
    Refusal("out-last-stride", out(lambda a: empty_out(a, 260, 17).T),
            "out must have stride 1 in its last dimension, got strides [1, 17]"),
    Refusal("out-rows-overlap", out(lambda a: empty_out(a, 17 * 260).as_strided((17, 260), (200, 1))),
            "out must have rows that do not overlap, got row stride 200 for 260 columns"),
    Refusal("out-expanded", out(lambda a: empty_out(a, 1, 260).expand(17, 260)),
            "out must have rows that do not overlap, got row stride 0 for 260 columns"),
    Refusal("out-over-kv", out(out_over_kv),
            "out must not share memory with another argument, got one that overlaps kv"),
    Refusal("out-over-weights", out(out_over_weights),
            "out must not share memory with another argument, got one that overlaps weights"),
    Refusal("out-grad", out(lambda a: empty_out(a, 17, 260).requires_grad_()), f"out {FORWARD_ONLY}"),
    # Python types
    Refusal("q-a-tensor", lambda a: replace(a, q=a.q[0]),
            "q must be a pair (values, scale), got Tensor", TypeError),
    Refusal("q-three", lambda a: replace(a, q=(*a.q, None)),
            "q must be a pair (values, scale), got a tuple of 3", TypeError),
    Refusal("q-a-list-of-numbers", q(lambda x: [1.0]), "q must be a torch.Tensor, got list", TypeError),
    Refusal("q-scale-a-number", q_scale(lambda x: 1.0), "q scale must be a torch.Tensor or None, got float", TypeError),
    Refusal("kv-a-tensor", lambda a: replace(a, kv=a.kv[0]),
            "kv must be a pair (values, scale), got Tensor", TypeError),
    Refusal("kv-none", kv(lambda x: None), "kv must be a torch.Tensor, got NoneType", TypeError),
    Refusal("kv-scale-none", kv_scale(lambda x: None), "kv scale must be a torch.Tensor, got NoneType", TypeError),
    Refusal("weights-array", argument("weights", lambda x: x.cpu().numpy()),
            "weights must be a torch.Tensor, got numpy.ndarray", TypeError),
    Refusal("start-an-int", argument("cu_seq_len_k_start", lambda x: 0),
            "cu_seq_len_k_start must be a torch.Tensor, got int", TypeError),
    Refusal("end-none", argument("cu_seq_len_k_end", lambda x: None),
            "cu_seq_len_k_end must be a torch.Tensor, got NoneType", TypeError),
    Refusal("clean-a-number", other(clean_logits=1), "clean_logits must be a bool, got int", TypeError),
    Refusal("width-a-float", other(max_seqlen_k=8.0), "max_seqlen_k must be an int, got float", TypeError),
    Refusal("width-a-bool", other(max_seqlen_k=True), "max_seqlen_k must be an int, got bool", TypeError),
    Refusal("logits-dtype-a-str", other(logits_dtype="float32"), "logits_dtype must be a torch.dtype, got str",
            TypeError),
    Refusal("schedule-a-list", other(schedule_meta=[0, 0]), "schedule_meta must be a torch.Tensor or None, got list",
            TypeError),
    Refusal("reduction-none", other(reduction=None), "reduction must be a str, got NoneType", TypeError),
    Refusal("out-a-list", other(out=[]), "out must be a torch.Tensor or None, got list", TypeError),
    Refusal("arch-an-int", other(arch=90), "arch must be a str or None, got int", TypeError),
)  # fmt: skip


def assert_refused(error: type[Exception], sentence: str, function: Callable[[], Any]) -> None:
    with pytest.raises(error) as caught:
        function()
    assert str(caught.value) == sentence
    assert type(caught.value) is error


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.name)
def test_refusals(backend: Backend, refusal: Refusal) -> None:
    if is_refused(backend, make_inputs(Case(format=refusal.format), backend.device)):
        return
    good = arguments(backend, refusal.format)
    good.call(backend)
    bad = refusal.change(good)
    for name, value in bad.others.items():
        if name == "schedule_meta" and isinstance(value, Tensor):
            bad.others[name] = value.to(backend.device)
    assert_refused(refusal.error, f"{OP}: {refusal.sentence}", lambda: bad.call(backend))


OF_MEMORY = {"q-address", "kv-address", "out-over-kv", "out-over-weights"}  # which fake tensors have none of


@pytest.mark.parametrize(
    "refusal",
    [one for one in REFUSALS if one.error is ValueError and one.name not in OF_MEMORY],
    ids=lambda refusal: refusal.name,
)
def test_fake_tensors_are_refused_in_the_same_words(refusal: Refusal) -> None:
    bad = refusal.change(arguments(CPU, refusal.format))
    with FakeTensorMode() as mode:
        fake = Arguments(*tree_map_only(Tensor, mode.from_tensor, list(vars(bad).values())))
        assert_refused(refusal.error, f"{OP}: {refusal.sentence}", lambda: fake.call(CPU))


@pytest.mark.parametrize(
    "change, words",
    (
        ({"num_heads": 0}, "num_heads must be from 1 to 128, got 0"),
        ({"num_heads": 129}, "num_heads must be from 1 to 128, got 129"),
        ({"head_dim": 96}, "head_dim must be 32, 64 or 128, got 96"),
        ({"head_dim": 16}, "head_dim must be 32, 64 or 128, got 16"),
        ({"head_dim": 256}, "head_dim must be 32, 64 or 128, got 256"),
    ),
)
def test_shapes_beyond_the_contract(backend: Backend, change: dict[str, int], words: str) -> None:
    sizes = {"num_heads": 24, "head_dim": 64, **change}
    assert dk.supported(OP, arch=backend.supported_arch, **sizes) == f"{OP}: {words}"
    a = arguments(backend)
    values = torch.zeros(17, sizes["num_heads"], sizes["head_dim"], dtype=torch.uint8, device=backend.device)
    a.q = (values.view(torch.float8_e4m3fn), None)
    a.kv = (torch.zeros(260, sizes["head_dim"], dtype=torch.uint8, device=backend.device).view(values.dtype), a.kv[1])
    a.kv = (a.kv[0].view(torch.float8_e4m3fn), a.kv[1])
    a.weights = torch.zeros(17, sizes["num_heads"], device=backend.device)
    assert_refused(dk.UnsupportedError, f"{OP}: {words}", lambda: a.call(backend))


@pytest.mark.parametrize("format", formats.FORMATS)
@pytest.mark.parametrize("head_dim", (32, 64, 128))
@pytest.mark.parametrize("num_heads", (1, 64, 128))
def test_supported_and_the_call_agree(backend: Backend, format: str, head_dim: int, num_heads: int) -> None:
    inputs = make_inputs(Case(format=format, head_dim=head_dim, num_heads=num_heads), backend.device)
    if not is_refused(backend, inputs):
        call(backend, inputs)
    elif backend.device == "cpu":
        pytest.fail("the CPU has every format")


def test_supported_reads_its_case() -> None:
    fields = {"format": "mxfp8", "num_heads": 3, "head_dim": 64, "weights_dtype": torch.float16}
    fields |= {"logits_dtype": "bfloat16", "clean_logits": False, "compressed": True, "metadata": True}
    assert dk.supported(OP, arch="cpu", **fields, reduction="folded") is None
    words = f"{OP}: logits_dtype must be float32 or bfloat16, got float16"
    assert dk.supported(OP, arch="cpu", logits_dtype=torch.float16) == words
    assert_refused(ValueError, f"{OP}: a case has no field named heads", lambda: dk.supported(OP, heads=4))
    assert_refused(
        ValueError, f"{OP}: format must be fp8, mxfp8 or mxfp4, got 'fp4'", lambda: dk.supported(OP, format="fp4")
    )
    assert_refused(
        ValueError, f"{OP}: num_heads must be an integer, got '4.0'", lambda: dk.supported(OP, num_heads=4.0)
    )
    assert_refused(
        ValueError, f"{OP}: format must be fp8, mxfp8 or mxfp4, got 'None'", lambda: dk.supported(OP, format=None)
    )


@pytest.mark.parametrize("name", ("weights", "q scale", "kv scale"))
def test_grad_is_refused_in_grad_mode_alone(backend: Backend, name: str) -> None:
    a = arguments(backend)
    wanted = a.call(backend)
    if name == "weights":
        a.weights.requires_grad_()
    elif name == "kv scale":
        a.kv[1].requires_grad_()
    else:  # an MX scale is int32 and cannot; an e8m0 one can
        scale = torch.full((17, 24, 2), 127, dtype=torch.uint8, device=backend.device).view(torch.float8_e8m0fnu)
        if is_refused(backend, make_inputs(Case(format="mxfp8"), backend.device)):
            return
        a = arguments(backend, "mxfp8")
        wanted = replace(a, q=(a.q[0], scale)).call(backend)
        a.q = (a.q[0], scale.clone().requires_grad_())
    assert_refused(ValueError, f"{OP}: {name} {FORWARD_ONLY}", lambda: a.call(backend))
    with torch.no_grad():
        logits = a.call(backend)
    assert not logits.requires_grad and torch.equal(logits, wanted)
    with torch.inference_mode():
        assert torch.equal(a.call(backend), wanted)


def test_devices_may_not_mix(backend: Backend) -> None:
    """A tensor elsewhere is named; `meta` stands for a device that no kernel serves."""
    names = {"weights": "weights", "cu_seq_len_k_start": "cu_seq_len_k_start", "cu_seq_len_k_end": "cu_seq_len_k_end"}
    elsewhere = "cpu" if backend.device == "cuda" else "cuda"
    if elsewhere == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU to mix with the CPU")
    here = str(torch.empty(0, device=backend.device).device)
    there = str(torch.empty(0, device=elsewhere).device)
    for name, argument_name in names.items():
        a = arguments(backend)
        moved = replace(a, **{argument_name: getattr(a, argument_name).to(elsewhere)})
        assert_refused(
            ValueError, f"{OP}: {name} must be on {here} like q, got {there}", lambda moved=moved: moved.call(backend)
        )
    a = arguments(backend)
    a.kv = (a.kv[0].view(torch.uint8).to(elsewhere).view(torch.float8_e4m3fn), a.kv[1])
    assert_refused(ValueError, f"{OP}: kv must be on {here} like q, got {there}", lambda: a.call(backend))
    a = arguments(backend, out=torch.empty(17, 260, device=elsewhere))
    assert_refused(ValueError, f"{OP}: out must be on {here} like q, got {there}", lambda: a.call(backend))


@pytest.mark.parametrize(
    "values, error, sentence",
    (
        ({"start": torch.zeros(3)}, ValueError, "cu_seq_len_k_start must be int32 [num_q], got float32 [3]"),
        (
            {"start": torch.zeros(3, 1, dtype=torch.int32)},
            ValueError,
            "cu_seq_len_k_start must be int32 [num_q], got int32 [3, 1]",
        ),
        (
            {"end": torch.zeros(4, dtype=torch.int32)},
            ValueError,
            "cu_seq_len_k_end must be int32 [num_q=3], got int32 [4]",
        ),
        (
            {"end": torch.zeros(3, dtype=torch.int64)},
            ValueError,
            "cu_seq_len_k_end must be int32 [num_q=3], got int64 [3]",
        ),
        ({"num_kv": -1}, ValueError, "num_kv_tokens must be from 0 to 2147482623, got -1"),
        ({"num_kv": 2**31}, ValueError, "num_kv_tokens must be from 0 to 2147482623, got 2147483648"),
        ({"num_heads": 0}, ValueError, "num_heads must be from 1 to 128, got 0"),
        ({"num_heads": 129}, ValueError, "num_heads must be from 1 to 128, got 129"),
        ({"start": [0, 0, 0]}, TypeError, "cu_seq_len_k_start must be a torch.Tensor, got list"),
        ({"end": None}, TypeError, "cu_seq_len_k_end must be a torch.Tensor, got NoneType"),
        ({"num_kv": 1.0}, TypeError, "num_kv_tokens must be an int, got float"),
        ({"num_heads": "8"}, TypeError, "num_heads must be an int, got str"),
    ),
)
def test_metadata_refusals(backend: Backend, values: dict[str, Any], error: type[Exception], sentence: str) -> None:
    windows = torch.zeros(3, dtype=torch.int32)
    every = {"start": windows, "end": windows + 9, "num_kv": 9, "num_heads": 8, **values}
    placed = [value.to(backend.device) if isinstance(value, Tensor) else value for value in every.values()]
    assert_refused(error, f"{METADATA}: {sentence}", lambda: dk.get_mqa_logits_metadata(*placed, arch=backend.arch))
    with FakeTensorMode() as mode:
        fake = tree_map_only(Tensor, mode.from_tensor, placed)
        assert_refused(error, f"{METADATA}: {sentence}", lambda: dk.get_mqa_logits_metadata(*fake, arch=backend.arch))


@pytest.mark.parametrize("num_sms", (0, -1, 65536))
def test_the_registered_metadata_op_takes_its_num_sms(num_sms: int) -> None:
    windows = torch.zeros(3, dtype=torch.int32)
    assert torch.ops.deep_kernels.get_mqa_logits_metadata(windows, windows + 9, 9, 8, 5).shape == (12,)
    assert_refused(
        ValueError, f"{METADATA}: num_sms must be from 1 to 65535, got {num_sms}",
        lambda: torch.ops.deep_kernels.get_mqa_logits_metadata(windows, windows, 9, 8, num_sms),
    )  # fmt: skip
