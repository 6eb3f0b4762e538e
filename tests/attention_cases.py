"""Cases of flash attention: what a call looks like, its inputs, and calling the public functions with them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise as neighbours
from typing import Any

import oracle
import pytest
import torch
from conftest import Backend
from mqa_cases import assert_same_bits, inside_larger, word
from pairwise import pairwise
from torch import Tensor

import deep_kernels as dk

OP, VARLEN = "flash_attn_fwd", "flash_attn_varlen_fwd"
DTYPES = (torch.bfloat16, torch.float16)
HEAD_DIMS = (64, 128, 256)
HEADS = ((1, 1), (4, 4), (4, 1), (16, 1), (12, 3), (7, 7))  # of queries, of keys
LAYOUTS = ("rows", "heads-first", "strided")
# Off, half of the pairs, the seed's nominal 43%, all pairs but for the first fragment, all.
EMULATIONS = (None, (0, 0), (4, 3), (14, 6), (2, 2, 1), (1, 1))

# Worst relative error of an emulated exponential, and of a P that a card rounds for the second product.
EMULATED_ERROR = {torch.bfloat16: 8.6e-5, torch.float16: 3.0e-6}
ROUNDED_P = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def with_kernels(backend: Backend) -> Backend:
    """The backend, or a skip with the reason why it does not run the op."""
    if reason := dk.supported(OP, arch=backend.supported_arch):
        pytest.skip(reason)
    return backend


@dataclass(frozen=True)
class Case:
    batch: int = 2
    num_q: int = 37
    num_kv: int = 300
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 64
    dtype: torch.dtype = torch.bfloat16
    causal: bool = False
    scale: float | None = None
    layout: str = "rows"  # heads-first: permuted; strided: views into larger tensors of 0xff bytes
    out: bool = False
    ex2: tuple[int, ...] | None = None
    num_splits: int | None = 1
    seed: int = 0

    def __str__(self) -> str:
        words = [f"b{self.batch}", f"q{self.num_q}", f"k{self.num_kv}", "h{}-{}".format(*self.heads)]
        words += [f"d{self.head_dim}", word(self.dtype), self.layout]
        words += ["causal"] * self.causal + ["out"] * self.out
        words += [f"ex2-{'-'.join(map(str, self.ex2))}"] if self.ex2 else []
        words += [f"scale{self.scale}"] if self.scale else []
        return "-".join([*words, f"splits{self.num_splits}"])

    @property
    def options(self) -> dict[str, Any]:
        return {
            "causal": self.causal,
            "softmax_scale": self.scale,
            "num_splits": self.num_splits,
            **emulation(self.ex2),
        }


def emulation(ex2: tuple[int, ...] | None) -> dict[str, int]:
    """Keywords of a call."""
    return dict(zip(("ex2_emu_freq", "ex2_emu_res", "ex2_emu_start_frg"), ex2 or (), strict=False))


SWEEP = [
    Case(**row, seed=seed)
    for seed, row in enumerate(
        pairwise(
            {
                "batch": (1, 3),
                "num_q": (1, 5, 64, 130),
                "num_kv": (0, 1, 127, 128, 129, 300),
                "heads": HEADS,
                "head_dim": HEAD_DIMS,
                "dtype": DTYPES,
                "causal": (False, True),
                "scale": (None, 0.3),
                "layout": LAYOUTS,
                "out": (False, True),
                "ex2": EMULATIONS,
                "num_splits": (1, 3, None),
            }
        )
    )
]


# ------------------------------------------------------------------------------------------ inputs


@dataclass(frozen=True)
class Inputs:
    q: Tensor  # [batch, num_q, heads, head_dim], or without the batch
    k: Tensor
    v: Tensor

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v

    def clone(self) -> Inputs:
        return Inputs(*(x.clone() for x in self.tensors()))

    def member(self, index: int) -> Inputs:
        return Inputs(*(x[index] for x in self.tensors()))


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same values in other strides."""
    if layout == "heads-first":
        return x.transpose(-3, -2).contiguous().transpose(-3, -2)
    if layout == "strided":
        lead = (1,) * (x.dim() - 3)
        return inside_larger(x, (*lead, 2, 1, 8), (*lead, 1, 2, 16))
    return x


