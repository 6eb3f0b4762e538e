"""Faults that are put into copies of the attention kernels: the emulator or the oracle must see each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from attention_cases import Case

from .faults import Edit, Fault

SM89 = "kernels/attention_sm89.cuh"
SM90 = "kernels/attention_sm90.cuh"
UNIT = "kernels/attention_unit_sm90.cuh"
MATH = "kernels/attention_math_sm90.cuh"
QUEUE = "kernels/attention_queue.cuh"
SOFTMAX = "kernels/attention_softmax.cuh"
TILES = "kernels/attention_tiles.cuh"
JOIN = "kernels/attention_join.cuh"
FRAGMENTS = "tile/fragments.cuh"
CLUSTER = "tile/cluster.cuh"
LAYOUT = "tile/layout.cuh"

WRONG = "wrong"  # no fault of the machine: the oracle sees it

# Several tiles of queries and of keys, all of them cut off.
_BASE = Case(2, 140, 150, (4, 2), causal=True, out=True)
_MEMBERS = ((70, 80), (20, 30), (150, 150))
# Of sm90: more units for a block than its slots for them, also packed; two blocks that share keys; ordered groups that
# see fewer tiles of keys than others.
_UNITS: dict[str, Any] = {"batch": 6, "num_q": 200}
_PACKED_UNITS = (*_MEMBERS, (0, 40), (33, 60))
_CLUSTERED: dict[str, Any] = {"batch": 1, "num_q": 290, "num_kv": 330, "heads": (2, 2), "head_dim": 256}
_PACKED: dict[str, Any] = {"num_q": 20, "num_kv": 133, "heads": (14, 2)}  # rows without a query, two units for a head
_WAYS: dict[str, Any] = {"num_splits": 6, "num_kv": 600}  # two warps join a row
_PARTS: dict[str, Any] = {"num_splits": 40, "num_kv": 2600, "num_q": 5}  # more than eight warps load at once
_UNEQUAL: dict[str, Any] = {"num_q": 180, "num_kv": 300, "head_dim": 128}


@dataclass(frozen=True)
class AttentionFault(Fault):
    """A mistake, and the call that meets it: of a dense batch, of packed members of these lengths, or `check_jumps`."""

    attention: Case = _BASE
    lengths: tuple[tuple[int, int], ...] = ()
    jumps: bool = False  # or of scores far from each other, and below 0


def _fault(
    name: str, kinds: str, edits: tuple[Edit, ...], words: tuple[str, ...] = (),
    lengths: tuple[tuple[int, int], ...] = (), backend: str = "sm89", jumps: bool = False, **changes: Any,
) -> AttentionFault:  # fmt: skip
    case = replace(_BASE, **changes)
    return AttentionFault(
        name, backend, edits, tuple(kinds.split()), words, attention=case, lengths=lengths, jumps=jumps
    )


_sm90 = partial(_fault, backend="sm90")

# Bands of six heads, and a rest of two: else all heads of a case are in one. No fault.
_NARROW = Edit(QUEUE, "(32 << 20) / (S.head_dim() * 4)", "450")
NARROW_BANDS = [_sm90(f"narrow bands, {n} splits", "", (_NARROW,), num_q=200, num_splits=n) for n in (1, 2)]


_SM89_FAULTS = [
    # --- barriers and waits that are missing
    _fault(
        "copies that nobody waits for", "pending-async uninitialized race",
        (Edit(SM89, "      ptx::cp_async_wait_group<kAhead - 1>();\n      ptx::sync_threads();  // the tile",
              "      ptx::sync_threads();  // the tile"),),
    ),
    _fault(
        "keys are loaded while they are read", "pending-async race",
        (Edit(SM89, "      ptx::sync_threads();  // the tile", "      // the tile"),),
    ),
    _fault(
        "queries are read before all warps have copied theirs", "pending-async uninitialized race",
        (Edit(SM89, "      ptx::sync_threads();\n      keep_queries();", "      keep_queries();"),),
    ),
    _fault(
        "the next rows overwrite those still in use", "pending-async race",
        (Edit(SM89, "    ptx::sync_threads();  // before the next tile's rows", "    // before the next tile's rows"),),
        head_dim=256,
    ),
    _fault(
        "a converged operation behind rows that do not exist", "divergence",
        (Edit(SM89, "    const bool stores_sum =", "    ptx::sync_warp();\n    const bool stores_sum ="),),
    ),
    # --- places beyond the ends
    _fault(
        "queries behind the last one", "bounds",
        (Edit(SM89, "tile.member.num_q - tile.first_query);", "S.tile_rows);"),),
    ),
    _fault(
        "keys behind the last one", "bounds",
        (Edit(SM89, "const i32 left = tile.member.num_kv - first;", "const i32 left = S.tile_keys;"),),
    ),
    _fault(
        "results behind the last query", "bounds race read-only",
        (Edit(SM89, "if (query(row) < tile.member.num_q) store_row(row);", "store_row(row);"),),
    ),
    _fault(
        "all lanes of a quad store one sum", "race",
        (Edit(SM89, "ptx::lane_index() % 4 == 0;", "true;"),), ("lse",),
    ),
    # --- numbers that are wrong
    _fault(
        "the mask of the other row", WRONG,
        (Edit(SOFTMAX, "visible[row_of_element(i)] - column", "visible[1 - row_of_element(i)] - column"),),
    ),
    _fault(
        "a key too many is seen", WRONG,
        (Edit(SOFTMAX, "column_of_element(i) >= visible", "column_of_element(i) > visible"),),
    ),
    _fault(
        "masked tiles taken for whole ones", WRONG,
        (Edit(TILES, "S.causal) / S.tile_keys;", "S.causal) / S.tile_keys + 1;"),),
    ),
    _fault(
        "the last tile of keys left out", WRONG,
        (Edit(TILES, "ceil_div<i64>(end, S.tile_keys)", "end / S.tile_keys"),),
    ),
    _fault(
        "sums of earlier tiles that are not scaled", WRONG,
        (Edit(SM89, "sums[i] *= factor[flash::row_of_element(i)];", "sums[i] *= 1.0f;"),),
    ),
    _fault(
        "sums of earlier tiles scaled by the other row's factor", WRONG,
        (Edit(SM89, "sums[i] *= factor[flash::row_of_element(i)];", "sums[i] *= factor[i % 2];"),),
    ),
    _fault(
        "a sum of powers that is not scaled", WRONG,
        (Edit(SOFTMAX, "sum[row] * factor", "sum[row]"),),
    ),
    _fault(
        "the maximum of one lane", WRONG,
        (Edit(SOFTMAX, "      maximum = ptx::max_nan(maximum, ptx::shuffle_xor(maximum, mask));\n", "      ;\n"),),
    ),
    _fault(
        "low references taken for others", WRONG, (Edit(SOFTMAX, "!(reference >= -kMost)", "reference == kLowest"),),
        jumps=True,
    ),
    _fault(
        "references that never move again", WRONG,
        (Edit(SOFTMAX, "    moved = ptx::any(moved);\n", "    moved = low;\n"),), jumps=True,
    ),
    _fault(
        "powers relative to the other row's reference", WRONG,
        (Edit(SOFTMAX, "exponent(row_of_element(i), scores[i]", "exponent(1 - row_of_element(i), scores[i]"),),
    ),
    _fault(
        "the sum of one lane", WRONG,
        (Edit(SOFTMAX, "sum[row] += ptx::shuffle_xor(sum[row], mask);", ";"),),
    ),
    _fault(
        "values that are not transposed", WRONG,
        (Edit(FRAGMENTS, "ptx::ldmatrix_x4_trans(", "ptx::ldmatrix_x4("),),
    ),
    _fault(
        "powers in another order", WRONG,
        (Edit(SOFTMAX, "powers[8 * step + 2 * i], powers[8 * step + 2 * i + 1]",
              "powers[8 * step + 2 * (i ^ 1)], powers[8 * step + 2 * (i ^ 1) + 1]"),),
    ),
    _fault(
        "rows that are copied without their swizzle", WRONG,
        (Edit(SM89, "tile::swizzled_offset<kPanelBytes>(first + row, chunk % 8)",
              "(first + row) * kPanelBytes + 16u * (chunk % 8)"),),
    ),
    _fault(
        "the keys of another head", WRONG,
        (Edit(TILES, "tile.head / args.heads_per_kv();", "tile.head % args.num_kv_heads;"),),
    ),
    _fault(
        "a polynomial without its last coefficient", WRONG,
        (Edit(SOFTMAX, "ptx::fma(sum, fraction, 1.0f)", "ptx::fma(sum, fraction, 0.99f)"),), ex2=(1, 1),
    ),
    _fault(
        "a fraction that is rounded to nearest", WRONG,
        (Edit(SOFTMAX, "ptx::add_rm(bounded, kEx2Magic)", "(bounded + kEx2Magic)"),), ex2=(1, 1), num_kv=500,
    ),
    _fault(
        "members whose tiles begin too early", WRONG,
        (Edit(TILES, "(args) + index;", "(args);"),), lengths=_MEMBERS,
    ),
    _fault(
        "the keys of the member before", WRONG,
        (Edit(SM89, "const i64 token = tile.member.first_kv + first;", "const i64 token = first;"),),
        lengths=_MEMBERS,
    ),
    _fault(
        "parts that count alike", WRONG,
        (Edit(JOIN, "const float share = weight_of(split);", "const float share = 0.5f;"),), num_splits=2,
    ),
    _fault(
        "the first parts alone", WRONG,
        (Edit(JOIN, "    add(words, way);\n    DK_NO_UNROLL\n", "    add(words, way);\n    return;\n"),), **_PARTS,
    ),
    _fault(
        "parts behind the last one", WRONG + " bounds",
        (Edit(JOIN, "if (split < args.num_splits && has_chunk(j))", "if (has_chunk(j))"),
         Edit(JOIN, "      if (split >= args.num_splits) continue;\n", "")), num_splits=2,
    ),
    _fault(
        "sums of parts that are not there", WRONG + " bounds",
        (Edit(JOIN, "split < args.num_splits\n", "split < kMaxKvSplits\n"),), num_splits=2,
    ),
    _fault(
        "the parts of a row's other warps are left out", WRONG,
        (Edit(JOIN, "for (i32 other = 1; other < ways; ++other)", "for (i32 other = 1; other < 1; ++other)"),), **_WAYS,
    ),
    _fault(
        "warps of a row that take the same parts", WRONG + " uninitialized",
        (Edit(JOIN, ".way = warp % ways", ".way = 0"),), **_WAYS,
    ),
    _fault(
        "parts taken before they are given", "race uninitialized",
        (Edit(JOIN, "smem.values[warp]);\n      ptx::sync_threads();", "smem.values[warp]);"),), **_WAYS,
    ),
    _fault(
        "parts given before the last row's are taken", "race",
        (Edit(JOIN, "      ptx::sync_threads();  // before the next rows\n", ""),), **_WAYS,
    ),
    _fault(
        "rows of packed tokens behind the last member are joined too", WRONG,
        (Edit(JOIN, "clamp_to<i64>(args.cu_seqlens_q[args.batch], 0, args.total_q);", "args.total_q;"),),
        ("behind the last member",), lengths=_MEMBERS, num_splits=2,
    ),
]  # fmt: skip

_SM90_FAULTS = [
    # --- units: dealt out, read, given back
    _sm90(
        "no fence behind mbarrier.init", "proxy-fence",
        (Edit(UNIT, "  ptx::fence_mbarrier_init();\n", ""),),
    ),
    _sm90(
        "a unit posted before it is written", "race",
        (Edit(UNIT, "      tile::store_shared(smem.unit[slots.slot], unit);\n"
              "      ptx::mbarrier_arrive(ptx::smem_addr(&smem.unit_filled[slots.slot]));\n",
              "      ptx::mbarrier_arrive(ptx::smem_addr(&smem.unit_filled[slots.slot]));\n"
              "      tile::store_shared(smem.unit[slots.slot], unit);\n"),),
    ),
    _sm90(
        "a unit's slot is taken before it is given back", "race mbarrier",
        (Edit(UNIT, "      ptx::mbarrier_wait(ptx::smem_addr(&smem.unit_drained[slots.slot]), slots.parity);\n", ""),),
        **_UNITS,
    ),
    _sm90(
        "the tail warp is not among the readers of a unit", "race mbarrier",
        (Edit(UNIT, "S.varlen ? 3 : 2", "2"),), lengths=_PACKED_UNITS,
    ),
    _sm90(
        "a reader of units that does not exist", "deadlock",
        (Edit(UNIT, "S.varlen ? 3 : 2", "3"),), ("attention_unit_sm90.cuh", "schedule"), **_UNITS,
    ),
    _sm90(
        "a unit given back before all lanes have read it", "race",
        (Edit(CLUSTER, "  ptx::sync_warp();\n  const i32 lane = ptx::lane_index();",
              "  const i32 lane = ptx::lane_index();"),),
        **_UNITS,
    ),
    _sm90(
        "a unit given back before its results are stored by it", "race",
        (Edit(MATH, "    const RowTile unit = tile::load_shared(smem.unit[slot]);\n",
              "    units.give_back(slot);\n    const RowTile unit = tile::load_shared(smem.unit[slot]);\n"),
         Edit(MATH, "log2_sum(r); });\n    units.give_back(slot);\n", "log2_sum(r); });\n")), **_UNITS,
    ),
    _sm90(
        "results stored by the next unit", WRONG,
        (Edit(MATH, "        store(slot);\n        end_scores",
              "        store(units.slots.slot);\n        end_scores"),),
    ),
    _sm90(
        "the last unit is not announced", "deadlock",
        (Edit(UNIT, "  deal(RowTile{});\n", ""),), ("math", "0 of 1 arrivals"),
    ),
    # --- queries
    _sm90(
        "queries that nobody waits for", "pending-async uninitialized race",
        (Edit(MATH, "    wait_for_queries();\n    wait_for_keys();\n", "    wait_for_keys();\n"),),
    ),
    _sm90(
        "queries given back while products read them", "pending-async race uninitialized",
        (Edit(MATH, "    first_powers(scores, share);\n", "    first_powers(scores, share);\n    release_queries();\n"),
         Edit(MATH, "    release_queries();\n    return adds;\n", "    return adds;\n")),
    ),
    _sm90(
        "queries loaded before they are given back", "pending-async race mbarrier",
        (Edit(SM90, "ptx::mbarrier_wait(ptx::smem_addr(&smem.q_drained[stages.slot][group]), stages.parity);\n", ""),),
        **_UNITS,
    ),
    _sm90(
        "queries given back by the warps of all groups", "deadlock",
        (Edit(UNIT, "&smem.q_drained[stage][i]), 4)", "&smem.q_drained[stage][i]), kMathWarps)"),),
        ("queries", "4 of 12 arrivals"), **_UNITS,
    ),
    _sm90(
        "a group without keys keeps its queries", "deadlock",
        (Edit(MATH, "        wait_for_queries();\n        release_queries();\n",
              "        wait_for_queries();\n        qs.next();\n"),),
        ("queries", "0 of 4 arrivals"), **_UNITS,
    ),
    _sm90(
        "the query warp stays in its first phase", "pending-async race mbarrier deadlock",
        (Edit(SM90, "      ptx::sync_warp();\n      stages.next();\n", "      ptx::sync_warp();\n"),),
    ),
    _sm90(
        "fewer bytes of queries expected than copied", "mbarrier",
        (Edit(SM90, "kAttentionGroupRows * S.head_dim() * 2);", "kAttentionGroupRows * S.head_dim());"),),
        ("more than they expected",),
    ),
    _sm90(
        "all groups load the first group's queries", WRONG,
        (Edit(SM90, "unit.first_query + first_", "unit.first_query + 0 * first_"),),
    ),
    _sm90(
        "in a cluster every block loads the first block's queries", WRONG,
        (Edit(SM90, "unit.first_query + first_", "unit.first_query + group * kAttentionGroupRows + 0 * first_"),),
        **_CLUSTERED,
    ),
    _sm90(
        "the queries of a kv head", WRONG,
        (Edit(SM90, "token, 0,\n                       unit.head,",
              "token, 0,\n                       unit.kv_head,"),),
    ),
    # --- keys and values
    _sm90(
        "keys loaded into a stage in use", "pending-async race mbarrier",
        (Edit(SM90, "    ptx::mbarrier_wait(ptx::smem_addr(&smem.k_drained[stages.slot]), stages.parity);\n", ""),),
    ),
    _sm90(
        "values loaded into a stage in use", "pending-async race mbarrier",
        (Edit(SM90, "    ptx::mbarrier_wait(ptx::smem_addr(&smem.v_drained[stages.slot]), stages.parity);\n", ""),),
    ),
    _sm90(
        "the kv warp starts in the math warps' phase", "deadlock",
        (Edit(SM90, "tile::Ring<S.k_stages>::filler();", "tile::Ring<S.k_stages>::drainer();"),),
        ("keys and values", "0 of 12 arrivals"),
    ),
    _sm90(
        "the math warps start in the kv warp's phase", "deadlock",
        (Edit(MATH, "vs = tile::Ring<S.v_stages>::drainer();", "vs = tile::Ring<S.v_stages>::filler();"),),
    ),
    _sm90(
        "the first keys are not waited for", "pending-async uninitialized race",
        (Edit(MATH, "    wait_for_keys();\n    take_turn();\n    start_scores(scores);",
              "    take_turn();\n    start_scores(scores);"),),
    ),
    _sm90(
        "the next tile's keys are not waited for", "pending-async uninitialized race",
        (Edit(MATH, "    if (tile > share.begin && softmax.has_added()) wait_for_keys();\n",
              "    if (tile > share.begin + 1) wait_for_keys();\n"),), num_kv=500,
    ),
    _sm90(
        "values are not waited for", "pending-async uninitialized race",
        (Edit(MATH, "    wait_for_values();\n    start_sums(adds);\n    pass_turn();",
              "    start_sums(adds);\n    pass_turn();"),), causal=False, num_kv=500,
    ),
    _sm90(
        "the last values are not waited for", "pending-async uninitialized race",
        (Edit(MATH, "          wait_for_values();\n          start_sums(adds);\n", "          start_sums(adds);\n"),),
    ),
    _sm90(
        "the last values of a unit that another follows are not waited for", "pending-async uninitialized race",
        (Edit(MATH, "        wait_for_values();\n        start_sums(adds);\n        start_unit",
              "        start_sums(adds);\n        start_unit"),), **_UNITS,
    ),
    _sm90(
        "keys given back while the first products read them", "pending-async race",
        (Edit(MATH, "    ptx::wgmma_wait_group<0>(scores);\n    release_keys();\n",
              "    release_keys();\n    ptx::wgmma_wait_group<0>(scores);\n"),),
    ),
    _sm90(
        "values given back while the products read them", "pending-async race",
        (Edit(MATH, "    ptx::wgmma_wait_group<0>(sum);\n    release_values();\n    if",
              "    release_values();\n    ptx::wgmma_wait_group<0>(sum);\n    if"),),
        num_kv=500,
    ),
    _sm90(
        "a stage's offset in bytes of half the head", "pending-async race",
        (Edit(MATH, "S.tile_keys * S.head_dim() * 2 >> 4;", "S.tile_keys * S.head_dim() >> 4;"),),
    ),
    _sm90(
        "the keys of a head of queries", WRONG,
        (Edit(SM90, "filled, 0, token, panel, unit.kv_head, batch);", "filled, 0, token, panel, unit.head, batch);"),),
    ),
    _sm90(
        "the maps of no keys are prefetched", "tensor-map",
        (Edit(SM90, "    if (args.total_kv > 0) {", "    if (args.total_kv >= 0) {"),), num_kv=0,
    ),
    _sm90(
        "a unit without keys is loaded", "tensor-map",
        (Edit(SM90, "if (unit.keys.end > unit.keys.begin) load(unit);", "load(unit);"),), num_kv=0,
    ),
    # --- wgmma
    _sm90(
        "scores without wgmma.fence", "accumulator",
        (Edit(MATH, "    const u32 k = k_low + ks.slot * kStageUnits;\n    ptx::wgmma_fence();\n",
              "    const u32 k = k_low + ks.slot * kStageUnits;\n"),),
        ("wgmma.fence",),
    ),
    _sm90(
        "sums without wgmma.fence", "accumulator",
        (Edit(MATH, "    const u32 v = v_low + vs.slot * kStageUnits;\n    ptx::wgmma_fence();\n",
              "    const u32 v = v_low + vs.slot * kStageUnits;\n"),),
        ("wgmma.fence",),
    ),
    _sm90(
        "scores that are not committed", "accumulator",
        (Edit(MATH, "step > 0);\n    ptx::wgmma_commit_group();\n", "step > 0);\n"),),
    ),
    _sm90(
        "sums in flight while others are let go", "accumulator",
        (Edit(MATH, "ptx::wgmma_wait_group<1>(scores);", "ptx::wgmma_wait_group<2>(scores);"),),
    ),
    _sm90(
        "first scores read in flight", "accumulator",
        (Edit(MATH, "    ptx::wgmma_wait_group<0>(scores);\n", "    ptx::wgmma_wait_group<1>(scores);\n"),),
    ),
    _sm90(
        "sums scaled in flight", "accumulator",
        (Edit(MATH, "    ptx::wgmma_wait_group<0>(sum);\n    release_values();\n    if",
              "    ptx::wgmma_wait_group<1>(sum);\n    release_values();\n    if"),),
        num_kv=500,
    ),
    _sm90(
        "the last sums read in flight", "accumulator",
        (Edit(MATH, "          ptx::wgmma_wait_group<0>(sum);", "          ptx::wgmma_wait_group<1>(sum);"),),
    ),
    _sm90(
        "the last sums of a unit that another follows read in flight", "accumulator",
        (Edit(MATH, "ptx::wgmma_wait_group<1>(sum);", "ptx::wgmma_wait_group<2>(sum);"),), **_UNITS,
    ),
    _sm90(
        "powers overwritten while products read them", "accumulator",
        (Edit(MATH, "has_added()) wait_for_keys();\n    ptx::wgmma_wait_group<0>(sum);\n",
              "has_added()) wait_for_keys();\n    keep_powers(scores);\n    ptx::wgmma_wait_group<0>(sum);\n"),),
        num_kv=500,
    ),
    _sm90(
        "sums added to those of the unit before", WRONG,
        (Edit(MATH, "step > 0 || adds);", "true);"),),
    ),
    _sm90(
        "sums of the last tile alone", WRONG,
        (Edit(MATH, "step > 0 || adds);", "step > 0);"),),
    ),
    _sm90(
        "scores added to those of the tile before", WRONG,
        (Edit(MATH, "KMajor::make(k + tile::k_major_step<S.tile_keys>(step)), step > 0);",
              "KMajor::make(k + tile::k_major_step<S.tile_keys>(step)), true);"),),
    ),
    _sm90(
        "panels of values half as far apart", "descriptor",
        (Edit(LAYOUT, "kPanelUnits = static_cast<u32>(kRows * 128) >> 4;",
              "kPanelUnits = static_cast<u32>(kRows * 64) >> 4;"),),
        head_dim=128,
    ),
    _sm90(
        "the rank of a block in a descriptor", "descriptor",
        (Edit(LAYOUT, "return ((smem_addr & 0x3ffffu) >> 4) | (kPanelUnits << 16);",
              "return (smem_addr >> 4) | (kPanelUnits << 16);"),),
        **_CLUSTERED,
    ),
    # --- turns of ordered groups
    _sm90(
        "a turn that is not passed on", "deadlock",
        (Edit(MATH, "    start_sums(adds);\n    pass_turn();\n", "    start_sums(adds);\n"),),
    ),
    _sm90(
        "a turn passed on without having been taken", "barrier",
        (Edit(MATH, "    wait_for_keys();\n    take_turn();\n    start_scores(scores);\n    pass",
              "    wait_for_keys();\n    start_scores(scores);\n    pass"),),
    ),
    _sm90(
        "the last group passes its turn to nobody", "deadlock",
        (Edit(MATH, "1 + (group + 1) % kGroups, 256", "2 + group, 256"),),
    ),
    _sm90(
        "the first turn is the second group's", "deadlock",
        (Edit(MATH, "if (group == kGroups - 1) pass_turn();", "if (group == 0) pass_turn();"),),
    ),
    _sm90(
        "skipped tiles without a turn", "deadlock",
        (Edit(MATH, "      take_turn();\n      pass_turn();\n", ""),), **_UNEQUAL,
    ),
    _sm90(
        "a turn that counts one group's threads", "barrier",
        (Edit(MATH, "ptx::barrier_sync(1 + group, 256)", "ptx::barrier_sync(1 + group, 128)"),),
    ),
    # --- clusters
    _sm90(
        "no cluster barrier behind the setup", "cluster",
        (Edit(SM90, "  tile::sync_blocks<S.cluster>();\n", "  tile::sync_blocks<1>();\n"),), **_CLUSTERED,
    ),
    _sm90(
        "no barrier behind the setup", "race uninitialized mbarrier",
        (Edit(SM90, "  tile::sync_blocks<S.cluster>();\n", ""),),
    ),
    _sm90(
        "keys given back to the own block alone", "deadlock",
        (Edit(MATH, "tile::arrive_in_blocks<S.cluster>(ptx::smem_addr(&smem.k_drained",
              "tile::arrive_in_blocks<1>(ptx::smem_addr(&smem.k_drained"),),
        ("keys and values", "8 of 16 arrivals"), **_CLUSTERED,
    ),
    _sm90(
        "stages loaded when one block has drained them", "pending-async race mbarrier deadlock",
        (Edit(UNIT, "&smem.v_drained[i]), kMathWarps * S.cluster);", "&smem.v_drained[i]), kMathWarps);"),),
        **_CLUSTERED,
    ),
    _sm90(
        "stages filled by as many arrivals as blocks", "deadlock",
        (Edit(UNIT, "&smem.k_filled[i]), 1)", "&smem.k_filled[i]), S.cluster)"),),
        ("1 of 2 arrivals",), **_CLUSTERED,
    ),
    _sm90(
        "the bytes of the own panels alone", "mbarrier pending-async",
        (Edit(SM90, "ptx::mbarrier_arrive_expect_tx(filled, kTileBytes);",
              "ptx::mbarrier_arrive_expect_tx(filled, kTileBytes / S.cluster);"),),
        **_CLUSTERED,
    ),
    _sm90(
        "panels that the other block does not get", "deadlock",
        (Edit(SM90, "(1u << S.cluster) - 1);", "1u << tile::block_rank<S.cluster>());"),),
        ("bytes are expected and no copy",), **_CLUSTERED,
    ),
    _sm90(
        "both blocks load the same panels", "pending-async race",
        (Edit(SM90, "tile::block_rank<S.cluster>() * kPanels;", "0;"),), **_CLUSTERED,
    ),
    _sm90(
        "panels that land in the place of others", "pending-async race",
        (Edit(SM90, "ptx::smem_addr(&to[panel])", "ptx::smem_addr(&to[0])"),), **_CLUSTERED,
    ),
    _sm90(
        "a block ends before the other has given values back", "cluster",
        (Edit(SM90, "      tile::drain_ring<S.cluster>(smem.v_drained, vs);\n", ""),), **_CLUSTERED,
    ),
    _sm90(
        "a ring drained but for its last slot", "cluster",
        (Edit(CLUSTER, "for (i32 i = 0; i < kSlots; ++i, ring.next())",
              "for (i32 i = 0; i + 1 < kSlots; ++i, ring.next())"),),
        **_CLUSTERED,
    ),
    _sm90(
        "rows that two groups of a cluster have", "wrong race",
        (Edit(UNIT, "rank : 3 - rank", "rank : 2 - rank"),), **_CLUSTERED,
    ),
    # --- the tail warp
    _sm90(
        "the tail of the values is not cleared", WRONG,
        (Edit(SM90, "        if (values < S.tile_keys) clear_rows(smem.v[stages.slot], values);\n",
              ""),), lengths=_MEMBERS,
    ),
    _sm90(
        "one row of the tail is not cleared", WRONG,
        (Edit(SM90, "clear_rows(smem.v[stages.slot], values);",
              "clear_rows(smem.v[stages.slot], values + 1);"),), lengths=_MEMBERS,
    ),
    _sm90(
        "the last value is cleared", WRONG,
        (Edit(SM90, "clear_rows(smem.v[stages.slot], values);",
              "clear_rows(smem.v[stages.slot], values - 1);"),), lengths=_MEMBERS,
    ),
    _sm90(
        "the tail of the first panel alone", WRONG,
        (Edit(SM90, "panel < S.head_panels; ++panel) {", "panel < 1; ++panel) {"),), lengths=_MEMBERS, head_dim=128,
    ),
    _sm90(
        "a cleared tail without a proxy fence", "proxy-fence",
        (Edit(SM90, "    ptx::fence_proxy_async();\n", ""),), lengths=_MEMBERS,
    ),
    _sm90(
        "a tail cleared before the values have landed", "pending-async race",
        (Edit(SM90, "        ptx::mbarrier_wait(ptx::smem_addr(&smem.v_landed[stages.slot]), stages.parity);\n",
              ""),), lengths=_MEMBERS,
    ),
    _sm90(
        "values that do not come by the tail warp", "deadlock",
        (Edit(SM90, "S.varlen ? smem.v_landed[stages.slot] : smem.v_filled[stages.slot]",
              "smem.v_filled[stages.slot]"),), lengths=_MEMBERS,
    ),
    # --- what is masked, what is skipped
    _sm90(
        "the rightmost tile is not masked", WRONG,
        (Edit(MATH, "    if (S.causal || share.ends_inside()) mask(scores, share, share.end - 1);\n", ""),),
    ),
    _sm90(
        "the rightmost tile is masked by causal masks alone", WRONG,
        (Edit(MATH, "if (S.causal || share.ends_inside()) mask", "if (S.causal) mask"),), causal=False,
    ),
    _sm90(
        "a whole rightmost tile taken for one that is cut off, and the other way round", WRONG,
        (Edit(MATH, "(end - 1) * S.tile_keys < S.tile_keys", "(end - 1) * S.tile_keys >= S.tile_keys"),), causal=False,
    ),
    _sm90(
        "whole tiles begin with what the last row of the group sees", WRONG,
        (Edit(MATH, "unit.template full_end<S>(first)",
              "unit.template full_end<S>(first + kAttentionGroupRows - 1)"),), num_kv=500, head_dim=128,
    ),
    _sm90(
        "one tile too few is masked", WRONG,
        (Edit(MATH, "tile >= share.first_masked; --tile",
              "tile > share.first_masked; --tile"),), num_kv=300, head_dim=128,
    ),
    _sm90(
        "tiles that only other groups see are not passed over", "deadlock",
        (Edit(MATH, "    skip(share.loaded - share.end);\n", ""),), **_UNEQUAL,
    ),
    _sm90(
        "a group without keys passes nothing over", "deadlock",
        (Edit(MATH, "} else if (share.loaded > share.begin) {", "} else if (false) {"),), **_UNITS,
    ),
    _sm90(
        "passed over keys stay drained once", "deadlock",
        (Edit(MATH, "      wait_for_values();\n      release_values();\n    }\n", "    }\n"),), **_UNEQUAL,
    ),
    _sm90(
        "tiles of the next unit that only other groups see are not passed over", "deadlock",
        (Edit(MATH, "        skip(share.loaded - share.end - skipped);\n", ""),), **_UNITS,
    ),
    _sm90(
        "keys passed over further ahead of values than there are stages", "deadlock",
        (Edit(MATH, "min_of<i32>(share.loaded - share.end, S.v_stages)", "share.loaded - share.end"),),
        **{**_UNITS, "num_kv": 900, "causal": False},
    ),
    # --- two stages of queries
    _sm90(
        "queries of the other stage", WRONG + " pending-async race",
        (Edit(MATH, "q_low + qs.slot * kQueryStageUnits", "q_low"),), **_UNITS,
    ),
    _sm90(
        "queries that land in the other stage", WRONG + " pending-async race uninitialized",
        (Edit(SM90, "ptx::smem_addr(&smem.q[stage][group]), maps.q", "ptx::smem_addr(&smem.q[0][group]), maps.q"),),
        **_UNITS,
    ),
    _sm90(
        "rows without a query of the first stage alone are cleared", WRONG + " uninitialized",
        (Edit(SM90, "stage < S.q_stages(); ++stage)\n      for", "stage < 1; ++stage)\n      for"),),
        **{**_PACKED, "batch": 6},
    ),
    # --- which tiles, in which order
    _sm90(
        "a turn of the queue that not all take part in is left out", WRONG,
        (Edit(QUEUE, "index < count; index += clusters) deal", "index + clusters <= count; index += clusters) deal"),),
        causal=False,
    ),
    _sm90(
        "tiles of those that are alike that nobody takes", WRONG,
        (Edit(QUEUE, "for (u32 index = cluster; index", "for (u32 index = cluster + 1; index"),), causal=False,
    ),
    _sm90(
        "the first tile of a cluster is left out", WRONG,
        (Edit(QUEUE, "      if (cluster < count) deal(at(cluster));\n", ""),),
    ),
    _sm90(
        "nothing behind the first tiles", WRONG,
        (Edit(QUEUE, "if (count > clusters) deal_by_work(deal);", ""),), **_UNITS,
    ),
    _sm90(
        "a cluster that takes what another was found for", WRONG,
        (Edit(QUEUE, "static_cast<u32>(least % 256) == cluster", "static_cast<u32>(least % 256) == cluster + 1"),),
        **_UNITS,
    ),
    _sm90(
        "of a batch of tiles the first one again and again", WRONG + " race",
        (Edit(QUEUE, "index < count; ++index, mine >>= 1", "index < count; mine >>= 1"),), **_UNITS,
    ),
    _sm90(
        "sums that clusters have different ones of", WRONG + " race",
        (Edit(QUEUE, "== least) sum[j] += added;", "== least) sum[j] += cluster == 1 ? 0 : added;"),), **_UNITS,
    ),
    _sm90(
        "work in the place of the dealt out tiles", WRONG + " race bounds",
        (Edit(UNIT, "ptx::smem_addr(&smem.work)", "ptx::smem_addr(&smem.unit)"),), **_UNITS,
    ),
    _sm90(
        "blocks of a cluster take tiles of their own", WRONG + " deadlock race cluster",
        (Edit(QUEUE, "ptx::block_index() / S.cluster);", "ptx::block_index());"),), **_CLUSTERED,
    ),
    _sm90(
        "the last band is as wide as the others", WRONG + " bounds race read-only",
        (_NARROW, Edit(QUEUE, "min_of(band, heads - which * band)", "band")), num_q=200,
    ),
    _sm90(
        "a band without its splits", WRONG + " bounds race read-only",
        (_NARROW, Edit(QUEUE, "band * row_tiles * num_splits;", "band * row_tiles;")), num_splits=2,
    ),
    _sm90(
        "splits that all are the first", WRONG + " race",
        (Edit(QUEUE, "static_cast<i32>(rest % num_splits)", "0"),), num_splits=2,
    ),
    # --- softmax and results under the products of the next unit
    _sm90(
        "masked scores taken for the greatest", WRONG, (Edit(SOFTMAX, "    low = true;\n", "    low = false;\n"),),
        jumps=True,
    ),
    _sm90(
        "softmax opened before the results are stored", WRONG,
        (Edit(MATH, "        store(slot);\n        end_scores",
              "        softmax.open();\n        store(slot);\n        end_scores"),),
    ),
    _sm90(
        "pairs of columns that are not exchanged", WRONG,
        (Edit(MATH, "      transpose_quad(word);\n", ""),),
    ),
    _sm90(
        "a converged exchange behind rows that do not exist", "divergence",
        (Edit(MATH, "      transpose_quad(word);\n      if (exists)",
              "      if (exists) transpose_quad(word);\n      if (exists)"),),
    ),
    _sm90(
        "results behind the last query", "bounds race read-only",
        (Edit(MATH, "if (exists) ptx::store_global_x4(", "ptx::store_global_x4("),),
    ),
    _sm90(
        "all lanes of a quad store one sum", "race",
        (Edit(MATH, "if (exists && ptx::lane_index() % 4 == 0)", "if (exists)"),), ("lse",),
    ),
    _sm90(
        "parts behind the last query", "bounds race read-only",
        (Edit(MATH, "    if (!exists) return;\n", ""),), num_splits=2,
    ),
    _sm90(
        "parts of the other row", WRONG,
        (Edit(MATH, "for (i32 i = 2 * r; i < kSums; i += 4)\n      ptx::",
              "for (i32 i = 2 - 2 * r; i < kSums; i += 4)\n      ptx::"),), num_splits=2,
    ),
    # --- rows of all heads of a kv head
    _sm90(
        "rows without a query that hold anything", "uninitialized",
        (Edit(SM90, "if constexpr (S.packs_heads) clear_rows_without_query();", ""),), **_PACKED,
    ),
    _sm90(
        "cleared rows that the tensor cores may not see", "proxy-fence",
        (Edit(SM90, "    ptx::fence_proxy_async();\n", ""),), **_PACKED,
    ),
    _sm90(
        "bytes of rows that are not copied", "deadlock",
        (Edit(SM90, "static_cast<u32>(group_rows()) * kRowBytes", "64u * kRowBytes"),), **_PACKED,
    ),
    _sm90(
        "queries of the next group", WRONG + " race",
        (Edit(MATH, "num_queries = min_of(num_queries, first_query + group_queries<S>(args));", ";"),), **_PACKED,
    ),
    _sm90(
        "rows that all are of the first head", WRONG + " race", (Edit(MATH, "row - query * heads}", "0}"),), **_PACKED,
    ),
    _sm90(
        "kv heads counted as heads", WRONG + " race",
        (Edit(TILES, "tile.head = which * heads_per_unit<S>(args);", "tile.head = which;"),), **_PACKED,
    ),
    _sm90(
        "units that begin as far apart as rows", WRONG,
        (Edit(TILES, "static_cast<i32>(i64{number} * unit_queries<S>(args))",
              "static_cast<i32>(i64{number} * S.unit_rows())"),), **_PACKED,
    ),
    _sm90(
        "groups that begin as far apart as rows", WRONG,
        (Edit(UNIT, "group * group_queries<S>(args)", "group * kAttentionGroupRows"),), **_PACKED,
    ),
    _sm90(
        "keys that the first query of a group sees", WRONG,
        (Edit(MATH, "seen_end<S>(first, group_queries<S>(args))", "seen_end<S>(first, 1)"),), **_PACKED,
    ),
    _sm90(
        "the mask of the first query of a group", WRONG,
        (Edit(MATH, "share.visible.end(rows.place(r).query)", "share.visible.end(rows.first_query)"),), **_PACKED,
    ),
    _sm90(
        "a unit for each head", WRONG + " bounds race read-only",
        (Edit(QUEUE, "static_cast<u32>(S.unit_heads(args));", "static_cast<u32>(args.num_q_heads);"),), **_PACKED,
    ),
    _sm90(
        "nobody waits for the kernel ahead", "grid-dependency",
        (Edit(SM90, "  ptx::grid_dependency_wait();", "  "),),
    ),
    _sm90(
        "global memory before the kernel ahead is done", "grid-dependency",
        (Edit(SM90, "  ptx::grid_dependency_wait();", "  "),
         Edit(SM90, "  math.run();\n", "  math.run();\n  ptx::grid_dependency_wait();\n")),
    ),
    _sm90(
        "more registers than the block has", "deadlock",
        (Edit(SM90, "!kThree ? 232 : S.head_dim() == 64 ? 160 : 152",
              "!kThree ? 232 : S.head_dim() == 64 ? 168 : 160"),),
    ),
]  # fmt: skip

ATTENTION_FAULTS = [*_SM89_FAULTS, *_SM90_FAULTS]
