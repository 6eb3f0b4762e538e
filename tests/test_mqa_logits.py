"""fp8_fp4_mqa_logits: agreement with the formula, and what must not change a bit of a logit."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

import oracle
import pytest
import torch
from conftest import Backend
from mqa_cases import (
    INT32_MAX,
    INT32_MIN,
    SWEEP,
    Case,
    Inputs,
    agreement_limit,
    assert_same_bits,
    call,
    expected,
    inside_larger,
    is_refused,
    make_inputs,
    metadata,
    on_device,
    strided,
    unpack_scale,
    word,
)
from torch import Tensor

import deep_kernels as dk
from deep_kernels import formats

NAN, INF = math.nan, math.inf
DTYPES = (torch.float32, torch.bfloat16)


def check(backend: Backend, case: Case, inputs: Inputs, logits: Tensor) -> None:
    reference, inside = expected(inputs, clean=case.clean, width=case.width)
    limit = agreement_limit(backend, case.weights_dtype, case.logits_dtype)
    oracle.assert_agrees(logits, reference, inside, limit)


def windows(device: str, *pairs: tuple[int, int]) -> dict[str, Tensor]:
    start, end = torch.tensor(pairs, dtype=torch.int32, device=device).reshape(-1, 2).unbind(1)
    return {"start": start, "end": end}


# ------------------------------------------------------------------------------------------ agreement


@pytest.mark.parametrize("case", SWEEP, ids=str)
def test_agrees_with_the_formula(backend: Backend, case: Case) -> None:
    inputs = make_inputs(case, backend.device)
    if is_refused(backend, inputs):
        return
    schedule = metadata(backend, inputs) if case.metadata else None
    logits = call(backend, inputs, clean=case.clean, width=case.width, dtype=case.logits_dtype, schedule=schedule)
    assert logits.dtype == case.logits_dtype
    assert logits.shape == (case.num_q, case.width or case.num_kv)
    assert logits.stride(1) == 1 and logits.stride(0) * logits.element_size() % 1024 == 0
    check(backend, case, inputs, logits)


def test_every_token_has_a_scale_of_its_own() -> None:
    """The sweep finds swapped and shifted scales only if no two are equal."""
    inputs = make_inputs(Case(num_kv=4100), "cpu")
    assert inputs.kv_scale.unique().numel() == 4100
    for format in ("mxfp8", "mxfp4"):
        inputs = make_inputs(Case(num_kv=4100, head_dim=128, format=format), "cpu")
        assert inputs.kv_scale.unique().numel() > 1000
        assert (inputs.kv_scale[1:] != inputs.kv_scale[:-1]).float().mean() > 0.99


@dataclass(frozen=True)
class Corner:
    """Windows over 300 kv tokens that have a name."""

    name: str
    pairs: tuple[tuple[int, int], ...]


CORNERS = (
    Corner("one-token", ((0, 1), (1, 2), (255, 256), (256, 257), (299, 300))),
    Corner("empty", ((0, 0), (7, 7), (300, 300), (9, 3), (300, 0))),
    Corner("before-zero", ((-7, 5), (-7, 0), (-7, -3), (INT32_MIN, 2), (INT32_MIN, INT32_MIN))),
    Corner("past-the-end", ((290, 301), (299, 4000), (300, 301), (1000, 2000), (0, INT32_MAX))),
    Corner("extremes", ((INT32_MIN, INT32_MAX), (INT32_MAX, INT32_MIN), (INT32_MAX, INT32_MAX), (5, INT32_MIN))),
    Corner("around-multiples", ((15, 16), (16, 32), (17, 31), (127, 129), (255, 257), (256, 272), (64, 256))),
    Corner("one-full-among-empty", ((5, 5), (0, 0), (0, 300), (9, 9), (300, 10))),
    Corner("far-apart", ((0, 3), (297, 300), (0, 3), (297, 300))),
)


@pytest.mark.parametrize("corner", CORNERS, ids=lambda corner: corner.name)
@pytest.mark.parametrize("format", formats.FORMATS)
def test_corner_windows(backend: Backend, format: str, corner: Corner) -> None:
    for num_heads in (8, 64):
        case = Case(num_q=len(corner.pairs), num_kv=300, num_heads=num_heads, format=format, seed=num_heads)
        inputs = replace(make_inputs(case, backend.device), **windows(backend.device, *corner.pairs))
        if is_refused(backend, inputs):
            return
        for mode in ("clean", "unclean", "compressed", "compressed-unclean"):
            for seed in (0, 1):  # widths below and at the longest window
                wanted = replace(case, mode=mode, seed=seed)
                logits = call(backend, inputs, clean=wanted.clean, width=wanted.width)
                check(backend, wanted, inputs, logits)


@pytest.mark.parametrize("width", (1, 100, 257, 300, 1000))
def test_compressed_widths(backend: Backend, width: int) -> None:
    """Narrower than windows, and wider than all of kv."""
    inputs = make_inputs(Case(num_kv=300, num_q=33), backend.device)
    for clean in (True, False):
        logits = call(backend, inputs, clean=clean, width=width)
        assert logits.shape == (33, width)
        reference, inside = expected(inputs, clean=clean, width=width)
        limit = agreement_limit(backend, torch.float32, torch.float32)
        oracle.assert_agrees(logits, reference, inside, limit)


def test_older_name_is_the_same_function(backend: Backend) -> None:
    inputs = make_inputs(Case(), backend.device)
    arguments = (inputs.q, (inputs.kv, inputs.kv_scale), inputs.weights, inputs.start, inputs.end)
    assert_same_bits(dk.fp8_mqa_logits(*arguments, arch=backend.arch), call(backend, inputs))
    compressed = dk.fp8_mqa_logits(*arguments, clean_logits=True, max_seqlen_k=70, arch=backend.arch)
    assert_same_bits(compressed, call(backend, inputs, width=70))


# ------------------------------------------------------------------------------------------ equal bits


def garbage_schedules(backend: Backend, inputs: Inputs) -> Iterator[tuple[str, Tensor]]:
    """Schedules of other calls, and such as no call makes."""
    num_kv, num_heads, num_q = inputs.kv.shape[0], inputs.q.shape[1], inputs.q.shape[0]
    other = torch.zeros(3 * num_q + 5, dtype=torch.int32, device=backend.device)
    before = dk.get_num_sms()
    try:
        for num_sms in (1, 7, 300):
            dk.set_num_sms(num_sms)
            yield f"of {num_sms} SMs", metadata(backend, inputs)
            yield (
                f"of another batch, {num_sms} SMs",
                dk.get_mqa_logits_metadata(other, other + 77, num_kv + 9, 1 + num_heads % 128, arch=backend.arch),
            )
    finally:
        dk.set_num_sms(0)
    assert dk.get_num_sms() == before
    generator = torch.Generator().manual_seed(1)
    for length in (4, 6, 2 * 133, 2000):
        random = torch.randint(INT32_MIN, INT32_MAX, (length,), generator=generator, dtype=torch.int64)
        small = torch.randint(-3, 9, (length,), generator=generator)
        for name, values in (("random", random), ("small", small), ("reversed", small.sort(descending=True)[0])):
            yield f"{name} [{length}]", values.to(torch.int32).to(backend.device)
        for value in (0, -1, INT32_MIN, INT32_MAX):
            yield f"all {value} [{length}]", torch.full((length,), value, dtype=torch.int32, device=backend.device)


BITS_CASES = [
    Case(num_q=41, num_kv=700, num_heads=num_heads, head_dim=head_dim, format=format, logits_dtype=dtype, seed=seed)
    for seed, (format, num_heads, head_dim, dtype) in enumerate(
        [
            ("fp8", 64, 128, torch.float32),
            ("fp8", 7, 32, torch.float32),
            ("fp8", 32, 64, torch.bfloat16),
            ("mxfp8", 24, 128, torch.float32),
            ("mxfp4", 128, 64, torch.float32),
        ]
    )
]


@pytest.mark.parametrize("case", BITS_CASES, ids=str)
def test_schedule_changes_no_bit(backend: Backend, case: Case) -> None:
    inputs = make_inputs(case, backend.device)
    if is_refused(backend, inputs):
        return
    wanted = call(backend, inputs, dtype=case.logits_dtype)
    assert_same_bits(call(backend, inputs, dtype=case.logits_dtype, schedule=metadata(backend, inputs)), wanted)
    for name, schedule in garbage_schedules(backend, inputs):
        logits = call(backend, inputs, dtype=case.logits_dtype, schedule=schedule)
        try:
            assert_same_bits(logits, wanted)
        except AssertionError as error:
            raise AssertionError(f"schedule {name}: {error}") from None


@pytest.mark.parametrize("case", BITS_CASES, ids=str)
def test_cleaning_and_compression_change_no_bit(backend: Backend, case: Case) -> None:
    inputs = make_inputs(case, backend.device)
    if is_refused(backend, inputs):
        return
    wanted = call(backend, inputs, dtype=case.logits_dtype)
    _, inside = expected(inputs)
    assert_same_bits(call(backend, inputs, dtype=case.logits_dtype, clean=False), wanted, inside)
    for width in (1, 200, 700):
        _, inside = expected(inputs, width=width)
        columns = torch.arange(width) + inputs.start.cpu().clamp(0, case.num_kv).unsqueeze(1)
        picked = wanted.cpu().gather(1, columns.clamp(max=case.num_kv - 1))
        for clean in (True, False):
            logits = call(backend, inputs, dtype=case.logits_dtype, clean=clean, width=width)
            assert_same_bits(logits.cpu(), picked, inside)
            assert not clean or torch.isneginf(logits.cpu()[~inside]).all()


@pytest.mark.parametrize("case", BITS_CASES, ids=str)
def test_batch_windows_and_strides_change_no_bit(backend: Backend, case: Case) -> None:
    inputs = make_inputs(case, backend.device)
    if is_refused(backend, inputs):
        return
    wanted = call(backend, inputs, dtype=case.logits_dtype)
    for rows in (slice(0, 1), slice(40, 41), slice(20, 22), slice(3, 12), slice(1, 40)):
        assert_same_bits(call(backend, inputs.rows(rows), dtype=case.logits_dtype), wanted[rows])

    assert_same_bits(call(backend, strided(inputs), dtype=case.logits_dtype), wanted)

    everything = replace(inputs, **windows(backend.device, *[(0, case.num_kv)] * case.num_q))
    _, inside = expected(inputs)
    full = call(backend, everything, dtype=case.logits_dtype)
    assert_same_bits(full, wanted, inside)
    for first in (1, 3, 16, 250):  # the same kv tokens at other places
        moved = replace(everything, kv=inputs.kv[first:], kv_scale=inputs.kv_scale[first:])
        if (first * inputs.kv.stride(0) * inputs.kv.element_size()) % 16 == 0:
            assert_same_bits(call(backend, moved, dtype=case.logits_dtype), full[:, first:])
    for num_kv in (1, 2, 63, 255, 257):
        fewer = replace(everything, kv=inputs.kv[:num_kv], kv_scale=inputs.kv_scale[:num_kv])
        assert_same_bits(call(backend, fewer, dtype=case.logits_dtype), full[:, :num_kv])


@pytest.mark.parametrize("case", BITS_CASES, ids=str)
def test_twenty_runs_give_the_same_bits(backend: Backend, case: Case) -> None:
    inputs = make_inputs(case, backend.device)
    if is_refused(backend, inputs):
        return
    wanted = call(backend, inputs, dtype=case.logits_dtype)
    for _ in range(19):
        assert_same_bits(call(backend, inputs, dtype=case.logits_dtype), wanted)


def test_ambient_state_changes_no_bit() -> None:
    """Threads, autocast and inference mode are the caller's affair; the pool's threads do not inherit them."""
    cpu = Backend("cpu", "cpu", None)
    for format in formats.FORMATS:
        inputs = make_inputs(Case(num_q=64, num_kv=2000, num_heads=32, format=format), "cpu")
        wanted = call(cpu, inputs)
        with torch.inference_mode():
            assert_same_bits(call(cpu, inputs), wanted)
        with torch.autocast("cpu"), torch.no_grad():
            assert_same_bits(call(cpu, inputs), wanted)
        num_threads = torch.get_num_threads()
        try:
            for threads in (1, 2, 5):
                torch.set_num_threads(threads)
                assert_same_bits(call(cpu, inputs), wanted)
        finally:
            torch.set_num_threads(num_threads)


def test_inputs_stay_as_they_are(backend: Backend) -> None:
    """Stands for opcheck's schema test, which cannot compare float8."""
    for format in formats.FORMATS:
        inputs = make_inputs(Case(format=format, strided=True), backend.device)
        if is_refused(backend, inputs):
            continue
        before = {name: tensor.clone() for name, tensor in inputs.tensors().items()}
        schedule = metadata(backend, inputs)
        kept = schedule.clone()
        call(backend, inputs, schedule=schedule)
        for name, tensor in inputs.tensors().items():
            assert torch.equal(tensor.contiguous().view(torch.uint8), before[name].view(torch.uint8)), name
        assert torch.equal(schedule, kept)


