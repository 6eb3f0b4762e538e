"""Small kernels written in a test: a body over ptx/, tensors it may touch, tensor maps it may copy through."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .driver import Emulator

_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}


class _Map(ctypes.Structure):
    """MapDescription of the contract."""

    _fields_ = [
        ("base", ctypes.c_void_p),
        ("dims", ctypes.c_longlong * 5),
        ("strides", ctypes.c_longlong * 5),
        ("box", ctypes.c_int * 5),
        ("rank", ctypes.c_int),
        ("type", ctypes.c_ubyte),
        ("swizzle", ctypes.c_ubyte),
    ]


@dataclass
class Map:
    """A tensor map over bytes, 16-bit elements or float32 in torch's order of dimensions, the contiguous one last."""

    tensor: Tensor
    box: Sequence[int]
    swizzle: int = 0
    strides: Sequence[int] | None = None  # bytes, instead of the tensor's
    offset: int = 0  # bytes, of the base

    def description(self) -> bytes:
        """The bytes of the contract's struct."""
        element = self.tensor.element_size()
        rank = self.tensor.dim()
        strides = self.strides or [stride * element for stride in self.tensor.stride()]
        result = _Map(base=self.tensor.data_ptr() + self.offset, rank=rank, type={1: 0, 4: 1, 2: 2}[element])
        result.swizzle = _SWIZZLES[self.swizzle]
        for d in range(rank):
            result.dims[d] = self.tensor.shape[rank - 1 - d]
            result.strides[d] = strides[rank - 1 - d]
            result.box[d] = self.box[rank - 1 - d]
        return bytes(result)


def run_kernel(
    body: str,
    *,
    threads: int = 32,
    grid: int = 1,
    cluster: int = 1,
    smem_bytes: int = 1 << 16,
    inputs: Sequence[Tensor] = (),
    outputs: Sequence[Tensor] = (),
    maps: Sequence[Map] = (),
    prelude: str = "",
    emulator: Emulator | None = None,
) -> None:
    """Runs `body` in every thread; it sees in0, in1, .. and out0, .. as pointers to u8 and maps.map[i]."""
    pointers = [f"const u8* in{i};" for i in range(len(inputs))] + [f"u8* out{i};" for i in range(len(outputs))]
    names = [f"in{i}" for i in range(len(inputs))] + [f"out{i}" for i in range(len(outputs))]
    source = f"""#include "deep_kernels/ptx/sm90.cuh"
#include "deep_kernels/tile/layout.cuh"
#include "deep_kernels/tile/mma.cuh"
namespace dk = deep_kernels;
using namespace deep_kernels;
struct Args {{ {" ".join(pointers)} u64 unused; }};
struct Maps {{ ptx::TensorMap map[{max(1, len(maps))}]; }};
constexpr u32 kBase = 1024;  // shared address of the block's memory
{prelude}
DK_KERNEL({threads}) mini(DK_GRID_CONSTANT Args args, DK_GRID_CONSTANT Maps maps) {{
  [[maybe_unused]] const i32 thread = ptx::thread_index();
  [[maybe_unused]] const i32 lane = ptx::lane_index();
{"".join(f"  [[maybe_unused]] auto* {name} = args.{name};{chr(10)}" for name in names)}{body}
}}
"""
    args = b"".join(tensor.data_ptr().to_bytes(8, "little") for tensor in (*inputs, *outputs)) + bytes(8)
    described = [m.description() for m in maps] or [bytes(ctypes.sizeof(_Map))]
    launch: dict[str, Any] = {
        "op": "mini",
        "spec": "{}",
        "source": source,
        "entry": "mini",
        "target": "sm_90a",
        "grid": grid,
        "cluster": cluster,
        "block": threads,
        "smem_bytes": smem_bytes,
        "args": args,
        "maps": b"".join(described),
        "buffers": [
            (f"{'out' if writable else 'in'}{i}", t.data_ptr(), list(t.shape),
             [stride * t.element_size() for stride in t.stride()], t.element_size(), writable)
            for writable, tensors in ((False, inputs), (True, outputs))
            for i, t in enumerate(tensors)
        ],
    }  # fmt: skip
    (emulator or Emulator())(launch)
