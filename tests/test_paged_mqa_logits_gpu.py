"""fp8_fp4_paged_mqa_logits on a card alone: captured graphs, and a second card."""

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


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_second_gpu() -> None:
    first = Backend("cuda", "cuda", None)
    inputs = make_inputs(Case(), "cuda:0")
    logits = call(first, make_inputs(Case(), "cuda:1"), 200)
    assert logits.device == torch.device("cuda:1")
    assert_same_bits(logits, call(first, inputs, 200))
