"""Tensors and transforms that no kernel serves: each is refused in a sentence, above the dispatcher's own ways."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import BACKENDS
from mqa_cases import Case, Inputs, call, make_inputs
from torch import Tensor

import deep_kernels as dk

CPU = BACKENDS[0]


@pytest.fixture
def inputs() -> Inputs:
    return make_inputs(Case(num_q=5, num_kv=70, num_heads=8, windows="full"), "cpu")


def flat(inputs: Inputs, out: Tensor | None) -> Any:
    arguments = (*vars(inputs).values(), True, 0, torch.float32, None, "exact", None)
    if out is None:
        return torch.ops.deep_kernels.fp8_fp4_mqa_logits(*arguments)
    return torch.ops.deep_kernels.fp8_fp4_mqa_logits_out(*arguments, out)


def refused(sentence: str, error: type[Exception] = ValueError) -> Any:
    return pytest.raises(error, match=f"^{re.escape(sentence)}")


def eager(inputs: Inputs, out: Tensor | None) -> Any:
    return call(CPU, inputs, out=out)


THROUGH_WORDS = ("ops", "eager")
THROUGH = pytest.mark.parametrize("through", (flat, eager), ids=THROUGH_WORDS)


@THROUGH
def test_lazy_views_are_no_out(inputs: Inputs, through: Callable[[Inputs, Tensor | None], Any]) -> None:
    """The dispatcher's fallback for them frees an input that the op did not return."""
    for _ in range(3):
        with refused("fp8_fp4_mqa_logits: out must be plain memory"):
            through(inputs, torch._neg_view(torch.zeros(5, 70)))
    assert inputs.q.shape == (5, 8, 64)


def test_negated_inputs_are_read_right(inputs: Inputs) -> None:
    negated = replace(inputs, weights=torch._neg_view(inputs.weights))
    assert torch.equal(call(CPU, negated), call(CPU, replace(inputs, weights=-inputs.weights)))


def test_shrunken_storage(inputs: Inputs) -> None:
    weights = inputs.weights.clone()
    weights.untyped_storage().resize_(16)
    with refused("fp8_fp4_mqa_logits: weights must have memory for its float32 [5, 8], got a storage of 16 bytes"):
        call(CPU, replace(inputs, weights=weights))


@pytest.mark.parametrize("name", ("q", "kv", "weights", "start", "end"))
def test_meta_tensors_do_not_mix(inputs: Inputs, name: str) -> None:
    mixed = replace(inputs, **{name: getattr(inputs, name).to("meta")})
    with pytest.raises(ValueError, match=r"^fp8_fp4_mqa_logits: \w+ must be on (cpu|meta) like"):
        call(CPU, mixed)
    out = torch.full((5, 70), 7.0)
    with pytest.raises(ValueError, match=r"^fp8_fp4_mqa_logits: \w+ must be on (cpu|meta) like"):
        call(CPU, mixed, out=out)


def test_metadata_of_meta_and_cpu(inputs: Inputs) -> None:
    with refused("get_mqa_logits_metadata: cu_seq_len_k_end must be on"):
        dk.get_mqa_logits_metadata(inputs.start, inputs.end.to("meta"), 70, 8)


def test_out_counts_as_changed(inputs: Inputs) -> None:
    saved = torch.ones(5, 70)
    factor = torch.ones(5, 70, requires_grad=True)
    loss = (saved * factor).sum()
    with torch.no_grad():
        call(CPU, inputs, out=saved)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_inference_tensor_as_out(inputs: Inputs) -> None:
    with torch.inference_mode():
        out = torch.zeros(5, 70)
        call(CPU, inputs, out=out)
    with refused("fp8_fp4_mqa_logits: out must not be an inference tensor"):
        call(CPU, inputs, out=out)


@pytest.mark.parametrize("transform", ("grad", "jvp", "vjp", "jacrev", "jacfwd", "dual"))
def test_derivatives_by_transforms(inputs: Inputs, transform: str) -> None:
    def total(weights: Tensor) -> Tensor:
        return call(CPU, replace(inputs, weights=weights)).sum()

    weights = inputs.weights
    with refused("fp8_fp4_mqa_logits: weights requires grad, but the op is forward only"):
        if transform == "jvp":
            torch.func.jvp(total, (weights,), (weights,))
        elif transform == "dual":
            with torch.autograd.forward_ad.dual_level():
                total(torch.autograd.forward_ad.make_dual(weights, weights))
        elif transform == "vjp":
            torch.func.vjp(total, weights)
        else:
            getattr(torch.func, transform)(total)(weights)


