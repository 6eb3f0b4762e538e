"""fp8_fp4_paged_mqa_logits and its metadata: every refusal, word for word."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from conftest import BACKENDS, Backend
from paged_mqa_cases import METADATA, OP, Case, call, is_refused, make_inputs, with_page_stride
from test_mqa_logits_refusals import FORWARD_ONLY, assert_refused, at_byte_8, every_second, needing_grad
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

import deep_kernels as dk
from deep_kernels import formats

CPU = BACKENDS[0]


@dataclass
class Arguments:
    """The arguments of the public function as keywords; 3 requests of 2 query tokens, 24 heads of 64, 7 pages."""

    q: Any
    kv_cache: Any
    weights: Any
    context_lens: Any
    block_table: Any
    schedule_meta: Any = None
    max_context_len: Any = 120
    indices: Any = None
    others: dict[str, Any] = field(default_factory=dict)

    def call(self, backend: Backend) -> Tensor:
        keywords = {name: value for name, value in vars(self).items() if name != "others"}
        return dk.fp8_fp4_paged_mqa_logits(**{**keywords, "arch": backend.arch, **self.others})


def arguments(backend: Backend, format: str = "fp8", **fields: Any) -> Arguments:
    x = make_inputs(Case(format=format, **{"next_n": 2, "max_len": 100, **fields}), backend.device)
    return Arguments((x.q, x.q_scale), x.kv_cache, x.weights, x.context_lens, x.block_table, indices=x.indices)


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


def argument(name: str, change: Callable[[Any], Any]) -> Change:
    return lambda a: replace(a, **{name: change(getattr(a, name))})


def cache(change: Callable[[Tensor], Any]) -> Change:
    return argument("kv_cache", change)


def schedule(make: Callable[[Tensor], Any]) -> Change:
    """From int32 zeros [10, 2] on the device."""
    return lambda a: replace(
        a, schedule_meta=make(torch.zeros(10, 2, dtype=torch.int32, device=a.weights.device))
    )  # fmt: skip


def indices(make: Callable[[Tensor], Any]) -> Change:
    return lambda a: replace(a, indices=make(torch.zeros(3, dtype=torch.int32, device=a.weights.device)))


def other(**others: Any) -> Change:
    return lambda a: replace(a, others={**a.others, **others})


def out(make: Callable[[Arguments], Any]) -> Change:
    return lambda a: replace(a, others={**a.others, "out": make(a)})


def empty_out(a: Arguments, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=a.weights.device)


def out_over_cache(a: Arguments) -> Tensor:
    """An `out` that starts within the memory of the cache, which is put there."""
    storage = torch.zeros(1 << 17, dtype=torch.uint8, device=a.weights.device)
    num_bytes = a.kv_cache.numel()
    a.kv_cache = storage[:num_bytes].view(a.kv_cache.shape)
    return storage[num_bytes - 4 * 17 :].view(torch.float32)[: 6 * 120].view(6, 120)


def out_over_table(a: Arguments) -> Tensor:
    storage = torch.zeros(6 * 120 + 20, dtype=torch.int32, device=a.weights.device)
    a.block_table = storage[6 * 120 - 1 :][:21].view(3, 7)
    return storage[: 6 * 120].view(torch.float32).view(6, 120)


def head_stride_8(x: Tensor) -> Tensor:
    """[3, 2, 24, 64] with 72 bytes from head to head."""
    storage = torch.zeros(3 * 2 * 24 * 72, dtype=torch.uint8, device=x.device).view(x.dtype)
    return storage.as_strided((3, 2, 24, 64), (2 * 24 * 72, 24 * 72, 72, 1))


def gaps_in_pages(x: Tensor) -> Tensor:
    """As wide as before, with 16 bytes between the tokens of a page."""
    storage = torch.zeros(*x.shape[:3], x.shape[3] + 16, dtype=torch.uint8, device=x.device)
    return storage[..., : x.shape[3]]


Q_EXPECTED = "float8_e4m3fn [batch, next_n, num_heads, head_dim]"
Q_EITHER = f"{Q_EXPECTED} or int8, uint8 or float4_e2m1fn_x2 [batch, next_n, num_heads, head_dim / 2]"
CACHE_EXPECTED = "kv_cache must be uint8 [num_blocks, block_kv, 1, head_dim + 4=68]"
SCHEDULE_EXPECTED = "schedule_meta must be int32 [num_sms + 1, 2] of get_paged_mqa_logits_metadata"

REFUSALS = (
    # q
    Refusal("q-float32", q(lambda x: x.float()), f"q must be {Q_EITHER}, got float32 [3, 2, 24, 64]"),
    Refusal("q-rank", q(lambda x: x[0]), f"q must be {Q_EXPECTED}, got float8_e4m3fn [2, 24, 64]"),
    Refusal("q-no-token", q(lambda x: x[:, :0]), "q must have next_n of 1 or more, got float8_e4m3fn [3, 0, 24, 64]"),
    Refusal("q-pairs-without-scale", q(lambda x: x.view(torch.int8)),
            "q scale must be given with int8 values (MXFP4), got None"),
    Refusal("q-last-stride", q(every_second),
            "q must have stride 1 in its last dimension, got strides [6144, 3072, 128, 2]"),
    Refusal("q-head-stride", q(head_stride_8),
            "q must have strides that are positive multiples of 16 bytes, got 72 bytes in dimension 2"),
    Refusal("q-expanded", q(lambda x: x[:1].expand(3, 2, 24, 64)),
            "q must have strides that are positive multiples of 16 bytes, got 0 bytes in dimension 0"),
    Refusal("q-address", q(at_byte_8), "q must start at a multiple of 16 bytes, got an address 8 bytes past one"),
    # q scale
    Refusal("q-scale-dtype", q_scale(lambda x: x.float()),
            "q scale must be int32 [batch=3, next_n=2, num_heads=24], got float32 [3, 2, 24]",
            format="mxfp8"),
    Refusal("q-scale-shape", q_scale(lambda x: x[:, :, :23]),
            "q scale must be int32 [batch=3, next_n=2, num_heads=24], got int32 [3, 2, 23]",
            format="mxfp4"),
    Refusal("q-scale-e8m0-shape",
            q_scale(lambda x: x.view(torch.uint8).view(3, 2, 24, 4).view(torch.float8_e8m0fnu)),
            "q scale must be float8_e8m0fnu [batch=3, next_n=2, num_heads=24, head_dim / 32=2], "
            "got float8_e8m0fnu [3, 2, 24, 4]", format="mxfp8"),
    # the cache
    Refusal("cache-dtype", cache(lambda x: x.view(torch.int8)), f"{CACHE_EXPECTED}, got int8 [9, 64, 1, 68]"),
    Refusal("cache-rank", cache(lambda x: x.squeeze(2)), f"{CACHE_EXPECTED}, got uint8 [9, 64, 68]"),
    Refusal("cache-heads", cache(lambda x: x.expand(9, 64, 2, 68)), f"{CACHE_EXPECTED}, got uint8 [9, 64, 2, 68]"),
    Refusal("cache-width", cache(lambda x: x[..., :64]), f"{CACHE_EXPECTED}, got uint8 [9, 64, 1, 64]"),
    Refusal("cache-width-of-pairs", cache(lambda x: torch.zeros(9, 64, 1, 68, dtype=torch.uint8, device=x.device)),
            "kv_cache must be uint8 [num_blocks, block_kv, 1, head_dim / 2 + 4=36], got uint8 [9, 64, 1, 68]",
            format="mxfp4"),
    Refusal("cache-gaps", cache(gaps_in_pages),
            "kv_cache must be contiguous from dimension 1 on, got strides [5376, 84, 84, 1]"),
    Refusal("cache-turned", cache(lambda x: x.transpose(1, 3).contiguous().transpose(1, 3)),
            "kv_cache must be contiguous from dimension 1 on, got strides [4352, 1, 64, 64]"),
    Refusal("cache-page-stride", cache(lambda x: with_page_stride(x, 8)),
            "kv_cache must have strides that are positive multiples of 16 bytes, got 4360 bytes in dimension 0"),
    Refusal("cache-expanded", cache(lambda x: x[:1].expand(9, 64, 1, 68)),
            "kv_cache must have strides that are positive multiples of 16 bytes, got 0 bytes in dimension 0"),
    Refusal("cache-address", cache(lambda x: with_page_stride(x, 16, 8)),
            "kv_cache must start at a multiple of 16 bytes, got an address 8 bytes past one"),
    # weights
    Refusal("weights-dtype", argument("weights", lambda x: x.double()),
            "weights must be float32 or bfloat16 or float16 [num_q=6, num_heads=24], got float64 [6, 24]"),
    Refusal("weights-rows", argument("weights", lambda x: x[:3]),
            "weights must be float32 or bfloat16 or float16 [num_q=6, num_heads=24], got float32 [3, 24]"),
    Refusal("weights-stride", argument("weights", every_second),
            "weights must have stride 1 in its last dimension, got strides [48, 2]"),
    Refusal("weights-grad", argument("weights", needing_grad), f"weights {FORWARD_ONLY}"),
    # lengths, table, indices
    Refusal("lens-dtype", argument("context_lens", lambda x: x.long()),
            "context_lens must be int32 [batch=3], got int64 [3]"),
    Refusal("lens-shape", argument("context_lens", lambda x: x[:2]),
            "context_lens must be int32 [batch=3], got int32 [2]"),
    Refusal("lens-of-rows", argument("context_lens", lambda x: x[:, None].expand(3, 3)),
            "context_lens must be int32 [batch=3, next_n=2], got int32 [3, 3]"),
    Refusal("lens-rank", argument("context_lens", lambda x: x[:, None, None]),
            "context_lens must be int32 [batch] or [batch, next_n], got int32 [3, 1, 1]"),
    Refusal("table-dtype", argument("block_table", lambda x: x.long()),
            "block_table must be int32 [batch=3, max_blocks], got int64 [3, 7]"),
    Refusal("table-rows", argument("block_table", lambda x: x[:2]),
            "block_table must be int32 [batch=3, max_blocks], got int32 [2, 7]"),
    Refusal("table-stride", argument("block_table", every_second),
            "block_table must have stride 1 in its last dimension, got strides [14, 2]"),
    Refusal("indices-dtype", indices(lambda x: x.long()), "indices must be int32 [batch=3], got int64 [3]"),
    Refusal("indices-shape", indices(lambda x: x[:2]), "indices must be int32 [batch=3], got int32 [2]"),
    Refusal("indices-next_n", indices(lambda x: x),
            "q must have next_n of 1 with indices, got float8_e4m3fn [3, 2, 24, 64]"),
    # options
    Refusal("width-negative", argument("max_context_len", lambda x: -1),
            "max_context_len must be from 0 to 2147482623, got -1"),
    Refusal("width-too-large", argument("max_context_len", lambda x: 2**31),
            "max_context_len must be from 0 to 2147482623, got 2147483648"),
    Refusal("logits-dtype", other(logits_dtype=torch.float16),
            "logits_dtype must be float32 or bfloat16, got float16"),
    Refusal("schedule-dtype", schedule(lambda x: x.float()),
            "schedule_meta must be int32 [num_sms + 1, 2], got float32 [10, 2]"),
    Refusal("schedule-rank", schedule(lambda x: x.view(-1)),
            "schedule_meta must be int32 [num_sms + 1, 2], got int32 [20]"),
    Refusal("schedule-short", schedule(lambda x: x[:1]), f"{SCHEDULE_EXPECTED}, got int32 [1, 2]"),
    Refusal("schedule-none", schedule(lambda x: x[:0]), f"{SCHEDULE_EXPECTED}, got int32 [0, 2]"),
    Refusal("schedule-stride", schedule(lambda x: x[::2]),
            "schedule_meta must be contiguous, got strides [4, 1]"),
    # out
    Refusal("out-dtype", out(lambda a: empty_out(a, 6, 120, dtype=torch.bfloat16)),
            "out must be float32 [num_q=6, width=120], got bfloat16 [6, 120]"),
    Refusal("out-shape", out(lambda a: empty_out(a, 3, 2, 120)),
            "out must be float32 [num_q=6, width=120], got float32 [3, 2, 120]"),
    Refusal("out-last-stride", out(lambda a: empty_out(a, 120, 6).T),
            "out must have stride 1 in its last dimension, got strides [1, 6]"),
    Refusal("out-rows-overlap", out(lambda a: empty_out(a, 6 * 120).as_strided((6, 120), (100, 1))),
            "out must have rows that do not overlap, got row stride 100 for 120 columns"),
    Refusal("out-over-cache", out(out_over_cache),
            "out must not share memory with another argument, got one that overlaps kv_cache"),
    Refusal("out-over-table", out(out_over_table),
            "out must not share memory with another argument, got one that overlaps block_table"),
    Refusal("out-grad", out(lambda a: empty_out(a, 6, 120).requires_grad_()), f"out {FORWARD_ONLY}"),
    # Python types
    Refusal("q-a-tensor", lambda a: replace(a, q=a.q[0]), "q must be a pair (values, scale), got Tensor", TypeError),
    Refusal("cache-none", cache(lambda x: None), "kv_cache must be a torch.Tensor, got NoneType", TypeError),
    Refusal("lens-a-list", argument("context_lens", lambda x: x.tolist()),
            "context_lens must be a torch.Tensor, got list", TypeError),
    Refusal("table-none", argument("block_table", lambda x: None), "block_table must be a torch.Tensor, got NoneType",
            TypeError),
    Refusal("indices-a-list", indices(lambda x: [0, 1, 2]), "indices must be a torch.Tensor or None, got list",
            TypeError),
    Refusal("schedule-a-list", schedule(lambda x: [0]), "schedule_meta must be a torch.Tensor or None, got list",
            TypeError),
    Refusal("width-a-float", argument("max_context_len", lambda x: 8.0), "max_context_len must be an int, got float",
            TypeError),
    Refusal("clean-a-number", other(clean_logits=1), "clean_logits must be a bool, got int", TypeError),
    Refusal("out-a-list", other(out=[]), "out must be a torch.Tensor or None, got list", TypeError),
    Refusal("arch-an-int", other(arch=90), "arch must be a str or None, got int", TypeError),
)  # fmt: skip


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.name)
def test_refusals(backend: Backend, refusal: Refusal) -> None:
    good = arguments(backend, refusal.format)
    if is_refused(backend, make_inputs(Case(format=refusal.format), backend.device)):
        return
    good.call(backend)
    bad = refusal.change(good)
    assert_refused(refusal.error, f"{OP}: {refusal.sentence}", lambda: bad.call(backend))


# Of which fake tensors have none.
OF_MEMORY = {"q-address", "cache-address", "out-over-cache", "out-over-table"}


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
        ({"block_kv": 8}, "block_kv must be one of 16, 32, 64, 128, 256, got 8"),
        ({"block_kv": 48}, "block_kv must be one of 16, 32, 64, 128, 256, got 48"),
        ({"block_kv": 512}, "block_kv must be one of 16, 32, 64, 128, 256, got 512"),
    ),
)
def test_shapes_beyond_the_contract(backend: Backend, change: dict[str, int], words: str) -> None:
    sizes = {"num_heads": 24, "head_dim": 64, "block_kv": 64, **change}
    assert dk.supported(OP, arch=backend.supported_arch, **sizes) == f"{OP}: {words}"

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.uint8, device=backend.device)

    a = arguments(backend)
    a.q = (zeros(3, 2, sizes["num_heads"], sizes["head_dim"]).view(torch.float8_e4m3fn), None)
    a.kv_cache = zeros(9, sizes["block_kv"], 1, sizes["head_dim"] + 4)
    a.weights = torch.zeros(6, sizes["num_heads"], device=backend.device)
    assert_refused(dk.UnsupportedError, f"{OP}: {words}", lambda: a.call(backend))


@pytest.mark.parametrize("format", formats.FORMATS)
@pytest.mark.parametrize("head_dim", (32, 64, 128))
def test_supported_and_the_call_agree(backend: Backend, format: str, head_dim: int) -> None:
    for num_heads in (1, 64, 128):
        for next_n in (1, 2, 5):
            case = Case(format=format, head_dim=head_dim, num_heads=num_heads, next_n=next_n)
            inputs = make_inputs(case, backend.device)
            if not is_refused(backend, inputs):
                call(backend, inputs, 70)
            elif backend.device == "cpu":
                pytest.fail("the CPU has every format")


def test_supported_reads_its_case() -> None:
    fields = {"format": "mxfp8", "num_heads": 3, "head_dim": 64, "weights_dtype": torch.float16, "block_kv": 16}
    fields |= {"logits_dtype": "bfloat16", "clean_logits": False, "metadata": True, "max_context_len": 3}
    assert dk.supported(OP, arch="cpu", **fields, next_n=4) is None
    assert dk.supported(OP, arch="cpu", **fields, indices=True) is None
    words = f"{OP}: next_n must be 1 with indices, got 4"
    assert dk.supported(OP, arch="cpu", **fields, indices=True, next_n=4) == words
    assert dk.supported(OP, arch="cpu", next_n=0) == f"{OP}: next_n must be 1 or more, got 0"
    assert dk.supported(OP, arch="sm90", format="mxfp4", head_dim=32) == (
        f"{OP}: head_dim must be 64 or 128 with mxfp4, got 32"
    )
    words = f"{METADATA}: block_kv must be one of 16, 32, 64, 128, 256, got 17"
    assert dk.supported(METADATA, arch="sm90", block_kv=17) == words
    assert dk.supported(METADATA, arch="sm90", block_kv=16, indices=True) is None
    assert_refused(ValueError, f"{OP}: a case has no field named reduction", lambda: dk.supported(OP, reduction="x"))


@pytest.mark.parametrize("name", ("weights", "q scale"))
def test_grad_is_refused_in_grad_mode_alone(backend: Backend, name: str) -> None:
    a = arguments(backend, "fp8" if name == "weights" else "mxfp8")
    if is_refused(backend, make_inputs(Case(format="mxfp8"), backend.device)):
        return
    a.others["clean_logits"] = True
    if name == "weights":
        wanted = a.call(backend)
        a.weights.requires_grad_()
    else:  # an MX scale is int32 and cannot; an e8m0 one can
        scale = torch.full((3, 2, 24, 2), 127, dtype=torch.uint8, device=backend.device).view(torch.float8_e8m0fnu)
        wanted = replace(a, q=(a.q[0], scale)).call(backend)
        a.q = (a.q[0], scale.clone().requires_grad_())
    assert_refused(ValueError, f"{OP}: {name} {FORWARD_ONLY}", lambda: a.call(backend))
    with torch.no_grad():
        logits = a.call(backend)
    assert not logits.requires_grad and torch.equal(logits, wanted)
    with torch.inference_mode():
        assert torch.equal(a.call(backend), wanted)


def test_devices_may_not_mix(backend: Backend) -> None:
    elsewhere = "cpu" if backend.device == "cuda" else "cuda"
    if elsewhere == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU to mix with the CPU")
    here = str(torch.empty(0, device=backend.device).device)
    there = str(torch.empty(0, device=elsewhere).device)
    for name in ("kv_cache", "weights", "context_lens", "block_table"):
        a = arguments(backend)
        moved = replace(a, **{name: getattr(a, name).to(elsewhere)})
        sentence = f"{OP}: {name} must be on {here} like q, got {there}"
        assert_refused(ValueError, sentence, lambda moved=moved: moved.call(backend))


@pytest.mark.parametrize(
    "values, error, sentence",
    (
        ({"lens": torch.zeros(3)}, ValueError, "context_lens must be int32 [batch], got float32 [3]"),
        ({"lens": torch.zeros(3, 2, 1, dtype=torch.int32)}, ValueError,
         "context_lens must be int32 [batch] or [batch, next_n], got int32 [3, 2, 1]"),
        ({"lens": torch.zeros(3, 2, dtype=torch.int32), "indices": torch.zeros(3, dtype=torch.int32)}, ValueError,
         "context_lens must be int32 [batch, next_n=1], got int32 [3, 2]"),
        ({"indices": torch.zeros(2, dtype=torch.int32)}, ValueError,
         "indices must be int32 [batch=3], got int32 [2]"),
        ({"indices": torch.zeros(3)}, ValueError, "indices must be int32 [batch=3], got float32 [3]"),
        ({"block_kv": 48}, ValueError, "block_kv must be one of 16, 32, 64, 128, 256, got 48"),
        ({"num_sms": 0}, ValueError, "num_sms must be from 1 to 65535, got 0"),
        ({"num_sms": 65536}, ValueError, "num_sms must be from 1 to 65535, got 65536"),
        ({"lens": [1, 2]}, TypeError, "context_lens must be a torch.Tensor, got list"),
        ({"block_kv": 64.0}, TypeError, "block_kv must be an int, got float"),
        ({"num_sms": None}, TypeError, "num_sms must be an int, got NoneType"),
        ({"indices": 1}, TypeError, "indices must be a torch.Tensor or None, got int"),
    ),
)  # fmt: skip
def test_metadata_refusals(backend: Backend, values: dict[str, Any], error: type[Exception], sentence: str) -> None:
    every = {"lens": torch.ones(3, dtype=torch.int32), "block_kv": 64, "num_sms": 5, "indices": None, **values}
    placed = [value.to(backend.device) if isinstance(value, Tensor) else value for value in every.values()]
    assert_refused(
        error, f"{METADATA}: {sentence}", lambda: dk.get_paged_mqa_logits_metadata(*placed, arch=backend.arch)
    )
    with FakeTensorMode() as mode:
        fake = tree_map_only(Tensor, mode.from_tensor, placed)
        assert_refused(
            error, f"{METADATA}: {sentence}", lambda: dk.get_paged_mqa_logits_metadata(*fake, arch=backend.arch)
        )