def test_folded_is_accepted(backend: Backend) -> None:
    """Same agreement; a logit that is truly 0 may become noise, within a bound."""
    case = Case(num_q=33, num_kv=513, num_heads=64, head_dim=128)
    inputs = make_inputs(case, backend.device)
    logits = call(backend, inputs, reduction="folded")
    check(backend, case, inputs, logits)
    if backend.device == "cpu":
        assert_same_bits(logits, call(backend, inputs))
    # Opposite keys: every dot product is negative, so that every logit is 0.
    ones = torch.ones(1, dtype=torch.float8_e4m3fn).view(torch.uint8)
    dead = replace(
        inputs,
        q=ones.to(backend.device).expand(inputs.q.shape).contiguous().view(inputs.q.dtype),
        kv=(ones.to(backend.device) | 0x80).expand(inputs.kv.shape).contiguous().view(inputs.kv.dtype),
    )
    logits = call(backend, dead, reduction="folded", clean=True).cpu().double()
    magnitude = 128 * dead.weights.cpu().double().abs().sum(dim=1, keepdim=True) * dead.kv_scale.cpu().double()
    _, inside = expected(dead)
    assert (logits.abs() <= 1.4e-4 * magnitude)[inside].all()


# ------------------------------------------------------------------------------------------ NaN and garbage