def make_inputs(case: Case, device: str) -> Inputs:
    """Keys that grow along the row, so that maxima rise by far more than 2^8 on the way, and a few large values."""
    generator = torch.Generator().manual_seed(case.seed)
    num_q_heads, num_kv_heads = case.heads

    def normal(tokens: int, heads: int) -> Tensor:
        return torch.randn(case.batch, tokens, heads, case.head_dim, generator=generator)

    q, k, v = normal(case.num_q, num_q_heads), normal(case.num_kv, num_kv_heads), normal(case.num_kv, num_kv_heads)
    k = k * (0.3 + 3 * torch.arange(case.num_kv) / max(case.num_kv, 1))[None, :, None, None]
    v[:, ::17] *= 30
    return Inputs(*(laid_out(x.to(case.dtype).to(device), case.layout) for x in (q, k, v)))


class GuardedOut:
    """Where a call may write: rows within a larger tensor whose other elements must stay as they are."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
        lead = shape[:-3]
        tokens, heads, dim = shape[-3:]
        self.storage = torch.full((*lead, tokens + 3, heads + 1, dim + 24), 7.0, dtype=dtype, device=device)
        self.view = self.storage[..., 1 : tokens + 1, :heads, 8 : 8 + dim]

    def check(self, result: Tensor) -> None:
        """The result is this one, and nothing beside it was written."""
        assert result is self.view
        self.view.fill_(7.0)
        assert (self.storage == 7.0).all(), "written beside the result"


# ------------------------------------------------------------------------------------------ calls


def attend(backend: Backend, inputs: Inputs, **options: Any) -> tuple[Tensor, Tensor]:
    out, lse = dk.flash_attn_fwd(*inputs.tensors(), return_lse=True, arch=backend.arch, **options)
    return out, lse


def run_case(backend: Backend, case: Case, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """The call of a case; a copy of what went into a guarded `out`."""
    if not case.out:
        return attend(backend, inputs, **case.options)
    guard = GuardedOut(tuple(inputs.q.shape), case.dtype, backend.device)
    out, lse = attend(backend, inputs, out=guard.view, **case.options)
    result = out.clone()
    guard.check(out)
    return result, lse


@dataclass(frozen=True)
class Packed:
    """Members one after the other; tokens behind the last one are nobody's."""

    inputs: Inputs
    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int

    def members(self) -> list[tuple[slice, slice]]:
        return [
            (slice(q0, q1), slice(k0, k1))
            for (q0, q1), (k0, k1) in zip(neighbours(self.cu_q.tolist()), neighbours(self.cu_k.tolist()), strict=True)
        ]

    def member(self, q: slice, kv: slice) -> Inputs:
        """One member as a batch of its own."""
        return Inputs(self.inputs.q[None, q], self.inputs.k[None, kv], self.inputs.v[None, kv])


def pack(case: Case, lengths: list[tuple[int, int]], device: str, behind: int = 0) -> Packed:
    """Members of (num_q, num_kv) tokens; `behind` tokens follow the last one."""
    total_q, total_kv = (sum(one) + behind for one in zip(*lengths, strict=True))
    inputs = make_inputs(replace(case, batch=1, num_q=total_q, num_kv=total_kv), device).member(0)
    cu_q, cu_k = (
        torch.tensor([0, *torch.tensor(one).cumsum(0).tolist()], dtype=torch.int32, device=device)
        for one in zip(*lengths, strict=True)
    )
    return Packed(inputs, cu_q, cu_k, max(q for q, _ in lengths), max(kv for _, kv in lengths))


