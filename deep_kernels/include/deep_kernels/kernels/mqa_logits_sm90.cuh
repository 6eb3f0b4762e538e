// MQA logits on Hopper: TMA feeds shared memory, wgmma scores 64 kv rows against 128 query rows,
// four math warpgroups sum over heads in registers. One block per SM, persistent.
//
//   scheduler warp   walks the block's share, posts units, loads queries (TMA) and weights
//   kv warp          streams kv rows and scales of the posted units through a ring of stages
//   math warpgroups  group g owns query rows [128 g, 128 g + 128): every stage is read by all four
//   cleaner warps    fill -inf where no tile reaches, while the others compute
//
// Design and what it is worth: the feasibility study for this op on an H200 (tokens per lane,
// 256-row stages, even split, clamp by mul.sat), re-measured in benchmarks/notes_mqa.md.
#pragma once

#include "deep_kernels/contract/mqa_logits.h"
#include "deep_kernels/kernels/mqa_logits_tile.cuh"
#include "deep_kernels/kernels/mqa_schedule.cuh"
#include "deep_kernels/ptx/sm90.cuh"
#include "deep_kernels/tile/layout.cuh"
#include "deep_kernels/tile/pipeline.cuh"

namespace deep_kernels::mqa_sm90 {

struct Token {
  i64 origin;  // element of logits where kv token 0 of the row would be
  RowEdge edge;
  float power;  // that the logits of the token owe, see owed_power