@pytest.mark.parametrize("dtype", DTYPES, ids=word)
@pytest.mark.parametrize("format", formats.FORMATS)
def test_garbage_outside_every_window_changes_no_bit(backend: Backend, format: str, dtype: torch.dtype) -> None:
    case = Case(num_q=9, num_kv=900, num_heads=32, head_dim=128, format=format)
    pairs = [(100, 180), (120, 181), (100, 100), (333, 600), (340, 350), (599, 600), (700, 850), (-3, 0), (900, 905)]
    inputs = replace(make_inputs(case, backend.device), **windows(backend.device, *pairs))
    if is_refused(backend, inputs):
        return
    wanted = call(backend, inputs, dtype=dtype)
    outside = torch.ones(case.num_kv, dtype=torch.bool)
    for start, end in pairs:
        outside[max(start, 0) : max(end, 0)] = False
    outside = outside.to(backend.device)
    assert 0 < int(outside.sum()) < case.num_kv

    generator = torch.Generator().manual_seed(3)
    random = torch.randint(0, 256, (case.num_kv, 4), generator=generator, dtype=torch.uint8)
    random_scale = random.view(torch.int32).squeeze(1)
    scales = [torch.full_like(random_scale, -1), torch.zeros_like(random_scale), random_scale]
    if format == "fp8":
        special = [torch.full((case.num_kv,), value) for value in (NAN, INF, -INF, 3e38)]
        scales = [*special, random_scale.view(torch.float32)]
    for code in (0x7F, 0xFF, 0x7E, None):
        values = torch.randint(0, 256, inputs.kv.shape, generator=generator, dtype=torch.uint8)
        if code is not None:
            values = torch.full_like(values, code)
        for scale in scales:
            kv = torch.where(outside[:, None], values.to(backend.device), inputs.kv.view(torch.uint8))
            poisoned = replace(
                inputs,
                kv=kv.view(inputs.kv.dtype),
                kv_scale=torch.where(outside, scale.to(backend.device), inputs.kv_scale),
            )
            assert_same_bits(call(backend, poisoned, dtype=dtype), wanted)
            logits = call(backend, poisoned, dtype=dtype, clean=False, width=300)
            assert_same_bits(logits, call(backend, inputs, dtype=dtype, width=300), expected(inputs, width=300)[1])


