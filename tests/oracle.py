"""Float64 references that know the formulas of the ops and nothing of how the package computes them.

Codes are decoded here by tables of their own, built from the definitions of the formats. Nothing is imported
from the package, because code shared with what is tested would hide a shared mistake.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

FORMATS = ("fp8", "mxfp8", "mxfp4")

_MAX_CHUNK_ELEMENTS = 1 << 22  # of the [rows, heads, columns] products alive at once: 32 MiB each


# ------------------------------------------------------------------------------------------ decoding


def _e4m3_value(code: int) -> float:
    """OCP e4m3: bias 7, no infinities, one NaN per sign."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code >> 3) & 0xF, code & 0x7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * math.ldexp(mantissa, -9)
    return sign * math.ldexp(8 + mantissa, exponent - 10)


def _e2m1_value(code: int) -> float:
    """OCP e2m1: bias 1, neither infinities nor NaN."""
    sign = -1.0 if code & 0x8 else 1.0
    exponent, mantissa = (code >> 1) & 0x3, code & 0x1
    return sign * (0.5 * mantissa if exponent == 0 else math.ldexp(2 + mantissa, exponent - 2))


def _ue8m0_value(code: int) -> float:
    return math.nan if code == 0xFF else math.ldexp(1.0, code - 127)


E4M3 = torch.tensor([_e4m3_value(code) for code in range(256)], dtype=torch.float64)
E2M1 = torch.tensor([_e2m1_value(code) for code in range(16)], dtype=torch.float64)
UE8M0 = torch.tensor([_ue8m0_value(code) for code in range(256)], dtype=torch.float64)


def _as_bytes(x: Tensor) -> Tensor:
    """The raw bytes of a tensor on the CPU, last dimension times the element size; int64 in 0..255."""
    return x.detach().cpu().contiguous().view(torch.uint8).long()


