"""Flash attention: results against the formula, special values, emulated exponentials, what keeps its bits."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from re import search

import oracle
import pytest
import torch
from attention_cases import (
    DTYPES,
    EMULATED_ERROR,
    EMULATIONS,
    HEAD_DIMS,
    HEADS,
    LAYOUTS,
    LN2,
    SWEEP,
    Case,
    GuardedOut,
    Inputs,
    attend,
    attend_packed,
    check,
    check_jumps,
    check_negative,
    chosen_scores,
    emulated_keys,
    emulation,
    fragments,
    is_emulated,
    keys_by_rule,
    laid_out,
    make_inputs,
    pack,
    run_case,
    with_kernels,
)
from conftest import Backend
from mqa_cases import assert_same_bits, word
from storage import poisoned_memory
from torch import Tensor

import deep_kernels as dk

NAN, INF = math.nan, math.inf
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=word)
by_head_dim = pytest.mark.parametrize("head_dim", HEAD_DIMS)
by_causal = pytest.mark.parametrize("causal", (False, True), ids=("full", "causal"))
Result = tuple[Tensor, Tensor]


@pytest.fixture
def backend(backend: Backend) -> Backend:
    return with_kernels(backend)


def assert_same(found: Result, wanted: Result) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert_same_bits(one, other)


# ------------------------------------------------------------------------------------------ agreement


@pytest.mark.parametrize("case", SWEEP, ids=str)
def test_agrees_with_the_formula(backend: Backend, case: Case) -> None:
    inputs = make_inputs(case, backend.device)
    check(backend, case, inputs, run_case(backend, case, inputs))


@by_causal
@pytest.mark.parametrize("heads", HEADS, ids=lambda heads: "{}-{}".format(*heads))
@by_head_dim
@by_dtype
def test_every_kind(backend: Backend, dtype: torch.dtype, head_dim: int, heads: tuple[int, int], causal: bool) -> None:
    case = Case(1, 70, 141, heads, head_dim, dtype, causal, ex2=(4, 3))
    inputs = make_inputs(case, backend.device)
    check(backend, case, inputs, run_case(backend, case, inputs))


@pytest.mark.parametrize("num_q, num_kv", ((130, 1), (200, 70), (300, 129), (65, 64)))
def test_causal_with_more_queries_than_keys(backend: Backend, num_q: int, num_kv: int) -> None:
    """The first queries see nothing."""
    case = Case(2, num_q, num_kv, causal=True)
    inputs = make_inputs(case, backend.device)
    out, lse = run_case(backend, case, inputs)
    check(backend, case, inputs, (out, lse))
    blind = num_q - num_kv
    assert (out[:, :blind] == 0).all() and torch.isneginf(lse[..., :blind]).all()
    assert (out[:, blind:].abs().sum(-1) > 0).all()


@pytest.mark.parametrize("shape", ((0, 5, 7), (2, 0, 7), (2, 5, 0), (0, 0, 0)))
@by_causal
def test_nothing_to_do(backend: Backend, shape: tuple[int, int, int], causal: bool) -> None:
    case = Case(*shape, causal=causal)
    out, lse = run_case(backend, case, make_inputs(case, backend.device))
    batch, num_q, _ = shape
    assert out.shape == (batch, num_q, 4, 64) and lse.shape == (batch, 4, num_q)
    assert (out == 0).all() and torch.isneginf(lse).all()


@by_head_dim
@by_dtype
def test_ones_give_one(backend: Backend, dtype: torch.dtype, head_dim: int) -> None:
    for ex2 in EMULATIONS:
        for num_splits in (1, 2):
            case = Case(1, 130, 300, (2, 1), head_dim, dtype, True, ex2=ex2, num_splits=num_splits)
            inputs = make_inputs(case, backend.device)
            out, _ = run_case(backend, case, replace(inputs, v=torch.ones_like(inputs.v)))
            assert (out.double() - 1).abs().max() <= torch.finfo(dtype).eps


def test_only_out_is_returned_unless_asked_for_more(backend: Backend) -> None:
    inputs = make_inputs(Case(), backend.device)
    out, _ = attend(backend, inputs)
    assert_same_bits(dk.flash_attn_fwd(*inputs.tensors(), arch=backend.arch), out)


# ------------------------------------------------------------------------------------------ special values


def poisoned(inputs: Inputs, name: str, token: int, value: float) -> Inputs:
    tensors = inputs.clone()
    getattr(tensors, name)[:, token, :, 3] = value
    return tensors


@by_head_dim
@pytest.mark.parametrize("name", ("k", "v"))
def test_what_no_query_sees_changes_nothing(backend: Backend, name: str, head_dim: int) -> None:
    """Neither the keys of other members, nor those behind the last one."""
    case = Case(head_dim=head_dim, causal=True, ex2=(1, 1))
    packed = pack(case, [(70, 50), (3, 90)], backend.device, behind=60)
    out, lse = attend_packed(backend, packed, **case.options)
    for value in (NAN, INF, -INF):
        for first, num_rows in ((140, 73), (50, 70)):  # behind all; the second member too
            inputs = packed.inputs.clone()
            getattr(inputs, name)[first:] = value
            found = attend_packed(backend, replace(packed, inputs=inputs), **case.options)
            assert_same((found[0][:num_rows], found[1][:, :num_rows]), (out[:num_rows], lse[:, :num_rows]))


@pytest.mark.parametrize("token", (0, 130, 299))
def test_nan_in_values_reaches_only_rows_near_those_that_see_it(backend: Backend, token: int) -> None:
    case = Case(1, 300, 300, (2, 1), causal=True)
    inputs = make_inputs(case, backend.device)
    out, lse = run_case(backend, case, inputs)
    found, found_lse = run_case(backend, case, poisoned(inputs, "v", token, NAN))
    assert_same_bits(found_lse, lse)
    assert torch.isnan(found[:, token:, :, 3]).all()
    may_differ = torch.zeros_like(out, dtype=torch.bool)
    may_differ[:, max(token - 255, 0) :, :, 3] = True
    if backend.name == "cpu":  # where it reaches nobody else
        may_differ[:, :token] = False
    assert_same_bits(found, out, ~may_differ)


@pytest.mark.parametrize("ex2", (None, (1, 1)), ids=("off", "all"))
@pytest.mark.parametrize("token", (0, 31, 130, 299))
def test_nan_in_keys_is_seen_by_all_who_look(backend: Backend, token: int, ex2: tuple[int, ...] | None) -> None:
    for causal in (False, True):
        for num_splits in (1, 3):
            case = Case(1, 300, 300, (2, 1), causal=causal, ex2=ex2, num_splits=num_splits)
            inputs = make_inputs(case, backend.device)
            wanted = run_case(backend, case, inputs)
            out, lse = run_case(backend, case, poisoned(inputs, "k", token, NAN))
            sees = torch.arange(300, device=backend.device) >= (token if causal else 0)
            assert torch.isnan(out[:, sees]).all() and torch.isnan(lse[..., sees]).all()
            assert_same((out[:, ~sees], lse[..., ~sees]), (wanted[0][:, ~sees], wanted[1][..., ~sees]))


@pytest.mark.parametrize("num_splits", (1, 3))
@by_dtype
def test_rows_of_minus_infinity(backend: Backend, dtype: torch.dtype, num_splits: int) -> None:
    """All scores of query 1 are -inf, and those of query 2 but for the last key."""
    case = Case(1, 4, 300, (1, 1), dtype=dtype, num_splits=num_splits)
    inputs = make_inputs(case, backend.device)
    inputs.k[..., 0] = 1.0
    inputs.q[:, 1] = 0.0
    inputs.q[:, 1, :, 0] = -INF
    for ex2 in (None, (1, 1)):
        case = replace(case, ex2=ex2)
        out, lse = run_case(backend, case, inputs)
        assert (out[:, 1] == 0).all() and torch.isneginf(lse[..., 1]).all()
        check(backend, case, inputs, (out, lse))
        alone = replace(inputs, k=inputs.k.clone())
        alone.k[:, 299, :, 0] = 0.0  # -inf * 0
        out, lse = run_case(backend, case, alone)
        assert torch.isnan(out[:, 1]).all() and torch.isnan(lse[..., 1]).all()


@by_dtype
def test_infinite_values(backend: Backend, dtype: torch.dtype) -> None:
    case = Case(1, 40, 200, (2, 2), dtype=dtype)
    inputs = make_inputs(case, backend.device)
    inputs.k[:, 70] = 0.0  # a score of 0: its power is not too small to count
    inputs.v[:, 70, 0, 5], inputs.v[:, 70, 1, 6] = INF, -INF
    check(backend, case, inputs, run_case(backend, case, inputs))


@pytest.mark.parametrize("ex2", (None, (1, 1)), ids=("off", "all"))
@by_dtype
def test_scores_far_below_the_largest(backend: Backend, dtype: torch.dtype, ex2: tuple[int, ...] | None) -> None:
    """Powers at the ends of what float32 and the clamp can do; each query has one of them beside 2^0."""
    below = torch.tensor([-1.0, -64.0, -125.5, -126.0, -126.5, -127.0, -127.5, -150.0, -3000.0])
    scores = torch.full((len(below), 64), -3000.0)
    scores[:, 5] = 0.0
    scores[:, 9] = below
    values = torch.zeros(64, 128)
    values[9] = 2.0**14
    out, lse = attend(
        backend, chosen_scores(scores, values, dtype, backend.device), softmax_scale=LN2, **emulation(ex2)
    )
    p = torch.where(below < -127, 0.0, torch.exp2(below.double()))
    p = torch.where(below < -126, 0.0, p)
    found = out[0, :, 0].double().cpu()
    assert (found == found[:, :1]).all()
    wanted = (p / (1 + p) * 2.0**14).to(dtype).double()
    limit = (EMULATED_ERROR[dtype] + torch.finfo(dtype).eps) * wanted + 2.0**-127 * 2.0**14
    assert ((found[:, 0] - wanted).abs() <= limit + torch.finfo(dtype).smallest_normal).all()
    assert ((lse[0, 0].double().cpu() - torch.log1p(p)).abs() < 1e-4).all()
    assert (found[-2:] == 0).all(), "masked by their size alone"


@pytest.mark.parametrize("ex2", (None, (1, 1)), ids=("off", "all"))
@by_dtype
@pytest.mark.parametrize("first", (False, True), ids=("last", "first"))
def test_scores_far_from_the_ones_met_first(
    backend: Backend, dtype: torch.dtype, ex2: tuple[int, ...] | None, first: bool
) -> None:
    check_jumps(backend, dtype, ex2, first)


@by_dtype
def test_scores_below_zero(backend: Backend, dtype: torch.dtype) -> None:
    check_negative(backend, dtype)


# ------------------------------------------------------------------------------------------ emulation


RULES = ((4, 3, 0), (4, 3, 2), (14, 6, 0), (16, 1, 0), (5, 2, 1), (1, 1, 0), (100, 90, 0), (1000, 10, 0), (0, 7, 0),
         (9, 0, 0), (2, 1, 0), (3, 3, 3), (4, 4, 9))  # fmt: skip


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: "-".join(map(str, rule)))
@by_dtype
def test_the_pairs_that_are_emulated(backend: Backend, dtype: torch.dtype, rule: tuple[int, int, int]) -> None:
    emulated = emulated_keys(backend, dtype, rule)
    tile, length, count = fragments(backend, 128, causal=False)
    assert emulated == keys_by_rule(backend, rule)
    if tile == 128:
        share = dk.ex2_emulated_share(*rule, fragment=length, num_fragments=count)
        assert share == sum(emulated) / 128


@pytest.mark.parametrize("fragment, count", ((2, 1), (16, 1), (20, 1), (32, 1), (32, 4), (32, 2), (64, 8)))
def test_share_counts_the_rule(fragment: int, count: int) -> None:
    for rule in RULES:
        emulated = sum(is_emulated(*rule, k, f, count) for f in range(count) for k in range(fragment))
        share = dk.ex2_emulated_share(*rule, fragment=fragment, num_fragments=count)
        assert share == emulated / (fragment * count)


def test_share_of_the_known_settings() -> None:
    assert dk.ex2_emulated_share(4, 3, fragment=32, num_fragments=1) == 0.5
    assert dk.ex2_emulated_share(14, 6, fragment=32, num_fragments=1) == 0.375
    assert dk.ex2_emulated_share(4, 3, fragment=32, num_fragments=4) == 0.375


CONTRACT = Path(dk.__file__).parent / "include/deep_kernels/contract/attention.h"


@pytest.mark.parametrize("degree, worst", ((3, 8.57e-5), (4, 2.96e-6)))
def test_polynomials_over_all_fractions(degree: int, worst: float) -> None:
    """Every fraction that a float32 exponent of magnitude 1/2 and more can have, rounded as the contract says."""
    text = CONTRACT.read_text()
    found = search(rf"kEx2Degree{degree}\[\] = {{(.*?)}}", text)
    assert found
    coefficients = [float(word.strip().rstrip("f")) for word in found[1].split(",")]
    assert len(coefficients) == degree and f"degree {degree} {worst:.2e}".replace("e-0", "e-") in text
    measured = 0.0
    for first in range(0, 1 << 24, 1 << 20):
        f = torch.arange(first, first + (1 << 20), dtype=torch.double) / (1 << 24)
        power = torch.full_like(f, torch.tensor(coefficients[-1]).item())
        for c in [*coefficients[-2::-1], 1.0]:
            power = (power * f + torch.tensor(c).item()).float().double()  # a fused multiply-add of float32
        if first == 0:
            assert power[0] == 1.0, "so that masked scores come out as 0"
        measured = max(measured, float((power / torch.exp2(f) - 1).abs().max()))
    assert measured <= worst < 1.01 * measured


@pytest.mark.parametrize("ex2", (None, (1, 1)), ids=("off", "all"))
@by_dtype
def test_powers_over_their_range(backend: Backend, dtype: torch.dtype, ex2: tuple[int, ...] | None) -> None:
    """Powers of 1024 exponents for each number of [-24, 0], by lse: exponent x for 48 keys beside one of 0."""
    x = (-24 * torch.rand(1024, generator=torch.Generator().manual_seed(0))).to(dtype)
    x[:49] = -torch.arange(49) / 2
    keys = torch.arange(64)
    scores = torch.where(keys < 48, x.float()[:, None], torch.where(keys == 48, 0.0, -3000.0))
    inputs = chosen_scores(scores, torch.ones(64, 128), dtype, backend.device)
    _, lse = attend(backend, inputs, softmax_scale=LN2, **emulation(ex2))
    powers = 48 * torch.exp2(x.double())
    limit = (EMULATED_ERROR[dtype] if ex2 else 2.0**-21) * powers / (1 + powers) + 2.0**-20
    assert ((lse[0, 0].double().cpu() - torch.log1p(powers)).abs() <= limit).all()


@by_head_dim
@by_dtype
def test_emulation_changes_little(backend: Backend, dtype: torch.dtype, head_dim: int) -> None:
    case = Case(1, 64, 700, (4, 2), head_dim, dtype)
    inputs = make_inputs(case, backend.device)
    off, off_lse = run_case(backend, replace(case, ex2=(0, 0)), inputs)
    for ex2 in EMULATIONS[2:]:
        on, on_lse = run_case(backend, replace(case, ex2=ex2), inputs)
        error = EMULATED_ERROR[dtype]
        assert (on_lse - off_lse).abs().max() <= 1.01 * error + 2.0**-21 * off_lse.abs().max()
        largest = inputs.v.float().abs().max()
        assert (on.float() - off.float()).abs().max() <= (2 * error + torch.finfo(dtype).eps) * largest
        _, length, count = fragments(backend, head_dim, causal=False)
        share = dk.ex2_emulated_share(*ex2, fragment=length, num_fragments=count)
        assert torch.equal(on_lse, off_lse) == (share == 0), "what was asked for"


def test_off_is_off(backend: Backend) -> None:
    inputs = make_inputs(Case(), backend.device)
    wanted = attend(backend, inputs, **emulation((0, 0)))
    for words in ((0, 5), (4, 0), (4, 0, 2), (4, 3, 99), (1000, 3)):
        assert_same(attend(backend, inputs, **emulation(words)), wanted)


# ------------------------------------------------------------------------------------------ same bits


def rows_alone(backend: Backend, case: Case, inputs: Inputs, first: int, count: int) -> Result:
    """`count` queries from `first` on in a call of their own, whose keys end where theirs do."""
    end = first + count + case.num_kv - case.num_q if case.causal else case.num_kv
    part = Inputs(inputs.q[:, first : first + count], inputs.k[:, :end], inputs.v[:, :end])
    return attend(backend, part, **case.options)


@by_causal
@by_head_dim
@by_dtype
def test_a_row_does_not_depend_on_others(backend: Backend, dtype: torch.dtype, head_dim: int, causal: bool) -> None:
    """A decode row is the same prefill row, bit for bit, also where others rescale and it does not."""
    for heads in ((2, 2), (8, 2), (7, 1)):
        for ex2 in ((0, 0), (4, 3), (14, 6)):
            case = Case(1, 150, 300, heads, head_dim, dtype, causal, ex2=ex2)
            inputs = make_inputs(case, backend.device)
            inputs.q[:, ::3] *= 0.05  # rows that never rescale
            out, lse = run_case(backend, case, inputs)
            for first, count in ((0, 1), (1, 1), (63, 2), (77, 1), (149, 1), (30, 70)):
                part = slice(first, first + count)
                assert_same(rows_alone(backend, case, inputs, first, count), (out[:, part], lse[..., part]))


@by_causal
def test_a_member_does_not_depend_on_others(backend: Backend, causal: bool) -> None:
    case = Case(3, 70, 200, (6, 2), 128, causal=causal, ex2=(4, 3))
    inputs = make_inputs(case, backend.device)
    out, lse = run_case(backend, case, inputs)
    for index in range(3):
        part = slice(index, index + 1)
        alone = Inputs(*(x[part] for x in inputs.tensors()))
        assert_same(run_case(backend, case, alone), (out[part], lse[part]))
    for head in (0, 3, 5):
        kv = slice(head // 3, head // 3 + 1)
        alone = Inputs(inputs.q[:, :, head : head + 1], inputs.k[:, :, kv], inputs.v[:, :, kv])
        assert_same(run_case(backend, case, alone), (out[:, :, head : head + 1], lse[:, head : head + 1]))


@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_strides_change_no_bit(backend: Backend, layout: str) -> None:
    for dtype in DTYPES:
        case = Case(2, 70, 141, (4, 2), 128, dtype)
        inputs = make_inputs(case, backend.device)
        wanted = run_case(backend, case, inputs)
        for _ in range(2):  # compiled, and found
            other = Inputs(*(laid_out(x, layout) for x in inputs.tensors()))
            assert other.q.stride() != inputs.q.stride()
            assert_same(run_case(backend, case, other), wanted)
        for name in ("q", "k", "v"):
            mixed = replace(inputs, **{name: laid_out(getattr(inputs, name), layout)})
            assert_same(run_case(backend, case, mixed), wanted)
        guard = GuardedOut(tuple(inputs.q.shape), dtype, backend.device)
        assert_same(attend(backend, inputs, out=guard.view, **case.options), wanted)


def test_odd_strides_are_right_or_refused(backend: Backend) -> None:
    """Byte strides and addresses that are no multiples of 16."""
    case = Case(2, 20, 50)
    inputs = make_inputs(case, backend.device)
    wanted = run_case(backend, case, inputs)
    for name in ("q", "k", "v"):
        x = getattr(inputs, name)
        padded = torch.zeros(*x.shape[:-1], x.shape[-1] + 3, dtype=x.dtype, device=x.device)
        padded[..., 1:-2] = x
        odd = replace(inputs, **{name: padded[..., 1:-2]})
        if backend.name == "cpu":
            assert_same(run_case(backend, case, odd), wanted)
        else:
            with pytest.raises(ValueError, match=f"{name} must have strides that are positive multiples of 16 bytes"):
                run_case(backend, case, odd)
    out = torch.zeros(2, 20, 4, 67, dtype=inputs.q.dtype, device=backend.device)[..., 1:-2]
    if backend.name == "cpu":
        assert_same(attend(backend, inputs, out=out, **case.options), wanted)
    else:
        with pytest.raises(ValueError, match="out must have strides that are positive multiples of 16 bytes"):
            attend(backend, inputs, out=out, **case.options)


def test_keys_of_one_head_may_be_expanded(backend: Backend) -> None:
    case = Case(3, 20, 150, (4, 1))
    inputs = make_inputs(case, backend.device)
    one = Inputs(inputs.q, inputs.k[:1].expand(3, -1, -1, -1), inputs.v[:1].expand(3, -1, -1, -1))
    copied = replace(one, k=one.k.contiguous(), v=one.v.contiguous())
    wanted = run_case(backend, case, copied)
    if backend.name == "cpu":
        assert_same(run_case(backend, case, one), wanted)
    else:
        with pytest.raises(ValueError, match="positive multiples of 16 bytes"):
            run_case(backend, case, one)


def test_threads_change_no_bit(backend: Backend) -> None:
    if backend.device != "cpu":
        pytest.skip("of the CPU backend")
    case = Case(2, 130, 300, (6, 2), 128, causal=True)
    inputs = make_inputs(case, backend.device)
    wanted = run_case(backend, case, inputs)
    threads = torch.get_num_threads()
    try:
        for count in (1, 3, 8):
            torch.set_num_threads(count)
            assert_same(run_case(backend, case, inputs), wanted)
    finally:
        torch.set_num_threads(threads)


# ------------------------------------------------------------------------------------------ packed members

LENGTHS = [(5, 300), (0, 40), (70, 70), (33, 0), (1, 129), (0, 0), (130, 20), (64, 128)]


@pytest.mark.parametrize("num_splits", (1, 3, None))
@by_causal
@by_dtype
def test_packed_members_are_dense_ones(
    backend: Backend, dtype: torch.dtype, causal: bool, num_splits: int | None
) -> None:
    for heads, head_dim, layout in (((4, 2), 64, "rows"), ((7, 1), 128, "heads-first"), ((3, 3), 256, "strided")):
        case = Case(1, 0, 0, heads, head_dim, dtype, causal, layout=layout, ex2=(4, 3), num_splits=num_splits)
        packed = pack(case, LENGTHS, backend.device)
        out, lse = attend_packed(backend, packed, **case.options)
        assert lse.shape == (heads[0], packed.inputs.q.shape[0])
        for q, kv in packed.members():
            alone = packed.member(q, kv)
            found = out[None, q], lse[None, :, q]
            if num_splits == 1:
                assert_same(found, attend(backend, alone, **case.options))
            check(backend, case, alone, found)


@by_causal
def test_a_wrong_max_seqlen_is_right_or_refused(backend: Backend, causal: bool) -> None:
    case = Case(causal=causal)
    packed = pack(case, LENGTHS, backend.device)
    wanted = attend_packed(backend, packed, **case.options)
    for max_q, max_k in ((0, 0), (1, 1), (64, 300), (10**6, 10**6)):
        assert_same(attend_packed(backend, replace(packed, max_q=max_q, max_k=max_k), **case.options), wanted)


@pytest.mark.parametrize("num_splits", (1, 3))
def test_tokens_behind_the_last_member_are_not_written(backend: Backend, num_splits: int) -> None:
    case = Case(num_splits=num_splits)
    packed = pack(case, LENGTHS, backend.device, behind=37)
    guard = GuardedOut(tuple(packed.inputs.q.shape), case.dtype, backend.device)
    end = sum(q for q, _ in LENGTHS)
    with poisoned_memory(backend, None):  # what would be joined there is NaN
        out, _ = attend_packed(backend, packed, out=guard.view, **case.options)
    assert (out[end:] == 7).all() and (out[:end] != 7).any(-1).all()
    guard.check(out)


def test_members_without_tokens(backend: Backend) -> None:
    case = Case()
    for lengths in ([(0, 0)], [(0, 5), (0, 0)], [(4, 0), (3, 0)]):
        packed = pack(case, lengths, backend.device)
        out, lse = attend_packed(backend, packed)
        assert (out == 0).all() and torch.isneginf(lse).all()
    none = torch.zeros(1, dtype=torch.int32, device=backend.device)
    nobody = replace(pack(case, [(4, 9)], backend.device), cu_q=none, cu_k=none)
    out, lse = attend_packed(backend, nobody)
    assert out.shape == (4, 4, 64) and lse.shape == (4, 4)


# ------------------------------------------------------------------------------------------ splits


@by_causal
@pytest.mark.parametrize("num_splits", (2, 3, 7, 128))
def test_splits_agree(backend: Backend, num_splits: int, causal: bool) -> None:
    """Also parts without a key, or without one that a query sees."""
    for dtype, head_dim in ((torch.bfloat16, 64), (torch.float16, 128), (torch.bfloat16, 256)):
        case = Case(2, 70, 500, (4, 2), head_dim, dtype, causal, num_splits=num_splits)
        inputs = make_inputs(case, backend.device)
        check(backend, case, inputs, run_case(backend, case, inputs))


def test_long_keys_of_few_queries_are_split(backend: Backend) -> None:
    """What num_splits=None is for, by its bits: one row of 4000 keys."""
    case = Case(1, 1, 4000, (1, 1), 128)
    inputs = make_inputs(case, backend.device)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        picked, one, four = (run_case(backend, replace(case, num_splits=n), inputs) for n in (None, 1, 4))
    finally:
        torch.set_num_threads(threads)
    check(backend, case, inputs, picked)
    if backend.name == "cpu":
        assert_same(picked, four)
        assert not torch.equal(picked[1], one[1])


# ------------------------------------------------------------------------------------------ the tests themselves

MISTAKES: dict[str, Callable[[Case, Inputs], tuple[Case, Inputs]]] = {
    "a key dropped": lambda c, i: (c, Inputs(i.q, i.k[:, :-1], i.v[:, :-1])),
    "keys and values one apart": lambda c, i: (c, replace(i, v=i.v.roll(1, 1))),
    "another head's keys": lambda c, i: (c, replace(i, k=i.k.flip(2))),
    "another scale": lambda c, i: (replace(c, scale=c.head_dim**-0.5 * 1.01), i),
    "masked at the top left": lambda c, i: (c, Inputs(i.q, i.k[:, : i.q.shape[1]], i.v[:, : i.q.shape[1]])),
    "not masked": lambda c, i: (replace(c, causal=False), i),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_noticed(backend: Backend, name: str) -> None:
    """What a wrong kernel would give is refused by the comparison that the tests above rely on."""
    case = Case(1, 70, 141, (4, 2), causal=True)
    inputs = make_inputs(case, backend.device)
    other, wrong = MISTAKES[name](case, inputs)
    with pytest.raises(AssertionError):
        check(backend, case, inputs, attend(backend, wrong, **other.options))


def test_small_mistakes_are_noticed(backend: Backend) -> None:
    case = Case(1, 70, 141, (4, 2))
    inputs = make_inputs(case, backend.device)
    out, lse = run_case(backend, case, inputs)
    units = 3 if backend.name == "cpu" else 40
    index = out[0, 33, 2].abs().argmax()
    off = out.clone()
    off[0, 33, 2, index] *= 1 + units * torch.finfo(case.dtype).eps
    for wrong in ((off, lse), (out, lse + 1e-3), (out, torch.where(lse == lse.max(), NAN, lse))):
        with pytest.raises(AssertionError):
            check(backend, case, inputs, wrong)


def test_the_oracle_is_torch() -> None:
    """Against torch's own function, which knows no bottom right alignment and no lse."""
    q, k, v = torch.randn(3, 20, 4, 64, dtype=torch.double, generator=torch.Generator().manual_seed(0))
    for causal in (False, True):
        exact = oracle.attention(q, k[:, :2], v[:, :2], causal, 0.2)
        keys, values = (x[:, :2].repeat_interleave(2, 1).transpose(0, 1) for x in (k, v))
        wanted = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(0, 1), keys, values, is_causal=causal, scale=0.2
        )
        assert torch.allclose(exact.out, wanted.transpose(0, 1), rtol=0, atol=1e-12)