def with_byte(x: Tensor, index: tuple[int, ...], byte: int) -> Tensor:
    """A copy of x whose element at `index`, counted in bytes, is `byte`."""
    changed = x.clone()
    changed.view(torch.uint8)[index] = byte
    return changed


def spoilt_cells(wanted: Tensor, logits: Tensor, inside: Tensor) -> Tensor:
    """Where two results differ in the windows; everything else must be the same bit for bit."""
    same = (logits.cpu().view(torch.int32) == wanted.cpu().view(torch.int32)) | ~inside
    return ~same


@pytest.mark.parametrize("format", ("fp8", "mxfp8"))
@pytest.mark.parametrize("nan", (0x7F, 0xFF))
def test_nan_element(backend: Backend, format: str, nan: int) -> None:
    """A NaN element makes its logits NaN, or counts as relu = 0; nothing else changes."""
    case = Case(num_q=20, num_kv=520, num_heads=16, head_dim=64, format=format, seed=2)
    inputs = make_inputs(case, backend.device)
    if is_refused(backend, inputs):
        return
    wanted = call(backend, inputs)
    _, inside = expected(inputs)
    row = int(inside.sum(dim=1).argmax())
    column = int(inside.sum(dim=0).argmax())

    logits = call(backend, replace(inputs, q=with_byte(inputs.q, (row, 5, 37), nan)))
    others = torch.arange(case.num_q) != row
    assert_same_bits(logits, wanted, inside & others.unsqueeze(1))
    without = replace(inputs, weights=inputs.weights.clone())
    without.weights[row, 5] = 0
    dropped = call(backend, without).cpu()[row]
    assert (torch.isnan(logits.cpu()[row]) | torch.isclose(logits.cpu()[row], dropped, rtol=1e-4))[inside[row]].all()

    logits = call(backend, replace(inputs, kv=with_byte(inputs.kv, (column, 37), nan)))
    others = torch.arange(case.num_kv) != column
    assert_same_bits(logits, wanted, inside & others)
    hit = logits.cpu()[inside[:, column], column]
    assert (torch.isnan(hit) | (hit == 0)).all() and hit.numel() > 0


