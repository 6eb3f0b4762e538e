// What the warps of the dense Hopper kernel share: a unit of work, shared memory, barriers.
#pragma once

#include "deep_kernels/contract/mqa_logits.h"
#include "deep_kernels/kernels/mqa_logits_tile.cuh"
#include "deep_kernels/kernels/mqa_schedule.cuh"
#include "deep_kernels/ptx/sm90.cuh"

namespace deep_kernels::mqa_sm90 {

struct Token {
  i64 origin;  // element of logits where kv token 0 of the row would be
  RowEdge edge;
  float power;  // that the logits of the token owe, see owed_power
  float folded_scale;

  // Bytes before a member. One register with a token's address serves all of them; a pointer to
  // the struct would take two.
  static constexpr u32 kEdgeAt = 8;
  static constexpr u32 kPowerAt = kEdgeAt + sizeof(RowEdge);
  static constexpr u32 kFoldedScaleAt = kPowerAt + sizeof(float);
};
static_assert(sizeof(Token) == 32 && sizeof(RowEdge) == 16);

// One query block and the run of its stages that this block computes.
template <i32 kTokens>
struct Unit {
  i32 kv_begin;    // first kv token
  i32 num_stages;  // 0: no more units
  // Kv tokens that lie inside the window of every token of a group: their tiles need no edge test.
  // None where a token of the block owes a power of two.
  i32 full_begin[kMqaGroups];
  i32 full_end[kMqaGroups];
  // From the first to the last that some window of a group reaches: stages outside are not scored.
  i32 reach_begin[kMqaGroups];
  i32 reach_end[kMqaGroups];
  Token token[kTokens];
};

// What MX formats keep beside the weights of a query column, and for a kv stage.
template <MqaLogitsSpec S, bool kIsMx = S.is_mx()>
struct MxSmem {
  // As given; once the rows are rebased, of the codes.
  alignas(128) i32 query_exponents[S.query_slots()][kMqaGroups][kMqaGroupRows];
  // Weights times the power of their row, NaN where the fast way cannot be gone.
  alignas(128) float powered[S.query_slots()][kMqaGroups][kMqaGroupRows];
  // Bit g: the stage lies inside every window of group g, and all of its rows have scales.
  i32 full_groups[S.kv_stages];
};
template <MqaLogitsSpec S>
struct MxSmem<S, false> {};

template <MqaLogitsSpec S>
struct Smem {
  static constexpr i32 kSlots = S.query_slots();
  alignas(1024) u8 query[kSlots][kMqaGroups][S.group_rows() * S.head_dim];
  alignas(1024) u8 kv[S.kv_stages][S.kv_stage_bytes()];
  alignas(128) float weights[kSlots][kMqaGroups][kMqaGroupRows];  // in column order
  alignas(128) float kv_scale[S.kv_stages][S.kv_stage_rows()];
  MxSmem<S> mx;
  Unit<S.tokens_per_block()> unit[kSlots];
  ScheduleScratch schedule;
  // Each pair: who arrives, who waits.
  alignas(8) u64 unit_posted[kSlots];  // scheduler, MX: all lanes, else lane 0 -> kv warp
  u64 query_filled[kSlots];            // 33 by the scheduler (lane 0 announces bytes), TMA -> math
  u64 unit_drained[kSlots];            // 16 math warps -> scheduler
  u64 kv_filled[S.kv_stages];          // kv warp, and TMA bytes -> math warps
  u64 kv_drained[S.kv_stages];         // 16 math warps -> kv warp
};

inline constexpr i32 kMathWarps = 16;
inline constexpr i32 kKvWarp = 16;
inline constexpr i32 kSchedulerWarp = 17;
inline constexpr i32 kFirstCleanerWarp = 18;
inline constexpr i32 kCleanerWarps = 2;
inline constexpr i32 kTileRows = 64;  // kv rows of one wgmma
// 640 threads start with 96 registers each; what the producers give up the math warps take:
// 128 * 32 + 512 * 112 = 640 * 96.
inline constexpr i32 kMathRegisters = 112;
inline constexpr i32 kProducerRegisters = 32;

enum class Barrier : u32 {  // 0 belongs to sync_threads
  work_done = 1,            // all 640 threads, before the deferred fill
  group_rebased = 2,        // MX: the 128 threads of group g at 2 + g, around its query rows
};

template <MqaLogitsSpec S>
DK_DEVICE void init_barriers(Smem<S>& smem) {
  if (ptx::thread_index() == 0) {
    DK_NO_UNROLL
    for (i32 i = 0; i < Smem<S>::kSlots; ++i) {
      ptx::mbarrier_init(ptx::smem_addr(&smem.unit_posted[i]), S.is_mx() ? 32 : 1);
      ptx::mbarrier_init(ptx::smem_addr(&smem.query_filled[i]), 33);
      ptx::mbarrier_init(ptx::smem_addr(&smem.unit_drained[i]), kMathWarps);
    }
    DK_NO_UNROLL
    for (i32 i = 0; i < S.kv_stages; ++i) {
      ptx::mbarrier_init(ptx::smem_addr(&smem.kv_filled[i]), 1);
      ptx::mbarrier_init(ptx::smem_addr(&smem.kv_drained[i]), kMathWarps);
    }
    ptx::fence_mbarrier_init();
  }
}

DK_DEVICE RowEdge load_edge(u32 edge) {
  return {ptx::load_shared_i32(edge), ptx::load_shared_i32(edge + 4),
          ptx::load_shared_i32(edge + 8), ptx::load_shared_i32(edge + 12)};
}

template <MqaLogitsSpec S>
inline constexpr Relus kRelus = S.is_folded() ? Relus::fold : Relus::mixed;
template <MqaLogitsSpec S>
DK_DEVICE float column_factor(i32 column) {
  return octet_factor(kRelus<S>, column % kMqaGroupRows / 8);
}

}  // namespace deep_kernels::mqa_sm90
