"""Cases of MQA logits: what a call looks like, its inputs, and calling the public function with them."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import oracle
import pytest
import torch
from conftest import Backend
from pairwise import pairwise
from torch import Tensor

import deep_kernels as dk
from deep_kernels import formats

OP = "fp8_fp4_mqa_logits"
MODES = ("clean", "unclean", "compressed", "compressed-unclean")
WINDOWS = ("full", "causal", "ragged", "parallel", "packed")
INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1


@dataclass(frozen=True)
class Case:
    num_q: int = 17
    num_kv: int = 260
    num_heads: int = 24
    head_dim: int = 64
    format: str = "fp8"
    weights_dtype: torch.dtype = torch.float32
    logits_dtype: torch.dtype = torch.float32
    mode: str = "clean"
    windows: str = "ragged"
    metadata: bool = False
    strided: bool = False  # every tensor a view into a larger one whose other bytes are all 0xff
    unpacked_scale: bool = False  # MX scales as float8_e8m0fnu instead of int32
    seed: int = 0

    def __str__(self) -> str:
        words = [self.format, f"q{self.num_q}", f"k{self.num_kv}", f"h{self.num_heads}", f"d{self.head_dim}"]
        words += [word(self.weights_dtype), word(self.logits_dtype), self.mode, self.windows]
        words += [name for name in ("metadata", "strided", "unpacked_scale") if getattr(self, name)]
        return "-".join(words)

    @property
    def clean(self) -> bool:
        return not self.mode.endswith("unclean")

    @property
    def width(self) -> int:
        """The max_seqlen_k of the call: 0, or one that cuts the longest windows off in every other case."""
        if not self.mode.startswith("compressed"):
            return 0
        return max(1, self.num_kv if self.seed % 2 else self.num_kv // 2)


FACTORS = {
    "num_q": (0, 1, 3, 17, 127, 129),
    "num_kv": (0, 1, 4, 127, 257, 260, 4100),
    "num_heads": (1, 7, 8, 16, 17, 24, 32, 40, 64, 100, 128),
    "head_dim": (32, 64, 128),
    "format": formats.FORMATS,
    "weights_dtype": (torch.float32, torch.bfloat16, torch.float16),
    "logits_dtype": (torch.float32, torch.bfloat16),
    "mode": MODES,
    "windows": WINDOWS,
    "metadata": (False, True),
    "strided": (False, True),
    "unpacked_scale": (False, True),
}
SWEEP = [Case(**row, seed=seed) for seed, row in enumerate(pairwise(FACTORS))]


def word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ------------------------------------------------------------------------------------------ inputs


@dataclass(frozen=True)
class Inputs:
    """The tensors of one call, in the order of the flat op."""

    q: Tensor
    q_scale: Tensor | None
    kv: Tensor
    kv_scale: Tensor
    weights: Tensor
    start: Tensor
    end: Tensor

    @property
    def format(self) -> str:
        if self.q_scale is None:
            return "fp8"
        return "mxfp8" if self.q.dtype == torch.float8_e4m3fn else "mxfp4"

    @property
    def head_dim(self) -> int:
        return self.q.shape[2] * (2 if self.format == "mxfp4" else 1)

    def tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in vars(self).items() if value is not None}

    def rows(self, index: slice | Tensor) -> Inputs:
        """The same call for some of the query tokens."""
        q_scale = None if self.q_scale is None else self.q_scale[index]
        picked = {name: getattr(self, name)[index] for name in ("weights", "start", "end")}
        # float8 tensors cannot be indexed by a tensor on every backend; bytes can.
        return replace(self, q=self.q.view(torch.uint8)[index].view(self.q.dtype), q_scale=q_scale, **picked)


def windows_of(kind: str, num_q: int, num_kv: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """int32 [num_q] starts and ends."""
    row = torch.arange(num_q, dtype=torch.int32)
    if kind == "full":
        return torch.zeros_like(row), torch.full_like(row, num_kv)
    if kind == "causal":  # the last query sees everything
        return torch.zeros_like(row), row + (num_kv - num_q + 1)
    if kind == "ragged":  # also empty, reversed, before 0 and past the end
        start = torch.randint(-5, num_kv + 5, (num_q,), generator=generator, dtype=torch.int32)
        end = torch.randint(-5, num_kv + 9, (num_q,), generator=generator, dtype=torch.int32)
        if num_q > 1:
            start[num_q // 2], end[num_q // 2] = INT32_MIN, INT32_MAX
        return start, end
    if kind == "packed":  # the last queries of three documents: query blocks cross the borders between them
        length = num_kv // 3
        start = row * 3 // max(num_q, 1) * length
        return start.int(), (start + length - num_q + row).int()
    # One rank's share of two packed sequences whose halves are dealt to the ranks from both ends.
    assert kind == "parallel"
    sequence = (row >= num_q // 2).to(torch.int32)
    length = max(num_kv // 2, 1)
    position = torch.where(row % 2 == 0, row, length - 1 - row).clamp(0, length - 1)
    return sequence * length, sequence * length + position + 1


def inside_larger(x: Tensor, before: tuple[int, ...], after: tuple[int, ...]) -> Tensor:
    """A view with the values of x, `before` and `after` elements away from the edges of a tensor of 0xff bytes."""
    padded = [b + size + a for b, size, a in zip(before, x.shape, after, strict=True)]
    bytes_ = torch.full((*padded[:-1], padded[-1] * x.element_size()), 0xFF, dtype=torch.uint8, device=x.device)
    view = bytes_.view(x.dtype)[tuple(slice(b, b + size) for b, size in zip(before, x.shape, strict=True))]
    # Bytes, since copy_ does not know every dtype; stride 1 in the last dimension survives.
    view.view(torch.uint8).copy_(x.contiguous().view(torch.uint8))
    return view


def strided(inputs: Inputs) -> Inputs:
    """The same values with strides as odd as the contract allows."""
    sixteen = 16 // inputs.q.element_size()
    changed: dict[str, Tensor] = {
        "q": inside_larger(inputs.q, (0, 1, sixteen), (0, 2, 3 * sixteen)),
        "kv": inside_larger(inputs.kv, (1, sixteen), (0, 2 * sixteen)),
        "weights": inside_larger(inputs.weights, (0, 1), (0, 4)),
        "start": torch.stack((inputs.start, inputs.end), dim=1)[:, 0],
        "end": torch.stack((inputs.start, inputs.end, inputs.start), dim=1)[:, 1],
    }
    if inputs.format == "fp8":  # the one scale that must be contiguous; it may start anywhere
        changed["kv_scale"] = inside_larger(inputs.kv_scale, (1,), (2,))
    elif inputs.kv_scale.dtype == torch.int32:
        changed["q_scale"] = inside_larger(inputs.q_scale.unsqueeze(2), (0, 1, 1), (0, 0, 1)).squeeze(2)
        changed["kv_scale"] = inside_larger(inputs.kv_scale.unsqueeze(1), (0, 1), (0, 2)).squeeze(1)
    else:
        changed["q_scale"] = inside_larger(inputs.q_scale, (0, 1, 1), (0, 0, 2))
        changed["kv_scale"] = inside_larger(inputs.kv_scale, (0, 1), (0, 3))
    return replace(inputs, **changed)


def unpack_scale(scale: Tensor, head_dim: int) -> Tensor:
    """int32 [..] -> float8_e8m0fnu [.., head_dim / 32]."""
    parts = scale.contiguous().unsqueeze(-1).view(torch.uint8)[..., : head_dim // 32]
    return parts.contiguous().view(torch.float8_e8m0fnu)


def quantized(x: Tensor, format: str, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Values and scale of x [.., D] after factors that make the scales of all rows (MX: of all blocks) differ."""
    if format == "fp8":
        factor = torch.exp(torch.randn(x.shape[:-1], generator=generator)).unsqueeze(-1)
    else:
        exponent = torch.randint(-4, 5, (*x.shape[:-1], x.shape[-1] // 32), generator=generator)
        factor = (2.0**exponent).repeat_interleave(32, dim=-1)
    values, scale = getattr(formats, f"quantize_{format}")(x * factor)
    return values, scale


def make_inputs(case: Case, device: str) -> Inputs:
    generator = torch.Generator().manual_seed(case.seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    q, q_scale = quantized(randn(case.num_q, case.num_heads, case.head_dim), case.format, generator)
    kv, kv_scale = quantized(randn(case.num_kv, case.head_dim), case.format, generator)
    weights = randn(case.num_q, case.num_heads).to(case.weights_dtype)
    start, end = windows_of(case.windows, case.num_q, case.num_kv, generator)
    inputs = Inputs(q, None if case.format == "fp8" else q_scale, kv, kv_scale, weights, start, end)
    if case.unpacked_scale and inputs.q_scale is not None:
        inputs = replace(
            inputs,
            q_scale=unpack_scale(inputs.q_scale, case.head_dim),
            kv_scale=unpack_scale(kv_scale, case.head_dim),
        )
    inputs = on_device(inputs, device)
    return strided(inputs) if case.strided else inputs


def on_device(inputs: Inputs, device: str) -> Inputs:
    return Inputs(**{name: value if value is None else value.to(device) for name, value in vars(inputs).items()})


# ------------------------------------------------------------------------------------------ calls


def call(
    backend: Backend,
    inputs: Inputs,
    *,
    clean: bool = True,
    width: int = 0,
    dtype: torch.dtype = torch.float32,
    schedule: Tensor | None = None,
    **options: Any,
) -> Tensor:
    return dk.fp8_fp4_mqa_logits(
        (inputs.q, inputs.q_scale),
        (inputs.kv, inputs.kv_scale),
        inputs.weights,
        inputs.start,
        inputs.end,
        clean_logits=clean,
        max_seqlen_k=width,
        logits_dtype=dtype,
        schedule_meta=schedule,
        arch=backend.arch,
        **options,
    )


def metadata(backend: Backend, inputs: Inputs) -> Tensor:
    num_kv, num_heads = inputs.kv.shape[0], inputs.q.shape[1]
    return dk.get_mqa_logits_metadata(inputs.start, inputs.end, num_kv, num_heads, arch=backend.arch)


def is_refused(backend: Backend, inputs: Inputs) -> bool:
    """Whether the backend lacks what the inputs need; then the call must say so in the words of `supported`."""
    reason = dk.supported(
        OP, arch=backend.supported_arch, format=inputs.format, num_heads=inputs.q.shape[1], head_dim=inputs.head_dim
    )
    if reason is None:
        return False
    with pytest.raises(dk.UnsupportedError, match=f"^{re.escape(reason)}$"):
        call(backend, inputs)
    return True


def expected(inputs: Inputs, *, clean: bool = True, width: int = 0) -> tuple[Tensor, Tensor]:
    """The oracle's logits and the columns that are some."""
    return oracle.mqa_logits(
        (inputs.q, inputs.q_scale),
        (inputs.kv, inputs.kv_scale),
        inputs.weights,
        inputs.start,
        inputs.end,
        format=inputs.format,
        clean=clean,
        max_seqlen_k=width,
    )


def agreement_limit(backend: Backend, weights_dtype: torch.dtype, logits_dtype: torch.dtype) -> float:
    """The contract's limits; on the CPU, which rounds nothing but float32 sums, what those make of it."""
    if backend.device == "cpu":
        return 1e-10 if logits_dtype == torch.float32 else 3e-6
    return 3e-5 if torch.bfloat16 in (weights_dtype, logits_dtype) else 5e-6


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32 if x.element_size() == 4 else torch.int16).cpu()


def assert_same_bits(actual: Tensor, wanted: Tensor, where: Tensor | None = None) -> None:
    """Requires the same dtype, shape and bits, all over or where `where` is true."""
    assert (actual.dtype, actual.shape) == (wanted.dtype, wanted.shape)
    differs = bits(actual) != bits(wanted)
    if where is not None:
        differs &= where.cpu()
    assert not differs.any(), (
        f"{int(differs.sum())} of {differs.numel()} logits differ, the first at {differs.nonzero()[0].tolist()}: "
        f"{actual.cpu()[differs][0].item()} and {wanted.cpu()[differs][0].item()}"
    )
