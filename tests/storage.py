"""Memory that tests hand to calls: garbage, far addresses, and as much as the machine must have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from conftest import Backend
from torch import Tensor


@contextmanager
def poisoned_memory(backend: Backend, byte: int | None) -> Iterator[None]:
    """What torch allocates within the block begins as garbage: NaN and the largest integers, or `byte` on a card."""
    if byte is None:
        torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)
        return
    torch.cuda.empty_cache()
    # One of every size that the allocator keeps apart; freed, they are what the next requests get.
    held = [torch.full((size,), byte, dtype=torch.uint8, device="cuda") for size in (1 << 10, 1 << 14, 1 << 18) * 8]
    held += [torch.full((64 << 20,), byte, dtype=torch.uint8, device="cuda")]
    del held
    yield


def far_apart(x: Tensor, last_byte: int) -> Tensor:
    """The values of x with rows so far apart that the last one begins at about `last_byte`."""
    stride = last_byte // max(x.shape[0] - 1, 1) // 16 * 16 // x.element_size()
    size = (x.shape[0] - 1) * stride + x[0].numel()
    view = torch.empty(size, dtype=x.dtype, device=x.device).as_strided(x.shape, (stride, *x.stride()[1:]))
    view.view(torch.uint8).copy_(x.view(torch.uint8))
    return view


def skip_without_room(backend: Backend, num_bytes: float) -> None:
    if backend.device == "cpu":
        return
    free, _ = torch.cuda.mem_get_info()
    if free < num_bytes:
        pytest.skip(f"needs {num_bytes / 1e9:.1f} GB of the card's memory, {free / 1e9:.1f} are free")
