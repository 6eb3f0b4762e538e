"""Small odd cases of the paged kernels, with inputs that any machine and torch version makes alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import deep_kernels

from .cases import exact_values, hash_bits, row_values

FORMATS = ("fp8", "mxfp8", "mxfp4")
SPARE_PAGES = 2  # of the cache, that no request has


@dataclass(frozen=True)
class PagedCase:
    """One call of fp8_fp4_paged_mqa_logits."""

    batch: int = 3
    next_n: int = 1
    max_len: int = 200  # of contexts
    num_heads: int = 64
    head_dim: int = 64
    format: str = "fp8"
    block_kv: int = 64
    weights_dtype: torch.dtype = torch.float32
    logits_dtype: torch.dtype = torch.float32
    clean: bool = True
    lens: str = "1d"  # or "2d", "indices"
    width: int = 210
    metadata: bool = False
    spread: int = 4  # MX exponents lie in 127 +- this
    num_sms: int = 3
    seed: int = 1

    def __str__(self) -> str:
        words = [self.format, f"b{self.batch}", f"n{self.next_n}", f"k{self.max_len}", f"h{self.num_heads}"]
        words += [f"d{self.head_dim}", f"p{self.block_kv}", self.lens, f"w{self.width}"]
        words += [str(dtype).removeprefix("torch.") for dtype in (self.weights_dtype, self.logits_dtype)]
        words += ["clean"] * self.clean + ["metadata"] * self.metadata + [f"sms{self.num_sms}"]
        return "-".join([*words, f"s{self.spread}"])

    @property
    def row_bytes(self) -> int:
        return self.head_dim // 2 if self.format == "mxfp4" else self.head_dim

    def _exponents(self, seed: int, *shape: int) -> Tensor:
        """uint8 [.., 4] around 127."""
        return (127 - self.spread + hash_bits(seed, *shape, 4) % (2 * self.spread + 1)).to(torch.uint8)

    def _values(self, seed: int, *shape: int) -> Tensor:
        return row_values(self.format, seed, *shape, self.head_dim)

    def _kv_scale_bytes(self, num_tokens: int) -> Tensor:
        """uint8 [num_tokens, 4]."""
        if self.format != "fp8":
            return self._exponents(self.seed + 4, num_tokens)
        scales = 2.0 ** (hash_bits(self.seed + 3, num_tokens) % 5 - 2)
        return (scales * (1 + exact_values(self.seed + 4, num_tokens).abs())).to(torch.float32).view(-1, 1).view(
            torch.uint8
        )  # fmt: skip

    def make_lens(self) -> Tensor:
        """int32 [batch] or [batch, next_n]: one that is empty, one that is full, and others."""
        shape = (self.batch, self.next_n) if self.lens == "2d" else (self.batch,)
        lens = hash_bits(self.seed + 5, *shape) % (self.max_len + 1)
        lens[1::3] = 0
        lens[2::3] = self.max_len
        return lens.to(torch.int32)

    def make_indices(self) -> Tensor | None:
        """Rows of one request are neighbours: two, one, three of them, and so on."""
        if self.lens != "indices":
            return None
        pattern = (0, 0, 1, 2, 2, 2)
        return torch.tensor([3 * (row // 6) + pattern[row % 6] for row in range(self.batch)], dtype=torch.int32)

    def make_inputs(self) -> PagedInputs:
        """The tensors of the call, on the CPU. What no row sees is 0xff, in the cache and in the table."""
        lens, indices = self.make_lens(), self.make_indices()
        owner = torch.arange(self.batch) if indices is None else indices.long()
        per_owner = -(-self.max_len // self.block_kv)
        num_pages = (int(owner.max()) + 1) * per_owner
        places = hash_bits(self.seed + 6, num_pages + SPARE_PAGES).argsort()[:num_pages].view(-1, per_owner)
        tokens = num_pages * self.block_kv
        values = (
            self._values(self.seed + 1, tokens).view(torch.uint8).view(-1, per_owner * self.block_kv, self.row_bytes)
        )
        scales = self._kv_scale_bytes(tokens).view(-1, per_owner * self.block_kv, 4)

        cache = torch.full((num_pages + SPARE_PAGES, self.block_kv * (self.row_bytes + 4)), 0xFF, dtype=torch.uint8)
        table = torch.full((self.batch, per_owner + 3), -1, dtype=torch.int32)
        longest = lens.amax(1) if lens.dim() == 2 else lens
        for row in range(self.batch):
            length = int(longest[owner == owner[row]].max())
            for i in range(-(-length // self.block_kv)):
                page, first = int(places[owner[row], i]), i * self.block_kv
                count = min(self.block_kv, length - first)
                part = slice(first, first + count)
                table[row, i] = page
                cache[page, : count * self.row_bytes] = values[owner[row], part].flatten()
                at = self.block_kv * self.row_bytes
                cache[page, at : at + 4 * count] = scales[owner[row], part].flatten()
        shape = (self.batch, self.next_n, self.num_heads)
        q_scale = None if self.format == "fp8" else self._exponents(self.seed + 2, *shape).view(torch.int32).squeeze(-1)
        return PagedInputs(
            self._values(self.seed, *shape),
            q_scale,
            cache.view(-1, self.block_kv, 1, self.row_bytes + 4),
            exact_values(self.seed + 7, self.batch * self.next_n, self.num_heads, dtype=self.weights_dtype),
            lens,
            table,
            indices,
        )


@dataclass(frozen=True)
class PagedInputs:
    """Tensors of one call, shapes as in the docstring of the op."""

    q: Tensor
    q_scale: Tensor | None
    kv_cache: Tensor
    weights: Tensor
    context_lens: Tensor
    block_table: Tensor
    indices: Tensor | None

    def map(self, function: Callable[[Tensor], Tensor]) -> PagedInputs:
        """The same with the function's result for every tensor."""
        return PagedInputs(**{name: None if x is None else function(x) for name, x in vars(self).items()})


