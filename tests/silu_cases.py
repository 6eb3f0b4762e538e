"""Cases of the FP8 prefill MLP: what a call looks like, its inputs, and calling the public functions with them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import oracle
import torch
from conftest import Backend
from mqa_cases import inside_larger, word
from pairwise import pairwise
from torch import Tensor

import deep_kernels as dk
from deep_kernels import formats

Pair = tuple[Tensor, Tensor]

ACTIVATIONS: dict[str, dict[str, Any]] = {
    "silu": {},
    "clamped": {"clamp": 2.5},
    "oss": {"clamp": 7.0, "alpha": 1.702, "up_offset": 1.0},
    "gelu": {"activation": "gelu_tanh"},
    "gelu-clamped": {"activation": "gelu_tanh", "clamp": 1.5, "up_offset": -0.5},
}
LAYOUTS = ("rows", "columns", "strided")

# Of rows of x, and of gate and up blocks: orders apart, with many sums near 1, where activations bend. The blocks of
# k differ less, so that each of them is seen in the sums.
ROW_FACTORS = (1.0, 1e-2, 3.0, 0.2, 1e3)
GATE_FACTORS = (1.0, 0.1, 4.0)
UP_FACTORS = (1.0, 1e-3, 1e3, 0.03)
K_FACTORS = (1.0, 0.25, 2.0)


@dataclass(frozen=True)
class Case:
    num_tokens: int = 37
    k: int = 272
    num_columns: int = 272
    activation: str = "silu"
    round_bf16: bool = True
    scale_fmt: str = "fp32"
    w_scale_dtype: torch.dtype = torch.float32
    layout: str = "rows"  # of the scales; strided: every tensor a view into a larger one of 0xff bytes
    out: bool = False
    seed: int = 0

    def __str__(self) -> str:
        words = [f"m{self.num_tokens}", f"k{self.k}", f"i{self.num_columns}", self.activation, self.scale_fmt]
        words += [word(self.w_scale_dtype), self.layout]
        words += ["out"] * self.out + ["unrounded"] * (not self.round_bf16)
        return "-".join(words)

    @property
    def options(self) -> dict[str, Any]:
        """Keywords that the fold and silu_mul_to_fp8_block128 share."""
        return {**ACTIVATIONS[self.activation], "scale_fmt": self.scale_fmt}

    @property
    def value_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.round_bf16 else torch.float32


SWEEP = [
    Case(**row, seed=seed)
    for seed, row in enumerate(
        pairwise(
            {
                "num_tokens": (0, 1, 31, 127, 129, 192, 300),
                "k": (16, 128, 144, 496, 512),
                "num_columns": (16, 128, 144, 272, 384),
                "activation": tuple(ACTIVATIONS),
                "round_bf16": (True, False),
                "scale_fmt": formats.SCALE_FORMATS,
                "w_scale_dtype": (torch.float32, torch.bfloat16),
                "layout": LAYOUTS,
                "out": (False, True),
            }
        )
    )
]


# ------------------------------------------------------------------------------------------ inputs


@dataclass(frozen=True)
class Inputs:
    """The tensors of the fold, in the order of the op."""

    x: Tensor
    x_scale: Tensor
    w: Tensor  # gate rows, then up rows
    w_scale: Tensor

    @property
    def num_columns(self) -> int:
        return self.w.shape[0] // 2

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.x, self.x_scale, self.w, self.w_scale

    def rows(self, part: slice) -> Inputs:
        return replace(self, x=self.x[part], x_scale=self.x_scale[part])

    def half(self, index: int) -> Pair:
        """Gate or up rows of w with their scales."""
        n, blocks = self.num_columns, self.w_scale.shape[0] // 2
        return self.w[index * n : (index + 1) * n], self.w_scale[index * blocks : (index + 1) * blocks]

    def to(self, device: str) -> Inputs:
        return Inputs(*(tensor.to(device) for tensor in self.tensors()))

    def clone(self) -> Inputs:
        return Inputs(*(tensor.clone() for tensor in self.tensors()))


def factors_of(factors: tuple[float, ...], size: int, per: int = 1) -> Tensor:
    """[size]: one factor in turn for every `per` elements."""
    return torch.tensor(factors)[torch.arange(size) // per % len(factors)]


def make_x(case: Case, generator: torch.Generator) -> Pair:
    x = torch.randn(case.num_tokens, case.k, generator=generator) / case.k**0.5
    x = x * factors_of(ROW_FACTORS, case.num_tokens)[:, None] * factors_of(K_FACTORS, case.k, 128)
    return formats.quantize_fp8_block128(x)


def make_half(case: Case, factors: tuple[float, ...], generator: torch.Generator) -> Pair:
    w = torch.randn(case.num_columns, case.k, generator=generator)
    w = w * factors_of(factors, case.num_columns, 128)[:, None] * factors_of(K_FACTORS[::-1], case.k, 128)
    values, scale = formats.quantize_fp8_128x128(w)
    return values, scale.to(case.w_scale_dtype)


def laid_out(inputs: Inputs, layout: str) -> Inputs:
    """The same values in other strides."""
    if layout == "rows":
        return inputs
    if layout == "columns":
        x_scale, w_scale = (scale.T.contiguous().T for scale in (inputs.x_scale, inputs.w_scale))
        return replace(inputs, x_scale=x_scale, w_scale=w_scale)
    return Inputs(
        inside_larger(inputs.x, (1, 16), (0, 48)),
        inside_larger(inputs.x_scale.unsqueeze(2), (0, 1, 1), (1, 2, 2)).squeeze(2),
        inside_larger(inputs.w, (2, 32), (1, 16)),
        inside_larger(inputs.w_scale.unsqueeze(2), (1, 0, 2), (0, 3, 1)).squeeze(2),
    )


def make_inputs(case: Case, device: str) -> Inputs:
    generator = torch.Generator().manual_seed(case.seed)
    x, x_scale = make_x(case, generator)
    gate, gate_scale = make_half(case, GATE_FACTORS, generator)
    up, up_scale = make_half(case, UP_FACTORS, generator)
    w = torch.cat((gate.view(torch.uint8), up.view(torch.uint8))).view(gate.dtype)
    inputs = Inputs(x, x_scale, w, torch.cat((gate_scale, up_scale))).to(device)
    return laid_out(inputs, case.layout)


def make_gate_up(case: Case, device: str) -> Tensor:
    """bfloat16 [num_tokens, 2 * num_columns] whose rows and blocks are orders apart."""
    generator = torch.Generator().manual_seed(case.seed)
    gate = torch.randn(case.num_tokens, case.num_columns, generator=generator) * 3
    up = torch.randn(case.num_tokens, case.num_columns, generator=generator)
    up = up * factors_of(ROW_FACTORS, case.num_tokens)[:, None] * factors_of(UP_FACTORS, case.num_columns, 128)
    return torch.cat((gate, up), dim=1).bfloat16().to(device)


class GuardedOut:
    """Where a call may write: rows within larger ones whose other bytes must stay as they are."""

    FILL = 0x5A

    def __init__(self, case: Case, device: str) -> None:
        blocks = -(-case.num_columns // 128)
        scale_dtype = torch.float32 if case.scale_fmt == "fp32" else torch.float8_e8m0fnu
        self.storages: list[Tensor] = []
        self.pair = (
            self._view(case.num_tokens, case.num_columns, torch.float8_e4m3fn, device),
            self._view(case.num_tokens, blocks, scale_dtype, device),
        )

    def _view(self, num_rows: int, num_columns: int, dtype: torch.dtype, device: str) -> Tensor:
        size = dtype.itemsize
        storage = torch.full((num_rows + 2, (num_columns + 48) * size), self.FILL, dtype=torch.uint8, device=device)
        self.storages.append(storage)
        return storage.view(dtype)[1 : num_rows + 1, 16 : 16 + num_columns]

    def check(self, result: Pair) -> None:
        """The result is this one, and nothing beside it was written."""
        for storage, view, returned in zip(self.storages, self.pair, result, strict=True):
            assert returned is view
            view.view(torch.uint8).fill_(self.FILL)
            assert (storage == self.FILL).all(), "written beside the result"


# ------------------------------------------------------------------------------------------ calls


def fold(backend: Backend, inputs: Inputs, **options: Any) -> Pair:
    return dk.fp8_silu_fold_prefill(*inputs.tensors(), arch=backend.arch, **options)


def run_case(backend: Backend, case: Case, inputs: Inputs, **options: Any) -> Pair:
    """The fold as the case asks for it; copies of what went into a guarded `out`."""
    options = {**case.options, "round_bf16": case.round_bf16, **options}
    if not case.out:
        return fold(backend, inputs, **options)
    guard = GuardedOut(case, backend.device)
    result = fold(backend, inputs, out=guard.pair, **options)
    y, y_scale = (part.clone() for part in result)
    guard.check(result)
    return y, y_scale


def block_gemm(backend: Backend, x: Pair, w: Pair, *args: Any, **options: Any) -> Tensor:
    return dk.fp8_block_gemm_nt(*x, *w, *args, arch=backend.arch, **options)


def silu_mul(backend: Backend, gate_up: Tensor, **options: Any) -> Pair:
    return dk.silu_mul_to_fp8_block128(gate_up, arch=backend.arch, **options)


def two_launches(backend: Backend, inputs: Inputs, **options: Any) -> Pair:
    """What fused=False stands for, written out: gate and up by GEMMs of their own."""
    x = (inputs.x, inputs.x_scale)
    gate_up = torch.cat([block_gemm(backend, x, inputs.half(index)) for index in (0, 1)], dim=1)
    return silu_mul(backend, gate_up, **options)


# ------------------------------------------------------------------------------------------ what is right


def sum_error(backend: Backend) -> float:
    """How far sums of products may be off, as a share of the sum of magnitudes."""
    if backend.device == "cpu" and backend.arch is None:
        return 2.0**-20  # float32
    # FP8 tensor cores cut each product and each sum to 13 bits below the largest, of which there may be several in a
    # sum that cancels. Hopper has none for mma.sync, whose codes become float16: exact to 23 bits.
    is_hopper = backend.device == "cpu" or torch.cuda.get_device_capability() == (9, 0)
    return 2.0**-18 if "sm89" in str(backend.arch) and is_hopper else 3 * 2.0**-11


def expected(backend: Backend, case: Case, inputs: Inputs, *, rounds_sums: bool = False) -> oracle.Bounded:
    """v of the fold; of the two launches where the sums are rounded to bfloat16."""
    gate, up = oracle.gate_and_up(*inputs.tensors(), error=sum_error(backend))
    if rounds_sums:
        gate, up = (oracle.residual_sum(acc, None, torch.bfloat16) for acc in (gate, up))
    return oracle.gated_product(gate, up, **ACTIVATIONS[case.activation], dtype=case.value_dtype)


def exactly(values: Tensor) -> oracle.Bounded:
    """Inputs that are what they are."""
    value = values.detach().cpu().double()
    return oracle.Bounded(value, torch.zeros_like(value))


def expected_of(case: Case, gate_up: Tensor) -> oracle.Bounded:
    """v of silu_mul_to_fp8_block128."""
    gate, up = (exactly(half) for half in gate_up.chunk(2, dim=1))
    return oracle.gated_product(gate, up, **ACTIVATIONS[case.activation])


def assert_same_pair(actual: Pair, wanted: Pair) -> None:
    """Requires the same dtypes, shapes and bits."""
    for name, one, other in zip(("codes", "scales"), actual, wanted, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape), name
        differs = one.contiguous().view(torch.uint8).cpu() != other.contiguous().view(torch.uint8).cpu()
        assert not differs.any(), f"{name}: {int(differs.sum())} bytes differ, first {differs.nonzero()[0].tolist()}"