def decode_values(values: Tensor, format: str) -> Tensor:
    """Raw codes [.., D] (mxfp4: [.., D / 2] bytes) -> float64 [.., D], scales not applied."""
    codes = _as_bytes(values)
    if format == "mxfp4":
        return E2M1[torch.stack((codes % 16, codes // 16), dim=-1).flatten(-2)]
    return E4M3[codes]


def decode_mx_scale(scale: Tensor, head_dim: int) -> Tensor:
    """int32 [..] or float8_e8m0fnu [.., D / 32] -> the float64 factor of each element [.., D]."""
    num_blocks = head_dim // 32
    if scale.dtype == torch.int32:
        words = scale.detach().cpu().long().unsqueeze(-1) & 0xFFFFFFFF
        codes = torch.cat([words // 256**b % 256 for b in range(num_blocks)], dim=-1)
    else:
        codes = _as_bytes(scale)
    assert codes.shape[-1] == num_blocks
    return UE8M0[codes].repeat_interleave(32, dim=-1)


def decode(values: Tensor, scale: Tensor | None, format: str) -> Tensor:
    """Raw (values, scale) -> float64 [.., D]. The scale of fp8 is one factor per row, or none."""
    decoded = decode_values(values, format)
    if format != "fp8":
        assert scale is not None
        return decoded * decode_mx_scale(scale, decoded.shape[-1])
    if scale is None:
        return decoded
    return decoded * scale.detach().cpu().double().unsqueeze(-1)


# ------------------------------------------------------------------------------------------ mqa logits


def mqa_logits(
    q: tuple[Tensor, Tensor | None],
    kv: tuple[Tensor, Tensor],
    weights: Tensor,
    starts: Tensor,
    ends: Tensor,
    *,
    format: str,
    clean: bool,
    max_seqlen_k: int = 0,
) -> tuple[Tensor, Tensor]:
    """The MQA logits of raw quantized inputs, in float64.

    logits[i, j] = sum_h weights[i, h] * relu(dot_d(Q[i, h, :], K[j, :])) * kv_scale[j],  start_i <= j < end_i

    With MX formats the scales belong to Q and K and kv_scale is absent from the formula.

    Args:
        q: values [M, H, D] and scale: None for fp8, else int32 [M, H] or float8_e8m0fnu [M, H, D / 32].
        kv: values [N, D] and scale: float32 [N] for fp8, else as above.
        weights: [M, H], any float dtype.
        starts, ends: [M], integers; each is clamped to [0, N].
        format: "fp8", "mxfp8" or "mxfp4".
        clean: whether columns outside the window are -inf; otherwise they are NaN here, which stands for
            "unspecified" and which `agreement` never compares.
        max_seqlen_k: 0, or the number of columns of the compressed form: column c is j = start_i + c.
    Returns:
        logits: float64 [M, N], or [M, max_seqlen_k].
        inside: bool, same shape: the columns that are a logit of their row.
    """
    assert format in FORMATS
    k = decode(kv[0], None if format == "fp8" else kv[1], format)
    k_scale = kv[1].detach().cpu().double() if format == "fp8" else None
    weights = weights.detach().cpu().double()
    num_q, num_heads = weights.shape
    num_kv = k.shape[0]
    num_columns = max_seqlen_k if max_seqlen_k > 0 else num_kv
    begin = starts.detach().cpu().long().clamp(0, num_kv)
    end = ends.detach().cpu().long().clamp(0, num_kv)

    column = torch.arange(num_columns).unsqueeze(0)
    token = column + begin.unsqueeze(1) if max_seqlen_k > 0 else column.expand(num_q, -1)
    inside = (token >= begin.unsqueeze(1)) & (token < end.unsqueeze(1))
    logits = torch.full((num_q, num_columns), -math.inf if clean else math.nan, dtype=torch.float64)

    chunk_kv = min(max(num_kv, 1), 2048)
    chunk_q = max(1, _MAX_CHUNK_ELEMENTS // (chunk_kv * max(num_heads, 1)))
    for row in range(0, num_q, chunk_q):
        rows = slice(row, min(row + chunk_q, num_q))
        q_scale = None if q[1] is None else q[1][rows]
        queries = decode(q[0][rows], q_scale, format)
        for first in range(0, num_kv, chunk_kv):
            last = min(first + chunk_kv, num_kv)
            wanted = inside[rows] & (token[rows] >= first) & (token[rows] < last)
            if not wanted.any():
                continue
            dots = torch.relu(queries @ k[first:last].T)  # [rows, heads, last - first]
            part = (weights[rows].unsqueeze(1) @ dots).squeeze(1)
            if k_scale is not None:
                part = part * k_scale[first:last]
            picked = part.gather(1, (token[rows] - first).clamp(0, last - first - 1))
            logits[rows] = torch.where(wanted, picked, logits[rows])
    return logits, inside


# ------------------------------------------------------------------------------------------ paged mqa logits


def paged_kv(kv_cache: Tensor, pages: list[int], num_tokens: int, format: str) -> tuple[Tensor, Tensor]:
    """The first tokens of a row of pages as raw values [N, D] and scale [N]; within a page all values come first."""
    num_bytes = kv_cache.shape[3] - 4
    block_kv = kv_cache.shape[1]
    raw = _as_bytes(kv_cache[pages]).to(torch.uint8).flatten(1)
    values, scale = (
        part.unflatten(1, (block_kv, -1)).flatten(0, 1)[:num_tokens].contiguous()
        for part in raw.split((block_kv * num_bytes, block_kv * 4), dim=1)
    )
    return (
        values if format == "mxfp4" else values.view(torch.float8_e4m3fn),
        scale.view(torch.float32 if format == "fp8" else torch.int32).squeeze(1),
    )


def paged_mqa_logits(
    q: tuple[Tensor, Tensor | None],
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    max_context_len: int,
    *,
    format: str,
    clean: bool,
) -> tuple[Tensor, Tensor]:
    """The paged MQA logits of raw quantized inputs, in float64: row b * next_n + r sees the first tokens of request b.

    Args:
        q: values [B, next_n, H, D] and scale, as in mqa_logits with one more dimension.
        kv_cache: uint8 [num_blocks, block_kv, 1, D + 4] (mxfp4: D / 2 + 4).
        weights: [B * next_n, H].
        context_lens: [B], of which row r sees next_n - 1 - r fewer, or [B, next_n].
        block_table: [B, max_blocks].
        max_context_len: columns of the logits.
        format, clean: as in mqa_logits.
    Returns:
        logits: float64 [B * next_n, max_context_len], and inside: bool, same shape, as in mqa_logits.
    """
    batch, next_n = q[0].shape[:2]
    block_kv = kv_cache.shape[1]
    lens = context_lens.detach().cpu().long()
    if lens.dim() == 1:
        lens = lens[:, None] + torch.arange(next_n) - (next_n - 1)
    lens = lens.clamp(0, min(max_context_len, block_table.shape[1] * block_kv))
    rows = [(torch.empty(0, max_context_len, dtype=torch.float64), torch.empty(0, max_context_len, dtype=torch.bool))]
    for b in range(batch):
        longest = int(lens[b].max())
        pages = block_table[b, : -(-longest // block_kv)].tolist() if longest else []
        one = (q[0][b], None if q[1] is None else q[1][b])
        kv = paged_kv(kv_cache, pages, longest, format)
        part = slice(b * next_n, (b + 1) * next_n)
        if max_context_len == 0:
            rows.append((torch.empty(next_n, 0, dtype=torch.float64), torch.empty(next_n, 0, dtype=torch.bool)))
            continue
        starts = torch.zeros_like(lens[b])
        rows.append(
            mqa_logits(
                one, kv, weights[part], starts, lens[b], format=format, clean=clean, max_seqlen_k=max_context_len
            )
        )
    logits, inside = zip(*rows, strict=True)
    return torch.cat(logits), torch.cat(inside)


# ------------------------------------------------------------------------------------------ comparing


def assert_special_values(actual: Tensor, expected: Tensor, inside: Tensor) -> None:
    """Requires NaN, inf and -inf at exactly the expected places, and -inf outside the windows where expected.

    `expected` is rounded to the dtype of `actual` first, so that what overflows there is an infinity.
    Columns outside that are not -inf in `expected` are unspecified and not looked at.
    """
    actual, rounded = _comparable(actual, expected)
    assert actual.shape == inside.shape, f"shape {list(actual.shape)}, expected {list(inside.shape)}"
    cleaned = ~inside & torch.isneginf(rounded)
    for name, test, where in (
        ("NaN", torch.isnan, inside),
        ("+inf", torch.isposinf, inside),
        ("-inf", torch.isneginf, inside),
        ("-inf", torch.isneginf, cleaned),
    ):
        wrong = (test(actual) != test(rounded)) & where
        if wrong.any():
            index = tuple(wrong.nonzero()[0].tolist())
            place = "inside a window" if bool(inside[index]) else "outside every window"
            raise AssertionError(
                f"{name} pattern differs at {int(wrong.sum())} of {wrong.numel()} places {place}; first at "
                f"{list(index)}: got {float(actual[index])}, expected {float(rounded[index])}"
            )


def agreement(actual: Tensor, expected: Tensor, inside: Tensor) -> float:
    """1 - 2 * sum(x * y) / sum(x^2 + y^2) over the finite values in the windows; 0 where both are all zero.

    0 is perfect. Where NaN or infinities differ the question makes no sense: an AssertionError says where.
    """
    assert_special_values(actual, expected, inside)
    actual, rounded = _comparable(actual, expected)
    counted = inside & torch.isfinite(rounded)
    x = actual[counted]
    y = rounded[counted]
    largest = max(float(x.abs().max()), float(y.abs().max())) if x.numel() else 0.0
    if largest == 0.0:
        return 0.0
    x, y = x / largest, y / largest
    # 1 - 2xy / (x^2 + y^2) written as a difference: exact where the two are nearly equal.
    return float((x - y).square().sum() / (x.square() + y.square()).sum())


def assert_agrees(actual: Tensor, expected: Tensor, inside: Tensor, limit: float) -> None:
    """Requires equal special values and an agreement of at most `limit`."""
    measured = agreement(actual, expected, inside)
    assert measured <= limit, f"agreement {measured:.3e} exceeds {limit:.1e}"


def _comparable(actual: Tensor, expected: Tensor) -> tuple[Tensor, Tensor]:
    """Both on the CPU in float64, the expected one rounded to the dtype of the actual one."""
    return actual.detach().cpu().double(), expected.detach().cpu().to(actual.dtype).double()
