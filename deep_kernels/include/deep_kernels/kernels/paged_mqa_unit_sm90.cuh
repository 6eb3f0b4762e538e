// What the warps of the paged Hopper kernel share: a unit of work, shared memory, barriers.
#pragma once

#include "deep_kernels/contract/paged_mqa_logits.h"
#include "deep_kernels/kernels/mqa_mx.cuh"
#include "deep_kernels/kernels/paged_mqa_schedule.cuh"
#include "deep_kernels/kernels/paged_mqa_unit.cuh"
#include "deep_kernels/ptx/sm90.cuh"

namespace deep_kernels::paged_sm90 {

using namespace paged;

// Rows that are computed together and the run of their tiles that this block takes.
template <i32 kRows>
struct Unit {
  i64 table;       // element of block_table where the request's row begins
  i32 first_tile;  // of the request
  i32 num_tiles;   // 0: no more units
  i32 longest;     // kv tokens that the request's rows see: of pages behind them nothing is known
  i32 is_raw;      // MX: the math warps rebase the query rows
  Token token[kRows];
};

// What MX formats keep beside the weights of a query column.
template <PagedMqaLogitsSpec S, bool kIsMx = S.is_mx()>
struct MxSmem {
  // As given; once the rows are rebased, of the codes.
  alignas(128) i32 query_exponents[S.query_slots()][S.unit_columns()];
  // Weights times the power of their row, NaN where the fast way cannot be gone.
  alignas(128) float powered[S.query_slots()][S.unit_columns()];
  alignas(8) u64 query_loaded[S.query_slots()];  // scheduler lane 0, and TMA bytes -> scheduler
};
template <PagedMqaLogitsSpec S>
struct MxSmem<S, false> {};

template <PagedMqaLogitsSpec S>
struct Smem {
  static constexpr i32 kSlots = S.query_slots();
  alignas(1024) u8 query[kSlots][S.query_bytes()];
  alignas(1024) u8 kv[S.kv_stages][S.kv_stage_bytes()];
  alignas(128) float weights[kSlots][S.unit_columns()];  // in column order
  alignas(128) u32 kv_scale[S.kv_stages][kPagedTileRows];
  MxSmem<S> mx;
  Unit<S.unit_rows> unit[kSlots];
  PagedRun run;
  // Each pair: who arrives, who waits.
  alignas(8) u64 unit_posted[kSlots];  // scheduler lane 0 -> kv warps
  u64 query_filled[kSlots];            // 32 of the scheduler; fp8: one more, and TMA bytes -> math
  u64 unit_drained[kSlots];            // all math warps and kv warps -> scheduler
  u64 kv_filled[S.kv_stages];          // the kv warp whose turn it is, and TMA bytes -> math group
  u64 kv_drained[S.kv_stages];         // 4 warps of that group -> kv warp
};

// Query rows of a block's first unit are rebased by the math warps, which have nothing else to do,
// those of later ones ahead by the scheduler. Several passes leave no registers for it.
template <PagedMqaLogitsSpec S>
inline constexpr bool kRebasesFirst = S.is_mx() && S.num_passes() == 1;

// MX: one block of 32 elements of a query row on its way to a row of e4m3 codes with one exponent,
// which goes into the weights. Packed rows lie in the upper half of the codes' place.
template <PagedMqaLogitsSpec S>
struct QueryBlock {
  static constexpr i32 kBlocks = S.head_dim / kMxBlock;
  static constexpr i32 kChunks = mx_block_bytes(S.format) / 16;
  static constexpr i32 kTasks = S.unit_columns() * kBlocks;  // those of a row side by side

  i32 column;
  i32 block;
  i32 given;  // exponents of the row
  MxCodes<S.format> codes;

  DK_DEVICE explicit QueryBlock(i32 task) : column(task / kBlocks), block(task % kBlocks) {}

