"""MX block exponents of MQA logits: rows of any spread beside each other, and sums that leave float32."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import oracle
import pytest
import torch
from conftest import Backend
from mqa_cases import (
    Case,
    Inputs,
    agreement_limit,
    assert_same_bits,
    call,
    expected,
    is_refused,
    make_inputs,
    metadata,
    unpack_scale,
)
from torch import Tensor

MX = ("mxfp8", "mxfp4")
SPREADS = (0, 4, 8, 9, 10, 11, 12, 16, 40)
BIAS, NAN_BYTE = 127, 0xFF

by_format = pytest.mark.parametrize("format", MX)


@pytest.fixture
def base(backend: Backend, format: str) -> Inputs:
    """Inputs whose exponents a test sets itself; the test ends here where the backend lacks the format."""
    case = Case(num_q=20, num_kv=330, num_heads=8, head_dim=128, format=format, windows="full", seed=5)
    inputs = make_inputs(case, backend.device)
    if is_refused(backend, inputs):
        pytest.skip(f"{format} is refused on {backend.name}, in the words of supported()")
    return inputs


def packed(codes: Tensor, device: str) -> Tensor:
    """Exponent bytes [.., 4] -> int32 [..]."""
    return codes.to(torch.uint8).contiguous().view(torch.int32).squeeze(-1).to(device)


def with_exponents(inputs: Inputs, q: Tensor, kv: Tensor) -> Inputs:
    """Exponents (0 is 1.0) of the blocks of q, broadcast to [num_q, num_heads, 4], and of kv, to [num_kv, 4]."""
    num_q, num_heads = inputs.weights.shape
    return replace(
        inputs,
        q_scale=packed((q + BIAS).expand(num_q, num_heads, 4), inputs.q.device.type),
        kv_scale=packed((kv + BIAS).expand(inputs.kv.shape[0], 4), inputs.q.device.type),
    )


def check_rows(backend: Backend, inputs: Inputs, **options: Any) -> Tensor:
    """Compares with the formula row by row, and the columns of each in four parts: the large hide no small ones."""
    logits = call(backend, inputs, **options)
    reference, inside = expected(inputs)
    reference = reference.float().double()
    limit = agreement_limit(backend, torch.float32, torch.float32)
    for row in range(logits.shape[0]):
        for part in range(4):
            some = (slice(row, row + 1), slice(part, None, 4))
            oracle.assert_agrees(logits[some], reference[some], inside[some], limit)
    return logits


# ------------------------------------------------------------------------------------------ spreads


@by_format
@pytest.mark.parametrize("spread", SPREADS)
def test_rows_whose_large_blocks_meet_small_ones(backend: Backend, base: Inputs, format: str, spread: int) -> None:
    """Opposite rows: every product is one of a large and a small block, so that what a small one loses counts most."""
    high_low = torch.tensor([0, -spread, 0, -spread])
    check_rows(backend, with_exponents(base, high_low, high_low.flip(0)))
    check_rows(backend, with_exponents(base, high_low.flip(0), high_low))


@by_format
@pytest.mark.parametrize("spread", SPREADS)
def test_one_side_spreads(backend: Backend, base: Inputs, format: str, spread: int) -> None:
    """One small block among large ones and one large among small ones, of q alone and of kv alone."""
    none = torch.zeros(4, dtype=torch.int64)
    for exponents in (torch.tensor([0, 0, -spread, 0]), torch.tensor([-spread, -spread, -spread, 0])):
        check_rows(backend, with_exponents(base, exponents, none))
        check_rows(backend, with_exponents(base, none, exponents))


@by_format
def test_rows_of_every_spread_beside_each_other(backend: Backend, base: Inputs, format: str) -> None:
    """Neighbouring tokens, heads and kv rows differ in spread, in where it lies and in their largest exponent."""
    generator = torch.Generator().manual_seed(11)

    def exponents(*size: int) -> Tensor:
        spread = torch.tensor(SPREADS)[torch.randint(len(SPREADS), size, generator=generator)]
        share = torch.rand(*size, 4, generator=generator)
        share = (share - share.amin(-1, keepdim=True)) / (share.amax(-1, keepdim=True) - share.amin(-1, keepdim=True))
        shift = torch.randint(-6, 7, size, generator=generator)
        return (share * spread[..., None]).round().long() + shift[..., None]

    q, kv = exponents(20, 8), exponents(330)
    assert set((q.amax(-1) - q.amin(-1)).unique().tolist()) == set(SPREADS)
    inputs = with_exponents(base, q, kv)
    limit = agreement_limit(backend, torch.float32, torch.float32)
    reference, inside = expected(inputs)
    for schedule in (None, metadata(backend, inputs)):
        logits = call(backend, inputs, schedule=schedule)
        for row in range(20):
            one = slice(row, row + 1)
            oracle.assert_agrees(logits[one], reference[one], inside[one], limit)


@by_format
def test_spread_rows_change_no_bit_of_others(backend: Backend, base: Inputs, format: str) -> None:
    """Few and many, in q and in kv; and twenty launches give the same bits."""
    wanted = call(backend, base).cpu()
    wide = torch.tensor([20, 0, -20, 3]) + BIAS
    for q_rows, kv_rows in (([7], []), ([], [100]), ([0, 19], [0, 1, 329]), (list(range(0, 20, 2)), list(range(150)))):
        q_scale, kv_scale = base.q_scale.clone(), base.kv_scale.clone()
        q_scale[q_rows, 3] = packed(wide, backend.device)
        kv_scale[kv_rows] = packed(wide, backend.device)
        inputs = replace(base, q_scale=q_scale, kv_scale=kv_scale)
        logits = call(backend, inputs)
        reference, inside = expected(inputs)
        oracle.assert_agrees(logits, reference, inside, agreement_limit(backend, torch.float32, torch.float32))
        others = torch.ones(20, 330, dtype=torch.bool)
        others[q_rows] = False
        others[:, kv_rows] = False
        assert_same_bits(logits.cpu(), wanted, others)
        for _ in range(19):
            assert_same_bits(call(backend, inputs), logits)


@by_format
def test_spread_rows_keep_their_bits_in_every_mode(backend: Backend, base: Inputs, format: str) -> None:
    """Batch, schedule, cleaning and compression, with rows of all spreads."""
    kv = torch.tensor(SPREADS)[torch.arange(330) % len(SPREADS)][:, None] * torch.tensor([0, -1, 0, -1])
    q = torch.tensor(SPREADS)[torch.arange(20) % len(SPREADS)][:, None, None] * torch.tensor([-1, 0, 0, 0])
    start = torch.arange(20, dtype=torch.int32, device=backend.device) * 9
    inputs = replace(with_exponents(base, q, kv), start=start, end=start + 140)
    wanted = call(backend, inputs)
    _, inside = expected(inputs)
    assert_same_bits(call(backend, inputs, schedule=metadata(backend, inputs)), wanted)
    assert_same_bits(call(backend, inputs, clean=False), wanted, inside)
    for rows in (slice(0, 1), slice(7, 13), slice(19, 20)):
        assert_same_bits(call(backend, inputs.rows(rows)), wanted[rows])
    compressed = call(backend, inputs, width=140).cpu()
    picked = wanted.cpu().gather(1, torch.arange(140) + start.cpu().long()[:, None])
    assert_same_bits(compressed, picked)


# ------------------------------------------------------------------------------------------ the ends of float32


def positive(inputs: Inputs) -> Inputs:
    """Without signs: no sum cancels, so that every logit is right to a few units of its own last place."""
    mask = 0x7F if inputs.format == "mxfp8" else 0x77
    return replace(
        inputs,
        q=(inputs.q.view(torch.uint8) & mask).view(inputs.q.dtype),
        kv=(inputs.kv.view(torch.uint8) & mask).view(inputs.kv.dtype),
        weights=inputs.weights.abs(),
    )


def assert_close_everywhere(backend: Backend, inputs: Inputs) -> None:
    """Each logit by itself, to what the float64 formula rounds to; subnormal ones may also be 0 on a card."""
    logits = call(backend, inputs).cpu().double()
    reference, inside = expected(inputs)
    rounded = reference.float().double()
    oracle.assert_special_values(logits, rounded, inside)
    finite = inside & rounded.isfinite()
    rtol, atol = (1e-6, 2.0**-149) if backend.device == "cpu" else (2e-3, 2.0**-126)
    error = (logits - rounded).abs()
    bad = finite & (error > rtol * rounded.abs() + atol)
    assert not bad.any(), f"{int(bad.sum())} logits, the first at {bad.nonzero()[0].tolist()}"


ENDS = (0, 1, 2, 30, 63, 64, 100, 126, 127, 128, 150, 190, 220, 252, 253, 254)


@by_format
def test_sums_of_exponents_that_leave_float32(backend: Backend, base: Inputs, format: str) -> None:
    """Every pair of row exponents: products from 2^-254 to 2^254 come out as 0, small, large and inf."""
    ends = torch.tensor(ENDS) - BIAS
    inputs = with_exponents(base, ends[torch.arange(20) % 16][:, None, None], ends[torch.arange(330) % 16][:, None])
    reference, _ = expected(positive(inputs))
    rounded = reference.float()
    assert rounded.isinf().any() and (rounded == 0).any() and (rounded > 1e30).any() and (rounded < 1e-30).any()
    assert_close_everywhere(backend, positive(inputs))


@by_format
def test_blocks_from_end_to_end_in_one_row(backend: Backend, base: Inputs, format: str) -> None:
    """Spreads of up to 254 between the blocks of a row, and large blocks that meet tiny ones."""
    ends = torch.tensor(ENDS) - BIAS
    order = torch.arange(4)
    q = ends[(torch.arange(20)[:, None] + 5 * order) % 16][:, None]
    kv = ends[(torch.arange(330)[:, None] // 16 + torch.arange(330)[:, None] * 3 - 7 * order) % 16]
    assert_close_everywhere(backend, positive(with_exponents(base, q, kv)))


@by_format
def test_a_tiny_row_among_huge_ones(backend: Backend, base: Inputs, format: str) -> None:
    """Its logits are ordinary numbers where huge weights or the other side bring it back."""
    q = torch.zeros(20, 1, 4, dtype=torch.int64)
    kv = torch.zeros(330, 4, dtype=torch.int64)
    q[::3], q[1::3] = -120, 110
    kv[::5], kv[1::5], kv[2::5] = 118, -119, 60
    assert_close_everywhere(backend, positive(with_exponents(base, q, kv)))


@by_format
def test_signs_at_the_ends(backend: Backend, base: Inputs, format: str) -> None:
    """With signs: a sum of heads that is huge both ways is finite in the formula, and inf or -inf when rounded."""
    huge = torch.tensor([100, 101, 99, 100])
    inputs = with_exponents(base, huge, huge)
    reference, inside = expected(inputs)
    rounded = reference.float()
    assert rounded.isposinf().any() and rounded.isneginf().any() and not rounded.isnan().any()
    oracle.assert_special_values(call(backend, inputs), rounded.double(), inside)


# ------------------------------------------------------------------------------------------ special bytes


@by_format
@pytest.mark.parametrize("form", ("int32", "e8m0"))
@pytest.mark.parametrize("head_dim", (32, 64, 128))
def test_a_nan_byte_of_any_block(backend: Backend, format: str, head_dim: int, form: str) -> None:
    """The logits of its row or column are NaN, also where its block is all zero; no other bit changes."""
    case = Case(num_q=11, num_kv=270, num_heads=8, head_dim=head_dim, format=format, windows="full", seed=3)
    inputs = make_inputs(case, backend.device)
    if is_refused(backend, inputs):
        return
    if form == "e8m0":
        inputs = replace(
            inputs,
            q_scale=unpack_scale(inputs.q_scale, head_dim),
            kv_scale=unpack_scale(inputs.kv_scale, head_dim),
        )
    wanted = call(backend, inputs)
    per_block = 32 if format == "mxfp8" else 16
    for block in range(head_dim // 32):
        zeros = inputs.kv.view(torch.uint8).clone()
        zeros[200, block * per_block : (block + 1) * per_block] = 0
        for kv in (inputs.kv, zeros.view(inputs.kv.dtype)):
            changed = replace(inputs, kv=kv, kv_scale=inputs.kv_scale.clone(), q_scale=inputs.q_scale.clone())
            changed.kv_scale.view(torch.uint8).view(270, -1)[200, block] = NAN_BYTE
            changed.q_scale.view(torch.uint8).view(11, 8, -1)[6, 5, block] = NAN_BYTE
            logits = call(backend, changed).cpu()
            hit = torch.zeros(11, 270, dtype=torch.bool)
            hit[6], hit[:, 200] = True, True
            assert logits[hit].isnan().all()
            assert_same_bits(logits, wanted.cpu(), ~hit)


@by_format
@pytest.mark.parametrize("exponent", (-100, -60, -20))
def test_zero_blocks_of_exponent_0_among_tiny_ones(backend: Backend, base: Inputs, format: str, exponent: int) -> None:
    """What quantizers store for zeros: it is no large block, and the tiny ones beside it lose nothing to it."""
    per_block = 32 if format == "mxfp8" else 16
    kv, q = base.kv.view(torch.uint8).clone(), base.q.view(torch.uint8).clone()
    kv_exponents = torch.full((330, 4), exponent)
    q_exponents = torch.full((20, 1, 4), exponent)
    for block in range(4):
        rows = slice(block, None, 5)  # every fifth row has none
        kv[rows, block * per_block : (block + 1) * per_block] = 0
        kv_exponents[rows, block] = 0
        q[rows, :, block * per_block : (block + 1) * per_block] = 0
        q_exponents[rows, :, block] = 0
    tiny_kv = replace(base, kv=kv.view(base.kv.dtype))
    check_rows(backend, with_exponents(tiny_kv, torch.zeros(4, dtype=torch.int64), kv_exponents))
    if exponent > -100:  # with both tiny, logits are subnormal
        both = replace(tiny_kv, q=q.view(base.q.dtype))
        check_rows(backend, with_exponents(both, q_exponents, kv_exponents))


@by_format
@pytest.mark.parametrize("head_dim", (32, 64))
def test_unused_bytes_make_no_row_wide(backend: Backend, format: str, head_dim: int) -> None:
    """Whatever they hold: NaN, 0, and exponents that would be far from the others."""
    case = Case(num_q=11, num_kv=270, num_heads=8, head_dim=head_dim, format=format, seed=3)
    inputs = make_inputs(case, backend.device)
    if is_refused(backend, inputs):
        return
    wanted = call(backend, inputs)
    for byte in (0, 1, BIAS, 254, NAN_BYTE):
        changed = replace(inputs, kv_scale=inputs.kv_scale.clone(), q_scale=inputs.q_scale.clone())
        for scale in (changed.kv_scale, changed.q_scale):
            scale.view(torch.uint8).view(*scale.shape, 4)[..., head_dim // 32 :] = byte
        assert_same_bits(call(backend, changed), wanted)


@by_format
@pytest.mark.parametrize("exponent", [100, 121, 126, 127])
def test_zero_weights_of_dot_products_that_leave_float32(
    backend: Backend, base: Inputs, format: str, exponent: int
) -> None:
    inputs = with_exponents(base, torch.full((4,), exponent), torch.tensor([[27], [0]]).repeat(165, 1).expand(330, 4))
    inputs = replace(inputs, weights=torch.zeros_like(inputs.weights))
    assert not call(backend, inputs).any()
