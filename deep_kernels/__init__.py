"""JIT-compiled CUDA kernels for the sparse-attention indexer, FP8 prefill MLPs and long-context attention.

Importing touches neither CUDA nor NVRTC: kernels are compiled at the first call that needs them and kept
on disk. Every op runs on CPU tensors too, on torch's threads: as with torch's own functions, a child of fork whose
parent has used them must call torch.set_num_threads(1) first.
"""

from __future__ import annotations

from . import _built  # noqa: F401 (before all that need the extension)
from ._runtime import (
    CompileError,
    UnsupportedError,
    get_num_sms,
    get_pdl,
    prepare,
    set_num_sms,
    set_pdl,
    supported,
)
from .attention_ops import ex2_emulated_share, flash_attn_fwd, flash_attn_varlen_fwd
from .ops import (
    fp8_fp4_mqa_logits,
    fp8_fp4_paged_mqa_logits,
    fp8_mqa_logits,
    fp8_paged_mqa_logits,
    get_mqa_logits_metadata,
    get_paged_mqa_logits_metadata,
)
from .silu_ops import fp8_block_gemm_nt, fp8_silu_fold_prefill, silu_mul_to_fp8_block128

__version__ = "0.1.0"

__all__ = [
    "CompileError",
    "UnsupportedError",
    "ex2_emulated_share",
    "flash_attn_fwd",
    "flash_attn_varlen_fwd",
    "fp8_block_gemm_nt",
    "fp8_fp4_mqa_logits",
    "fp8_fp4_paged_mqa_logits",
    "fp8_mqa_logits",
    "fp8_paged_mqa_logits",
    "fp8_silu_fold_prefill",
    "get_mqa_logits_metadata",
    "get_num_sms",
    "get_paged_mqa_logits_metadata",
    "get_pdl",
    "prepare",
    "set_num_sms",
    "set_pdl",
    "silu_mul_to_fp8_block128",
    "supported",
]
