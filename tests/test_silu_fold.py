"""The FP8 prefill MLP: codes, scales and their products against the formula, and what must not change a bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import oracle
import pytest
import torch
from conftest import BACKENDS, Backend
from emulator import Emulator, build, installed
from mqa_cases import bits, word
from silu_cases import (
    ACTIVATIONS,
    SWEEP,
    Case,
    Inputs,
    Pair,
    assert_same_pair,
    block_gemm,
    exactly,
    expected,
    expected_of,
    fold,
    laid_out,
    make_gate_up,
    make_inputs,
    run_case,
    silu_mul,
    sum_error,
    two_launches,
)
from torch import Tensor

from deep_kernels import _C, formats

NAN, INF = math.nan, math.inf
by_scale = pytest.mark.parametrize("scale_fmt", formats.SCALE_FORMATS)
by_activation = pytest.mark.parametrize("activation", tuple(ACTIVATIONS))


def check(backend: Backend, case: Case, inputs: Inputs, pair: Pair, *, rounds_sums: bool = False) -> None:
    v = expected(backend, case, inputs, rounds_sums=rounds_sums)
    oracle.assert_quantized(*pair, v, case.scale_fmt)


def blocks_of(x: Tensor) -> Tensor:
    """Bytes [M, I] -> [M, blocks, 128] of whole blocks."""
    return x.contiguous().view(torch.uint8).cpu().unflatten(1, (-1, 128))


# ------------------------------------------------------------------------------------------ agreement


@pytest.mark.parametrize("case", SWEEP, ids=str)
def test_fold_agrees_with_the_formula(backend: Backend, case: Case) -> None:
    inputs = make_inputs(case, backend.device)
    for fused in (None, True):
        pair = run_case(backend, case, inputs, fused=fused)
        sums_may_be_rounded = fused is None and case.round_bf16 and backend.device != "cpu"
        check(backend, case, inputs, pair, rounds_sums=sums_may_be_rounded)


@pytest.mark.parametrize("case", [case for case in SWEEP if case.round_bf16], ids=str)
def test_two_launches_are_the_calls_that_they_name(backend: Backend, case: Case) -> None:
    inputs = make_inputs(case, backend.device)
    pair = run_case(backend, case, inputs, fused=False)
    assert_same_pair(pair, two_launches(backend, inputs, **case.options))
    check(backend, case, inputs, pair, rounds_sums=True)


@by_scale
@pytest.mark.parametrize(
    "activation", ("silu", "clamped", "gelu")
)  # an offset may cancel up, and then nothing is close
def test_fold_and_two_launches_are_close(backend: Backend, activation: str, scale_fmt: str) -> None:
    """They differ where the sums are rounded to bfloat16, which moves a value by far less than a code."""
    case = Case(num_tokens=129, num_columns=384, activation=activation, scale_fmt=scale_fmt)
    inputs = make_inputs(case, backend.device)
    fused, apart = (oracle.Quantized.of(*run_case(backend, case, inputs, fused=one)) for one in (True, False))
    same_scale = fused.scale == apart.scale
    assert (fused.scale / apart.scale - 1).abs()[~same_scale].le(2.0**-6 if scale_fmt == "fp32" else 1.0).all()
    assert same_scale.double().mean() > (0.98 if scale_fmt == "ue8m0" else 0.1)
    same_block = same_scale.repeat_interleave(128, dim=1)
    difference = (fused.order - apart.order).abs()[same_block]
    assert difference.max() <= 2 and (difference > 0).double().mean() < 0.2


@pytest.mark.parametrize("num_tokens", (0, 1, 31, 127, 129, 192))
@pytest.mark.parametrize("out_dtype", (torch.bfloat16, torch.float32), ids=word)
@pytest.mark.parametrize("residual_dtype", (None, torch.bfloat16, torch.float32), ids=str)
def test_block_gemm_agrees_with_the_formula(
    backend: Backend, num_tokens: int, out_dtype: torch.dtype, residual_dtype: torch.dtype | None
) -> None:
    if residual_dtype == torch.float32 and out_dtype == torch.bfloat16:
        pytest.skip("refused, see test_silu_fold_refusals")
    for k, num_columns, layout in ((144, 272, "rows"), (512, 128, "columns"), (400, 400, "strided")):
        case = Case(num_tokens, k, num_columns, layout=layout, seed=num_tokens)
        inputs = make_inputs(case, backend.device)
        w, w_scale = inputs.half(1)
        residual = None
        if residual_dtype is not None:
            acc = oracle.block_gemm(inputs.x, inputs.x_scale, w, w_scale, error=0.0)
            residual = (acc.value.abs().mean() * torch.randn(num_tokens, num_columns)).to(residual_dtype)
            residual = residual.to(backend.device)
        product = block_gemm(backend, (inputs.x, inputs.x_scale), (w, w_scale), out_dtype, residual)
        assert product.dtype == out_dtype and product.shape == (num_tokens, num_columns)
        acc = oracle.block_gemm(inputs.x, inputs.x_scale, w, w_scale, error=sum_error(backend))
        oracle.assert_bounded(product, oracle.residual_sum(acc, residual, out_dtype))


def test_residual_is_added_to_the_rounded_sum(backend: Backend) -> None:
    """Bit for bit: bfloat16 of (bfloat16 of the sum, plus the residual); in float32 nothing is rounded before."""
    inputs = make_inputs(Case(num_tokens=65, k=512, num_columns=256), backend.device)
    x, w = (inputs.x, inputs.x_scale), inputs.half(0)
    residual = torch.randn(65, 256, generator=torch.Generator().manual_seed(1)).to(backend.device)
    exact = block_gemm(backend, x, w, torch.float32)
    rounded = block_gemm(backend, x, w)
    assert torch.equal(bits(rounded), bits(exact.bfloat16()))
    for added in (residual, residual.bfloat16()):
        assert torch.equal(block_gemm(backend, x, w, torch.float32, added), exact + added.float())
    wanted = (rounded.float() + residual.bfloat16().float()).bfloat16()
    found = block_gemm(backend, x, w, residual=residual.bfloat16())
    assert torch.equal(bits(found), bits(wanted))
    assert not torch.equal(bits(found), bits((exact + residual.bfloat16().float()).bfloat16()))


@by_scale
@by_activation
@pytest.mark.parametrize("num_tokens", (0, 1, 31, 192))
def test_silu_mul_agrees_with_the_formula(backend: Backend, num_tokens: int, activation: str, scale_fmt: str) -> None:
    for num_columns in (16, 128, 400):
        case = Case(num_tokens, 128, num_columns, activation, scale_fmt=scale_fmt, seed=num_columns)
        gate_up = make_gate_up(case, backend.device)
        wide = torch.full((num_tokens, 2 * num_columns + 8), NAN, dtype=torch.bfloat16, device=backend.device)
        wide[:, 8:] = gate_up
        pair = silu_mul(backend, wide[:, 8:], **case.options)
        oracle.assert_quantized(*pair, expected_of(case, gate_up), scale_fmt)


def test_every_activation_over_all_gates(backend: Backend) -> None:
    """All bfloat16 numbers as gates, each in a block of its own, so that none hides behind a larger one."""
    gates = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    gate_up = torch.zeros(len(gates), 32, dtype=torch.bfloat16)
    gate_up[:, 0], gate_up[:, 16] = gates, 1.0
    for activation in ACTIVATIONS:
        case = Case(activation=activation)
        pair = silu_mul(backend, gate_up.to(backend.device), **case.options)
        oracle.assert_quantized(*pair, expected_of(case, gate_up))


def one_value_per_row(gate: Tensor, up: Tensor) -> Inputs:
    """Whose sums are exactly gate and up, e4m3 values [M], in column 0, and 0 in 15 others."""
    x, w = torch.zeros(len(gate), 16), torch.zeros(32, 16)
    x[:, 0], x[:, 1] = gate, up
    w[0, 0] = w[16, 1] = 1.0
    return Inputs(formats.float_to_e4m3(x), torch.ones(len(gate), 1), formats.float_to_e4m3(w), torch.ones(2, 1))


@pytest.mark.parametrize("round_bf16", (True, False))
@pytest.mark.parametrize("activation", ("silu", "gelu_tanh"))
def test_values_are_rounded_where_the_formula_says(backend: Backend, activation: str, round_bf16: bool) -> None:
    """By the bits of scales, which are v / 448."""
    gate, up = (torch.arange(225) // 15 + 1.0) / 4, torch.arange(225) % 15 + 1.0
    inputs = one_value_per_row(gate, up).to(backend.device)
    _, y_scale = fold(backend, inputs, activation=activation, round_bf16=round_bf16, fused=True)
    g, u = gate.double(), up.double()
    s = torch.nn.functional.silu(g) if activation == "silu" else torch.nn.functional.gelu(g, approximate="tanh")
    values = {True: (s.bfloat16().double() * u).bfloat16().double(), False: s * u}
    # A float32 that is a unit off comes out of bfloat16 as another number, but rarely.
    right = (y_scale.cpu()[:, 0].double() / (values[round_bf16] / 448) - 1).abs() < 2.0**-20
    assert right.double().mean() > 0.97
    assert ((values[True] / values[False] - 1).abs() > 2.0**-16).double().mean() > 0.7, "they can be told apart"


# ------------------------------------------------------------------------------------------ special values


def unlike(pair: Pair, wanted: Pair) -> Tensor:
    """bool [M, blocks]: where a code or the scale of a block has other bits."""
    codes = (blocks_of(pair[0]) != blocks_of(wanted[0])).any(-1)
    scales = pair[1].contiguous().view(torch.uint8).cpu() != wanted[1].contiguous().view(torch.uint8).cpu()
    return codes | scales.unflatten(1, (codes.shape[1], -1)).any(-1)


SPECIALS = {"nan": NAN, "inf": INF, "-inf": -INF, "1e30": 1e30, "-1e30": -1e30}


@by_scale
@pytest.mark.parametrize("half", (0, 1), ids=("gate", "up"))
@pytest.mark.parametrize("value", SPECIALS.values(), ids=SPECIALS)
def test_a_special_value_stays_in_its_block(backend: Backend, value: float, half: int, scale_fmt: str) -> None:
    for activation in ACTIVATIONS:
        case = Case(6, 128, 384, activation, scale_fmt=scale_fmt)
        gate_up = make_gate_up(case, backend.device)
        clean = silu_mul(backend, gate_up, **case.options)
        gate_up[2, 384 * half + 200] = value
        gate_up[2, 384 * (1 - half) + 200] = 1.0
        pair = silu_mul(backend, gate_up, **case.options)
        oracle.assert_quantized(*pair, expected_of(case, gate_up), scale_fmt)
        touched = torch.zeros(6, 3, dtype=torch.bool)
        touched[2, 1] = True
        assert not (unlike(pair, clean) & ~touched).any()


@by_scale
def test_blocks_of_zeros(backend: Backend, scale_fmt: str) -> None:
    gate_up = torch.zeros(3, 2 * 272, dtype=torch.bfloat16, device=backend.device)
    gate_up[1, :128], gate_up[1, 272:400] = 2.0, 3.0
    gate_up[2, 272:] = -0.0
    y, y_scale = silu_mul(backend, gate_up, scale_fmt=scale_fmt)
    zero_scale = torch.tensor(1e-12).double() if scale_fmt == "fp32" else torch.tensor(2.0**-39).double()
    scale = oracle.Quantized.of(y, y_scale).scale
    is_zero = torch.ones(3, 3, dtype=torch.bool)
    is_zero[1, 0] = False
    assert (scale[is_zero] == zero_scale).all() and scale[1, 0] > 0.01
    values = y.float().cpu()
    assert (values[1, :128] == values[1, 0]).all() and values[1, 0] > 200
    values[1, :128] = 0
    assert (values == 0).all()


def test_scales_at_powers_of_two(backend: Backend) -> None:
    """An amax of exactly 448 * 2^k fits under 2^k; the next number does not. silu(64) is 64 in float32."""
    up = torch.tensor([[7 * 2.0**k, 7 * 2.0**k + 2.0 ** (k - 5)] for k in range(-20, 21)]).flatten()
    gate_up = torch.zeros(len(up), 32, dtype=torch.bfloat16)
    gate_up[:, 0], gate_up[:, 16] = 64.0, up
    y, y_scale = silu_mul(backend, gate_up.to(backend.device), scale_fmt="ue8m0")
    exponents = y_scale.cpu().view(torch.uint8).long().flatten() - 127
    assert exponents.tolist() == [k + above for k in range(-20, 21) for above in (0, 1)]
    assert (y.cpu().float()[::2, 0] == 448).all()


POISONS: dict[str, tuple[Callable[[Inputs], None], Callable[[Tensor], None]]] = {}


def poison(touch: Callable[[Tensor], None]) -> Callable[[Callable[[Inputs], None]], None]:
    """Registers what spoils an input, with the blocks [M, 3] that it may touch."""

    def register(spoil: Callable[[Inputs], None]) -> None:
        POISONS[spoil.__name__] = (spoil, touch)

    return register


def row(blocks: Tensor) -> None:
    blocks[5] = True


def block(blocks: Tensor) -> None:
    blocks[:, 1] = True


@poison(row)
def nan_in_x(inputs: Inputs) -> None:
    inputs.x.view(torch.uint8)[5, 300] = 0x7F


@poison(block)
def nan_in_gate_rows(inputs: Inputs) -> None:
    inputs.w.view(torch.uint8)[130, 3] = 0xFF


@poison(block)
def nan_in_up_rows(inputs: Inputs) -> None:
    inputs.w.view(torch.uint8)[384 + 255, 3] = 0x7F


@poison(row)
def nan_in_x_scale(inputs: Inputs) -> None:
    inputs.x_scale[5, 2] = NAN


@poison(row)
def inf_in_x_scale(inputs: Inputs) -> None:
    inputs.x_scale[5, 0] = INF


@poison(row)
def large_x_scale(inputs: Inputs) -> None:
    inputs.x_scale[5] = 1e30


@poison(row)
def zero_x_scale(inputs: Inputs) -> None:
    inputs.x_scale[5] = 0.0


@poison(block)
def nan_in_gate_scale(inputs: Inputs) -> None:
    inputs.w_scale[1, 0] = NAN


@poison(block)
def inf_in_up_scale(inputs: Inputs) -> None:
    inputs.w_scale[3 + 1, 2] = INF


@by_scale
@pytest.mark.parametrize("fused", (True, False), ids=("fused", "two"))
@pytest.mark.parametrize("name", POISONS)
def test_special_inputs_stay_in_their_rows_and_blocks(backend: Backend, name: str, fused: bool, scale_fmt: str) -> None:
    spoil, touch = POISONS[name]
    case = Case(70, 400, 384, scale_fmt=scale_fmt)
    clean = make_inputs(case, backend.device)
    wanted = fold(backend, clean, fused=fused, **case.options)
    spoilt = clean.clone()
    spoil(spoilt)
    pair = fold(backend, spoilt, fused=fused, **case.options)
    touched = torch.zeros(70, 3, dtype=torch.bool)
    touch(touched)
    differs = unlike(pair, wanted)
    assert not (differs & ~touched).any()
    assert differs[touched].all(), "the poison was seen"
    check(backend, case, spoilt, pair, rounds_sums=not fused)


# ------------------------------------------------------------------------------------------ same bits


@by_scale
def test_rows_do_not_depend_on_others(backend: Backend, scale_fmt: str) -> None:
    case = Case(300, 528, 400, scale_fmt=scale_fmt)
    inputs = make_inputs(case, backend.device)
    for fused in (True, False):
        whole = fold(backend, inputs, fused=fused, **case.options)
        for part in (slice(0, 1), slice(299, 300), slice(3, 130), slice(64, 300)):
            alone = fold(backend, inputs.rows(part), fused=fused, **case.options)
            assert_same_pair(alone, (whole[0][part], whole[1][part]))


@pytest.mark.parametrize("layout", ("columns", "strided"))
def test_strides_change_no_bit(backend: Backend, layout: str) -> None:
    case = Case(130, 528, 400)
    inputs = make_inputs(case, backend.device)
    other = laid_out(inputs, layout)
    assert other.x_scale.stride() != inputs.x_scale.stride() and other.w_scale.stride() != inputs.w_scale.stride()
    for fused in (True, False):
        assert_same_pair(fold(backend, other, fused=fused), fold(backend, inputs, fused=fused))
    x, w = (inputs.x, inputs.x_scale), inputs.half(1)
    residual = torch.randn(130, 400).bfloat16().to(backend.device)
    wanted = block_gemm(backend, x, w, residual=residual)
    wide = torch.full((130, 416), NAN, dtype=torch.bfloat16, device=backend.device)
    wide[:, 8:408] = residual
    out = torch.full((132, 424), 7.0, dtype=torch.bfloat16, device=backend.device)
    view = out[1:131, 16:416]
    found = block_gemm(backend, (other.x, other.x_scale), other.half(1), residual=wide[:, 8:408], out=view)
    assert found is view and torch.equal(bits(found), bits(wanted))
    view.fill_(7.0)
    assert (out == 7.0).all(), "written beside the result"


TILED = [backend for backend in BACKENDS if backend.arch]
TILED += [Backend(f"emulator-{arch}", "cpu", f"emulator:{arch}") for arch in ("sm90", "sm89")]


@pytest.fixture(params=TILED, ids=lambda backend: backend.name)
def tiled(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """Every backend whose kernels come in several tiles; of the emulated ones the kernels run on the CPU."""
    backend = request.param
    if reason := backend.missing():
        pytest.skip(reason)
    if backend.device == "cuda":
        yield backend
        return
    try:
        build.compiler()
    except build.CompilerMissing as missing:
        pytest.skip(str(missing))
    with installed(Emulator()):
        yield backend


@pytest.mark.parametrize(
    "case",
    (
        Case(1, 128, 48),
        Case(70, 400, 272, "gelu", scale_fmt="ue8m0", layout="columns"),
        Case(139, 1152, 144, layout="strided", w_scale_dtype=torch.bfloat16, out=True),
        Case(389, 256, 256, "oss"),
    ),
    ids=str,
)
def test_bits_do_not_depend_on_the_tile(tiled: Backend, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """With each of the words of DEEP_KERNELS_SILU_TILE, beside what is chosen without; of the GEMM too."""
    inputs = make_inputs(case, tiled.device)
    x, w = (inputs.x, inputs.x_scale), inputs.half(1)
    monkeypatch.delenv("DEEP_KERNELS_SILU_TILE", raising=False)
    pair, product = run_case(tiled, case, inputs, fused=True), block_gemm(tiled, x, w)
    check(tiled, case, inputs, pair)
    for tile in _C.silu_fold_choice(str(tiled.arch).removeprefix("emulator:"), 1, 128, 132)["rounds"]:
        monkeypatch.setenv("DEEP_KERNELS_SILU_TILE", tile)
        assert_same_pair(run_case(tiled, case, inputs, fused=True), pair)
        assert torch.equal(bits(block_gemm(tiled, x, w)), bits(product))


def test_scales_of_up_pass_through(backend: Backend) -> None:
    """The result is linear in up: 2^20 times its scales are 2^20 times y_scale, and the same codes."""
    case = Case(33, 256, 272)
    inputs = make_inputs(case, backend.device)
    larger = inputs.clone()
    larger.w_scale[3:] *= 2.0**20
    y, y_scale = fold(backend, inputs, fused=True)
    assert_same_pair(fold(backend, larger, fused=True), (y, y_scale * 2.0**20))


# ------------------------------------------------------------------------------------------ mistakes are noticed


def swapped_halves(x: Tensor) -> Tensor:
    return torch.cat(x.contiguous().view(torch.uint8).chunk(2)[::-1]).view(x.dtype)


INPUT_MISTAKES: dict[str, Callable[[Inputs], Inputs]] = {
    "gate and up swapped": lambda i: replace(i, w=swapped_halves(i.w), w_scale=swapped_halves(i.w_scale)),
    "rows of w swapped, scales not": lambda i: replace(i, w=swapped_halves(i.w)),
    "scales of w swapped, rows not": lambda i: replace(i, w_scale=swapped_halves(i.w_scale)),
    "gate's scales for up": lambda i: replace(i, w_scale=torch.cat((i.w_scale[:3], i.w_scale[:3]))),
    "w_scale one row on": lambda i: replace(i, w_scale=i.w_scale.roll(-1, 0)),
    "w_scale one block of k on": lambda i: replace(i, w_scale=i.w_scale.roll(-1, 1)),
    "x_scale one row on": lambda i: replace(i, x_scale=i.x_scale.roll(-1, 0)),
    "x_scale one block of k on": lambda i: replace(i, x_scale=i.x_scale.roll(-1, 1)),
    "a row of x_scale dropped": lambda i: replace(
        i, x_scale=torch.cat((i.x_scale[:20], i.x_scale[19:20], i.x_scale[21:]))
    ),
    "x one row on": lambda i: replace(i, x=i.x.view(torch.uint8).roll(-1, 0).view(i.x.dtype)),
    "the tail of k dropped": lambda i: replace(
        i, x=torch.cat((i.x.view(torch.uint8)[:, :256], i.x.view(torch.uint8)[:, 256:] * 0), dim=1).view(i.x.dtype)
    ),
}
OUTPUT_MISTAKES: dict[str, Callable[[Tensor, Tensor], Pair]] = {
    "y_scale one block on": lambda y, s: (y, s.roll(1, 1)),
    "y_scale one row on": lambda y, s: (y, s.roll(1, 0)),
    "a row of y_scale dropped": lambda y, s: (y, torch.cat((s[:20], s[19:20], s[21:]))),
    "y_scale unwritten": lambda y, s: (y, torch.where(torch.arange(s.numel()).view(s.shape) == 50, 0.0, s)),
    "y_scale inverted": lambda y, s: (y, 1 / s),
    "y_scale a little too large": lambda y, s: (y, s * 1.02),
    "y one column on": lambda y, s: (y.view(torch.uint8).roll(1, 1).view(y.dtype), s),
    "y one row on": lambda y, s: (y.view(torch.uint8).roll(1, 0).view(y.dtype), s),
    "one code off by two": lambda y, s: (
        (y.view(torch.uint8) - 2 * (torch.arange(y.numel()) == y.float().argmax()).view(y.shape)).view(y.dtype), s
    ),
    "a NaN": lambda y, s: (
        y.view(torch.uint8).where(torch.arange(y.numel()).view(y.shape) != 999, 0x7F).view(y.dtype), s
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", (*INPUT_MISTAKES, *OUTPUT_MISTAKES))
def test_mistakes_are_noticed(backend: Backend, name: str) -> None:
    """What a wrong kernel would give: each is refused by the comparison that the tests above rely on."""
    case = Case(37, 272, 272)
    inputs = make_inputs(case, backend.device)
    check(backend, case, inputs, fold(backend, inputs, fused=True))
    if name in INPUT_MISTAKES:
        wrong = fold(backend, INPUT_MISTAKES[name](inputs), fused=True)
    else:
        wrong = OUTPUT_MISTAKES[name](*(part.cpu() for part in fold(backend, inputs, fused=True)))
    with pytest.raises(AssertionError):
        check(backend, case, inputs, wrong)


@pytest.mark.parametrize("name", ("scales", "codes"))
def test_each_comparison_can_fail_alone(name: str) -> None:
    """Right products of wrong scales and codes; right scales with one wrong code."""
    v = exactly(torch.randn(5, 256, generator=torch.Generator().manual_seed(2)))
    y, y_scale = formats.quantize_fp8_block128(v.value.float())
    v = replace(v, error=2 * oracle.FLOAT32_ERROR * v.value.abs())
    oracle.assert_quantized(y, y_scale, v)
    if name == "scales":  # of half the codes
        y, y_scale = formats.float_to_e4m3(y.float() / 2), y_scale * 2
    else:
        y = (y.view(torch.uint8) ^ (torch.arange(256) == 7)).view(y.dtype)
    with pytest.raises(AssertionError, match=f"^{name}: "):
        oracle.assert_quantized(y, y_scale, v)
