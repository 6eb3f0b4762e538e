"""The attention function for transformers, on small random models, against transformers' own sdpa function."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attention_cases import with_kernels
from conftest import Backend
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from deep_kernels.integrations import transformers as adapter

SIZES = {"vocab_size": 97, "hidden_size": 256, "intermediate_size": 128, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 128,
         "attn_implementation": adapter.NAME}  # fmt: skip
adapter.register()


@pytest.fixture
def backend(backend: Backend) -> Backend:
    return with_kernels(backend)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Keywords of each call of the op."""
    seen: list[dict[str, Any]] = []

    def counted(*tensors: Tensor, **options: Any) -> Any:
        seen.append(options)
        return op(*tensors, **options)

    op = adapter.flash_attn_fwd
    monkeypatch.setattr(adapter, "flash_attn_fwd", counted)
    return seen


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.no_grad():
        yield


def llama(device: str, dtype: torch.dtype = torch.bfloat16) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).to(device, dtype).eval()


def by_sdpa(model: torch.nn.Module, function: Callable[[], Any]) -> Any:
    model.set_attn_implementation("sdpa")
    try:
        return function()
    finally:
        model.set_attn_implementation(adapter.NAME)


def assert_close(found: Tensor, wanted: Tensor) -> None:
    """Logits of about 1: two layers of bfloat16."""
    assert (found.float() - wanted.float()).abs().max() <= 0.03 * wanted.float().abs().max()


def tokens(batch: int, count: int, device: str) -> Tensor:
    return torch.randint(97, (batch, count), generator=torch.Generator().manual_seed(1)).to(device)


def test_prefill(backend: Backend, calls: list[dict[str, Any]]) -> None:
    model, ids = llama(backend.device), tokens(2, 50, backend.device)
    wanted = by_sdpa(model, lambda: model(ids).logits)
    assert calls == []
    assert_close(model(ids).logits, wanted)
    assert [call["causal"] for call in calls] == [True, True], "a call per layer"


def test_decoding_with_a_cache(backend: Backend, calls: list[dict[str, Any]]) -> None:
    model, ids = llama(backend.device), tokens(2, 20, backend.device)

    def steps() -> Tensor:
        cache = model(ids[:, :15], use_cache=True).past_key_values
        logits = [model(ids[:, i : i + 1], past_key_values=cache, use_cache=True).logits for i in range(15, 20)]
        return torch.cat(logits, dim=1)

    found = steps()
    assert [call["causal"] for call in calls] == 2 * [True] + 10 * [False]
    assert_close(found, by_sdpa(model, steps))
    assert_close(found, model(ids).logits[:, 15:])


def test_padding_goes_to_sdpa(backend: Backend, calls: list[dict[str, Any]]) -> None:
    model, ids = llama(backend.device), tokens(2, 50, backend.device)
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    found = model(ids, attention_mask=mask).logits
    assert calls == []
    assert torch.equal(found, by_sdpa(model, lambda: model(ids, attention_mask=mask).logits))


def test_several_queries_behind_a_cache_go_to_sdpa(backend: Backend, calls: list[dict[str, Any]]) -> None:
    model, ids = llama(backend.device), tokens(1, 20, backend.device)
    cache = model(ids[:, :15], use_cache=True).past_key_values
    calls.clear()
    found = model(ids[:, 15:], past_key_values=cache, use_cache=True).logits
    assert calls == []
    assert_close(found, model(ids).logits[:, 15:])


@pytest.mark.parametrize("window, is_served", ((16, False), (100, True)))
def test_windows(backend: Backend, calls: list[dict[str, Any]], window: int, is_served: bool) -> None:
    """One that is longer than the sequence hides nothing."""
    torch.manual_seed(0)
    model = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=window)).to(backend.device, torch.bfloat16).eval()
    ids = tokens(2, 50, backend.device)
    found = model(ids).logits
    assert len(calls) == (2 if is_served else 0)
    assert_close(found, by_sdpa(model, lambda: model(ids).logits))


def test_float32_goes_to_sdpa(backend: Backend, calls: list[dict[str, Any]]) -> None:
    model, ids = llama(backend.device, torch.float32), tokens(2, 50, backend.device)
    found = model(ids).logits
    assert calls == []
    assert torch.equal(found, by_sdpa(model, lambda: model(ids).logits))