def paged_inside_of(case: PagedCase, inputs: PagedInputs) -> Tensor:
    """bool, shaped like the logits: the columns that lie in the context of their row."""
    lens = inputs.context_lens.cpu().long()
    if lens.dim() == 1:
        lens = lens[:, None] + torch.arange(case.next_n) - (case.next_n - 1)
    return torch.arange(case.width) < lens.flatten()[:, None]


def paged_schedule(case: PagedCase, inputs: PagedInputs, arch: str) -> Tensor:
    return deep_kernels.get_paged_mqa_logits_metadata(
        inputs.context_lens, case.block_kv, case.num_sms, inputs.indices, arch=arch
    )


def run_paged(
    case: PagedCase, inputs: PagedInputs, arch: str, *, schedule: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """The call itself, by way of get_paged_mqa_logits_metadata where the case asks for it."""
    if case.metadata and schedule is None:
        schedule = paged_schedule(case, inputs, arch)
    return deep_kernels.fp8_fp4_paged_mqa_logits(
        (inputs.q, inputs.q_scale),
        inputs.kv_cache,
        inputs.weights,
        inputs.context_lens,
        inputs.block_table,
        schedule,
        case.width,
        case.clean,
        case.logits_dtype,
        inputs.indices,
        out=out,
        arch=arch,
    )


def _paged_cases() -> list[PagedCase]:
    """All formats with all paddings of the head count; the rest of the fields goes round, head dims too."""
    floats = (torch.float32, torch.bfloat16, torch.float16)
    rows = ((1, "1d"), (2, "1d"), (1, "indices"), (3, "2d"), (4, "1d"), (1, "2d"), (5, "2d"))
    cases: list[PagedCase] = []
    for i, format in enumerate(FORMATS):
        for j, num_heads in enumerate((1, 8, 17, 32, 64, 128)):
            k = len(cases)
            next_n, lens = rows[k % len(rows)]
            head_dim = (32, 64, 128)[(i + j) % 3]
            cases.append(
                PagedCase(
                    batch=(3, 5, 1, 7)[(k + i) % 4] if next_n * num_heads < 128 else 2,
                    next_n=next_n,
                    max_len=(200, 65, 130, 16, 300)[k % 5],
                    num_heads=num_heads,
                    head_dim=64 if format == "mxfp4" and head_dim == 32 else head_dim,
                    format=format,
                    block_kv=(64, 16, 256, 32, 128)[(k + j) % 5],
                    weights_dtype=floats[(i + j) % 3],
                    logits_dtype=floats[(k // 3) % 2],
                    clean=k % 3 != 0,
                    lens=lens,
                    width=(210, 100, 301)[(k + j) % 3],
                    metadata=k % 2 == 0,
                    num_sms=(1, 3, 8)[(k + i) % 3],
                    seed=200 + k,
                )
            )
    return cases


PAGED_CASES = _paged_cases()
# Exponents that leave float32 between and within rows.
PAGED_SPREADS = [
    replace(PagedCase(batch=2, next_n=2, num_heads=8, width=90, max_len=90, seed=300), format=format, spread=spread)
    for format in ("mxfp8", "mxfp4")
    for spread in (0, 12, 24, 40, 127)
]
