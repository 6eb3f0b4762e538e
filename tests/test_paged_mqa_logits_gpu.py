"""fp8_fp4_paged_mqa_logits on a card alone: captured graphs, poisoned memory, far addresses, a second card."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Backend
from fresh import Fresh
from mqa_cases import assert_same_bits
from paged_mqa_cases import EVERY_BITS_CASE, Case, Inputs, call, is_refused, make_inputs, metadata
from torch import Tensor

from deep_kernels import formats

pytest_plugins = ("runtime_fixtures",)


@pytest.fixture
def card(backend: Backend) -> Backend:
    if backend.device != "cuda":
        pytest.skip("of CUDA devices alone")
    return backend


def replay_other_contents(graph: Any, logits: Tensor, inputs: Inputs, other: Inputs) -> None:
    """Every input changes in place, then the graph runs again."""
    for name, tensor in inputs.tensors().items():
        tensor.view(torch.uint8).copy_(other.tensors()[name].view(torch.uint8))
    logits.fill_(7.0)
    graph.replay()


@EVERY_BITS_CASE
@pytest.mark.parametrize("with_schedule", (False, True), ids=("", "schedule"))
def test_graph_replays_with_changed_contents(card: Backend, case: Case, with_schedule: bool) -> None:
    inputs = make_inputs(case, card.device)
    other = make_inputs(replace(case, seed=case.seed + 100), card.device)
    if is_refused(card, inputs):
        return
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        schedule = metadata(card, inputs, 50) if with_schedule else None
        logits = call(card, inputs, 400, dtype=case.logits_dtype, schedule=schedule)
    graph.replay()
    assert_same_bits(logits, call(card, inputs, 400, dtype=case.logits_dtype))
    replay_other_contents(graph, logits, inputs, other)
    assert_same_bits(logits, call(card, other, 400, dtype=case.logits_dtype))


def capture_in_child(format: str, arch: str, with_schedule: bool) -> bool:
    """The first call ever of the process is inside a capture; whether replays are right."""
    import torch
    from conftest import Backend
    from paged_mqa_cases import Case, call, make_inputs, metadata

    backend = Backend("cuda", "cuda", arch)
    inputs, other = (make_inputs(Case(format=format, seed=seed), "cuda") for seed in (1, 2))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        schedule = metadata(backend, inputs, 50) if with_schedule else None
        logits = call(backend, inputs, 200, schedule=schedule)
    right = []
    for one in (inputs, other):
        for name, tensor in inputs.tensors().items():
            tensor.view(torch.uint8).copy_(one.tensors()[name].view(torch.uint8))
        logits.fill_(7.0)
        graph.replay()
        right.append(torch.equal(logits, call(backend, one, 200)))
    return all(right)


@pytest.mark.parametrize("with_schedule", (False, True), ids=("", "schedule"))
@pytest.mark.parametrize("format", formats.FORMATS)
def test_first_call_ever_inside_a_capture(
    card: Backend, fresh: Fresh, tmp_path: Path, format: str, with_schedule: bool
) -> None:
    if is_refused(card, make_inputs(Case(format=format), card.device)):
        return
    env = {"DEEP_KERNELS_CACHE_DIR": tmp_path / "cache"}
    assert fresh.run(capture_in_child, format, card.arch, with_schedule, env=env, timeout=120)


@EVERY_BITS_CASE
def test_memory_full_of_nan_changes_no_bit(card: Backend, case: Case) -> None:
    """Fresh allocations hold 0xff bytes: whatever is read before it is written shows."""
    inputs = make_inputs(case, card.device)
    if is_refused(card, inputs):
        return
    wanted = call(card, inputs, case.width, dtype=case.logits_dtype).clone()
    for _ in range(3):
        blocks = [torch.full((1 << size,), 0xFF, dtype=torch.uint8, device="cuda") for size in range(9, 25)]
        del blocks
        assert_same_bits(call(card, inputs, case.width, dtype=case.logits_dtype), wanted)


@pytest.mark.parametrize("format", formats.FORMATS)
def test_addresses_beyond_32_bits(card: Backend, format: str) -> None:
    """Pages, rows of logits and of the table that lie past 2^31 and 2^32 bytes and elements."""
    case = Case(batch=3, max_len=200, head_dim=128, format=format, lengths="full")
    inputs = make_inputs(case, card.device)
    if is_refused(card, inputs):
        return
    wanted = call(card, inputs, 200)
    page_bytes = inputs.kv_cache[0].numel()
    num_blocks = (1 << 32) // page_bytes + inputs.kv_cache.shape[0] + 5
    row = (1 << 31) + 256  # elements from row to row of the logits
    free, _ = torch.cuda.mem_get_info()
    needed = num_blocks * page_bytes + 2 * 4 * row + (1 << 30)
    if free < needed:
        pytest.skip(f"needs {needed >> 30} GiB of free GPU memory, {free >> 30} are there")
    cache = torch.full((num_blocks, *inputs.kv_cache.shape[1:]), 0xFF, dtype=torch.uint8, device=card.device)
    shift = num_blocks - inputs.kv_cache.shape[0]
    cache[shift:] = inputs.kv_cache
    moved = replace(inputs, kv_cache=cache, block_table=inputs.block_table + shift)
    assert_same_bits(call(card, moved, 200), wanted)
    del cache, moved
    far = torch.full(((2 * row + 200),), 7.0, device=card.device)
    out = far.as_strided((3, 200), (row, 1))
    call(card, inputs, 200, out=out)
    assert_same_bits(out, wanted)
    out.fill_(7.0)
    assert (far == 7.0).all()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_second_gpu() -> None:
    first = Backend("cuda", "cuda", None)
    inputs = make_inputs(Case(), "cuda:0")
    logits = call(first, make_inputs(Case(), "cuda:1"), 200)
    assert logits.device == torch.device("cuda:1")
    assert_same_bits(logits, call(first, inputs, 200))
