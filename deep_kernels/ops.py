"""The public ops. Plain tensors take the pybind11 path; tracing, modes and subclasses go through torch.ops."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _C, _runtime

_ROW_ALIGN_BYTES = 1024


def fp8_fp4_mqa_logits(
    q: tuple[Tensor, Tensor | None],
    kv: tuple[Tensor, Tensor],
    weights: Tensor,
    cu_seq_len_k_start: Tensor,
    cu_seq_len_k_end: Tensor,
    clean_logits: bool = True,
    max_seqlen_k: int = 0,
    logits_dtype: torch.dtype = torch.float32,
    schedule_meta: Tensor | None = None,
    *,
    reduction: str = "exact",
    out: Tensor | None = None,
    arch: str | None = None,
) -> Tensor:
    """Weighted ReLU logits of multi-query attention, the score of a sparse-attention indexer.

    logits[i, j] = sum_h weights[i, h] * relu(dot(q[i, h, :], kv[j, :])) * kv_scale[j],  start[i] <= j < end[i]

    Args:
        q: (values, scale). FP8: float8_e4m3fn [num_q, num_heads, head_dim] and None. MXFP8: the same values and
            int32 [num_q, num_heads], byte b being the UE8M0 exponent of elements 32b..32b+31, or float8_e8m0fnu
            [num_q, num_heads, head_dim / 32]. MXFP4: e2m1 pairs, low nibble first, as int8, uint8 or
            float4_e2m1fn_x2 [num_q, num_heads, head_dim / 2], and a scale as MXFP8. num_heads from 1 to 128,
            head_dim 32, 64 or 128 (MXFP4 on a card: 64 or 128). Rows contiguous, other strides multiples of 16 bytes.
        kv: (values, scale). Values as q without heads, [num_kv, ...]. Scale: FP8 float32 [num_kv], applied after
            the sum over heads; MX int32 [num_kv] or float8_e8m0fnu [num_kv, head_dim / 32], inside the dot product.
        weights: float32, bfloat16 or float16 [num_q, num_heads], rows contiguous.
        cu_seq_len_k_start, cu_seq_len_k_end: int32 [num_q], half-open window of kv tokens per row, each clamped to
            [0, num_kv]; start >= end is an empty row.
        clean_logits: True writes -inf to every column outside the row's window, False leaves them unspecified.
        max_seqlen_k: 0, or the width of compressed logits, whose column c is kv token start + c; longer windows are
            cut off there.
        logits_dtype: float32 or bfloat16.
        schedule_meta: int32 of get_mqa_logits_metadata, a hint: any content gives the same bits.
        reduction: "exact" is the formula; "folded" may move half of the head sum onto the tensor cores, where a
            backend has it, so that a logit that is truly 0 becomes noise of about 1e-4 of sum |w x|, a few times that
            where scores have one sign, and a token with an infinite weight becomes NaN.
        out: where to write, [num_q, num_kv or max_seqlen_k] of logits_dtype, rows contiguous, no overlap with an
            input, judged by extents, from the first byte to the last. It is returned.
        arch: backend, target or both ("sm89", "sm_90a", "sm89:sm_90a") instead of what suits the card; ignored for
            CPU tensors.
    Units: windows in kv tokens; logits in units of weights times values times scales.
    Returns:
        [num_q, num_kv], or [num_q, max_seqlen_k] if that is not 0; rows at multiples of 1024 bytes, and always further
        apart than they are wide, unless out is given.
    Raises:
        ValueError: a tensor's shape, dtype, stride or device is not as above, or requires grad (forward only).
        TypeError: an argument of another Python type.
        UnsupportedError: no kernel for the case on this backend; `supported` gives the same sentence.
        CompileError: the kernel had to be compiled and could not be.
    Source: the lightning indexer of the DeepSeek-V3.2 report; names and order of arguments as DeepGEMM's callers use.
    """
    if not torch.compiler.is_compiling():
        result = _C.fp8_fp4_mqa_logits(
            q, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, clean_logits, max_seqlen_k, logits_dtype,
            schedule_meta, reduction, arch, out,
        )  # fmt: skip
        if result is not NotImplemented:
            return result
    q_values, q_scale = q
    kv_values, kv_scale = kv
    inputs = (q_values, q_scale, kv_values, kv_scale, weights, cu_seq_len_k_start, cu_seq_len_k_end)
    options = (clean_logits, max_seqlen_k, logits_dtype, schedule_meta, reduction, arch)
    if out is None:
        logits: Tensor = torch.ops.deep_kernels.fp8_fp4_mqa_logits(*inputs, *options)
        return logits
    torch.ops.deep_kernels.fp8_fp4_mqa_logits_out(*inputs, *options, out)
    return out


def get_mqa_logits_metadata(
    cu_seq_len_k_start: Tensor,
    cu_seq_len_k_end: Tensor,
    num_kv_tokens: int,
    num_heads: int,
    *,
    arch: str | None = None,
) -> Tensor:
    """Cuts the work of fp8_fp4_mqa_logits into equal runs, one per SM, so that each call need not do it itself.

    Args:
        cu_seq_len_k_start, cu_seq_len_k_end: int32 [num_q], the windows that the logits will be asked for.
        num_kv_tokens: kv tokens, num_kv of the call. num_heads: heads of q, from 1 to 128.
        arch: as in fp8_fp4_mqa_logits.
    Units: an opaque list of (query block, chunk of 256 kv tokens) pairs.
    Returns:
        int32 [2 * (num_sms + 1)] on the device of the windows, num_sms as get_num_sms() on CPU tensors (1 unless
        set) and the card's count, limited by set_num_sms, on CUDA tensors.
    Raises:
        ValueError, TypeError: as fp8_fp4_mqa_logits.
    Source: split scheduling as in DeepGEMM's function of this name; the balance is this project's.
    """
    if not torch.compiler.is_compiling():
        result = _C.get_mqa_logits_metadata(cu_seq_len_k_start, cu_seq_len_k_end, num_kv_tokens, num_heads, None, arch)
        if result is not NotImplemented:
            return result
    num_sms = _runtime.schedule_sms(cu_seq_len_k_start.device, arch)
    schedule: Tensor = torch.ops.deep_kernels.get_mqa_logits_metadata(
        cu_seq_len_k_start, cu_seq_len_k_end, num_kv_tokens, num_heads, num_sms, arch
    )
    return schedule


def fp8_mqa_logits(
    q: Tensor,
    kv: tuple[Tensor, Tensor],
    weights: Tensor,
    cu_seq_len_k_start: Tensor,
    cu_seq_len_k_end: Tensor,
    clean_logits: bool = True,
    max_seqlen_k: int = 0,
    *,
    arch: str | None = None,
) -> Tensor:
    """fp8_fp4_mqa_logits under its older name: q is the float8_e4m3fn values alone. See there for all else."""
    return fp8_fp4_mqa_logits(
        (q, None), kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, clean_logits, max_seqlen_k, arch=arch
    )


def fp8_fp4_paged_mqa_logits(
    q: tuple[Tensor, Tensor | None],
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule_meta: Tensor | None,
    max_context_len: int,
    clean_logits: bool = False,
    logits_dtype: torch.dtype = torch.float32,
    indices: Tensor | None = None,
    *,
    out: Tensor | None = None,
    arch: str | None = None,
) -> Tensor:
    """fp8_fp4_mqa_logits for decoding: every request has a few query tokens and its kv tokens in pages of a cache.

    logits[b * next_n + r, j] = sum_h weights[b * next_n + r, h] * relu(dot(q[b, r, h, :], kv[b, j, :])) * scale[b, j]

    for 0 <= j < length of the row, where kv token j of request b is token j % block_kv of page
    block_table[b, j // block_kv].

    Args:
        q: (values, scale). FP8: float8_e4m3fn [batch, next_n, num_heads, head_dim] and None. MXFP8: the same values
            and int32 [batch, next_n, num_heads], byte b being the UE8M0 exponent of elements 32b..32b+31, or
            float8_e8m0fnu [batch, next_n, num_heads, head_dim / 32]. MXFP4: e2m1 pairs, low nibble first, as int8,
            uint8 or float4_e2m1fn_x2 [batch, next_n, num_heads, head_dim / 2], and a scale as MXFP8. next_n of 1 or
            more, num_heads from 1 to 128, head_dim 32, 64 or 128. Rows contiguous, other strides multiples of 16
            bytes.
        kv_cache: uint8 [num_blocks, block_kv, 1, head_dim + 4] (MXFP4: head_dim / 2 + 4), of the format that q has.
            In the memory of a page come the values of all its tokens, then the scales of all: float32 (FP8) or int32
            (MX), as deep_kernels.formats.pack_paged_kv lays them out. block_kv 16, 32, 64, 128 or 256. Pages
            contiguous, any multiple of 16 bytes from page to page.
        weights: float32, bfloat16 or float16 [batch * next_n, num_heads], rows contiguous.
        context_lens: int32 [batch], where row r of a request sees context - next_n + r + 1 tokens, or
            [batch, next_n], the length of each row; any strides. A length below 1 is an empty row, one beyond
            max_context_len or the reach of the table is cut off there.
        block_table: int32 [batch, max_blocks], rows contiguous. Entries behind the last that a request needs may
            be anything; those it needs are from 0 to num_blocks - 1, else its logits are unspecified.
        schedule_meta: int32 [num_sms + 1, 2] of get_paged_mqa_logits_metadata, contiguous, a hint: any content gives
            the same bits; None: the kernel cuts the work itself.
        max_context_len: columns of the result.
        clean_logits: True writes -inf to every column beyond the row's length, False leaves them unspecified.
        logits_dtype: float32 or bfloat16.
        indices: int32 [batch], the request that each row belongs to, where batches vary in length; next_n is 1 then.
            A hint: block_table has a row for each row all the same, equal for those of one request.
        out: where to write, [batch * next_n, max_context_len] of logits_dtype, rows contiguous, no overlap with an
            input, judged by extents, from the first byte to the last. It is returned.
        arch: as in fp8_fp4_mqa_logits.
    Units: lengths in kv tokens; logits in units of weights times values times scales.
    Returns:
        [batch * next_n, max_context_len]; rows at multiples of 1024 bytes, and always further apart than they are
        wide, unless out is given.
    Raises:
        ValueError, TypeError, UnsupportedError, CompileError: as fp8_fp4_mqa_logits.
    Source: the lightning indexer of the DeepSeek-V3.2 report; names, order of arguments and layout of the cache as
    DeepGEMM's callers use.
    """
    if not torch.compiler.is_compiling():
        result = _C.fp8_fp4_paged_mqa_logits(
            q, kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len, clean_logits, logits_dtype,
            indices, arch, out,
        )  # fmt: skip
        if result is not NotImplemented:
            return result
    q_values, q_scale = q
    arguments = (
        q_values, q_scale, kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len, clean_logits,
        logits_dtype, indices, arch,
    )  # fmt: skip
    if out is None:
        logits: Tensor = torch.ops.deep_kernels.fp8_fp4_paged_mqa_logits(*arguments)
        return logits
    torch.ops.deep_kernels.fp8_fp4_paged_mqa_logits_out(*arguments, out)
    return out


def fp8_paged_mqa_logits(
    q: Tensor,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule_meta: Tensor | None,
    max_context_len: int,
    clean_logits: bool = False,
    *,
    out: Tensor | None = None,
    arch: str | None = None,
) -> Tensor:
    """fp8_fp4_paged_mqa_logits under its older name: q is the float8_e4m3fn values alone. See there for all else."""
    return fp8_fp4_paged_mqa_logits(
        (q, None), kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len, clean_logits,
        out=out, arch=arch,
    )  # fmt: skip


def get_paged_mqa_logits_metadata(
    context_lens: Tensor,
    block_kv: int,
    num_sms: int,
    indices: Tensor | None = None,
    *,
    arch: str | None = None,
) -> Tensor:
    """Cuts the work of fp8_fp4_paged_mqa_logits into num_sms equal runs, so that each call need not do it itself.

    Args:
        context_lens: int32 [batch] or [batch, next_n], any strides, as the logits will be asked for.
        block_kv: tokens per page: 16, 32, 64, 128 or 256. num_sms: runs, from 1 to 65535; get_num_sms() fits.
        indices: as in fp8_fp4_paged_mqa_logits: int32 [batch].
        arch: as in fp8_fp4_mqa_logits.
    Units: an opaque list of (request, tile of 64 kv tokens) pairs, whatever the page size.
    Returns:
        int32 [num_sms + 1, 2] on the device of the lengths.
    Raises:
        ValueError, TypeError: as fp8_fp4_mqa_logits.
    Source: split scheduling as in DeepGEMM's function of this name; the balance is this project's.
    """
    if not torch.compiler.is_compiling():
        result = _C.get_paged_mqa_logits_metadata(context_lens, block_kv, num_sms, indices, arch)
        if result is not NotImplemented:
            return result
    schedule: Tensor = torch.ops.deep_kernels.get_paged_mqa_logits_metadata(
        context_lens, block_kv, num_sms, indices, arch
    )
    return schedule


# --- fake versions: every output shape is a function of input shapes alone -------------------------------


# Shapes, dtypes, strides and devices are refused by the checks of the real ones, as far as they are known.


def _empty_logits(num_q: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    per_unit = _ROW_ALIGN_BYTES // dtype.itemsize
    # In this form torch knows for every width that rows are further apart than they are wide, and traces of any
    # width need no guard on it.
    stride = width + per_unit - width % per_unit
    return torch.empty_strided((num_q, width), (stride, 1), dtype=dtype, device=device)


def _fake_mqa_logits(
    q: Tensor,
    q_scale: Tensor | None,
    kv: Tensor,
    kv_scale: Tensor,
    weights: Tensor,
    cu_seq_len_k_start: Tensor,
    cu_seq_len_k_end: Tensor,
    clean_logits: bool = True,
    max_seqlen_k: int = 0,
    logits_dtype: torch.dtype = torch.float32,
    schedule_meta: Tensor | None = None,
    reduction: str = "exact",
    arch: str | None = None,
) -> Tensor:
    _C.check_fp8_fp4_mqa_logits(
        (q, q_scale), (kv, kv_scale), weights, cu_seq_len_k_start, cu_seq_len_k_end, clean_logits, max_seqlen_k,
        logits_dtype, schedule_meta, reduction, arch, None,
    )  # fmt: skip
    width = kv.shape[0] if max_seqlen_k == 0 else max_seqlen_k
    return _empty_logits(q.shape[0], width, logits_dtype, q.device)


def _fake_mqa_logits_out(
    q: Tensor,
    q_scale: Tensor | None,
    kv: Tensor,
    kv_scale: Tensor,
    weights: Tensor,
    cu_seq_len_k_start: Tensor,
    cu_seq_len_k_end: Tensor,
    clean_logits: bool,
    max_seqlen_k: int,
    logits_dtype: torch.dtype,
    schedule_meta: Tensor | None,
    reduction: str,
    arch: str | None,
    out: Tensor,
) -> None:
    _C.check_fp8_fp4_mqa_logits(
        (q, q_scale), (kv, kv_scale), weights, cu_seq_len_k_start, cu_seq_len_k_end, clean_logits, max_seqlen_k,
        logits_dtype, schedule_meta, reduction, arch, out,
    )  # fmt: skip


def _fake_mqa_logits_metadata(
    cu_seq_len_k_start: Tensor,
    cu_seq_len_k_end: Tensor,
    num_kv_tokens: int,
    num_heads: int,
    num_sms: int,
    arch: str | None = None,
) -> Tensor:
    _C.check_get_mqa_logits_metadata(cu_seq_len_k_start, cu_seq_len_k_end, num_kv_tokens, num_heads, num_sms, arch)
    return torch.empty(2 * (num_sms + 1), dtype=torch.int32, device=cu_seq_len_k_start.device)


def _fake_paged_mqa_logits(
    q: Tensor,
    q_scale: Tensor | None,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule_meta: Tensor | None,
    max_context_len: int,
    clean_logits: bool = False,
    logits_dtype: torch.dtype = torch.float32,
    indices: Tensor | None = None,
    arch: str | None = None,
) -> Tensor:
    _C.check_fp8_fp4_paged_mqa_logits(
        (q, q_scale), kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len, clean_logits,
        logits_dtype, indices, arch, None,
    )  # fmt: skip
    return _empty_logits(weights.shape[0], max_context_len, logits_dtype, q.device)


def _fake_paged_mqa_logits_out(
    q: Tensor,
    q_scale: Tensor | None,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule_meta: Tensor | None,
    max_context_len: int,
    clean_logits: bool,
    logits_dtype: torch.dtype,
    indices: Tensor | None,
    arch: str | None,
    out: Tensor,
) -> None:
    _C.check_fp8_fp4_paged_mqa_logits(
        (q, q_scale), kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len, clean_logits,
        logits_dtype, indices, arch, out,
    )  # fmt: skip


def _fake_paged_mqa_logits_metadata(
    context_lens: Tensor, block_kv: int, num_sms: int, indices: Tensor | None = None, arch: str | None = None
) -> Tensor:
    _C.check_get_paged_mqa_logits_metadata(context_lens, block_kv, num_sms, indices, arch)
    return torch.empty((num_sms + 1, 2), dtype=torch.int32, device=context_lens.device)


# Overriding, because the package may be imported anew in one process while its operators stay registered.
for _name, _fake in (
    ("fp8_fp4_mqa_logits", _fake_mqa_logits),
    ("fp8_fp4_mqa_logits_out", _fake_mqa_logits_out),
    ("get_mqa_logits_metadata", _fake_mqa_logits_metadata),
    ("fp8_fp4_paged_mqa_logits", _fake_paged_mqa_logits),
    ("fp8_fp4_paged_mqa_logits_out", _fake_paged_mqa_logits_out),
    ("get_paged_mqa_logits_metadata", _fake_paged_mqa_logits_metadata),
):
    torch.library.register_fake(f"deep_kernels::{_name}", _fake, allow_override=True)
