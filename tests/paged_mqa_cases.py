"""Cases of paged MQA logits: what a call looks like, its inputs, and calling the public functions with them."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import oracle
import pytest
import torch
from conftest import Backend
from mqa_cases import INT32_MAX, INT32_MIN, inside_larger, quantized, unpack_scale, word
from pairwise import pairwise
from torch import Tensor

import deep_kernels as dk
from deep_kernels import formats

OP = "fp8_fp4_paged_mqa_logits"
METADATA = "get_paged_mqa_logits_metadata"


@dataclass(frozen=True)
class Case:
    batch: int = 3
    next_n: int = 1
    max_len: int = 200  # of contexts
    num_heads: int = 24
    head_dim: int = 64
    format: str = "fp8"
    block_kv: int = 64
    weights_dtype: torch.dtype = torch.float32
    logits_dtype: torch.dtype = torch.float32
    clean: bool = True
    lens: str = "1d"  # or "2d", "indices"
    lengths: str = "ragged"  # or "full"
    metadata: bool = False
    strided: bool = False  # every tensor a view into a larger one whose other bytes are all 0xff
    unpacked_scale: bool = False  # MX scales of q as float8_e8m0fnu instead of int32
    seed: int = 0

    def __str__(self) -> str:
        words = [self.format, f"b{self.batch}", f"n{self.next_n}", f"k{self.max_len}", f"h{self.num_heads}"]
        words += [f"d{self.head_dim}", f"p{self.block_kv}", word(self.weights_dtype), word(self.logits_dtype)]
        words += [self.lens, self.lengths, "clean" if self.clean else "unclean"]
        words += [name for name in ("metadata", "strided", "unpacked_scale") if getattr(self, name)]
        return "-".join(words)

    @property
    def width(self) -> int:
        """The max_context_len of the call; it cuts the longest contexts off in every third case."""
        return self.max_len + 7 if self.seed % 3 else max(1, self.max_len - 30)


FACTORS = {
    "batch": (0, 1, 2, 5),
    "rows": (*((next_n, lens) for next_n in (1, 2, 3, 4) for lens in ("1d", "2d")), (1, "indices")),
    "max_len": (1, 15, 64, 129, 700),
    "num_heads": (1, 8, 17, 32, 64, 128),
    "head_dim": (32, 64, 128),
    "format": formats.FORMATS,
    "block_kv": formats.PAGE_SIZES,
    "weights_dtype": (torch.float32, torch.bfloat16, torch.float16),
    "logits_dtype": (torch.float32, torch.bfloat16),
    "clean": (False, True),
    "lengths": ("ragged", "full"),
    "metadata": (False, True),
    "strided": (False, True),
    "unpacked_scale": (False, True),
}


def _case(rows: tuple[int, str], **fields: Any) -> Case:
    next_n, lens = rows
    return Case(next_n=next_n, lens=lens, **fields)


SWEEP = [_case(**row, seed=seed) for seed, row in enumerate(pairwise(FACTORS))]


BITS_CASES = [
    Case(batch=5, next_n=next_n, max_len=400, num_heads=num_heads, head_dim=head_dim, format=format,
         logits_dtype=dtype, lens=lens, seed=seed)
    for seed, (format, next_n, num_heads, head_dim, dtype, lens) in enumerate(
        [
            ("fp8", 1, 64, 128, torch.float32, "1d"),
            ("fp8", 2, 32, 128, torch.float32, "2d"),
            ("fp8", 3, 7, 32, torch.bfloat16, "1d"),
            ("fp8", 1, 64, 64, torch.float32, "indices"),
            ("mxfp8", 1, 64, 128, torch.float32, "1d"),
            ("mxfp8", 4, 24, 64, torch.bfloat16, "2d"),
            ("mxfp4", 2, 128, 128, torch.float32, "1d"),
            ("mxfp4", 1, 8, 64, torch.float32, "indices"),
        ]
    )
]  # fmt: skip
EVERY_BITS_CASE = pytest.mark.parametrize("case", BITS_CASES, ids=str)


# ------------------------------------------------------------------------------------------ inputs


@dataclass(frozen=True)
class Inputs:
    """The tensors of one call."""

    q: Tensor
    q_scale: Tensor | None
    kv_cache: Tensor
    weights: Tensor
    context_lens: Tensor
    block_table: Tensor
    indices: Tensor | None = None

    @property
    def format(self) -> str:
        if self.q_scale is None:
            return "fp8"
        return "mxfp8" if self.q.dtype == torch.float8_e4m3fn else "mxfp4"

    @property
    def head_dim(self) -> int:
        return self.q.shape[3] * (2 if self.format == "mxfp4" else 1)

    @property
    def next_n(self) -> int:
        return self.q.shape[1]

    def tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in vars(self).items() if value is not None}

    def requests(self, index: slice) -> Inputs:
        """The same call for some of the requests."""
        rows = slice((index.start or 0) * self.next_n, index.stop * self.next_n)
        return replace(
            self,
            q=self.q[index],
            q_scale=None if self.q_scale is None else self.q_scale[index],
            weights=self.weights[rows],
            context_lens=self.context_lens[index],
            block_table=self.block_table[index],
            indices=None if self.indices is None else self.indices[index],
        )


def on_device(inputs: Inputs, device: str) -> Inputs:
    return Inputs(**{name: value if value is None else value.to(device) for name, value in vars(inputs).items()})


def row_lengths(inputs: Inputs) -> Tensor:
    """int64 [batch, next_n]: tokens that each row sees, before anything cuts them off."""
    lens = inputs.context_lens.cpu().long()
    if lens.dim() == 2:
        return lens
    return lens[:, None] + torch.arange(inputs.next_n) - (inputs.next_n - 1)


def _lengths(case: Case, generator: torch.Generator) -> Tensor:
    """int32 [batch] or [batch, next_n]; among ragged ones also none at all."""
    shape = (case.batch, case.next_n) if case.lens == "2d" else (case.batch,)
    lens = torch.full(shape, case.max_len, dtype=torch.int32)
    if case.lengths == "ragged":
        lens = torch.randint(0, case.max_len + 1, shape, generator=generator, dtype=torch.int32)
        lens[1::4] = 0
        lens[2::4] = case.max_len
    return lens


def _request_of_row(case: Case) -> Tensor:
    """Rows of one request are neighbours: two, one, three and three of them, and so on."""
    pattern = (0, 0, 1, 2, 2, 2, 3, 3, 3)
    return torch.tensor([4 * (row // 9) + pattern[row % 9] for row in range(case.batch)], dtype=torch.int32)


def contexts(lens: Tensor, indices: Tensor | None) -> Tensor:
    """int64 [batch]: the longest row of each request, of all that belong to it."""
    longest = (lens.amax(1) if lens.dim() == 2 else lens).cpu().long()
    if indices is None:
        return longest
    same = indices.cpu()[:, None] == indices.cpu()
    return torch.where(same, longest, 0).amax(1) if len(longest) else longest


def make_inputs(case: Case, device: str) -> Inputs:
    generator = torch.Generator().manual_seed(case.seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    q, q_scale = quantized(randn(case.batch, case.next_n, case.num_heads, case.head_dim), case.format, generator)
    weights = randn(case.batch * case.next_n, case.num_heads).to(case.weights_dtype)
    lens = _lengths(case, generator)
    indices = _request_of_row(case) if case.lens == "indices" else None
    owner = torch.arange(case.batch) if indices is None else indices
    num_owners = int(owner.max()) + 1 if case.batch else 0

    # A few pages belong to nobody; those of a request lie anywhere.
    per_owner = -(-case.max_len // case.block_kv)
    places = torch.randperm(num_owners * per_owner + 3, generator=generator)
    values, scale = quantized(randn(num_owners * per_owner * case.block_kv, case.head_dim), case.format, generator)
    pages = formats.pack_paged_kv(values, scale, case.block_kv)
    cache = torch.randint(0, 256, (len(places), *pages.shape[1:]), generator=generator, dtype=torch.uint8)
    cache[places[: len(pages)]] = pages

    # Entries behind those that a context needs are junk.
    table = torch.randint(INT32_MIN, INT32_MAX, (num_owners, per_owner + 5), generator=generator, dtype=torch.int32)
    own = places[: len(pages)].view(num_owners, per_owner).to(torch.int32)
    for b, longest in zip(owner.tolist(), contexts(lens, indices).tolist(), strict=True):
        used = -(-longest // case.block_kv)
        table[b, :used] = own[b, :used]
    table = table[owner]

    inputs = Inputs(q, None if case.format == "fp8" else q_scale, cache, weights, lens, table, indices)
    if case.unpacked_scale and inputs.q_scale is not None:
        inputs = replace(inputs, q_scale=unpack_scale(inputs.q_scale, case.head_dim))
    inputs = on_device(inputs, device)
    return strided(inputs) if case.strided else inputs


def with_page_stride(cache: Tensor, gap: int, offset: int = 0) -> Tensor:
    """The same pages with `gap` bytes of 0xff between them and `offset` before the first."""
    num_blocks, page_bytes = cache.shape[0], cache[0].numel() if cache.shape[0] else 0
    stride = page_bytes + gap
    storage = torch.full((offset + num_blocks * stride,), 0xFF, dtype=torch.uint8, device=cache.device)
    view = storage.as_strided(cache.shape, (stride, cache.shape[3], cache.shape[3], 1), offset)
    view.copy_(cache)
    return view


def strided(inputs: Inputs) -> Inputs:
    """The same values with strides as odd as the contract allows."""
    sixteen = 16 // inputs.q.element_size()
    lens, no_gap = inputs.context_lens, (0,) * (inputs.context_lens.dim() - 1)
    changed: dict[str, Tensor] = {
        "q": inside_larger(inputs.q, (0, 1, 0, sixteen), (0, 0, 2, 3 * sixteen)),
        "kv_cache": with_page_stride(inputs.kv_cache, 48, 16),
        "weights": inside_larger(inputs.weights, (0, 1), (0, 4)),
        "context_lens": inside_larger(lens.unsqueeze(-1), (1, *no_gap, 1), (0, *no_gap, 1))[..., 0],
        "block_table": inside_larger(inputs.block_table, (0, 3), (1, 2)),
    }
    if inputs.indices is not None:
        changed["indices"] = inside_larger(inputs.indices.unsqueeze(-1), (0, 1), (1, 2))[:, 0]
    if inputs.q_scale is not None and inputs.q_scale.dtype == torch.int32:
        changed["q_scale"] = inside_larger(inputs.q_scale.unsqueeze(3), (0, 0, 1, 1), (0, 1, 0, 1)).squeeze(3)
    elif inputs.q_scale is not None:
        changed["q_scale"] = inside_larger(inputs.q_scale, (0, 0, 1, 1), (0, 1, 0, 2))
    return replace(inputs, **changed)


def needed_tokens(inputs: Inputs) -> list[int]:
    """Kv tokens of each request that some row sees, as far as the table reaches."""
    reach = inputs.block_table.shape[1] * inputs.kv_cache.shape[1]
    return contexts(row_lengths(inputs), inputs.indices).clamp(0, reach).tolist()


def needed_entries(inputs: Inputs) -> Tensor:
    """bool [batch, max_blocks] on the CPU: the entries of the table that some row needs."""
    block_kv = inputs.kv_cache.shape[1]
    counts = torch.tensor([-(-tokens // block_kv) for tokens in needed_tokens(inputs)], dtype=torch.int64)
    return torch.arange(inputs.block_table.shape[1]) < counts[:, None]


def used_bytes(inputs: Inputs) -> Tensor:
    """bool, the shape of the cache on the CPU: the bytes of kv tokens that some row sees, values and scales."""
    num_blocks, block_kv, _, token_bytes = inputs.kv_cache.shape
    used = torch.zeros(num_blocks, block_kv, dtype=torch.bool)
    for b, tokens in enumerate(needed_tokens(inputs)):
        for i, page in enumerate(inputs.block_table[b, : -(-tokens // block_kv)].tolist()):
            used[page, : tokens - i * block_kv] = True
    split = token_bytes - 4
    mask = torch.cat((used.repeat_interleave(split, 1), used.repeat_interleave(4, 1)), dim=1)
    return mask.view(num_blocks, block_kv, 1, token_bytes)


# ------------------------------------------------------------------------------------------ calls


def call(
    backend: Backend,
    inputs: Inputs,
    width: int,
    *,
    clean: bool = True,
    dtype: torch.dtype = torch.float32,
    schedule: Tensor | None = None,
    **options: Any,
) -> Tensor:
    return dk.fp8_fp4_paged_mqa_logits(
        (inputs.q, inputs.q_scale),
        inputs.kv_cache,
        inputs.weights,
        inputs.context_lens,
        inputs.block_table,
        schedule,
        width,
        clean,
        dtype,
        inputs.indices,
        arch=backend.arch,
        **options,
    )


def metadata(backend: Backend, inputs: Inputs, num_sms: int | None = None) -> Tensor:
    return dk.get_paged_mqa_logits_metadata(
        inputs.context_lens, inputs.kv_cache.shape[1], num_sms or dk.get_num_sms(), inputs.indices, arch=backend.arch
    )


def is_refused(backend: Backend, inputs: Inputs) -> bool:
    """Whether the backend lacks what the inputs need; then the call must say so in the words of `supported`."""
    reason = dk.supported(
        OP,
        arch=backend.supported_arch,
        format=inputs.format,
        num_heads=inputs.q.shape[2],
        head_dim=inputs.head_dim,
        block_kv=inputs.kv_cache.shape[1],
        next_n=inputs.next_n,
    )
    if reason is None:
        return False
    with pytest.raises(dk.UnsupportedError, match=f"^{re.escape(reason)}$"):
        call(backend, inputs, 64)
    return True


def expected(inputs: Inputs, width: int, *, clean: bool = True) -> tuple[Tensor, Tensor]:
    """The oracle's logits and the columns that are some."""
    return oracle.paged_mqa_logits(
        (inputs.q, inputs.q_scale),
        inputs.kv_cache,
        inputs.weights,
        inputs.context_lens,
        inputs.block_table,
        width,
        format=inputs.format,
        clean=clean,
    )
