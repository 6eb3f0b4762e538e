"""The emulator's own parts: arithmetic, copies, layouts, and every check by a kernel of a few lines."""

from __future__ import annotations

import ctypes
import math
import re
from fractions import Fraction

import pytest
import torch
from emulator import Emulator, EmulatorError, build
from emulator.cases import e4m3_values, hash_bits
from emulator.driver import SANITIZED_FLAGS, core
from emulator.fixtures import emulator_ready  # noqa: F401
from emulator.memory import guarded
from emulator.mini import Map, run_kernel
from torch import Tensor

# --- arithmetic of the tensor cores, against the rule in exact rational numbers ---------------------------------------


def e4m3_parts(code: int) -> tuple[Fraction, int] | None:
    """Value and exponent as the adder sees it; None for NaN."""
    exponent, mantissa = code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return None
    significand = Fraction(mantissa + (8 if exponent else 0), 8)
    exponent = max(exponent, 1) - 7
    return significand * Fraction(2) ** exponent * (-1 if code & 128 else 1), exponent


def f32_parts(value: float) -> tuple[Fraction, int]:
    return Fraction(value), max(math.frexp(value)[1] - 1, -126)


def cut(value: Fraction, grid: Fraction) -> Fraction:
    """Toward zero to a multiple of the grid."""
    whole = abs(value) // grid
    return whole * grid * (-1 if value < 0 else 1)


def fused(a: list[int], b: list[int], c: float, low: int, fraction: int) -> float:
    """One step of the tensor core on e4m3 codes."""
    return fused_parts([(e4m3_parts(x), e4m3_parts(y)) for x, y in zip(a, b, strict=True)], c, low, fraction)


def fused_parts(
    pairs: list[tuple[tuple[Fraction, int] | None, tuple[Fraction, int] | None]], c: float, low: int, fraction: int
) -> float:
    """c + sum of products: cut to 2^(top - low) each, then to the result's fraction bits."""
    if math.isnan(c) or any(x is None or y is None for x, y in pairs):
        return math.nan
    terms = [(x[0] * y[0], x[1] + y[1]) for x, y in pairs if x and y and x[0] * y[0]]
    if c:
        terms.append(f32_parts(c))
    top = max([-133, *(exponent for _, exponent in terms)])
    total = sum((cut(value, Fraction(2) ** (top - low)) for value, _ in terms), Fraction(0))
    if total == 0:
        return 0.0
    exponent = max(-126, (abs(total).numerator.bit_length() - abs(total).denominator.bit_length()))
    while Fraction(2) ** exponent > abs(total) and exponent > -126:
        exponent -= 1
    result = cut(total, Fraction(2) ** (exponent - fraction))
    if abs(result) >= Fraction(2) ** 128:
        return math.copysign(math.inf, result)
    return float(result)


def same_bits(found: Tensor, wanted: list[float]) -> None:
    expected = torch.tensor(wanted, dtype=torch.float32)
    nan = torch.isnan(expected)
    assert torch.equal(torch.isnan(found), nan)
    assert bool((found.view(torch.int32)[nan] == 0x7FFFFFFF).all())
    assert torch.equal(found[~nan].view(torch.int32), expected[~nan].view(torch.int32))


def operands(family: str, seed: int, rows: int, count: int) -> Tensor:
    """uint8 codes [rows, count]."""
    bits = hash_bits(seed, rows, count)
    if family == "any":
        codes = bits % 256
        codes = torch.where(codes % 128 == 127, codes - 1, codes)
    elif family == "nan":
        codes = torch.where(bits % 64 == 0, torch.tensor(0x7F), bits >> 8 & 0xFF)
    elif family == "subnormal":
        codes = bits % 16 | (bits >> 8 & 128)
    elif family == "sparse":
        codes = torch.where(bits % 8 == 0, bits >> 8 & 0xF7, bits & 128)
    elif family == "powers":
        codes = (bits % 15) << 3 | (bits >> 8 & 128)
    else:  # narrow: nearly equal exponents, so that much cancels
        codes = (6 + bits % 3) << 3 | (bits >> 4 & 7) | (bits >> 8 & 128)
    return codes.to(torch.uint8)


FAMILIES = ("any", "nan", "subnormal", "sparse", "powers", "narrow")


def accumulators(family: str, seed: int, rows: int, columns: int) -> Tensor:
    draw = hash_bits(seed, rows, columns)
    value = ((draw % 65537) - 32768).to(torch.float32) * 2.0 ** (draw % 50 - 40).to(torch.float32)
    if family == "subnormal":
        value = value * 2.0**-100
    return torch.where(draw % 5 == 0, torch.zeros(()), value)


@pytest.mark.parametrize("family", FAMILIES)
def test_wgmma_e4m3_is_exact(family: str) -> None:
    rows, columns, count = 13, 24, 64
    a, b = operands(family, 1, rows, count), operands(family, 2, columns, count)
    c = accumulators(family, 3, rows, columns)
    c[0, :4] = torch.tensor([math.nan, 3e38, -3e38, 2.0**-149])
    d = torch.empty(rows, columns)
    core().dk_emulator_wgmma_e4m3(
        rows, columns, count, *(ctypes.c_void_p(tensor.data_ptr()) for tensor in (a, b, c, d))
    )
    left, right = a.tolist(), b.tolist()
    wanted = []
    for i in range(rows):
        for j in range(columns):
            value = float(c[i, j])
            for k in range(0, count, 32):
                value = fused(left[i][k : k + 32], right[j][k : k + 32], value, 13, 13)
            wanted.append(value)
    same_bits(d.flatten(), wanted)


