"""Where the tensors of the FP8 prefill MLP lie: fresh and far memory, sizes past 31 bits, captured graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from conftest import Backend
from silu_cases import Case, Inputs, assert_same_pair, block_gemm, fold, make_gate_up, make_inputs, silu_mul
from storage import far_apart, poisoned_memory, skip_without_room
from torch import Tensor

from deep_kernels import formats

LAST_BYTES = pytest.mark.parametrize(
    "last_byte", (2**31 - 4096, 2**31 + 4096, 2**32 + 4096), ids=("below", "2^31", "2^32")
)


@pytest.mark.parametrize("byte", (None, 0x00, 0x5A, 0x7F, 0xFF))
@pytest.mark.parametrize("fused", (True, False), ids=("fused", "two"))
def test_fresh_memory_may_hold_anything(backend: Backend, fused: bool, byte: int | None) -> None:
    if byte is not None and backend.device == "cpu":
        pytest.skip("only the allocator of a card can be made to hand a chosen byte out")
    for scale_fmt in formats.SCALE_FORMATS:
        inputs = make_inputs(Case(67, 400, 400), backend.device)
        wanted = fold(backend, inputs, fused=fused, scale_fmt=scale_fmt)
        with poisoned_memory(backend, byte):
            assert_same_pair(fold(backend, inputs, fused=fused, scale_fmt=scale_fmt), wanted)


@LAST_BYTES
@pytest.mark.parametrize("name", ("x", "x_scale", "w", "w_scale", "y", "y_scale"))
def test_rows_far_apart(backend: Backend, name: str, last_byte: int) -> None:
    """Offsets beyond 31 and 32 bits by strides; on the CPU only pages that are touched take memory."""
    skip_without_room(backend, 2.5 * last_byte)
    inputs = make_inputs(Case(37, 272, 272), backend.device)
    wanted = fold(backend, inputs, fused=True)
    out = None
    if name in ("y", "y_scale"):
        y, y_scale = (part.clone() for part in wanted)
        out = (far_apart(y, last_byte), y_scale) if name == "y" else (y, far_apart(y_scale, last_byte))
        for part in out:
            part.view(torch.uint8).fill_(0x5A)
    else:
        inputs = replace(inputs, **{name: far_apart(getattr(inputs, name), last_byte)})
    assert_same_pair(fold(backend, inputs, fused=True, out=out), wanted)


@LAST_BYTES
@pytest.mark.parametrize("name", ("gate_up", "residual", "out"))
def test_rows_of_the_two_launches_far_apart(backend: Backend, name: str, last_byte: int) -> None:
    skip_without_room(backend, 2.5 * last_byte)
    case = Case(37, 272, 272)
    gate_up = make_gate_up(case, backend.device)
    if name == "gate_up":
        assert_same_pair(silu_mul(backend, far_apart(gate_up, last_byte)), silu_mul(backend, gate_up))
        return
    inputs = make_inputs(case, backend.device)
    x, w = (inputs.x, inputs.x_scale), inputs.half(0)
    residual = gate_up[:, :272].contiguous()
    wanted = block_gemm(backend, x, w, residual=residual)
    if name == "residual":
        assert torch.equal(block_gemm(backend, x, w, residual=far_apart(residual, last_byte)), wanted)
    else:
        out = far_apart(torch.full_like(wanted, 7.0), last_byte)
        assert torch.equal(block_gemm(backend, x, w, residual=residual, out=out), wanted)


# ------------------------------------------------------------------------------------------ on a card


@pytest.fixture
def card(backend: Backend) -> Backend:
    """A backend of a card; what these tests hold would take a CPU minutes."""
    if backend.device == "cpu":
        pytest.skip("takes a card's memory and speed")
    return backend


@pytest.mark.parametrize("fused", (True, False), ids=("fused", "two"))
@pytest.mark.parametrize("num_tokens, num_columns", ((131_200, 8192), (520, 2**21 + 2**14)), ids=("tall", "wide"))
def test_more_columns_and_tokens_than_31_bits(card: Backend, num_tokens: int, num_columns: int, fused: bool) -> None:
    """More than 2^31 sums of gate and up: rows and blocks of all parts have the bits that they have alone."""
    skip_without_room(card, 20e9)
    k = 128
    assert num_tokens * 2 * num_columns > 2**31
    generator = torch.Generator("cuda").manual_seed(1)

    def codes(*size: int) -> Tensor:
        """Finite in every bit pattern."""
        drawn = torch.randint(0, 256, size, dtype=torch.uint8, device="cuda", generator=generator)
        return (drawn & 0xF7).view(torch.float8_e4m3fn)

    def scales(*size: int) -> Tensor:
        return torch.rand(size, device="cuda", generator=generator) * 1e-3 + 1e-4

    inputs = Inputs(
        codes(num_tokens, k), scales(num_tokens, 1), codes(2 * num_columns, k), scales(2 * num_columns // 128, 1)
    )
    y, y_scale = fold(card, inputs, fused=fused)
    for first in (0, num_tokens // 2 - 70, num_tokens - 150):
        part = slice(first, first + 150)
        for block in (0, num_columns // 256, num_columns // 128 - 2):
            columns = torch.arange(128 * block, 128 * block + 256, device="cuda")
            rows = torch.cat((columns, num_columns + columns))
            blocks = torch.tensor([block, block + 1], device="cuda")
            w = inputs.w.view(torch.uint8)[rows].view(inputs.w.dtype)
            w_scale = inputs.w_scale[torch.cat((blocks, num_columns // 128 + blocks))]
            near = replace(inputs.rows(part), w=w, w_scale=w_scale)
            far = (y[part, columns[0] : columns[-1] + 1], y_scale[part, block : block + 2])
            assert_same_pair(far, fold(card, near, fused=fused))


@pytest.mark.parametrize("fused", (None, True, False), ids=("picked", "fused", "two"))
def test_replays_see_what_the_inputs_hold(card: Backend, fused: bool | None) -> None:
    contents = [make_inputs(Case(190, 512, 512, seed=seed), "cuda") for seed in (1, 2, 1)]
    wanted = [fold(card, inputs, fused=fused) for inputs in contents]  # compiled by now
    held = contents[0].clone()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pair = fold(card, held, fused=fused)
    for inputs, one in zip(contents, wanted, strict=True):
        for to, source in zip(held.tensors(), inputs.tensors(), strict=True):
            to.view(torch.uint8).copy_(source.view(torch.uint8))
        for part in pair:
            part.view(torch.uint8).fill_(0x5A)
        for _ in range(2):
            graph.replay()
        torch.cuda.synchronize()
        assert_same_pair(pair, one)


def test_calls_that_overlap_share_nothing(card: Backend) -> None:
    problems = [make_inputs(Case(300, 512, 1024, seed=seed), "cuda") for seed in (1, 2)]
    wanted = [fold(card, inputs, fused=False) for inputs in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    torch.cuda.synchronize()
    results = []
    for _ in range(10):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                results.append((i, fold(card, problems[i], fused=False)))
    torch.cuda.synchronize()
    for i, pair in results:
        assert_same_pair(pair, wanted[i])
