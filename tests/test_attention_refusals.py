"""Flash attention: every refusal, word for word, eagerly and while tracing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_cases import OP, VARLEN, Case, make_inputs, pack, with_kernels
from conftest import BACKENDS, Backend
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

import deep_kernels as dk

pytest_plugins = ("runtime_fixtures",)

CPU = BACKENDS[0]
OPS = (OP, VARLEN)
FORWARD_ONLY = "requires grad, but the op is forward only: call it under torch.no_grad() or detach the input"

Arguments = dict[str, Any]
Change = Callable[[Arguments], Arguments]  # returns what becomes of some of the arguments


@pytest.fixture
def backend(backend: Backend) -> Backend:
    return with_kernels(backend)


def arguments(op: str, backend: Backend) -> Arguments:
    """2 members of 20 queries and 50 keys, 4 heads of which 2 share a kv head, head_dim 64."""
    case = Case(2, 20, 50)
    if op == OP:
        return {**vars(make_inputs(case, backend.device)), "arch": backend.arch}
    packed = pack(case, [(20, 50), (20, 50)], backend.device)
    lengths = {"cu_seqlens_q": packed.cu_q, "cu_seqlens_k": packed.cu_k, "max_seqlen_q": 20, "max_seqlen_k": 50}
    return {**vars(packed.inputs), **lengths, "arch": backend.arch}


def call(op: str, values: Arguments) -> Any:
    return getattr(dk, op)(**values)


@dataclass(frozen=True)
class Refusal:
    name: str
    op: str
    change: Change
    sentence: str
    error: type[Exception] = ValueError


def change(name: str, function: Callable[[Tensor], Any]) -> Change:
    return lambda a: {name: function(a[name])}


def given(**values: Any) -> Change:
    return lambda a: values


def sums(name: str, *values: int) -> Change:
    return lambda a: {name: torch.tensor(values, dtype=torch.int32, device=a["q"].device)}


def out(function: Callable[[Tensor], Any]) -> Change:
    """An `out` made of one that would fit."""
    return lambda a: {"out": function(torch.empty_like(a["q"]))}


def every_second(x: Tensor) -> Tensor:
    """The same shape with stride 2 in the last dimension."""
    return torch.zeros(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype, device=x.device)[..., ::2]


OF_BOTH = (
    ("q-a-list", given(q=[1.0]), "q must be a torch.Tensor, got list"),
    ("k-none", given(k=None), "k must be a torch.Tensor, got NoneType"),
    ("causal-none", given(causal=None), "causal must be a bool, got NoneType"),
    ("return-lse-int", given(return_lse=1), "return_lse must be a bool, got int"),
    ("scale-a-str", given(softmax_scale="1"), "softmax_scale must be a float or None, got str"),
    ("freq-a-float", given(ex2_emu_freq=4.0, ex2_emu_res=3), "ex2_emu_freq must be an int or None, got float"),
    ("res-a-bool", given(ex2_emu_freq=4, ex2_emu_res=True), "ex2_emu_res must be an int or None, got bool"),
    ("start-a-str", given(ex2_emu_freq=4, ex2_emu_res=3, ex2_emu_start_frg="0"),
     "ex2_emu_start_frg must be an int or None, got str"),
    ("splits-a-float", given(num_splits=2.0), "num_splits must be an int or None, got float"),
    ("arch-a-number", given(arch=90), "arch must be a str or None, got int"),
    ("q-grad", change("q", lambda x: x.clone().requires_grad_()), f"q {FORWARD_ONLY}"),
    ("k-grad", change("k", lambda x: x.clone().requires_grad_()), f"k {FORWARD_ONLY}"),
    ("v-grad", change("v", lambda x: x.clone().requires_grad_()), f"v {FORWARD_ONLY}"),
    ("scale-zero", given(softmax_scale=0.0), "softmax_scale must be a finite float32 greater than 0, got 0"),
    ("scale-negative", given(softmax_scale=-0.5), "softmax_scale must be a finite float32 greater than 0, got -0.5"),
    ("scale-nan", given(softmax_scale=float("nan")), "softmax_scale must be a finite float32 greater than 0, got nan"),
    ("scale-inf", given(softmax_scale=float("inf")), "softmax_scale must be a finite float32 greater than 0, got inf"),
    ("scale-large", given(softmax_scale=1e39), "softmax_scale must be a finite float32 greater than 0, got 1e+39"),
    ("scale-small", given(softmax_scale=1e-60), "softmax_scale must be a finite float32 greater than 0, got 1e-60"),
    ("freq-alone", given(ex2_emu_freq=4), "ex2_emu_res must be given with ex2_emu_freq=4, got None"),
    ("res-alone", given(ex2_emu_res=3), "ex2_emu_freq must be given with ex2_emu_res=3, got None"),
    ("start-alone", given(ex2_emu_start_frg=1), "ex2_emu_freq must be given with ex2_emu_start_frg=1, got None"),
    ("freq-negative", given(ex2_emu_freq=-1, ex2_emu_res=0), "ex2_emu_freq must be at least 0, got -1"),
    ("res-negative", given(ex2_emu_freq=4, ex2_emu_res=-3), "ex2_emu_res must be at least 0, got -3"),
    ("start-negative", given(ex2_emu_freq=4, ex2_emu_res=3, ex2_emu_start_frg=-1),
     "ex2_emu_start_frg must be at least 0, got -1"),
    ("res-above-freq", given(ex2_emu_freq=4, ex2_emu_res=5), "ex2_emu_res must be from 0 to ex2_emu_freq=4, got 5"),
    ("splits-zero", given(num_splits=0), "num_splits must be from 1 to 128 or None, got 0"),
    ("splits-many", given(num_splits=129), "num_splits must be from 1 to 128 or None, got 129"),
    ("q-last-stride", change("q", every_second), None),
    ("v-last-stride", change("v", every_second), None),
    ("out-last-stride", out(every_second), None),
    ("out-a-pair", out(lambda x: (x, x)), "out must be a torch.Tensor or None, got tuple"),
    ("out-grad", out(lambda x: x.requires_grad_()), f"out {FORWARD_ONLY}"),
    ("out-over-q", lambda a: {"out": a["q"]},
     "out must not share memory with another argument, got one that overlaps q"),
    ("out-over-v", lambda a: {"out": a["v"].flatten()[: a["q"].numel()].view(a["q"].shape)},
     "out must not share memory with another argument, got one that overlaps v"),
)  # fmt: skip

SHAPE = "[batch, num_q, num_q_heads, head_dim]"
OF_DENSE = (
    ("q-dtype", change("q", lambda x: x.float()), f"q must be bfloat16 or float16 {SHAPE}, got float32 [2, 20, 4, 64]"),
    ("q-rank", change("q", lambda x: x[0]), f"q must be bfloat16 or float16 {SHAPE}, got bfloat16 [20, 4, 64]"),
    ("k-dtype", change("k", lambda x: x.half()),
     "k must be bfloat16 [batch=2, num_kv, num_kv_heads, head_dim=64], got float16 [2, 50, 2, 64]"),
    ("k-batch", change("k", lambda x: x[:1]),
     "k must be bfloat16 [batch=2, num_kv, num_kv_heads, head_dim=64], got bfloat16 [1, 50, 2, 64]"),
    ("v-tokens", change("v", lambda x: x[:, 1:]),
     "v must be bfloat16 [batch=2, num_kv=50, num_kv_heads=2, head_dim=64], got bfloat16 [2, 49, 2, 64]"),
    ("v-heads", change("v", lambda x: x[:, :, :1]),
     "v must be bfloat16 [batch=2, num_kv=50, num_kv_heads=2, head_dim=64], got bfloat16 [2, 50, 1, 64]"),
    ("head-dim", lambda a: {n: a[n][..., :32] for n in "qkv"}, "head_dim of q must be 64, 128 or 256, got 32"),
    ("heads", change("q", lambda x: x[:, :, :3]),
     "num_q_heads of q [.., tokens, heads, head_dim] must be a positive multiple of num_kv_heads=2, got 3"),
    ("no-q-heads", change("q", lambda x: x[:, :, :0]),
     "num_q_heads of q [.., tokens, heads, head_dim] must be a positive multiple of num_kv_heads=2, got 0"),
    ("no-kv-heads", lambda a: {n: a[n][:, :, :0] for n in "kv"}, "num_kv_heads of k must be at least 1, got 0"),
    ("out-dtype", out(lambda x: x.float()),
     "out must be bfloat16 [batch=2, num_q=20, num_q_heads=4, head_dim=64], got float32 [2, 20, 4, 64]"),
    ("out-shape", out(lambda x: x[:, 1:]),
     "out must be bfloat16 [batch=2, num_q=20, num_q_heads=4, head_dim=64], got bfloat16 [2, 19, 4, 64]"),
    ("out-expanded", out(lambda x: x[:, :1].expand(2, 20, 4, 64)),
     "out must have elements that do not overlap, got strides [5120, 0, 64, 1]"),
)  # fmt: skip

PACKED = "[total_q, num_q_heads, head_dim]"
OF_VARLEN = (
    ("q-dtype", change("q", lambda x: x.float()), f"q must be bfloat16 or float16 {PACKED}, got float32 [40, 4, 64]"),
    ("q-rank", change("q", lambda x: x[None]), f"q must be bfloat16 or float16 {PACKED}, got bfloat16 [1, 40, 4, 64]"),
    ("k-head-dim", change("k", lambda x: x[..., :32]),
     "k must be bfloat16 [total_k, num_kv_heads, head_dim=64], got bfloat16 [100, 2, 32]"),
    ("v-tokens", change("v", lambda x: x[1:]),
     "v must be bfloat16 [total_k=100, num_kv_heads=2, head_dim=64], got bfloat16 [99, 2, 64]"),
    ("cu-dtype", change("cu_seqlens_q", lambda x: x.long()), "cu_seqlens_q must be int32 [batch + 1], got int64 [3]"),
    ("cu-rank", change("cu_seqlens_q", lambda x: x[None]), "cu_seqlens_q must be int32 [batch + 1], got int32 [1, 3]"),
    ("cu-none", change("cu_seqlens_q", lambda x: x[:0]), "cu_seqlens_q must have at least one element, got none"),
    ("cu-lengths", change("cu_seqlens_k", lambda x: x[:2]), "cu_seqlens_k must be int32 [batch + 1=3], got int32 [2]"),
    ("cu-stride", change("cu_seqlens_k", lambda x: x.repeat_interleave(2)[::2]),
     "cu_seqlens_k must have stride 1 in its last dimension, got strides [2]"),
    ("max-q-negative", given(max_seqlen_q=-1), "max_seqlen_q must be from 0 to 2147482623, got -1"),
    ("max-k-large", given(max_seqlen_k=2**31), "max_seqlen_k must be from 0 to 2147482623, got 2147483648"),
    ("max-q-a-float", given(max_seqlen_q=20.0), "max_seqlen_q must be an int, got float"),
    ("out-shape", out(lambda x: x[1:]),
     "out must be bfloat16 [total_q=40, num_q_heads=4, head_dim=64], got bfloat16 [39, 4, 64]"),
)  # fmt: skip

# What only a look at the content tells.
OF_SUMS = (
    ("first", sums("cu_seqlens_q", 1, 20, 40), "cu_seqlens_q must begin with 0, got 1"),
    ("decrease", sums("cu_seqlens_k", 0, 60, 50), "cu_seqlens_k must not decrease, got 50 behind 60 at index 2"),
    ("negative", sums("cu_seqlens_q", 0, -1, 40), "cu_seqlens_q must not decrease, got -1 behind 0 at index 1"),
    ("beyond", sums("cu_seqlens_k", 0, 50, 101),
     "cu_seqlens_k must end with at most the 100 tokens that are there, got 101"),
)  # fmt: skip

STRIDES = {
    (OP, "q-last-stride"): "q must have stride 1 in its last dimension, got strides [10240, 512, 128, 2]",
    (OP, "v-last-stride"): "v must have stride 1 in its last dimension, got strides [12800, 256, 128, 2]",
    (OP, "out-last-stride"): "out must have stride 1 in its last dimension, got strides [10240, 512, 128, 2]",
    (VARLEN, "q-last-stride"): "q must have stride 1 in its last dimension, got strides [512, 128, 2]",
    (VARLEN, "v-last-stride"): "v must have stride 1 in its last dimension, got strides [256, 128, 2]",
    (VARLEN, "out-last-stride"): "out must have stride 1 in its last dimension, got strides [512, 128, 2]",
}


def error_of(sentence: str) -> type[Exception]:
    """Python types are a TypeError."""
    words = ("a torch.Tensor", "a bool", "a float or None", "an int", "a str or None")
    return TypeError if any(f"must be {word}" in sentence for word in words) else ValueError


def refusal(name: str, op: str, make: Change, sentence: str | None) -> Refusal:
    words = sentence or STRIDES[op, name]
    return Refusal(name, op, make, words, error_of(words))


REFUSALS = (
    *(refusal(name, op, make, words) for op in OPS for name, make, words in OF_BOTH),
    *(refusal(name, OP, make, words) for name, make, words in OF_DENSE),
    *(refusal(name, VARLEN, make, words) for name, make, words in OF_VARLEN),
)


def assert_refused(error: type[Exception], sentence: str, function: Callable[[], Any]) -> None:
    with pytest.raises(error) as caught:
        function()
    assert str(caught.value) == sentence
    assert type(caught.value) is error


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: f"{refusal.op}-{refusal.name}")
def test_refusals(backend: Backend, refusal: Refusal) -> None:
    good = arguments(refusal.op, backend)
    bad = {**good, **refusal.change(good)}
    assert_refused(refusal.error, f"{refusal.op}: {refusal.sentence}", lambda: call(refusal.op, bad))


@pytest.mark.parametrize("name, make, sentence", OF_SUMS, ids=[name for name, _, _ in OF_SUMS])
def test_contents_of_cu_seqlens(backend: Backend, name: str, make: Change, sentence: str) -> None:
    """Refused where looking costs nothing; on a card cut to what is there."""
    good = arguments(VARLEN, backend)
    bad = {**good, **make(good)}
    if backend.device == "cpu":
        assert_refused(ValueError, f"{VARLEN}: {sentence}", lambda: call(VARLEN, bad))
    else:
        call(VARLEN, bad)
        torch.cuda.synchronize()


OF_MEMORY = {"out-over-q", "out-over-v"}  # which fake tensors have none of


@pytest.mark.parametrize(
    "refusal",
    [one for one in REFUSALS if one.error is ValueError and one.name not in OF_MEMORY],
    ids=lambda refusal: f"{refusal.op}-{refusal.name}",
)
def test_fake_tensors_are_refused_in_the_same_words(refusal: Refusal) -> None:
    good = arguments(refusal.op, CPU)
    bad = {**good, **refusal.change(good)}
    with FakeTensorMode() as mode:
        fake = tree_map_only(Tensor, mode.from_tensor, bad)
        assert_refused(refusal.error, f"{refusal.op}: {refusal.sentence}", lambda: call(refusal.op, fake))


@pytest.mark.parametrize("op", OPS)
def test_what_is_not_refused(backend: Backend, op: str) -> None:
    """The arguments that the refusals change."""
    call(op, arguments(op, backend))


@pytest.mark.parametrize("op, name", ((OP, "k"), (OP, "v"), (VARLEN, "cu_seqlens_q"), (VARLEN, "cu_seqlens_k")))
def test_devices_may_not_mix(backend: Backend, op: str, name: str) -> None:
    values = arguments(op, backend)
    here = str(values["q"].device)
    values[name] = values[name].to("meta")
    assert_refused(ValueError, f"{op}: {name} must be on {here} like q, got meta", lambda: call(op, values))


@pytest.mark.parametrize("op", OPS)
def test_grad_is_refused_in_grad_mode_alone(backend: Backend, op: str) -> None:
    values = arguments(op, backend)
    wanted = call(op, values)
    values["k"] = values["k"].clone().requires_grad_()
    assert_refused(ValueError, f"{op}: k {FORWARD_ONLY}", lambda: call(op, values))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(call(op, values), wanted)


@pytest.mark.parametrize(
    "words, sentence",
    (
        ({"fragment": 0}, "fragment must be an even number from 2 to 1048576, got 0"),
        ({"fragment": 31}, "fragment must be an even number from 2 to 1048576, got 31"),
        ({"fragment": 2**40}, f"fragment must be an even number from 2 to 1048576, got {2**40}"),
        ({"num_fragments": 0}, "num_fragments must be from 1 to 1048576, got 0"),
        ({"freq": -4}, "freq must be at least 0, got -4"),
        ({"res": 5}, "res must be from 0 to freq=4, got 5"),
        ({"start_frg": -1}, "start_frg must be at least 0, got -1"),
        ({"freq": 4.0}, "freq must be an int, got float"),
        ({"start_frg": None}, "start_frg must be an int, got NoneType"),
    ),
    ids=str,
)
def test_refusals_of_the_share(words: Arguments, sentence: str) -> None:
    values = {"freq": 4, "res": 3, "fragment": 32, "num_fragments": 4, **words}
    error = error_of(sentence) if "an int," in sentence else ValueError
    assert_refused(error, f"ex2_emulated_share: {sentence}", lambda: dk.ex2_emulated_share(**values))


# ------------------------------------------------------------------------------------------ supported and prepare


@pytest.mark.parametrize("op", OPS)
def test_supported_reads_its_case(op: str) -> None:
    fields = {"dtype": torch.float16, "head_dim": 256, "causal": True, "num_q_heads": 12, "num_kv_heads": 3}
    fields |= {"ex2_emu_freq": 14, "ex2_emu_res": 6, "ex2_emu_start_frg": None, "num_splits": None, "return_lse": True}
    assert dk.supported(op, arch="cpu") is None
    assert dk.supported(op, arch="cpu", num_kv=100_000, **fields) is None
    assert dk.prepare([{"op": op, **fields}], arch="cpu") == []
    for arch in ("sm89", "sm90", "sm100"):
        assert dk.supported(op, arch=arch) in (None, f"{op}: there are no {arch} kernels for it yet")
    for wrong, words in (
        ({"dtype": torch.float32}, "dtype must be bfloat16 or float16, got float32"),
        ({"head_dim": 96}, "head_dim must be 64, 128 or 256, got 96"),
        ({"num_q_heads": 5, "num_kv_heads": 2}, "num_q_heads must be a positive multiple of num_kv_heads=2, got 5"),
        ({"num_kv_heads": 0}, "num_kv_heads must be at least 1, got 0"),
        ({"num_q": -1}, "num_q must be at least 0, got -1"),
        ({"num_kv": -7}, "num_kv must be at least 0, got -7"),
    ):
        assert dk.supported(op, arch="cpu", **wrong) == f"{op}: {words}"
    for wrong, words in (
        ({"heads": 4}, "a case has no field named heads"),
        ({"ex2_emu_freq": 4}, "ex2_emu_res must be given with ex2_emu_freq=4, got None"),
        ({"ex2_emu_freq": "all", "ex2_emu_res": 1}, "ex2_emu_freq must be an integer, got 'all'"),
        ({"num_splits": 0}, "num_splits must be from 1 to 128 or None, got 0"),
    ):
        assert_refused(ValueError, f"{op}: {words}", lambda wrong=wrong: dk.supported(op, arch="cpu", **wrong))


def test_the_table_says_why() -> None:
    rows = [row for row in dk._C.tuning_rows() if row["op"] == OP]
    assert {row["backend"] for row in rows} >= {"cpu", "sm89", "sm90"}
    assert all(row["reason"] for row in rows)


def test_kernels_of_all_numbers_of_queries_are_prepared(no_settings: Path, nvrtc: tuple[str, str]) -> None:
    """Where a case does not say how many: with them a model runs its prefill and its decode without a compiler."""
    case = {"op": "flash_attn_fwd", "head_dim": 64, "num_q_heads": 3, "num_kv_heads": 1, "num_splits": 1}
    prepared = {report["entry"] for report in dk.prepare([case], arch="sm_90a")}
    reports = [dk.prepare([case | {"num_q": num_q}], arch="sm_90a") for num_q in (1, 16, 64, 100, 128, 4096)]
    assert all(report["origin"] == "cache" for (report,) in reports)
    wanted = {report["entry"] for (report,) in reports}
    assert wanted <= prepared and len(wanted) > 2