@pytest.mark.parametrize("name", ("q", "kv", "weights"))
def test_gradients_under_compile(inputs: Inputs, name: str) -> None:
    wanted = replace(inputs, **{name: getattr(inputs, name).clone().requires_grad_()})
    compiled = torch.compile(lambda x: call(CPU, x), backend="aot_eager")
    with pytest.raises(Exception, match=f"{name} requires grad, but the op is forward only"):
        compiled(wanted)


def test_counts_beyond_32_bits(inputs: Inputs) -> None:
    heads = 2**32 + 8
    wide = replace(
        inputs.rows(slice(0, 0)),
        q=torch.empty(0, heads, 64, dtype=torch.float8_e4m3fn),
        weights=torch.empty(0, heads),
    )
    with refused(f"fp8_fp4_mqa_logits: num_heads must be from 0 to 2147482623, got {heads}"):
        call(CPU, wide)


def test_wrong_integers_in_a_mode(inputs: Inputs) -> None:
    with torch.device("cpu"), refused("fp8_fp4_mqa_logits: max_seqlen_k must be an int, got str", TypeError):
        call(CPU, inputs, width="x")  # type: ignore[arg-type]


KINDS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "coo": ("sparse", lambda x: x.to_sparse()),
    "csr": ("sparse", lambda x: x.to_sparse_csr()),
    "nested": ("nested", lambda x: torch.nested.nested_tensor([x, x])),
    "jagged": ("nested", lambda x: torch.nested.nested_tensor([x, x], layout=torch.jagged)),
    "mkldnn": ("of mkldnn's layout", lambda x: x.to_mkldnn()),
    "quantized": ("quantized", lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)),
}


@THROUGH
@pytest.mark.parametrize("name", ("weights", "out"))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore")
def test_kinds_of_tensors(
    inputs: Inputs, through: Callable[[Inputs, Tensor | None], Any], name: str, kind: str
) -> None:
    word, make = KINDS[kind]
    odd = make(torch.zeros(5, 70) if name == "out" else inputs.weights)
    with refused(f"fp8_fp4_mqa_logits: {name} must be a dense tensor, got one that is {word}"):
        through(inputs if name == "out" else replace(inputs, weights=odd), odd if name == "out" else None)


def test_conjugated_inputs(inputs: Inputs) -> None:
    odd = torch.complex(inputs.weights, inputs.weights).conj()
    with refused(
        "fp8_fp4_mqa_logits: weights must be float32 or bfloat16 or float16 [num_q=5, num_heads=8], got complex64"
    ):
        call(CPU, replace(inputs, weights=odd))


def narrower(x: Tensor) -> Tensor:
    return x.view(torch.uint8)[..., :48].contiguous().view(x.dtype)


@THROUGH
def test_exceptions_are_the_same_through_the_dispatcher(
    inputs: Inputs, through: Callable[[Inputs, Tensor | None], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch 2.15 makes a RuntimeError of a C++ exception that is not its own, and may show where in C++ it was."""
    monkeypatch.setenv("TORCH_SHOW_CPP_STACKTRACES", "1")
    with pytest.raises(ValueError) as value_error:
        through(replace(inputs, weights=inputs.weights[:4]), None)
    expected = "weights must be float32 or bfloat16 or float16 [num_q=5, num_heads=8], got float32 [4, 8]"
    assert str(value_error.value) == f"fp8_fp4_mqa_logits: {expected}"
    with pytest.raises(dk.UnsupportedError) as unsupported:
        through(replace(inputs, q=narrower(inputs.q), kv=narrower(inputs.kv)), None)
    assert str(unsupported.value) == "fp8_fp4_mqa_logits: head_dim must be 32, 64 or 128, got 48"


def test_a_wrong_placement_matters_to_kernels_alone(inputs: Inputs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEP_KERNELS_MQA_CLEAN", "both")
    call(CPU, inputs)
    assert dk.supported("fp8_fp4_mqa_logits", "cpu") is None
    assert dk.supported("fp8_fp4_mqa_logits", "sm90", clean_logits=False) is None
    with refused("DEEP_KERNELS_MQA_CLEAN must be concurrent or deferred, got 'both'"):
        dk.supported("fp8_fp4_mqa_logits", "sm90")
