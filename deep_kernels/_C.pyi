"""The C++ extension: eager entry points (NotImplemented sends the caller to torch.ops) and the runtime."""

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any

import torch
from torch import Tensor

class UnsupportedError(RuntimeError): ...
class CompileError(RuntimeError): ...

def fp8_fp4_mqa_logits(
    q: tuple[Tensor, Tensor | None],
    kv: tuple[Tensor, Tensor],
    weights: Tensor,
    cu_seq_len_k_start: Tensor,
    cu_seq_len_k_end: Tensor,
    clean_logits: bool,
    max_seqlen_k: int,
    logits_dtype: torch.dtype,
    schedule_meta: Tensor | None,
    reduction: str,
    arch: str | None,
    out: Tensor | None,
    /,
) -> Tensor: ...  # or NotImplemented
def check_fp8_fp4_mqa_logits(
    q: tuple[Tensor, Tensor | None],
    kv: tuple[Tensor, Tensor],
    weights: Tensor,
    cu_seq_len_k_start: Tensor,
    cu_seq_len_k_end: Tensor,
    clean_logits: bool,
    max_seqlen_k: int | torch.SymInt,
    logits_dtype: torch.dtype,
    schedule_meta: Tensor | None,
    reduction: str,
    arch: str | None,
    out: Tensor | None,
    /,
) -> None: ...
def get_mqa_logits_metadata(
    cu_seq_len_k_start: Tensor,
    cu_seq_len_k_end: Tensor,
    num_kv_tokens: int,
    num_heads: int,
    num_sms: int | None,
    arch: str | None,
    /,
) -> Tensor: ...  # or NotImplemented
def check_get_mqa_logits_metadata(
    cu_seq_len_k_start: Tensor,
    cu_seq_len_k_end: Tensor,
    num_kv_tokens: int | torch.SymInt,
    num_heads: int | torch.SymInt,
    num_sms: int | torch.SymInt | None,
    arch: str | None,
    /,
) -> None: ...
def fp8_fp4_paged_mqa_logits(
    q: tuple[Tensor, Tensor | None],
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule_meta: Tensor | None,
    max_context_len: int,
    clean_logits: bool,
    logits_dtype: torch.dtype,
    indices: Tensor | None,
    arch: str | None,
    out: Tensor | None,
    /,
) -> Tensor: ...  # or NotImplemented
def check_fp8_fp4_paged_mqa_logits(
    q: tuple[Tensor, Tensor | None],
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule_meta: Tensor | None,
    max_context_len: int | torch.SymInt,
    clean_logits: bool,
    logits_dtype: torch.dtype,
    indices: Tensor | None,
    arch: str | None,
    out: Tensor | None,
    /,
) -> None: ...
def get_paged_mqa_logits_metadata(
    context_lens: Tensor, block_kv: int, num_sms: int, indices: Tensor | None, arch: str | None, /
) -> Tensor: ...  # or NotImplemented
def check_get_paged_mqa_logits_metadata(
    context_lens: Tensor,
    block_kv: int | torch.SymInt,
    num_sms: int | torch.SymInt,
    indices: Tensor | None,
    arch: str | None,
    /,
) -> None: ...
def fp8_silu_fold_prefill(
    x: Tensor,
    x_scale: Tensor,
    w_gate_up: Tensor,
    w_scale: Tensor,
    activation: str,
    clamp: float | None,
    alpha: float | None,
    up_offset: float,
    round_bf16: bool,
    scale_fmt: str,
    fused: bool | None,
    arch: str | None,
    out: tuple[Tensor, Tensor] | None,
    /,
) -> tuple[Tensor, Tensor]: ...  # or NotImplemented
def check_fp8_silu_fold_prefill(
    x: Tensor,
    x_scale: Tensor,
    w_gate_up: Tensor,
    w_scale: Tensor,
    activation: str,
    clamp: float | None,
    alpha: float | None,
    up_offset: float,
    round_bf16: bool,
    scale_fmt: str,
    fused: bool | None,
    arch: str | None,
    out: tuple[Tensor, Tensor] | None,
    /,
) -> None: ...
def fp8_block_gemm_nt(
    x: Tensor,
    x_scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    out_dtype: torch.dtype,
    residual: Tensor | None,
    arch: str | None,
    out: Tensor | None,
    /,
) -> Tensor: ...  # or NotImplemented
def check_fp8_block_gemm_nt(
    x: Tensor,
    x_scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    out_dtype: torch.dtype,
    residual: Tensor | None,
    arch: str | None,
    out: Tensor | None,
    /,
) -> None: ...
def silu_mul_to_fp8_block128(
    gate_up: Tensor,
    activation: str,
    clamp: float | None,
    alpha: float | None,
    up_offset: float,
    scale_fmt: str,
    arch: str | None,
    out: tuple[Tensor, Tensor] | None,
    /,
) -> tuple[Tensor, Tensor]: ...  # or NotImplemented
def check_silu_mul_to_fp8_block128(
    gate_up: Tensor,
    activation: str,
    clamp: float | None,
    alpha: float | None,
    up_offset: float,
    scale_fmt: str,
    arch: str | None,
    out: tuple[Tensor, Tensor] | None,
    /,
) -> None: ...
def flash_attn_fwd(
    q: Tensor, k: Tensor, v: Tensor, options: tuple[Any, ...], out: Tensor | None, /
) -> Tensor | tuple[Tensor, Tensor]: ...  # or NotImplemented; options: keywords in the order of the op, return_lse last
def check_flash_attn_fwd(q: Tensor, k: Tensor, v: Tensor, options: tuple[Any, ...], out: Tensor | None, /) -> None: ...
def flash_attn_varlen_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    options: tuple[Any, ...],
    out: Tensor | None,
    /,
) -> Tensor | tuple[Tensor, Tensor]: ...  # or NotImplemented
def check_flash_attn_varlen_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | torch.SymInt,
    max_seqlen_k: int | torch.SymInt,
    options: tuple[Any, ...],
    out: Tensor | None,
    /,
) -> None: ...
def ex2_emulated_share(freq: int, res: int, start_frg: int, fragment: int, num_fragments: int, /) -> float: ...
def ex2_choice(arch: str, case: Mapping[str, str], /) -> dict[str, Any]: ...
def ops() -> list[str]: ...
def supported(op: str, arch: str | None, case: Mapping[str, str], capability: int | None, /) -> str | None: ...
def prepare(op: str, arch: str | None, case: Mapping[str, str], capability: int | None, /) -> list[dict[str, Any]]: ...
def legal_specs(arch: str, /) -> list[tuple[str, str, Callable[[], dict[str, Any]]]]: ...
def known_targets() -> list[str]: ...
def tuning_rows() -> list[dict[str, Any]]: ...
def arch_of_card(capability: int, /) -> tuple[str, str]: ...
def mqa_schedule_length(num_q: int, num_heads: int, num_sms: int, /) -> int: ...
def silu_fold_choice(arch: str, num_tokens: int, num_columns: int, num_sms: int, /) -> dict[str, Any]: ...
def num_sms() -> int | None: ...
def set_num_sms(num_sms: int, /) -> None: ...
def pdl() -> bool: ...
def set_pdl(enable: bool, /) -> None: ...
def set_emulator(run: Callable[[dict[str, Any]], None] | None, num_sms: int, /) -> None: ...
def emulator_sms(arch: str | None, /) -> int | None: ...
def set_package_folders(folders: Sequence[str | PathLike[str]], /) -> None: ...
def cache_dir() -> str: ...
def prebuilt_dir() -> str | None: ...
def cache_files(folder: str | PathLike[str], /) -> list[str]: ...
def removable_files(folder: str | PathLike[str], /) -> list[str]: ...
def read_entry(path: str | PathLike[str], /) -> dict[str, Any]: ...
def clear_cache(folder: str | PathLike[str], /) -> int: ...
def compile_options(target: str, /) -> list[str]: ...
def compile_text(source: str, options: Sequence[str], /) -> tuple[bool, bytes, str]: ...
def compile_to_ptx(source: str, options: Sequence[str], /) -> tuple[bool, str, str]: ...
def include_digest() -> str: ...
def nvrtc() -> tuple[str, str]: ...
def driver_version() -> str: ...
def device_facts(device: int, /) -> tuple[str, int, int]: ...
