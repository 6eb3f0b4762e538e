"""The kernels of the FP8 prefill MLP on the emulator, against the float64 oracle, strictly checked while they run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import oracle
import pytest
import torch
from emulator import Emulator
from emulator.driver import DEFAULT_FLAGS, SANITIZED_FLAGS, compile_ahead
from emulator.fixtures import emulator_ready  # noqa: F401
from emulator.memory import guarded
from emulator.silu_variants import GEMM_VARIANTS, SM89_VARIANTS, SM90_VARIANTS, VARIANTS, Variant
from pairwise import pairwise
from silu_cases import (
    ACTIVATIONS,
    LAYOUTS,
    Case,
    Inputs,
    Pair,
    assert_same_pair,
    block_gemm,
    expected,
    expected_of,
    make_gate_up,
    make_inputs,
    run_case,
    silu_mul,
    sum_error,
    two_launches,
)
from torch import Tensor

from deep_kernels import _C, formats

# Nothing of them is a multiple of what the kernels work with; the first is the least there can be.
CASES = [
    Case(num_tokens=1, k=16, num_columns=16, out=True),
    Case(num_tokens=37, k=272, num_columns=272, w_scale_dtype=torch.bfloat16, layout="columns"),
    Case(num_tokens=130, k=144, num_columns=400, activation="oss", scale_fmt="ue8m0", layout="strided", out=True),
    Case(num_tokens=65, k=528, num_columns=144, activation="gelu-clamped", round_bf16=False, layout="strided"),
]
SERVED = [
    pytest.param(variant, case, id=f"{variant}-{case}")
    for variant in VARIANTS
    for case in CASES
    if variant.serves(round_bf16=case.round_bf16)
]
EVERY_VARIANT = pytest.mark.parametrize("variant", VARIANTS, ids=str)
EVERY_SM89_VARIANT = pytest.mark.parametrize("variant", SM89_VARIANTS, ids=str)

# Several tiles of tokens and of columns, more blocks of k than stages.
BASE = Case(num_tokens=139, k=400, num_columns=272, out=True, seed=3)

# Of sm90, whose tiles give the same bits: k blocks of which a ring has more and less, tokens of several tiles and of a
# part of one, columns of which a cluster's second block has none, few, or its half; SMs of one cluster, of one and a
# half, of two and a half.
SM90_KERNELS = (
    {"activation": "silu"},
    {"activation": "silu", "round_bf16": False, "scale_fmt": "ue8m0"},
    {"activation": "oss", "scale_fmt": "ue8m0"},
    {"activation": "clamped", "round_bf16": False},
    {"activation": "gelu", "scale_fmt": "ue8m0"},
    {"activation": "gelu-clamped", "round_bf16": False},
)
SM90_SWEEP = [
    (
        Case(
            num_tokens=row["num_tokens"],
            k=row["k"],
            num_columns=row["num_columns"],
            layout=row["layout"],
            w_scale_dtype=row["w_scale_dtype"],
            out=True,
            seed=seed,
            **SM90_KERNELS[row["kernel"]],
        ),
        row["num_sms"],
    )
    for seed, row in enumerate(
        pairwise(
            {
                "num_tokens": (1, 65, 139, 260),
                "k": (80, 128, 256, 384, 400, 640, 1152, 2176),
                "num_columns": (48, 80, 144, 256, 272, 400),
                "layout": LAYOUTS,
                "w_scale_dtype": (torch.float32, torch.bfloat16),
                "num_sms": (2, 3, 5),
                "kernel": range(len(SM90_KERNELS)),
            }
        )
    )
]
BY_SM90_CASE = pytest.mark.parametrize(
    "case, num_sms", [pytest.param(*row, id=f"{row[0]}-{row[1]}sms") for row in SM90_SWEEP]
)


@pytest.fixture(autouse=True, scope="module")
def compiled(emulator_ready: None) -> Iterator[None]:  # noqa: F811
    """All kernels of the cases, compiled side by side before the first is run."""

    def run_all() -> None:
        for variant in VARIANTS:
            with variant.chosen():
                for case in (*CASES, BASE):
                    if variant.serves(round_bf16=case.round_bf16):
                        run_case(variant.backend, replace(case, out=False), make_inputs(case, "cpu"), fused=True)
        for variant in SM90_VARIANTS:
            with variant.chosen():
                for kernel in SM90_KERNELS:
                    case = Case(**kernel)
                    run_case(variant.backend, case, make_inputs(case, "cpu"), fused=True)

    compile_ahead(run_all)
    yield


def run(
    variant: Variant, case: Case, inputs: Inputs | None = None, emulator: Emulator | None = None, num_sms: int = 3
) -> Pair:
    """The fold on the emulator."""
    with variant.running(emulator, num_sms) as backend:
        return run_case(backend, case, inputs or make_inputs(case, "cpu"), fused=True)


def blocks_of(pair: Pair, num_columns: int) -> list[tuple[Tensor, Tensor]]:
    """Bytes of codes and scales, block by block of columns."""
    y, y_scale = (part.contiguous().view(torch.uint8) for part in pair)
    width = y_scale.shape[1] // -(-num_columns // 128)
    return list(zip(y.split(128, dim=1), y_scale.split(width, dim=1), strict=True))


# ------------------------------------------------------------------------------------------ agreement


@pytest.mark.parametrize("variant, case", SERVED)
def test_fold_agrees_with_the_formula(variant: Variant, case: Case) -> None:
    inputs = make_inputs(case, "cpu")
    pair = run(variant, case, inputs, Emulator(seed=case.seed))
    oracle.assert_quantized(*pair, expected(variant.backend, case, inputs), case.scale_fmt)


@pytest.mark.parametrize("variant", GEMM_VARIANTS, ids=str)
@pytest.mark.parametrize("residual_dtype", (None, torch.bfloat16, torch.float32), ids=str)
@pytest.mark.parametrize("out_dtype", (torch.bfloat16, torch.float32), ids=str)
def test_block_gemm_agrees_with_the_formula(
    variant: Variant, out_dtype: torch.dtype, residual_dtype: torch.dtype | None
) -> None:
    """Columns end in the first and in the second half of a tile; rows of the result lie at odd addresses."""
    if residual_dtype == torch.float32 and out_dtype == torch.bfloat16:
        pytest.skip("refused, see test_silu_fold_refusals")
    for num_tokens, k, num_columns in ((1, 16, 16), (37, 272, 400), (130, 144, 256)):
        inputs = make_inputs(Case(num_tokens, k, num_columns, layout="strided"), "cpu")
        x, w = (inputs.x, inputs.x_scale), inputs.half(1)
        acc = oracle.block_gemm(*x, *w, error=sum_error(variant.backend))
        residual = None
        if residual_dtype is not None:
            residual = torch.randn(num_tokens, num_columns, generator=torch.Generator().manual_seed(1))
            residual = (residual * acc.value.abs().mean()).to(residual_dtype)
        out = torch.full((num_tokens, num_columns + 3), math.nan, dtype=out_dtype)[:, 1 : num_columns + 1]
        with variant.running() as backend:
            assert block_gemm(backend, x, w, out_dtype, residual, out=out) is out
        oracle.assert_bounded(out, oracle.residual_sum(acc, residual, out_dtype))


@pytest.mark.parametrize("scale_fmt", formats.SCALE_FORMATS)
@pytest.mark.parametrize("activation", tuple(ACTIVATIONS))
def test_silu_mul_agrees_with_the_formula(activation: str, scale_fmt: str) -> None:
    """Also where nothing lies at a multiple of 16 bytes."""
    for num_tokens, num_columns, offset in ((1, 16, 0), (37, 400, 3), (130, 256, 8)):
        case = Case(num_tokens, 128, num_columns, activation, scale_fmt=scale_fmt)
        gate_up = make_gate_up(case, "cpu")
        wide = torch.full((num_tokens, 2 * num_columns + offset), math.nan, dtype=torch.bfloat16)
        wide[:, offset:] = gate_up
        with VARIANTS[0].running() as backend:
            pair = silu_mul(backend, wide[:, offset:], **case.options)
        oracle.assert_quantized(*pair, expected_of(case, gate_up), scale_fmt)


@pytest.mark.parametrize("variant", GEMM_VARIANTS, ids=str)
def test_two_launches_are_the_calls_that_they_name(variant: Variant) -> None:
    case = replace(BASE, activation="clamped", scale_fmt="ue8m0")
    inputs = make_inputs(case, "cpu")
    with variant.running() as backend:
        pair = run_case(backend, case, inputs, fused=False)
        assert_same_pair(pair, two_launches(backend, inputs, **case.options))
    v = expected(variant.backend, case, inputs, rounds_sums=True)
    oracle.assert_quantized(*pair, v, case.scale_fmt)


@EVERY_SM89_VARIANT
def test_cards_that_multiply_e4m3_by_mma_sync(variant: Variant) -> None:
    """The other way of tile/e4m3_mma.cuh, that of sm_89."""
    inputs = make_inputs(BASE, "cpu")
    pair = run(variant, BASE, inputs, Emulator(flags=(*DEFAULT_FLAGS, "-DDK_EMULATE_E4M3_MMA")))
    oracle.assert_quantized(*pair, expected(variant.backend, BASE, inputs))


# ------------------------------------------------------------------------------------------ what bits depend on


@pytest.mark.parametrize("algorithm", ("interleaved", "two_pass"))
def test_bits_do_not_depend_on_the_tile_or_the_algorithm(algorithm: str) -> None:
    wanted = run(SM89_VARIANTS[0], BASE)
    for variant in SM89_VARIANTS:
        if variant.algorithm == algorithm:
            assert_same_pair(run(variant, BASE), wanted)


def test_all_tiles_of_the_library_are_here() -> None:
    assert [variant.tile for variant in SM90_VARIANTS] == list(_C.silu_fold_choice("sm_90a", 1, 128, 2)["rounds"])


@BY_SM90_CASE
def test_bits_of_sm90_do_not_depend_on_the_tile(case: Case, num_sms: int) -> None:
    """And agree with the formula."""
    inputs = make_inputs(case, "cpu")
    first, *others = (run(variant, case, inputs, Emulator(seed=case.seed), num_sms) for variant in SM90_VARIANTS)
    oracle.assert_quantized(*first, expected(SM90_VARIANTS[0].backend, case, inputs), case.scale_fmt)
    for pair in others:
        assert_same_pair(pair, first)


@pytest.mark.parametrize("out_dtype", (torch.bfloat16, torch.float32), ids=str)
@pytest.mark.parametrize(
    "num_tokens, k, num_columns", [(65, 128, 80), (139, 640, 48), (260, 1152, 272), (65, 2176, 384)]
)
def test_bits_of_the_gemm_on_sm90_do_not_depend_on_the_tile(
    num_tokens: int, k: int, num_columns: int, out_dtype: torch.dtype
) -> None:
    """And agree with the formula; each tile with other SMs and another order of threads."""
    inputs = make_inputs(Case(num_tokens, k, num_columns, layout="columns"), "cpu")
    x, w = (inputs.x, inputs.x_scale), inputs.half(0)
    residual = torch.randn(num_tokens, num_columns, generator=torch.Generator().manual_seed(1)).bfloat16()
    products = []
    for seed, variant in enumerate(SM90_VARIANTS):
        with variant.running(Emulator(seed=seed), num_sms=(2, 3, 5)[seed % 3]) as backend:
            products.append(block_gemm(backend, x, w, out_dtype, residual))
    acc = oracle.block_gemm(*x, *w, error=sum_error(backend))
    oracle.assert_bounded(products[0], oracle.residual_sum(acc, residual, out_dtype))
    for product in products[1:]:
        assert torch.equal(product.view(torch.uint8), products[0].view(torch.uint8))


@EVERY_VARIANT
def test_bits_do_not_depend_on_sms_or_on_the_order_of_threads(variant: Variant) -> None:
    wanted = run(variant, BASE)
    for seed, num_sms in ((1, 1), (2, 2), (3, 132)):
        assert_same_pair(run(variant, BASE, emulator=Emulator(seed=seed), num_sms=num_sms), wanted)


@EVERY_VARIANT
def test_bits_do_not_depend_on_what_locals_held(variant: Variant) -> None:
    """Variables that nobody initialised would differ between the two builds; the second one is sanitized."""
    zeros = run(variant, BASE, emulator=Emulator(flags=("-O1", "-ftrivial-auto-var-init=zero")))
    assert_same_pair(run(variant, BASE, emulator=Emulator(flags=SANITIZED_FLAGS)), zeros)


@EVERY_VARIANT
def test_no_row_is_read_beyond_its_end(variant: Variant) -> None:
    """Inputs end at pages that fault, k in the middle of a block."""
    inputs = make_inputs(BASE, "cpu")
    guarded_inputs = Inputs(*(guarded(tensor) for tensor in vars(inputs).values()))
    assert_same_pair(run(variant, BASE, guarded_inputs), run(variant, BASE, inputs))


# ------------------------------------------------------------------------------------------ NaN and infinity


@EVERY_VARIANT
def test_nan_and_infinity_stay_in_their_token_and_block(variant: Variant) -> None:
    inputs = make_inputs(BASE, "cpu")
    clean = run(variant, BASE, inputs)
    spoiled = inputs.clone()
    spoiled.x.view(torch.uint8)[5, 300] = 0x7F  # a token
    spoiled.x_scale[40, 1] = math.inf
    spoiled.w.view(torch.uint8)[130, 399] = 0xFF  # a gate column of the second block
    spoiled.w_scale[-1, 0] = math.inf  # up columns of the last block
    pair = run(variant, BASE, spoiled)
    oracle.assert_quantized(*pair, expected(variant.backend, BASE, spoiled))
    sound = torch.ones(BASE.num_tokens, dtype=torch.bool)
    sound[[5, 40]] = False
    for index, (one, other) in enumerate(zip(*(blocks_of(p, BASE.num_columns) for p in (pair, clean)), strict=True)):
        same = [torch.equal(a[sound], b[sound]) for a, b in zip(one, other, strict=True)]
        assert same == [index == 0, index == 0]
