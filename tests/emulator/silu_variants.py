"""The kernels of the FP8 prefill MLP on the emulator: which of them a call meets."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

from conftest import Backend

from .driver import Emulator, installed


@dataclass(frozen=True)
class Variant:
    """A kernel of the fold; where `algorithm` or `stages` is None there is but one."""

    arch: str
    tile: str  # as DEEP_KERNELS_SILU_TILE: tokens; x2: of a cluster of two
    algorithm: str | None = None
    stages: int | None = None

    def __str__(self) -> str:
        words = (self.arch, self.tile, self.algorithm, None if self.stages is None else f"{self.stages}-stages")
        return "-".join(word for word in words if word)

    @property
    def backend(self) -> Backend:
        return Backend(str(self), "cpu", f"emulator:{self.arch}")

    def serves(self, *, round_bf16: bool) -> bool:
        """act(g) of 128 tokens in float32 has no room beside two stages."""
        return round_bf16 or self.algorithm != "two_pass" or self.tile != "128"

    @contextmanager
    def chosen(self) -> Iterator[None]:
        """Calls within the block take this kernel."""
        choice = {"TILE": self.tile, "ALGORITHM": self.algorithm, "STAGES": self.stages}
        variables = {f"DEEP_KERNELS_SILU_{name}": str(value) for name, value in choice.items() if value is not None}
        with patch.dict(os.environ, variables):
            yield

    @contextmanager
    def running(self, emulator: Emulator | None = None, num_sms: int = 3) -> Iterator[Backend]:
        """Calls with the backend's arch run on the emulator within the block."""
        with self.chosen(), installed(emulator or Emulator(), num_sms):
            yield self.backend


SM89_VARIANTS = [
    Variant("sm89", "32", "interleaved", 2),
    Variant("sm89", "32", "interleaved", 1),
    Variant("sm89", "32", "two_pass", 2),
    Variant("sm89", "32", "two_pass", 1),
    Variant("sm89", "64", "interleaved"),
    Variant("sm89", "64", "two_pass"),
    Variant("sm89", "128", "interleaved"),
    Variant("sm89", "128", "two_pass"),
]
SM90_VARIANTS = [Variant("sm90", tile) for tile in ("64", "128", "64x2", "128x2", "192x2")]
VARIANTS = [*SM89_VARIANTS, *SM90_VARIANTS]
# Without those that differ in the fold alone.
GEMM_VARIANTS = [variant for variant in VARIANTS if variant.algorithm != "two_pass" and variant.stages != 1]
