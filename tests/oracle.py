"""Float64 references that know the formulas of the ops and nothing of how the package computes them.

Codes are decoded here by tables of their own, built from the definitions of the formats. Nothing is imported
from the package, because code shared with what is tested would hide a shared mistake.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

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


# ------------------------------------------------------------------------------------------ block-scaled fp8

# What one rounding may add, relative to the value; of float32 a unit in the last place, for steps that are not exact.
FLOAT32_ERROR, BFLOAT16_ERROR = 2.0**-23, 2.0**-8 * (1 + 2.0**-8)
_TINY = 1e-37  # smaller numbers lose bits, or a card makes them 0


@dataclass(frozen=True)
class Bounded:
    """Exact values and how far from them a result may be."""

    value: Tensor
    error: Tensor

    def columns(self, part: slice) -> Bounded:
        return Bounded(self.value[:, part], self.error[:, part])


def _per_element(scale: Tensor, dim: int, size: int) -> Tensor:
    """A scale per 128 along `dim` -> one per element, float64."""
    return scale.detach().cpu().double().repeat_interleave(128, dim).narrow(dim, 0, size)


def block_gemm(x: Tensor, x_scale: Tensor, w: Tensor, w_scale: Tensor, *, error: float) -> Bounded:
    """acc[m, n] = sum_b x_scale[m, b] * w_scale[n // 128, b] * sum_k x[m, k] * w[n, k] over block b of 128 k's.

    error: of the sums, as a share of sum_k |x[m, k] w[n, k]| with the scales in it.
    """
    left, right = decode_values(x, "fp8"), decode_values(w, "fp8")
    rows = _per_element(w_scale, 0, w.shape[0])
    columns = x_scale.detach().cpu().double()
    acc = torch.zeros(x.shape[0], w.shape[0], dtype=torch.float64)
    magnitude = torch.zeros_like(acc)
    for b in range(columns.shape[1]):
        part = slice(128 * b, 128 * b + 128)
        scale = columns[:, b, None] * rows[:, b]
        acc += left[:, part] @ right[:, part].T * scale
        magnitude += left[:, part].abs() @ right[:, part].abs().T * scale.abs()
    return Bounded(acc, error * magnitude)


def gate_and_up(x: Tensor, x_scale: Tensor, w: Tensor, w_scale: Tensor, *, error: float) -> tuple[Bounded, Bounded]:
    """block_gemm of the two halves of w's rows, each with a half of the rows of w_scale."""
    halves = zip(w.view(torch.uint8).chunk(2), w_scale.chunk(2), strict=True)
    gate, up = (block_gemm(x, x_scale, half, scale, error=error) for half, scale in halves)
    return gate, up


def residual_sum(acc: Bounded, residual: Tensor | None, dtype: torch.dtype) -> Bounded:
    """What fp8_block_gemm_nt gives: acc rounded to dtype, the residual added, rounded again."""
    unit = FLOAT32_ERROR if dtype == torch.float32 else BFLOAT16_ERROR
    added = torch.zeros_like(acc.value) if residual is None else residual.detach().cpu().double()
    value = acc.value + added
    return Bounded(value, acc.error + unit * (acc.value.abs() + (0 if residual is None else value.abs())))


def gated_product(
    gate: Bounded,
    up: Bounded,
    *,
    activation: str = "silu",
    clamp: float | None = None,
    alpha: float | None = None,
    up_offset: float = 0.0,
    dtype: torch.dtype = torch.bfloat16,
) -> Bounded:
    """v = act(min(gate, L)) * (clamp(up, -L, L) + up_offset), computed and rounded in dtype: twice in bfloat16."""
    limit = math.inf if clamp is None else clamp
    g = gate.value.clamp(max=limit)
    u = up.value.clamp(-limit, limit) + up_offset
    if activation == "silu":
        z = g * (1.0 if alpha is None else alpha)
    else:
        assert activation == "gelu_tanh" and alpha is None
        # (1 + tanh(t)) / 2 = sigmoid(2 t), of which float64 keeps all digits where t is far below 0 too.
        z = 2 * math.sqrt(2 / math.pi) * (g + 0.044715 * g**3)
    s = g * torch.sigmoid(z)
    v = s * u
    # No activation is steeper than 1.2. A dozen float32 steps; in exp(z) the error of z becomes one of the value; and
    # from -87 on exp(z) may be 0.
    unit = (12 - 4 * z.clamp(-87, 0)) * FLOAT32_ERROR + (2 * BFLOAT16_ERROR if dtype == torch.bfloat16 else 0.0)
    slack = 1.2 * gate.error * (u.abs() + up.error) + s.abs() * (up.error + 4 * FLOAT32_ERROR * abs(up_offset))
    slack = slack + 1e-35 * u.abs()
    # What is too large for dtype is infinite, and what is too small is 0, times which an infinity is NaN.
    narrow = (s.float().double() * u).to(dtype).double()
    return Bounded(torch.where(torch.isfinite(narrow), v, narrow), slack + unit * v.abs() + _TINY)


def _in_blocks(v: Tensor) -> Tensor:
    """[M, I] -> [M, ceil(I / 128), 128], zeros behind the last."""
    num_blocks = -(-v.shape[1] // 128)
    padded = torch.zeros(v.shape[0], num_blocks * 128, dtype=v.dtype)
    padded[:, : v.shape[1]] = v
    return padded.view(v.shape[0], num_blocks, 128)


def block_scales(amax: Tensor, scale_fmt: str) -> Tensor:
    """max(amax / 448, 1e-12), for ue8m0 the power of two that is not below it; what is not finite stays."""
    scale = (amax / 448).clamp(min=1e-12)
    if scale_fmt == "fp32":
        return scale
    mantissa, exponent = torch.frexp(torch.where(torch.isfinite(scale), scale, 1.0))
    power = torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).int())
    return torch.where(torch.isfinite(scale), power, scale)


