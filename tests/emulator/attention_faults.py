"""Faults that are put into copies of the attention kernels: the emulator or the oracle must see each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from attention_cases import Case

from .faults import Edit, Fault

SM89 = "kernels/attention_sm89.cuh"
SOFTMAX = "kernels/attention_softmax.cuh"
TILES = "kernels/attention_tiles.cuh"
JOIN = "kernels/attention_join.cuh"
FRAGMENTS = "tile/fragments.cuh"

WRONG = "wrong"  # no fault of the machine: the oracle sees it

# Several tiles of queries and of keys, all of them cut off.
_BASE = Case(2, 140, 150, (4, 2), causal=True, out=True)


@dataclass(frozen=True)
class AttentionFault(Fault):
    """A mistake, and the call that meets it: of a dense batch, or of packed members of these lengths."""

    attention: Case = _BASE
    lengths: tuple[tuple[int, int], ...] = ()


def _fault(
    name: str, kinds: str, edits: tuple[Edit, ...], words: tuple[str, ...] = (),
    lengths: tuple[tuple[int, int], ...] = (), **changes: Any,
) -> AttentionFault:  # fmt: skip
    case = replace(_BASE, **changes)
    return AttentionFault(name, "sm89", edits, tuple(kinds.split()), words, attention=case, lengths=lengths)


ATTENTION_FAULTS = [
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
        "results behind the last query", "bounds race",
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
        (Edit(SOFTMAX, "sum[row] *= factor[row];", "sum[row] *= 1.0f;"),),
    ),
    _fault(
        "the maximum of one lane", WRONG,
        (Edit(SOFTMAX, "      maximum = ptx::max_nan(maximum, ptx::shuffle_xor(maximum, mask));\n", "      ;\n"),),
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
        (Edit(TILES, "(args) + index;", "(args);"),), lengths=((70, 80), (20, 30), (150, 150)),
    ),
    _fault(
        "the keys of the member before", WRONG,
        (Edit(SM89, "const i64 token = tile.member.first_kv + first;", "const i64 token = first;"),),
        lengths=((70, 80), (20, 30), (150, 150)),
    ),
    _fault(
        "parts that count alike", WRONG,
        (Edit(JOIN, "add(split, weight);", "add(split, 1.0f);"),), num_splits=2,
    ),
    _fault(
        "the first part alone", WRONG,
        (Edit(JOIN, "split < args.num_splits; ++split) {", "split < 1; ++split) {"),), num_splits=2,
    ),
]  # fmt: skip