def test_compile(backend: Backend) -> None:
    model, ids = llama(backend.device), tokens(2, 50, backend.device)
    wanted = model(ids, use_cache=False).logits
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_close(compiled(ids, use_cache=False).logits, wanted)  # some versions make a mask then, which is sdpa's


# ------------------------------------------------------------------------------------------ the function alone


def heads_first(device: str, num_q: int, num_kv: int, head_dim: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    shapes = ((2, 4, num_q, head_dim), (2, 2, num_kv, head_dim), (2, 2, num_kv, head_dim))
    q, k, v = (torch.randn(shape, generator=generator).bfloat16().to(device) for shape in shapes)
    return q, k, v


class Module(torch.nn.Module):
    def __init__(self, is_causal: bool) -> None:
        super().__init__()
        self.is_causal = is_causal
        self.num_key_value_groups = 2
        self.config = SimpleNamespace(_attn_implementation=adapter.NAME)


@pytest.mark.parametrize(
    "num_q, num_kv, of_module, given, served",
    (
        (30, 30, True, None, True),
        (30, 30, False, None, True),
        (30, 30, True, False, True),
        (1, 30, True, None, True),
        (30, 50, False, None, True),
        (30, 50, True, None, True),  # at the top left, as the prefill of a static cache
        (1, 30, False, True, False),  # where versions of it differ
        (50, 30, True, True, False),
    ),
)
def test_causal_is_what_sdpa_takes_it_for(
    backend: Backend, calls: list[Any], num_q: int, num_kv: int, of_module: bool, given: bool | None, served: bool
) -> None:
    arguments = (Module(of_module), *heads_first(backend.device, num_q, num_kv), None)
    found, weights = adapter.attention_forward(*arguments, scaling=0.2, is_causal=given)
    wanted, _ = sdpa_attention_forward(*arguments, scaling=0.2, is_causal=given)
    assert weights is None and found.shape == wanted.shape and found.is_contiguous()
    assert len(calls) == int(served)
    assert_close(found, wanted)


def test_other_head_dims_and_bias_go_to_sdpa(backend: Backend, calls: list[Any]) -> None:
    module = Module(True)
    tensors = heads_first(backend.device, 30, 30, 80)
    found, _ = adapter.attention_forward(module, *tensors, None)
    assert torch.equal(found, sdpa_attention_forward(module, *tensors, None)[0])
    mask = torch.zeros(2, 1, 30, 30, dtype=torch.bfloat16, device=backend.device)
    tensors = heads_first(backend.device, 30, 30)
    found, _ = adapter.attention_forward(module, *tensors, mask)
    assert torch.equal(found, sdpa_attention_forward(module, *tensors, mask)[0])
    assert calls == []


def test_compile_of_the_function(backend: Backend) -> None:
    module = Module(True)
    tensors = heads_first(backend.device, 30, 30)
    wanted, _ = adapter.attention_forward(module, *tensors, None, scaling=0.2)
    torch.compiler.reset()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return adapter.attention_forward(module, q, k, v, None, scaling=0.2)[0]

    assert torch.equal(run(*tensors), wanted)


@pytest.mark.parametrize(
    "keywords, sentence",
    (
        ({"dropout": 0.1}, "dropout must be 0, got 0.1: the op is forward only"),
        ({"softcap": 30.0}, "softcap must be None, got 30.0"),
        ({"output_attentions": True}, "output_attentions must be None, got True"),
        ({"s_aux": torch.zeros(4)}, "s_aux must be None, got a tensor [4]"),
    ),
    ids=("dropout", "softcap", "output_attentions", "s_aux"),
)
def test_refusals(backend: Backend, keywords: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError) as caught:
        adapter.attention_forward(Module(True), *heads_first(backend.device, 30, 30), None, **keywords)
    assert str(caught.value) == f"deep_kernels attention: {sentence}"


def test_training_is_refused(backend: Backend) -> None:
    model = llama(backend.device)
    with torch.enable_grad(), pytest.raises(ValueError, match="q requires grad, but the op is forward only"):
        model(tokens(1, 5, backend.device))