@pytest.mark.parametrize("format", formats.FORMATS)
def test_nan_scale(backend: Backend, format: str) -> None:
    """A NaN scale makes its logits NaN and changes no other."""
    case = Case(num_q=20, num_kv=520, num_heads=16, head_dim=64, format=format, seed=2)
    inputs = make_inputs(case, backend.device)
    if is_refused(backend, inputs):
        return
    wanted = call(backend, inputs)
    _, inside = expected(inputs)
    row = int(inside.sum(dim=1).argmax())
    column = int(inside.sum(dim=0).argmax())

    scale = inputs.kv_scale.clone()
    scale[column] = NAN if format == "fp8" else 0x7FFF  # of MX: of the first of two blocks
    if format != "fp8":
        scale[column] = 0xFF | 0x7F00
    logits = call(backend, replace(inputs, kv_scale=scale)).cpu()
    hit = inside & (torch.arange(case.num_kv) == column)
    assert torch.isnan(logits[hit]).all() and int(hit.sum()) > 0
    assert_same_bits(logits, wanted.cpu(), inside & ~hit)

    if format == "fp8":
        return
    scale = inputs.q_scale.clone()
    scale[row, 3] = 0xFF00 | 0x7F
    logits = call(backend, replace(inputs, q_scale=scale)).cpu()
    hit = inside & (torch.arange(case.num_q) == row).unsqueeze(1)
    assert torch.isnan(logits[hit]).all() and int(hit.sum()) > 0
    assert_same_bits(logits, wanted.cpu(), inside & ~hit)


@pytest.mark.parametrize("weights_dtype", (torch.float32, torch.bfloat16, torch.float16), ids=word)
def test_nan_weight(backend: Backend, weights_dtype: torch.dtype) -> None:
    inputs = make_inputs(Case(num_q=20, num_heads=16, weights_dtype=weights_dtype, windows="full"), backend.device)
    wanted = call(backend, inputs).cpu()
    weights = inputs.weights.clone()
    weights[7, 11] = NAN
    logits = call(backend, replace(inputs, weights=weights)).cpu()
    others = torch.arange(20) != 7
    assert torch.isnan(logits[7]).all()
    assert_same_bits(logits[others], wanted[others])


