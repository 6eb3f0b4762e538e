"""The kernels of flash attention on the emulator, against the float64 oracle, strictly checked while they run."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from attention_cases import (
    DTYPES,
    HEAD_DIMS,
    LAYOUTS,
    Case,
    GuardedOut,
    Inputs,
    Packed,
    attend,
    attend_packed,
    check,
    check_jumps,
    check_negative,
    emulated_keys,
    fragments,
    keys_by_rule,
    laid_out,
    make_inputs,
    pack,
    run_case,
)
from conftest import Backend
from emulator import Emulator, installed
from emulator.driver import SANITIZED_FLAGS, compile_ahead
from emulator.fixtures import emulator_ready  # noqa: F401
from emulator.memory import guarded
from mqa_cases import assert_same_bits, word
from pairwise import pairwise
from storage import poisoned_memory
from torch import Tensor

BACKENDS = tuple(Backend(f"emulator-{name}", "cpu", f"emulator:{name}") for name in ("sm89", "sm90"))
SM90 = BACKENDS[1]
by_backend = pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
by_head_dim = pytest.mark.parametrize("head_dim", HEAD_DIMS)
by_causal = pytest.mark.parametrize("causal", (False, True), ids=("full", "causal"))
Result = tuple[Tensor, Tensor]

# All dtypes, head sizes and ratios; tiles cut off at both ends; more queries than keys; parts without keys.
CASES = (
    Case(2, 1, 130, (4, 1)),
    Case(1, 135, 200, (2, 2), causal=True, ex2=(4, 3), layout="heads-first"),
    Case(1, 5, 64, (3, 1), dtype=torch.float16, out=True, num_splits=3),
    Case(1, 150, 70, (2, 1), 128, torch.float16, causal=True, layout="strided"),
    Case(2, 17, 129, (2, 2), 128, ex2=(14, 6), out=True),
    Case(1, 140, 141, (4, 2), 128, causal=True, num_splits=2, scale=0.3),
    Case(1, 20, 97, (7, 7), 256, ex2=(1, 1)),
    Case(1, 70, 90, (4, 1), 256, torch.float16, causal=True, ex2=(4, 3), layout="strided", out=True),
    Case(2, 66, 31, (1, 1), 256, causal=True, num_splits=4),
    Case(2, 140, 170, (2, 1), 256),
    Case(1, 290, 330, (2, 2), 256, torch.float16, causal=True, num_splits=2),
    Case(1, 300, 70, (1, 1), 256, causal=True, ex2=(4, 3), out=True),
    Case(1, 3, 0),
    Case(1, 2, 90, (65, 1)),  # more heads than a tile of sm90 has rows for
)
by_case = pytest.mark.parametrize("case", CASES, ids=str)
BASE = Case(1, 70, 150, (2, 1), causal=True, ex2=(4, 3))
LENGTHS = [(5, 100), (0, 40), (70, 70), (33, 0), (1, 129), (0, 0), (140, 20)]

# Few queries, of which sm90 has all heads of a kv head in a tile: ratios that divide 64 rows and others, units that
# are not full, several of them.
DECODE = [
    Case(**row, seed=seed)
    for seed, row in enumerate(
        pairwise(
            {
                "batch": (1, 3),
                "num_q": (1, 2, 7, 16),
                "num_kv": (1, 131, 245),  # beside ends of tiles, of which a group sees parts
                "heads": ((2, 1), (6, 2), (4, 1), (14, 2), (8, 1), (16, 1), (64, 1)),
                "head_dim": HEAD_DIMS,
                "dtype": DTYPES,
                "causal": (False, True),
                "layout": LAYOUTS,
                "out": (False, True),
                "num_splits": (1, 3),
            }
        )
    )
]
FEW = Case(1, 12, 133, (7, 1), causal=True, ex2=(4, 3))
FEW_LENGTHS = [(5, 100), (0, 40), (20, 30), (9, 0), (1, 129), (0, 0), (12, 290)]
by_base = pytest.mark.parametrize("base", (BASE, FEW), ids=("many", "few"))


def guarded_inputs(inputs: Inputs) -> Inputs:
    return Inputs(*(guarded(tensor) for tensor in inputs.tensors()))


def run(backend: Backend, case: Case, inputs: Inputs, *, emulator: Emulator | None = None, num_sms: int = 3) -> Result:
    """The call on the emulator, its inputs between pages that fault unless their strides are the matter."""
    if case.layout == "rows":
        inputs = guarded_inputs(inputs)
    emulator = emulator or Emulator()
    with installed(emulator, num_sms):
        result = run_case(backend, case, inputs)
    names = ["attention", "attention_join"] if case.num_splits != 1 else ["attention"]
    assert [launch["op"] for launch in emulator.launches] == names
    return result


def run_packed(backend: Backend, case: Case, packed: Packed, emulator: Emulator | None = None) -> Result:
    with installed(emulator or Emulator()):
        return attend_packed(backend, replace(packed, inputs=guarded_inputs(packed.inputs)), **case.options)


def assert_same(found: Result, wanted: Result) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert_same_bits(one, other)


@pytest.fixture(autouse=True, scope="module")
def compiled(emulator_ready: None) -> Iterator[None]:  # noqa: F811
    """The kernels of most tests, compiled side by side before the first is run."""

    def run_all() -> None:
        kinds = product(DTYPES, HEAD_DIMS, (False, True))
        rows = (Case(1, 1, 1, (1, 1), head_dim, dtype, causal, ex2=(4, 3)) for dtype, head_dim, causal in kinds)
        for backend, case in product(BACKENDS, (*CASES, BASE, FEW, *rows)):
            attend(backend, make_inputs(case, "cpu"), **case.options)
        for case in DECODE:
            attend(SM90, make_inputs(case, "cpu"), **case.options)
        kinds = product(((BASE, LENGTHS), (FEW, FEW_LENGTHS)), (False, True), (1, 3), (64, 256))
        for backend, ((base, lengths), causal, num_splits, head_dim) in product(BACKENDS, kinds):
            case = replace(base, causal=causal, num_splits=num_splits, head_dim=head_dim)
            attend_packed(backend, pack(case, lengths, "cpu"), **case.options)

    compile_ahead(run_all)
    yield


# ------------------------------------------------------------------------------------------ agreement


@by_backend
@by_case
def test_agrees_with_the_oracle(backend: Backend, case: Case) -> None:
    inputs = make_inputs(case, "cpu")
    check(backend, case, inputs, run(backend, case, inputs))


@pytest.mark.parametrize("case", DECODE, ids=str)
def test_few_queries_agree_with_the_oracle(case: Case) -> None:
    inputs = make_inputs(case, "cpu")
    check(SM90, case, inputs, run(SM90, case, inputs))


# Queries, heads, head_dim: whether heads are packed, rows and blocks of a tile.
TILES = (
    (1, (1, 1), 128, (False, 64, 1)),
    (1, (8, 1), 128, (True, 64, 1)),
    (1, (64, 1), 256, (True, 64, 1)),
    (1, (65, 1), 128, (False, 64, 1)),
    (9, (14, 2), 64, (True, 64, 1)),
    (10, (14, 2), 64, (True, 128, 1)),
    (16, (16, 1), 128, (True, 128, 1)),
    (64, (2, 1), 64, (True, 128, 1)),
    (64, (2, 2), 256, (False, 64, 1)),
    (65, (2, 1), 64, (False, 128, 1)),
    (65, (16, 1), 256, (False, 128, 1)),
    (129, (16, 1), 64, (False, 192, 1)),
    (129, (16, 1), 128, (False, 192, 1)),
    (129, (16, 1), 256, (False, 128, 2)),
)


@by_causal
@pytest.mark.parametrize("num_q, heads, head_dim, wanted", TILES, ids=str)
def test_which_tile_a_call_gets(
    num_q: int, heads: tuple[int, int], head_dim: int, wanted: tuple[bool, int, int], causal: bool
) -> None:
    """By the longest member; the keys of a tile are the same for all."""
    case = Case(1, num_q, 100, heads, head_dim, causal=causal)
    members = pack(case, [(num_q, 100), (1, 5)], "cpu")
    launches: list[dict[str, Any]] = []
    with installed(launches.append):
        attend(SM90, make_inputs(case, "cpu"), **case.options)
        attend_packed(SM90, members, **case.options)
    for launch in launches:
        spec = json.loads(launch["spec"])
        assert (spec["packs_heads"], spec["tile_rows"], spec["cluster"]) == wanted
        assert spec["tile_keys"] == fragments(SM90, head_dim, causal)[0]
    assert len(launches) == 2


@by_backend
def test_ones_give_one(backend: Backend) -> None:
    for dtype, head_dim in product(DTYPES, HEAD_DIMS):
        case = replace(BASE, dtype=dtype, head_dim=head_dim)
        inputs = make_inputs(case, "cpu")
        out, _ = run(backend, case, replace(inputs, v=torch.ones_like(inputs.v)))
        assert (out.double() - 1).abs().max() <= torch.finfo(dtype).eps


@by_backend
@pytest.mark.parametrize("head_dim", (64, 256))
@pytest.mark.parametrize("num_splits", (1, 3))
@by_causal
@pytest.mark.parametrize("base, lengths", ((BASE, LENGTHS), (FEW, FEW_LENGTHS)), ids=("many", "few"))
def test_packed_members_are_dense_ones(
    backend: Backend, base: Case, lengths: list[tuple[int, int]], causal: bool, num_splits: int, head_dim: int
) -> None:
    """Members without queries, without keys, without either; tokens behind the last one stay as they are."""
    case = replace(base, causal=causal, num_splits=num_splits, head_dim=head_dim)
    packed = pack(case, lengths, "cpu", behind=9)
    guard = GuardedOut(tuple(packed.inputs.q.shape), case.dtype, "cpu")
    with installed(Emulator()), poisoned_memory(backend, None):  # what would be joined behind them is NaN
        out, lse = attend_packed(backend, packed, out=guard.view, **case.options)
    assert (out[sum(q for q, _ in lengths) :] == 7).all()
    out = out.clone()
    for q, kv in packed.members():
        alone = packed.member(q, kv)
        found = out[None, q], lse[None, :, q]
        check(backend, case, alone, found)
        if num_splits == 1 and alone.q.numel() > 0:
            with installed(Emulator()):
                assert_same(found, attend(backend, alone, **case.options))
    guard.check(guard.view)


@by_backend
def test_a_wrong_max_seqlen_is_right(backend: Backend) -> None:
    packed = pack(BASE, LENGTHS, "cpu")
    wanted = run_packed(backend, BASE, packed)
    for longest in (0, 1, 10**6):
        assert_same(run_packed(backend, BASE, replace(packed, max_q=longest, max_k=longest)), wanted)


@by_backend
def test_more_tiles_than_are_counted(backend: Backend) -> None:
    """Of members without tokens, since others would not fit into memory."""
    packed = pack(Case(1, 1, 1, (1024, 1)), [(0, 0)] * 2**20, "cpu", behind=1)
    words = r"batch, num_q_heads and num_splits must make at most 1073741824 tiles of queries, got 10737\d+"
    with installed(Emulator()), pytest.raises(ValueError, match=words):
        attend_packed(backend, packed)


# ------------------------------------------------------------------------------------------ same bits


@by_backend
@by_causal
@by_head_dim
@pytest.mark.parametrize("dtype", DTYPES, ids=word)
def test_a_decode_row_is_the_prefill_row(backend: Backend, dtype: torch.dtype, head_dim: int, causal: bool) -> None:
    """Also where others rescale and it does not, wherever in a tile it stands, beside which heads."""
    case = Case(1, 135, 200, (2, 1), head_dim, dtype, causal, ex2=(4, 3))
    inputs = make_inputs(case, "cpu")
    inputs.q[:, ::3] *= 0.05
    out, lse = run(backend, case, inputs)
    for first, count in ((0, 1), (63, 1), (77, 40), (134, 1)):
        part = slice(first, first + count)
        end = first + count + 200 - 135 if causal else 200
        alone = Inputs(inputs.q[:, part], inputs.k[:, :end].clone(), inputs.v[:, :end].clone())
        assert_same(run(backend, case, alone), (out[:, part], lse[..., part]))


@by_backend
@pytest.mark.parametrize("case", (replace(BASE, num_q=135, batch=2), replace(FEW, num_q=20, batch=2)), ids=str)
def test_bits_depend_on_no_order_and_no_grid(backend: Backend, case: Case) -> None:
    inputs = make_inputs(case, "cpu")
    for num_splits in (1, 3):
        case = replace(case, num_splits=num_splits)
        wanted = run(backend, case, inputs)
        for seed, num_sms in ((1, 1), (2, 3), (3, 8), (4, 132)):
            assert_same(run(backend, case, inputs, emulator=Emulator(seed=seed), num_sms=num_sms), wanted)


@by_backend
@by_base
def test_bits_do_not_depend_on_what_locals_held(backend: Backend, base: Case) -> None:
    """Variables that nobody initialised would differ between the two builds."""
    inputs = make_inputs(base, "cpu")
    zeros, patterns = (
        run(backend, base, inputs, emulator=Emulator(flags=("-O1", f"-ftrivial-auto-var-init={value}")))
        for value in ("zero", "pattern")
    )
    assert_same(zeros, patterns)


@by_backend
@by_base
def test_strides_change_no_bit(backend: Backend, base: Case) -> None:
    inputs = make_inputs(base, "cpu")
    wanted = run(backend, base, inputs)
    for layout in ("heads-first", "strided"):
        other = Inputs(*(laid_out(x, layout) for x in inputs.tensors()))
        assert_same(run(backend, replace(base, layout=layout, out=True), other), wanted)


# ------------------------------------------------------------------------------------------ emulation


@by_backend
@pytest.mark.parametrize("rule", ((4, 3, 0), (14, 6, 0), (5, 2, 0), (16, 1, 0)), ids=str)
def test_the_pairs_that_are_emulated(backend: Backend, rule: tuple[int, int, int]) -> None:
    with installed(Emulator()):
        assert emulated_keys(backend, torch.bfloat16, rule) == keys_by_rule(backend, rule)


# ------------------------------------------------------------------------------------------ special values


@by_backend
@pytest.mark.parametrize("name", ("k", "v"))
def test_what_no_query_sees_changes_nothing(backend: Backend, name: str) -> None:
    """Neither the keys of the next member, nor those behind the last one. Builds stop at undefined behaviour."""
    packed = pack(BASE, [(40, 50), (3, 90)], "cpu", behind=60)  # heads of 40 queries share tiles of sm90
    out, lse = run_packed(backend, BASE, packed)
    for value, (first, num_rows) in product((math.nan, math.inf), ((140, 43), (50, 40))):
        inputs = packed.inputs.clone()
        getattr(inputs, name)[first:] = value
        found = run_packed(backend, BASE, replace(packed, inputs=inputs), Emulator(flags=SANITIZED_FLAGS))
        assert_same((found[0][:num_rows], found[1][:, :num_rows]), (out[:num_rows], lse[:, :num_rows]))


@by_backend
@pytest.mark.parametrize("ex2", (None, (1, 1)), ids=("off", "all"))
def test_nan_in_keys_is_seen_by_all_who_look(backend: Backend, ex2: tuple[int, ...] | None) -> None:
    many, few = Case(1, 150, 150, (2, 1), ex2=ex2), Case(1, 12, 150, (7, 1), ex2=ex2)
    kinds = ((0, False, 3), (31, True, 1), (149, True, 3), (130, True, 1), (143, True, 1))
    for case, (token, causal, num_splits) in product((many, few), kinds):
        case = replace(case, causal=causal, num_splits=num_splits)
        inputs = make_inputs(case, "cpu")
        wanted = run(backend, case, inputs)
        inputs.k[:, token, :, 3] = math.nan
        out, lse = run(backend, case, inputs)
        sees = torch.arange(150 - case.num_q, 150) >= (token if causal else 0)
        assert torch.isnan(out[:, sees]).all() and torch.isnan(lse[..., sees]).all()
        assert_same((out[:, ~sees], lse[..., ~sees]), (wanted[0][:, ~sees], wanted[1][..., ~sees]))


@by_backend
@pytest.mark.parametrize("token", (0, 300, 449))
def test_nan_in_values_reaches_only_rows_near_those_that_see_it(backend: Backend, token: int) -> None:
    case = Case(1, 450, 450, (1, 1), causal=True)
    inputs = make_inputs(case, "cpu")
    out, lse = run(backend, case, inputs)
    inputs.v[:, token, :, 3] = math.nan
    found, found_lse = run(backend, case, inputs)
    assert_same_bits(found_lse, lse)
    assert torch.isnan(found[:, token:, :, 3]).all()
    may_differ = torch.zeros_like(out, dtype=torch.bool)
    may_differ[:, max(token - 255, 0) :, :, 3] = True
    assert_same_bits(found, out, ~may_differ)


@by_backend
@pytest.mark.parametrize("ex2", (None, (4, 3)), ids=("off", "half"))
@pytest.mark.parametrize("dtype", DTYPES, ids=word)
@pytest.mark.parametrize("first", (False, True), ids=("last", "first"))
def test_scores_far_from_the_ones_met_first(
    backend: Backend, dtype: torch.dtype, ex2: tuple[int, ...] | None, first: bool
) -> None:
    with installed(Emulator()):
        check_jumps(backend, dtype, ex2, first)


@by_backend
@pytest.mark.parametrize("dtype", DTYPES, ids=word)
def test_scores_below_zero(backend: Backend, dtype: torch.dtype) -> None:
    with installed(Emulator()):
        check_negative(backend, dtype)


@by_backend
@pytest.mark.parametrize("num_splits", (1, 3))
@pytest.mark.parametrize("heads", ((1, 1), (3, 1)), ids=str)
def test_rows_of_infinite_scores(backend: Backend, heads: tuple[int, int], num_splits: int) -> None:
    """All scores of query 1 are -inf, beside values that are not finite; those of query 2 are +inf."""
    case = Case(1, 4, 130, heads, ex2=(4, 3), num_splits=num_splits)
    inputs = make_inputs(case, "cpu")
    inputs.k[..., 0] = 1.0
    inputs.q[:, 1:3] = 0.0
    inputs.q[:, 1, :, 0], inputs.q[:, 2, :, 0] = -math.inf, math.inf
    inputs.v[:, 5] = math.inf
    out, lse = run(backend, case, inputs)
    assert (out[:, 1] == 0).all() and torch.isneginf(lse[..., 1]).all()
    assert torch.isnan(out[:, 2]).all() and torch.isnan(lse[..., 2]).all()
    assert torch.isfinite(lse[..., [0, 3]]).all()
