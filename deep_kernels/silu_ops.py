"""The ops of the FP8 prefill MLP: the fold, the block GEMM, and the activation with its quantization."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _C

_BLOCK = 128  # columns that share a scale
_SCALE_DTYPES = {"fp32": torch.float32, "ue8m0": torch.float8_e8m0fnu}


def fp8_silu_fold_prefill(
    x: Tensor,
    x_scale: Tensor,
    w_gate_up: Tensor,
    w_scale: Tensor,
    *,
    activation: str = "silu",
    clamp: float | None = None,
    alpha: float | None = None,
    up_offset: float = 0.0,
    round_bf16: bool = True,
    scale_fmt: str = "fp32",
    fused: bool | None = None,
    out: tuple[Tensor, Tensor] | None = None,
    arch: str | None = None,
) -> tuple[Tensor, Tensor]:
    """The first half of a gated FP8 MLP: gate_up GEMM, activation and block-128 quantization in one launch.

    g, u  = x @ w_gate^T, x @ w_up^T, every 128 of k times x_scale * w_scale in float32
    v     = bf16(bf16(act(g)) * u)
    scale = max(amax |v| over 128 columns / 448, 1e-12),  y = e4m3(v * (1 / scale))

    Args:
        x: float8_e4m3fn [num_tokens, k], rows contiguous, stride a multiple of 16 bytes; k a multiple of 16.
        x_scale: float32 [num_tokens, ceil(k / 128)], any strides, as formats.quantize_fp8_block128 makes them.
        w_gate_up: float8_e4m3fn [2 * intermediate_size, k], gate rows, then up rows; intermediate_size a multiple of
            16. Rows contiguous, stride a multiple of 16 bytes.
        w_scale: float32 or bfloat16 [2 * ceil(intermediate_size / 128), ceil(k / 128)], any strides: the blocks of the
            gate rows, then those of the up rows, as two tensors of formats.quantize_fp8_128x128 joined.
        activation: "silu", or "gelu_tanh". On cards silu of what lies below -87.3 is 0, at most 1.1e-36 off.
        clamp: None, or a limit > 0: gate at most that, up between minus that and that. NaN stays NaN.
        alpha: None, or the factor in gate * sigmoid(alpha * gate); silu alone.
        up_offset: added to up behind the clamp.
        round_bf16: False keeps act(g) and the product in float32.
        scale_fmt: "fp32", or "ue8m0": scales rounded up to a power of two before they are used.
        fused: None picks by what was measured, True is the fold, False the bits of fp8_block_gemm_nt followed by
            silu_mul_to_fp8_block128, which rounds g and u to bfloat16 before the activation.
        out: where to write, (y, y_scale) as returned, rows contiguous, no overlap. It is returned.
        arch: as in fp8_fp4_mqa_logits.
    Units: y times y_scale is in units of x times w times their scales.
    Returns:
        (y, y_scale): float8_e4m3fn [num_tokens, intermediate_size]; float32, or float8_e8m0fnu with "ue8m0",
        [num_tokens, ceil(intermediate_size / 128)]. A NaN or infinity in v makes NaN codes in its own block, whose
        scale is NaN or infinite, and touches no other.
    Raises:
        ValueError: a tensor's shape, dtype, stride or device is not as above, or requires grad (forward only);
            round_bf16=False with fused=False; alpha with gelu_tanh.
        TypeError: an argument of another Python type.
        UnsupportedError: no kernel for the case on this backend; `supported` gives the same sentence.
        CompileError: the kernel had to be compiled and could not be.
    Source: block scales of 1 x 128 and 128 x 128 as in the DeepSeek-V3 report; clamp, alpha and offset as in gpt-oss.
    """
    arguments = (
        x, x_scale, w_gate_up, w_scale, activation, clamp, alpha, up_offset, round_bf16, scale_fmt, fused, arch,
    )  # fmt: skip
    if not torch.compiler.is_compiling():
        result = _C.fp8_silu_fold_prefill(*arguments, out)
        if result is not NotImplemented:
            return result
    if out is None:
        y, y_scale = torch.ops.deep_kernels.fp8_silu_fold_prefill(*arguments)
        return y, y_scale
    torch.ops.deep_kernels.fp8_silu_fold_prefill_out(*arguments, *out)
    return out


def fp8_block_gemm_nt(
    x: Tensor,
    x_scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    *,
    arch: str | None = None,
) -> Tensor:
    """x @ w^T of block-scaled FP8 matrices, plus a residual: a layer of an FP8 model, or half of the fold's baseline.

    Args:
        x, x_scale: as in fp8_silu_fold_prefill.
        w: float8_e4m3fn [n, k], n a multiple of 16; rows contiguous, stride a multiple of 16 bytes.
        w_scale: float32 or bfloat16 [ceil(n / 128), ceil(k / 128)], any strides, as formats.quantize_fp8_128x128.
        out_dtype: bfloat16 or float32.
        residual: None, or bfloat16 [num_tokens, n], with a float32 result also float32; rows contiguous. It is added
            to the sum, which a bfloat16 result has rounded before.
        out: where to write, [num_tokens, n] of out_dtype, rows contiguous, no overlap. It is returned.
        arch: as in fp8_fp4_mqa_logits.
    Units: those of x times w times their scales.
    Returns:
        [num_tokens, n] of out_dtype.
    Raises:
        ValueError, TypeError, UnsupportedError, CompileError: as fp8_silu_fold_prefill.
    Source: promotion to float32 every 128 of k as in the DeepSeek-V3 report.
    """
    arguments = (x, x_scale, w, w_scale, out_dtype, residual, arch)
    if not torch.compiler.is_compiling():
        result = _C.fp8_block_gemm_nt(*arguments, out)
        if result is not NotImplemented:
            return result
    if out is None:
        product: Tensor = torch.ops.deep_kernels.fp8_block_gemm_nt(*arguments)
        return product
    torch.ops.deep_kernels.fp8_block_gemm_nt_out(*arguments, out)
    return out


def silu_mul_to_fp8_block128(
    gate_up: Tensor,
    *,
    activation: str = "silu",
    clamp: float | None = None,
    alpha: float | None = None,
    up_offset: float = 0.0,
    scale_fmt: str = "fp32",
    out: tuple[Tensor, Tensor] | None = None,
    arch: str | None = None,
) -> tuple[Tensor, Tensor]:
    """The gated activation and block-128 quantization of fp8_silu_fold_prefill, of a gate_up that exists already.

    Args:
        gate_up: bfloat16 [num_tokens, 2 * intermediate_size], gate columns, then up columns, intermediate_size a
            multiple of 16; rows contiguous.
        activation, clamp, alpha, up_offset, scale_fmt, out, arch: as in fp8_silu_fold_prefill.
    Units: y times y_scale is in units of gate_up.
    Returns:
        (y, y_scale) as fp8_silu_fold_prefill.
    Raises:
        ValueError, TypeError, UnsupportedError, CompileError: as fp8_silu_fold_prefill.
    Source: as fp8_silu_fold_prefill.
    """
    arguments = (gate_up, activation, clamp, alpha, up_offset, scale_fmt, arch)
    if not torch.compiler.is_compiling():
        result = _C.silu_mul_to_fp8_block128(*arguments, out)
        if result is not NotImplemented:
            return result
    if out is None:
        y, y_scale = torch.ops.deep_kernels.silu_mul_to_fp8_block128(*arguments)
        return y, y_scale
    torch.ops.deep_kernels.silu_mul_to_fp8_block128_out(*arguments, *out)
    return out


# --- fake versions: every output shape is a function of input shapes alone -------------------------------


def _empty_pair(num_tokens: int, columns: int, scale_fmt: str, device: torch.device) -> tuple[Tensor, Tensor]:
    blocks = (columns + _BLOCK - 1) // _BLOCK
    codes = torch.empty((num_tokens, columns), dtype=torch.float8_e4m3fn, device=device)
    return codes, torch.empty((num_tokens, blocks), dtype=_SCALE_DTYPES[scale_fmt], device=device)


def _fake_silu_fold(
    x: Tensor,
    x_scale: Tensor,
    w_gate_up: Tensor,
    w_scale: Tensor,
    activation: str = "silu",
    clamp: float | None = None,
    alpha: float | None = None,
    up_offset: float = 0.0,
    round_bf16: bool = True,
    scale_fmt: str = "fp32",
    fused: bool | None = None,
    arch: str | None = None,
) -> tuple[Tensor, Tensor]:
    _C.check_fp8_silu_fold_prefill(
        x, x_scale, w_gate_up, w_scale, activation, clamp, alpha, up_offset, round_bf16, scale_fmt, fused, arch, None
    )
    return _empty_pair(x.shape[0], w_gate_up.shape[0] // 2, scale_fmt, x.device)


def _fake_silu_fold_out(
    x: Tensor,
    x_scale: Tensor,
    w_gate_up: Tensor,
    w_scale: Tensor,
    activation: str,
    clamp: float | None,
    alpha: float | None,
    up_offset: float,
    round_bf16: bool,
    scale_fmt: str,
    fused: bool | None,
    arch: str | None,
    out: Tensor,
    out_scale: Tensor,
) -> None:
    _C.check_fp8_silu_fold_prefill(
        x, x_scale, w_gate_up, w_scale, activation, clamp, alpha, up_offset, round_bf16, scale_fmt, fused, arch,
        (out, out_scale),
    )  # fmt: skip


def _fake_block_gemm(
    x: Tensor,
    x_scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    residual: Tensor | None = None,
    arch: str | None = None,
) -> Tensor:
    _C.check_fp8_block_gemm_nt(x, x_scale, w, w_scale, out_dtype, residual, arch, None)
    return torch.empty((x.shape[0], w.shape[0]), dtype=out_dtype, device=x.device)


def _fake_block_gemm_out(
    x: Tensor,
    x_scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    out_dtype: torch.dtype,
    residual: Tensor | None,
    arch: str | None,
    out: Tensor,
) -> None:
    _C.check_fp8_block_gemm_nt(x, x_scale, w, w_scale, out_dtype, residual, arch, out)


def _fake_silu_mul(
    gate_up: Tensor,
    activation: str = "silu",
    clamp: float | None = None,
    alpha: float | None = None,
    up_offset: float = 0.0,
    scale_fmt: str = "fp32",
    arch: str | None = None,
) -> tuple[Tensor, Tensor]:
    _C.check_silu_mul_to_fp8_block128(gate_up, activation, clamp, alpha, up_offset, scale_fmt, arch, None)
    return _empty_pair(gate_up.shape[0], gate_up.shape[1] // 2, scale_fmt, gate_up.device)


def _fake_silu_mul_out(
    gate_up: Tensor,
    activation: str,
    clamp: float | None,
    alpha: float | None,
    up_offset: float,
    scale_fmt: str,
    arch: str | None,
    out: Tensor,
    out_scale: Tensor,
) -> None:
    _C.check_silu_mul_to_fp8_block128(gate_up, activation, clamp, alpha, up_offset, scale_fmt, arch, (out, out_scale))


for _name, _fake in (
    ("fp8_silu_fold_prefill", _fake_silu_fold),
    ("fp8_silu_fold_prefill_out", _fake_silu_fold_out),
    ("fp8_block_gemm_nt", _fake_block_gemm),
    ("fp8_block_gemm_nt_out", _fake_block_gemm_out),
    ("silu_mul_to_fp8_block128", _fake_silu_mul),
    ("silu_mul_to_fp8_block128_out", _fake_silu_mul_out),
):
    torch.library.register_fake(f"deep_kernels::{_name}", _fake, allow_override=True)