  // Bytes before a member. One register with a token's address serves all of them; a pointer to
  // the struct would take two.
  static constexpr u32 kEdgeAt = 8;
  static constexpr u32 kPowerAt = kEdgeAt + sizeof(RowEdge);
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
  Token token[kTokens];
};

template <MqaLogitsSpec S>
struct Smem {
  static constexpr i32 kSlots = S.query_slots();
  alignas(1024) u8 query[kSlots][kMqaGroups][kMqaGroupRows * S.head_dim];
  alignas(1024) u8 kv[S.kv_stages][S.kv_stage_bytes()];
  alignas(128) float weights[kSlots][kMqaGroups][kMqaGroupRows];  // in column order
  alignas(128) float kv_scale[S.kv_stages][S.kv_stage_rows()];
  Unit<S.tokens_per_block()> unit[kSlots];
  ScheduleScratch schedule;
  // Each pair: who arrives, who waits.
  alignas(8) u64 unit_posted[kSlots];  // scheduler lane 0 -> kv warp
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
};

template <MqaLogitsSpec S>
DK_DEVICE void init_barriers(Smem<S>& smem) {
  if (ptx::thread_index() == 0) {
    DK_NO_UNROLL
    for (i32 i = 0; i < Smem<S>::kSlots; ++i) {
      ptx::mbarrier_init(ptx::smem_addr(&smem.unit_posted[i]), 1);
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

// --- scheduler warp -----------------------------------------------------------------------------

DK_DEVICE void post_token(Token& token, i64 origin, RowEdge edge) {
  ptx::store_shared_i64(ptx::smem_addr(&token.origin), origin);
  ptx::store_shared_i32(ptx::smem_addr(&token.edge.begin), edge.begin);
  ptx::store_shared_i32(ptx::smem_addr(&token.edge.end), edge.end);
  ptx::store_shared_i32(ptx::smem_addr(&token.edge.first), edge.first);
  ptx::store_shared_i32(ptx::smem_addr(&token.edge.last), edge.last);
  ptx::store_shared_f32(ptx::smem_addr(&token.power), 1.0f);
}

DK_DEVICE RowEdge load_edge(u32 edge) {
  return {ptx::load_shared_i32(edge), ptx::load_shared_i32(edge + 4),
          ptx::load_shared_i32(edge + 8), ptx::load_shared_i32(edge + 12)};
}

// Writes the windows of a block's tokens into the unit and returns their span. Converged.
template <MqaLogitsSpec S>
DK_DEVICE MqaSpan post_windows(const MqaLogitsArgs& args, i32 block,
                               Unit<S.tokens_per_block()>& unit) {
  constexpr i32 kTokens = S.tokens_per_block();
  constexpr i32 kPerGroup = S.tokens_per_group();
  const i32 lane = ptx::lane_index();
  i32 lowest = args.num_kv;
  i32 highest = 0;
  DK_UNROLL
  for (i32 base = 0; base < kTokens; base += 32) {
    const i32 token = base + lane;
    const i32 row = block * kTokens + token;
    const bool in_block = token < kTokens;
    const MqaWindow window = load_window(args, in_block ? row : args.num_q, window_limit(args));
    if (window.begin < window.end) {
      lowest = min_of(lowest, window.begin);
      highest = max_of(highest, window.end);
    }
    // An empty window, also of a row that is not there, leaves no full tile.
    i32 full_begin = window.begin;
    i32 full_end = window.end;
    DK_UNROLL
    for (i32 step = 1; step < kPerGroup; step *= 2) {
      full_begin = max_of(full_begin, ptx::shuffle_xor(full_begin, step));
      full_end = min_of(full_end, ptx::shuffle_xor(full_end, step));
    }
    if (in_block) {
      post_token(unit.token[token], row_origin(args, window, row), row_edge(args, window, row));
      if (token % kPerGroup == 0) {
        ptx::store_shared_i32(ptx::smem_addr(&unit.full_begin[token / kPerGroup]), full_begin);
        ptx::store_shared_i32(ptx::smem_addr(&unit.full_end[token / kPerGroup]), full_end);
      }
    }
  }
  return mqa_span(ptx::reduce_min(lowest), ptx::reduce_max(highest));
}

// In column order; those of saturating octets carry kSatWeight.
DK_DEVICE void store_weight(u32 weights, i32 column, float weight) {
  const float factor = octet_saturates(column % kMqaGroupRows / 8) ? kSatWeight : 1.0f;
  ptx::store_shared_f32(weights + 4 * column, weight * factor);
}
template <MqaLogitsSpec S>
DK_DEVICE float load_column_weight(const MqaLogitsArgs& args, i32 first_row, i32 column) {
  return load_weight(args, first_row + S.block_token_of(column), S.head_of(column % kMqaGroupRows));
}

// The weights once more, divided by powers of two where tokens need it, and no full tile: edge
// tiles apply the powers. Converged.
template <MqaLogitsSpec S>
DK_DEVICE void post_tamed_weights(const MqaLogitsArgs& args, i32 first_row, u32 weights,
                                  Unit<S.tokens_per_block()>& unit) {
  const i32 lane = ptx::lane_index();
  DK_NO_UNROLL
  for (i32 token = lane; token < S.tokens_per_block(); token += 32)
    ptx::store_shared_f32(ptx::smem_addr(&unit.token[token].power),
                          owed_power(args, first_row + token));
  if (lane < kMqaGroups) {
    ptx::store_shared_i32(ptx::smem_addr(&unit.full_begin[lane]), args.num_kv);
    ptx::store_shared_i32(ptx::smem_addr(&unit.full_end[lane]), 0);
  }
  ptx::sync_warp();
  DK_NO_UNROLL
  for (i32 column = lane; column < kMqaQueryRows; column += 32) {
    const Token& token = unit.token[S.block_token_of(column)];
    const float power = ptx::load_shared_f32(ptx::smem_addr(&token.power));
    store_weight(weights, column,
                 load_column_weight<S>(args, first_row, column) * reciprocal(power));
  }
}

template <MqaLogitsSpec S>
DK_DEVICE void post_weights(const MqaLogitsArgs& args, i32 block, u32 weights,
                            Unit<S.tokens_per_block()>& unit) {
  const i32 first_row = block * S.tokens_per_block();
  bool extreme = false;
  DK_NO_UNROLL
  for (i32 base = ptx::lane_index(); base < kMqaQueryRows; base += 4 * 32) {
    // All loads before the first store, so that they travel together: short windows wait for them.
    float weight[4];
    DK_UNROLL
    for (i32 i = 0; i < 4; ++i) weight[i] = load_column_weight<S>(args, first_row, base + 32 * i);
    DK_UNROLL
    for (i32 i = 0; i < 4; ++i) {
      extreme = extreme || is_extreme_weight(weight[i]);
      store_weight(weights, base + 32 * i, weight[i]);
    }
  }
  if (ptx::any(extreme)) post_tamed_weights<S>(args, first_row, weights, unit);
}

template <MqaLogitsSpec S, class Maps>
DK_DEVICE void load_queries(const Maps& maps, Smem<S>& smem, i32 slot, i32 block) {
  constexpr i32 kOctets = kMqaQueryRows / 8;
  const u32 filled = ptx::smem_addr(&smem.query_filled[slot]);
  const u32 rows = ptx::smem_addr(&smem.query[slot][0][0]);
  DK_NO_UNROLL
  for (i32 octet = ptx::lane_index(); octet < kOctets; octet += 32) {
    const i32 column = octet % (kMqaGroupRows / 8) * 8;
    const i32 token = block * S.tokens_per_block() +
                      octet / (kMqaGroupRows / 8) * S.tokens_per_group() + S.token_of(column);
    ptx::tma_load_3d(rows + octet * 8 * S.head_dim, maps.q, filled, 0, S.head_of(column), token);
  }
}

template <MqaLogitsSpec S, class Maps>
DK_DEVICE void scheduler_role(const MqaLogitsArgs& args, const Maps& maps, Smem<S>& smem) {
  static_assert(S.kv_stage_rows() == kMqaChunkRows);
  const i32 lane = ptx::lane_index();
  const i32 num_blocks = ceil_div(args.num_q, S.tokens_per_block());
  auto slots = tile::Ring<S.query_slots()>::filler();
  const MqaCut begin = stored_cut(smem.schedule, 0);
  const MqaCut end = stored_cut(smem.schedule, 1);
  DK_NO_UNROLL
  for (i32 block = begin.block; block <= end.block && block < num_blocks; ++block) {
    auto& unit = smem.unit[slots.slot];
    ptx::mbarrier_wait(ptx::smem_addr(&smem.unit_drained[slots.slot]), slots.parity);
    const MqaSpan span = post_windows<S>(args, block, unit);
    const i32 first = block == begin.block ? min_of(begin.chunk, span.num_chunks) : 0;
    const i32 last = block == end.block ? min_of(end.chunk, span.num_chunks) : span.num_chunks;
    if (first >= last) continue;
    const u32 query_filled = ptx::smem_addr(&smem.query_filled[slots.slot]);
    ptx::sync_warp();  // the windows of all lanes are written before lane 0 posts the unit
    if (lane == 0) {
      ptx::store_shared_i32(ptx::smem_addr(&unit.kv_begin), span.begin + first * kMqaChunkRows);
      ptx::store_shared_i32(ptx::smem_addr(&unit.num_stages), last - first);
      ptx::mbarrier_arrive(ptx::smem_addr(&smem.unit_posted[slots.slot]));
      ptx::mbarrier_arrive_expect_tx(query_filled, S.query_bytes());
    }
    ptx::sync_warp();
    load_queries<S>(maps, smem, slots.slot, block);
    post_weights<S>(args, block, ptx::smem_addr(&smem.weights[slots.slot][0][0]), unit);
    ptx::mbarrier_arrive(query_filled);  // every lane for the windows and weights it wrote
    slots.next();
  }
  ptx::mbarrier_wait(ptx::smem_addr(&smem.unit_drained[slots.slot]), slots.parity);
  if (lane == 0) {
    ptx::store_shared_i32(ptx::smem_addr(&smem.unit[slots.slot].num_stages), 0);
    ptx::mbarrier_arrive(ptx::smem_addr(&smem.unit_posted[slots.slot]));
    ptx::mbarrier_arrive(ptx::smem_addr(&smem.query_filled[slots.slot]));
  }
  ptx::mbarrier_arrive(ptx::smem_addr(&smem.query_filled[slots.slot]));
}

// --- kv warp, one lane ---------------------------------------------------------------------------

template <MqaLogitsSpec S, class Maps>
DK_DEVICE void kv_role(const MqaLogitsArgs& args, const Maps& maps, Smem<S>& smem) {
  constexpr u32 kBytes = S.kv_stage_bytes() + S.kv_stage_rows() * sizeof(float);
  auto units = tile::Ring<S.query_slots()>::drainer();
  auto stages = tile::Ring<S.kv_stages>::filler();
  DK_NO_UNROLL
  for (;; units.next()) {
    ptx::mbarrier_wait(ptx::smem_addr(&smem.unit_posted[units.slot]), units.parity);
    const auto& unit = smem.unit[units.slot];
    const i32 num_stages = ptx::load_shared_i32(ptx::smem_addr(&unit.num_stages));
    if (num_stages == 0) return;
    i32 row = ptx::load_shared_i32(ptx::smem_addr(&unit.kv_begin));
    DK_NO_UNROLL
    for (i32 i = 0; i < num_stages; ++i, row += S.kv_stage_rows(), stages.next()) {
      const u32 filled = ptx::smem_addr(&smem.kv_filled[stages.slot]);
      ptx::mbarrier_wait(ptx::smem_addr(&smem.kv_drained[stages.slot]), stages.parity);
      ptx::mbarrier_arrive_expect_tx(filled, kBytes);
      ptx::tma_load_2d(ptx::smem_addr(&smem.kv[stages.slot][0]), maps.kv, filled, 0, row);
      ptx::tma_load_1d(ptx::smem_addr(&smem.kv_scale[stages.slot][0]), maps.kv_scale, filled, row);
    }
  }
}

// --- math warpgroups -----------------------------------------------------------------------------

template <MqaLogitsSpec S>
struct Math {
  using Sum = HeadSum<S.order()>;
  using Logit = typename LogitStorage<S.logits_dtype>::Type;
  using Descriptor = tile::KMajorDescriptor<S.head_dim>;
  static constexpr i32 kTiles = S.kv_stage_rows() / kTileRows;

  const MqaLogitsArgs& args;
  Smem<S>& smem;
  i32 group;
  i32 tile_row;   // kv row inside a tile that this lane keeps first
  u32 query_low;  // descriptor of the group's query rows
  u32 kv_low;     // descriptor of kv stage 0
  u32 tokens;     // address of the lane's first Token, others of its group behind it
  float weight[32];
  // Where kv row tile_row of the coming stage goes. Several tokens leave no registers for several
  // pointers: there they are made anew for every tile.
  static constexpr bool kKeepsPointer = Sum::kSlots == 1;
  Logit* out;
  tile::Ring<S.kv_stages> stages;

  DK_DEVICE Logit* row_pointer(u32 token, i32 kv_row) const {
    return static_cast<Logit*>(args.logits) + ptx::load_shared_i64(token) + kv_row + tile_row;
  }
  // Starts the scores of one tile: x is valid after a wait.
  DK_DEVICE void start_score(float (&x)[64], u32 kv) const {
    ptx::wgmma_fence();
    DK_UNROLL
    for (i32 k = 0; k < S.head_dim / 32; ++k)
      ptx::wgmma_m64n128k32_e4m3(x, Descriptor::make(kv + 2 * k),
                                 Descriptor::make(query_low + 2 * k), k > 0);
    ptx::wgmma_commit_group();
  }
  // Address of the kv scale that belongs to the lane's row i of a tile.
  static DK_DEVICE u32 scale_at(u32 scales, i32 tile, i32 i) {
    return scales + 4 * (tile * kTileRows + 8 * i);
  }
  template <bool kEdge>
  DK_DEVICE void store(const float (&kept)[Sum::kSlots][Sum::kRows], const float* scale, u32 scales,
                       i32 set, i32 tile, i32 kv_row) const {
    DK_UNROLL
    for (i32 slot = 0; slot < Sum::kSlots; ++slot) {
      const u32 token = tokens + sizeof(Token) * Sum::further(set, slot);
      Logit* row;
      if constexpr (kKeepsPointer)
        row = out;
      else
        row = row_pointer(token, kv_row);
      DK_UNROLL
      for (i32 i = 0; i < Sum::kRows; ++i) {
        const i32 offset = tile * kTileRows + 8 * i;
        if (!Sum::stores()) continue;
        if constexpr (!kEdge) {
          store_logit(row + offset, kept[slot][i] * scale[i]);
        } else {
          const float value =
              scaled_sum(kept[slot][i], ptx::load_shared_f32(scale_at(scales, tile, i)),
                         ptx::load_shared_f32(token + Token::kPowerAt));
          store_edge<S.clean != Clean::off>(row + offset, kv_row + tile_row + offset,
                                            load_edge(token + Token::kEdgeAt), value);
        }
      }
    }
  }

  // Sums and stores the token sets of a tile one after the other.
  template <bool kEdge, i32 kSet = 0>
  DK_DEVICE void reduce(const float (&x)[64], const float* scale, u32 scales, i32 tile,
                        i32 kv_row) const {
    if constexpr (kSet < Sum::kSets) {
      float sum[Sum::kSlots][2];
      float kept[Sum::kSlots][Sum::kRows];
      Sum::template add_set<kSet>(sum, x, weight);
      Sum::join(kept, sum);
      store<kEdge>(kept, scale, scales, kSet, tile, kv_row);
      reduce<kEdge, kSet + 1>(x, scale, scales, tile, kv_row);
    }
  }

  // Rows and scales are read: the stage may be refilled.
  DK_DEVICE void release_stage() const {
    ptx::sync_warp();
    if (ptx::lane_index() == 0) ptx::mbarrier_arrive(ptx::smem_addr(&smem.kv_drained[stages.slot]));
  }
  // Scores, head sums and stores of 64 kv rows.
  template <bool kEdge>
  DK_DEVICE void one_tile(i32 tile, u32 kv, u32 scales, i32 kv_row) const {
    const bool is_last = tile == kTiles - 1;
    float x[64];
    start_score(x, kv + tile * (kTileRows * S.head_dim >> 4));
    if constexpr (kEdge) {  // scales are read where they are used: the edge tests need registers
      ptx::wgmma_wait_group<0>(x);
      reduce<kEdge>(x, nullptr, scales, tile, kv_row);
      if (is_last) release_stage();
    } else {
      float scale[Sum::kRows];
      DK_UNROLL
      for (i32 i = 0; i < Sum::kRows; ++i)
        scale[i] = ptx::load_shared_f32(scale_at(scales, tile, i));
      ptx::wgmma_wait_group<0>(x);
      if (is_last) release_stage();
      reduce<kEdge>(x, scale, scales, tile, kv_row);
    }
  }

  template <bool kEdge>
  DK_DEVICE void stage(i32 kv_row) {
    ptx::mbarrier_wait(ptx::smem_addr(&smem.kv_filled[stages.slot]), stages.parity);
    const u32 scales = ptx::smem_addr(&smem.kv_scale[stages.slot][0]) + 4 * tile_row;
    const u32 kv = kv_low + stages.slot * (S.kv_stage_bytes() >> 4);
    if constexpr (kEdge) {  // few of them: one copy of the tile, which compiles faster
      DK_NO_UNROLL
      for (i32 tile = 0; tile < kTiles; ++tile) one_tile<kEdge>(tile, kv, scales, kv_row);
    } else {
      DK_UNROLL
      for (i32 tile = 0; tile < kTiles; ++tile) one_tile<kEdge>(tile, kv, scales, kv_row);
    }
    stages.next();
    if constexpr (kKeepsPointer) out += S.kv_stage_rows();
  }

  DK_DEVICE void open_unit(const Unit<S.tokens_per_block()>& unit, i32 slot, i32 kv_row) {
    query_low = Descriptor::low(ptx::smem_addr(&smem.query[slot][group][0]));
    const u32 weights = ptx::smem_addr(&smem.weights[slot][group][2 * (ptx::lane_index() % 4)]);
    DK_UNROLL
    for (i32 octet = 0; octet < 16; ++octet) {
      float pair[2];
      ptx::load_shared_f32x2(pair, weights + 4 * 8 * octet);
      weight[2 * octet] = pair[0];
      weight[2 * octet + 1] = pair[1];
    }
    tokens = ptx::smem_addr(&unit.token[group * S.tokens_per_group() + Sum::first_token()]);
    if constexpr (kKeepsPointer) out = row_pointer(tokens, kv_row);
  }

  DK_DEVICE void run() {
    kv_low = Descriptor::low(ptx::smem_addr(&smem.kv[0][0]));
    tile_row = ptx::warp_index() % 4 * 16 + Sum::row();
    stages = tile::Ring<S.kv_stages>::drainer();
    auto units = tile::Ring<S.query_slots()>::drainer();
    DK_NO_UNROLL
    for (;; units.next()) {
      ptx::mbarrier_wait(ptx::smem_addr(&smem.query_filled[units.slot]), units.parity);
      const auto& unit = smem.unit[units.slot];
      i32 num_stages = ptx::load_shared_i32(ptx::smem_addr(&unit.num_stages));
      if (num_stages == 0) return;
      i32 kv_row = ptx::load_shared_i32(ptx::smem_addr(&unit.kv_begin));
      open_unit(unit, units.slot, kv_row);
      DK_NO_UNROLL
      for (; num_stages > 0; --num_stages, kv_row += S.kv_stage_rows()) {
        // Read for every stage: registers are scarcer than these loads.
        const i32 full_begin = ptx::load_shared_i32(ptx::smem_addr(&unit.full_begin[group]));
        const i32 full_end = ptx::load_shared_i32(ptx::smem_addr(&unit.full_end[group]));
        if (kv_row >= full_begin && kv_row + S.kv_stage_rows() <= full_end)
          stage<false>(kv_row);
        else
          stage<true>(kv_row);
      }
      ptx::sync_warp();
      if (ptx::lane_index() == 0)
        ptx::mbarrier_arrive(ptx::smem_addr(&smem.unit_drained[units.slot]));
    }
  }
};

}  // namespace deep_kernels::mqa_sm90

namespace deep_kernels {

template <MqaLogitsSpec S, class Maps>
DK_DEVICE void mqa_logits_sm90(const MqaLogitsArgs& args, const Maps& maps) {
  using namespace mqa_sm90;
  static_assert(S.invalid() == nullptr);
  static_assert(sizeof(Smem<S>) <= S.smem_bytes());
  static_assert((kMathWarps + 4) * 32 == S.num_threads());
  using Logit = typename LogitStorage<S.logits_dtype>::Type;
  auto& smem = ptx::dynamic_smem<Smem<S>>();
  const i32 warp = ptx::warp_index();

  init_barriers<S>(smem);
  ptx::grid_dependency_wait();  // nothing above reads what a kernel ahead may have written
  find_run<S>(args, smem.schedule);
  ptx::sync_threads();

  if (warp < kMathWarps) {
    ptx::role("math");
    ptx::set_max_registers_up<kMathRegisters>();
    Math<S>{.args = args, .smem = smem, .group = warp / 4}.run();
  } else {
    ptx::set_max_registers_down<kProducerRegisters>();
    if (warp == kKvWarp) {
      ptx::role("kv");
      if (ptx::lane_index() == 0) kv_role<S>(args, maps, smem);
    } else if (warp == kSchedulerWarp) {
      ptx::role("scheduler");
      scheduler_role<S>(args, maps, smem);
    } else if constexpr (S.clean == Clean::concurrent) {
      ptx::role("cleaner");
      fill_untouched<S, Logit>(args, warp - kFirstCleanerWarp, kCleanerWarps);
    }
  }
  if constexpr (S.clean == Clean::deferred) {
    ptx::sync_warp();
    ptx::barrier_sync(static_cast<u32>(Barrier::work_done), S.num_threads());
    fill_untouched<S, Logit>(args, warp, S.num_threads() / 32);
  }
}

}  // namespace deep_kernels