@pytest.mark.parametrize("num_heads", (1, 7, 24, 40, 100))
def test_weights_past_the_last_head_are_not_read(backend: Backend, num_heads: int) -> None:
    """They are NaN here, as is the memory around q: padding heads contribute exactly 0."""
    inputs = make_inputs(Case(num_heads=num_heads, windows="full"), backend.device)
    wide = inside_larger(inputs.weights, (0, 0), (0, 128))
    assert torch.isnan(wide.as_strided((1, 1), (1, 1), num_heads)).all()
    wanted = call(backend, inputs)
    assert_same_bits(call(backend, replace(inputs, weights=wide)), wanted)
    assert_same_bits(call(backend, strided(inputs)), wanted)
    # The last row ends with the storage.
    exact = wide.as_strided((17, num_heads), wide.stride(), wide.storage_offset())
    storage = torch.empty(16 * wide.stride(0) + num_heads, device=backend.device)
    tight = storage.as_strided((17, num_heads), wide.stride())
    tight.copy_(exact)
    assert_same_bits(call(backend, replace(inputs, weights=tight)), wanted)


# ------------------------------------------------------------------------------------------ magnitudes


def check_rows(backend: Backend, inputs: Inputs, logits: Tensor, limit: float) -> None:
    """As check, row by row, so that large rows do not hide small ones; against the rounded reference."""
    reference, inside = expected(inputs)
    reference = reference.float().double()
    for row in range(logits.shape[0]):
        one = slice(row, row + 1)
        oracle.assert_agrees(logits[one], reference[one], inside[one], limit)


@pytest.mark.parametrize("format", formats.FORMATS)
def test_huge_and_tiny_weights(backend: Backend, format: str) -> None:
    """Sums that leave float32 before the scale brings them back, and neighbours that must not suffer."""
    inputs = make_inputs(Case(num_q=16, num_heads=64, head_dim=128, format=format, windows="full"), backend.device)
    if is_refused(backend, inputs):
        return
    weights = inputs.weights.clone()
    weights[2, 3] = 1e35
    weights[5, 63] = -1e35
    weights[6] *= 1e-30
    weights[9, 0] = 1e-38
    weights[12] *= 1e35
    kv_scale = inputs.kv_scale
    if format == "fp8":
        kv_scale = inputs.kv_scale.clone()
        kv_scale[::2] *= 1e-12
    inputs = replace(inputs, weights=weights, kv_scale=kv_scale)
    limit = agreement_limit(backend, torch.float32, torch.float32)
    check_rows(backend, inputs, call(backend, inputs), limit)


@pytest.mark.parametrize("format", ("mxfp8", "mxfp4"))
@pytest.mark.parametrize(
    "low, high", ((127, 127), (119, 135), (87, 167), (60, 190), (0, 254), (0, 30), (200, 254), (0, 255))
)
def test_exponents_beyond_float32(backend: Backend, format: str, low: int, high: int) -> None:
    """Block exponents from `low` to `high`: results are what float64 rounds to, 0 and inf included."""
    case = Case(num_q=13, num_kv=300, num_heads=8, head_dim=128, format=format, windows="full")
    inputs = make_inputs(case, backend.device)
    if is_refused(backend, inputs):
        return
    generator = torch.Generator().manual_seed(low * 256 + high)

    def exponents(*shape: int) -> Tensor:
        codes = torch.randint(low, high + 1, (*shape, 4), generator=generator, dtype=torch.uint8)
        if high == 255:  # a NaN here and there
            codes = torch.where(torch.rand(codes.shape, generator=generator) < 0.99, codes.clamp(max=160), codes)
        return codes.view(torch.int32).squeeze(-1).to(backend.device)

    inputs = replace(inputs, q_scale=exponents(13, 8), kv_scale=exponents(300))
    limit = agreement_limit(backend, torch.float32, torch.float32)
    check_rows(backend, inputs, call(backend, inputs), limit)


def test_zero_blocks_may_have_any_exponent(backend: Backend) -> None:
    """Quantizers differ in what they store for a block of zeros."""
    case = Case(format="mxfp8", head_dim=64, windows="full")
    inputs = make_inputs(case, backend.device)
    if is_refused(backend, inputs):
        return
    kv = inputs.kv.clone()
    kv.view(torch.uint8)[::3, 32:] = 0
    wanted = call(backend, replace(inputs, kv=kv))
    for byte in (0, 1, 127, 254):
        scale = inputs.kv_scale.clone()
        scale[::3] = (scale[::3] & 0xFF) | byte << 8
        same = replace(inputs, kv=kv, kv_scale=scale)
        logits = call(backend, same)
        check(backend, case, same, logits)
        if backend.device == "cpu":  # does not even take the float64 path
            assert_same_bits(logits, wanted)


# ------------------------------------------------------------------------------------------ storage


