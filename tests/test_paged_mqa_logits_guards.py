"""Tensors and transforms that no paged kernel serves: each is refused in a sentence, above the dispatcher."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import BACKENDS
from paged_mqa_cases import Case, Inputs, call, make_inputs
from test_mqa_logits_guards import KINDS, THROUGH_WORDS, refused
from torch import Tensor

import deep_kernels as dk

CPU = BACKENDS[0]
OP = "fp8_fp4_paged_mqa_logits"


@pytest.fixture
def inputs() -> Inputs:
    return make_inputs(Case(batch=3, num_heads=8, max_len=70, lengths="full"), "cpu")


def flat(inputs: Inputs, out: Tensor | None) -> Any:
    tensors = (inputs.q, inputs.q_scale, inputs.kv_cache, inputs.weights, inputs.context_lens, inputs.block_table)
    arguments = (*tensors, None, 70, True, torch.float32, inputs.indices, None)
    if out is None:
        return torch.ops.deep_kernels.fp8_fp4_paged_mqa_logits(*arguments)
    return torch.ops.deep_kernels.fp8_fp4_paged_mqa_logits_out(*arguments, out)


def eager(inputs: Inputs, out: Tensor | None) -> Any:
    return call(CPU, inputs, 70, out=out)


Through = Callable[[Inputs, Tensor | None], Any]
THROUGH = pytest.mark.parametrize("through", (flat, eager), ids=THROUGH_WORDS)


@THROUGH
def test_lazy_views_are_no_out(inputs: Inputs, through: Through) -> None:
    for _ in range(3):
        with refused(f"{OP}: out must be plain memory"):
            through(inputs, torch._neg_view(torch.zeros(3, 70)))
    assert inputs.q.shape == (3, 1, 8, 64)


def test_negated_inputs_are_read_right(inputs: Inputs) -> None:
    negated = replace(inputs, weights=torch._neg_view(inputs.weights))
    assert torch.equal(eager(negated, None), eager(replace(inputs, weights=-inputs.weights), None))


def test_shrunken_storage(inputs: Inputs) -> None:
    cache = inputs.kv_cache.clone()
    cache.untyped_storage().resize_(16)
    with refused(f"{OP}: kv_cache must have memory for its uint8 [9, 64, 1, 68], got a storage of 16 bytes"):
        eager(replace(inputs, kv_cache=cache), None)


@pytest.mark.parametrize("name", ("q", "kv_cache", "weights", "context_lens", "block_table"))
def test_meta_tensors_do_not_mix(inputs: Inputs, name: str) -> None:
    mixed = replace(inputs, **{name: getattr(inputs, name).to("meta")})
    for out in (None, torch.full((3, 70), 7.0)):
        with pytest.raises(ValueError, match=rf"^{OP}: \w+ must be on (cpu|meta) like"):
            eager(mixed, out)


def test_metadata_of_meta_and_cpu(inputs: Inputs) -> None:
    indices = torch.zeros(3, dtype=torch.int32, device="meta")
    with refused("get_paged_mqa_logits_metadata: indices must be on cpu like context_lens, got meta"):
        dk.get_paged_mqa_logits_metadata(inputs.context_lens, 64, 5, indices)


def test_out_counts_as_changed(inputs: Inputs) -> None:
    saved = torch.ones(3, 70)
    factor = torch.ones(3, 70, requires_grad=True)
    loss = (saved * factor).sum()
    with torch.no_grad():
        eager(inputs, saved)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_inference_tensor_as_out(inputs: Inputs) -> None:
    with torch.inference_mode():
        out = torch.zeros(3, 70)
        eager(inputs, out)
    with refused(f"{OP}: out must not be an inference tensor"):
        eager(inputs, out)


@pytest.mark.parametrize("transform", ("grad", "jvp", "vjp"))
def test_derivatives_by_transforms(inputs: Inputs, transform: str) -> None:
    def total(weights: Tensor) -> Tensor:
        return call(CPU, replace(inputs, weights=weights), 70).sum()

    arguments = {"grad": (), "jvp": ((inputs.weights,), (inputs.weights,)), "vjp": (inputs.weights,)}[transform]
    with refused(f"{OP}: weights requires grad, but the op is forward only"):
        made = getattr(torch.func, transform)(total, *arguments)
        made(inputs.weights)


@pytest.mark.parametrize("name", ("q", "weights"))
def test_gradients_under_compile(inputs: Inputs, name: str) -> None:
    wanted = replace(inputs, **{name: getattr(inputs, name).clone().requires_grad_()})
    compiled = torch.compile(lambda x: call(CPU, x, 70), backend="aot_eager")
    with pytest.raises(Exception, match=f"{name} requires grad, but the op is forward only"):
        compiled(wanted)


def test_counts_beyond_32_bits(inputs: Inputs) -> None:
    """A batch and a next_n that fit, and a product that does not."""
    odd = replace(
        inputs,
        q=torch.empty(2**16, 2**16, 0, 64, dtype=torch.float8_e4m3fn),
        weights=torch.empty(2**32, 0),
        context_lens=torch.zeros(1, dtype=torch.int32).expand(2**16),
        block_table=torch.zeros(1, 3, dtype=torch.int32).expand(2**16, 3),
    )
    with refused(f"{OP}: batch * next_n must be from 0 to 2147482623, got {2**32}"):
        eager(odd, None)


@THROUGH
@pytest.mark.parametrize("name", ("weights", "out"))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore")
def test_kinds_of_tensors(inputs: Inputs, through: Through, name: str, kind: str) -> None:
    words, make = KINDS[kind]
    odd = make(torch.zeros(3, 70) if name == "out" else inputs.weights)
    with refused(f"{OP}: {name} must be a dense tensor, got one that is {words}"):
        through(inputs if name == "out" else replace(inputs, weights=odd), odd if name == "out" else None)


@THROUGH
def test_exceptions_are_the_same_through_the_dispatcher(
    inputs: Inputs, through: Through, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_SHOW_CPP_STACKTRACES", "1")
    with pytest.raises(ValueError) as value_error:
        through(replace(inputs, weights=inputs.weights[:2]), None)
    expected = "weights must be float32 or bfloat16 or float16 [num_q=3, num_heads=8], got float32 [2, 8]"
    assert str(value_error.value) == f"{OP}: {expected}"
    with pytest.raises(dk.UnsupportedError) as unsupported:
        through(replace(inputs, kv_cache=inputs.kv_cache[:, :48].contiguous()), None)
    assert str(unsupported.value) == f"{OP}: block_kv must be one of 16, 32, 64, 128, 256, got 48"