  static DK_DEVICE u32 packed_rows(const Smem<S>& smem, i32 slot) {
    return ptx::smem_addr(&smem.query[slot][0]) + S.query_bytes() - S.query_load_bytes();
  }
  DK_DEVICE void load(const Smem<S>& smem, i32 slot) {
    given = ptx::load_shared_i32(ptx::smem_addr(&smem.mx.query_exponents[slot][column]));
    const u32 rows = packed_rows(smem, slot);
    codes.load([&](u32(&bytes)[4], i32 offset) {
      ptx::load_shared_x4(bytes, rows + tile::swizzled_offset<S.row_bytes()>(
                                            column, block * kChunks + offset / 16));
    });
  }
  // A warp's lanes together, and for whole rows.
  DK_DEVICE void store(Smem<S>& smem, i32 slot) {
    MxRow<S.format> row;
    row.add(mx_exponent(given, block), codes.is_zero());
    row.template join<kBlocks>();
    codes.rebase(row.shift(mx_exponent(given, block)));
    const u32 rows = ptx::smem_addr(&smem.query[slot][0]);
    DK_UNROLL
    for (i32 half = 0; half < 2; ++half) {
      const u32* word = codes.word + 4 * half;
      ptx::store_shared_x4(rows + tile::swizzled_offset<S.head_dim>(column, 2 * block + half),
                           word[0], word[1], word[2], word[3]);
    }
    if (block != 0) return;
    ptx::store_shared_i32(ptx::smem_addr(&smem.mx.query_exponents[slot][column]),
                          row.exponents(given));
    const float weight = ptx::load_shared_f32(ptx::smem_addr(&smem.weights[slot][column]));
    ptx::store_shared_f32(ptx::smem_addr(&smem.mx.powered[slot][column]),
                          powered_weight(weight, row.power()) *
                              octet_factor(kRelus<S>, column % S.pass_columns() / 8));
  }
};

// Beside the math warps. One kv warp needs about 250 clocks for a tile, as many as its bytes take.
inline constexpr i32 kKvWarps = 2;
inline constexpr i32 kSchedulerWarp = kKvWarps;
inline constexpr i32 kCleanerWarps = 1;

enum class Barrier : u32 {  // 0 belongs to sync_threads
  queries_rebased = 1,      // MX: all math warps, around the query rows of the first unit
};
static_assert(kKvWarps + 1 + kCleanerWarps == 4);

// By one thread.
template <PagedMqaLogitsSpec S>
DK_DEVICE void init_barriers(Smem<S>& smem) {
  DK_NO_UNROLL
  for (i32 i = 0; i < Smem<S>::kSlots; ++i) {
    ptx::mbarrier_init(ptx::smem_addr(&smem.unit_posted[i]), 1);
    ptx::mbarrier_init(ptx::smem_addr(&smem.query_filled[i]), S.is_mx() ? 32 : 33);
    if constexpr (S.is_mx()) ptx::mbarrier_init(ptx::smem_addr(&smem.mx.query_loaded[i]), 1);
    ptx::mbarrier_init(ptx::smem_addr(&smem.unit_drained[i]), 4 * S.math_groups + kKvWarps);
  }
  DK_NO_UNROLL
  for (i32 i = 0; i < S.kv_stages; ++i) {
    ptx::mbarrier_init(ptx::smem_addr(&smem.kv_filled[i]), 1);
    ptx::mbarrier_init(ptx::smem_addr(&smem.kv_drained[i]), 4);
  }
  ptx::fence_mbarrier_init();
}

// A block starts with equal registers for all, a multiple of 8; what the helpers give up the math
// warps take. Of MX formats the scheduler rebases query rows.
template <PagedMqaLogitsSpec S>
struct RoleRegisters {
  static constexpr i32 kStart = 65536 / S.num_threads() / 8 * 8;
  static constexpr i32 kHelper = S.math_groups == 2 ? 72 : S.is_mx() ? 56 : 32;
  static constexpr i32 kMath = min_of(232, (kStart + (kStart - kHelper) / S.math_groups) / 8 * 8);
};

}  // namespace deep_kernels::paged_sm90
