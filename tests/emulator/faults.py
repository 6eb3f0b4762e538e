"""Faults that are put into copies of the kernels: each must be caught, with a message that helps."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path

from . import build
from .cases import MqaCase

SM90 = "kernels/mqa_logits_sm90.cuh"
SM89 = "kernels/mqa_logits_sm89.cuh"
# Files of one kernel: a text is looked for in all of them.
_PARTS = {SM90: (SM90, "kernels/mqa_math_sm90.cuh", "kernels/mqa_unit_sm90.cuh")}
TILE = "kernels/mqa_logits_tile.cuh"
SCHEDULE = "kernels/mqa_schedule.cuh"
REBASE = "kernels/mqa_rebase.cuh"
FOLD = "kernels/mqa_fold.cuh"
LAYOUT = "tile/layout.cuh"
FRAGMENTS = "tile/fragments.cuh"

_PLAIN = MqaCase(num_q=21, num_kv=700, num_heads=64, head_dim=128, windows="causal")
_DEFERRED = MqaCase(num_q=21, num_kv=700, num_heads=64, head_dim=128, windows="causal", clean="deferred")
_ODD_HEADS = MqaCase(num_q=11, num_kv=300, num_heads=9, head_dim=64)
_ALL_HEADS = MqaCase(num_q=5, num_kv=300, num_heads=128, head_dim=64)
_MXFP8 = MqaCase(num_q=9, num_kv=300, head_dim=64, format="mxfp8", num_sms=1)
_MXFP8_UNITS = MqaCase(num_q=35, num_kv=60, head_dim=64, format="mxfp8", num_sms=1, windows="full")  # more than slots
_MXFP4 = MqaCase(num_q=9, num_kv=301, num_heads=128, head_dim=64, format="mxfp4")
_FOLDED = MqaCase(num_q=21, num_kv=517, reduction="folded", windows="full")


@dataclass(frozen=True)
class Edit:
    """Replaces text that must stand in the file exactly once, or `count` times."""

    file: str
    old: str
    new: str
    count: int = 1


@dataclass(frozen=True)
class Fault:
    """One mistake, and what the emulator says of it: kinds that may be reported, words the text must hold."""

    name: str
    backend: str
    edits: tuple[Edit, ...]
    kinds: tuple[str, ...]
    words: tuple[str, ...]
    case: MqaCase = field(default=_PLAIN)


def _fault(
    name: str,
    backend: str,
    file: str,
    old: str,
    new: str,
    kinds: str,
    words: tuple[str, ...] = (),
    case: MqaCase = _PLAIN,
    count: int = 1,
) -> Fault:
    return Fault(name, backend, (Edit(file, old, new, count),), tuple(kinds.split()), words, case)


_ARRIVE_DRAINED = "    if (tile == kTiles - 1) release_stage();\n"
_WAIT_WGMMA = "    ptx::wgmma_wait_group<0>(x);\n"

FAULTS = [
    # --- fences and waits that are not there
    _fault(
        "no fence behind mbarrier.init", "sm90", SM90, "    ptx::fence_mbarrier_init();\n", "",
        "proxy-fence", ("mbarrier", "async proxy", "initialised at"),
    ),
    _fault(
        "no block barrier behind the setup", "sm90", SM90,
        "  find_run<S>(args, smem.schedule);\n  ptx::sync_threads();\n", "  find_run<S>(args, smem.schedule);\n",
        "race uninitialized", ("smem",),
    ),
    Fault(
        "queries posted before their weights are written",
        "sm90",
        (
            Edit(SM90, "    ptx::mbarrier_arrive(query_filled);  // every lane", "    // every lane"),
            Edit(
                SM90, "    post_weights<S>(",
                "    ptx::mbarrier_arrive(query_filled);\n    post_weights<S>(",
            ),
        ),
        ("race", "uninitialized"),
        ("math",),
    ),
    _fault(
        "scheduler does not wait until a unit is drained", "sm90", SM90,
        "    ptx::mbarrier_wait(ptx::smem_addr(&smem.unit_drained[slots.slot]), slots.parity);\n"
        "    const MqaSpan span", "    const MqaSpan span",
        "race pending-async mbarrier", ("scheduler",), MqaCase(num_q=70, num_kv=300, num_sms=1, windows="full"),
    ),
    _fault(
        "kv warp does not wait until a stage is drained", "sm90", SM90,
        "      ptx::mbarrier_wait(ptx::smem_addr(&smem.kv_drained[stages.slot]), stages.parity);\n", "",
        "race pending-async mbarrier", ("kv",), MqaCase(num_q=8, num_kv=1100, windows="full", num_sms=1),
    ),
    _fault(
        "math warps do not wait for a stage", "sm90", SM90,
        "    ptx::mbarrier_wait(ptx::smem_addr(&smem.kv_filled[stages.slot]), stages.parity);\n", "",
        "pending-async race uninitialized", ("math", "kv_filled"),
    ),
    _fault(
        "no wait for wgmma", "sm90", SM90, _WAIT_WGMMA, "", "accumulator", ("wgmma", "in flight"),
    ),
    _fault("no wgmma.fence", "sm90", SM90, "    ptx::wgmma_fence();\n", "", "accumulator", ("wgmma.fence",)),
    # --- reuse too early
    _fault(
        "stage released before its wgmma are done", "sm90", SM90,
        _WAIT_WGMMA, _ARRIVE_DRAINED + _WAIT_WGMMA,
        "race pending-async", ("wgmma",), MqaCase(num_q=8, num_kv=1100, windows="full", num_sms=1),
    ),
    _fault(
        "stage released before all lanes have read its scales", "sm90", SM90,
        "    ptx::sync_warp();\n    if (ptx::lane_index() == 0) ptx::mbarrier_arrive(ptx::smem_addr(&smem.kv_drained",
        "    if (ptx::lane_index() == 0) ptx::mbarrier_arrive(ptx::smem_addr(&smem.kv_drained",
        "race", ("nothing orders",), MqaCase(num_q=8, num_kv=1100, windows="full", num_sms=1),
    ),
    _fault(
        "one arrival fewer than math warps frees a stage", "sm90", SM90,
        "ptx::mbarrier_init(ptx::smem_addr(&smem.kv_drained[i]), kMathWarps)",
        "ptx::mbarrier_init(ptx::smem_addr(&smem.kv_drained[i]), kMathWarps - 1)",
        "race pending-async mbarrier deadlock", ("kv",), MqaCase(num_q=8, num_kv=2100, windows="full", num_sms=1),
    ),
    # --- phases, counts, bytes
    _fault(
        "one arrival more than math warps", "sm90", SM90,
        "ptx::mbarrier_init(ptx::smem_addr(&smem.unit_drained[i]), kMathWarps)",
        "ptx::mbarrier_init(ptx::smem_addr(&smem.unit_drained[i]), kMathWarps + 1)",
        "deadlock", ("unit_drained", "16 of 17 arrivals", "scheduler"),
        MqaCase(num_q=70, num_kv=300, num_sms=1, windows="full"),
    ),
    _fault(
        "producer starts in the consumer's phase", "sm90", SM90,
        "auto stages = tile::Ring<S.kv_stages>::filler();", "auto stages = tile::Ring<S.kv_stages>::drainer();",
        "deadlock", ("kv_drained", "parity 0", "kv_filled"),
    ),
    _fault(
        "consumer starts in the producer's phase", "sm90", SM90,
        "    stages = tile::Ring<S.kv_stages>::drainer();", "    stages = tile::Ring<S.kv_stages>::filler();",
        "pending-async race uninitialized deadlock", ("math",),
    ),
    _fault(
        "fewer bytes expected than copied", "sm90", SM90,
        "constexpr u32 kBytes = S.kv_stage_bytes() + S.kv_stage_rows() * sizeof(float);",
        "constexpr u32 kBytes = S.kv_stage_bytes();",
        "mbarrier", ("kv_filled", "bytes"),
    ),
    _fault(
        "more bytes expected than copied", "sm90", SM90,
        "constexpr u32 kBytes = S.kv_stage_bytes() + S.kv_stage_rows() * sizeof(float);",
        "constexpr u32 kBytes = S.kv_stage_bytes() + S.kv_stage_rows() * sizeof(float) + 16;",
        "deadlock", ("kv_filled", "16 bytes are expected and no copy"),
    ),
    _fault(
        "one arrival too many on a full barrier", "sm90", SM90,
        "      ptx::mbarrier_arrive_expect_tx(filled, kBytes);\n",
        "      ptx::mbarrier_arrive_expect_tx(filled, kBytes);\n      ptx::mbarrier_arrive(filled);\n",
        "mbarrier", ("one arrival too many", "kv_filled"),
    ),
    # --- barriers and convergence
    _fault(
        "a named barrier with one warp too many", "sm90", SM90,
        "ptx::barrier_sync(static_cast<u32>(Barrier::work_done), S.num_threads());",
        "ptx::barrier_sync(static_cast<u32>(Barrier::work_done), S.num_threads() + 32);",
        "barrier", ("672", "640"), _DEFERRED,
    ),
    _fault(
        "a named barrier that one warp leaves out", "sm90", SM90,
        "    ptx::barrier_sync(static_cast<u32>(Barrier::work_done), S.num_threads());",
        "    if (warp != 3) ptx::barrier_sync(static_cast<u32>(Barrier::work_done), S.num_threads());",
        "deadlock", ("barrier 1: 608 of 640", "waits at"), _DEFERRED,
    ),
    _fault(
        "a converged operation in a branch", "sm90", SM90,
        "    ptx::sync_warp();\n    load_queries", "    if (lane < 31) ptx::sync_warp();\n    load_queries",
        "divergence", ("scheduler", "all lanes"),
    ),
    _fault(
        "a shuffle that some lanes skip", "sm89", TILE,
        "      kept[0][0] = mine + ptx::shuffle_xor(other, 1);",
        "      kept[0][0] = mine;\n      if (ptx::lane_index() != 5) kept[0][0] += ptx::shuffle_xor(other, 1);",
        "divergence", ("shuffle_xor", "need all lanes"),
    ),
    _fault(
        "more registers than the block has", "sm90", SM90,
        "inline constexpr i32 kMathRegisters = 112;", "inline constexpr i32 kMathRegisters = 120;",
        "deadlock", ("registers",),
    ),
    # --- layouts
    _fault(
        "descriptor says another swizzle than the copy", "sm90", LAYOUT,
        "kRowBytes == 128 ? 1u : kRowBytes == 64 ? 2u : 3u", "kRowBytes == 128 ? 2u : kRowBytes == 64 ? 3u : 1u",
        "descriptor", ("descriptor says 64-byte swizzle", "wrote it 128-byte"),
    ),
    _fault(
        "descriptor of 64-byte rows says no swizzle", "sm90", LAYOUT,
        "kRowBytes == 128 ? 1u : kRowBytes == 64 ? 2u : 3u", "kRowBytes == 128 ? 1u : kRowBytes == 64 ? 0u : 3u",
        "descriptor", ("the descriptor says no swizzle", "64-byte"), _ODD_HEADS,
    ),
    _fault(
        "descriptor with half the stride", "sm90", LAYOUT,
        "static_cast<u32>(8 * kRowBytes >> 4)", "static_cast<u32>(4 * kRowBytes >> 4)",
        "descriptor", ("stride",),
    ),
    _fault(
        "k-step advances by 64 bytes", "sm90", SM90, "Descriptor::make(query_low + 2 * k)",
        "Descriptor::make(query_low + 4 * k)", "descriptor", ("operand b",),
    ),
    _fault(
        "copy to an address that is not aligned", "sm90", SM90,
        "ptx::tma_load_2d(ptx::smem_addr(&smem.kv[stages.slot][0]),",
        "ptx::tma_load_2d(ptx::smem_addr(&smem.kv[stages.slot][64]),", "alignment", ("128", "TMA"),
    ),
    _fault(
        "copy through the wrong tensor map", "sm90", SM90,
        "maps.kv, filled, 0, row", "maps.q, filled, 0, row", "tensor-map", ("2-D", "rank 4"),
    ),
    # --- bounds
    _fault(
        "a column too many at the tail", "sm90", TILE, "token >= edge.last", "token > edge.last",
        "bounds", ("logits", "store"), MqaCase(num_q=3, num_kv=300, windows="causal"),
    ),
    _fault(
        "weights of one head too many", "sm90", TILE, "head >= args.num_heads) return 0.0f;",
        "head > args.num_heads) return 0.0f;",
        "bounds", ("weights",), _ODD_HEADS,
    ),
    _fault(
        "scale of one kv row too many", "sm89", SM89, "j < args.num_kv ?", "j <= args.num_kv ?",
        "bounds", ("kv scale",), MqaCase(num_q=3, num_kv=300, windows="full"),
    ),
    _fault(
        "rows behind the last query", "sm89", SM89,
        "if (row >= args.num_q || head >= args.num_heads) return nullptr;",
        "if (head >= args.num_heads) return nullptr;", "bounds", ("q [", "cp.async"),
    ),
    _fault(
        "vector stores that are not aligned", "sm90", TILE,
        "const i32 first = min_of(begin + lead, end);", "const i32 first = min_of(begin + 0 * lead, end);",
        "alignment", ("store", "multiple of 16", "cleaner"), MqaCase(num_q=9, num_kv=600, max_seqlen_k=900),
    ),
    _fault(
        "a stage that no window reaches released before it is there", "sm90", SM90,
        "    if constexpr (!S.is_mx()) wait_for_stage();\n    release_stage();\n", "    release_stage();\n",
        "race pending-async mbarrier", (), MqaCase(num_q=8, num_kv=2500, num_sms=1),
    ),
    # --- values that are not there, results written twice
    _fault(
        "a field that nobody writes", "sm90", SM90,
        "  ptx::store_shared_f32(ptx::smem_addr(&token.power), 1.0f);\n", "",
        "uninitialized", ("math", "kPowerAt"),
    ),
    _fault(
        "two lanes store one logit", "sm90", TILE,
        "return kLanes < 4 || ptx::lane_index() % 4 < 2;", "return true;",
        "race", ("logits", "nothing orders"), _ALL_HEADS,
    ),
    _fault(
        "global memory before the kernel ahead is done", "sm90", SM90,
        "  ptx::grid_dependency_wait();  // nothing above reads what a kernel ahead may have written\n"
        "  find_run<S>(args, smem.schedule);\n",
        "  find_run<S>(args, smem.schedule);\n  ptx::grid_dependency_wait();\n",
        "grid-dependency", ("griddepcontrol",),
    ),
    # --- sm89
    _fault(
        "no wait for cp.async", "sm89", SM89, "      ptx::cp_async_wait_group<S.kv_stages - 2>();\n", "",
        "pending-async", ("copy", "in flight"),
    ),
    _fault(
        "no block barrier behind cp.async", "sm89", SM89,
        "      ptx::sync_threads();  // the stage is there for all, and all are done with the one before it\n", "",
        "race pending-async uninitialized", ("smem",),
    ),
    _fault(
        "a unit's query overwritten while others read it", "sm89", SM89,
        "    ptx::cp_async_wait_group<0>();\n    ptx::sync_threads();  // before the next unit's query "
        "overwrites this one\n", "    ptx::cp_async_wait_group<0>();\n",
        "race", ("nothing orders",), MqaCase(num_q=70, num_kv=300, num_sms=1, windows="full"),
    ),
    _fault(
        "ldmatrix of an odd address", "sm89", FRAGMENTS,
        "ldmatrix_x4(a, rows + swizzled_offset<kRowBytes>(lane % 16, 2 * step + lane / 16)",
        "ldmatrix_x4(a, rows + 8 + swizzled_offset<kRowBytes>(lane % 16, 2 * step + lane / 16)",
        "alignment", ("ldmatrix",),
    ),
    _fault(
        "shared memory through a plain pointer", "sm89", SM89,
        "  find_run<S>(args, smem.schedule);\n",
        "  smem.schedule.cut_block[0] = 0;\n  find_run<S>(args, smem.schedule);\n",
        "direct-access", ("plain pointer",),
    ),
    # --- MX formats
    _fault(
        "no proxy fence behind rebased query rows", "sm90", SM90, "    ptx::fence_proxy_async();\n", "",
        "proxy-fence", ("wgmma",), _MXFP8,
    ),
    _fault(
        "no group barrier behind rebased query rows", "sm90", SM90,
        "    ptx::fence_proxy_async();\n    ptx::barrier_sync(barrier, kMqaGroupRows);\n",
        "    ptx::fence_proxy_async();\n", "race proxy-fence uninitialized", ("math",), _MXFP8,
    ),
    _fault(
        "packed query rows overwritten before all are read", "sm90", SM90,
        "    if constexpr (kExpands) ptx::barrier_sync(barrier, kMqaGroupRows);  // all packed rows are read\n", "",
        "race", ("swizzled_offset<S.query_row_bytes()>", "nothing orders"), _MXFP4,
    ),
    Fault(
        "a stage posted before it says which groups it fills",
        "sm90",
        (
            Edit(SM90, "      if constexpr (S.is_mx())\n        ptx::store_shared_i32(ptx::smem_addr(&smem.mx.full_",
                 "      ptx::mbarrier_arrive_expect_tx(filled, kBytes);\n"
                 "      if constexpr (S.is_mx())\n        ptx::store_shared_i32(ptx::smem_addr(&smem.mx.full_"),
            Edit(SM90, "groups_inside<S>(unit, row));\n      ptx::mbarrier_arrive_expect_tx(filled, kBytes);\n",
                 "groups_inside<S>(unit, row));\n"),
        ),
        ("race", "uninitialized"),
        ("full_groups",),
        _MXFP8,
    ),
    _fault(
        "lane 0 of the kv warp ahead of the others", "sm90", SM90,
        "      ptx::sync_warp();  // all lanes have read the unit before lane 0 goes on\n", "",
        "race", ("(kv), lane", "nothing orders"), _MXFP8_UNITS,
    ),
    _fault(
        "exponents of query rows beyond the last", "sm90", TILE,
        "if (row >= args.num_q || head >= args.num_heads) return mx_shared_exponent(kMxBias);",
        "if (head >= args.num_heads) return mx_shared_exponent(kMxBias);", "bounds", ("q scale",), _MXFP8,
    ),
    _fault(
        "kv rows beyond the last rebased", "sm90", REBASE, "in_step < kRows && row < args.num_rows",
        "in_step < kRows", "bounds", ("mqa_rebase",), _MXFP8,
    ),
    # --- the folded reduction
    _fault(
        "digits of one group in another's place", "sm90", SM90,
        "rows + (group * S.group_rows() + kMqaGroupRows) * S.head_dim",
        "rows + (group / 2 * S.group_rows() + kMqaGroupRows) * S.head_dim",
        "pending-async", ("overwrites shared memory", "maps.folded"), _FOLDED,
    ),
    _fault(
        "digits over the octet before theirs", "sm90", SM90,
        "rows + (group * S.group_rows() + kMqaGroupRows) * S.head_dim",
        "rows + (group * S.group_rows() + kMqaGroupRows - 8) * S.head_dim",
        "pending-async", ("overwrites shared memory", "maps.folded"), _FOLDED,
    ),
    _fault(
        "digits not among the bytes of the queries", "sm90", SM90,
        "ptx::mbarrier_arrive_expect_tx(query_filled, S.query_load_bytes());",
        "ptx::mbarrier_arrive_expect_tx(query_filled, kMqaGroups * kMqaGroupRows * S.head_dim);",
        "mbarrier", ("query_filled", "bytes"), _FOLDED,
    ),
    _fault(
        "query rows beyond the last folded", "sm90", FOLD, "  if (row >= logits.num_q) return;  // the whole warp\n",
        "", "bounds", ("mqa_fold",), _FOLDED,
    ),
    _fault(
        "digit rows half as far apart", "sm90", FOLD, "i64{row} * S.folded_rows() * S.head_dim + lane * 16",
        "i64{row} * S.folded_rows() / 2 * S.head_dim + lane * 16", "race", ("workspace",), _FOLDED,
    ),
]  # fmt: skip


def altered_include(fault: Fault, folder: Path) -> Path:
    """The package's include folder with the fault in it; every edit must apply as often as it says."""
    include = folder / "include"
    shutil.copytree(build.PACKAGE_INCLUDE, include)
    for edit in fault.edits:
        occurs = 0
        for file in _PARTS.get(edit.file, (edit.file,)):
            path = include / "deep_kernels" / file
            text = path.read_text()
            occurs += text.count(edit.old)
            path.write_text(text.replace(edit.old, edit.new))
        assert occurs == edit.count, f"{fault.name}: '{edit.old}' occurs {occurs} times"
    return include