@pytest.mark.parametrize("family", FAMILIES)
def test_mma_sync_e4m3_is_exact(family: str) -> None:
    for seed in range(4):
        a, b = operands(family, 10 + seed, 16, 32), operands(family, 20 + seed, 8, 32)
        c, d = accumulators(family, 30 + seed, 16, 8), torch.empty(16, 8)
        core().dk_emulator_mma_e4m3(*(ctypes.c_void_p(tensor.data_ptr()) for tensor in (a, b, c, d)))
        left, right = a.tolist(), b.tolist()
        halves = [[k for k in range(32) if k % 4 // 2 == half] for half in (0, 1)]
        wanted = []
        for i in range(16):
            for j in range(8):
                value = 0.0
                for half in halves:
                    value = fused([left[i][k] for k in half], [right[j][k] for k in half], value, 25, 23)
                wanted.append(float(torch.tensor(value, dtype=torch.float32) + c[i, j]))
        same_bits(d.flatten(), wanted)


def half_parts(bits: int, mantissa_bits: int) -> tuple[Fraction, int] | None:
    """Value and exponent of a finite bfloat16 or float16; None for the others."""
    exponent_bits = 15 - mantissa_bits
    field, mantissa = bits >> mantissa_bits & (1 << exponent_bits) - 1, bits & (1 << mantissa_bits) - 1
    if field == (1 << exponent_bits) - 1:
        return None
    exponent = max(field, 1) - (1 << exponent_bits - 1) + 1
    significand = Fraction(mantissa + (1 << mantissa_bits if field else 0), 1 << mantissa_bits)
    return significand * Fraction(2) ** exponent * (-1 if bits >> 15 else 1), exponent


@pytest.mark.parametrize("family", ["wide", "narrow", "tiny", "huge"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_steps_of_16_are_exact(dtype: torch.dtype, family: str) -> None:
    mantissa_bits = 7 if dtype == torch.bfloat16 else 10
    fields = (1 << 15 - mantissa_bits) - 1  # of the exponent, but for infinities
    rows, columns = 9, 16
    draws = [hash_bits(seed, count, 16) for seed, count in ((1, rows), (2, columns))]
    first, spread = {"wide": (0, fields), "narrow": (fields // 2 - 1, 3), "tiny": (0, fields // 4), "huge": (
        fields - 2, 2)}[family]  # fmt: skip
    codes = [
        (draw & 0x8000 | (first + (draw >> 16) % spread) << mantissa_bits | draw & (1 << mantissa_bits) - 1)
        for draw in draws
    ]
    a, b = (code.to(torch.int32).to(torch.uint16) for code in codes)
    c = accumulators(family, 3, rows, columns)
    d = torch.empty(rows, columns)
    core().dk_emulator_k16(
        int(dtype == torch.float16), rows, columns, *(ctypes.c_void_p(t.data_ptr()) for t in (a, b, c, d))
    )
    left, right = ([[half_parts(x, mantissa_bits) for x in row] for row in code.tolist()] for code in codes)
    wanted = [
        fused_parts(list(zip(left[i], right[j], strict=True)), float(c[i, j]), 25, 23)
        for i in range(rows)
        for j in range(columns)
    ]
    same_bits(d.flatten(), wanted)


def test_specials_in_steps_of_16() -> None:
    values = torch.ones(5, 16, dtype=torch.bfloat16)
    values[1, 3], values[2, 3], values[3, 4], values[4, 5] = math.inf, -math.inf, math.nan, 0.0
    a, b = values.view(torch.int16), values.view(torch.int16)
    c, d = torch.zeros(5, 5), torch.empty(5, 5)
    core().dk_emulator_k16(0, 5, 5, *(ctypes.c_void_p(t.data_ptr()) for t in (a, b, c, d)))
    wanted = (values.float() @ values.float().T).flatten().tolist()
    same_bits(d.flatten(), wanted)


# --- conversions ------------------------------------------------------------------------------------------------------


def test_f32_to_e4m3() -> None:
    codes = hash_bits(7, 1 << 16) << 1 | hash_bits(8, 1 << 16) % 2
    values = codes.to(torch.uint32).view(torch.float32)
    values[: 1 << 15] = (hash_bits(9, 1 << 15) % (1 << 20) - (1 << 19)).float() * 2.0**-9  # ties among them
    values[:6] = torch.tensor([math.inf, -math.inf, 448.0, 464.0, 2.0**-10, -0.0])
    found = torch.empty(1 << 16, dtype=torch.uint8)
    core().dk_emulator_e4m3_of(len(values), *(ctypes.c_void_p(t.data_ptr()) for t in (values, found)))
    nan = torch.isnan(values)
    wanted = values.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(found[~nan], wanted[~nan])
    assert bool((found[nan] == 0x7F).all())


def test_e4m3_to_f16() -> None:
    codes = torch.arange(256).to(torch.uint8)
    found = torch.empty(256, dtype=torch.int16)
    core().dk_emulator_f16_of_e4m3(256, *(ctypes.c_void_p(t.data_ptr()) for t in (codes, found)))
    wanted = codes.view(torch.float8_e4m3fn).half()
    nan = torch.isnan(wanted)
    assert torch.equal(found[~nan], wanted[~nan].view(torch.int16))
    assert bool((found[nan] == 0x7FFF).all())


def test_ex2_stays_within_its_bounds() -> None:
    """Against the exact value: +1.390 and -2.055 ulp, as measured on an H200."""
    values = (hash_bits(3, 1 << 17).double() / 2**31 * 254 - 126).float()
    values[: 1 << 16] = (hash_bits(4, 1 << 16).double() / 2**31 * 2 - 1).float()
    values[:4] = torch.tensor([0.0, -0.0, 1.0, -1.0])
    found = torch.empty(1 << 17)
    core().dk_emulator_ex2(len(values), *(ctypes.c_void_p(t.data_ptr()) for t in (values, found)))
    exact = torch.exp2(values.double())
    ulp = torch.exp2(torch.floor(values.double()) - 23)
    error = (found.double() - exact) / ulp
    assert float(error.max()) <= 1.39 and float(error.min()) >= -2.06
    assert float(error.max()) > 0.9 and float(error.min()) < -1.5  # an approximation, as on the card
    assert found[:4].tolist() == [1.0, 1.0, 2.0, 0.5]
    order = values.argsort()
    assert bool((found[order].diff() >= 0).all())  # it never falls
    edges = torch.tensor([-126.5, 128.0, -math.inf, math.inf])
    core().dk_emulator_ex2(4, *(ctypes.c_void_p(t.data_ptr()) for t in (edges, found)))
    assert found[:4].tolist() == [0.0, math.inf, 0.0, math.inf]


def test_f16_to_f32() -> None:
    codes = torch.arange(1 << 16).to(torch.int16)
    found = torch.empty(1 << 16)
    run_kernel(
        """for (i32 i = thread; i < 65536; i += 32) {
          const u16 code = ptx::load_global(reinterpret_cast<const u16*>(in0) + i);
          ptx::store_global(reinterpret_cast<float*>(out0) + i, ptx::float_of_f16(code));
        }""",
        inputs=[codes], outputs=[found],
    )  # fmt: skip
    wanted = codes.view(torch.float16).float()
    nan = torch.isnan(wanted)
    assert torch.equal(found[~nan].view(torch.int32), wanted[~nan].view(torch.int32))
    assert bool((found[nan].view(torch.int32) == 0x7FFFFFFF).all())


def test_f32_to_bf16_and_saturation() -> None:
    codes = hash_bits(5, 1 << 15) << 1 | hash_bits(6, 1 << 15) % 2
    codes[:8] = torch.tensor([0, 1 << 31, 0x7F800000, 0xFF800000, 0x7FC00000, 0x3F808000, 0x3F818000, 0x7F7FFFFF])
    values = codes.to(torch.uint32).view(torch.float32)
    rounded, clamped = torch.empty(1 << 15, dtype=torch.int16), torch.empty(1 << 15)
    run_kernel(
        """for (i32 i = thread; i < 32768; i += 32) {
          const float value = ptx::load_global(reinterpret_cast<const float*>(in0) + i);
          ptx::store_global(reinterpret_cast<u16*>(out0) + i, ptx::bf16_of(value));
          ptx::store_global(reinterpret_cast<float*>(out1) + i, ptx::mul_sat(value, 0.5f));
        }""",
        inputs=[values], outputs=[rounded, clamped],
    )  # fmt: skip
    nan = torch.isnan(values)
    assert torch.equal(rounded[~nan], values[~nan].bfloat16().view(torch.int16))
    assert bool((rounded[nan] == 0x7FFF).all())
    wanted = torch.where(nan, torch.zeros(()), (values * 0.5).clamp(0, 1))
    assert torch.equal(clamped.view(torch.int32), wanted.abs().view(torch.int32))


def test_pairs_of_f16() -> None:
    codes = hash_bits(7, 1 << 15) << 1 | hash_bits(8, 1 << 15) % 2
    codes[:1024] = 0x33000000 + 4099 * torch.arange(1024) * 8  # around the smallest ones
    codes[-1] = 0x7FC00000
    values = codes.to(torch.uint32).view(torch.float32)
    found = torch.empty(1 << 15, dtype=torch.int16)
    run_kernel(
        """for (i32 i = thread; i < 16384; i += 32) {
          const float* pair = reinterpret_cast<const float*>(in0) + 2 * i;
          ptx::store_global_x1(out0 + 4 * i, ptx::f16x2_of(ptx::load_global(pair), ptx::load_global(pair + 1)));
        }""",
        inputs=[values], outputs=[found],
    )  # fmt: skip
    nan = torch.isnan(values)
    assert torch.equal(found[~nan], values[~nan].half().view(torch.int16))
    assert bool((found[nan] == 0x7FFF).all())


def test_sums_rounded_down_and_logarithms() -> None:
    first = (hash_bits(9, 1 << 12).double() / 2**31 * 2 - 1).float() * torch.exp2(hash_bits(10, 1 << 12) % 30 - 4.0)
    first[0], first[1] = -0.0, 2.0**-140
    sums, logs = torch.empty(2, 1 << 12)
    run_kernel(
        """for (i32 i = thread; i < 4096; i += 32) {
          const float value = ptx::load_global(reinterpret_cast<const float*>(in0) + i);
          ptx::store_global(reinterpret_cast<float*>(out0) + i, ptx::add_rm(value, 12582912.0f));
          ptx::store_global(reinterpret_cast<float*>(out1) + i, ptx::lg2_approx_ftz(ptx::abs(value)));
        }""",
        inputs=[first], outputs=[sums, logs],
    )  # fmt: skip
    for value, found in zip(first.tolist(), sums.tolist(), strict=True):
        exact = Fraction(value) + 12582912
        above = Fraction(float(torch.nextafter(torch.tensor(found), torch.tensor(math.inf))))
        assert Fraction(found) <= exact < above
    assert torch.isneginf(logs[:2]).all(), "subnormal numbers are zeros"
    assert ((logs[2:] - first[2:].abs().double().log2()).abs() <= 2.0**-22 * logs[2:].abs().clamp(min=1)).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mma_of_16_bit_elements_with_transposed_rows(dtype: torch.dtype) -> None:
    """Small integers, so that the product is exact: a [16, 16] times b [16, 8], whose rows are k."""
    a, b = (hash_bits(seed, rows, columns) % 9 - 4 for seed, rows, columns in ((1, 16, 16), (2, 16, 16)))
    found = torch.zeros(2, 16, 8)
    name = "f16" if dtype == torch.float16 else "bf16"
    run_kernel(
        f"""for (i32 i = thread; i < 64; i += 32) {{
          const u8* from = i < 32 ? in0 : in1;
          u32 words[4];
          ptx::load_global_x4(words, from + i % 32 * 16);
          ptx::store_shared_x4(kBase + 16 * i, words[0], words[1], words[2], words[3]);
        }}
        ptx::sync_threads();
        const i32 row = thread % 16 * 32 + thread / 16 * 16;
        u32 a[4], b[4];
        ptx::ldmatrix_x4(a, kBase + row);
        ptx::ldmatrix_x4_trans(b, kBase + 512 + row);
        for (i32 half = 0; half < 2; ++half) {{
          float d[4] = {{}};
          const u32 octet[2] = {{b[2 * half], b[2 * half + 1]}};
          ptx::mma_m16n8k16_{name}(d, a, octet);
          for (i32 i = 0; i < 4; ++i)
            ptx::store_global(reinterpret_cast<float*>(out0) + half * 128 + (thread / 4 + i / 2 * 8) * 8 +
                              thread % 4 * 2 + i % 2, d[i]);
        }}""",
        inputs=[a.to(dtype), b.to(dtype)], outputs=[found],
    )  # fmt: skip
    wanted = a.double() @ b.double()
    assert torch.equal(found.double(), torch.stack((wanted[:, :8], wanted[:, 8:])))


# --- TMA and descriptors ----------------------------------------------------------------------------------------------

LOAD_ALL = """
  if (thread == 0) {
    ptx::mbarrier_init(kBase + 60000, 1);
    ptx::fence_mbarrier_init();
  }
  ptx::sync_threads();
  if (thread == 0) {
    ptx::mbarrier_arrive_expect_tx(kBase + 60000, %(bytes)d);
    ptx::tma_load_%(rank)dd(kBase + %(at)d, maps.map[0], kBase + 60000, %(coordinates)s);
  }
  ptx::mbarrier_wait(kBase + 60000, 0);
  for (i32 i = thread; i < %(bytes)d / 4; i += 32)
    ptx::store_global(reinterpret_cast<i32*>(out0) + i, ptx::load_shared_i32(kBase + %(at)d + 4 * i));
"""


def box_of(tensor: Tensor, box: list[int], at: list[int]) -> Tensor:
    """The box at a position, zeros where the tensor is not."""
    for d, (size, first) in enumerate(zip(box, at, strict=True)):
        index = torch.arange(first, first + size)
        inside = (index >= 0) & (index < tensor.shape[d])
        picked = tensor.index_select(d, index.clamp(0, tensor.shape[d] - 1))
        shape = [1] * tensor.dim()
        shape[d] = size
        tensor = picked * inside.to(picked.dtype).reshape(shape)
    return tensor


def swizzle(flat: Tensor, address: int, span: int) -> Tensor:
    """Where the bytes of a box land from `address` on: chunks of 16 change places inside lines of 128 bytes."""
    if span == 0:
        return flat
    result = torch.empty_like(flat)
    for offset in range(0, flat.numel(), 16):
        place = address + offset
        place ^= (place // 128 % (span // 16)) * 16
        result[place - address : place - address + 16] = flat[offset : offset + 16]
    return result


@pytest.mark.parametrize("span", [0, 32, 64, 128])
@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5])
def test_tma_loads_boxes(rank: int, span: int) -> None:
    inner = span or 48
    shape = [3, 4, 5, 9, 160][-rank:]
    box = [2, 1, 3, 16, inner][-rank:]
    tensor = (hash_bits(rank, *shape) % 255 + 1).to(torch.uint8)
    count = math.prod(box)
    for at in ([0] * rank, [1, 2, -1, -3, 128][-rank:], [-1, 3, 4, 5, -16][-rank:]):
        for base in (0, 1024 + 128):
            found = torch.zeros(count, dtype=torch.uint8)
            text = LOAD_ALL % {
                "bytes": count, "rank": rank, "at": base, "coordinates": ", ".join(str(x) for x in reversed(at)),
            }  # fmt: skip
            if base % 1024 and span:
                continue  # where the pattern begins elsewhere a box leaves its own bytes
            run_kernel(text, outputs=[found.view(torch.int32)], inputs=[tensor], maps=[Map(tensor, box, span)])
            wanted = swizzle(box_of(tensor, box, at).flatten(), base, span)
            assert torch.equal(found, wanted), (rank, span, at, base)


WGMMA = """
  if (thread == 0) {
    ptx::mbarrier_init(kBase + 60000, 1);
    ptx::fence_mbarrier_init();
  }
  ptx::sync_threads();
  if (thread == 0) {
    ptx::mbarrier_arrive_expect_tx(kBase + 60000, (64 + %(n)d) * %(span)d);
    ptx::tma_load_2d(kBase, maps.map[0], kBase + 60000, 0, 0);
    ptx::tma_load_2d(kBase + 64 * %(span)d, maps.map[1], kBase + 60000, 0, 0);
  }
  ptx::mbarrier_wait(kBase + 60000, 0);
  using Descriptor = tile::KMajorDescriptor<%(span)d>;
  const i32 row = thread / 32 * 16 + lane / 4;
  float d[%(n)d / 2];
  u32 a[%(span)d / 32][4];  // fragments, where a comes in registers
  for (i32 k = 0; k < %(span)d / 32; ++k)
    for (i32 i = 0; i < 4; ++i)
      a[k][i] = static_cast<u32>(ptx::load_global(reinterpret_cast<const i32*>(
          in0 + (row + i %% 2 * 8) * %(span)d + k * 32 + i / 2 * 16 + lane %% 4 * 4)));
  ptx::wgmma_fence();
  for (i32 k = 0; k < %(span)d / 32; ++k)
    ptx::wgmma_m64n%(n)dk32_e4m3%(call)s(
        d, %(a)s, Descriptor::make(Descriptor::low(kBase + 64 * %(span)d) + 2 * k), k > 0);
  ptx::wgmma_commit_group();
  ptx::wgmma_wait_group<0>(d);
  for (i32 i = 0; i < %(n)d / 2; ++i) {
    const i32 column = i / 4 * 8 + lane %% 4 * 2 + i %% 2;
    ptx::store_global(reinterpret_cast<float*>(out0) + (row + i / 2 %% 2 * 8) * %(n)d + column, d[i]);
  }
"""
IN_SHARED_MEMORY = "Descriptor::make(Descriptor::low(kBase) + 2 * k)"


@pytest.mark.parametrize("a", ["shared", "registers", "negated"])
@pytest.mark.parametrize("n", [32, 64, 128])
@pytest.mark.parametrize("span", [32, 64, 128])
def test_wgmma_reads_what_tma_wrote(span: int, n: int, a: str) -> None:
    left, right = e4m3_values(1, 64, span).view(torch.uint8), e4m3_values(2, n, span).view(torch.uint8)
    found, wanted = torch.zeros(64, n), torch.empty(64, n)
    call = {"shared": "", "registers": "<1>", "negated": "<-1>"}[a]
    run_kernel(
        WGMMA % {"span": span, "n": n, "call": call, "a": "a[k]" if call else IN_SHARED_MEMORY},
        threads=128, inputs=[left.view(torch.int32), right], outputs=[found],
        maps=[Map(left, [64, span], span), Map(right, [n, span], span)],
    )  # fmt: skip
    signed = left ^ 0x80 if a == "negated" else left
    tensors = (signed, right, torch.zeros(64, n), wanted)
    core().dk_emulator_wgmma_e4m3(64, n, span, *(ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors))
    assert torch.equal(found.view(torch.int32), wanted.view(torch.int32))


# Scores of 64 queries against KEYS keys of 128 elements, rounded to 16 bits, times values of WIDTH elements. All tiles
# are panels of 64 elements as one copy each writes them.
ATTENTION = """
  constexpr u32 kQ = kBase, kK = kQ + 64 * 256, kV = kK + KEYS * 256, kBarrier = kV + KEYS * WIDTH * 2;
  if (thread == 0) {
    ptx::mbarrier_init(kBarrier, 1);
    ptx::fence_mbarrier_init();
  }
  ptx::sync_threads();
  if (thread == 0) {
    ptx::mbarrier_arrive_expect_tx(kBarrier, kBarrier - kQ);
    ptx::tma_load_3d(kQ, maps.map[0], kBarrier, 0, 0, 0);
    ptx::tma_load_3d(kK, maps.map[1], kBarrier, 0, 0, 0);
    ptx::tma_load_3d(kV, maps.map[2], kBarrier, 0, 0, 0);
  }
  ptx::mbarrier_wait(kBarrier, 0);
  using KMajor = tile::KMajorDescriptor<128>;
  using Values = tile::MnMajorDescriptor<KEYS>;
  float s[KEYS / 2];
  ptx::wgmma_fence();
  for (i32 k = 0; k < 8; ++k)
    tile::wgmma_k16<DType::TYPE>(s, KMajor::make(KMajor::low(kQ) + tile::k_major_step<64>(k)),
                                 KMajor::make(KMajor::low(kK) + tile::k_major_step<KEYS>(k)), k > 0);
  ptx::wgmma_commit_group();
  ptx::wgmma_wait_group<0>(s);
  u32 p[KEYS / 16][4];
  for (i32 i = 0; i < KEYS / 4; ++i) p[i / 4][i % 4] = ptx::ROUND(s[2 * i], s[2 * i + 1]);
  float o[WIDTH / 2];
  ptx::wgmma_fence();  // of P V
  for (i32 k = 0; k < KEYS / 16; ++k)
    tile::wgmma_k16<DType::TYPE>(o, p[k], Values::make(Values::low(kV) + Values::step(k)), k > 0);
  ptx::wgmma_commit_group();
  ptx::wgmma_wait_group<0>(o);
  const i32 row = thread / 32 * 16 + lane / 4;
  for (i32 i = 0; i < WIDTH / 2; ++i) {
    const i32 column = i / 4 * 8 + lane % 4 * 2 + i % 2;
    ptx::store_global(reinterpret_cast<float*>(out0) + (row + i / 2 % 2 * 8) * WIDTH + column, o[i]);
  }
"""


def run_attention(
    keys: int = 80, width: int = 256, dtype: torch.dtype = torch.bfloat16, edits: tuple[tuple[str, str], ...] = ()
) -> tuple[Tensor, Tensor]:
    """What the kernel with the edits gives, and what it should: all numbers are integers that fit."""

    def panels(tensor: Tensor) -> Map:
        boxes = tensor.unflatten(1, (-1, 64)).transpose(0, 1)
        return Map(boxes, list(boxes.shape), swizzle=128)

    def integers(seed: int, rows: int, columns: int, most: int) -> Tensor:
        return (hash_bits(seed, rows, columns) % (2 * most + 1) - most).to(dtype)

    q, k, v = integers(1, 64, 128, 1), integers(2, keys, 128, 1), integers(3, keys, width, 9)
    body = ATTENTION
    for old, new in edits:
        assert old in body
        body = body.replace(old, new)
    words = {
        "TYPE": str(dtype).removeprefix("torch."),
        "ROUND": "bf16x2_of" if dtype == torch.bfloat16 else "f16x2_of",
        "KEYS": str(keys),
        "WIDTH": str(width),
    }
    body = re.sub(r"\b(TYPE|ROUND|KEYS|WIDTH)\b", lambda match: words[match[0]], body)
    found = torch.zeros(64, width)
    run_kernel(
        body, threads=128, smem_bytes=1 << 17, inputs=[q, k, v], outputs=[found], maps=[panels(t) for t in (q, k, v)]
    )
    return found, (q.double() @ k.double().T @ v.double()).float()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("keys", "width"), [(64, 128), (80, 256), (128, 64)])
def test_attention_by_wgmma(keys: int, width: int, dtype: torch.dtype) -> None:
    found, wanted = run_attention(keys, width, dtype)
    assert torch.equal(found, wanted)


_VALUES = "Values::make(Values::low(kV) + Values::step(k))"
_LOAD_V = "ptx::tma_load_3d(kV, maps.map[2], kBarrier, 0, 0, 0);"


@pytest.mark.parametrize(
    ("old", "new", "kind", "words"),
    [
        ("MnMajorDescriptor<KEYS>", "MnMajorDescriptor<64>", "descriptor", ("row 0 of panel 1", "row 64 of panel 0")),
        ("MnMajorDescriptor<KEYS>", "MnMajorDescriptor<160>", "descriptor", ("panel 1 of the box", "row 0 of panel 2")),
        (_VALUES, "KMajor::make(KMajor::low(kV) + Values::step(k))", "descriptor", ("16 bytes", "K-major one")),
        (_VALUES, _VALUES + " | 1 << 20", "descriptor", ("rank", "not masked")),
        (_VALUES, _VALUES + " ^ u64{3} << 62", "descriptor", ("MN-major", "128-byte swizzle alone")),
        ("Values::step(k)", "tile::k_major_step<KEYS>(k)", "descriptor", ("column 32",)),
        ("ptx::wgmma_fence();  // of P V", "", "accumulator", ("without wgmma.fence",)),
        ("ptx::wgmma_wait_group<0>(s);", "", "accumulator", ("in flight",)),
        ("ptx::wgmma_wait_group<0>(o);", "ptx::wgmma_wait_group<1>(o);", "accumulator", ("in flight",)),
        ("ptx::wgmma_wait_group<0>(o);", "++p[1][2]; ptx::wgmma_wait_group<0>(o);", "accumulator",
         ("register 2 of operand a", "overwritten")),
        ("ptx::wgmma_wait_group<0>(o);", f"if (thread == 0) {{ {_LOAD_V} }} ptx::wgmma_wait_group<0>(o);",
         "pending-async", ("still reads", "wgmma")),
        ("ptx::wgmma_wait_group<0>(o);", f"ptx::wgmma_wait_group<0>(o); if (thread == 0) {{ {_LOAD_V} }}",
         "race pending-async", ("wgmma of warp",)),
        ("float o[", "ptx::store_shared_i32(kV + 4 * thread, 0); ptx::sync_threads(); float o[", "proxy-fence",
         ("wgmma reads",)),
    ],
    ids=["panels too close", "panels too far", "K-major", "rank", "no swizzle", "K-major step", "no fence",
         "no wait for S", "wait that allows one", "P overwritten in flight", "V overwritten in flight",
         "V released without a barrier", "stores without a proxy fence"],
)  # fmt: skip
def test_faults_in_attention_by_wgmma(old: str, new: str, kind: str, words: tuple[str, ...]) -> None:
    with pytest.raises(EmulatorError) as caught:
        run_attention(edits=((old, new),))
    assert caught.value.kind in kind.split(), str(caught.value)
    for word in words:
        assert word in str(caught.value), str(caught.value)


# Warpgroups take turns: each adds one to what the one before it has written. Barrier 1 + g opens the turn of group g.
TURNS = """
  const i32 group = thread / 128, next = (group + 1) % GROUPS, before = (group + GROUPS - 1) % GROUPS;
  const auto word = [&](i32 of_group) { return kBase + 512 * of_group + 4 * (thread % 128); };
  ptx::store_shared_i32(word(group), 0);
  ptx::sync_threads();
  if (next == 0) ptx::barrier_arrive(1, 256);  // opens the first turn
  i32 value = 0;
  for (i32 round = 0; round < 3; ++round) {
    ptx::barrier_sync(1 + group, 256);
    value = ptx::load_shared_i32(word(before)) + 1;
    ptx::store_shared_i32(word(group), value);
    ptx::barrier_arrive(1 + next, 256);
  }
  ptx::store_global(reinterpret_cast<i32*>(out0) + thread, value);
"""


def run_turns(groups: int = 2, seed: int = 0, old: str = "", new: str = "") -> Tensor:
    """What the groups end with, by a kernel with the edit."""
    assert old in TURNS
    found = torch.zeros(groups, 128, dtype=torch.int32)
    body = (TURNS.replace(old, new) if old else TURNS).replace("GROUPS", str(groups))
    run_kernel(body, threads=128 * groups, outputs=[found], emulator=Emulator(seed=seed))
    return found


@pytest.mark.parametrize("seed", [0, 5, 6])
@pytest.mark.parametrize("groups", [2, 3])
def test_warpgroups_take_turns(groups: int, seed: int) -> None:
    """The last arrival of all is one that nobody waits for."""
    last = torch.arange(2 * groups + 1, 3 * groups + 1, dtype=torch.int32)
    assert torch.equal(run_turns(groups, seed), last[:, None].expand(groups, 128))


_OPENS = "if (next == 0) ptx::barrier_arrive(1, 256);"
_SYNC_TURN = "ptx::barrier_sync(1 + group, 256);"
_STORE_TURN = "ptx::store_shared_i32(word(group), value);"
_ARRIVE_TURN = "ptx::barrier_arrive(1 + next, 256);"


@pytest.mark.parametrize(
    ("old", "new", "kind", "words"),
    [
        (_OPENS, "", "deadlock",
         ("warps  0-3", "barrier 1: 128 of 256 threads", "warps  4-7", "barrier 2: 128 of 256 threads")),
        (_ARRIVE_TURN, f"if (round < 1 || thread >= 32) {_ARRIVE_TURN}", "deadlock", ("224 of 256 threads",)),
        (_OPENS, _OPENS.replace("256", "224"), "barrier", ("barrier 1", "256", "224", "has come to it")),
        (_OPENS, _OPENS + _OPENS, "barrier", ("comes to barrier 1",)),
        (_SYNC_TURN, "", "race barrier", ()),
        (_SYNC_TURN, f"ptx::load_shared_i32(word(before)); {_SYNC_TURN}", "race",
         ("reads", "writes", "nothing orders")),
        (_STORE_TURN + "\n    " + _ARRIVE_TURN, _ARRIVE_TURN + _STORE_TURN, "race", ("nothing orders",)),
        (_ARRIVE_TURN, f"{_ARRIVE_TURN} ptx::load_shared_i32(word(next));", "race", ("nothing orders",)),
    ],
    ids=["nobody opens the first turn", "one warp forgets to arrive", "another count", "an arrival twice", "no wait",
         "a read before the wait", "a store after the arrival", "a read after the arrival"],
)  # fmt: skip
@pytest.mark.parametrize("seed", [0, 5])
def test_faults_in_turns(old: str, new: str, kind: str, words: tuple[str, ...], seed: int) -> None:
    with pytest.raises(EmulatorError) as caught:
        run_turns(2, seed, old, new)
    assert caught.value.kind in kind.split(), str(caught.value)
    for word in words:
        assert word in str(caught.value), str(caught.value)


BULK = """
  ptx::mbarrier_arrive_expect_tx(barrier, %(expected)d);
  ptx::bulk_load(kBase + %(to)d, in0 + %(at)d, %(bytes)d, barrier, ptx::evict_first_policy());
  ptx::mbarrier_wait(barrier, 0);
"""


def test_bulk_copy() -> None:
    tensor, found = torch.arange(1024, dtype=torch.int32), torch.zeros(132, dtype=torch.int32)
    copy = BULK % {"expected": 528, "to": 16, "at": 48, "bytes": 528}
    body = (
        SETUP
        + f"""if (thread == 0) {{{copy}}}
  ptx::sync_threads();
  for (i32 i = thread; i < 132; i += 32)
    ptx::store_global(reinterpret_cast<i32*>(out0) + i, ptx::load_shared_i32(kBase + 16 + 4 * i));"""
    )
    run_kernel(body, inputs=[tensor], outputs=[found])
    assert torch.equal(found, tensor[12:144])


def test_byte_permute() -> None:
    """Bytes by number, and with the top bit of a nibble their signs."""
    found = torch.zeros(4, dtype=torch.int64)
    body = """
  const u32 results[] = {ptx::byte_permute(0x03020100u, 0x87060504u, 0x5140u),
                         ptx::byte_permute(0x03020100u, 0x87060504u, 0xfffff367u),
                         ptx::byte_permute(0x03020180u, 0x87060504u, 0x8f9eu),
                         ptx::reduce_add(static_cast<u32>(lane) + 0xfffffff0u)};
  if (thread == 0)
    for (i32 i = 0; i < 4; ++i) {
      ptx::store_global(reinterpret_cast<i32*>(out0) + 2 * i, static_cast<i32>(results[i]));
      ptx::store_global(reinterpret_cast<i32*>(out0) + 2 * i + 1, 0);
    }"""
    run_kernel(body, outputs=[found.view(torch.int32)])
    wanted = [0x05010400, 0xFF030687, 0xFFFF0000, (31 * 16 + 32 * 0xFFFFFFF0) & 0xFFFFFFFF]
    assert found.tolist() == wanted


# --- every check, by a kernel of a few lines --------------------------------------------------------------------------

SETUP = """
  const u32 barrier = kBase + 60000;
  if (thread == 0) {
    ptx::mbarrier_init(barrier, 1);
    ptx::fence_mbarrier_init();
  }
  ptx::sync_threads();
"""
# Rows of both operands by ordinary stores; no swizzle: 8 rows of 16 bytes are contiguous.
FILL = """
  for (i32 i = thread; i < 6144 / 4; i += 128) ptx::store_shared_i32(kBase + 4 * i, 0);
"""
PLAIN_WGMMA = """
  const auto describe = [](u32 addr) {  // columns of 16 bytes 128 apart, groups of 8 rows 256
    return static_cast<u64>(16) << 32 | static_cast<u64>(8) << 16 | addr >> 4;
  };
  float d[64] = {};
  ptx::wgmma_fence();
  ptx::wgmma_m64n128k32_e4m3(d, describe(kBase), describe(kBase + 2048), false);
  ptx::wgmma_commit_group();
"""
WAIT_WGMMA = "  ptx::wgmma_wait_group<0>(d);\n"
FENCE = "  ptx::fence_proxy_async();\n"
SYNC = "  ptx::sync_threads();\n"

# The second warpgroup fills what the first one multiplies.
ARRIVE_AND_WGMMA = (
    "if (thread >= 128) {"
    + FILL.replace("i = thread;", "i = thread - 128;")
    + "%s ptx::barrier_arrive(1, 256); } else { ptx::barrier_sync(1, 256);"
    + PLAIN_WGMMA
    + WAIT_WGMMA
    + "}"
)

# (name, body, options, kind, words); kind "" is a kernel that is right.
CHECKS: list[tuple[str, str, dict[str, object], str, tuple[str, ...]]] = [
    ("uninitialized", "ptx::load_shared_i32(kBase + 64);", {}, "uninitialized", ("smem+0x40", "warp 0")),
    ("half initialized", "ptx::store_shared_i32(kBase + 8 * thread, 1); ptx::load_shared_i64(kBase + 8 * thread);", {},
     "uninitialized", ("smem+0x",)),
    ("load beyond the block's memory", "ptx::load_shared_i32(kBase + 65536);", {}, "bounds", ("65536 bytes",)),
    ("load below it", "ptx::load_shared_i32(kBase - 4);", {}, "bounds", ("smem-4",)),
    ("misaligned load", "ptx::load_shared_i64(kBase + 4);", {}, "alignment", ("multiple of 8",)),
    ("write and read in two warps",
     "if (thread == 0) ptx::store_shared_i32(kBase, 1);\n if (thread == 32) ptx::load_shared_i32(kBase);",
     {"threads": 64}, "race", ("warp 0", "warp 1", "nothing orders")),
    ("bulk copy of too few bytes",
     SETUP + "if (thread == 0) {" + BULK % {"expected": 24, "to": 0, "at": 0, "bytes": 24} + "}",
     {"inputs": [torch.zeros(64, dtype=torch.uint8)]}, "bounds", ("24 bytes", "multiple of 16")),
    ("bulk copy from a misaligned place",
     SETUP + "if (thread == 0) {" + BULK % {"expected": 32, "to": 0, "at": 8, "bytes": 32} + "}",
     {"inputs": [torch.zeros(64, dtype=torch.uint8)]}, "alignment", ("bulk copy", "multiple of 16")),
    ("bulk copy beyond the tensor",
     SETUP + "if (thread == 0) {" + BULK % {"expected": 32, "to": 0, "at": 48, "bytes": 32} + "}",
     {"inputs": [torch.zeros(64, dtype=torch.uint8)]}, "bounds", ("bulk copy",)),
    ("bulk copy to a misaligned place",
     SETUP + "if (thread == 0) {" + BULK % {"expected": 32, "to": 8, "at": 0, "bytes": 32} + "}",
     {"inputs": [torch.zeros(64, dtype=torch.uint8)]}, "alignment", ("multiple of 16",)),
    ("write and read with a barrier between",
     "if (thread == 0) ptx::store_shared_i32(kBase, 1);\n ptx::sync_threads();\n ptx::load_shared_i32(kBase);",
     {"threads": 64}, "", ()),
    ("read and write in two warps",
     "if (thread == 0) ptx::store_shared_i32(kBase, 1);\n ptx::sync_threads();\n"
     "if (thread < 32) ptx::load_shared_i32(kBase);\n if (thread == 40) ptx::store_shared_i32(kBase, 2);",
     {"threads": 64}, "race", ("writes", "reads")),
    ("two writes",
     "ptx::store_shared_i32(kBase, 1);", {}, "race", ("wrote",)),
    ("a shuffle orders nothing",
     "if (lane == 0) ptx::store_shared_i32(kBase, 1);\n ptx::shuffle_xor(lane, 1);\n ptx::load_shared_i32(kBase);",
     {}, "race", ()),
    ("sync_warp orders",
     "if (lane == 0) ptx::store_shared_i32(kBase, 1);\n ptx::sync_warp();\n ptx::load_shared_i32(kBase);", {}, "", ()),
    ("an mbarrier orders",
     SETUP + "if (thread == 3) { ptx::store_shared_i32(kBase, 1); ptx::mbarrier_arrive(barrier); }\n"
     "ptx::mbarrier_wait(barrier, 0); ptx::load_shared_i32(kBase);", {"threads": 64}, "", ()),
    ("who has not waited knows nothing",
     SETUP + "if (thread == 3) { ptx::store_shared_i32(kBase, 1); ptx::mbarrier_arrive(barrier); }\n"
     "if (thread == 40) ptx::mbarrier_wait(barrier, 0);\n"
     "if (thread > 40) { ptx::mbarrier_wait(barrier, 0); ptx::load_shared_i32(kBase); }\n"
     "if (thread == 39) { ptx::mbarrier_arrive(barrier); ptx::load_shared_i32(kBase); }", {"threads": 64},
     "race uninitialized deadlock", ()),
    ("others of the warp have waited",
     SETUP + "if (thread == 3) { ptx::store_shared_i32(kBase, 1); ptx::mbarrier_arrive(barrier); }\n"
     "if (thread == 40) ptx::mbarrier_wait(barrier, 0);\n"
     "ptx::sync_warp(); if (thread >= 32) ptx::load_shared_i32(kBase);", {"threads": 64}, "", ()),
    ("wgmma after ordinary stores, no fence", FILL + SYNC + PLAIN_WGMMA + WAIT_WGMMA, {"threads": 128},
     "proxy-fence", ("wgmma reads", "the store is at")),
    ("wgmma after ordinary stores and a fence", FILL + FENCE + SYNC + PLAIN_WGMMA + WAIT_WGMMA, {"threads": 128},
     "", ()),
    ("the fence comes before the stores", FENCE + FILL + SYNC + PLAIN_WGMMA + WAIT_WGMMA, {"threads": 128},
     "proxy-fence", ()),
    ("no barrier before wgmma", FILL + FENCE + PLAIN_WGMMA + WAIT_WGMMA, {"threads": 128}, "race", ("wgmma reads",)),
    ("wgmma of empty memory", SYNC + PLAIN_WGMMA + WAIT_WGMMA, {"threads": 128}, "uninitialized", ("wgmma",)),
    ("wgmma that nobody waits for", FILL + FENCE + SYNC + PLAIN_WGMMA, {"threads": 128},
     "exit", ("has not waited for its wgmma",)),
    ("operand overwritten while wgmma reads it",
     FILL + FENCE + SYNC + PLAIN_WGMMA + "ptx::store_shared_i32(kBase + 4 * thread, 1);" + WAIT_WGMMA,
     {"threads": 128}, "pending-async", ("still reads", "read by")),
    ("operand overwritten when only the own warp has waited",
     FILL + FENCE + SYNC + PLAIN_WGMMA + WAIT_WGMMA
     + "if (thread < 32) ptx::store_shared_i32(kBase + 2048 + 4 * lane, 1);",
     {"threads": 128}, "race pending-async", ("wgmma of warp",)),
    ("accumulator added while in flight",
     FILL + FENCE + SYNC + PLAIN_WGMMA + "d[0] = ptx::fma(d[3], 2.0f, 1.0f);" + WAIT_WGMMA, {"threads": 128},
     "accumulator", ("in flight",)),
    ("accumulator stored while in flight",
     FILL + FENCE + SYNC + PLAIN_WGMMA + "ptx::store_global(reinterpret_cast<float*>(out0) + thread, d[1] + 1.0f);"
     + WAIT_WGMMA, {"threads": 128, "outputs": [torch.zeros(128)]}, "accumulator", ("in flight",)),
    ("one warp of four leaves wgmma out",
     FILL + FENCE + SYNC + "if (thread < 96) {" + PLAIN_WGMMA + WAIT_WGMMA + "}", {"threads": 128},
     "deadlock", ("warps of its warpgroup have not issued",)),
    ("descriptors that differ between warps",
     FILL + FENCE + SYNC + PLAIN_WGMMA.replace("describe(kBase),", "describe(kBase + (thread < 64 ? 0 : 256)),")
     + WAIT_WGMMA, {"threads": 128}, "divergence", ("different wgmma",)),
    ("descriptors that differ between lanes",
     FILL + FENCE + SYNC + PLAIN_WGMMA.replace("describe(kBase),", "describe(kBase + 256 * (lane / 31)),")
     + WAIT_WGMMA, {"threads": 128}, "divergence", ("lanes 0 and 31",)),
    ("descriptor with a base offset",
     FILL + FENCE + SYNC + PLAIN_WGMMA.replace("describe(kBase),", "describe(kBase) | u64{1} << 49,") + WAIT_WGMMA,
     {"threads": 128}, "descriptor", ("base offset",)),
    ("descriptor that points outside",
     FILL + FENCE + SYNC + PLAIN_WGMMA.replace("describe(kBase),", "describe(kBase + 65536),") + WAIT_WGMMA,
     {"threads": 128}, "bounds", ("wgmma",)),
    ("plain load of an mbarrier", SETUP + "ptx::load_shared_i64(barrier);", {}, "mbarrier", ("as data",)),
    ("arrival where no mbarrier is", "ptx::mbarrier_arrive(kBase);", {}, "mbarrier", ("no mbarrier",)),
    ("an mbarrier twice", SETUP + "if (thread == 0) ptx::mbarrier_init(barrier, 1);", {}, "mbarrier", ("again",)),
    ("an mbarrier used before its initialisation is known",
     "if (thread == 0) ptx::mbarrier_init(kBase, 1);\n if (thread == 33) ptx::mbarrier_arrive(kBase);",
     {"threads": 64}, "race", ("initialised",)),
    ("nobody arrives", SETUP + "ptx::mbarrier_wait(barrier, 0);", {}, "deadlock", ("0 of 1 arrivals", "parity 0")),
    ("a named barrier that others enter with another count",
     "ptx::barrier_sync(3, thread < 32 ? 64 : 96);", {"threads": 96}, "barrier", ("64", "96")),
    ("a named barrier that one warp never reaches", "if (thread < 64) ptx::barrier_sync(2, 96);", {"threads": 96},
     "deadlock", ("barrier 2: 64 of 96 threads",)),
    ("an arrival in a branch", "if (thread < 40) ptx::barrier_arrive(1, 64);", {"threads": 64}, "divergence", ()),
    ("an arrival of lanes at two barriers", "ptx::barrier_arrive(1 + lane / 31, 32);", {}, "divergence",
     ("the barrier differs", "lanes 0 and 31")),
    ("an arrival for no threads", "ptx::barrier_arrive(1, 0);", {}, "barrier", ("for 0 threads", "multiple of 32")),
    ("two arrivals in a phase",
     "if (thread < 32) ptx::barrier_arrive(1, 96), ptx::barrier_arrive(1, 96);\n else if (thread < 64)"
     " ptx::barrier_sync(1, 96);", {"threads": 96}, "barrier", ("comes to barrier 1 twice", "of 96", "it arrived at")),
    ("a wait in a phase that the warp has arrived in",
     "if (thread < 32) ptx::barrier_arrive(1, 96), ptx::barrier_sync(1, 96);\n else if (thread < 64)"
     " ptx::barrier_sync(1, 96);", {"threads": 96}, "barrier", ("comes to barrier 1 twice", "of 96", "it arrived at")),
    ("a warp that cannot know which phase it comes to", "ptx::barrier_arrive(1, 32);", {"threads": 64}, "barrier",
     ("in the phase before", "the last of them came at")),
    ("phases of arrivals alone", "ptx::barrier_arrive(1, 32); ptx::barrier_arrive(1, 32);", {}, "", ()),
    ("arrivals that nobody waits for", "if (thread < 32) ptx::barrier_arrive(1, 64);", {"threads": 64}, "", ()),
    ("an arrival orders nothing for who arrives",
     "if (lane == 0) ptx::store_shared_i32(kBase, 1);\n ptx::barrier_arrive(1, 32);\n ptx::load_shared_i32(kBase);",
     {}, "race", ("nothing orders",)),
    ("wgmma after ordinary stores and a fence of warps that arrive", ARRIVE_AND_WGMMA % FENCE, {"threads": 256},
     "", ()),
    ("wgmma after ordinary stores of warps that arrive, no fence", ARRIVE_AND_WGMMA % "", {"threads": 256},
     "proxy-fence", ("wgmma reads", "the store is at")),
    ("sync_threads in a branch", "if (thread < 40) ptx::sync_threads();", {"threads": 64}, "divergence", ()),
    ("lanes meet at two places",
     "if (lane < 16) ptx::shuffle(lane, 0);\n else ptx::shuffle(lane, 0);", {}, "divergence", ("one place",)),
    ("a lane ends before the others meet", "if (lane == 4) return;\n ptx::sync_warp();", {}, "divergence", ("end",)),
    ("cp.async that nobody waits for", "ptx::cp_async_16(kBase + 16 * thread, in0, 16); ptx::cp_async_commit_group();",
     {"inputs": [torch.zeros(16)]}, "exit", ("cp.async",)),
    ("cp.async read before it is there",
     "ptx::cp_async_16(kBase + 16 * thread, in0, 16); ptx::cp_async_commit_group();\n"
     "ptx::load_shared_i32(kBase + 16 * thread);", {"inputs": [torch.zeros(16)]}, "pending-async", ("in flight",)),
    ("cp.async of another thread",
     "ptx::cp_async_16(kBase + 16 * thread, in0, 16); ptx::cp_async_commit_group(); ptx::cp_async_wait_group<0>();\n"
     "ptx::load_shared_i32(kBase + 16 * (thread ^ 1));", {"inputs": [torch.zeros(16)]},
     "race pending-async uninitialized", ()),
    ("cp.async and a barrier",
     "ptx::cp_async_16(kBase + 16 * thread, in0, 16); ptx::cp_async_commit_group(); ptx::cp_async_wait_group<0>();\n"
     "ptx::sync_threads(); ptx::load_shared_i32(kBase + 16 * (thread ^ 1));", {"inputs": [torch.zeros(16)]}, "", ()),
    ("cp.async past the end", "ptx::cp_async_16(kBase + 16 * thread, in0 + 64, 16);", {"inputs": [torch.zeros(16)]},
     "bounds", ("in0 [16]", "past its last element")),
    ("a row too far", "ptx::load_global(reinterpret_cast<const float*>(in0) + 3);",
     {"inputs": [torch.zeros(4, 6)[:, :3]]}, "bounds", ("between its rows",)),
    ("misaligned global load", "ptx::load_global(reinterpret_cast<const float*>(in0 + 2));",
     {"inputs": [torch.zeros(4)]}, "alignment", ("multiple of 4",)),
    ("store to an input", "ptx::store_global(reinterpret_cast<float*>(const_cast<u8*>(in0)) + thread, 1.0f);",
     {"inputs": [torch.zeros(32)]}, "read-only", ("in0", "input")),
    ("read-only load of an output", "ptx::load_global(reinterpret_cast<const float*>(out0));",
     {"outputs": [torch.zeros(4)]}, "read-only", ("out0",)),
    ("all threads store one element", "ptx::store_global(reinterpret_cast<float*>(out0), 1.0f);",
     {"outputs": [torch.zeros(4)]}, "race", ("element 0 of out0",)),
    ("two blocks store one element", "if (thread == 0) ptx::store_global(reinterpret_cast<float*>(out0), 1.0f);",
     {"outputs": [torch.zeros(4)], "grid": 2}, "race", ("block 0",)),
    ("a plain pointer into shared memory", "*static_cast<i32*>(static_cast<void*>(&ptx::dynamic_smem<u8>())) = 1;", {},
     "direct-access", ("plain pointer",)),
    ("a plain pointer past a tensor", "const_cast<volatile u8*>(in0)[64];", {"inputs": [guarded(torch.zeros(16))]},
     "bounds", ("plain pointer",)),
    ("a stack that overflows", "const volatile i32 depth = 1 << 20; dig(depth);",
     {"prelude": "inline void dig(i32 n) { volatile char room[4096]; room[n % 4096] = 1; if (n > 0) dig(n - 1); "
      "room[0] = 2; }"}, "stack", ("kStackBytes",)),
    ("setmaxnreg that is no multiple of 8", "ptx::set_max_registers_down<100>();", {"threads": 128}, "registers", ()),
    ("setmaxnreg of one warp only", "if (thread < 32) ptx::set_max_registers_down<40>();", {"threads": 128},
     "registers", ("all warps",)),
    ("registers that nobody gives up", "ptx::set_max_registers_up<240>();", {"threads": 512}, "deadlock",
     ("registers",)),
    ("registers that others give up",
     "if (thread < 128) ptx::set_max_registers_up<152>();\n else ptx::set_max_registers_down<104>();",
     {"threads": 256 + 256}, "", ()),
    ("loads back what nobody wrote", "ptx::load_global_written(reinterpret_cast<const i32*>(out0) + thread);",
     {"outputs": [torch.zeros(32)]}, "uninitialized", ("element", "out0")),
    ("loads back what another lane wrote",
     "ptx::store_global(reinterpret_cast<i32*>(out0) + thread, 1);\n"
     "ptx::load_global_written(reinterpret_cast<const i32*>(out0) + (thread ^ 1));", {"outputs": [torch.zeros(32)]},
     "race uninitialized", ("element", "out0")),
    ("loads back what another lane wrote before they met",
     "ptx::store_global(reinterpret_cast<i32*>(out0) + thread, 1);\nptx::sync_threads();\n"
     "ptx::load_global_written(reinterpret_cast<const i32*>(out0) + (thread ^ 1));", {"outputs": [torch.zeros(32)]},
     "", ()),
    ("TMA from a column off a multiple of 16 bytes",
     SETUP + "if (thread == 0) ptx::tma_load_1d(kBase, maps.map[0], barrier, 3);",
     {"maps": [Map(torch.zeros(32), [32])]}, "tensor-map", ("coordinate 3", "multiple of 16")),
    ("TMA into memory that was stored to, no fence",
     SETUP + "ptx::store_shared_i32(kBase + 4 * thread, 1);\n" + SYNC + "if (thread == 0) {"
     "ptx::mbarrier_arrive_expect_tx(barrier, 128); ptx::tma_load_1d(kBase, maps.map[0], barrier, 0); }\n"
     "ptx::mbarrier_wait(barrier, 0);",
     {"maps": [Map(torch.zeros(32), [32])]}, "proxy-fence", ("the store is at",)),
    ("TMA to an address that is no multiple of 128",
     SETUP + "if (thread == 0) ptx::tma_load_1d(kBase + 64, maps.map[0], barrier, 0);",
     {"maps": [Map(torch.zeros(32), [32])]}, "alignment", ("128",)),
    ("a block that ends before its copy",
     SETUP + "if (thread == 0) { ptx::mbarrier_arrive_expect_tx(barrier, 256);"
     "ptx::tma_load_1d(kBase, maps.map[0], barrier, 0); }",
     {"maps": [Map(torch.zeros(32), [32])], "inputs": [torch.zeros(1)]}, "exit bounds", ()),
    ("a tensor map that is no parameter",
     "const ptx::TensorMap copy = maps.map[0];\n" + SETUP + "ptx::prefetch_tensor_map(copy);",
     {"maps": [Map(torch.zeros(32), [32])]}, "tensor-map", ("not a parameter",)),
]  # fmt: skip


@pytest.mark.parametrize(("body", "options", "kind", "words"), [c[1:] for c in CHECKS], ids=[c[0] for c in CHECKS])
@pytest.mark.parametrize("seed", [0, 5])
def test_check(body: str, options: dict[str, object], kind: str, words: tuple[str, ...], seed: int) -> None:
    if not kind:
        run_kernel(body, emulator=Emulator(seed=seed), **options)
        return
    with pytest.raises(EmulatorError) as caught:
        run_kernel(body, emulator=Emulator(seed=seed), **options)
    assert caught.value.kind in kind.split(), str(caught.value)
    for word in words:
        assert word in str(caught.value), str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"offset": 4}, "base"),
        ({"strides": [200, 1]}, "stride 1 is 200 bytes"),
        ({"box": [300, 16]}, "box dimension 1 is 300"),
        ({"box": [4, 24]}, "24 bytes, must be a multiple of 16"),
        ({"box": [4, 128], "swizzle": 64}, "128 bytes, more than the swizzle's 64"),
    ],
    ids=["base", "stride", "box", "inner", "swizzle"],
)
def test_tensor_maps_that_the_driver_refuses(options: dict[str, object], words: str) -> None:
    tensor = torch.zeros(16, 256, dtype=torch.uint8)
    given = Map(tensor, **{"box": [4, 64], **options})
    with pytest.raises(EmulatorError, match="tensor-map") as caught:
        run_kernel("ptx::prefetch_tensor_map(maps.map[0]);", inputs=[tensor], maps=[given])
    assert words in str(caught.value)


