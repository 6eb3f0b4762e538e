"""Faults that are put into copies of the paged Hopper kernel: each must be caught, with a message that helps."""

from __future__ import annotations

from dataclasses import dataclass

from .faults import Edit, Fault
from .paged_cases import PagedCase

KERNEL = "kernels/paged_mqa_logits_sm90.cuh"
MATH = "kernels/paged_mqa_math_sm90.cuh"
UNIT = "kernels/paged_mqa_unit.cuh"
UNIT_SM90 = "kernels/paged_mqa_unit_sm90.cuh"
TILE = "kernels/mqa_logits_tile.cuh"

# More tiles than stages on one block, and several units.
_LONG = PagedCase(batch=4, max_len=900, width=910, head_dim=128, num_sms=1)
_MXFP8 = PagedCase(batch=4, format="mxfp8", head_dim=128, num_sms=1)
_MXFP4 = PagedCase(format="mxfp4", head_dim=128, num_sms=1)
_SMALL_PAGES = PagedCase(block_kv=16, num_heads=32, num_sms=2)
_ALL_HEADS = PagedCase(num_heads=128)


@dataclass(frozen=True)
class PagedFault(Fault):
    """A mistake, and the call that meets it."""

    paged: PagedCase = _LONG


def _fault(
    name: str, file: str, old: str, new: str, kinds: str, words: tuple[str, ...] = (), paged: PagedCase = _LONG
) -> PagedFault:
    return PagedFault(name, "sm90", (Edit(file, old, new),), tuple(kinds.split()), words, paged=paged)


PAGED_FAULTS = [
    # --- signals that are missing
    _fault(
        "stage filled before it is drained", KERNEL,
        "      ptx::mbarrier_wait(ptx::smem_addr(&smem.kv_drained[stages.slot]), stages.parity);\n", "",
        "race pending-async mbarrier", ("smem",),
    ),
    _fault(
        "kv warps that never hand a unit back", KERNEL,
        "    if (lane == 0) ptx::mbarrier_arrive(ptx::smem_addr(&smem.unit_drained[units.slot]));\n", "",
        "deadlock", ("unit_drained", "scheduler"),
    ),
    _fault(
        "tiles of a unit that a kv warp does not count", KERNEL, "    next -= num_tiles;\n", "",
        "deadlock", ("kv_filled",),
    ),
    _fault(
        "tile read before it is there", MATH,
        "    ptx::mbarrier_wait(ptx::smem_addr(&smem.kv_filled[stages.slot]), stages.parity);\n", "",
        "pending-async uninitialized race", ("smem.kv",),
    ),
    _fault("no wgmma.fence", MATH, "    ptx::wgmma_fence();\n    DK_UNROLL\n    for (i32 k = begin",
           "    DK_UNROLL\n    for (i32 k = begin", "accumulator", ("wgmma.fence",)),
    _fault(
        "stage released before its wgmma are done", MATH,
        "    start_score(x, pass, 0, kBlocks);\n", "    start_score(x, pass, 0, kBlocks);\n    release_stage();\n",
        "race pending-async mbarrier", ("smem",),
    ),
    _fault(
        "query rows rebased before they are there", KERNEL,
        "    ptx::mbarrier_wait(loaded, slots.parity ^ 1u);  // as whoever drains the slot\n", "",
        "pending-async uninitialized race", ("tma_load_4d",), _MXFP8,
    ),
    _fault(
        "no proxy fence behind rebased rows", MATH, "    ptx::fence_proxy_async();\n", "",
        "proxy-fence", ("wgmma",), _MXFP8,
    ),
    _fault(
        "barriers that the async proxy does not see", UNIT_SM90, "  ptx::fence_mbarrier_init();\n", "",
        "proxy-fence", ("mbarrier",),
    ),
    _fault(
        "packed rows overwritten before all warps have read them", MATH,
        "      ptx::barrier_sync(kBarrier, kThreads);\n      if (task < kTasks) block.store",
        "      if (task < kTasks) block.store", "race", ("nothing orders",), _MXFP4,
    ),
    # --- places that are wrong
    _fault(
        "table entries behind the last column", KERNEL, "return page < width ?", "return page < width + 64 ?",
        "bounds", ("block_table",),
    ),
    _fault(
        "scales of more tokens than the page has", KERNEL, "box_rows * 4, filled,\n",
        "box_rows * 8, filled,\n", "bounds mbarrier race pending-async", (), _SMALL_PAGES,
    ),
    _fault(
        "boxes that overlap", KERNEL, "lane * box_rows * S.row_bytes()", "lane * 8 * S.row_bytes()",
        "pending-async race", ("smem.kv",), _SMALL_PAGES,
    ),
    _fault(
        "k-steps twice as far apart", MATH, "Descriptor::make(kv + 2 * k)", "Descriptor::make(kv + 4 * k)",
        "descriptor", ("operand a",),
    ),
    _fault(
        "words of packed rows half as far apart", UNIT,
        "block) + 4 * (lane % 4)", "block) + 2 * (lane % 4)",
        "alignment", ("multiple of 4",), _MXFP4,
    ),
    _fault(
        "one column too many", UNIT, "if (column + 8 * i < store_end)", "if (column + 8 * i <= store_end)",
        "bounds race", ("logits",), PagedCase(width=100),
    ),
    _fault(
        "tiles filled as well", UNIT,
        "clamp_to<i64>(covered, begin, args.width)", "clamp_to<i64>(begin, 0, args.width)",
        "race", ("logits", "nothing orders"),
    ),
    _fault(
        "two lanes store one logit", TILE, "return kLanes < 4 || ptx::lane_index() % 4 < 2;", "return true;",
        "race", ("logits", "nothing orders"), _ALL_HEADS,
    ),
    _fault(
        "global memory before the kernel ahead is done", KERNEL,
        "  find_paged_run<S>(args, smem.run);\n",
        "  find_paged_run<S>(args, smem.run);\n  ptx::grid_dependency_wait();\n",
        "grid-dependency", ("griddepcontrol",),
    ),
]  # fmt: skip
