"""FP8, MXFP8, MXFP4 and block-scaled FP8 tensors: quantize, dequantize, and the byte layout of a paged KV cache.

Everything here is plain torch, so it runs on CPU and CUDA, under torch.compile and on fake tensors, and needs
neither the extension nor a compiler. Rounding is to nearest even. Finite values are clamped before they are
converted, and NaN codes are written as bytes, because torch's own float32 -> e4m3 conversion of NaN, inf and
values above 448 is not the same in all versions. What rounds has no gradient and refuses an input that requires
one in grad mode, as the ops do; dequantizing is differentiable in a float32 scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "E2M1_MAX",
    "E2M1_VALUES",
    "E4M3_MAX",
    "FORMATS",
    "MX_BLOCK",
    "PAGE_SIZES",
    "SCALE_BLOCK",
    "SCALE_FORMATS",
    "dequantize_fp8",
    "dequantize_fp8_128x128",
    "dequantize_fp8_block128",
    "dequantize_mxfp4",
    "dequantize_mxfp8",
    "e2m1_to_float",
    "float_to_e2m1",
    "float_to_e4m3",
    "pack_paged_kv",
    "quantize_fp8",
    "quantize_fp8_128x128",
    "quantize_fp8_block128",
    "quantize_mxfp4",
    "quantize_mxfp8",
    "unpack_paged_kv",
]

E4M3_MAX = 448.0  # largest finite e4m3 value: 1.75 * 2^8
E2M1_MAX = 6.0  # largest e2m1 value: 1.5 * 2^2
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
MX_BLOCK = 32  # elements that share one UE8M0 exponent (OCP Microscaling Formats v1.0, section 5)
SCALE_BLOCK = 128  # elements that share one scale in the block-scaled FP8 formats
SCALE_FORMATS = ("fp32", "ue8m0")
FORMATS = ("fp8", "mxfp8", "mxfp4")
HEAD_DIMS = (32, 64, 128)  # an int32 scale holds four exponents, hence at most 4 * MX_BLOCK
PAGE_SIZES = (16, 32, 64, 128, 256)

_E4M3_NAN = 0x7F
_UE8M0_ONE = 0x7F  # 2^0
_UE8M0_NAN = 0xFF
_FLOAT32_MAX = 3.4028234663852886e38
_SCALE_BYTES = 4
_MIN_BLOCK_SCALE = 1e-12  # so that a block of zeros can be divided by its scale

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_E2M1_DTYPES = (torch.int8, torch.uint8, torch.float4_e2m1fn_x2)


def quantize_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantizes each row (last dimension) to e4m3 with one float32 scale.

    scale = max_d |x[.., d]| / 448, or 1 where that is zero;  values = e4m3(clamp(x / scale, -448, 448))

    A row that holds a NaN or an inf gets the scale NaN; in it NaN and inf elements become NaN, the others 0.

    Args:
        x: [.., D], float16, bfloat16, float32 or float64 (rounded to float32 first, finite values clamped to
            its range). Any leading shape, D >= 1.
    Returns:
        values: [.., D], float8_e4m3fn, contiguous.
        scale: [..], float32, in units of x per unit of values.
    Raises:
        TypeError: x is not a tensor.
        ValueError: dtype or shape is not as above, or x requires grad in grad mode.
    Source: amax scaling to the e4m3 range, "FP8 Formats for Deep Learning" (arXiv 2209.05433), section 3.
    """
    x = _as_float32("quantize_fp8", x, None)
    amax = x.abs().amax(dim=-1)
    # In float64, so that CPU, CUDA and compiled code agree on every bit of the scale however they divide.
    scale = (amax.double() / E4M3_MAX).float()
    finite = torch.isfinite(amax)
    scale = torch.where(finite, torch.where(scale > 0, scale, 1.0), float("nan"))
    divided = x / torch.where(finite, scale, 1.0).unsqueeze(-1)
    return float_to_e4m3(_zero_beside_nonfinite(divided, finite.unsqueeze(-1))), scale