@pytest.mark.parametrize("dtype", DTYPES, ids=word)
@pytest.mark.parametrize("format", formats.FORMATS)
@pytest.mark.parametrize("extra", (0, 3, 64))
def test_nothing_outside_out_is_written(backend: Backend, format: str, dtype: torch.dtype, extra: int) -> None:
    """Guards before, behind and between the rows of `out`, in every mode."""
    case = Case(num_q=19, num_kv=517, num_heads=16, format=format, logits_dtype=dtype)
    inputs = make_inputs(case, backend.device)
    if is_refused(backend, inputs):
        return
    for clean in (True, False):
        for width in (0, 1, 100, 517, 600):
            columns = width or case.num_kv
            guard = torch.tensor([0x5A], dtype=torch.uint8).view(torch.int8).item()
            stride = columns + extra
            storage = torch.full((77 + 19 * stride + 77,), 0, dtype=dtype, device=backend.device)
            storage.view(torch.int8).fill_(guard)
            out = storage.as_strided((19, columns), (stride, 1), 77)
            result = call(backend, inputs, clean=clean, width=width, dtype=dtype, out=out)
            assert result is out
            reference, inside = expected(inputs, clean=clean, width=width)
            oracle.assert_agrees(out, reference, inside, agreement_limit(backend, torch.float32, dtype))
            is_out = torch.zeros_like(storage, dtype=torch.bool)
            is_out.as_strided((19, columns), (stride, 1), 77).fill_(True)
            guards = storage.view(torch.int8).view(-1, storage.element_size())[~is_out]
            assert (guards == guard).all()