def nearest_code(x: Tensor) -> Tensor:
    """e4m3 of x clamped to +-448, nearest even, as a place in the order of all values: -126 to 126."""
    table = E4M3[:0x7F]
    magnitude = x.abs().clamp(max=448.0)
    above = torch.searchsorted(table, magnitude.contiguous()).clamp(1, 126)
    middle = (table[above] + table[above - 1]) / 2
    upper = (magnitude > middle) | ((magnitude == middle) & (above % 2 == 0))
    return torch.where(x < 0, -1, 1) * torch.where(upper, above, above - 1)


@dataclass(frozen=True)
class Quantized:
    """y and y_scale of a call, decoded: order of the codes, and scales [M, blocks] with NaN or inf where not finite."""

    order: Tensor  # 127 where NaN
    scale: Tensor

    @staticmethod
    def of(y: Tensor, y_scale: Tensor) -> Quantized:
        codes = _as_bytes(y)
        magnitude = codes % 128
        is_nan = magnitude == 127
        assert (codes[is_nan] == 127).all(), "a NaN has the code 0x7f"
        order = torch.where(is_nan, 127, torch.where(codes >= 128, -magnitude, magnitude))
        if y_scale.dtype == torch.float8_e8m0fnu:
            return Quantized(order, UE8M0[_as_bytes(y_scale)])
        return Quantized(order, y_scale.detach().cpu().double())

    def dequantized(self) -> Tensor:
        values = torch.where(self.order == 127, math.nan, E4M3[self.order.abs()] * self.order.sign())
        return values * _per_element(self.scale, 1, self.order.shape[1])


