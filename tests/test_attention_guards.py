"""Tensors and transforms that no kernel of flash attention serves: each is refused in a sentence."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases import OP, Case, Inputs, attend, make_inputs
from conftest import BACKENDS
from torch import Tensor

CPU = BACKENDS[0]
OPS = torch.ops.deep_kernels


@pytest.fixture
def inputs() -> Inputs:
    return make_inputs(Case(2, 5, 9), "cpu")


def flat(inputs: Inputs, out: Tensor | None) -> Any:
    arguments = (*inputs.tensors(), False, None, None, None, None, None, None)
    return OPS.flash_attn_fwd(*arguments) if out is None else OPS.flash_attn_fwd_out(*arguments, out)


def eager(inputs: Inputs, out: Tensor | None) -> Any:
    return attend(CPU, inputs, out=out)


def refused(sentence: str) -> Any:
    return pytest.raises(ValueError, match=f"^{re.escape(f'{OP}: {sentence}')}")


Through = Callable[[Inputs, Tensor | None], Any]
THROUGH = pytest.mark.parametrize("through", (flat, eager), ids=("ops", "eager"))


@THROUGH
def test_lazy_views_are_no_out(inputs: Inputs, through: Through) -> None:
    for _ in range(3):
        with refused("out must be plain memory, got a view that is conjugated or negated"):
            through(inputs, torch._neg_view(torch.empty_like(inputs.q)))
    assert inputs.q.shape == (2, 5, 4, 64)


@THROUGH
def test_negated_inputs_are_read_right(inputs: Inputs, through: Through) -> None:
    negated = replace(inputs, v=torch._neg_view(inputs.v))
    assert torch.equal(through(negated, None)[0], through(replace(inputs, v=-inputs.v), None)[0])


@THROUGH
def test_shrunken_storage(inputs: Inputs, through: Through) -> None:
    k = inputs.k.clone()
    k.untyped_storage().resize_(16)
    with refused("k must have memory for its bfloat16 [2, 9, 2, 64], got a storage of 16 bytes"):
        through(replace(inputs, k=k), None)


def test_out_counts_as_changed(inputs: Inputs) -> None:
    saved = torch.ones_like(inputs.q)
    factor = torch.ones_like(inputs.q).requires_grad_()
    loss = (saved * factor).sum()
    with torch.no_grad():
        eager(inputs, saved)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_inference_tensor_as_out(inputs: Inputs) -> None:
    with torch.inference_mode():
        out = torch.empty_like(inputs.q)
        eager(inputs, out)
    with refused("out must not be an inference tensor"):
        eager(inputs, out)


@pytest.mark.parametrize("transform", ("grad", "jvp", "vjp", "jacrev", "jacfwd", "dual"))
def test_derivatives_by_transforms(inputs: Inputs, transform: str) -> None:
    def total(v: Tensor) -> Tensor:
        return eager(replace(inputs, v=v), None)[0].float().sum()

    with refused("v requires grad, but the op is forward only"):
        if transform == "jvp":
            torch.func.jvp(total, (inputs.v,), (inputs.v,))
        elif transform == "dual":
            with torch.autograd.forward_ad.dual_level():
                total(torch.autograd.forward_ad.make_dual(inputs.v, inputs.v))
        elif transform == "vjp":
            torch.func.vjp(total, inputs.v)
        else:
            getattr(torch.func, transform)(total)(inputs.v)


@pytest.mark.parametrize("name", ("q", "k", "v"))
def test_gradients_under_compile(inputs: Inputs, name: str) -> None:
    wanted = replace(inputs, **{name: getattr(inputs, name).clone().requires_grad_()})
    compiled = torch.compile(lambda x: eager(x, None), backend="aot_eager")
    with pytest.raises(Exception, match=f"{name} requires grad, but the op is forward only"):
        compiled(wanted)


KINDS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "coo": ("sparse", lambda x: x.to_sparse()),
    "nested": ("nested", lambda x: torch.nested.nested_tensor([x, x])),
    "jagged": ("nested", lambda x: torch.nested.nested_tensor([x, x], layout=torch.jagged)),
    "mkldnn": ("of mkldnn's layout", lambda x: x.to_mkldnn()),
    "quantized": ("quantized", lambda x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8)),
}


@THROUGH
@pytest.mark.parametrize("name", ("q", "v", "out"))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore")
def test_kinds_of_tensors(inputs: Inputs, through: Through, name: str, kind: str) -> None:
    word, make = KINDS[kind]
    odd = make(torch.zeros_like(inputs.q) if name == "out" else getattr(inputs, name))
    with refused(f"{name} must be a dense tensor, got one that is {word}"):
        through(inputs if name == "out" else replace(inputs, **{name: odd}), odd if name == "out" else None)


@THROUGH
def test_conjugated_inputs(inputs: Inputs, through: Through) -> None:
    odd = torch.complex(inputs.q.float(), inputs.q.float()).conj()
    with refused("q must be bfloat16 or float16 [batch, num_q, num_q_heads, head_dim], got complex64"):
        through(replace(inputs, q=odd), None)


@THROUGH
def test_counts_beyond_32_bits(inputs: Inputs, through: Through) -> None:
    count = 2**32 + 8
    q = torch.empty(0, dtype=torch.bfloat16).as_strided((0, count, 4, 64), (256, 256, 64, 1))
    empty = replace(inputs, q=q, k=inputs.k[:0], v=inputs.v[:0])
    with refused(f"num_q must be from 0 to 2147482623, got {count}"):
        through(empty, None)
