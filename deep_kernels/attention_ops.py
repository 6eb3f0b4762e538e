"""Flash attention forward, for batches of one length and for packed ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _C


def flash_attn_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    ex2_emu_freq: int | None = None,
    ex2_emu_res: int | None = None,
    ex2_emu_start_frg: int | None = None,
    num_splits: int | None = None,
    out: Tensor | None = None,
    arch: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(softmax_scale * q @ k^T) @ v of every head, without holding the scores.

    Args:
        q: bfloat16 or float16 [batch, num_q, num_q_heads, head_dim], head_dim 64, 128 or 256. Rows contiguous, other
            strides any; on a card base and strides multiples of 16 bytes.
        k, v: as q, [batch, num_kv, num_kv_heads, head_dim]; num_q_heads is a multiple of num_kv_heads, of which each
            serves that many neighbouring query heads.
        causal: query i sees the keys j <= i + num_kv - num_q alone: the last query sees the last key.
        softmax_scale: None is head_dim ** -0.5; else greater than 0.
        return_lse: whether to return the logarithm of the sum as well.
        ex2_emu_freq, ex2_emu_res, ex2_emu_start_frg: which exponentials are computed by a polynomial instead of the
            special function unit: of a thread's part of a row of scores, the pairs whose even index k has
            k % freq >= freq - res, of no fragment before start_frg (0 if None) nor of the last of several. freq or
            res 0: none. All None: what was measured to be fastest. See ex2_emulated_share.
        num_splits: parts that the keys are cut into and that are worked on side by side, 1 to 128; None picks by sizes.
        out: where to write, as q, rows contiguous, no overlap with an input, judged by extents. It is returned.
        arch: as in fp8_fp4_mqa_logits.
    Units: lse is a natural logarithm of the sum of exp(softmax_scale * score).
    Returns:
        out as q, or (out, lse), lse float32 [batch, num_q_heads, num_q]. A query that sees no key, or only scores of
        -inf, gives 0 and -inf; a NaN score gives NaN. With explicit emulation and num_splits=1 a row has the same bits
        whatever other queries are in the call.
    Raises:
        ValueError: a tensor's shape, dtype, stride or device is not as above, or requires grad (forward only);
            softmax_scale, emulation or num_splits out of range, ex2_emu_freq without ex2_emu_res or the reverse.
        TypeError: an argument of another Python type.
        UnsupportedError: no kernel for the case on this backend; `supported` gives the same sentence.
        CompileError: the kernel had to be compiled and could not be.
    Source: the FlashAttention papers; emulation by Cody-Waite split and polynomial as in the fourth, its arguments
        named as there.
    """
    return _call(
        "flash_attn_fwd",
        (q, k, v),
        (causal, softmax_scale, ex2_emu_freq, ex2_emu_res, ex2_emu_start_frg, num_splits, arch),
        return_lse,
        out,
    )


