"""fp8_fp4_paged_mqa_logits and its metadata: agreement with the formula, and what must not change a bit of a logit."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import oracle
import pytest
import torch
from conftest import Backend
from mqa_cases import INT32_MAX, INT32_MIN, agreement_limit, assert_same_bits, inside_larger, unpack_scale, word
from paged_mqa_cases import (
    EVERY_BITS_CASE,
    SWEEP,
    Case,
    Inputs,
    call,
    expected,
    is_refused,
    make_inputs,
    metadata,
    needed_entries,
    row_lengths,
    strided,
    used_bytes,
    with_page_stride,
)
from test_mqa_logits_memory import far_apart, poisoned_memory, skip_without_room
from torch import Tensor

import deep_kernels as dk
from deep_kernels import formats

NAN, INF = math.nan, math.inf
DTYPES = (torch.float32, torch.bfloat16)


def check(backend: Backend, case: Case, inputs: Inputs, logits: Tensor, width: int, *, clean: bool = True) -> None:
    reference, inside = expected(inputs, width, clean=clean)
    limit = agreement_limit(backend, case.weights_dtype, case.logits_dtype)
    oracle.assert_agrees(logits, reference, inside, limit)


def int32(backend: Backend, values: list[int] | list[list[int]]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=backend.device)


# ------------------------------------------------------------------------------------------ agreement


@pytest.mark.parametrize("case", SWEEP, ids=str)
def test_agrees_with_the_formula(backend: Backend, case: Case) -> None:
    inputs = make_inputs(case, backend.device)
    if is_refused(backend, inputs):
        return
    schedule = metadata(backend, inputs) if case.metadata else None
    logits = call(backend, inputs, case.width, clean=case.clean, dtype=case.logits_dtype, schedule=schedule)
    assert logits.dtype == case.logits_dtype
    assert logits.shape == (case.batch * case.next_n, case.width)
    assert logits.stride(1) == 1 and logits.stride(0) * logits.element_size() % 1024 == 0
    check(backend, case, inputs, logits, case.width, clean=case.clean)


def test_the_sweep_has_what_it_should() -> None:
    """Contexts that are empty, in the middle of a page, at its end, and cut off; tables with junk; unused pages."""
    kinds = set()
    for case in SWEEP:
        inputs = make_inputs(case, "cpu")
        for length in row_lengths(inputs).flatten().tolist():
            kinds.add("none" if length <= 0 else "whole" if length % case.block_kv == 0 else "part")
            kinds |= {"cut"} if length > case.width else set()
        table = inputs.block_table
        kinds |= {"junk"} if ((table < 0) | (table >= inputs.kv_cache.shape[0])).any() else set()
        kinds |= {"unused"} if not used_bytes(inputs).flatten(1).any(dim=1).all() else set()
        kinds |= {"shared"} if inputs.indices is not None and inputs.indices.unique().numel() < case.batch else set()
    assert kinds == {"none", "whole", "part", "cut", "junk", "unused", "shared"}


@pytest.mark.parametrize("format", formats.FORMATS)
@pytest.mark.parametrize("next_n", (1, 2, 3, 4, 7))
def test_query_tokens_of_a_request(backend: Backend, next_n: int, format: str) -> None:
    """1-D lengths end with the last query token; the same lengths in two dimensions are the same call."""
    for num_heads in (8, 64):
        case = Case(batch=2, next_n=next_n, num_heads=num_heads, format=format, max_len=150, lengths="full")
        inputs = make_inputs(case, backend.device)
        if is_refused(backend, inputs):
            return
        logits = call(backend, inputs, 150)
        check(backend, case, inputs, logits, 150)
        lens = row_lengths(inputs)
        assert lens[:, -1].tolist() == [150, 150] and lens[0, 0] == 151 - next_n
        both = replace(inputs, context_lens=lens.to(torch.int32).to(backend.device))
        assert_same_bits(call(backend, both, 150), logits)


@pytest.mark.parametrize("next_n", (1, 3))
def test_lengths_at_their_limits(backend: Backend, next_n: int) -> None:
    """Fewer tokens than query tokens, none, less than none, more than columns, and more than the table reaches."""
    lens = [0, 1, 2, -1, INT32_MIN, 63, 64, 65, 127, 128, 129, 191, 192]
    for width in (1, 64, 100, 192, 300):
        case = Case(batch=len(lens), next_n=next_n, max_len=192, lengths="full")
        inputs = make_inputs(case, backend.device)
        inputs = replace(inputs, context_lens=int32(backend, lens))
        check(backend, case, inputs, call(backend, inputs, width), width)
        # Here each request has as many pages as its row of the table is long.
        reach = replace(inputs, block_table=inputs.block_table[:, :3])
        for length in (192, 193, 4000, INT32_MAX):
            beyond = replace(reach, context_lens=int32(backend, [length] * len(lens)))
            check(backend, case, beyond, call(backend, beyond, width), width)


def test_older_name_is_the_same_function(backend: Backend) -> None:
    inputs = make_inputs(Case(), backend.device)
    arguments = (inputs.q, inputs.kv_cache, inputs.weights, inputs.context_lens, inputs.block_table)
    wanted = call(backend, inputs, 200)
    assert_same_bits(dk.fp8_paged_mqa_logits(*arguments, None, 200, True, arch=backend.arch), wanted)
    _, inside = expected(inputs, 200)
    schedule = metadata(backend, inputs)
    out = torch.empty_like(wanted)
    assert dk.fp8_paged_mqa_logits(*arguments, schedule, 200, out=out, arch=backend.arch) is out
    assert_same_bits(out, wanted, inside)


@pytest.mark.parametrize("clean", (False, True))
def test_nothing_to_score(backend: Backend, clean: bool) -> None:
    inputs = make_inputs(Case(), backend.device)
    empty = {
        "no request": (inputs.requests(slice(0, 0)), 70),
        "no column": (inputs, 0),
        "no page": (replace(inputs, kv_cache=inputs.kv_cache[:0]), 70),
        "no table": (replace(inputs, block_table=inputs.block_table[:, :0]), 70),
    }
    for name, (one, width) in empty.items():
        logits = call(backend, one, width, clean=clean)
        assert logits.shape == (one.weights.shape[0], width), name
        assert not clean or torch.isneginf(logits).all(), name


# ------------------------------------------------------------------------------------------ equal bits


def garbage_schedules(backend: Backend, inputs: Inputs) -> Iterator[tuple[str, Tensor]]:
    """Schedules of other calls, and such as no call makes."""
    other = int32(backend, [7, 0, 3000, 64, 5, 90, 1])
    for num_sms in (1, 7, 132, 300):
        yield f"of {num_sms} SMs", metadata(backend, inputs, num_sms)
        yield (
            f"of another batch, {num_sms} SMs",
            dk.get_paged_mqa_logits_metadata(other, 16, num_sms, arch=backend.arch),
        )
    generator = torch.Generator().manual_seed(1)
    for length in (2, 3, 133, 1000):
        random = torch.randint(INT32_MIN, INT32_MAX, (length, 2), generator=generator, dtype=torch.int64)
        small = torch.randint(-3, 9, (length, 2), generator=generator)
        for name, values in (("random", random), ("small", small), ("reversed", small.sort(0, descending=True)[0])):
            yield f"{name} [{length}, 2]", values.to(torch.int32).to(backend.device)
        for value in (0, -1, INT32_MIN, INT32_MAX):
            yield f"all {value} [{length}, 2]", torch.full_like(random, value).to(torch.int32).to(backend.device)


@EVERY_BITS_CASE
def test_schedule_changes_no_bit(backend: Backend, case: Case) -> None:
    inputs = make_inputs(case, backend.device)
    if is_refused(backend, inputs):
        return
    wanted = call(backend, inputs, case.width, dtype=case.logits_dtype)
    for name, schedule in garbage_schedules(backend, inputs):
        logits = call(backend, inputs, case.width, dtype=case.logits_dtype, schedule=schedule)
        try:
            assert_same_bits(logits, wanted)
        except AssertionError as error:
            raise AssertionError(f"schedule {name}: {error}") from None


@EVERY_BITS_CASE
def test_cleaning_and_width_change_no_bit(backend: Backend, case: Case) -> None:
    inputs = make_inputs(case, backend.device)
    if is_refused(backend, inputs):
        return
    wanted = call(backend, inputs, 450, dtype=case.logits_dtype)
    for width in (1, 64, 200, 450):
        _, inside = expected(inputs, width)
        for clean in (True, False):
            logits = call(backend, inputs, width, dtype=case.logits_dtype, clean=clean)
            assert_same_bits(logits, wanted[:, :width], inside)
            assert not clean or torch.isneginf(logits.cpu()[~inside]).all()


@EVERY_BITS_CASE
def test_batch_pages_and_strides_change_no_bit(backend: Backend, case: Case) -> None:
    inputs = make_inputs(case, backend.device)
    if is_refused(backend, inputs):
        return

    def run(one: Inputs) -> Tensor:
        return call(backend, one, case.width, dtype=case.logits_dtype)

    wanted = run(inputs)
    for first, last in ((0, 1), (4, 5), (1, 3), (2, 5)):
        assert_same_bits(run(inputs.requests(slice(first, last))), wanted[first * case.next_n : last * case.next_n])
    assert_same_bits(run(strided(inputs)), wanted)
    for gap in (16, 64, 4096):
        assert_same_bits(run(replace(inputs, kv_cache=with_page_stride(inputs.kv_cache, gap, 16))), wanted)
    # A slice of a tensor that holds the pages of several layers.
    layers = inputs.kv_cache.unsqueeze(1).repeat(1, 3, 1, 1, 1)
    layers[:, ::2] = 0xFF
    assert_same_bits(run(replace(inputs, kv_cache=layers[:, 1])), wanted)

    num_blocks = inputs.kv_cache.shape[0]
    places = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(5)).to(backend.device)
    moved = torch.empty_like(inputs.kv_cache)
    moved[places] = inputs.kv_cache
    exists = (inputs.block_table >= 0) & (inputs.block_table < num_blocks)
    table = torch.where(exists, places[inputs.block_table.clamp(0, num_blocks - 1).long()].to(torch.int32), -1)
    assert_same_bits(run(replace(inputs, kv_cache=moved, block_table=table)), wanted)
    wide = inside_larger(inputs.block_table, (0, 0), (0, 1000))
    assert_same_bits(run(replace(inputs, block_table=wide.as_strided((case.batch, 900), wide.stride()))), wanted)


@pytest.mark.parametrize("format", formats.FORMATS)
def test_page_size_changes_no_bit(backend: Backend, format: str) -> None:
    case = Case(batch=1, max_len=512, lengths="full", num_heads=32, format=format)
    inputs = make_inputs(case, backend.device)
    if is_refused(backend, inputs):
        return
    lens = int32(backend, [499])
    wanted = call(backend, replace(inputs, context_lens=lens), 512)
    kv = oracle.paged_kv(inputs.kv_cache, inputs.block_table[0, :8].tolist(), 512, format)
    for block_kv in formats.PAGE_SIZES:
        cache = formats.pack_paged_kv(*kv, block_kv).to(backend.device)
        table = torch.arange(512 // block_kv, dtype=torch.int32, device=backend.device)[None]
        assert_same_bits(
            call(backend, replace(inputs, kv_cache=cache, block_table=table, context_lens=lens), 512), wanted
        )


@EVERY_BITS_CASE
def test_indices_are_a_hint(backend: Backend, case: Case) -> None:
    """Rows that say of which request they are give the bits of rows that each are a request."""
    if case.lens != "indices":
        return
    inputs = make_inputs(case, backend.device)
    if is_refused(backend, inputs):
        return
    assert inputs.indices is not None and inputs.indices.unique().numel() < case.batch
    wanted = call(backend, inputs, case.width, dtype=case.logits_dtype)
    alone = replace(inputs, indices=torch.arange(case.batch, dtype=torch.int32, device=backend.device))
    assert_same_bits(call(backend, alone, case.width, dtype=case.logits_dtype), wanted)
    column = replace(inputs, context_lens=inputs.context_lens[:, None])
    assert_same_bits(call(backend, column, case.width, dtype=case.logits_dtype), wanted)
    check(backend, case, inputs, call(backend, replace(inputs, indices=None), case.width), case.width)


@EVERY_BITS_CASE
def test_twenty_runs_give_the_same_bits(backend: Backend, case: Case) -> None:
    inputs = make_inputs(case, backend.device)
    if is_refused(backend, inputs):
        return
    wanted = call(backend, inputs, case.width, dtype=case.logits_dtype)
    for _ in range(19):
        assert_same_bits(call(backend, inputs, case.width, dtype=case.logits_dtype), wanted)


def test_threads_change_no_bit() -> None:
    cpu = Backend("cpu", "cpu", None)
    for format in formats.FORMATS:
        inputs = make_inputs(Case(batch=9, max_len=2000, num_heads=32, format=format), "cpu")
        wanted = call(cpu, inputs, 2000)
        num_threads = torch.get_num_threads()
        try:
            for threads in (1, 2, 5):
                torch.set_num_threads(threads)
                assert_same_bits(call(cpu, inputs, 2000), wanted)
        finally:
            torch.set_num_threads(num_threads)


def test_inputs_stay_as_they_are(backend: Backend) -> None:
    """Stands for opcheck's schema test, which cannot compare float8."""
    for format in formats.FORMATS:
        inputs = make_inputs(Case(format=format, strided=True, lens="indices"), backend.device)
        if is_refused(backend, inputs):
            continue
        before = {name: tensor.clone() for name, tensor in inputs.tensors().items()}
        schedule = metadata(backend, inputs)
        kept = schedule.clone()
        call(backend, inputs, 200, schedule=schedule)
        for name, tensor in inputs.tensors().items():
            assert torch.equal(tensor.contiguous().view(torch.uint8), before[name].contiguous().view(torch.uint8)), name
        assert torch.equal(schedule, kept)