def assert_quantized(y: Tensor, y_scale: Tensor, v: Bounded, scale_fmt: str = "fp32") -> None:
    """Requires that y and y_scale are v quantized: scales, codes and their products each by themselves."""
    assert y.dtype == torch.float8_e4m3fn and y.shape == v.value.shape
    assert y_scale.dtype == (torch.float32 if scale_fmt == "fp32" else torch.float8_e8m0fnu)
    assert y_scale.shape == (y.shape[0], -(-y.shape[1] // 128))
    found = Quantized.of(y, y_scale)
    _assert_scales(found, v, scale_fmt)
    finite = _per_element(torch.isfinite(found.scale), 1, y.shape[1]).bool()
    scale = torch.where(finite, _per_element(found.scale, 1, y.shape[1]), 1.0)
    _assert_codes(found, v, scale, finite)
    _assert_products(found, v, scale, finite)


def _first(wrong: Tensor, **columns: Tensor) -> str:
    index = tuple(wrong.nonzero()[0].tolist())
    words = ", ".join(f"{name} {float(values[index])}" for name, values in columns.items())
    return f"{int(wrong.sum())} of {wrong.numel()} wrong, first at {list(index)}: {words}"


def _assert_scales(found: Quantized, v: Bounded, scale_fmt: str) -> None:
    amax = _in_blocks(v.value.abs()).amax(-1)
    # 0xff is all that ue8m0 has for what is not finite.
    beyond = torch.isnan(amax) | (torch.isinf(amax) if scale_fmt == "ue8m0" else False)
    wrong = torch.isnan(found.scale) != beyond
    assert not wrong.any(), f"NaN scales: {_first(wrong, got=found.scale, amax=amax)}"
    wrong = torch.isinf(found.scale) != (torch.isinf(amax) & ~beyond)
    assert not wrong.any(), f"infinite scales: {_first(wrong, got=found.scale, amax=amax)}"
    slack = torch.where(torch.isfinite(amax), _in_blocks(v.error.nan_to_num(0, 0, 0)).amax(-1), 0.0)
    unit = 4 * FLOAT32_ERROR if scale_fmt == "fp32" else 0.0
    low, high = (block_scales((amax + sign * slack).clamp(min=0), scale_fmt) for sign in (-1, 1))
    wrong = (found.scale < low * (1 - unit)) | (found.scale > high * (1 + unit))
    assert not wrong.any(), f"scales: {_first(wrong, got=found.scale, low=low, high=high)}"


def _assert_codes(found: Quantized, v: Bounded, scale: Tensor, finite: Tensor) -> None:
    special = ~torch.isfinite(v.value)
    wrong = special & (found.order != 127)
    assert not wrong.any(), f"finite codes of NaN or inf: {_first(wrong, got=found.order, v=v.value)}"
    # Beside a NaN a code is NaN. Beside an infinity it is v / inf.
    amax = _in_blocks(v.value.abs()).amax(-1)
    wrong = torch.isnan(_per_element(amax, 1, v.value.shape[1])) & (found.order != 127)
    assert not wrong.any(), f"finite codes beside a NaN: {_first(wrong, got=found.order, v=v.value)}"
    in_infinite = torch.isinf(_per_element(found.scale, 1, v.value.shape[1])) & ~special
    wrong = in_infinite & (found.order != 0)
    assert not wrong.any(), f"codes beside an inf: {_first(wrong, got=found.order, v=v.value)}"
    # 1 / scale and the product with it are off by a unit in the last place each.
    value, error = (torch.where(finite, x, 0.0) / scale for x in (v.value, v.error))
    error = error + 2 * FLOAT32_ERROR * value.abs()
    low, high = nearest_code(value - error), nearest_code(value + error)
    wrong = finite & ((found.order < low) | (found.order > high))
    assert not wrong.any(), f"codes: {_first(wrong, got=found.order, low=low, high=high, v=v.value)}"


def _assert_products(found: Quantized, v: Bounded, scale: Tensor, finite: Tensor) -> None:
    value, error = (torch.where(finite, x, 0.0) for x in (v.value, v.error))
    # Half a step of e4m3: 2^-4 of the value, 2^-10 near zero.
    bound = error + (2.0**-4 * (value.abs() + error)).clamp(min=2.0**-10 * scale) * (1 + 4 * FLOAT32_ERROR)
    wrong = finite & ~((found.dequantized() - value).abs() <= bound)
    assert not wrong.any(), f"y * y_scale: {_first(wrong, got=found.dequantized(), v=v.value, bound=bound)}"


def assert_bounded(actual: Tensor, expected: Bounded) -> None:
    """Requires actual to be within the bounds, and NaN and infinities at the same places."""
    rounded = expected.value.to(actual.dtype).double()
    actual = actual.detach().cpu().double()
    for name, test in (("NaN", torch.isnan), ("inf", torch.isposinf), ("-inf", torch.isneginf)):
        wrong = test(actual) != test(rounded)
        assert not wrong.any(), f"{name}: {_first(wrong, got=actual, expected=rounded)}"
    finite = torch.isfinite(rounded)
    wrong = finite & ~((actual - expected.value).abs() <= expected.error + _TINY)
    assert not wrong.any(), _first(wrong, got=actual, expected=expected.value, error=expected.error)


# ------------------------------------------------------------------------------------------ attention


@dataclass(frozen=True)
class Attention:
    """Exact results of one member, [num_q, heads, head_dim] and [heads, num_q], and what their errors scale with."""

    out: Tensor
    lse: Tensor
    weight: Tensor  # as out: sum of probabilities times |v|
    reach: Tensor  # as lse: the largest softmax_scale * sum |q| |k| of a key that the query sees


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Attention:
    """softmax(scale * q k^T) v of [num_q, heads, dim] and [num_kv, kv heads, dim]."""
    q, k, v = (x.detach().cpu().double().transpose(0, 1) for x in (q, k, v))
    (num_heads, num_q, dim), (num_kv_heads, num_kv) = q.shape, k.shape[:2]
    k, v = (x.repeat_interleave(num_heads // num_kv_heads, dim=0) for x in (k, v))
    out, weight = torch.zeros(2, num_heads, num_q, dim, dtype=torch.double)
    lse = torch.full((num_heads, num_q), -math.inf, dtype=torch.double)
    reach = torch.zeros_like(lse)
    everything = [(slice(0, num_q), num_kv)]
    windows = [(slice(i, i + 1), min(i + 1 + num_kv - num_q, num_kv)) for i in range(num_q)] if causal else everything
    for part, end in windows:
        if end <= 0:
            continue
        keys, values = k[:, :end], v[:, :end]
        scores = scale * q[:, part] @ keys.mT
        largest = scores.amax(-1)
        lse[:, part] = torch.where(torch.isneginf(largest), largest, scores.logsumexp(-1))
        p = torch.exp(scores - lse[:, part, None])
        sees_nothing = torch.isneginf(largest)[..., None]
        out[:, part] = torch.where(sees_nothing, 0.0, p @ values)
        weight[:, part] = torch.where(sees_nothing, 0.0, p @ values.abs())
        reach[:, part] = scale * (q[:, part].abs() @ keys.abs().mT).amax(-1)
    return Attention(out.transpose(0, 1), lse, weight.transpose(0, 1), reach)


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