def flash_attn_varlen_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    ex2_emu_freq: int | None = None,
    ex2_emu_res: int | None = None,
    ex2_emu_start_frg: int | None = None,
    num_splits: int | None = None,
    out: Tensor | None = None,
    arch: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """flash_attn_fwd of a batch whose members have their own lengths and lie one after the other.

    Args:
        q: bfloat16 or float16 [total_q, num_q_heads, head_dim], else as in flash_attn_fwd.
        k, v: as q, [total_k, num_kv_heads, head_dim].
        cu_seqlens_q, cu_seqlens_k: int32 [batch + 1], contiguous: member b has the tokens [cu[b], cu[b + 1]). Begin
            with 0, do not decrease and end with at most the tokens that are there, which is checked on the CPU; on a
            card what is not so is cut to what is there.
        max_seqlen_q, max_seqlen_k: lengths of the longest member. Hints: results do not depend on them.
        causal, softmax_scale, return_lse, ex2_emu_freq, ex2_emu_res, ex2_emu_start_frg, num_splits, out, arch: as in
            flash_attn_fwd; causal aligns each member by itself.
    Units: as flash_attn_fwd; lengths in tokens.
    Returns:
        out as q, or (out, lse), lse float32 [num_q_heads, total_q]. Tokens from cu_seqlens_q[-1] on are not written.
    Raises:
        ValueError, TypeError, UnsupportedError, CompileError: as flash_attn_fwd.
    Source: as flash_attn_fwd.
    """
    return _call(
        "flash_attn_varlen_fwd",
        (q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
        (causal, softmax_scale, ex2_emu_freq, ex2_emu_res, ex2_emu_start_frg, num_splits, arch),
        return_lse,
        out,
    )


def _call(
    name: str, inputs: tuple[Any, ...], options: tuple[Any, ...], return_lse: bool, out: Tensor | None
) -> Tensor | tuple[Tensor, Tensor]:
    if not torch.compiler.is_compiling():
        result: Tensor | tuple[Tensor, Tensor] = getattr(_C, name)(*inputs, (*options, return_lse), out)
        if result is not NotImplemented:
            return result
    if out is None:
        values, lse = getattr(torch.ops.deep_kernels, name)(*inputs, *options)
    else:
        values, lse = out, getattr(torch.ops.deep_kernels, f"{name}_out")(*inputs, *options, out)
    return (values, lse) if return_lse else values


def ex2_emulated_share(freq: int, res: int, start_frg: int = 0, *, fragment: int, num_fragments: int) -> float:
    """The share of a row's exponentials that ex2_emu_freq, ex2_emu_res and ex2_emu_start_frg emulate.

    Args:
        freq, res, start_frg: as ex2_emu_freq, ex2_emu_res and ex2_emu_start_frg of flash_attn_fwd.
        fragment: elements of a fragment, even, from 2 to 1048576. cpu: 32. sm89 and sm90: a thread's part of a row of
            one tile of keys, a quarter of the tile: sm89 16, at head_dim 256 8; sm90 32, 20 and 20 at head_dim 64, 128
            and 256, there 16 if causal.
        num_fragments: of a row of one tile, from 1 to 1048576. cpu: 4. sm89 and sm90: 1.
    Units: a share from 0 to 1.
    Returns:
        The share over a whole tile.
    Raises:
        ValueError: freq, res or start_frg negative, res greater than a freq that is not 0, a size out of range.
        TypeError: an argument that is no int.
    Source: the rule of flash_attn_fwd, counted.
    """
    return _C.ex2_emulated_share(freq, res, start_frg, fragment, num_fragments)


# --- fake versions: every output shape is a function of input shapes alone -------------------------------


def _fake_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    softmax_scale: float | None = None,
    ex2_emu_freq: int | None = None,
    ex2_emu_res: int | None = None,
    ex2_emu_start_frg: int | None = None,
    num_splits: int | None = None,
    arch: str | None = None,
) -> tuple[Tensor, Tensor]:
    options = (causal, softmax_scale, ex2_emu_freq, ex2_emu_res, ex2_emu_start_frg, num_splits, arch, True)
    _C.check_flash_attn_fwd(q, k, v, options, None)
    return torch.empty(q.shape, dtype=q.dtype, device=q.device), _empty_lse(q)


def _fake_attention_out(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    softmax_scale: float | None,
    ex2_emu_freq: int | None,
    ex2_emu_res: int | None,
    ex2_emu_start_frg: int | None,
    num_splits: int | None,
    arch: str | None,
    out: Tensor,
) -> Tensor:
    options = (causal, softmax_scale, ex2_emu_freq, ex2_emu_res, ex2_emu_start_frg, num_splits, arch, True)
    _C.check_flash_attn_fwd(q, k, v, options, out)
    return _empty_lse(q)


def _fake_varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool = False,
    softmax_scale: float | None = None,
    ex2_emu_freq: int | None = None,
    ex2_emu_res: int | None = None,
    ex2_emu_start_frg: int | None = None,
    num_splits: int | None = None,
    arch: str | None = None,
) -> tuple[Tensor, Tensor]:
    options = (causal, softmax_scale, ex2_emu_freq, ex2_emu_res, ex2_emu_start_frg, num_splits, arch, True)
    _C.check_flash_attn_varlen_fwd(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, options, None)
    return torch.empty(q.shape, dtype=q.dtype, device=q.device), _empty_lse(q)


def _fake_varlen_attention_out(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool,
    softmax_scale: float | None,
    ex2_emu_freq: int | None,
    ex2_emu_res: int | None,
    ex2_emu_start_frg: int | None,
    num_splits: int | None,
    arch: str | None,
    out: Tensor,
) -> Tensor:
    options = (causal, softmax_scale, ex2_emu_freq, ex2_emu_res, ex2_emu_start_frg, num_splits, arch, True)
    _C.check_flash_attn_varlen_fwd(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, options, out)
    return _empty_lse(q)


def _empty_lse(q: Tensor) -> Tensor:
    shape = (q.shape[0], q.shape[2], q.shape[1]) if q.dim() == 4 else (q.shape[1], q.shape[0])
    return torch.empty(shape, dtype=torch.float32, device=q.device)


for _name, _fake in (
    ("flash_attn_fwd", _fake_attention),
    ("flash_attn_fwd_out", _fake_attention_out),
    ("flash_attn_varlen_fwd", _fake_varlen_attention),
    ("flash_attn_varlen_fwd_out", _fake_varlen_attention_out),
):
    torch.library.register_fake(f"deep_kernels::{_name}", _fake, allow_override=True)
