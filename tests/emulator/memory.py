"""Tensors between pages that fault, so that even an access the emulator does not see cannot go unnoticed."""

from __future__ import annotations

import ctypes
import mmap

import torch
from torch import Tensor

_PAGE = mmap.PAGESIZE
_GUARD = 16 * _PAGE
_libc = ctypes.CDLL(None, use_errno=True)
_regions: list[mmap.mmap] = []  # never unmapped: tensors point into them


def guarded(tensor: Tensor) -> Tensor:
    """A contiguous copy that ends at a page that faults, as closely as 16-byte alignment allows, and one before it."""
    source = tensor.contiguous()
    room = (source.numel() * source.element_size() + 15) // 16 * 16
    inside = (room + _PAGE - 1) // _PAGE * _PAGE or _PAGE
    region = mmap.mmap(-1, inside + 2 * _GUARD)
    _regions.append(region)
    base = ctypes.addressof(ctypes.c_char.from_buffer(region))
    for address in (base, base + _GUARD + inside):
        if _libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(_GUARD), 0) != 0:
            raise OSError(ctypes.get_errno(), "mprotect")
    if room == 0:
        return source
    flat = torch.frombuffer(region, dtype=torch.uint8, count=room, offset=_GUARD + inside - room)
    copy = flat[: source.numel() * source.element_size()].view(source.dtype).view(source.shape)
    copy.view(torch.uint8).copy_(source.view(torch.uint8))
    return copy
