"""Where the tensors of MQA logits lie: poisoned and far memory, captured graphs, and parts that make up a whole."""

from __future__ import annotations

from dataclasses import replace

import oracle
import pytest
import torch
from conftest import Backend
from mqa_cases import (
    Case,
    Inputs,
    agreement_limit,
    assert_same_bits,
    call,
    expected,
    is_refused,
    make_inputs,
    metadata,
)
from storage import far_apart, poisoned_memory, skip_without_room
from torch import Tensor

from deep_kernels import formats

by_format = pytest.mark.parametrize("format", formats.FORMATS)


def wide_exponents(scale: Tensor) -> Tensor:
    """int32 scales whose blocks spread further than any 8-bit format can hold."""
    codes = scale.clone().view(torch.uint8).view(*scale.shape, 4)
    codes[..., 1::2] -= 30
    return codes.view(torch.int32).squeeze(-1)


# ------------------------------------------------------------------------------------------ poison


@by_format
@pytest.mark.parametrize("byte", (None, 0x00, 0x5A, 0x7F, 0xFF))
def test_fresh_memory_may_hold_anything(backend: Backend, format: str, byte: int | None) -> None:
    """The result, schedules and workspaces: whatever is read was written before."""
    if byte is not None and backend.device == "cpu":
        pytest.skip("only the allocator of a card can be made to hand a chosen byte out")
    case = Case(num_q=37, num_kv=900, num_heads=16, head_dim=128, format=format, seed=4)
    inputs = make_inputs(case, backend.device)
    if is_refused(backend, inputs):
        return
    if inputs.q_scale is not None:  # every path of MX rows
        q_scale, kv_scale = inputs.q_scale.clone(), inputs.kv_scale.clone()
        q_scale[5:9] = wide_exponents(q_scale[5:9])
        kv_scale[200:210] = wide_exponents(kv_scale[200:210])
        inputs = replace(inputs, q_scale=q_scale, kv_scale=kv_scale)
    for width in (0, 500):
        reference, inside = expected(inputs, width=width)
        for with_schedule in (False, True):
            with poisoned_memory(backend, byte):
                schedule = metadata(backend, inputs) if with_schedule else None
                cleaned = call(backend, inputs, width=width, schedule=schedule)
                uncleaned = call(backend, inputs, width=width, schedule=schedule, clean=False)
            limit = agreement_limit(backend, torch.float32, torch.float32)
            oracle.assert_agrees(cleaned, reference, inside, limit)
            assert_same_bits(uncleaned, cleaned, inside)


# ------------------------------------------------------------------------------------------ far addresses


@by_format
@pytest.mark.parametrize("last_byte", (2**31 - 4096, 2**31 + 4096, 2**32 + 4096), ids=("below", "2^31", "2^32"))
@pytest.mark.parametrize("name", ("q", "kv", "weights", "out"))
def test_rows_far_apart(backend: Backend, format: str, name: str, last_byte: int) -> None:
    """Offsets beyond 31 and 32 bits by strides; on the CPU only pages that are touched take memory."""
    skip_without_room(backend, 2.5 * last_byte)
    case = Case(num_q=41, num_kv=300, num_heads=16, head_dim=128, format=format, seed=4)
    inputs = make_inputs(case, backend.device)
    if is_refused(backend, inputs):
        return
    wanted = call(backend, inputs)
    out = None
    if name == "out":
        out = far_apart(torch.full_like(wanted, 7.0), last_byte)
    else:
        inputs = replace(inputs, **{name: far_apart(getattr(inputs, name), last_byte)})
    for with_schedule in (False, True):
        schedule = metadata(backend, inputs) if with_schedule else None
        assert_same_bits(call(backend, inputs, schedule=schedule, out=out), wanted)


@pytest.fixture
def card(backend: Backend) -> Backend:
    """A backend of a card; what these tests hold would take a CPU minutes."""
    if backend.device == "cpu":
        pytest.skip("takes a card's memory and speed")
    return backend


def random_codes(*size: int) -> Tensor:
    """Bytes that are finite in every format."""
    return torch.randint(0, 256, size, dtype=torch.uint8, device="cuda") & 0xF7


