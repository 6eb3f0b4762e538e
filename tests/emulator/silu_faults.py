"""Faults that are put into copies of the FP8 prefill MLP's kernels: the emulator or the oracle must see each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from silu_cases import Case

from .faults import Edit, Fault
from .silu_variants import Variant

LOOP = "kernels/block_scaled_sm89.cuh"
FOLD = "kernels/silu_fold_sm89.cuh"
GEMM = "kernels/block_gemm_sm89.cuh"
MUL = "kernels/silu_mul.cuh"
MATH = "kernels/silu_math.cuh"
MMA = "tile/e4m3_mma.cuh"
CORE_SM90 = "kernels/block_gemm_core_sm90.cuh"
CLUSTER = "tile/cluster.cuh"
FOLD_SM90 = "kernels/silu_fold_sm90.cuh"
GEMM_SM90 = "kernels/block_gemm_sm90.cuh"

WRONG = "wrong"  # no fault of the machine: the oracle sees it

_PLAIN = Variant("sm89", "64", "interleaved")
_SMALL = Variant("sm89", "32", "interleaved", 2)
_ONE_STAGE = Variant("sm89", "32", "interleaved", 1)
_TWO_PASS = Variant("sm89", "64", "two_pass")
_LARGE = Variant("sm89", "128", "interleaved")
_CLUSTER = Variant("sm90", "64x2")
_LARGE_CLUSTER = Variant("sm90", "192x2")
_OVERLAPPING = Variant("sm90", "128")

# Several tiles of tokens and of columns, all of them cut off.
_BASE = Case(num_tokens=139, k=400, num_columns=272, layout="strided", out=True)


_ARRIVE = "          ptx::mbarrier_arrive(ptx::smem_addr(&smem.filled[stages.slot]));\n"  # of a scale warp's lane


@dataclass(frozen=True)
class SiluFault(Fault):
    """A mistake, and the call that meets it: `op` is fold, gemm or mul."""

    op: str = "fold"
    variant: Variant = _PLAIN
    silu: Case = _BASE


def _fault(
    name: str, kinds: str, edits: tuple[Edit, ...], words: tuple[str, ...] = (), op: str = "fold",
    variant: Variant = _PLAIN, **changes: Any,
) -> SiluFault:  # fmt: skip
    silu = replace(_BASE, **changes)
    return SiluFault(name, variant.arch, edits, tuple(kinds.split()), words, op=op, variant=variant, silu=silu)


SILU_FAULTS = [
    # --- barriers and waits that are missing
    _fault(
        "copies that nobody waits for", "pending-async uninitialized race",
        (Edit(LOOP, "        ptx::cp_async_wait_group<kAhead - 1>();\n", ""),), ("stage",),
    ),
    _fault(
        "a stage is loaded while it is read", "pending-async uninitialized race",
        (Edit(LOOP, "        ptx::sync_threads();  // the stage is there", "        // the stage is there"),),
    ),
    _fault(
        "the only stage is loaded while it is read", "pending-async race",
        (Edit(LOOP, "        ptx::sync_threads();  // all are done with the only stage\n", ""),), variant=_ONE_STAGE,
    ),
    _fault(
        "maxima are read before all warps have posted theirs", "uninitialized race",
        (Edit(FOLD, "    ptx::sync_threads();\n", ""),), ("silu_fold_sm89.cuh",),
    ),
    _fault(
        "scales that are posted behind the barrier", "uninitialized race",
        (Edit(LOOP, "      add_stage(sums);\n", "      post_scale();\n      add_stage(sums);\n"),
         Edit(LOOP, "        post_scale();\n        ptx::cp_async_wait_group", "        ptx::cp_async_wait_group", 2)),
    ),
    _fault(
        "a converged operation in a branch", "divergence",
        (Edit(FOLD, "    if (token >= args.gemm.num_tokens) return;\n",
              "    if (token >= args.gemm.num_tokens) return;\n    ptx::sync_warp();\n"),),
    ),
    # --- places beyond the ends
    _fault(
        "a chunk behind the end of k", "bounds",
        (Edit(LOOP, "k + 16 * copied_chunk(thread) < args.k", "k + 16 * copied_chunk(thread) <= args.k"),),
    ),
    _fault(
        "tokens behind the last one", "bounds",
        (Edit(LOOP, "source.tokens = args.num_tokens - token;", "source.tokens = kWarpTokens;"),),
    ),
    _fault(
        "rows behind the last one", "bounds",
        (Edit(LOOP, "source.columns = rows.num_columns - row;", "source.columns = kScaleBlock;"),),
    ),
    _fault(
        "scales behind the last token", "bounds",
        (Edit(LOOP, "if (half < 0) return token < args.num_tokens ? ", "if (half < 0) return token >= 0 ? "),),
    ),
    _fault(
        "scales behind the last row", "bounds",
        (Edit(LOOP, " || half * step.columns >= rows.num_columns) return", ") return"),), op="gemm",
        num_columns=384,
    ),
    _fault(
        "codes behind the last column", "bounds",
        (Edit(FOLD, "return column(group) < args.num_columns;", "return column(group) < args.num_columns + 16;"),),
        ("out",),
    ),
    _fault(
        "codes behind the last token", "bounds",
        (Edit(FOLD, "    if (token >= args.gemm.num_tokens) return;\n", ""),), ("out",),
    ),
    _fault(
        "all lanes of a quad store one scale", "race",
        (Edit(FOLD, "if (Shape::column_warp() == 0 && ptx::lane_index() % 4 == 0)", "if (Shape::column_warp() == 0)"),),
        ("out scale",),
    ),
    _fault(
        "columns behind the last one of the GEMM", "bounds race",
        (Edit(GEMM, " || column >= args.num_columns) return;", ") return;"),), ("out",), op="gemm",
    ),
    _fault(
        "activations behind the last column", "bounds race",
        (Edit(MUL, "token < args.num_tokens && column < args.num_columns}", "token < args.num_tokens}"),), op="mul",
    ),
    # --- numbers that are wrong
    _fault(
        "gate and up swapped", WRONG,
        (Edit(FOLD, "sums.pair(gate, 0, octet, row);", "sums.pair(gate, kUpHalf, octet, row);"),
         Edit(FOLD, "sums.pair(up, kUpHalf, octet, row);", "sums.pair(up, 0, octet, row);")),
    ),
    _fault(
        "gate and up passes swapped", WRONG,
        (Edit(FOLD, "const i32 operand = unit % kUnitsPerTile;", "const i32 operand = 1 - unit % kUnitsPerTile;"),),
        variant=_TWO_PASS,
    ),
    _fault(
        "act(gate) of the octet beside", WRONG,
        (Edit(FOLD, "smem.gate.load(gate, row * Shape::kOctets + octet);",
              "smem.gate.load(gate, row * Shape::kOctets + (octet ^ 1));"),), variant=_TWO_PASS,
    ),
    _fault(
        "up takes the scales of gate", WRONG,
        (Edit(LOOP, "(rows.scale_row + half * step.scale_rows)", "i64{rows.scale_row}"),),
    ),
    _fault(
        "scales of the block of rows before", WRONG,
        (Edit(FOLD, ".scale_row = operand * column_blocks() + at.block",
              ".scale_row = operand * column_blocks() + max_of(at.block - 1, 0)"),),
    ),
    _fault(
        "up scales begin before a cut-off block", WRONG,
        (Edit(FOLD, "return {args.num_columns, 0, column_blocks()};",
              "return {args.num_columns, 0, args.num_columns / kScaleBlock};"),),
    ),
    _fault(
        "the first scale of a token for all of k", WRONG,
        (Edit(LOOP, "source.scale + block * args.x_scale_block_stride", "source.scale"),),
    ),
    _fault(
        "the first scale of a row for all of k", WRONG,
        (Edit(LOOP, "source.scale + block * args.w_scale_block_stride", "source.scale"),),
    ),
    _fault(
        "scales of other tokens", WRONG,
        (Edit(LOOP, "of_token[i / 2]", "of_token[i % 4]"),),
    ),
    _fault(
        "the last block of k left out", WRONG,
        (Edit(LOOP, "return ceil_div(args.k, kScaleBlock); }", "return args.k / kScaleBlock; }"),), k=144,
    ),
    _fault(
        "the second half of every 32 of k left out", WRONG,
        (Edit(MMA, "pair < 2; ++pair) ptx::mma", "pair < 1; ++pair) ptx::mma"),),
    ),
    _fault(
        "rows of w in another order", WRONG,
        (Edit(LOOP, "lane * kLaneColumns + 2 * octet + place % 2", "lane * kLaneColumns + 2 * octet + 1 - place % 2"),),
    ),
    _fault(
        "the second pass takes the rows of the first", WRONG,
        (Edit(LOOP, "const i32 of_tile = pass * Shape::kPassOctets + octet;\n      const i32 row",
              "const i32 of_tile = octet;\n      const i32 row"),), variant=_LARGE,
    ),
    _fault(
        "chunks that are copied without their swizzle", WRONG,
        (Edit(LOOP, "tile::swizzled_offset<kScaleBlock>(copied_row(thread), copied_chunk(thread))",
              "copied_row(thread) * kScaleBlock + 16u * copied_chunk(thread)"),),
    ),
    _fault(
        "the maximum of one warp's columns", WRONG,
        (Edit(FOLD, "warp < Shape::kColumnWarps; ++warp)", "warp < 1; ++warp)"),),
    ),
    _fault(
        "the maximum of one lane's columns", WRONG,
        (Edit(FOLD, "fold::lanes_maximum<4>(maximum.value())", "maximum.value()"),), variant=_SMALL,
    ),
    _fault(
        "only the first token's scale is stored", WRONG,
        (Edit(FOLD, "if (Shape::column_warp() == 0 && ptx::lane_index() % 4 == 0)", "if (ptx::thread_index() == 0)"),),
    ),
    _fault(
        "the tile beside", "wrong bounds race",
        (Edit(FOLD, "smem, work.order().at(tile)}", "smem, work.order().at(tile ^ 1)}"),),
    ),
    _fault(
        "sums that are not cleared", "wrong uninitialized",
        (Edit(LOOP, "    sums.clear();\n", ""),),
    ),
    _fault(
        "scales that are not rounded up", WRONG,
        (Edit(MATH, "(bits & kMantissa) > kThreeQuarters ? 1 : 0", "0"),), scale_fmt="ue8m0",
    ),
    _fault(
        "halves of the GEMM's tile swapped", WRONG,
        (Edit(GEMM, "sums.pair(pair, half, ", "sums.pair(pair, 1 - half, "),), op="gemm",
    ),
    _fault(
        "a maximum of two blocks", WRONG,
        (Edit(MUL, "lanes_maximum<kBlockLanes>", "lanes_maximum<2 * kBlockLanes>"),), op="mul",
    ),
    _fault(
        "up columns of another place", WRONG,
        (Edit(MUL, "from + args.num_columns", "from + args.num_columns - 8"),), op="mul",
    ),
    # --- sm90: who fills and drains the ring
    _fault(
        "the other block is not told that a stage is drained", "deadlock",
        (Edit(CLUSTER, "ptx::mbarrier_arrive_peer(ptx::peer_smem(barrier, lane));",
              "ptx::mbarrier_arrive_peer(ptx::peer_smem(barrier, ptx::cluster_rank()));"),
         Edit(CLUSTER, "if (lane < kBlocks) ", "if (lane < 1) ")),
        variant=_CLUSTER,
    ),
    _fault(
        "a stage that one block has drained is filled", "mbarrier race pending-async cluster",
        (Edit(CORE_SM90, "4 * S.token_groups * S.cluster);", "4 * S.token_groups);"),), variant=_LARGE_CLUSTER,
        k=2176,
    ),
    _fault(
        "a warp that arrives for lanes which still read factors", "race",
        (Edit(CLUSTER, "  ptx::sync_warp();\n  const i32 lane", "  const i32 lane"),), ("factor",), variant=_CLUSTER,
        k=2176,
    ),
    _fault(
        "scales into a stage that is not drained", "mbarrier race",
        (Edit(CORE_SM90, "        ptx::mbarrier_wait(ptx::smem_addr(&smem.drained[stages.slot]), stages.parity);\n"
              "        if (ptx::lane", "        if (ptx::lane"),), variant=_CLUSTER, k=2176,
    ),
    _fault(
        "a stage that counts no arrival of its scale warps", "mbarrier race uninitialized",
        (Edit(CORE_SM90, "1 + 8 * S.token_groups);", "1);"),), variant=_OVERLAPPING,
    ),
    _fault(
        "a scale warp whose lanes arrive before they write", "race uninitialized",
        (Edit(CORE_SM90, f"          store(scales);\n{_ARRIVE}", f"{_ARRIVE}          store(scales);\n"),),
        variant=_CLUSTER,
    ),
    _fault(
        "the next stage is not waited for", "pending-async uninitialized race",
        (Edit(CORE_SM90, "    stages.next();\n    wait_for_stage();\n", "    stages.next();\n"),), variant=_CLUSTER,
    ),
    _fault(
        "a copy of x for the own block alone", "deadlock",
        (Edit(CORE_SM90, "(1u << S.cluster) - 1);", "1u << rank);"),), ("bytes are expected",), variant=_CLUSTER,
    ),
    # --- sm90: start and end of a cluster
    _fault(
        "mbarriers of a block that may not have started", "cluster",
        (Edit(CLUSTER, "    ptx::cluster_arrive_relaxed();\n    ptx::cluster_wait();\n",
              "    ptx::sync_threads();\n"),),
        ("may not have started",), variant=_CLUSTER,
    ),
    _fault(
        "a block that ends before the other's last arrivals", "cluster",
        (Edit(CORE_SM90, "  tile::drain_ring<S.cluster>(smem.drained, stages);\n", ""),), ("rank",),
        op="gemm", variant=_CLUSTER,  # the fold's last maxima tell of those arrivals too
    ),
    # --- sm90: maxima from the other block
    _fault(
        "maxima that nobody waits for", "pending-async race uninitialized",
        (Edit(FOLD_SM90, "    ptx::mbarrier_wait(received, tiles.parity);\n", ""),), variant=_CLUSTER,
    ),
    _fault(
        "maxima over some that may not have been read", "race",
        (Edit(FOLD_SM90, "ptx::mbarrier_arrive_peer(ptx::peer_smem(received, peer));", ""),
         Edit(CORE_SM90, "ptx::mbarrier_init(ptx::smem_addr(&smem.mailbox.received[i % 2][i / 2]), 2);",
              "ptx::mbarrier_init(ptx::smem_addr(&smem.mailbox.received[i % 2][i / 2]), 1);")), variant=_CLUSTER,
    ),
    _fault(
        "maxima of two tiles in one place", "race pending-async",
        (Edit(FOLD_SM90, "smem.mailbox.maxima[tiles.slot]", "smem.mailbox.maxima[0]"),), variant=_CLUSTER,
    ),
    _fault(
        "the maxima of one block", WRONG,
        (Edit(FOLD_SM90, "ptx::max_nan(amax[r], ptx::load_shared_f32",
              "ptx::max_nan(amax[r], 0.0f * ptx::load_shared_f32"),),
        variant=_CLUSTER,
    ),
    _fault(
        "maxima of the token eight before", WRONG,
        (Edit(FOLD_SM90, "lane % 4 == 0 ? amax[0] : amax[1]", "amax[0]"),), variant=_CLUSTER,
    ),
    # --- sm90: places
    _fault(
        "both blocks store the scale", "race",
        (Edit(FOLD_SM90, "if (first_column == 0 && ", "if ("),), ("out scale",), variant=_CLUSTER,
    ),
    _fault(
        "the other block's columns begin too early", "race wrong",
        (Edit(FOLD_SM90, "first_column(tile::block_rank<S.cluster>() * (S.tile().rows() / 2))",
              "first_column(tile::block_rank<S.cluster>() * (S.tile().rows() / 4))"),), variant=_CLUSTER,
    ),
    _fault(
        "columns of a block that has none", "bounds race",
        (Edit(FOLD_SM90, "if (first_column + column < args.num_columns)", "if (column < args.num_columns)"),),
        variant=_CLUSTER,
    ),
    _fault(
        "scales of tokens that do not exist", "bounds",
        (Edit(CORE_SM90, "token + 8 * i < args.num_tokens", "token >= 0"),), variant=_CLUSTER,
    ),
    _fault(
        "scales of k blocks that do not exist", "bounds",
        (Edit(CORE_SM90, "min_of(first_block + lane % kBlocks, num_k - 1)", "first_block + lane % kBlocks"),),
        variant=_CLUSTER, k=144,
    ),
    _fault(
        "columns of the GEMM that do not exist", "bounds race",
        (Edit(GEMM_SM90, "token >= args.gemm.num_tokens || first >= args.num_columns",
              "token >= args.gemm.num_tokens"),
         Edit(GEMM_SM90, "if (column(c) < args.num_columns) ptx::store_global(row + column(c), value[c]);",
              "ptx::store_global(row + column(c), value[c]);")), op="gemm", variant=_CLUSTER, num_columns=80,
    ),
    # --- sm90: numbers that are wrong
    _fault(
        "shares of x exchanged", WRONG,
        (Edit(CORE_SM90, "smem.x[slot][rank * kShare", "smem.x[slot][(S.cluster - 1 - rank) * kShare"),),
        variant=_CLUSTER,
    ),
    _fault(
        "rows of w of the other block", WRONG,
        (Edit(CORE_SM90, "rows.up * kScaleBlock + rank", "rows.up * kScaleBlock + (1 - rank)"),),
        variant=_LARGE_CLUSTER,
    ),
    _fault(
        "factors of the first stage", "wrong race",
        (Edit(CORE_SM90, "factors + stages.slot * sizeof(smem.factor[0])", "factors"),), variant=_LARGE_CLUSTER,
    ),
    _fault(
        "factors of gate and up swapped", WRONG,
        (Edit(CORE_SM90, "factor[i / 2][i % 2] = ", "factor[i / 2][1 - i % 2] = "),), variant=_CLUSTER,
    ),
    _fault(
        "factors of the token eight beside", WRONG,
        (Edit(CORE_SM90, "factor[i / 2][i % 2] = ", "factor[1 - i / 2][i % 2] = "),), variant=_OVERLAPPING,
    ),
    _fault(
        "factors of the k block beside", WRONG,
        (Edit(CORE_SM90, "% kBlocks == i)", "% kBlocks == (i + 1) % kBlocks)"),), variant=_CLUSTER,
    ),
    _fault(
        "factors of another warpgroup's tokens", WRONG,
        (Edit(CORE_SM90, "tile.token * S.tile_tokens() + 64 * group;", "tile.token * S.tile_tokens();"),),
        variant=_LARGE_CLUSTER,
    ),
    _fault(
        "the last turn of an even number of k blocks left out", "wrong deadlock mbarrier",
        (Edit(CORE_SM90, "      take_last_turn(part[1]);\n", ""),), variant=_CLUSTER,
    ),
    _fault(
        "sums that are cleared before they are collected", WRONG,
        (Edit(CORE_SM90, "    const auto collected = epilogue.collect(math, done);\n    math.clear();\n",
              "    math.clear();\n    const auto collected = epilogue.collect(math, done);\n"),), variant=_OVERLAPPING,
    ),
    _fault(
        "halves of the GEMM's tile swapped on sm90", WRONG,
        (Edit(GEMM_SM90, "(2 * tile.block + half) * kScaleBlock", "(2 * tile.block + 1 - half) * kScaleBlock"),),
        op="gemm", variant=_CLUSTER,
    ),
    _fault(
        "rows of w permuted, columns not", "race wrong",
        (Edit(GEMM_SM90, "column_of(permuted, 4 * index", "column_of(false, 4 * index"),), op="gemm", variant=_CLUSTER,
        num_columns=384,
    ),
]  # fmt: skip
