"""deep_kernels.formats: every code, every rounding rule, round trips, refusals, and the paged layout."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import oracle
import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from deep_kernels import formats

QUANTIZE = {name: getattr(formats, f"quantize_{name}") for name in formats.FORMATS}
DEQUANTIZE = {name: getattr(formats, f"dequantize_{name}") for name in formats.FORMATS}
MX_FORMATS = ("mxfp8", "mxfp4")
MAXIMUM = {"fp8": 448.0, "mxfp8": 448.0, "mxfp4": 6.0}
# Half a step relative to the largest element of a row or block: 2^-4 of the value for e4m3; for e2m1 half of
# the last step (2 of 6). The power-of-two scale can be up to twice too large.
RELATIVE_ERROR = {"fp8": 2.0**-4, "mxfp8": 2.0**-4, "mxfp4": 1 / 3}

NAN, INF = math.nan, math.inf
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")),
]


def raw(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(raw(a), raw(b))


def same_values(a: Tensor, b: Tensor) -> bool:
    """Equal with NaN equal to NaN and the sign of zero ignored."""
    return torch.allclose(a.double(), b.double(), rtol=0, atol=0, equal_nan=True)


def exponents(scale: Tensor, num_blocks: int) -> list[int]:
    return [int(scale) >> (8 * b) & 0xFF for b in range(num_blocks)]


def rows_of(values: list[float], width: int = 32) -> Tensor:
    """One row per value: the value first, zeros behind it."""
    x = torch.zeros(len(values), width, dtype=torch.float64)
    x[:, 0] = torch.tensor(values, dtype=torch.float64)
    return x


def nearest_even(x: Tensor, table: Tensor) -> Tensor:
    """The code of the value in `table` (ascending from code 0) nearest to x >= 0; even on a tie."""
    distance = (x.double().unsqueeze(-1) - table).abs()
    nearest = distance == distance.amin(dim=-1, keepdim=True)
    codes = torch.arange(len(table))
    # Of two tied codes the even one: order candidates by (odd, code).
    return torch.where(nearest, codes + 1000 * (codes % 2), 1_000_000).argmin(dim=-1)


# ------------------------------------------------------------------------------------------ codes


def test_all_e4m3_codes_round_trip() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    values = codes.view(torch.float8_e4m3fn)
    floats = formats.dequantize_fp8(values.unsqueeze(0), torch.ones(1))[0]
    assert same_values(floats, oracle.E4M3)
    back = raw(formats.float_to_e4m3(floats))
    is_nan = torch.isnan(floats)
    assert is_nan.nonzero().flatten().tolist() == [0x7F, 0xFF]
    assert torch.equal(back[~is_nan], codes[~is_nan])  # both zeros keep their sign
    assert back[is_nan].tolist() == [0x7F, 0x7F]


def test_all_e2m1_codes_round_trip() -> None:
    pairs = torch.arange(256, dtype=torch.uint8)  # every low nibble with every high nibble
    floats = formats.e2m1_to_float(pairs.unsqueeze(-1))
    low, high = torch.arange(256) % 16, torch.arange(256) // 16
    assert same_values(floats, torch.stack((oracle.E2M1[low], oracle.E2M1[high]), dim=-1))
    assert torch.equal(raw(formats.float_to_e2m1(floats)).squeeze(-1), pairs)
    assert same_values(torch.tensor(formats.E2M1_VALUES), oracle.E2M1)


@pytest.mark.parametrize("device", DEVICES)
def test_e4m3_rounds_to_nearest_even(device: str) -> None:
    table = oracle.E4M3[:0x7F]
    midpoints = (table[1:] + table[:-1]) / 2
    x = torch.cat((table, midpoints, midpoints * (1 + 2.0**-20), midpoints * (1 - 2.0**-20))).float()
    x = torch.cat((x, torch.linspace(0, 448, 5001)))
    expected = nearest_even(x, table)
    assert torch.equal(raw(formats.float_to_e4m3(x.to(device))).cpu().long(), expected)
    assert torch.equal(raw(formats.float_to_e4m3(-x.to(device))).cpu().long(), expected + 0x80)


@pytest.mark.parametrize("device", DEVICES)
def test_e2m1_rounds_to_nearest_even(device: str) -> None:
    table = oracle.E2M1[:8]
    midpoints = (table[1:] + table[:-1]) / 2
    x = torch.cat((table, midpoints, midpoints * (1 + 2.0**-20), midpoints * (1 - 2.0**-20))).float()
    x = torch.cat((x, torch.linspace(0, 6, 5001), torch.tensor([7.0, 1e6])))
    x = torch.cat((x, torch.zeros(x.numel() % 2)))
    expected = nearest_even(x, table)
    packed = raw(formats.float_to_e2m1(x.to(device))).cpu().long()
    assert torch.equal(torch.stack((packed % 16, packed // 16), dim=-1).flatten(), expected)
    packed = raw(formats.float_to_e2m1(-x.to(device))).cpu().long()
    assert torch.equal(torch.stack((packed % 16, packed // 16), dim=-1).flatten(), expected + 8)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_conversion_beyond_the_range(dtype: torch.dtype) -> None:
    big = torch.finfo(dtype).max
    x = torch.tensor([448.0, 464.0, 480.0, 1000.0, big, -1000.0, -big, INF, -INF, NAN], dtype=dtype)
    expected = [0x7E] * 5 + [0xFE] * 2 + [0x7F] * 3
    assert raw(formats.float_to_e4m3(x)).tolist() == expected
    x = torch.tensor([6.0, 100.0, big, -big, INF, -INF, NAN, -NAN], dtype=dtype)
    assert raw(formats.float_to_e2m1(x)).tolist() == [0x77, 0xF7, 0xF7, 0x00]


# ------------------------------------------------------------------------------------------ scales


def test_fp8_scale_is_amax_over_448() -> None:
    x = torch.randn(1000, 128, generator=torch.Generator().manual_seed(1)) * torch.logspace(-30, 30, 1000)[:, None]
    values, scale = formats.quantize_fp8(x)
    expected = (x.abs().amax(-1).double() / 448).float()
    assert torch.equal(scale, expected)
    # The largest element of every row is the largest code.
    assert torch.equal(oracle.decode_values(values, "fp8").abs().amax(-1), torch.full((1000,), 448.0).double())


def test_fp8_zero_row_and_vanishing_row() -> None:
    x = torch.zeros(4, 32)
    x[1, 5], x[2, 5], x[3, 5] = -0.0, 1e-45, 1e-36
    values, scale = formats.quantize_fp8(x)
    assert scale[:3].tolist() == [1.0, 1.0, 1.0]  # 1e-45 / 448 is zero in float32
    assert torch.equal(formats.dequantize_fp8(values, scale)[:3], torch.zeros(3, 32))
    assert scale[3] > 0
    assert abs(formats.dequantize_fp8(values, scale)[3, 5].item() / 1e-36 - 1) < 1e-3


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_fp8_row_with_nan_or_inf(bad: float, dtype: torch.dtype) -> None:
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(2)).to(dtype)
    clean_values, clean_scale = formats.quantize_fp8(x)
    x[1, 7] = bad
    values, scale = formats.quantize_fp8(x)
    assert torch.isnan(scale).tolist() == [False, True, False]
    assert torch.isnan(values.float()).nonzero().tolist() == [[1, 7]]
    assert torch.isnan(formats.dequantize_fp8(values, scale)).all(dim=-1).tolist() == [False, True, False]
    assert same_bits(values[::2], clean_values[::2])
    assert same_bits(scale[::2], clean_scale[::2])


@pytest.mark.parametrize("name", MX_FORMATS)
def test_mx_exponent_at_powers_of_two(name: str) -> None:
    maximum = MAXIMUM[name]
    for power in (-118, -60, -9, -1, 0, 1, 8, 60, 118):
        edge = maximum * 2.0**power
        amax = [edge, edge * (1 + 2.0**-23), edge * (1 - 2.0**-24), edge / 2, 2.0**power, -edge]
        _, scale = QUANTIZE[name](rows_of(amax).float())
        expected = [127 + math.ceil(math.log2(abs(a)) - math.log2(maximum)) for a in amax[3:5]]
        assert scale.tolist() == [127 + power, 128 + power, 127 + power, *expected, 127 + power]


@pytest.mark.parametrize("name", MX_FORMATS)
def test_mx_exponent_is_the_smallest_that_fits(name: str) -> None:
    amax = torch.logspace(-35, 38, 4001, dtype=torch.float64).float()
    _, scale = QUANTIZE[name](rows_of(amax.tolist()).float())
    exponent = scale.double() - 127
    assert (amax.double() <= MAXIMUM[name] * 2.0**exponent).all()
    assert (amax.double() > MAXIMUM[name] * 2.0 ** (exponent - 1)).all()


@pytest.mark.parametrize("name", MX_FORMATS)
def test_mx_exponent_at_the_ends_of_float32(name: str) -> None:
    largest = torch.finfo(torch.float32).max
    x = rows_of([2.0**-149, 2.0**-127, 2.0**-126, largest, -largest]).float()
    values, scale = QUANTIZE[name](x)
    top = 127 + (120 if name == "mxfp8" else 126)  # largest / 448 < 2^120, largest / 6 < 2^126
    assert scale.tolist() == [0, 0, 0, top, top]
    y = DEQUANTIZE[name](values, scale)
    assert y[1:3, 0].tolist() == [2.0**-127, 2.0**-126]
    assert torch.isfinite(y[:3]).all()
    # The largest float32 rounds up to 2^128, which only float64 holds.
    assert y[3:, 0].tolist() == [INF, -INF]
    assert DEQUANTIZE[name](values, scale, torch.float64)[3, 0] == 2.0**128


@pytest.mark.parametrize("name", MX_FORMATS)
def test_mx_bytes_of_the_scale(name: str) -> None:
    x = torch.zeros(128)
    x[32:64], x[64:96], x[96:128] = MAXIMUM[name], 2 * MAXIMUM[name], MAXIMUM[name] / 16
    _, scale = QUANTIZE[name](x)
    assert scale.shape == ()
    assert raw(scale.reshape(1)).tolist() == [0x7F, 0x7F, 0x80, 0x7B]
    for head_dim in (32, 64):
        _, scale = QUANTIZE[name](x[:head_dim])
        assert raw(scale.reshape(1)).tolist() == [0x7F] * (head_dim // 32) + [0] * (4 - head_dim // 32)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("name", MX_FORMATS)
def test_mx_block_with_nan_or_inf(name: str, bad: float) -> None:
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(3))
    clean_values, clean_scale = QUANTIZE[name](x)
    x[1, 40] = bad
    x[1, 100:102] = torch.tensor([INF, NAN])
    values, scale = QUANTIZE[name](x)
    clean = exponents(clean_scale[1], 4)
    assert exponents(scale[1], 4) == [clean[0], 0xFF, clean[2], 0xFF]
    decoded = oracle.decode_values(values, name)
    nans = [[1, 40], [1, 100], [1, 101]] if name == "mxfp8" else []
    assert torch.isnan(decoded).nonzero().tolist() == nans
    assert (decoded[1, 32:64].nan_to_num(0) == 0).all()
    y = DEQUANTIZE[name](values, scale)
    poisoned = torch.zeros(3, 128, dtype=torch.bool)
    poisoned[1, 32:64] = poisoned[1, 96:] = True
    assert torch.equal(torch.isnan(y), poisoned)
    assert torch.equal(y[~poisoned], DEQUANTIZE[name](clean_values, clean_scale)[~poisoned])


@pytest.mark.parametrize("name", formats.FORMATS)
def test_float64_beyond_float32_is_clamped(name: str) -> None:
    x = rows_of([1e300, -1e300, 1e39]).double()
    values, scale = QUANTIZE[name](x)
    expected = rows_of([3.4028234663852886e38, -3.4028234663852886e38, 3.4028234663852886e38]).float()
    assert same_bits(values, QUANTIZE[name](expected)[0])
    assert same_bits(scale, QUANTIZE[name](expected)[1])
    assert torch.isfinite(DEQUANTIZE[name](values, scale, torch.float64)).all()


# ------------------------------------------------------------------------------------------ round trips


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize("name", formats.FORMATS)
def test_round_trip(name: str, head_dim: int, dtype: torch.dtype, device: str) -> None:
    generator = torch.Generator().manual_seed(head_dim)
    x = torch.randn(7, 5, head_dim, generator=generator) * torch.randn(7, 5, 1, generator=generator).exp()
    x = x.to(device, dtype)
    values, scale = QUANTIZE[name](x)
    assert values.shape == (7, 5, head_dim // 2 if name == "mxfp4" else head_dim)
    assert values.dtype == (torch.int8 if name == "mxfp4" else torch.float8_e4m3fn)
    assert scale.shape == (7, 5)
    assert scale.dtype == (torch.float32 if name == "fp8" else torch.int32)
    assert values.is_contiguous() and scale.is_contiguous()
    assert values.device.type == scale.device.type == device

    exact = oracle.decode(values, scale, name)
    assert same_bits(DEQUANTIZE[name](values, scale, torch.float64).cpu(), exact)
    for out in (torch.float32, torch.float16, torch.bfloat16):
        y = DEQUANTIZE[name](values, scale, out)
        assert y.dtype == out and y.shape == x.shape and y.is_contiguous()
        assert same_bits(y.cpu(), exact.float().to(out))
    reference = x.cpu().double()
    group = reference.reshape(35, -1, head_dim if name == "fp8" else 32)
    error = (exact - reference).reshape(group.shape).abs().amax(-1)
    assert (error <= RELATIVE_ERROR[name] * group.abs().amax(-1)).all()
    # A second trip changes no value: what dequantize gives is on the grid that quantize chooses.
    again = DEQUANTIZE[name](*QUANTIZE[name](exact.float()), torch.float64)
    assert torch.allclose(again, exact, rtol=1e-6 if name == "fp8" else 0, atol=0)


@pytest.mark.parametrize("name", formats.FORMATS)
def test_each_element_is_rounded_to_nearest(name: str) -> None:
    x = torch.randn(50, 64, generator=torch.Generator().manual_seed(5))
    values, scale = QUANTIZE[name](x)
    factor = scale.double()[:, None] if name == "fp8" else oracle.decode_mx_scale(scale, 64)
    table = oracle.E2M1[:8] if name == "mxfp4" else oracle.E4M3[:0x7F]
    wanted = table[nearest_even((x.double() / factor).float().abs(), table)]
    assert torch.equal(oracle.decode_values(values, name).abs(), wanted)


@pytest.mark.parametrize("name", formats.FORMATS)
@pytest.mark.parametrize("shape", [(64,), (0, 64), (3, 0, 64), (2, 3, 4, 64)])
def test_leading_shapes(name: str, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    values, scale = QUANTIZE[name](x)
    assert values.shape[:-1] == scale.shape == x.shape[:-1]
    assert DEQUANTIZE[name](values, scale).shape == x.shape


@pytest.mark.parametrize("name", formats.FORMATS)
def test_strided_input(name: str) -> None:
    x = torch.randn(64, 3, 9)[..., ::2].permute(1, 2, 0)
    assert not x.is_contiguous()
    for a, b in zip(QUANTIZE[name](x), QUANTIZE[name](x.contiguous()), strict=True):
        assert same_bits(a, b)
    values, scale = QUANTIZE[name](x)
    assert torch.equal(
        DEQUANTIZE[name](values.transpose(0, 1), scale.transpose(0, 1)),
        DEQUANTIZE[name](values, scale).transpose(0, 1),
    )


@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize("name", MX_FORMATS)
def test_other_forms_that_dequantize_accepts(name: str, head_dim: int) -> None:
    values, scale = QUANTIZE[name](torch.randn(6, head_dim))
    expected = DEQUANTIZE[name](values, scale)
    unpacked = raw(scale).reshape(6, 4)[:, : head_dim // 32].contiguous().view(torch.float8_e8m0fnu)
    assert torch.equal(DEQUANTIZE[name](values, unpacked), expected)
    if head_dim < 128:
        junk = scale | (0x5A << head_dim // 32 * 8)
        assert torch.equal(DEQUANTIZE[name](values, junk), expected)
    if name == "mxfp4":
        for dtype in (torch.uint8, torch.float4_e2m1fn_x2):
            assert torch.equal(DEQUANTIZE[name](values.view(dtype), scale), expected)


@pytest.mark.parametrize("name", MX_FORMATS)
def test_all_exponents_dequantize(name: str) -> None:
    one = 0x22 if name == "mxfp4" else 0x38
    values = torch.full((256, 16 if name == "mxfp4" else 32), one, dtype=torch.uint8)
    values = values if name == "mxfp4" else values.view(torch.float8_e4m3fn)
    scale = torch.arange(256, dtype=torch.int32)
    y = DEQUANTIZE[name](values, scale)
    assert same_values(y, oracle.UE8M0[:, None].expand(256, 32))
    assert same_values(DEQUANTIZE[name](values, scale, torch.float64), y)


# ------------------------------------------------------------------------------------------ paged cache


def kv_tokens(name: str, num_kv: int, head_dim: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(num_kv, head_dim, generator=torch.Generator().manual_seed(num_kv))
    values, scale = QUANTIZE[name](x)
    return values, scale


@pytest.mark.parametrize("num_kv", [0, 1, 16, 63, 64, 65, 300])
@pytest.mark.parametrize("block_kv", formats.PAGE_SIZES)
@pytest.mark.parametrize("name", formats.FORMATS)
def test_pages_round_trip(name: str, block_kv: int, num_kv: int) -> None:
    values, scale = kv_tokens(name, num_kv, 64)
    cache = formats.pack_paged_kv(values, scale, block_kv)
    num_blocks = -(-num_kv // block_kv)
    assert cache.shape == (num_blocks, block_kv, 1, (32 if name == "mxfp4" else 64) + 4)
    assert cache.dtype == torch.uint8 and cache.is_contiguous()
    back, back_scale = formats.unpack_paged_kv(cache, name, 64)
    assert back.shape == (num_blocks * block_kv, values.shape[1])
    assert same_bits(back[:num_kv], values)
    assert same_bits(back_scale[:num_kv], scale)
    assert not raw(back[num_kv:]).any() and not raw(back_scale[num_kv:]).any()


@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize("name", formats.FORMATS)
def test_bytes_of_a_page(name: str, head_dim: int) -> None:
    block_kv, num_kv = 16, 20
    values, scale = kv_tokens(name, num_kv, head_dim)
    cache = formats.pack_paged_kv(values, scale, block_kv)
    pages = cache.reshape(2, -1)
    width = values.shape[1]
    for token in range(num_kv):
        page, slot = divmod(token, block_kv)
        assert torch.equal(pages[page, slot * width : (slot + 1) * width], raw(values[token]))
        at = block_kv * width + 4 * slot
        assert torch.equal(pages[page, at : at + 4], raw(scale[token : token + 1]))
    assert not pages[1, 4 * width : block_kv * width].any()
    assert not pages[1, block_kv * width + 16 :].any()


def test_pages_from_other_forms_and_strides() -> None:
    values, scale = kv_tokens("mxfp4", 40, 64)
    cache = formats.pack_paged_kv(values, scale, 16)
    unpacked = raw(scale).reshape(40, 4)[:, :2].contiguous().view(torch.float8_e8m0fnu)
    assert torch.equal(formats.pack_paged_kv(values.view(torch.float4_e2m1fn_x2), unpacked, 16), cache)
    assert torch.equal(formats.pack_paged_kv(values.view(torch.uint8), scale, 16), cache)
    wide = torch.cat((values, values), dim=1)[:, :32]
    assert torch.equal(formats.pack_paged_kv(wide, torch.stack((scale, scale), 1)[:, 0], 16), cache)
    spaced = torch.full((3, 2048), 0xAA, dtype=torch.uint8)
    view = spaced.as_strided((3, 16, 1, 36), (2048, 36, 36, 1))
    view.copy_(cache)
    back, back_scale = formats.unpack_paged_kv(view, "mxfp4", 64)
    assert same_bits(back[:40], values) and same_bits(back_scale[:40], scale)


# ------------------------------------------------------------------------------------------ blocks of 128

SCALE_FORMATS = formats.SCALE_FORMATS
SPREAD = (1e-9, 1.0, 3e5, 1e30)  # of neighbouring blocks, so that a scale at the wrong place is far off


def spread_blocks(num_rows: int, num_columns: int, tile_rows: int = 1) -> Tensor:
    """Normal numbers whose magnitude changes by orders from block to block."""
    x = torch.randn(num_rows, num_columns, generator=torch.Generator().manual_seed(num_columns))
    row, column = torch.arange(num_rows) // tile_rows, torch.arange(num_columns) // 128
    return x * torch.tensor(SPREAD)[(row[:, None] + column) % len(SPREAD)]


def scales_of(scale: Tensor) -> Tensor:
    return oracle.UE8M0[raw(scale).long()] if scale.dtype == torch.float8_e8m0fnu else scale.double()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_columns", [1, 100, 128, 129, 400])
@pytest.mark.parametrize("scale_fmt", SCALE_FORMATS)
def test_block128_against_the_definition(scale_fmt: str, num_columns: int, device: str) -> None:
    x = spread_blocks(9, num_columns)
    values, scale = (part.cpu() for part in formats.quantize_fp8_block128(x.to(device), scale_fmt))
    assert values.is_contiguous() and values.shape == x.shape
    assert scale.dtype == (torch.float32 if scale_fmt == "fp32" else torch.float8_e8m0fnu)
    assert scale.shape == (9, -(-num_columns // 128))
    for column in range(0, num_columns, 128):
        block = x[:, column : column + 128]
        wanted = (block.abs().amax(-1).double() / 448).float().clamp_min(1e-12)
        if scale_fmt == "ue8m0":
            wanted = torch.exp2(torch.ceil(torch.log2(wanted.double()))).float()
        assert torch.equal(scales_of(scale)[:, column // 128].float(), wanted)
        scaled = (block * (1 / wanted)[:, None]).clamp(-448, 448)
        codes = nearest_even(scaled.abs(), oracle.E4M3[:0x7F]) + 0x80 * torch.signbit(scaled)
        assert torch.equal(raw(values[:, column : column + 128]).long(), codes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale_fmt", SCALE_FORMATS)
def test_block128_round_trip(scale_fmt: str, dtype: torch.dtype) -> None:
    x = spread_blocks(7, 300).reshape(7, 1, 300)
    values, scale = formats.quantize_fp8_block128(x, scale_fmt)
    assert scale.shape == (7, 1, 3)
    exact = oracle.decode_values(values, "fp8") * scales_of(scale).repeat_interleave(128, -1)[..., :300]
    y = formats.dequantize_fp8_block128(values, scale, dtype)
    assert y.dtype == dtype and y.is_contiguous()
    assert same_bits(y, exact.to(dtype) if dtype == torch.float64 else exact.float().to(dtype))
    assert torch.equal(formats.dequantize_fp8_block128(values.reshape(7, 300), scale.reshape(7, 3), dtype), y[:, 0])
    for column in range(0, 300, 128):
        part = slice(column, column + 128)
        error = (exact[..., part] - x[..., part].double()).abs().amax(-1)
        assert (error <= 2.0**-4 * x[..., part].abs().amax(-1)).all()


@pytest.mark.parametrize("size", [(1, 1), (128, 256), (129, 127), (300, 260)])
def test_128x128_against_the_definition(size: tuple[int, int]) -> None:
    weight = spread_blocks(*size, tile_rows=128)
    values, scale = formats.quantize_fp8_128x128(weight)
    assert values.is_contiguous() and values.shape == size
    assert scale.dtype == torch.float32 and scale.shape == (-(-size[0] // 128), -(-size[1] // 128))
    y = formats.dequantize_fp8_128x128(values, scale, torch.float64)
    for row in range(scale.shape[0]):
        for column in range(scale.shape[1]):
            at = (slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128))
            wanted = (weight[at].abs().amax().double() / 448).float().clamp_min(1e-12)
            assert scale[row, column] == wanted
            scaled = (weight[at] * (1 / wanted)).clamp(-448, 448)
            codes = nearest_even(scaled.abs(), oracle.E4M3[:0x7F]) + 0x80 * torch.signbit(scaled)
            assert torch.equal(raw(values)[at].long(), codes)
            assert torch.equal(y[at], oracle.E4M3[codes] * wanted.double())
    rounded = formats.dequantize_fp8_128x128(values, scale.bfloat16())
    tiles = scale.bfloat16().float().repeat_interleave(128, 0).repeat_interleave(128, 1)[: size[0], : size[1]]
    assert torch.equal(rounded, values.float() * tiles)


@pytest.mark.parametrize("scale_fmt", SCALE_FORMATS)
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_block128_with_nan_or_inf(bad: float, scale_fmt: str) -> None:
    x = torch.randn(3, 384, generator=torch.Generator().manual_seed(1))
    clean_values, clean_scale = formats.quantize_fp8_block128(x, scale_fmt)
    x[1, 130] = bad
    values, scale = formats.quantize_fp8_block128(x, scale_fmt)
    poisoned = scales_of(scale)[1, 1]
    assert poisoned.isnan() if scale_fmt == "ue8m0" or math.isnan(bad) else poisoned == INF
    assert torch.isnan(values.float()).nonzero().tolist() == [[1, 130]]
    others = torch.ones(3, 3, dtype=torch.bool)
    others[1, 1] = False
    assert torch.equal(raw(scale).view(3, 3, -1)[others], raw(clean_scale).view(3, 3, -1)[others])
    assert torch.equal(raw(values).view(3, 3, 128)[others], raw(clean_values).view(3, 3, 128)[others])
    y = formats.dequantize_fp8_block128(values, scale)
    assert torch.isnan(y).view(3, 3, 128).all(-1).nonzero().tolist() == [[1, 1]]


@pytest.mark.parametrize("bad", [NAN, INF])
def test_128x128_with_nan_or_inf(bad: float) -> None:
    weight = torch.randn(256, 256)
    weight[200, 7] = bad
    values, scale = formats.quantize_fp8_128x128(weight)
    assert torch.isfinite(scale).tolist() == [[True, True], [False, True]]
    assert torch.isnan(values.float()).nonzero().tolist() == [[200, 7]]


def test_block128_edges() -> None:
    x = rows_of([0.0, 1e-12, 448e-12, 448.0, 448 * (1 + 2.0**-23), -448 * 2.0**60, 3.4028234663852886e38], 128).float()
    _, scale = formats.quantize_fp8_block128(x)
    least = torch.tensor(1e-12)
    assert torch.equal(scale[:2, 0], least.expand(2)) and (scale[2, 0] / least - 1).abs() < 1e-6
    _, scale = formats.quantize_fp8_block128(x, "ue8m0")
    assert raw(scale).flatten().tolist() == [88, 88, 88, 127, 128, 187, 247]  # 88: 2^-39 >= 1e-12


# ------------------------------------------------------------------------------------------ tracing


@pytest.mark.parametrize("name", formats.FORMATS)
def test_fake_tensors(name: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    real = torch.randn(3, 5, 64)
    values, scale = QUANTIZE[name](real)
    with FakeTensorMode() as mode:
        x = mode.from_tensor(real)
        fake_values, fake_scale = QUANTIZE[name](x)
        assert (fake_values.shape, fake_values.dtype) == (values.shape, values.dtype)
        assert (fake_scale.shape, fake_scale.dtype) == (scale.shape, scale.dtype)
        assert DEQUANTIZE[name](fake_values, fake_scale).shape == x.shape
        cache = formats.pack_paged_kv(fake_values.flatten(0, 1), fake_scale.flatten(), 16)
        assert cache.shape == (1, 16, 1, values.shape[-1] + 4)
        assert formats.unpack_paged_kv(cache, name, 64)[0].shape == (16, values.shape[-1])


@pytest.mark.parametrize("name", formats.FORMATS)
def test_traces_whole(name: str) -> None:
    @torch.compile(fullgraph=True, backend="aot_eager")
    def trip(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        values, scale = QUANTIZE[name](x)
        cache = formats.pack_paged_kv(values, scale, 16)
        return raw(values), scale, DEQUANTIZE[name](values, scale), cache

    x = torch.randn(20, 64)
    x[3], x[4, 5] = 0.0, INF
    values, scale, y, cache = trip(x)
    expected, expected_scale = QUANTIZE[name](x)
    assert torch.equal(values, raw(expected)) and same_bits(scale, expected_scale)
    assert same_values(y, DEQUANTIZE[name](expected, expected_scale))
    assert torch.equal(cache, formats.pack_paged_kv(expected, expected_scale, 16))


@pytest.mark.parametrize("scale_fmt", SCALE_FORMATS)
def test_blocks_of_128_are_traced(scale_fmt: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    def trip(x: Tensor) -> tuple[Tensor, ...]:
        values, scale = formats.quantize_fp8_block128(x, scale_fmt)
        tiles, tile_scale = formats.quantize_fp8_128x128(x)
        return (
            raw(values), raw(scale), formats.dequantize_fp8_block128(values, scale),
            raw(tiles), tile_scale, formats.dequantize_fp8_128x128(tiles, tile_scale),
        )  # fmt: skip

    x = torch.randn(20, 200)
    x[3], x[4, 5] = 0.0, INF
    expected = trip(x)
    with FakeTensorMode() as mode:
        fake = trip(mode.from_tensor(x))
    compiled = torch.compile(trip, fullgraph=True, backend="aot_eager")(x)
    for one, look, wanted in zip(compiled, fake, expected, strict=True):
        assert (look.shape, look.dtype) == (wanted.shape, wanted.dtype)
        assert same_bits(one.nan_to_num(7), wanted.nan_to_num(7))


# ------------------------------------------------------------------------------------------ refusals

FP8, FP8_SCALE = torch.zeros(4, 64).to(torch.float8_e4m3fn), torch.ones(4)
INT8, INT32 = torch.zeros(4, 32, dtype=torch.int8), torch.zeros(4, dtype=torch.int32)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: formats.quantize_fp8([1.0]), TypeError, "quantize_fp8: x must be a torch.Tensor, got list"),
        (
            lambda: formats.quantize_fp8(INT32),
            ValueError,
            "quantize_fp8: x must be float16, .* got int32 [4]",
        ),
        (lambda: formats.quantize_fp8(torch.tensor(1.0)), ValueError, "head_dim >= 1], got float32 []"),
        (lambda: formats.quantize_fp8(torch.ones(3, 0)), ValueError, "head_dim >= 1], got float32 [3, 0]"),
        (
            lambda: formats.quantize_mxfp8(torch.ones(2, 48)),
            ValueError,
            "quantize_mxfp8: x must be [.., head_dim in {32, 64, 128}], got float32 [2, 48]",
        ),
        (
            lambda: formats.quantize_mxfp4(torch.ones(2, 256)),
            ValueError,
            "quantize_mxfp4: .* got float32 [2, 256]",
        ),
        (
            lambda: formats.dequantize_fp8(FP8, None),
            TypeError,
            "dequantize_fp8: scale must be .*, got NoneType",
        ),
        (
            lambda: formats.dequantize_fp8(INT8, FP8_SCALE),
            ValueError,
            "must be float8_e4m3fn .*, got int8 [4, 32]",
        ),
        (
            lambda: formats.dequantize_fp8(FP8, FP8_SCALE[:3]),
            ValueError,
            "scale must be float32 [4].* got float32 [3]",
        ),
        (lambda: formats.dequantize_fp8(FP8, FP8_SCALE.half()), ValueError, "float32 [4].* got float16 [4]"),
        (
            lambda: formats.dequantize_fp8(FP8, FP8_SCALE, "f32"),
            TypeError,
            "dtype must be a torch.dtype, got str",
        ),
        (
            lambda: formats.dequantize_fp8(FP8, FP8_SCALE, torch.int32),
            ValueError,
            "dtype must be .*, got int32",
        ),
        (
            lambda: formats.dequantize_fp8(FP8, FP8_SCALE.to("meta")),
            ValueError,
            "scale must be on cpu .*, got meta",
        ),
        (
            lambda: formats.quantize_fp8_block128(torch.ones(3, 0)),
            ValueError,
            "quantize_fp8_block128: x must be [.., K >= 1], got float32 [3, 0]",
        ),
        (
            lambda: formats.quantize_fp8_block128(torch.ones(3, 16).to_sparse()),
            ValueError,
            "quantize_fp8_block128: x must be a dense tensor, got torch.sparse_coo",
        ),
        (
            lambda: formats.quantize_fp8_block128(torch.ones(3), "e8m0"),
            ValueError,
            "scale_fmt must be one of {fp32, ue8m0}, got 'e8m0'",
        ),
        (lambda: formats.quantize_fp8_block128(torch.ones(3), 8), TypeError, "scale_fmt must be a str, got int"),
        (
            lambda: formats.dequantize_fp8_block128(FP8, FP8_SCALE),
            ValueError,
            "scale must be float32 or float8_e8m0fnu [4, 1], got float32 [4]",
        ),
        (
            lambda: formats.dequantize_fp8_block128(INT8, FP8_SCALE),
            ValueError,
            "values must be float8_e4m3fn [.., K], got int8 [4, 32]",
        ),
        (
            lambda: formats.quantize_fp8_128x128(torch.ones(3)),
            ValueError,
            "quantize_fp8_128x128: weight must be [N >= 1, K >= 1], got float32 [3]",
        ),
        (lambda: formats.quantize_fp8_128x128(INT32), ValueError, "weight must be float16, .* got int32 [4]"),
        (
            lambda: formats.dequantize_fp8_128x128(FP8[None], FP8_SCALE),
            ValueError,
            "values must be float8_e4m3fn [N, K], got float8_e4m3fn [1, 4, 64]",
        ),
        (
            lambda: formats.dequantize_fp8_128x128(FP8, torch.ones(1, 1).half()),
            ValueError,
            "scale must be float32 or bfloat16 [1, 1], got float16 [1, 1]",
        ),
        (
            lambda: formats.dequantize_mxfp8(FP8, FP8_SCALE),
            ValueError,
            "int32 [4] or float8_e8m0fnu [4, 2], got float32",
        ),
        (
            lambda: formats.dequantize_mxfp8(FP8[:, :48], INT32),
            ValueError,
            "head_dim in {32, 64, 128}], got float8",
        ),
        (
            lambda: formats.dequantize_mxfp4(FP8, INT32),
            ValueError,
            "dequantize_mxfp4: values must be int8, uint8 or",
        ),
        (
            lambda: formats.dequantize_mxfp4(INT8[:, :24], INT32),
            ValueError,
            "values must be .* got int8 [4, 24]",
        ),
        (lambda: formats.float_to_e2m1(torch.ones(3)), ValueError, "even last dimension, got float32 [3]"),
        (lambda: formats.float_to_e4m3(INT32), ValueError, "float_to_e4m3: x must be .*, got int32 [4]"),
        (lambda: formats.e2m1_to_float(FP8), ValueError, "e2m1_to_float: values must be int8"),
        (
            lambda: formats.pack_paged_kv(FP8, FP8_SCALE, 48),
            ValueError,
            "one of {16, 32, 64, 128, 256}, got 48",
        ),
        (
            lambda: formats.pack_paged_kv(FP8, FP8_SCALE, 16.0),
            TypeError,
            "block_kv must be an int, got float",
        ),
        (lambda: formats.pack_paged_kv(FP8, FP8_SCALE, True), TypeError, "block_kv must be an int, got bool"),
        (
            lambda: formats.pack_paged_kv(FP8[None], FP8_SCALE, 16),
            ValueError,
            "must be [num_kv, head_dim] with",
        ),
        (
            lambda: formats.pack_paged_kv(FP8.float(), FP8_SCALE, 16),
            ValueError,
            "values must be .* got float32 [4, 64]",
        ),
        (
            lambda: formats.pack_paged_kv(FP8, FP8_SCALE[:2], 16),
            ValueError,
            "scale must be float32 [4].* got float32 [2]",
        ),
        (
            lambda: formats.pack_paged_kv(INT8, FP8_SCALE, 16),
            ValueError,
            "int32 [4] or float8_e8m0fnu [4, 2], got float",
        ),
        (
            lambda: formats.unpack_paged_kv(FP8, "fp8", 64),
            ValueError,
            "cache of fp8 must be uint8 [num_blocks, .* 68]",
        ),
        (
            lambda: formats.unpack_paged_kv(INT8.view(torch.uint8), "fp4", 64),
            ValueError,
            "{fp8, mxfp8, mxfp4}, got 'fp4'",
        ),
        (lambda: formats.unpack_paged_kv(INT8, 4, 64), TypeError, "format must be a str, got int"),
        (lambda: formats.unpack_paged_kv(INT8, "fp8", 48), ValueError, "head_dim must be one of .*, got 48"),
        (
            lambda: formats.unpack_paged_kv(INT8, "fp8", None),
            TypeError,
            "head_dim must be an int, got NoneType",
        ),
    ],
)
def test_refusals_say_what_came(call, error: type[Exception], words: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    at = 0
    for part in words.split(".*"):
        at = message.find(part.strip(), at)
        assert at >= 0, f"{part.strip()!r} is not in {message!r}"


ROUNDING = (
    formats.quantize_fp8,
    formats.quantize_fp8_block128,
    formats.quantize_fp8_128x128,
    formats.quantize_mxfp8,
    formats.quantize_mxfp4,
    formats.float_to_e4m3,
    formats.float_to_e2m1,
)


@pytest.mark.parametrize("rounding", ROUNDING, ids=lambda function: function.__name__)
def test_rounding_refuses_to_drop_a_gradient(rounding: Callable[[Tensor], object]) -> None:
    weight = torch.nn.Parameter(torch.randn(4, 32))
    argument = "weight" if rounding is formats.quantize_fp8_128x128 else "x"
    sentence = (
        f"{rounding.__name__}: {argument} requires grad, but rounding has no gradient: "
        "call it under torch.no_grad() or detach the input"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        rounding(weight)
    with forward_ad.dual_level(), pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        rounding(forward_ad.make_dual(weight.detach(), torch.ones(4, 32)))
    rounding(weight.detach())
    with torch.no_grad():
        assert "requires_grad" not in repr(rounding(weight))


def test_dequantizing_is_differentiable_in_its_scale() -> None:
    values, scale = formats.quantize_fp8(torch.randn(4, 32))
    formats.dequantize_fp8(values, scale.requires_grad_()).sum().backward()
    assert scale.grad is not None
    torch.testing.assert_close(scale.grad, values.float().sum(dim=-1))


def test_inputs_stay_unchanged() -> None:
    x = torch.randn(4, 64)
    x[0, 0] = INF
    before = x.clone()
    for name in formats.FORMATS:
        QUANTIZE[name](x)
    assert same_bits(x, before)


# ------------------------------------------------------------------------------------------ the oracle itself


def test_oracle_agreement() -> None:
    expected = torch.tensor([[1.0, -2.0, -INF], [3.0, NAN, -INF]], dtype=torch.float64)
    inside = torch.tensor([[True, True, False], [True, True, False]])
    assert oracle.agreement(expected.float(), expected, inside) == 0.0
    off = expected.clone()
    off[0, 0] = 1.1
    x = torch.tensor([1.1, -2.0, 3.0], dtype=torch.float64)
    y = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
    by_definition = 1 - 2 * float((x * y).sum()) / float((x * x + y * y).sum())
    assert oracle.agreement(off, expected, inside) == pytest.approx(by_definition, rel=1e-9)
    zeros = torch.zeros(2, 3)
    assert oracle.agreement(zeros, zeros.double(), torch.ones(2, 3, dtype=torch.bool)) == 0.0
    for place, value in (((0, 2), 0.0), ((1, 1), 0.0), ((0, 0), NAN), ((0, 0), -INF), ((0, 0), INF)):
        wrong = expected.clone()
        wrong[place] = value
        with pytest.raises(AssertionError, match="pattern differs at 1 of 6"):
            oracle.agreement(wrong, expected, inside)


@pytest.mark.parametrize("name", formats.FORMATS)
def test_oracle_logits_against_a_plain_loop(name: str) -> None:
    generator = torch.Generator().manual_seed(7)
    q, q_scale = QUANTIZE[name](torch.randn(5, 3, 64, generator=generator))
    k, k_scale = QUANTIZE[name](torch.randn(40, 64, generator=generator))
    weights = torch.randn(5, 3, generator=generator)
    starts = torch.tensor([-5, 0, 10, 30, 39], dtype=torch.int32)
    ends = torch.tensor([7, 40, 10, 99, 2], dtype=torch.int32)
    query = (q, None if name == "fp8" else q_scale)
    q_float = DEQUANTIZE[name](q, torch.ones(5, 3) if name == "fp8" else q_scale)
    k_float = DEQUANTIZE[name](k, torch.ones(40) if name == "fp8" else k_scale)
    for width in (0, 12):
        logits, inside = oracle.mqa_logits(
            query, (k, k_scale), weights, starts, ends, format=name, clean=True, max_seqlen_k=width
        )
        assert logits.shape == inside.shape == (5, width or 40)
        for i in range(5):
            begin, end = max(int(starts[i]), 0), min(int(ends[i]), 40)
            for c in range(width or 40):
                j = c + begin if width else c
                assert bool(inside[i, c]) == (begin <= j < end)
                if not inside[i, c]:
                    assert logits[i, c] == -INF
                    continue
                total = sum(float(weights[i, h]) * max(float(q_float[i, h] @ k_float[j]), 0.0) for h in range(3))
                total *= float(k_scale[j]) if name == "fp8" else 1.0
                assert float(logits[i, c]) == pytest.approx(total, rel=1e-5, abs=1e-5)