@by_format
def test_more_kv_tokens_than_32_bits_of_bytes(card: Backend, format: str) -> None:
    """The last of 2^25 and some tokens have the bits that they have at the beginning of a tensor of their own."""
    skip_without_room(card, 20e9)
    num_kv = (2**32 >> (6 if format == "mxfp4" else 7)) + 1000
    case = Case(num_q=2, num_kv=4, num_heads=8, head_dim=128, format=format, windows="full")
    inputs = make_inputs(case, "cuda")
    if is_refused(card, inputs):
        return
    kv = random_codes(num_kv, inputs.kv.shape[1]).view(inputs.kv.dtype)
    scale = torch.rand(num_kv, device="cuda") + 0.5
    if format != "fp8":
        scale = torch.randint(123, 132, (num_kv, 4), dtype=torch.uint8, device="cuda").view(torch.int32).squeeze(1)
    for first, last in ((num_kv - 1777, num_kv), (2**31 // kv.shape[1] - 700, 2**31 // kv.shape[1] + 900)):
        start = torch.full((2,), first, dtype=torch.int32, device="cuda")
        far = replace(inputs, kv=kv, kv_scale=scale, start=start, end=start + (last - first))
        begin = first // 16 * 16
        near = replace(far, kv=kv[begin:last], kv_scale=scale[begin:last], start=start - begin, end=far.end - begin)
        wanted = call(card, near)[:, first - begin :]
        assert_same_bits(call(card, far, width=last - first), wanted)
        logits = call(card, far, clean=False, schedule=metadata(card, far))
        assert_same_bits(logits[:, first:last], wanted)
        del logits


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@by_format
def test_more_logits_than_32_bits_of_bytes(card: Backend, format: str, dtype: torch.dtype) -> None:
    """More than 2^31 logits in one result; rows of all parts have the bits that they have alone, -inf included."""
    num_q, num_kv = 33_000, 66_000
    skip_without_room(card, 30e9)
    case = Case(num_q=4, num_kv=4, num_heads=8, head_dim=64, format=format, windows="full")
    small = make_inputs(case, "cuda")
    if is_refused(card, small):
        return
    q = random_codes(num_q, 8, small.q.shape[2]).view(small.q.dtype)
    kv = random_codes(num_kv, small.kv.shape[1]).view(small.kv.dtype)
    q_scale, kv_scale = None, torch.rand(num_kv, device="cuda") + 0.5
    if format != "fp8":
        q_scale = torch.full((num_q, 8), 0x7E80, dtype=torch.int32, device="cuda")
        kv_scale = torch.full((num_kv,), 0x7E80, dtype=torch.int32, device="cuda")
    rows = torch.arange(num_q, dtype=torch.int32, device="cuda")
    weights = torch.randn(num_q, 8, device="cuda")
    inputs = Inputs(q, q_scale, kv, kv_scale, weights, rows, rows + 33_000)
    schedule = metadata(card, inputs)
    logits = call(card, inputs, dtype=dtype, schedule=schedule)
    assert logits.numel() > 2**31
    for row in (0, 1, 8133, 16_266, 16_267, 32_537, 32_999):
        one = slice(row, row + 1)
        assert_same_bits(logits[one], call(card, inputs.rows(one), dtype=dtype))
    assert int(logits.isneginf().sum(dim=1).unique()) == num_kv - 33_000, "every row has as many columns outside"


# ------------------------------------------------------------------------------------------ graphs


@by_format
@pytest.mark.parametrize("with_schedule", (False, True), ids=("derived", "metadata"))
def test_replays_see_what_the_inputs_hold(card: Backend, format: str, with_schedule: bool) -> None:
    """Windows, values and, of MX, rows that come to need another path than those at capture, and back."""
    ordinary = make_inputs(Case(num_q=45, num_kv=700, num_heads=16, head_dim=128, format=format, seed=8), "cuda")
    if is_refused(card, ordinary):
        return
    contents = [ordinary]
    other = make_inputs(Case(num_q=45, num_kv=700, num_heads=16, head_dim=128, format=format, seed=9), "cuda")
    if format != "fp8":
        other = replace(other, q_scale=wide_exponents(other.q_scale), kv_scale=wide_exponents(other.kv_scale))
    contents += [other, ordinary]
    wanted = [call(card, inputs) for inputs in contents]  # compiled by now
    held = replace(ordinary, **{name: value.clone() for name, value in ordinary.tensors().items()})
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = call(card, held, schedule=metadata(card, held) if with_schedule else None)
    for inputs, one in zip(contents, wanted, strict=True):
        for name, value in held.tensors().items():
            value.view(torch.uint8).copy_(inputs.tensors()[name].view(torch.uint8))
        logits.fill_(7)
        for _ in range(2):
            graph.replay()
        torch.cuda.synchronize()
        assert_same_bits(logits, one)


@by_format
def test_calls_that_overlap_share_nothing(card: Backend, format: str) -> None:
    """On two streams at once, many times: a workspace of one is not the other's."""
    cases = [Case(num_q=300, num_kv=5000, num_heads=16, head_dim=128, format=format, seed=seed) for seed in (1, 2)]
    problems = [make_inputs(case, "cuda") for case in cases]
    if is_refused(card, problems[0]):
        return
    wanted = [call(card, inputs) for inputs in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    torch.cuda.synchronize()
    results: list[tuple[int, Tensor]] = []
    for _ in range(10):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                results.append((i, call(card, problems[i])))
    torch.cuda.synchronize()
    for i, logits in results:
        assert_same_bits(logits, wanted[i])


# ------------------------------------------------------------------------------------------ parts of a whole


@by_format
@pytest.mark.parametrize("num_ranks", (1, 3, 4))
def test_context_parallel_ranks_make_up_the_whole(backend: Backend, format: str, num_ranks: int) -> None:
    """Each rank has the halves of a causal sequence from both ends, all of kv, and a schedule of its own."""
    num_kv = 48 * 2 * num_ranks
    case = Case(num_q=num_kv, num_kv=num_kv, num_heads=8, head_dim=128, format=format, seed=6)
    inputs = make_inputs(case, backend.device)
    if is_refused(backend, inputs):
        return
    row = torch.arange(num_kv, dtype=torch.int32, device=backend.device)
    inputs = replace(inputs, start=torch.zeros_like(row), end=row + 1)
    whole = call(backend, inputs)
    reference, inside = expected(inputs)
    oracle.assert_agrees(whole, reference, inside, agreement_limit(backend, torch.float32, torch.float32))
    halves = row.long().chunk(2 * num_ranks)
    for rank in range(num_ranks):
        rows = torch.cat((halves[rank], halves[2 * num_ranks - 1 - rank]))
        part = inputs.rows(rows)
        for schedule in (None, metadata(backend, part)):
            assert_same_bits(call(backend, part, schedule=schedule), whole[rows])


@by_format
def test_packed_sequences_are_those_apart(backend: Backend, format: str) -> None:
    """Windows with starts of their own: compressed logits of each sequence are those of a call for it alone."""
    lengths = (1, 130, 16, 255, 256, 257, 3)
    num_kv = sum(lengths)
    case = Case(num_q=num_kv, num_kv=num_kv, num_heads=8, head_dim=128, format=format, seed=7)
    inputs = make_inputs(case, backend.device)
    if is_refused(backend, inputs):
        return
    first = torch.tensor(lengths, dtype=torch.int32).cumsum(0, dtype=torch.int32) - torch.tensor(lengths)
    start = torch.repeat_interleave(first, torch.tensor(lengths)).to(torch.int32)
    end = torch.arange(num_kv, dtype=torch.int32) + 1
    packed = replace(inputs, start=start.to(backend.device), end=end.to(backend.device))
    together = call(backend, packed, width=max(lengths), schedule=metadata(backend, packed))
    for begin, length in zip(first.tolist(), lengths, strict=True):
        rows = slice(begin, begin + length)
        alone = replace(
            inputs.rows(rows),
            kv=inputs.kv[rows].clone(),
            kv_scale=inputs.kv_scale[rows].clone(),
            start=torch.zeros(length, dtype=torch.int32, device=backend.device),
            end=torch.arange(length, dtype=torch.int32, device=backend.device) + 1,
        )
        assert_same_bits(together[rows], call(backend, alone, width=max(lengths)))