@pytest.mark.parametrize("num_kv", (0, 1, 255, 256, 257, 511, 1000))
@pytest.mark.parametrize("dtype", DTYPES, ids=word)
def test_rows_of_results_start_at_multiples_of_1024_bytes(backend: Backend, dtype: torch.dtype, num_kv: int) -> None:
    inputs = make_inputs(Case(num_q=3, num_kv=num_kv), backend.device)
    for width in (0, 300):
        logits = call(backend, inputs, dtype=dtype, width=width)
        columns = width or num_kv
        per_unit = 1024 // logits.element_size()
        assert logits.shape == (3, columns)
        assert logits.stride() == ((columns // per_unit + 1) * per_unit, 1), "never as wide as a row"
        assert logits.storage_offset() == 0


def test_forms_of_the_same_bytes_give_the_same_bits(backend: Backend) -> None:
    """int8, uint8 and float4 values; int32 and float8_e8m0fnu scales; junk in unused scale bytes."""
    for format in ("mxfp8", "mxfp4"):
        for head_dim in (32, 64, 128):
            inputs = make_inputs(Case(format=format, head_dim=head_dim), backend.device)
            if is_refused(backend, inputs):
                continue
            wanted = call(backend, inputs)
            forms = [inputs.q.dtype]
            if format == "mxfp4":
                forms = [torch.int8, torch.uint8, torch.float4_e2m1fn_x2]
            packed = (inputs.q_scale, inputs.kv_scale)
            unpacked = tuple(unpack_scale(scale, head_dim) for scale in packed)
            used = (1 << head_dim // 32 * 8) - 1
            junk = tuple((scale.long() & used | 0x5AA5FF00 & ~used).to(torch.int32) for scale in packed)
            for form in forms:
                for q_scale, kv_scale in (packed, unpacked, junk, (packed[0], unpacked[1])):
                    same = replace(
                        inputs, q=inputs.q.view(form), kv=inputs.kv.view(form), q_scale=q_scale, kv_scale=kv_scale
                    )
                    assert_same_bits(call(backend, same), wanted)


def test_memory_stays_small() -> None:
    """The [num_q, num_heads, num_kv] products of this call would take 2 GB; each of two threads may take 8 MB."""
    script = """
import resource, torch, deep_kernels as dk
torch.set_num_threads(2)
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
q = torch.ones(512, 64, 32, dtype=torch.uint8).view(torch.float8_e4m3fn)
kv = torch.ones(16384, 32, dtype=torch.uint8).view(torch.float8_e4m3fn)
start, end = torch.zeros(512, dtype=torch.int32), torch.full((512,), 16384, dtype=torch.int32)
weights, scale = torch.ones(512, 64), torch.ones(16384)
dk.fp8_fp4_mqa_logits((q[:1, :1], None), (kv[:1], scale[:1]), weights[:1, :1], start[:1], end[:1])
torch.mm(torch.ones(256, 256), torch.ones(256, 256))
before = peak()
logits = dk.fp8_fp4_mqa_logits((q, None), (kv, scale), weights, start, end)
print(peak() - before - logits.untyped_storage().nbytes() / 2**20)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 16, f"{done.stdout} MiB"


# ------------------------------------------------------------------------------------------ metadata


def cut_places(starts: list[int], ends: list[int], num_kv: int, num_heads: int) -> list[tuple[int, int]]:
    """Every unit of cost of a call in order, as the (block, chunk) at which a cut there lies."""
    padded = next(heads for heads in (8, 16, 32, 64, 128) if heads >= num_heads)
    tokens = 512 // padded
    places: list[tuple[int, int]] = []
    for block in range(-(-len(starts) // tokens)):
        rows = range(block * tokens, min((block + 1) * tokens, len(starts)))
        spans = [(max(starts[i], 0), min(ends[i], num_kv)) for i in rows]
        spans = [(start, end) for start, end in spans if start < end]
        if not spans:
            places.append((block, 0))
            continue
        begin = min(start for start, _ in spans) // 16 * 16
        num_chunks = -(-(max(end for _, end in spans) - begin) // 256)
        places += [(block, 0)] + [(block, chunk) for chunk in range(num_chunks)]
    return [*places, (-(-len(starts) // tokens), 0)]


@pytest.mark.parametrize("num_sms", (1, 2, 7, 132, 1000))
@pytest.mark.parametrize("num_q, num_heads", ((0, 64), (1, 1), (17, 8), (129, 64), (300, 128), (700, 24)))
def test_metadata_cuts_the_work_evenly(backend: Backend, num_q: int, num_heads: int, num_sms: int) -> None:
    for kind in ("full", "causal", "ragged", "parallel"):
        inputs = make_inputs(Case(num_q=num_q, num_kv=3000, num_heads=num_heads, windows=kind), backend.device)
        try:
            dk.set_num_sms(num_sms)
            schedule = metadata(backend, strided(inputs))
        finally:
            dk.set_num_sms(0)
        assert schedule.dtype == torch.int32 and schedule.device == inputs.start.device and schedule.is_contiguous()
        num_runs = schedule.numel() // 2 - 1
        assert schedule.shape == (2 * (num_runs + 1),)
        assert num_runs == num_sms if backend.device == "cpu" else 1 <= num_runs <= num_sms
        places = cut_places(inputs.start.tolist(), inputs.end.tolist(), 3000, num_heads)
        total = len(places) - 1
        cuts = [tuple(cut) for cut in schedule.cpu().view(-1, 2).tolist()]
        assert cuts == [places[total * i // num_runs] for i in range(num_runs + 1)]


# ------------------------------------------------------------------------------------------ several devices


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_second_gpu() -> None:
    inputs = make_inputs(Case(num_q=33, num_kv=700), "cuda:0")
    wanted = call(Backend("cuda", "cuda", None), inputs)
    logits = call(Backend("cuda", "cuda", None), on_device(inputs, "cuda:1"))
    assert logits.device == torch.device("cuda:1")
    assert_same_bits(logits, wanted)


@pytest.mark.parametrize("num_heads", [1, 8, 64])
@pytest.mark.parametrize("scale", [-4.46e9, -1e20, -1e-20, 1e-20, 4.46e9])
@pytest.mark.parametrize("weight", [6.19e29, -(2.0**120), 2.0**-120])
def test_dead_logits_of_huge_weights_are_zero(backend: Backend, num_heads: int, scale: float, weight: float) -> None:
    """relu gives 0, and 0 times whatever is finite is 0: no factor may leave float32 on the way."""
    case = Case(num_q=9, num_kv=70, num_heads=num_heads, head_dim=64, windows="full", seed=3)
    inputs = make_inputs(case, backend.device)
    ones = torch.ones_like(inputs.q, dtype=torch.float32).to(inputs.q.dtype)
    inputs = replace(
        inputs,
        q=ones,
        kv=(-torch.ones_like(inputs.kv, dtype=torch.float32)).to(inputs.kv.dtype),
        kv_scale=torch.full_like(inputs.kv_scale, scale),
        weights=torch.full_like(inputs.weights, weight),
    )
    logits = call(backend, inputs)
    assert not logits.any(), logits.flatten()[:4]