def test_undefined_behaviour_stops_a_sanitized_build() -> None:
    body = "const volatile i32 large = 2147483647;\n const volatile i32 sum = large + thread;\n static_cast<void>(sum);"
    run_kernel(body)
    with pytest.raises(EmulatorError, match="trap: mini: undefined behaviour"):
        run_kernel(body, emulator=Emulator(flags=SANITIZED_FLAGS))


def test_every_function_of_ptx_has_its_double() -> None:
    """Names and the number of parameters, up to the place that the emulator's take in addition."""

    def functions(folder: str, pattern: str) -> dict[str, set[int]]:
        found: dict[str, set[int]] = {}
        for path in sorted((build.ROOT / folder / "deep_kernels" / "ptx").glob("*.cuh")):
            text = re.sub(r"//.*", "", path.read_text())
            for name, parameters in re.findall(pattern + r"[\w:&<> ]*?(\w+)\(((?:[^()]|\([^()]*\))*)\)\s*\{", text):
                parameters = re.sub(r",?\s*At at = At::current\(\)", "", parameters)
                found.setdefault(name, set()).add(parameters.count(",") + 1 if parameters.strip() else 0)
        return found

    ours = functions("tests/emulator/include", r"(?:inline|template <[^>]*>\s*\n)\s*")
    theirs = functions("deep_kernels/include", r"DK_DEVICE ")
    assert len(theirs) > 50
    for name, counts in theirs.items():
        assert counts <= ours.get(name, set()), f"the emulator's ptx/ lacks {name} with {counts} parameters"
