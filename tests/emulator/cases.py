"""Small odd cases of every kernel, with inputs that any machine and torch version makes alike."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from unittest import mock

import torch
from torch import Tensor

import deep_kernels


def hash_bits(seed: int, *shape: int) -> Tensor:
    """int64 tensor of 31 pseudo-random bits per element, by an integer hash of the position."""
    count = 1
    for size in shape:
        count *= size
    x = torch.arange(count, dtype=torch.int64) + (seed * 0x9E3779B1 & 0x7FFFFFFF)
    for multiplier in (0x7FEB352D, 0x846CA68B, 0x2C1B3C6D):
        x = (x ^ (x >> 16)) * multiplier & 0xFFFFFFFF
    return ((x ^ (x >> 15)) >> 1).reshape(shape)


def e4m3_values(seed: int, *shape: int) -> Tensor:
    """float8_e4m3fn of both signs over twelve binades, with some zeros and subnormals."""
    bits = hash_bits(seed, *shape)
    # The sum of two draws: exponents in the middle are the likely ones, as in real rows.
    exponent = bits % 7 + (bits >> 3) % 6
    code = (bits >> 8 & 0x80) | exponent << 3 | (bits >> 16 & 7)
    return code.to(torch.uint8).view(torch.float8_e4m3fn)


def exact_values(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Multiples of 1/64 in [-2, 2): the same in every float type."""
    return ((hash_bits(seed, *shape) % 256 - 128).to(torch.float32) / 64).to(dtype)


