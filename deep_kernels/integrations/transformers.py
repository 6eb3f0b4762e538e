"""flash_attn_fwd as an attention function of Hugging Face transformers, for inference.

    from deep_kernels.integrations import transformers as adapter
    adapter.register()
    model = AutoModelForCausalLM.from_pretrained(..., dtype=torch.bfloat16, attn_implementation=adapter.NAME)

What the op does not compute, as masks of padding, of windows and of chunks, goes to transformers' own sdpa function,
call by call; what that one would leave out is refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from deep_kernels import flash_attn_fwd, supported

NAME = "deep_kernels"

# Keywords of modules that change the result and that sdpa's function does not know.
_REFUSED = ("softcap", "s_aux", "head_mask", "output_attentions")


def register(name: str = NAME) -> None:
    """Makes `attn_implementation=name` known, with the masks of "sdpa": none where causal or full says it all."""
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, sdpa_mask)


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What a model's attention module calls.

    Args:
        module: it; its is_causal counts where the argument is None, True if it has none.
        query: [batch, num_q_heads, num_q, head_dim]; key, value: [batch, num_kv_heads, num_kv, head_dim].
        attention_mask: None, or what sdpa's function takes, to which the call then goes.
        dropout: 0.
        scaling: softmax_scale of flash_attn_fwd.
        is_causal: as sdpa's function reads it.
        kwargs: position_bias sends the call to sdpa's function; softcap, s_aux, head_mask and output_attentions are
            refused; others change nothing.
    Units: as flash_attn_fwd.
    Returns:
        ([batch, num_q, num_q_heads, head_dim], None)
    Raises:
        ValueError: dropout, or a keyword that is refused; what requires grad (forward only).
    Source: the protocol of transformers' AttentionInterface.
    """
    if dropout != 0.0:
        raise ValueError(f"{NAME} attention: dropout must be 0, got {dropout}: the op is forward only")
    for name in _REFUSED:
        given = kwargs.get(name)
        if given is not None and given is not False:
            raise ValueError(f"{NAME} attention: {name} must be None, got {_in_words(given)}")
    causal = is_causal
    if causal is None:
        causal = query.shape[2] > 1 and attention_mask is None and getattr(module, "is_causal", True)
    is_masked = attention_mask is not None or kwargs.get("position_bias") is not None
    if is_masked or not _serves(query, key, value, bool(causal)):
        result: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, is_causal, **kwargs
        )
        return result
    if causal:  # sdpa's causal masks end at the top left, the op's at the bottom right: later keys are hidden from all
        key, value = (x[:, :, : query.shape[2]] for x in (key, value))
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out = flash_attn_fwd(q, k, v, causal=bool(causal), softmax_scale=scaling)
    assert isinstance(out, Tensor)  # without lse
    return out, None


def _in_words(value: Any) -> str:
    return f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else repr(value)


def _serves(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> bool:
    num_q, num_kv = query.shape[2], key.shape[2]
    if causal and (num_q > num_kv or num_q == 1 < num_kv):  # versions read a single causal query differently
        return False
    if not (query.dtype == key.dtype == value.dtype) or query.shape[3] != value.shape[3]:
        return False
    has_kernel: bool = _has_kernel(query.dtype, query.shape[3], query.device.type)
    return has_kernel


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _has_kernel(dtype: torch.dtype, head_dim: int, device: str) -> bool:
    if dtype == torch.float32 or device not in ("cpu", "cuda"):
        return False
    arch = "cpu" if device == "cpu" else None
    reason: str | None = supported("flash_attn_fwd", arch=arch, dtype=dtype, head_dim=head_dim)
    return reason is None