# ------------------------------------------------------------------------------------------ NaN and garbage


@EVERY_BITS_CASE
def test_garbage_behind_every_context_changes_no_bit(backend: Backend, case: Case) -> None:
    """In page tails, their scales, pages that nobody uses, and in the table."""
    inputs = make_inputs(case, backend.device)
    if is_refused(backend, inputs):
        return
    wanted = call(backend, inputs, case.width, dtype=case.logits_dtype)
    used = used_bytes(inputs).to(backend.device)
    assert 0 < int(used.sum()) < used.numel()
    is_needed = needed_entries(inputs).to(backend.device)
    for byte, entry in ((0xFF, -1), (0x7F, INT32_MAX), (0x00, INT32_MIN), (0x7E, 0)):
        poisoned = replace(
            inputs,
            kv_cache=torch.where(used, inputs.kv_cache, byte),
            block_table=torch.where(is_needed, inputs.block_table, entry),
        )
        assert_same_bits(call(backend, poisoned, case.width, dtype=case.logits_dtype), wanted)


def test_table_entries_that_name_no_page_harm_nobody_else(backend: Backend) -> None:
    """What they give is unspecified; nothing outside the cache may be read for it."""
    case = Case(batch=4, max_len=300, lengths="full", num_heads=32)
    inputs = make_inputs(case, backend.device)
    # The cache ends with its storage and begins with it: an address beside it would be somebody else's.
    wanted = call(backend, inputs, 300)
    for entry in (-1, inputs.kv_cache.shape[0], INT32_MIN, INT32_MAX):
        table = inputs.block_table.clone()
        table[1, :2] = entry
        logits = call(backend, replace(inputs, block_table=table), 300)
        assert_same_bits(logits[[0, 2, 3]], wanted[[0, 2, 3]])
        assert_same_bits(logits[1, 128:], wanted[1, 128:])