def attend_packed(backend: Backend, packed: Packed, **options: Any) -> tuple[Tensor, Tensor]:
    arguments = (*packed.inputs.tensors(), packed.cu_q, packed.cu_k, packed.max_q, packed.max_k)
    out, lse = dk.flash_attn_varlen_fwd(*arguments, return_lse=True, arch=backend.arch, **options)
    return out, lse


# ------------------------------------------------------------------------------------------ what is right


def fragments(backend: Backend, head_dim: int, causal: bool) -> tuple[int, int, int]:
    """Keys of a tile, elements of a thread's fragment of a row of it, and how many fragments, as the docs have them."""
    if backend.name == "cpu":
        return 128, 32, 4
    if "sm90" in backend.name:
        tile = {64: 128, 128: 80, 256: 64 if causal else 80}[head_dim]
    else:
        tile = 32 if head_dim == 256 else 64
    return tile, tile // 4, 1


def is_emulated(freq: int, res: int, start: int, k: int, fragment: int, count: int) -> bool:
    """The rule in words: pairs by their even index; neither the last of several fragments nor one before start."""
    if freq == 0 or fragment < start:
        return False
    if count > 1 and fragment == count - 1:
        return False
    return (k - k % 2) % freq >= freq - res


def bounds(backend: Backend, case: Case, exact: oracle.Attention) -> tuple[oracle.Bounded, oracle.Bounded]:
    """out and lse of one member, and how far off they may be."""
    # A score is off by the sum's rounding, and by that of the subtraction: as a share of its power.
    share = 2.0**-21 * exact.reach.nan_to_num(0, 0, 0) + 2.0**-21
    if case.ex2 and case.ex2[1] > 0:
        share = share + EMULATED_ERROR[case.dtype]
    lse = oracle.Bounded(exact.lse, 2 * share + 2.0**-22 * exact.lse.abs().nan_to_num(0, 0, 0))
    if backend.device != "cpu" or backend.arch is not None:
        share = share + ROUNDED_P[case.dtype]
    unit = torch.finfo(case.dtype).eps / 2
    error = 2 * share.T[..., None] * exact.weight + unit * (1 + unit) * exact.out.abs()
    smallest = torch.finfo(case.dtype).smallest_normal * unit
    return oracle.Bounded(exact.out, error + smallest), lse


def check(backend: Backend, case: Case, inputs: Inputs, result: tuple[Tensor, Tensor]) -> None:
    """Requires out and lse of a dense batch to be right."""
    out, lse = result
    assert out.dtype == inputs.q.dtype and out.shape == inputs.q.shape
    assert lse.dtype == torch.float32 and lse.shape == (out.shape[0], out.shape[2], out.shape[1])
    scale = case.scale or case.head_dim**-0.5
    for index in range(out.shape[0]):
        exact = oracle.attention(*inputs.member(index).tensors(), case.causal, scale)
        wanted_out, wanted_lse = bounds(backend, case, exact)
        oracle.assert_bounded(out[index], wanted_out)
        oracle.assert_bounded(lse[index], wanted_lse)


# ------------------------------------------------------------------------------------------ chosen scores

LN2 = 0.6931471805599453  # as softmax_scale: scores are then exponents of 2


def chosen_scores(scores: Tensor, values: Tensor, dtype: torch.dtype, device: str) -> Inputs:
    """One head whose query i has the score scores[i, j] for key j of at most 128: keys are unit vectors."""
    num_q, num_kv = scores.shape
    q = torch.zeros(1, num_q, 1, 128)
    q[0, :, 0, :num_kv] = scores
    k = torch.eye(128)[:num_kv].view(1, num_kv, 1, 128)
    return Inputs(*(x.to(dtype).to(device) for x in (q, k, values.view(1, num_kv, 1, 128))))


