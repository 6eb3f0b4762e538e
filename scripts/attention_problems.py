"""Inputs of flash_attn_fwd for its benchmark and its tuner, what their results must be, and the emulations worth a try.

Random inputs: zeros would draw less power and run faster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import deep_kernels as dk
from deep_kernels import _C

OP = "flash_attn_fwd"
_CHECKED_ROWS = 3
MAX_DEVIATION = {"bfloat16": 6e-3, "float16": 1e-3}  # relative, of some rows; P is rounded to the dtype
MAX_LSE_ERROR = 2e-4  # a polynomial is off by up to 8.6e-5

# (freq, res) of shares from 6% to all of them; which sets of elements these are depends on the fragment.
_EMULATIONS = ((32, 2), (20, 2), (16, 2), (10, 2), (8, 2), (6, 2), (14, 6), (4, 3), (10, 8), (2, 2))


@dataclass(frozen=True)
class Shape:
    batch: int
    num_q: int
    num_kv: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    causal: bool = False
    dtype: str = "bfloat16"

    @property
    def label(self) -> str:
        tokens = str(self.num_q) if self.num_q == self.num_kv else f"{self.num_q}/{self.num_kv}"
        words = [f"D{self.head_dim} {self.batch}x{tokens} H{self.num_q_heads}/{self.num_kv_heads}"]
        words += ["causal"] * self.causal + [self.dtype] * (self.dtype != "bfloat16")
        return " ".join(words)

    @property
    def heads_per_kv(self) -> int:
        return self.num_q_heads // self.num_kv_heads

    @property
    def flop(self) -> float:
        """Of the pairs that see each other, in both products; the diagonal counts half."""
        pairs = self.num_q * self.num_kv - (self.num_q**2 / 2 if self.causal else 0)
        return 4.0 * self.batch * self.num_q_heads * self.head_dim * pairs

    @property
    def num_bytes(self) -> int:
        """Every tensor once."""
        elements = 2 * self.num_q * self.num_q_heads + 2 * self.num_kv * self.num_kv_heads
        return 2 * self.batch * elements * self.head_dim

    def case(self, emulation: tuple[int, int] | None = None, num_splits: int | None = None) -> dict[str, str]:
        """Fields of `supported` and `prepare`."""
        fields: dict[str, Any] = {"dtype": self.dtype, "head_dim": self.head_dim, "causal": self.causal}
        fields |= {"num_q_heads": self.num_q_heads, "num_kv_heads": self.num_kv_heads, "num_kv": self.num_kv}
        fields |= words_of(emulation) | ({"num_splits": num_splits} if num_splits else {})
        return {name: str(value).lower() for name, value in fields.items()}

    def refusal(self, arch: str | None = None) -> str | None:
        """Why it cannot run, or None."""
        return dk.supported(OP, arch, **self.case())


@dataclass(frozen=True)
class Problem:
    q: Tensor  # [batch, num_q, num_q_heads, head_dim]
    k: Tensor  # [batch, num_kv, num_kv_heads, head_dim]
    v: Tensor  # as k


def make_problem(shape: Shape, device: str = "cuda", seed: int = 0) -> Problem:
    generator = torch.Generator(device).manual_seed(seed)
    dtype: torch.dtype = getattr(torch, shape.dtype)

    def normal(tokens: int, heads: int) -> Tensor:
        sizes = (shape.batch, tokens, heads, shape.head_dim)
        return torch.randn(sizes, device=device, generator=generator, dtype=dtype)

    keys, values = (normal(shape.num_kv, shape.num_kv_heads) for _ in range(2))
    return Problem(normal(shape.num_q, shape.num_q_heads), keys, values)


def words_of(emulation: tuple[int, int] | None) -> dict[str, Any]:
    """Keywords of a call; None leaves it to the table."""
    return {} if emulation is None else dict(zip(("ex2_emu_freq", "ex2_emu_res"), emulation, strict=True))


def call_of(
    shape: Shape,
    problem: Problem,
    emulation: tuple[int, int] | None = None,
    num_splits: int | None = None,
    arch: str | None = None,
) -> partial[Any]:
    return partial(
        dk.flash_attn_fwd,
        *(problem.q, problem.k, problem.v),
        causal=shape.causal,
        num_splits=num_splits,
        arch=arch,
        **words_of(emulation),
    )


# --- emulations --------------------------------------------------------------------------------------------


def arch_of_card() -> str:
    """Backend and target of calls that name none."""
    return ":".join(_C.arch_of_card(_C.device_facts(torch.cuda.current_device())[1]))


def emulations_of(shape: Shape, arch: str) -> dict[tuple[int, int], float]:
    """By (freq, res), from the least on, the share of the exponentials; of words that mean one set, the first."""
    found: dict[tuple[int, ...], tuple[tuple[int, int], float]] = {}
    for words in _EMULATIONS:
        choice = _C.ex2_choice(arch, shape.case(words))
        emulated = tuple(choice["emulated"])
        if emulated:
            found.setdefault(emulated, (words, len(emulated) / (choice["fragment"] * choice["num_fragments"])))
    return dict(sorted(found.values(), key=lambda one: one[1]))


def name_of(emulation: tuple[int, int]) -> str:
    return "{}/{}".format(*emulation)


# --- right results before times ----------------------------------------------------------------------------


def exact_rows(shape: Shape, problem: Problem, batch: int, head: int, rows: Tensor) -> tuple[Tensor, Tensor]:
    """out and lse of some queries of a head, in float64."""
    kv_head = head // shape.heads_per_kv
    q, k, v = (
        x.double() for x in (problem.q[batch, rows, head], problem.k[batch, :, kv_head], problem.v[batch, :, kv_head])
    )
    scores = q @ k.T * shape.head_dim**-0.5
    if shape.causal:
        keys = torch.arange(shape.num_kv, device=rows.device)
        scores.masked_fill_(keys > rows[:, None] + shape.num_kv - shape.num_q, -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def deviation_of(shape: Shape, problem: Problem, out: Tensor) -> float:
    """Of some rows of the first and the last head from float64, relative; the worst of the rows."""
    return max(
        float(((out[batch, rows, head].double() - exact).norm(dim=-1) / exact.norm(dim=-1)).max())
        for batch, head, rows, exact, _ in _checked(shape, problem)
    )


def lse_error_of(shape: Shape, problem: Problem, lse: Tensor) -> float:
    """Of the same rows; lse as the op returns it, [batch, num_q_heads, num_q]."""
    return max(
        float((lse[batch, head, rows].double() - exact).abs().max())
        for batch, head, rows, _, exact in _checked(shape, problem)
    )


def _checked(shape: Shape, problem: Problem) -> list[tuple[int, int, Tensor, Tensor, Tensor]]:
    rows = torch.linspace(0, shape.num_q - 1, _CHECKED_ROWS, device=problem.q.device).long()
    places = ((0, 0), (shape.batch - 1, shape.num_q_heads - 1))
    return [(*place, rows, *exact_rows(shape, problem, *place, rows)) for place in places]


def is_right(shape: Shape, deviation: float) -> bool:
    return deviation < MAX_DEVIATION[shape.dtype]  # NaN is not


def check(shape: Shape, problem: Problem, calls: Mapping[str, Callable[[], Tensor]]) -> dict[str, float]:
    """By name, the deviation from float64; raises where one is wrong, or is not what the first one gives everywhere."""
    deviations: dict[str, float] = {}
    first: Tensor | None = None
    for name, call in calls.items():
        out = call()
        deviations[name] = deviation_of(shape, problem, out)
        if first is None:
            first = out
        apart = float((out - first).norm() / first.norm())
        for words, deviation in (("", deviations[name]), (f" from {next(iter(calls))}", apart)):
            if not is_right(shape, deviation):
                raise RuntimeError(f"{shape.label}: wrong result of {name}, relative deviation{words} {deviation:.2e}")
    return deviations