def dequantize_fp8(values: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Undoes `quantize_fp8`.

    x[.., d] = values[.., d] * scale[..]

    Args:
        values: [.., D], float8_e4m3fn.
        scale: [..], float32.
        dtype: float16, bfloat16, float32 or float64: of the result. The product is rounded to it once from
            float32, or is exact in float64.
    Returns:
        [.., D], dtype, contiguous, in the units of scale.
    Raises:
        TypeError: an argument is not a tensor, or dtype not a torch.dtype.
        ValueError: a dtype, shape or device is not as above.
    Source: the definition of `quantize_fp8`.
    """
    name = "dequantize_fp8"
    _check_tensor(name, "values", values)
    _check_tensor(name, "scale", scale)
    work = _work_dtype(name, dtype)
    if values.dtype != torch.float8_e4m3fn or values.dim() == 0:
        raise ValueError(f"{name}: values must be float8_e4m3fn [.., head_dim], got {_describe(values)}")
    _check_scale(name, values, scale, torch.float32)
    return (values.to(torch.float32).to(work) * scale.to(work).unsqueeze(-1)).to(dtype)


def quantize_fp8_block128(x: Tensor, scale_fmt: str = "fp32") -> tuple[Tensor, Tensor]:
    """Quantizes each block of 128 elements (of the last dimension) to e4m3 with one scale.

    scale = max(max |x[block]| / 448, 1e-12);  values = e4m3(clamp(x * (1 / scale), -448, 448))

    With "ue8m0" the scale is rounded up to a power of two before it is used. A last part-filled block is one of its
    own. A block with an inf gets the scale inf, one with a NaN the scale NaN (0xff for both with "ue8m0"); in it NaN
    and inf elements become NaN, the others 0.

    Args:
        x: [.., K], float16, bfloat16, float32 or float64 (rounded to float32 first, finite values clamped to its
            range). Any leading shape, K >= 1.
        scale_fmt: "fp32" or "ue8m0".
    Returns:
        values: [.., K], float8_e4m3fn, contiguous.
        scale: [.., ceil(K / 128)], float32 or float8_e8m0fnu, in units of x per unit of values.
    Raises:
        TypeError: an argument has a wrong Python type.
        ValueError: scale_fmt, dtype or shape is not as above, or x requires grad in grad mode.
    Source: activations of block-scaled FP8 layers, DeepSeek-V3 report (arXiv 2412.19437), section 3.3.
    """
    name = "quantize_fp8_block128"
    _check_roundable(name, x)
    if x.dim() == 0 or x.size(-1) < 1:
        raise ValueError(f"{name}: x must be [.., K >= 1], got {_describe(x)}")
    if not isinstance(scale_fmt, str):
        raise TypeError(f"{name}: scale_fmt must be a str, got {type(scale_fmt).__name__}")
    if scale_fmt not in SCALE_FORMATS:
        raise ValueError(f"{name}: scale_fmt must be one of {_list(SCALE_FORMATS)}, got {scale_fmt!r}")
    return _quantized_fp8_block128(x, scale_fmt)


def _quantized_fp8_block128(x: Tensor, scale_fmt: str) -> tuple[Tensor, Tensor]:
    """The same of what has been checked."""
    blocks = _split_scale_blocks(_clamped_float32(x), -1)
    scale, factor = _scale_fp8_blocks(blocks.abs().amax(dim=-1), scale_fmt)
    values = _divide_blocks(blocks, factor.unsqueeze(-1))
    return values.flatten(-2)[..., : x.size(-1)].contiguous(), scale


def dequantize_fp8_block128(values: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Undoes `quantize_fp8_block128`.

    x[.., k] = values[.., k] * scale[.., k // 128]

    Args:
        values: [.., K], float8_e4m3fn.
        scale: [.., ceil(K / 128)], float32 or float8_e8m0fnu, whose 0xff is NaN.
        dtype: float16, bfloat16, float32 or float64: of the result. The product is rounded to it once from
            float32, or is exact in float64.
    Returns:
        [.., K], dtype, contiguous, in the units of scale.
    Raises:
        TypeError: an argument is not a tensor, or dtype not a torch.dtype.
        ValueError: a dtype, shape or device is not as above.
    Source: the definition of `quantize_fp8_block128`.
    """
    name = "dequantize_fp8_block128"
    work = _check_fp8_blocks(name, values, scale, dtype, (torch.float32, torch.float8_e8m0fnu), None)
    blocks = _split_scale_blocks(values.to(torch.float32).to(work), -1)
    product = blocks * _scale_factor(scale).to(work).unsqueeze(-1)
    return product.flatten(-2)[..., : values.size(-1)].to(dtype).contiguous()


def quantize_fp8_128x128(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantizes each block of 128 rows and 128 columns to e4m3 with one float32 scale.

    scale = max(max |weight[block]| / 448, 1e-12);  values = e4m3(clamp(weight * (1 / scale), -448, 448))

    Last part-filled blocks are blocks of their own; NaN and inf as in `quantize_fp8_block128`.

    Args:
        weight: [N, K], float16, bfloat16, float32 or float64 (rounded to float32 first, finite values clamped to its
            range). N >= 1, K >= 1.
    Returns:
        values: [N, K], float8_e4m3fn, contiguous.
        scale: [ceil(N / 128), ceil(K / 128)], float32, in units of weight per unit of values.
    Raises:
        TypeError: weight is not a tensor.
        ValueError: dtype or shape is not as above, or weight requires grad in grad mode.
    Source: weights of block-scaled FP8 layers, DeepSeek-V3 report (arXiv 2412.19437), section 3.3.
    """
    name = "quantize_fp8_128x128"
    _check_roundable(name, weight, "weight")
    if weight.dim() != 2 or weight.size(0) < 1 or weight.size(1) < 1:
        raise ValueError(f"{name}: weight must be [N >= 1, K >= 1], got {_describe(weight)}")
    num_rows, num_columns = weight.shape
    blocks = _split_tiles(_clamped_float32(weight))
    scale, factor = _scale_fp8_blocks(blocks.abs().amax(dim=(1, 3)), "fp32")
    values = _divide_blocks(blocks, factor[:, None, :, None])
    return _join_tiles(values)[:num_rows, :num_columns].contiguous(), scale


def dequantize_fp8_128x128(values: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Undoes `quantize_fp8_128x128`.

    weight[n, k] = values[n, k] * scale[n // 128, k // 128]

    Args:
        values: [N, K], float8_e4m3fn.
        scale: [ceil(N / 128), ceil(K / 128)], float32 or bfloat16.
        dtype: float16, bfloat16, float32 or float64: of the result. The product is rounded to it once from
            float32, or is exact in float64.
    Returns:
        [N, K], dtype, contiguous, in the units of scale.
    Raises:
        TypeError: an argument is not a tensor, or dtype not a torch.dtype.
        ValueError: a dtype, shape or device is not as above.
    Source: the definition of `quantize_fp8_128x128`.
    """
    name = "dequantize_fp8_128x128"
    work = _check_fp8_blocks(name, values, scale, dtype, (torch.float32, torch.bfloat16), 2)
    blocks = _split_tiles(values.to(torch.float32).to(work))
    product = _join_tiles(blocks * scale.to(work)[:, None, :, None])
    return product[: values.size(0), : values.size(1)].to(dtype).contiguous()


def quantize_mxfp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantizes each block of 32 elements to e4m3 with one power-of-two scale.

    e = ceil(log2(max |x[block]| / 448));  values = e4m3(clamp(x / 2^e, -448, 448));  stored exponent: e + 127

    The stored exponent is 0x7f (scale 1) for a block of zeros, 0xff (NaN) for a block that holds a NaN or an
    inf; in the latter the NaN and inf elements become NaN, the others 0. It never falls below 0 (2^-127).

    Args:
        x: [.., D], float16, bfloat16, float32 or float64 (rounded to float32 first, finite values clamped to
            its range). D is 32, 64 or 128.
    Returns:
        values: [.., D], float8_e4m3fn, contiguous.
        scale: [..], int32: byte b (little-endian) is the exponent of elements 32b..32b+31; unused bytes 0.
    Raises:
        TypeError: x is not a tensor.
        ValueError: dtype or shape is not as above, or x requires grad in grad mode.
    Source: OCP Microscaling Formats v1.0, sections 5 and 6, with the exponent rounded up: nothing saturates.
    """
    x = _as_float32("quantize_mxfp8", x, HEAD_DIMS)
    # 448 = 1.75 * 2^8: the significand decides whether amax still fits under 448 * 2^(exponent - 8).
    scaled, scale = _scale_mx_blocks(x, max_exponent=8, max_fraction=0x600000)
    return float_to_e4m3(scaled), scale


def dequantize_mxfp8(values: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Undoes `quantize_mxfp8`.

    x[.., d] = values[.., d] * 2^(exponent[.., d // 32] - 127), NaN where the exponent is 0xff

    Args:
        values: [.., D], float8_e4m3fn. D is 32, 64 or 128.
        scale: [..], int32, four exponents each (bytes past D / 32 ignored), or [.., D / 32], float8_e8m0fnu.
        dtype: float16, bfloat16, float32 or float64: of the result. The product is rounded to it once from
            float32, or is exact in float64.
    Returns:
        [.., D], dtype, contiguous.
    Raises:
        TypeError: an argument is not a tensor, or dtype not a torch.dtype.
        ValueError: a dtype, shape or device is not as above.
    Source: the definition of `quantize_mxfp8`.
    """
    name = "dequantize_mxfp8"
    _check_tensor(name, "values", values)
    work = _work_dtype(name, dtype)
    if values.dtype != torch.float8_e4m3fn or values.dim() == 0 or values.size(-1) not in HEAD_DIMS:
        raise ValueError(
            f"{name}: values must be float8_e4m3fn [.., head_dim in {_list(HEAD_DIMS)}], got {_describe(values)}"
        )
    return _apply_mx_scale(name, values.to(torch.float32), values, scale, work).to(dtype)


def quantize_mxfp4(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantizes each block of 32 elements to e2m1 with one power-of-two scale, two elements per byte.

    e = ceil(log2(max |x[block]| / 6));  values = e2m1(clamp(x / 2^e, -6, 6));  stored exponent: e + 127

    The stored exponent is 0x7f (scale 1) for a block of zeros, 0xff (NaN) for a block that holds a NaN or an
    inf; e2m1 itself has no NaN, so the elements of such a block are 0. It never falls below 0 (2^-127).

    Args:
        x: [.., D], float16, bfloat16, float32 or float64 (rounded to float32 first, finite values clamped to
            its range). D is 32, 64 or 128.
    Returns:
        values: [.., D / 2], int8, contiguous: element 2i in the low nibble of byte i, 2i + 1 in its high.
        scale: [..], int32: byte b (little-endian) is the exponent of elements 32b..32b+31; unused bytes 0.
    Raises:
        TypeError: x is not a tensor.
        ValueError: dtype or shape is not as above, or x requires grad in grad mode.
    Source: OCP Microscaling Formats v1.0, sections 5 and 6, with the exponent rounded up: nothing saturates.
    """
    x = _as_float32("quantize_mxfp4", x, HEAD_DIMS)
    # 6 = 1.5 * 2^2, as 448 above.
    scaled, scale = _scale_mx_blocks(x, max_exponent=2, max_fraction=0x400000)
    return float_to_e2m1(scaled.nan_to_num(0.0, 0.0, 0.0)), scale


def dequantize_mxfp4(values: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Undoes `quantize_mxfp4`.

    x[.., d] = e2m1(values, d) * 2^(exponent[.., d // 32] - 127), NaN where the exponent is 0xff

    Args:
        values: [.., D / 2], int8, uint8 or float4_e2m1fn_x2, low nibble first. D is 32, 64 or 128.
        scale: [..], int32, four exponents each (bytes past D / 32 ignored), or [.., D / 32], float8_e8m0fnu.
        dtype: float16, bfloat16, float32 or float64: of the result. The product is rounded to it once from
            float32, or is exact in float64.
    Returns:
        [.., D], dtype, contiguous.
    Raises:
        TypeError: an argument is not a tensor, or dtype not a torch.dtype.
        ValueError: a dtype, shape or device is not as above.
    Source: the definition of `quantize_mxfp4`.
    """
    name = "dequantize_mxfp4"
    _check_tensor(name, "values", values)
    work = _work_dtype(name, dtype)
    if values.dtype not in _E2M1_DTYPES or values.dim() == 0 or 2 * values.size(-1) not in HEAD_DIMS:
        raise ValueError(
            f"{name}: values must be int8, uint8 or float4_e2m1fn_x2 [.., head_dim / 2] with head_dim in "
            f"{_list(HEAD_DIMS)}, got {_describe(values)}"
        )
    return _apply_mx_scale(name, e2m1_to_float(values), values, scale, work).to(dtype)


def float_to_e4m3(x: Tensor) -> Tensor:
    """Converts to e4m3, nearest even; finite values beyond the range give +-448, NaN and inf give NaN (0x7f).

    y = e4m3(clamp(x, -448, 448))

    Args:
        x: [..], float16, bfloat16, float32 or float64 (rounded to float32 first).
    Returns:
        [..], float8_e4m3fn.
    Raises:
        TypeError: x is not a tensor.
        ValueError: x has another dtype, or requires grad in grad mode.
    Source: OCP 8-bit Floating Point Specification v1.0, section 5.
    """
    _check_roundable("float_to_e4m3", x)
    finite = torch.isfinite(x)
    # Inside +-448 torch's conversion is the plain nearest-even one in all versions; nothing else reaches it.
    codes = torch.where(finite, x, 0.0).clamp(-E4M3_MAX, E4M3_MAX).float().to(torch.float8_e4m3fn)
    return torch.where(finite, codes.view(torch.uint8), _E4M3_NAN).view(torch.float8_e4m3fn)


def float_to_e2m1(x: Tensor) -> Tensor:
    """Converts to e2m1, nearest even, two elements per byte; beyond the range gives +-6, NaN gives 0.

    byte i = e2m1(x[.., 2i]) + 16 * e2m1(x[.., 2i + 1])

    Args:
        x: [.., D], float16, bfloat16, float32 or float64. D is even.
    Returns:
        [.., D / 2], int8.
    Raises:
        TypeError: x is not a tensor.
        ValueError: x has another dtype or an odd last dimension, or requires grad in grad mode.
    Source: OCP Microscaling Formats v1.0, section 5.3.3.
    """
    _check_roundable("float_to_e2m1", x)
    if x.dim() == 0 or x.size(-1) % 2 != 0:
        raise ValueError(f"float_to_e2m1: x must have an even last dimension, got {_describe(x)}")
    magnitude = x.abs()
    # The code counts the midpoints passed. A tie goes to the even code, hence > and >= in turn.
    code = (torch.signbit(x) & ~torch.isnan(x)).to(torch.uint8) * 8
    for midpoint in (0.25, 1.25, 2.5, 5.0):
        code = code + (magnitude > midpoint)
    for midpoint in (0.75, 1.75, 3.5):
        code = code + (magnitude >= midpoint)
    return (code[..., 0::2] + code[..., 1::2] * 16).view(torch.int8)


def e2m1_to_float(values: Tensor) -> Tensor:
    """Unpacks e2m1 pairs, low nibble first.

    y[.., 2i], y[.., 2i + 1] = E2M1_VALUES[byte i % 16], E2M1_VALUES[byte i // 16]

    Args:
        values: [.., D / 2], int8, uint8 or float4_e2m1fn_x2.
    Returns:
        [.., D], float32.
    Raises:
        TypeError: values is not a tensor.
        ValueError: values has another dtype or no dimension.
    Source: OCP Microscaling Formats v1.0, section 5.3.3.
    """
    _check_tensor("e2m1_to_float", "values", values)
    if values.dtype not in _E2M1_DTYPES or values.dim() == 0:
        raise ValueError(
            f"e2m1_to_float: values must be int8, uint8 or float4_e2m1fn_x2 [.., head_dim / 2], got {_describe(values)}"
        )
    pairs = values.view(torch.uint8).to(torch.int32)
    table = torch.tensor(E2M1_VALUES, dtype=torch.float32, device=values.device)
    return table[torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(-2)]


def pack_paged_kv(values: Tensor, scale: Tensor, block_kv: int) -> Tensor:
    """Packs quantized KV tokens into pages: the values of a page first, its scales behind them.

    page p, as bytes: values[p * block_kv], .., values[(p + 1) * block_kv - 1], scale[p * block_kv], ..

    A last part-filled page is padded with zero bytes, in its values and in its scales.

    Args:
        values: [N, D], float8_e4m3fn, or [N, D / 2], int8, uint8 or float4_e2m1fn_x2. D is 32, 64 or 128.
        scale: [N], float32 (FP8) or int32 (MXFP8, MXFP4), or [N, D / 32], float8_e8m0fnu.
        block_kv: tokens per page: 16, 32, 64, 128 or 256.
    Returns:
        [ceil(N / block_kv), block_kv, 1, D + 4] (MXFP4: D / 2 + 4), uint8, contiguous.
    Raises:
        TypeError: an argument has a wrong Python type.
        ValueError: a dtype, shape, device or page size is not as above.
    Source: the paged layout that callers of fp8_fp4_paged_mqa_logits already use.
    """
    name = "pack_paged_kv"
    _check_tensor(name, "values", values)
    _check_tensor(name, "scale", scale)
    if isinstance(block_kv, bool) or not isinstance(block_kv, int):
        raise TypeError(f"{name}: block_kv must be an int, got {type(block_kv).__name__}")
    if block_kv not in PAGE_SIZES:
        raise ValueError(f"{name}: block_kv must be one of {_list(PAGE_SIZES)}, got {block_kv}")
    is_e2m1 = values.dtype in _E2M1_DTYPES
    if not is_e2m1 and values.dtype != torch.float8_e4m3fn:
        raise ValueError(
            f"{name}: values must be float8_e4m3fn, int8, uint8 or float4_e2m1fn_x2, got {_describe(values)}"
        )
    head_dim = values.size(-1) * (2 if is_e2m1 else 1) if values.dim() == 2 else 0
    if head_dim not in HEAD_DIMS:
        wanted = "[num_kv, head_dim / 2]" if is_e2m1 else "[num_kv, head_dim]"
        raise ValueError(
            f"{name}: values must be {wanted} with head_dim in {_list(HEAD_DIMS)}, got {_describe(values)}"
        )
    if is_e2m1 or scale.dtype != torch.float32:
        scale = _pack_exponents(_mx_exponents(name, values, head_dim, scale))
    else:
        _check_scale(name, values, scale, torch.float32)

    num_kv = values.size(0)
    num_blocks = (num_kv + block_kv - 1) // block_kv
    num_padding = num_blocks * block_kv - num_kv
    value_bytes = values.view(torch.uint8)
    scale_bytes = scale.unsqueeze(-1).contiguous().view(torch.uint8)
    padded = [
        torch.nn.functional.pad(part, (0, 0, 0, num_padding)).reshape(num_blocks, block_kv * part.size(-1))
        for part in (value_bytes, scale_bytes)
    ]
    return torch.cat(padded, dim=1).view(num_blocks, block_kv, 1, value_bytes.size(-1) + _SCALE_BYTES)


def unpack_paged_kv(cache: Tensor, format: str, head_dim: int) -> tuple[Tensor, Tensor]:
    """Undoes `pack_paged_kv`: every slot of every page in order, padding included.

    values[p * block_kv + t], scale[p * block_kv + t] = token t of page p

    Args:
        cache: [num_blocks, block_kv, 1, D + 4] (MXFP4: D / 2 + 4), uint8, any strides. block_kv is 16, 32,
            64, 128 or 256.
        format: "fp8", "mxfp8" or "mxfp4".
        head_dim: D: 32, 64 or 128.
    Returns:
        values: [num_blocks * block_kv, D], float8_e4m3fn, or [num_blocks * block_kv, D / 2], int8 (MXFP4).
        scale: [num_blocks * block_kv], float32 (FP8) or int32.
    Raises:
        TypeError: an argument has a wrong Python type.
        ValueError: a dtype, shape, format or head_dim is not as above.
    Source: the paged layout that callers of fp8_fp4_paged_mqa_logits already use.
    """
    name = "unpack_paged_kv"
    _check_tensor(name, "cache", cache)
    if not isinstance(format, str):
        raise TypeError(f"{name}: format must be a str, got {type(format).__name__}")
    if isinstance(head_dim, bool) or not isinstance(head_dim, int):
        raise TypeError(f"{name}: head_dim must be an int, got {type(head_dim).__name__}")
    if format not in FORMATS:
        raise ValueError(f"{name}: format must be one of {_list(FORMATS)}, got {format!r}")
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"{name}: head_dim must be one of {_list(HEAD_DIMS)}, got {head_dim}")
    value_size = head_dim // 2 if format == "mxfp4" else head_dim
    expected = f"uint8 [num_blocks, block_kv in {_list(PAGE_SIZES)}, 1, {value_size + _SCALE_BYTES}]"
    if (
        cache.dtype != torch.uint8
        or cache.dim() != 4
        or cache.size(1) not in PAGE_SIZES
        or cache.size(2) != 1
        or cache.size(3) != value_size + _SCALE_BYTES
    ):
        raise ValueError(f"{name}: cache of {format} must be {expected}, got {_describe(cache)}")

    num_blocks, block_kv = cache.size(0), cache.size(1)
    pages = cache.reshape(num_blocks, block_kv * (value_size + _SCALE_BYTES))
    split = block_kv * value_size
    values = pages[:, :split].reshape(num_blocks * block_kv, value_size).contiguous()
    scale = pages[:, split:].reshape(num_blocks * block_kv, _SCALE_BYTES).contiguous()
    return (
        values.view(torch.int8 if format == "mxfp4" else torch.float8_e4m3fn),
        scale.view(torch.float32 if format == "fp8" else torch.int32).squeeze(-1),
    )


# ------------------------------------------------------------------------------------------ blocks and scales


def _scale_mx_blocks(x: Tensor, max_exponent: int, max_fraction: int) -> tuple[Tensor, Tensor]:
    """Divides each block of x by a power of two, the smallest that lets no element pass the format's maximum.

    The maximum is (1 + max_fraction / 2^23) * 2^max_exponent. Working on the bits of amax keeps ceil(log2(.))
    exact where a logarithm in floating point is off by one: at and next to the maximum times a power of two.
    """
    blocks = _split_blocks(x)
    amax = blocks.abs().amax(dim=-1)
    bits = amax.view(torch.int32)
    rounded_up = (bits & 0x7FFFFF) > max_fraction
    exponents = ((bits >> 23) - max_exponent + rounded_up.to(torch.int32)).clamp_min(0)
    exponents = torch.where(amax == 0, _UE8M0_ONE, exponents)
    finite = torch.isfinite(amax)
    # The exponent is at most 253 here, so that 2^-e is a normal float32, and the product is exact or far
    # below half of the smallest code.
    inverse = ((254 - torch.where(finite, exponents, _UE8M0_ONE)) << 23).view(torch.float32)
    scaled = _zero_beside_nonfinite(blocks * inverse.unsqueeze(-1), finite.unsqueeze(-1))
    return scaled.flatten(-2), _pack_exponents(torch.where(finite, exponents, _UE8M0_NAN))


def _split_blocks(x: Tensor) -> Tensor:
    """[.., D] -> [.., D / 32, 32]."""
    return x.reshape(*x.shape[:-1], x.size(-1) // MX_BLOCK, MX_BLOCK)


def _split_scale_blocks(x: Tensor, dim: int) -> Tensor:
    """Dimension `dim` of size K -> two of ceil(K / 128) and 128, filled up with zeros; dim counts from the end."""
    num_blocks = (x.size(dim) + SCALE_BLOCK - 1) // SCALE_BLOCK
    padding = [0, 0] * (-dim - 1) + [0, num_blocks * SCALE_BLOCK - x.size(dim)]
    at = x.dim() + dim
    padded = torch.nn.functional.pad(x, padding)
    return padded.reshape(*x.shape[:at], num_blocks, SCALE_BLOCK, *x.shape[at + 1 :])


def _split_tiles(x: Tensor) -> Tensor:
    """[N, K] -> [ceil(N / 128), 128, ceil(K / 128), 128]."""
    return _split_scale_blocks(_split_scale_blocks(x, -1), -3)


def _join_tiles(x: Tensor) -> Tensor:
    """[a, b, c, d] -> [a * b, c * d]."""
    return x.flatten(2, 3).flatten(0, 1)


def _scale_fp8_blocks(amax: Tensor, scale_fmt: str) -> tuple[Tensor, Tensor]:
    """The scales of blocks in their format, and as float32."""
    # In float64, as quantize_fp8 does.
    scale = (amax.double() / E4M3_MAX).float().clamp_min(_MIN_BLOCK_SCALE)
    if scale_fmt == "fp32":
        return scale, scale
    exponents = (torch.where(torch.isfinite(amax), scale, 1.0).view(torch.int32) + 0x7FFFFF) >> 23
    exponents = torch.where(torch.isfinite(amax), exponents, _UE8M0_NAN)
    return exponents.to(torch.uint8).view(torch.float8_e8m0fnu), _exponent_factor(exponents)


def _divide_blocks(blocks: Tensor, factor: Tensor) -> Tensor:
    """The codes of blocks whose scales are `factor`, multiplied by the reciprocal as the ops do."""
    finite = torch.isfinite(factor)
    inverse = (1.0 / torch.where(finite, factor, 1.0).double()).float()
    return float_to_e4m3(_zero_beside_nonfinite(blocks * inverse, finite))


def _scale_factor(scale: Tensor) -> Tensor:
    """A scale of fp8 blocks as floats."""
    if scale.dtype != torch.float8_e8m0fnu:
        return scale
    return _exponent_factor(scale.view(torch.uint8).to(torch.int32))


def _exponent_factor(exponents: Tensor) -> Tensor:
    """int32 in 0..255 -> 2^(exponent - 127) in float32, NaN for 0xff."""
    # 2^-127 is half of the smallest normal number: the one exponent whose float32 is not exponent << 23.
    bits = torch.where(exponents == 0, 0x00400000, exponents << 23)
    return torch.where(exponents == _UE8M0_NAN, float("nan"), bits.view(torch.float32))


def _zero_beside_nonfinite(x: Tensor, group_is_finite: Tensor) -> Tensor:
    """Zeroes the finite elements of a group that holds a NaN or an inf: its scale is NaN anyway."""
    return torch.where(group_is_finite | ~torch.isfinite(x), x, 0.0)


def _pack_exponents(exponents: Tensor) -> Tensor:
    """[.., D / 32] int32 in 0..255 -> [..] int32, byte b from column b."""
    shifts = torch.arange(exponents.size(-1), dtype=torch.int32, device=exponents.device) * 8
    return (exponents << shifts).sum(dim=-1, dtype=torch.int32)


def _mx_exponents(name: str, values: Tensor, head_dim: int, scale: Tensor) -> Tensor:
    """Either form of an MX scale -> [.., D / 32] int32 in 0..255."""
    num_blocks = head_dim // MX_BLOCK
    lead = list(values.shape[:-1])
    packed = scale.dtype == torch.int32 and list(scale.shape) == lead
    unpacked = scale.dtype == torch.float8_e8m0fnu and list(scale.shape) == [*lead, num_blocks]
    if not packed and not unpacked:
        raise ValueError(
            f"{name}: scale must be int32 {lead} or float8_e8m0fnu {[*lead, num_blocks]}, got {_describe(scale)}"
        )
    _check_device(name, values, scale)
    if unpacked:
        return scale.view(torch.uint8).to(torch.int32)
    shifts = torch.arange(num_blocks, dtype=torch.int32, device=scale.device) * 8
    return (scale.unsqueeze(-1) >> shifts) & 0xFF


def _apply_mx_scale(name: str, decoded: Tensor, values: Tensor, scale: Tensor, work: torch.dtype) -> Tensor:
    """decoded: [.., D], float32, what `values` holds -> [.., D], work."""
    _check_tensor(name, "scale", scale)
    exponents = _mx_exponents(name, values, decoded.size(-1), scale)
    factor = _exponent_factor(exponents).to(work)
    return (_split_blocks(decoded.to(work)) * factor.unsqueeze(-1)).flatten(-2)


# --------------------------------------------------------------------------------------------------- refusals


def _as_float32(name: str, x: Tensor, head_dims: tuple[int, ...] | None) -> Tensor:
    """Checks the input of a quantizer; float64 is clamped first so that a finite value stays finite."""
    _check_roundable(name, x)
    if x.dim() == 0 or (x.size(-1) < 1 if head_dims is None else x.size(-1) not in head_dims):
        wanted = "head_dim >= 1" if head_dims is None else f"head_dim in {_list(head_dims)}"
        raise ValueError(f"{name}: x must be [.., {wanted}], got {_describe(x)}")
    return _clamped_float32(x)


def _clamped_float32(x: Tensor) -> Tensor:
    if x.dtype == torch.float64:
        x = torch.where(torch.isinf(x), x, x.clamp(-_FLOAT32_MAX, _FLOAT32_MAX))
    return x.to(torch.float32)


def _check_fp8_blocks(
    name: str,
    values: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    scale_dtypes: tuple[torch.dtype, ...],
    dim: int | None,
) -> torch.dtype:
    """Checks the input of a dequantizer of 128-blocks, [N, K] if dim is 2; returns the dtype to compute in."""
    _check_tensor(name, "values", values)
    _check_tensor(name, "scale", scale)
    work = _work_dtype(name, dtype)
    shape = "[N, K]" if dim == 2 else "[.., K]"
    if values.dtype != torch.float8_e4m3fn or values.dim() == 0 or values.dim() != (dim or values.dim()):
        raise ValueError(f"{name}: values must be float8_e4m3fn {shape}, got {_describe(values)}")
    blocked = 1 if dim is None else dim  # trailing dimensions that are cut into blocks
    lead, sizes = values.shape[: values.dim() - blocked], values.shape[values.dim() - blocked :]
    wanted = [*lead, *((size + SCALE_BLOCK - 1) // SCALE_BLOCK for size in sizes)]
    if scale.dtype not in scale_dtypes or list(scale.shape) != wanted:
        words = " or ".join(_word(one) for one in scale_dtypes)
        raise ValueError(f"{name}: scale must be {words} {wanted}, got {_describe(scale)}")
    _check_device(name, values, scale)
    return work


def _work_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name}: dtype must be a torch.dtype, got {type(dtype).__name__}")
    if dtype not in _FLOATS:
        raise ValueError(f"{name}: dtype must be float16, bfloat16, float32 or float64, got {_word(dtype)}")
    return torch.float64 if dtype == torch.float64 else torch.float32


def _check_tensor(name: str, argument: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: {argument} must be a torch.Tensor, got {type(value).__name__}")


def _check_roundable(name: str, x: Tensor, argument: str = "x") -> None:
    _check_tensor(name, argument, x)
    if x.dtype not in _FLOATS:
        raise ValueError(f"{name}: {argument} must be float16, bfloat16, float32 or float64, got {_describe(x)}")
    if x.layout != torch.strided:
        raise ValueError(f"{name}: {argument} must be a dense tensor, got {x.layout}")
    if _wants_gradient(x):
        raise ValueError(
            f"{name}: {argument} requires grad, but rounding has no gradient: call it under torch.no_grad() or detach "
            "the input"
        )


def _wants_gradient(x: Tensor) -> bool:
    """By either mode of differentiation; a tangent cannot be asked for while torch.compile traces."""
    if x.requires_grad and torch.is_grad_enabled():
        return True
    if torch.compiler.is_compiling():
        return False
    tangent = torch.autograd.forward_ad.unpack_dual(x).tangent  # type: ignore[no-untyped-call]
    return tangent is not None


def _check_scale(name: str, values: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
    if scale.dtype != dtype or scale.shape != values.shape[:-1]:
        raise ValueError(
            f"{name}: scale must be {_word(dtype)} {list(values.shape[:-1])}, the shape of values without "
            f"its last dimension, got {_describe(scale)}"
        )
    _check_device(name, values, scale)


def _check_device(name: str, values: Tensor, scale: Tensor) -> None:
    if scale.device != values.device:
        raise ValueError(f"{name}: scale must be on {values.device} like values, got {scale.device}")


def _describe(x: Tensor) -> str:
    return f"{_word(x.dtype)} {list(x.shape)}"


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _list(items: tuple[object, ...]) -> str:
    return "{" + ", ".join(str(item) for item in items) + "}"