def check_jumps(backend: Backend, dtype: torch.dtype, ex2: tuple[int, ...] | None, first: bool) -> None:
    """Rows whose scores lie far from those of their first or last keys, which a kernel meets before the others: small
    ones must not be lost in the difference. Of some rows all are below 0. Rows are as they would be alone."""
    jumps = torch.tensor([7.5, 8.5, 64.0, 992.0, 1024.0, 1032.0, 1040.0, 3008.0, 32768.0])
    one = torch.cat((torch.full((18,), 2.0**-11), torch.tensor([-40.0, -20.0, -400.0, -12.0, -9.0, -7.5, -1000.0])))
    last = torch.cat((jumps, -jumps, torch.tensor([-20.0, -40.0, -392.0, -9.0, -12.0, -0.5, -100.0])))
    scores = one[:, None].repeat(1, 128)
    scores[:, 48:] = -60000.0  # both dtypes have it
    scores[:, 100:] = last[:, None]
    if first:
        scores = scores.flip(1)
    values = torch.linspace(-1, 1, 128).to(dtype)[:, None].expand(128, 128)
    inputs = chosen_scores(scores, values.float(), dtype, backend.device)
    options = {"softmax_scale": LN2, **emulation(ex2)}
    out, lse = attend(backend, inputs, **options)
    exact = scores.to(dtype).double() * LN2
    wanted = exact.logsumexp(1)
    lost = EMULATED_ERROR[dtype] if ex2 else 0.0
    assert ((lse[0, 0].double().cpu() - wanted).abs() <= lost + 2e-6 + 2.0**-22 * wanted.abs()).all()
    wanted = exact.softmax(1) @ values.double()
    assert ((out[0, :, 0].double().cpu() - wanted).abs() <= lost + 2 * torch.finfo(dtype).eps).all()
    for i in range(len(last)):
        alone = attend(backend, replace(inputs, q=inputs.q[:, i : i + 1]), **options)
        assert_same_bits(alone[0], out[:, i : i + 1])
        assert_same_bits(alone[1], lse[..., i : i + 1])


def check_negative(backend: Backend, dtype: torch.dtype) -> None:
    """Scores that all are below 0, beside keys that do not exist."""
    scores = -3.0 - ((7 * torch.arange(48)[:, None] + 5 * torch.arange(100)) % 11).float()
    values = torch.linspace(-1, 1, 100).to(dtype)[:, None].expand(100, 128)
    out, lse = attend(backend, chosen_scores(scores, values.float(), dtype, backend.device), softmax_scale=LN2)
    exact = scores.double() * LN2
    assert ((lse[0, 0].double().cpu() - exact.logsumexp(1)).abs() <= 4e-6).all()
    wanted = exact.softmax(1) @ values.double()
    assert ((out[0, :, 0].double().cpu() - wanted).abs() <= 2 * torch.finfo(dtype).eps).all()


def emulated_keys(backend: Backend, dtype: torch.dtype, rule: tuple[int, ...]) -> list[bool]:
    """Which of 128 keys have an emulated power. Query j has one, of an exponent where the polynomials are off, at key j
    beside one of 0 at the other key of the pair; lse shows which it was."""
    exponent = {torch.bfloat16: -0.5546875, torch.float16: -0.93408203125}[dtype]
    scores = torch.full((128, 128), -3000.0)
    scores[torch.arange(128), torch.arange(128) ^ 1] = 0.0
    scores.fill_diagonal_(exponent)
    inputs = chosen_scores(scores, torch.ones(128, 128), dtype, backend.device)
    _, lse = attend(backend, inputs, softmax_scale=LN2, **emulation(rule))
    off = (lse[0, 0].double().cpu() - math.log1p(2.0**exponent)).abs()
    return [bool(x) for x in off > EMULATED_ERROR[dtype] / 8]


def keys_by_rule(backend: Backend, rule: tuple[int, int, int]) -> list[bool]:
    """The same by the rule in words."""
    tile, length, count = fragments(backend, 128, causal=False)
    if backend.name == "cpu":
        return [is_emulated(*rule, j % length, j // length, count) for j in range(128)]
    # Two neighbours of every eight columns belong to a thread.
    return [is_emulated(*rule, j % tile // 8 * 2 + j % 2, 0, count) for j in range(128)]