def row_values(format: str, seed: int, *shape: int) -> Tensor:
    """Codes of rows of shape[-1] elements: float8_e4m3fn, or for mxfp4 uint8 pairs of e2m1."""
    if format == "mxfp4":
        return (hash_bits(seed, *shape[:-1], shape[-1] // 2) % 256).to(torch.uint8)
    return e4m3_values(seed, *shape)


def mx_exponents(seed: int, values: Tensor, num_blocks: int) -> Tensor:
    """int32 [..] of four bytes for the rows of `values`, some of whose blocks become zeros.

    Of 16 rows about twelve have exponents of 127 +- 2, two have one block that lies 12 to 40 below the others, two
    are near 2^-60 but for a block of zeros, whose exponent is 127 as quantizers write it.
    """
    rows = values.shape[:-1]
    draw = hash_bits(seed, *rows)
    kind, chosen = draw % 16, ((draw >> 4) % num_blocks)[..., None] == torch.arange(4)
    exponents = 125 + hash_bits(seed + 1, *rows, 4) % 5
    is_wide, is_tiny = (kind < 2)[..., None], ((kind == 2) | (kind == 3))[..., None]
    exponents = torch.where(is_wide & chosen, 115 - ((draw >> 8) % 25)[..., None], exponents)
    exponents = torch.where(is_tiny, torch.where(chosen, 127, exponents - 60), exponents)
    blocks = values.view(torch.uint8).view(*rows, num_blocks, -1)
    blocks[(is_tiny & chosen)[..., :num_blocks]] = 0
    return exponents.to(torch.uint8).view(torch.int32).squeeze(-1)


@dataclass(frozen=True)
class MqaCase:
    """One call of fp8_fp4_mqa_logits."""

    num_q: int = 21
    num_kv: int = 517
    num_heads: int = 64
    head_dim: int = 128
    weights_dtype: torch.dtype = torch.float32
    logits_dtype: torch.dtype = torch.float32
    clean: str = "concurrent"  # or "deferred", "off"
    max_seqlen_k: int = 0
    metadata: bool = False
    windows: str = "ragged"  # or "causal", "sparse", "full"
    num_sms: int = 3
    seed: int = 1
    special: bool = False  # NaN, infinities, huge and tiny values among the inputs
    format: str = "fp8"  # or "mxfp8", "mxfp4"
    reduction: str = "exact"  # or "folded"

    def __str__(self) -> str:
        words = [f"{self.num_q}x{self.num_kv}", f"h{self.num_heads}", f"d{self.head_dim}", self.clean, self.windows]
        words += [str(dtype).removeprefix("torch.") for dtype in (self.weights_dtype, self.logits_dtype)]
        words += [f"k{self.max_seqlen_k}"] * (self.max_seqlen_k > 0) + ["metadata"] * self.metadata
        words += ["special"] * self.special + [self.format] * self.is_mx
        words += [self.reduction] * (self.reduction != "exact")
        return "-".join([*words, f"sms{self.num_sms}"])

    @property
    def is_mx(self) -> bool:
        return self.format != "fp8"

    def make_windows(self) -> tuple[Tensor, Tensor]:
        """starts, ends: int32 [num_q]; some outside of [0, num_kv], as callers may have them."""
        row = torch.arange(self.num_q)
        draw = hash_bits(self.seed + 10, 2, self.num_q)
        if self.windows == "full":
            starts, ends = row * 0, row * 0 + self.num_kv
        elif self.windows == "causal":
            starts, ends = row * 0, self.num_kv - self.num_q + 1 + row
        else:
            starts = draw[0] % (self.num_kv + 20) - 10
            ends = starts + draw[1] % (self.num_kv // 2 + 2) - 1
            if self.windows == "sparse":  # most rows empty, among them whole blocks
                ends = torch.where((row // 9) % 3 == 1, ends, starts - row % 2)
        return starts.to(torch.int32), ends.to(torch.int32)

    def make_inputs(self) -> MqaInputs:
        """The tensors of the call, on the CPU."""
        return self._make_mx() if self.is_mx else self._make_fp8()

    def _make_mx(self) -> MqaInputs:
        q = row_values(self.format, self.seed, self.num_q, self.num_heads, self.head_dim)
        kv = row_values(self.format, self.seed + 1, self.num_kv, self.head_dim)
        num_blocks = self.head_dim // 32
        q_scale = mx_exponents(self.seed + 3, q, num_blocks)
        kv_scale = mx_exponents(self.seed + 5, kv, num_blocks)
        q_scale.view(torch.uint8).view(self.num_q, self.num_heads, 4)[5::16, 0, 1 % num_blocks] = 0xFF
        kv_scale.view(torch.uint8).view(self.num_kv, 4)[9::67, 0] = 0xFF
        weights = exact_values(self.seed + 2, self.num_q, self.num_heads, dtype=self.weights_dtype)
        return MqaInputs(q, kv, kv_scale, weights, *self.make_windows(), q_scale)

    def _make_fp8(self) -> MqaInputs:
        scales = 2.0 ** (hash_bits(self.seed + 3, self.num_kv) % 5 - 2)
        inputs = MqaInputs(
            e4m3_values(self.seed, self.num_q, self.num_heads, self.head_dim),
            e4m3_values(self.seed + 1, self.num_kv, self.head_dim),
            (scales * (1 + exact_values(self.seed + 4, self.num_kv).abs())).to(torch.float32),
            exact_values(self.seed + 2, self.num_q, self.num_heads, dtype=self.weights_dtype),
            *self.make_windows(),
        )
        if self.special:
            self._make_special(inputs)
        return inputs

    def _make_special(self, inputs: MqaInputs) -> None:
        """Puts every kind of special value into some rows and leaves others as they are."""
        inputs.q.view(torch.uint8)[1::7, 0, 3] = 0x7F
        inputs.kv.view(torch.uint8)[5::31, 1] = 0xFF
        inputs.kv.view(torch.uint8)[6::31] &= 0x87  # zeros and subnormals
        for i, scale in enumerate((0.0, 2.0**-140, 2.0**100, float("inf"), float("nan"))):
            inputs.kv_scale[7 + i :: 37] = scale
        for i, weight in enumerate((float("inf"), float("nan"), -0.0, 2.0**-130, 2.0**110, -(2.0**127))):
            inputs.weights[2 + i :: 11, 0] = weight


@dataclass
class MqaInputs:
    """Tensors of one call, shapes as in the docstring of the op."""

    q: Tensor
    kv: Tensor
    kv_scale: Tensor
    weights: Tensor
    starts: Tensor
    ends: Tensor
    q_scale: Tensor | None = None  # MX

    def tensors(self) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in vars(self).items() if tensor is not None}

    def map(self, function: Callable[[Tensor], Tensor]) -> MqaInputs:
        """The same with the function's result for every tensor."""
        return replace(self, **{name: function(tensor) for name, tensor in self.tensors().items()})


def environment(name: str, value: str) -> AbstractContextManager[object]:
    """Sets an environment variable within the block."""
    return mock.patch.dict(os.environ, {name: value})


def mqa_schedule(case: MqaCase, inputs: MqaInputs, arch: str) -> Tensor:
    return deep_kernels.get_mqa_logits_metadata(inputs.starts, inputs.ends, case.num_kv, case.num_heads, arch=arch)


def run_mqa(
    case: MqaCase, inputs: MqaInputs, arch: str, *, schedule: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """The call itself, by way of get_mqa_logits_metadata where the case asks for it."""
    if case.metadata and schedule is None:
        schedule = mqa_schedule(case, inputs, arch)
    with environment("DEEP_KERNELS_MQA_CLEAN", "deferred" if case.clean == "deferred" else "concurrent"):
        return deep_kernels.fp8_fp4_mqa_logits(
            (inputs.q, inputs.q_scale),
            (inputs.kv, inputs.kv_scale),
            inputs.weights,
            inputs.starts,
            inputs.ends,
            case.clean != "off",
            case.max_seqlen_k,
            case.logits_dtype,
            schedule,
            reduction=case.reduction,
            out=out,
            arch=arch,
        )


def inside_of(case: MqaCase, inputs: MqaInputs) -> Tensor:
    """bool, shaped like the logits: the columns that are a logit of their row."""
    column = torch.arange(case.max_seqlen_k or case.num_kv)
    begin = inputs.starts.cpu().long().clamp(0, case.num_kv)[:, None]
    end = inputs.ends.cpu().long().clamp(0, case.num_kv)[:, None]
    token = column + begin if case.max_seqlen_k else column.expand(case.num_q, -1)
    return (token >= begin) & (token < end)


def digest(tensor: Tensor) -> str:
    """SHA-256 of a tensor's bytes."""
    return hashlib.sha256(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def logits_digest(logits: Tensor, promised: Tensor | None) -> str:
    """Of the logits where the op promises something, everywhere if None. NaN is one value."""
    logits = logits.cpu()
    if promised is not None:
        logits = torch.where(promised, logits, torch.zeros((), dtype=logits.dtype))
    return digest(torch.where(torch.isnan(logits), torch.full((), torch.nan, dtype=logits.dtype), logits))


def _mqa_cases() -> list[MqaCase]:
    floats = (torch.float32, torch.bfloat16, torch.float16)
    cleanings = ("concurrent", "deferred", "off")
    windows = ("ragged", "causal", "sparse", "full")
    cases = []
    # All paddings of the head count, all head dims; the rest of the fields goes round with them.
    heads = (1, 7, 8, 9, 16, 17, 32, 33, 63, 64, 65, 100, 127, 128)
    for i, num_heads in enumerate(heads):
        for j, head_dim in enumerate((32, 64, 128)):
            k = 3 * i + j
            cases.append(
                MqaCase(
                    num_q=(1, 9, 37, 70)[(k + i) % 4],
                    num_kv=(1, 64, 255, 301, 517)[k % 5],
                    num_heads=num_heads,
                    head_dim=head_dim,
                    weights_dtype=floats[(i + j) % 3],
                    logits_dtype=floats[(i + j // 2) % 2],
                    clean=cleanings[(i + 2 * j) % 3],
                    max_seqlen_k=(0, 77, 0, 400)[(k + j) % 4],
                    metadata=(k + i) % 3 == 0,
                    windows=windows[(k + i + j) % 4],
                    num_sms=(1, 3, 8)[k % 3],
                    seed=100 + k,
                )
            )
    # Every cleaning with every form of the result, at the head counts that differ most.
    for num_heads in (12, 64, 128):
        for clean in cleanings:
            for max_seqlen_k in (0, 130):
                for metadata in (False, True):
                    cases.append(
                        MqaCase(
                            num_q=19,
                            num_kv=300,
                            num_heads=num_heads,
                            head_dim=64,
                            logits_dtype=floats[len(cases) % 2],
                            clean=clean,
                            max_seqlen_k=max_seqlen_k,
                            metadata=metadata,
                            windows=windows[len(cases) % 4],
                            seed=len(cases),
                        )
                    )
    return cases


MQA_CASES = _mqa_cases()
# Where the op leaves freedom (a NaN dot product may count as 0) the card's way is the one that counts.
MQA_SPECIAL_CASES = [
    MqaCase(num_q=40, num_kv=301, num_heads=num_heads, head_dim=64, logits_dtype=dtype, windows="full", special=True)
    for num_heads in (16, 64, 128)
    for dtype in (torch.float32, torch.bfloat16)
]
# Few kernels, since each takes seconds to compile: all formats, both sides of the head counts that differ most.
MQA_MX_CASES = [
    MqaCase(num_q=21, num_kv=517, num_heads=64, format="mxfp8", seed=400),
    MqaCase(num_q=37, num_kv=600, num_heads=17, format="mxfp4", windows="full", clean="off", seed=410),
    MqaCase(
        num_q=9, num_kv=301, num_heads=128, head_dim=64, format="mxfp4", windows="causal", clean="deferred",
        logits_dtype=torch.bfloat16, weights_dtype=torch.bfloat16, seed=420,
    ),
    MqaCase(
        num_q=70, num_kv=255, num_heads=8, head_dim=32, format="mxfp8", max_seqlen_k=77, metadata=True, num_sms=8,
        weights_dtype=torch.float16, seed=430,
    ),
]  # fmt: skip
MQA_FOLDED_CASES = [
    MqaCase(num_q=21, num_kv=517, num_heads=64, reduction="folded", seed=440),
    MqaCase(
        num_q=9, num_kv=600, num_heads=100, head_dim=64, reduction="folded", windows="full", metadata=True,
        logits_dtype=torch.bfloat16, clean="deferred", seed=450,
    ),
]  # fmt: skip
