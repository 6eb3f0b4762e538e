"""Where the tensors of flash attention lie: fresh and far memory, sizes past 31 bits, captured graphs."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from attention_cases import Case, Inputs, Packed, attend, attend_packed, make_inputs, pack, with_kernels
from conftest import Backend
from mqa_cases import assert_same_bits
from storage import far_apart, poisoned_memory, skip_without_room
from torch import Tensor

CASE = Case(3, 20, 150, (4, 2), causal=True)


@pytest.fixture
def backend(backend: Backend) -> Backend:
    return with_kernels(backend)


def assert_same(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert_same_bits(one, other)


@pytest.mark.parametrize("byte", (None, 0x00, 0x5A, 0x7F, 0xFF))
@pytest.mark.parametrize("num_splits", (1, 3))
def test_fresh_memory_may_hold_anything(backend: Backend, num_splits: int, byte: int | None) -> None:
    if byte is not None and backend.device == "cpu":
        pytest.skip("only the allocator of a card can be made to hand a chosen byte out")
    case = replace(CASE, num_splits=num_splits)
    inputs = make_inputs(case, backend.device)
    wanted = attend(backend, inputs, **case.options)
    with poisoned_memory(backend, byte):
        assert_same(attend(backend, inputs, **case.options), wanted)


LAST_BYTES = pytest.mark.parametrize(
    "last_byte", (2**31 - 4096, 2**31 + 4096, 2**32 + 4096, 2**33), ids=("below", "2^31", "2^32", "2^33")
)


@LAST_BYTES
@pytest.mark.parametrize("name", ("q", "k", "v", "out"))
def test_members_far_apart(backend: Backend, name: str, last_byte: int) -> None:
    """Offsets beyond 31 and 32 bits by strides; on the CPU only pages that are touched take memory."""
    skip_without_room(backend, 2.5 * last_byte)
    inputs = make_inputs(CASE, backend.device)
    wanted = attend(backend, inputs, **CASE.options)
    out = None
    if name == "out":
        out = far_apart(torch.full_like(wanted[0], 7.0), last_byte)
    else:
        inputs = replace(inputs, **{name: far_apart(getattr(inputs, name), last_byte)})
    assert_same(attend(backend, inputs, out=out, **CASE.options), wanted)


@LAST_BYTES
@pytest.mark.parametrize("name", ("q", "k", "v", "out"))
def test_tokens_far_apart(backend: Backend, name: str, last_byte: int) -> None:
    skip_without_room(backend, 2.5 * last_byte)
    packed = pack(CASE, [(20, 50), (7, 31)], backend.device)
    wanted = attend_packed(backend, packed, **CASE.options)
    out = None
    if name == "out":
        out = far_apart(torch.full_like(wanted[0], 7.0), last_byte)
    else:
        far = far_apart(getattr(packed.inputs, name), last_byte)
        packed = replace(packed, inputs=replace(packed.inputs, **{name: far}))
    assert_same(attend_packed(backend, packed, out=out, **CASE.options), wanted)


def test_scores_are_never_held() -> None:
    """8k queries and keys of two heads have half a gigabyte of scores; in a process whose peak is the call's."""
    script = """
import resource, torch, deep_kernels as dk
torch.set_num_threads(2)
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
q = torch.ones(1, 8192, 2, 64, dtype=torch.bfloat16)
dk.flash_attn_fwd(q[:, :1], q[:, :1], q[:, :1])
before = peak()
out = dk.flash_attn_fwd(q, q, q, causal=True)
print(peak() - before - out.untyped_storage().nbytes() / 2**20)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 16, f"{done.stdout} MiB"


# ------------------------------------------------------------------------------------------ on a card


@pytest.fixture
def card(backend: Backend) -> Backend:
    """A backend of a card; what these tests hold would take a CPU minutes."""
    if backend.device == "cpu":
        pytest.skip("takes a card's memory and speed")
    return backend


@pytest.mark.parametrize("name", ("queries", "keys", "heads"))
def test_more_than_2_to_the_31_elements(card: Backend, name: str) -> None:
    """Dense tensors of 4.3 GB and more; rows at both ends against calls of their own."""
    skip_without_room(card, 22e9)
    num_q, num_kv, heads = {"queries": (2**24 + 128, 64, (2, 1)), "keys": (5, 2**24 + 128, (2, 2)),
                            "heads": (2**18, 32, (2**7, 1))}[name]  # fmt: skip
    case = Case(1, num_q, num_kv, heads)
    q = torch.randn(1, num_q, heads[0], 64, dtype=torch.bfloat16, device="cuda")
    k, v = (torch.randn(1, num_kv, heads[1], 64, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    assert max(q.numel(), k.numel()) >= 2**31
    out, lse = attend(card, Inputs(q, k, v), **case.options)
    for part in (slice(0, 3), slice(num_q - 3, num_q)):
        assert_same(attend(card, Inputs(q[:, part], k, v), **case.options), (out[:, part], lse[..., part]))


@pytest.mark.parametrize("num_splits", (1, 3))
def test_replays_see_what_the_inputs_hold(card: Backend, num_splits: int) -> None:
    case = replace(CASE, num_splits=num_splits)
    contents = [make_inputs(replace(case, seed=seed), "cuda") for seed in (1, 2, 1)]
    wanted = [attend(card, inputs, **case.options) for inputs in contents]  # compiled by now
    held = contents[0].clone()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = attend(card, held, **case.options)
    for inputs, one in zip(contents, wanted, strict=True):
        for to, source in zip(held.tensors(), inputs.tensors(), strict=True):
            to.copy_(source)
        for part in result:
            part.fill_(7.0)
        for _ in range(2):
            graph.replay()
        torch.cuda.synchronize()
        assert_same(result, one)


def test_calls_that_overlap_share_nothing(card: Backend) -> None:
    case = replace(CASE, num_splits=3)
    problems = [make_inputs(replace(case, seed=seed), "cuda") for seed in (1, 2)]
    wanted = [attend(card, inputs, **case.options) for inputs in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    torch.cuda.synchronize()
    results = []
    for _ in range(10):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                results.append((i, attend(card, problems[i], **case.options)))
    torch.cuda.synchronize()
    for i, result in results:
        assert_same(result, wanted[i])


def test_packed_calls_do_not_wait_for_the_card(card: Backend) -> None:
    """cu_seqlens stay where they are: a capture ends a call that copies them to the host."""
    packed: Packed = pack(CASE, [(20, 50), (7, 31)], "cuda")
    wanted = attend_packed(card, packed, **CASE.options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = attend_packed(card, packed, **CASE.options)
    graph.replay()
    torch.cuda.synchronize()
    assert_same(result, wanted)
