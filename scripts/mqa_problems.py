"""Inputs of fp8_fp4_mqa_logits for the benchmark scripts: random, since zeros would draw less power and run faster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

import deep_kernels as dk
from deep_kernels import formats

OP = "fp8_fp4_mqa_logits"
_BLOCK = 32  # elements of an MX block
_NUM_DOCUMENTS = 4  # of ragged windows


@dataclass(frozen=True)
class Shape:
    num_q: int
    num_kv: int
    num_heads: int
    head_dim: int
    logits: str = "float32"
    format: str = "fp8"
    windows: str = "causal"

    @property
    def label(self) -> str:
        short = {"float32": "f32", "bfloat16": "bf16"}[self.logits]
        words = [f"{self.num_q}/{self.num_kv} H{self.num_heads} D{self.head_dim} {short}"]
        words += [self.format] * (self.format != "fp8") + [self.windows] * (self.windows != "causal")
        return " ".join(words)

    def refusal(self, arch: str | None = None, **more: str) -> str | None:
        """Why it cannot run, or None; `more` are further fields of the case."""
        case = {"format": self.format, "num_heads": self.num_heads, "head_dim": self.head_dim}
        return dk.supported(OP, arch, **case, logits_dtype=self.logits, **more)


@dataclass(frozen=True)
class Problem:
    """The tensors of one call, in the order of its arguments."""

    q: Tensor
    q_scale: Tensor | None
    kv: Tensor
    kv_scale: Tensor
    weights: Tensor
    start: Tensor
    end: Tensor

    @property
    def logits_inside(self) -> int:
        return int((self.end - self.start).clamp(min=0).sum(dtype=torch.int64))


def windows_of(shape: Shape, device: str, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """int32 [num_q] starts and ends.

    causal: row i sees [0, N - M + i). parallel: the queries of one of N / M context-parallel ranks, to which the halves
    of a sequence of N tokens are dealt from both ends. ragged: the last queries of documents of many lengths, packed.
    """
    num_q, num_kv = shape.num_q, shape.num_kv
    row = torch.arange(num_q, dtype=torch.int32, device=device)
    if shape.windows == "causal":
        return torch.zeros_like(row), row + num_kv - num_q
    if shape.windows == "parallel":
        half, num_ranks = num_q // 2, num_kv // num_q
        rank = num_ranks // 3
        position = torch.where(row < half, rank * half + row, (2 * num_ranks - 2 - rank) * half + row)
        return torch.zeros_like(row), position + 1
    assert shape.windows == "ragged"
    lengths = torch.rand(_NUM_DOCUMENTS, device=device, generator=generator) + 0.2
    borders = torch.cat((lengths.new_zeros(1), (lengths / lengths.sum()).cumsum(0)))
    document = torch.searchsorted(borders[1:-1].contiguous(), (row + 0.5) / num_q)
    first, last = ((borders * num_kv).int()[document + i] for i in (0, 1))
    queries_left = (borders * num_q).int()[document + 1] - row
    return first, torch.maximum(last - queries_left.clamp(min=0), first + 1).int()


def make_problem(shape: Shape, device: str = "cuda", seed: int = 0) -> Problem:
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, device=device, generator=generator)

    q_float = normal(shape.num_q, shape.num_heads, shape.head_dim)
    kv_float = normal(shape.num_kv, shape.head_dim)
    q_scale = None
    if shape.format == "fp8":
        q = q_float.to(torch.float8_e4m3fn)
        kv, kv_scale = formats.quantize_fp8(kv_float)
    else:
        quantize = getattr(formats, f"quantize_{shape.format}")
        q, q_scale = quantize(with_block_factors(q_float, generator))
        kv, kv_scale = quantize(with_block_factors(kv_float, generator))
    weights = normal(shape.num_q, shape.num_heads)
    return Problem(q, q_scale, kv, kv_scale, weights, *windows_of(shape, device, generator))


def with_block_factors(x: Tensor, generator: torch.Generator) -> Tensor:
    """What ordinary MX data is: each block of 32 times a power of two from 2^-4 to 2^4."""
    size = (*x.shape[:-1], x.shape[-1] // _BLOCK)
    exponent = torch.randint(-4, 5, size, device=x.device, generator=generator, dtype=torch.int32)
    return x * torch.exp2(exponent.float()).repeat_interleave(_BLOCK, dim=-1)


def call_of(shape: Shape, problem: Problem, arch: str | None = None) -> Callable[..., Tensor]:
    """The op with everything but clean_logits, schedule_meta and reduction filled in."""
    return partial(
        dk.fp8_fp4_mqa_logits,
        (problem.q, problem.q_scale),
        (problem.kv, problem.kv_scale),
        problem.weights,
        problem.start,
        problem.end,
        logits_dtype=getattr(torch, shape.logits),
        arch=arch,
    )


def metadata_of(shape: Shape, problem: Problem, arch: str | None = None) -> Tensor:
    return dk.get_mqa_logits_metadata(problem.start, problem.end, shape.num_kv, shape.num_heads, arch=arch)


def dequantized(values: Tensor, scale: Tensor | None, format: str) -> Tensor:
    """float64; fp8 values as they are, without a scale."""
    if format == "fp8":
        return values.double()
    x: Tensor = getattr(formats, f"dequantize_{format}")(values, scale)
    return x.double()