def scale_bytes(inputs: Inputs, request: int, j: int) -> Tensor:
    """uint8 [4], a view of the scale of kv token j of a request."""
    block_kv, token_bytes = inputs.kv_cache.shape[1], inputs.kv_cache.shape[3]
    page = inputs.kv_cache[int(inputs.block_table[request, j // block_kv])].view(-1)
    first = block_kv * (token_bytes - 4) + j % block_kv * 4
    return page[first : first + 4]


@pytest.mark.parametrize("format", formats.FORMATS)
def test_nan_scale(backend: Backend, format: str) -> None:
    """A NaN scale makes its logits NaN and changes no other."""
    case = Case(batch=3, next_n=2, max_len=200, num_heads=16, format=format, lengths="full")
    inputs = make_inputs(case, backend.device)
    if is_refused(backend, inputs):
        return
    wanted = call(backend, inputs, 200)
    spoilt = replace(inputs, kv_cache=inputs.kv_cache.clone())
    nan = torch.tensor([NAN]).view(torch.uint8) if format == "fp8" else torch.tensor([0x7F, 0xFF, 0, 0])
    scale_bytes(spoilt, 1, 137).copy_(nan.to(torch.uint8))
    logits = call(backend, spoilt, 200)
    hit = torch.zeros(6, 200, dtype=torch.bool)
    hit[2:4, 137] = True
    assert torch.isnan(logits.cpu()[hit]).all()
    assert_same_bits(logits, wanted, ~hit)
    if inputs.q_scale is None:
        return
    q_scale = inputs.q_scale.clone()
    q_scale[2, 1, 5] = 0xFF00 | 0x7F
    logits = call(backend, replace(inputs, q_scale=q_scale), 200)
    hit = torch.zeros(6, 200, dtype=torch.bool)
    hit[5] = True
    assert torch.isnan(logits.cpu()[hit]).all()
    assert_same_bits(logits, wanted, ~hit)


@pytest.mark.parametrize("format", ("fp8", "mxfp8"))
def test_nan_element(backend: Backend, format: str) -> None:
    """A NaN element makes its logits NaN, or counts as relu = 0; nothing else changes."""
    case = Case(batch=3, max_len=200, num_heads=16, format=format, lengths="full")
    inputs = make_inputs(case, backend.device)
    if is_refused(backend, inputs):
        return
    wanted = call(backend, inputs, 200)
    for nan in (0x7F, 0xFF):
        cache = inputs.kv_cache.clone()
        cache[int(inputs.block_table[1, 2])].view(-1)[9 * 64 + 37] = nan
        logits = call(backend, replace(inputs, kv_cache=cache), 200)
        hit = torch.zeros(3, 200, dtype=torch.bool)
        hit[1, 2 * 64 + 9] = True
        assert (torch.isnan(logits.cpu()[hit]) | (logits.cpu()[hit] == 0)).all()
        assert_same_bits(logits, wanted, ~hit)

        q = inputs.q.clone()
        q.view(torch.uint8)[2, 0, 5, 37] = nan
        logits = call(backend, replace(inputs, q=q), 200)
        without = replace(inputs, weights=inputs.weights.clone())
        without.weights[2, 5] = 0
        dropped = call(backend, without, 200)
        assert_same_bits(logits[:2], wanted[:2])
        assert (torch.isnan(logits[2]) | torch.isclose(logits[2], dropped[2], rtol=1e-4)).all()


def test_weights_past_the_last_head_are_not_read(backend: Backend) -> None:
    """They are NaN here, as is the memory around q: padding heads contribute exactly 0."""
    for num_heads in (1, 7, 17, 40, 100):
        inputs = make_inputs(Case(num_heads=num_heads, next_n=2), backend.device)
        wanted = call(backend, inputs, 200)
        wide = inside_larger(inputs.weights, (0, 0), (0, 128))
        assert torch.isnan(wide.as_strided((1, 1), (1, 1), num_heads)).all()
        assert_same_bits(call(backend, replace(inputs, weights=wide), 200), wanted)
        weights = inputs.weights.clone()
        weights[3, num_heads - 1] = NAN
        logits = call(backend, replace(inputs, weights=weights), 200)
        _, inside = expected(inputs, 200)
        assert torch.isnan(logits[3].cpu()[inside[3]]).all()
        others = torch.arange(6) != 3
        assert_same_bits(logits.cpu()[others], wanted.cpu()[others])


# ------------------------------------------------------------------------------------------ magnitudes


def check_rows(backend: Backend, inputs: Inputs, logits: Tensor, width: int) -> None:
    """As check, row by row, so that large rows do not hide small ones; against the rounded reference."""
    reference, inside = expected(inputs, width)
    reference = reference.float().double()
    limit = agreement_limit(backend, torch.float32, torch.float32)
    for row in range(logits.shape[0]):
        one = slice(row, row + 1)
        oracle.assert_agrees(logits[one], reference[one], inside[one], limit)


@pytest.mark.parametrize("format", formats.FORMATS)
def test_huge_and_tiny_weights(backend: Backend, format: str) -> None:
    """Sums that leave float32 before the scale brings them back, and neighbours that must not suffer."""
    case = Case(batch=4, next_n=4, num_heads=64, head_dim=128, format=format, lengths="full")
    inputs = make_inputs(case, backend.device)
    if is_refused(backend, inputs):
        return
    weights = inputs.weights.clone()
    weights[2, 3] = 1e35
    weights[5, 63] = -1e35
    weights[6] *= 1e-30
    weights[9, 0] = 1e-38
    weights[12] *= 1e35
    inputs = replace(inputs, weights=weights)
    check_rows(backend, inputs, call(backend, inputs, 200), 200)


def with_exponents(inputs: Inputs, low: int, high: int) -> Inputs:
    """Block exponents from `low` to `high` everywhere; a NaN here and there where `high` is 255."""
    generator = torch.Generator().manual_seed(low * 256 + high)

    def exponents(*shape: int) -> Tensor:
        codes = torch.randint(low, high + 1, (*shape, 4), generator=generator, dtype=torch.uint8)
        if high == 255:
            codes = torch.where(torch.rand(codes.shape, generator=generator) < 0.99, codes.clamp(max=160), codes)
        return codes

    num_blocks, block_kv, _, token_bytes = inputs.kv_cache.shape
    pages = inputs.kv_cache.flatten(1).clone()
    pages[:, block_kv * (token_bytes - 4) :] = exponents(num_blocks, block_kv).flatten(1).to(pages.device)
    q_scale = exponents(*inputs.q.shape[:3]).view(torch.int32).squeeze(-1)
    return replace(inputs, kv_cache=pages.view(inputs.kv_cache.shape), q_scale=q_scale.to(pages.device))


@pytest.mark.parametrize("format", ("mxfp8", "mxfp4"))
@pytest.mark.parametrize(
    "low, high", ((127, 127), (119, 135), (107, 147), (87, 167), (60, 190), (0, 254), (0, 30), (200, 254), (0, 255))
)
def test_exponents_beyond_float32(backend: Backend, format: str, low: int, high: int) -> None:
    """Results are what float64 rounds to, 0 and inf included."""
    case = Case(batch=3, next_n=2, max_len=150, num_heads=8, head_dim=128, format=format, block_kv=16)
    inputs = make_inputs(case, backend.device)
    if is_refused(backend, inputs):
        return
    inputs = with_exponents(inputs, low, high)
    check_rows(backend, inputs, call(backend, inputs, 150), 150)


@pytest.mark.parametrize("format", ("mxfp8", "mxfp4"))
@pytest.mark.parametrize("spread", range(0, 41, 4))
def test_spreads_within_a_row(backend: Backend, format: str, spread: int) -> None:
    """Rows of queries and keys whose large blocks lie apart: all that counts comes from small ones."""
    case = Case(batch=2, max_len=130, num_heads=16, head_dim=128, format=format, lengths="full")
    inputs = make_inputs(case, backend.device)
    if is_refused(backend, inputs):
        return
    inputs = with_exponents(inputs, 127, 127)
    block_kv, _, token_bytes = inputs.kv_cache.shape[1:]
    scales = inputs.kv_cache.flatten(1)[:, block_kv * (token_bytes - 4) :].unflatten(1, (block_kv, 4))
    scales[:, :, 0] = 127 + spread // 2
    scales[:, ::2, 1:] = 127 - spread // 2
    opposite = torch.tensor([127 - spread, 127, 127 + spread // 2, 127], dtype=torch.uint8).view(torch.int32)
    inputs = replace(inputs, q_scale=torch.full_like(inputs.q_scale, int(opposite)))
    check_rows(backend, inputs, call(backend, inputs, 130), 130)


# ------------------------------------------------------------------------------------------ storage


@pytest.mark.parametrize("dtype", DTYPES, ids=word)
@pytest.mark.parametrize("extra", (0, 3, 64))
def test_nothing_outside_out_is_written(backend: Backend, dtype: torch.dtype, extra: int) -> None:
    """Guards before, behind and between the rows of `out`."""
    for format in formats.FORMATS:
        case = Case(batch=4, next_n=3, max_len=300, num_heads=16, format=format, logits_dtype=dtype)
        inputs = make_inputs(case, backend.device)
        if is_refused(backend, inputs):
            continue
        for clean in (True, False):
            for width in (1, 100, 299, 320):
                stride = width + extra
                storage = torch.empty(77 + 12 * stride + 77, dtype=dtype, device=backend.device)
                storage.view(torch.int8).fill_(0x5A)
                out = storage.as_strided((12, width), (stride, 1), 77)
                assert call(backend, inputs, width, clean=clean, dtype=dtype, out=out) is out
                check(backend, case, inputs, out, width, clean=clean)
                is_out = torch.zeros_like(storage, dtype=torch.bool)
                is_out.as_strided((12, width), (stride, 1), 77).fill_(True)
                guards = storage.view(torch.int8).view(-1, storage.element_size())[~is_out]
                assert (guards == 0x5A).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=word)
def test_rows_of_results_start_at_multiples_of_1024_bytes(backend: Backend, dtype: torch.dtype) -> None:
    inputs = make_inputs(Case(), backend.device)
    for width in (0, 1, 255, 256, 257, 511, 1000):
        logits = call(backend, inputs, width, dtype=dtype)
        per_unit = 1024 // logits.element_size()
        assert logits.stride() == ((width // per_unit + 1) * per_unit, 1), "never as wide as a row"
        assert logits.storage_offset() == 0


def test_forms_of_the_same_bytes_give_the_same_bits(backend: Backend) -> None:
    """int8, uint8 and float4 values; int32 and float8_e8m0fnu scales of q; junk in unused scale bytes."""
    for format in ("mxfp8", "mxfp4"):
        for head_dim in (32, 64, 128):
            inputs = make_inputs(Case(format=format, head_dim=head_dim, next_n=2), backend.device)
            if is_refused(backend, inputs):
                continue
            wanted = call(backend, inputs, 200)
            values = [torch.int8, torch.uint8, torch.float4_e2m1fn_x2] if format == "mxfp4" else [inputs.q.dtype]
            assert inputs.q_scale is not None
            unpacked = unpack_scale(inputs.q_scale, head_dim)
            odd = inside_larger(unpacked, (0, 0, 1, 1), (0, 0, 0, 2))
            used = (1 << head_dim // 32 * 8) - 1
            junk = (inputs.q_scale.long() & used | 0x5AA5FF00 & ~used).to(torch.int32)
            for dtype in values:
                for q_scale in (inputs.q_scale, unpacked, odd, junk):
                    same = replace(inputs, q=inputs.q.view(dtype), q_scale=q_scale)
                    assert_same_bits(call(backend, same, 200), wanted)


@pytest.mark.parametrize("byte", (None, 0x00, 0x5A, 0x7F, 0xFF))
@EVERY_BITS_CASE
def test_fresh_memory_may_hold_anything(backend: Backend, case: Case, byte: int | None) -> None:
    """The result and schedules: whatever is read was written before."""
    if byte is not None and backend.device == "cpu":
        pytest.skip("only the allocator of a card can be made to hand a chosen byte out")
    inputs = make_inputs(case, backend.device)
    if is_refused(backend, inputs):
        return
    wanted = call(backend, inputs, case.width, dtype=case.logits_dtype)
    _, inside = expected(inputs, case.width)
    for with_schedule in (False, True):
        with poisoned_memory(backend, byte):
            schedule = metadata(backend, inputs) if with_schedule else None
            cleaned = call(backend, inputs, case.width, dtype=case.logits_dtype, schedule=schedule)
            uncleaned = call(backend, inputs, case.width, dtype=case.logits_dtype, schedule=schedule, clean=False)
        assert_same_bits(cleaned, wanted)
        assert_same_bits(uncleaned, wanted, inside)


@pytest.mark.parametrize("last_byte", (2**31 - 4096, 2**31 + 4096, 2**32 + 4096), ids=("below", "2^31", "2^32"))
@pytest.mark.parametrize("name", ("q", "kv_cache", "weights", "context_lens", "block_table", "out"))
@pytest.mark.parametrize("format", formats.FORMATS)
def test_rows_far_apart(backend: Backend, format: str, name: str, last_byte: int) -> None:
    """Offsets beyond 31 and 32 bits by strides; on the CPU only pages that are touched take memory."""
    inputs = make_inputs(Case(format=format, lengths="full"), backend.device)
    if is_refused(backend, inputs):
        return
    skip_without_room(backend, 1.2 * last_byte)
    wanted = call(backend, inputs, 200)
    if name == "out":
        out = far_apart(torch.zeros_like(wanted), last_byte)
        assert_same_bits(call(backend, inputs, 200, out=out), wanted)
        return
    tensor = getattr(inputs, name)
    apart = far_apart(tensor, last_byte) if tensor.dim() > 1 else far_apart(tensor[:, None], last_byte)[:, 0]
    assert_same_bits(call(backend, replace(inputs, **{name: apart}), 200), wanted)


def test_memory_stays_small() -> None:
    """The products of all heads of this call would take 1 GB; each of two threads may take 8 MB."""
    script = """
import resource, torch, deep_kernels as dk
torch.set_num_threads(2)
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
q = torch.ones(16, 4, 64, 32, dtype=torch.uint8).view(torch.float8_e4m3fn)
cache = torch.ones(1024, 64, 1, 36, dtype=torch.uint8)
lens = torch.full((16,), 65536, dtype=torch.int32)
table = torch.arange(1024, dtype=torch.int32).repeat(16, 1)
weights = torch.ones(64, 64)
dk.fp8_paged_mqa_logits(q[:1, :1], cache, weights[:1], lens[:1] // 1000, table[:1], None, 60)
torch.mm(torch.ones(256, 256), torch.ones(256, 256))
before = peak()
logits = dk.fp8_paged_mqa_logits(q, cache, weights, lens, table, None, 65536)
print(peak() - before - logits.untyped_storage().nbytes() / 2**20)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 16, f"{done.stdout} MiB"


# ------------------------------------------------------------------------------------------ metadata


def cut_places(lens: list[list[int]], indices: list[int] | None) -> list[tuple[int, int]]:
    """Every unit of cost of a call in order, as the (request, tile of 64 tokens) at which a cut there lies."""
    longest = [max(0, *rows) for rows in lens]
    for i in range(1, len(lens), 2):  # rows of one request in pairs: the first stands for both
        if indices is not None and indices[i] == indices[i - 1]:
            longest[i - 1], longest[i] = max(longest[i - 1 : i + 1]), 0
    places: list[tuple[int, int]] = []
    for i, length in enumerate(longest):
        num_tiles = -(-length // 64)
        places += [(i, 0)] * (num_tiles > 0) + [(i, tile) for tile in range(num_tiles)]
    return [*places, (len(lens), 0)]


@pytest.mark.parametrize("num_sms", (1, 2, 7, 132, 1000))
@pytest.mark.parametrize("lens", ("1d", "2d", "indices"))
def test_metadata_cuts_the_work_evenly(backend: Backend, lens: str, num_sms: int) -> None:
    for batch in (0, 1, 2, 33, 300):
        next_n = 3 if lens == "2d" else 1
        case = Case(batch=batch, next_n=next_n, max_len=900, lens=lens, num_heads=1, head_dim=32, block_kv=256)
        inputs = make_inputs(case, backend.device)
        for one in (inputs, strided(inputs)):
            schedule = metadata(backend, one, num_sms)
            assert schedule.dtype == torch.int32 and schedule.device == inputs.q.device and schedule.is_contiguous()
            assert schedule.shape == (num_sms + 1, 2)
            rows = inputs.context_lens.view(batch, next_n).tolist()
            places = cut_places(rows, None if inputs.indices is None else inputs.indices.tolist())
            total = len(places) - 1
            cuts = [tuple(cut) for cut in schedule.cpu().tolist()]
            assert cuts == [places[total * i // num_sms] for i in range(num_sms + 1)]


def test_metadata_of_odd_lengths(backend: Backend) -> None:
    """Below nothing, and sums beyond 32 bits."""
    lens = int32(backend, [INT32_MIN, -1, 0, INT32_MAX, INT32_MAX, 1])
    schedule = dk.get_paged_mqa_logits_metadata(lens, 64, 4, arch=backend.arch).cpu()
    assert schedule[0].tolist() == [3, 0] and schedule[4].tolist() == [6, 0]
    assert schedule[2].tolist() in ([4, 0], [3, 2**25], [4, 1])
    assert (schedule[1:, 0] >= schedule[:-1, 0]).all()
