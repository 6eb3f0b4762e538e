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
#include "deep_kernels/kernels/mqa_mx.cuh"
#include "deep_kernels/kernels/mqa_schedule.cuh"
#include "deep_kernels/kernels/mqa_wide.cuh"
#include "deep_kernels/ptx/sm90.cuh"
#include "deep_kernels/tile/layout.cuh"
#include "deep_kernels/tile/pipeline.cuh"

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
  group_rebased = 2,        // MX: the 128 threads of group g at 2 + g, around its query rows
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
      if constexpr (S.is_folded())
        ptx::store_shared_f32(ptx::smem_addr(&unit.token[token].folded_scale),
                              row < args.num_q ? ptx::load_global(args.folded_scale + row) : 0.0f);
      if (token % kPerGroup == 0) {
        ptx::store_shared_i32(ptx::smem_addr(&unit.full_begin[token / kPerGroup]), full_begin);
        ptx::store_shared_i32(ptx::smem_addr(&unit.full_end[token / kPerGroup]), full_end);
      }
    }
  }
  return mqa_span(ptx::reduce_min(lowest), ptx::reduce_max(highest));
}

template <MqaLogitsSpec S>
inline constexpr Relus kRelus = S.is_folded() ? Relus::fold : Relus::mixed;
template <MqaLogitsSpec S>
DK_DEVICE float column_factor(i32 column) {
  return octet_factor(kRelus<S>, column % kMqaGroupRows / 8);
}
template <MqaLogitsSpec S>
DK_DEVICE void store_weight(u32 weights, i32 column, float weight) {
  ptx::store_shared_f32(weights + 4 * column, weight * column_factor<S>(column));
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
    store_weight<S>(weights, column,
                 load_column_weight<S>(args, first_row, column) * reciprocal(power));
  }
}

// In column order. Converged.
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
      store_weight<S>(weights, base + 32 * i, weight[i]);
    }
  }
  if (ptx::any(extreme)) post_tamed_weights<S>(args, first_row, weights, unit);
}

// The weights as they are, and the exponents of the rows: math warps join them.
template <MqaLogitsSpec S>
DK_DEVICE void post_mx_columns(const MqaLogitsArgs& args, i32 block, u32 weights, u32 exponents) {
  const i32 first_row = block * S.tokens_per_block();
  DK_NO_UNROLL
  for (i32 base = ptx::lane_index(); base < kMqaQueryRows; base += 4 * 32) {
    float weight[4];
    i32 given[4];
    DK_UNROLL
    for (i32 i = 0; i < 4; ++i) {  // all loads before the first store, as above
      const i32 column = base + 32 * i;
      weight[i] = load_column_weight<S>(args, first_row, column);
      given[i] = load_query_exponents(args, first_row + S.block_token_of(column),
                                      S.head_of(column % kMqaGroupRows));
    }
    DK_UNROLL
    for (i32 i = 0; i < 4; ++i) {
      ptx::store_shared_f32(weights + 4 * (base + 32 * i), weight[i]);
      ptx::store_shared_i32(exponents + 4 * (base + 32 * i), given[i]);
    }
  }
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
    // Packed rows lie at the beginning of their group's place until they are expanded there.
    const u32 group_at = octet / (kMqaGroupRows / 8) * S.group_rows() * S.head_dim;
    ptx::tma_load_3d(rows + group_at + column * S.query_row_bytes(), maps.q, filled, 0,
                     S.head_of(column), token);
  }
  if constexpr (S.is_folded()) {
    const i32 group = ptx::lane_index();
    if (group < kMqaGroups)
      ptx::tma_load_2d(rows + (group * S.group_rows() + kMqaGroupRows) * S.head_dim, maps.folded,
                       filled, 0, (block * kMqaGroups + group) * kMqaFoldedRows);
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
      ptx::mbarrier_arrive_expect_tx(query_filled, S.query_load_bytes());
    }
    ptx::sync_warp();
    load_queries<S>(maps, smem, slots.slot, block);
    const u32 weights = ptx::smem_addr(&smem.weights[slots.slot][0][0]);
    if constexpr (S.is_mx())
      post_mx_columns<S>(args, block, weights,
                         ptx::smem_addr(&smem.mx.query_exponents[slots.slot][0][0]));
    else
      post_weights<S>(args, block, weights, unit);
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

// --- kv warp -------------------------------------------------------------------------------------

// Whether one of the kv rows [row, row + 256) has no scale; rows at a multiple of kMqaWideRows.
// Converged.
template <MqaLogitsSpec S>
DK_DEVICE bool has_wide_row(const MqaLogitsArgs& args, i32 row) {
  const i32 index = row / kMqaWideRows + ptx::lane_index();
  const bool looks = ptx::lane_index() < S.kv_stage_rows() / kMqaWideRows &&
                     index < ceil_div(args.num_kv, kMqaWideRows);
  return ptx::any(looks && ptx::load_global(args.kv_wide + index) != 0);
}

// Bit g of the result: the kv rows [row, row + 256) lie inside every window of group g.
template <MqaLogitsSpec S>
DK_DEVICE i32 groups_inside(const Unit<S.tokens_per_block()>& unit, i32 row) {
  i32 groups = 0;
  DK_UNROLL
  for (i32 group = 0; group < kMqaGroups; ++group) {
    const bool inside =
        row >= ptx::load_shared_i32(ptx::smem_addr(&unit.full_begin[group])) &&
        row + S.kv_stage_rows() <= ptx::load_shared_i32(ptx::smem_addr(&unit.full_end[group]));
    groups |= static_cast<i32>(inside) << group;
  }
  return groups;
}

// All lanes for MX formats, lane 0 alone without them.
template <MqaLogitsSpec S, class Maps>
DK_DEVICE void kv_role(const MqaLogitsArgs& args, const Maps& maps, Smem<S>& smem) {
  static_assert(kMqaSpanAlign % kMqaWideRows == 0);
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
    if constexpr (S.is_mx()) ptx::sync_warp();  // all lanes have read the unit before lane 0 goes on
    DK_NO_UNROLL
    for (i32 i = 0; i < num_stages; ++i, row += S.kv_stage_rows(), stages.next()) {
      const u32 filled = ptx::smem_addr(&smem.kv_filled[stages.slot]);
      bool is_wide = false;
      if constexpr (S.is_mx()) is_wide = has_wide_row<S>(args, row);
      ptx::mbarrier_wait(ptx::smem_addr(&smem.kv_drained[stages.slot]), stages.parity);
      if (S.is_mx() && ptx::lane_index() != 0) continue;
      if constexpr (S.is_mx())
        ptx::store_shared_i32(ptx::smem_addr(&smem.mx.full_groups[stages.slot]),
                              is_wide ? 0 : groups_inside<S>(unit, row));
      ptx::mbarrier_arrive_expect_tx(filled, kBytes);
      ptx::tma_load_2d(ptx::smem_addr(&smem.kv[stages.slot][0]), maps.kv, filled, 0, row);
      ptx::tma_load_1d(ptx::smem_addr(&smem.kv_scale[stages.slot][0]), maps.kv_scale, filled, row);
    }
  }
}

// --- math warpgroups -----------------------------------------------------------------------------

// A tile's reduction runs while the tensor cores of the other warpgroups use the register file, and
// is held up where neighbouring instructions read the same one of its two banks more than twice. A
// score's bank is given (the parity of its register), ptxas orders the clamps and the FMAs, and lets
// the clamps run ahead by a lead of its own: 2 modulo 4 is good, 0 is bad, 10% between them. What
// tips the lead is when the scales are read: chosen by counting conflicts in the machine code
// (scripts/bank_conflicts.py, NVRTC 13.0); measurements in benchmarks/notes_mqa.md.
enum class ScaleLoad { before, meanwhile, after };  // than the tensor cores work on the tile
constexpr ScaleLoad scale_load(const MqaLogitsSpec& spec) {
  if (spec.is_mx()) return ScaleLoad::after;
  return spec.num_heads <= 32 ? ScaleLoad::before : ScaleLoad::meanwhile;
}

template <MqaLogitsSpec S>
struct Math {
  using Sum = HeadSum<S.order(), kRelus<S>>;
  using Logit = typename LogitStorage<S.logits_dtype>::Type;
  using Descriptor = tile::KMajorDescriptor<S.head_dim>;
  using Scores = float[S.group_rows() / 2];
  static constexpr i32 kTiles = S.kv_stage_rows() / kTileRows;
  static constexpr ScaleLoad kScaleLoad = scale_load(S);

  const MqaLogitsArgs& args;
  Smem<S>& smem;
  i32 group;
  i32 tile_row;          // kv row inside a tile that this lane keeps first
  i32 slot;              // of the unit
  bool has_exact_token;  // MX: one of the group's weights cannot be had the fast way
  u32 query_low;  // descriptor of the group's query rows
  u32 kv_low;     // descriptor of kv stage 0
  float weight[32];
  float digit_scale;  // folded: of the lane's first digit column
  // Where kv row tile_row of the coming stage goes. Several tokens leave no registers for several
  // pointers: there they are made anew for every tile.
  static constexpr bool kKeepsPointer = Sum::kSlots == 1;
  Logit* out;
  tile::Ring<S.kv_stages> stages;

  // Address of the lane's first Token, others of its group behind it.
  DK_DEVICE u32 first_token() const {
    return ptx::smem_addr(
        &smem.unit[slot].token[group * S.tokens_per_group() + Sum::first_token()]);
  }
  DK_DEVICE Logit* row_pointer(u32 token, i32 kv_row) const {
    return static_cast<Logit*>(args.logits) + ptx::load_shared_i64(token) + kv_row + tile_row;
  }
  // Starts the scores of one tile: x is valid after a wait.
  DK_DEVICE void start_score(Scores& x, u32 kv) const {
    ptx::wgmma_fence();
    DK_UNROLL
    for (i32 k = 0; k < S.head_dim / 32; ++k) {
      const u64 a = Descriptor::make(kv + 2 * k);
      const u64 b = Descriptor::make(query_low + 2 * k);
      if constexpr (S.is_folded())
        ptx::wgmma_m64n136k32_e4m3(x, a, b, k > 0);
      else
        ptx::wgmma_m64n128k32_e4m3(x, a, b, k > 0);
    }
    ptx::wgmma_commit_group();
  }
  // The lane's part of the sums over heads of a token set.
  template <i32 kSet>
  DK_DEVICE void sum_heads(float (&sum)[Sum::kSlots][2], const Scores& x) const {
    Sum::template add_set<kSet>(sum, x, weight);
    if constexpr (S.is_folded()) {
      DK_UNROLL
      for (i32 r = 0; r < 2; ++r) {
        const float* digit = x + kMqaGroupRows / 2 + 2 * r;
        sum[0][r] = ptx::fma(ptx::fma(digit[1], 1.0f / 16, digit[0]), digit_scale, sum[0][r]);
      }
    }
  }
  // Where the logits of a token go that belong to kv row tile_row of the stage.
  DK_DEVICE Logit* stage_pointer(u32 token, i32 kv_row) const {
    if constexpr (kKeepsPointer)
      return out;
    else
      return row_pointer(token, kv_row);
  }
  // Address of the kv scale that belongs to the lane's row i of a tile.
  static DK_DEVICE u32 scale_at(u32 scales, i32 tile, i32 i) {
    return scales + 4 * (tile * kTileRows + 8 * i);
  }
  static DK_DEVICE void load_scales(float (&scale)[Sum::kRows], u32 scales, i32 tile) {
    DK_UNROLL
    for (i32 i = 0; i < Sum::kRows; ++i) scale[i] = ptx::load_shared_f32(scale_at(scales, tile, i));
  }
  static DK_DEVICE i32 row_offset(i32 tile, i32 i) { return tile * kTileRows + 8 * i; }

  // Sums and stores the token sets of a tile, which lies inside every window, one after the other.
  template <i32 kSet = 0>
  DK_DEVICE void reduce(const Scores& x, const float (&scale)[Sum::kRows], i32 tile,
                        i32 kv_row) const {
    if constexpr (kSet < Sum::kSets) {
      float sum[Sum::kSlots][2];
      float kept[Sum::kSlots][Sum::kRows];
      sum_heads<kSet>(sum, x);
      Sum::join(kept, sum);
      DK_UNROLL
      for (i32 slot = 0; slot < Sum::kSlots; ++slot) {
        Logit* row = stage_pointer(first_token() + sizeof(Token) * Sum::further(kSet, slot), kv_row);
        DK_UNROLL
        for (i32 i = 0; i < Sum::kRows; ++i)
          if (Sum::stores()) store_logit(row + row_offset(tile, i), kept[slot][i] * scale[i]);
      }
      reduce<kSet + 1>(x, scale, tile, kv_row);
    }
  }

  DK_DEVICE WideOperands<WideRows<S.head_dim>> wide_operands(i32 tile, i32 kv_row) const {
    const i32 first = tile * kTileRows + tile_row / 16 * 16;  // of the warp's rows
    WideOperands<WideRows<S.head_dim>> at{
        .kv = {ptx::smem_addr(&smem.kv[stages.slot][0]) + first * S.head_dim},
        .kv_exponents = {},
        .query = ptx::smem_addr(&smem.query[slot][group][0]),
        .query_exponents = ptx::smem_addr(&smem.mx.query_exponents[slot][group][0]),
        .weights = ptx::smem_addr(&smem.weights[slot][group][0])};
    DK_UNROLL
    for (i32 i = 0; i < 2; ++i)
      at.kv_exponents[i] = load_kv_exponents(args, kv_row + first + ptx::lane_index() / 4 + 8 * i);
    return at;
  }

  // The same for a tile that may cross the edges of windows, or holds what the fast way cannot do. All
  // sets are summed before the first is looked at: then the scores' registers are free.
  DK_DEVICE void reduce_edge(const Scores& x, u32 scales, i32 tile, i32 kv_row) const {
    float logit[Sum::kSets][Sum::kSlots][Sum::kRows];
    sum_edge(logit, x, scales, tile);
    DK_UNROLL
    for (i32 set = 0; set < Sum::kSets; ++set) {
      if constexpr (S.is_mx())
        RebasedWideSum<S>::mend(logit[set], wide_operands(tile, kv_row), set);
      DK_UNROLL
      for (i32 slot = 0; slot < Sum::kSlots; ++slot) {
        const u32 token = first_token() + sizeof(Token) * Sum::further(set, slot);
        Logit* row = stage_pointer(token, kv_row);
        DK_UNROLL
        for (i32 i = 0; i < Sum::kRows; ++i) {
          const i32 offset = row_offset(tile, i);
          if (Sum::stores())
            store_edge<S.clean != Clean::off>(row + offset, kv_row + tile_row + offset,
                                              load_edge(token + Token::kEdgeAt),
                                              logit[set][slot][i]);
        }
      }
    }
  }
  template <i32 kSet = 0>
  DK_DEVICE void sum_edge(float (&logit)[Sum::kSets][Sum::kSlots][Sum::kRows],
                          const Scores& x, u32 scales, i32 tile) const {
    if constexpr (kSet < Sum::kSets) {
      float sum[Sum::kSlots][2];
      sum_heads<kSet>(sum, x);
      Sum::join(logit[kSet], sum);
      DK_UNROLL
      for (i32 slot = 0; slot < Sum::kSlots; ++slot) {
        const u32 token = first_token() + sizeof(Token) * Sum::further(kSet, slot);
        DK_UNROLL
        for (i32 i = 0; i < Sum::kRows; ++i)
          logit[kSet][slot][i] =
              scaled_sum(logit[kSet][slot][i], ptx::load_shared_f32(scale_at(scales, tile, i)),
                         ptx::load_shared_f32(token + Token::kPowerAt));
      }
      sum_edge<kSet + 1>(logit, x, scales, tile);
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
    Scores x;
    float scale[Sum::kRows];
    if constexpr (!kEdge && kScaleLoad == ScaleLoad::before) load_scales(scale, scales, tile);
    start_score(x, kv + tile * (kTileRows * S.head_dim >> 4));
    if constexpr (!kEdge && kScaleLoad == ScaleLoad::meanwhile) load_scales(scale, scales, tile);
    ptx::wgmma_wait_group<0>(x);
    if constexpr (!kEdge && kScaleLoad == ScaleLoad::after) load_scales(scale, scales, tile);
    if constexpr (kEdge)  // scales are read where they are used: the edge tests need registers
      reduce_edge(x, scales, tile, kv_row);
    else
      reduce(x, scale, tile, kv_row);
    if (tile == kTiles - 1) release_stage();
  }

  DK_DEVICE void wait_for_stage() const {
    ptx::mbarrier_wait(ptx::smem_addr(&smem.kv_filled[stages.slot]), stages.parity);
  }
  template <bool kEdge>
  DK_DEVICE void stage(i32 kv_row) {
    if constexpr (!S.is_mx()) wait_for_stage();
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

  // MX: the group's query rows as e4m3 rows with one exponent each, which goes into the weights.
  // Thread i of the group takes column i.
  DK_DEVICE void rebase_queries() const {
    constexpr i32 kBlocks = S.head_dim / kMxBlock;
    constexpr i32 kChunks = mx_block_bytes(S.format) / 16;
    constexpr bool kExpands = S.format == Format::mxfp4;
    const i32 column = ptx::thread_index() % kMqaGroupRows;
    const u32 rows = ptx::smem_addr(&smem.query[slot][group][0]);
    const u32 barrier = static_cast<u32>(Barrier::group_rebased) + group;
    const u32 exponents = ptx::smem_addr(&smem.mx.query_exponents[slot][group][column]);
    const i32 given = ptx::load_shared_i32(exponents);
    MxCodes<S.format> codes[kBlocks];
    MxRow<S.format> found;
    DK_UNROLL
    for (i32 block = 0; block < kBlocks; ++block) {
      codes[block].load([&](u32(&bytes)[4], i32 offset) {
        ptx::load_shared_x4(bytes, rows + tile::swizzled_offset<S.query_row_bytes()>(
                                              column, block * kChunks + offset / 16));
      });
      found.add(mx_exponent(given, block), codes[block].is_zero());
    }
    if constexpr (kExpands) ptx::barrier_sync(barrier, kMqaGroupRows);  // all packed rows are read
    DK_UNROLL
    for (i32 block = 0; block < kBlocks; ++block) {
      const i32 shift = found.shift(mx_exponent(given, block));
      if (!kExpands && shift == 0) continue;
      codes[block].rebase(shift);
      DK_UNROLL
      for (i32 half = 0; half < 2; ++half) {
        const u32* word = codes[block].word + 4 * half;
        ptx::store_shared_x4(rows + tile::swizzled_offset<S.head_dim>(column, 2 * block + half),
                             word[0], word[1], word[2], word[3]);
      }
    }
    ptx::store_shared_i32(exponents, found.exponents(given));
    const float weight = ptx::load_shared_f32(ptx::smem_addr(&smem.weights[slot][group][column]));
    ptx::store_shared_f32(ptx::smem_addr(&smem.mx.powered[slot][group][column]),
                          powered_weight(weight, found.power()) * column_factor<S>(column));
    ptx::fence_proxy_async();
    ptx::barrier_sync(barrier, kMqaGroupRows);
  }
  // The weights that the fast way takes, of the lane's first column.
  DK_DEVICE u32 fast_weights() const {
    const i32 column = 2 * (ptx::lane_index() % 4);
    if constexpr (S.is_mx())
      return ptx::smem_addr(&smem.mx.powered[slot][group][column]);
    else
      return ptx::smem_addr(&smem.weights[slot][group][column]);
  }

  DK_DEVICE void open_unit(i32 kv_row) {
    if constexpr (S.is_mx()) rebase_queries();
    query_low = Descriptor::low(ptx::smem_addr(&smem.query[slot][group][0]));
    const u32 weights = fast_weights();
    DK_UNROLL
    for (i32 octet = 0; octet < 16; ++octet) {
      float pair[2];
      ptx::load_shared_f32x2(pair, weights + 4 * 8 * octet);
      weight[2 * octet] = pair[0];
      weight[2 * octet + 1] = pair[1];
    }
    if constexpr (S.is_mx()) {  // four lanes hold all columns of the group
      bool is_nan = false;
      DK_UNROLL
      for (i32 i = 0; i < 32; ++i) is_nan = is_nan || weight[i] != weight[i];
      has_exact_token = ptx::any(is_nan);
    }
    if constexpr (S.is_folded()) {
      // Digit columns 2t, 2t + 1 of lane t; behind the last digit stand zeros.
      const bool is_later = (ptx::lane_index() & 1) != 0;
      digit_scale = ptx::load_shared_f32(first_token() + Token::kFoldedScaleAt) *
                    (is_later ? 1.0f / 256 : 1.0f);
    }
    if constexpr (kKeepsPointer) out = row_pointer(first_token(), kv_row);
  }
  // Whether the coming stage lies inside every window of the group, and can be had the fast way.
  DK_DEVICE bool is_full(const Unit<S.tokens_per_block()>& unit, i32 kv_row) const {
    if constexpr (S.is_mx()) {
      const i32 groups = ptx::load_shared_i32(ptx::smem_addr(&smem.mx.full_groups[stages.slot]));
      return (groups >> group & 1) != 0 && !has_exact_token;
    } else {
      // Read for every stage: registers are scarcer than these loads.
      const i32 full_begin = ptx::load_shared_i32(ptx::smem_addr(&unit.full_begin[group]));
      const i32 full_end = ptx::load_shared_i32(ptx::smem_addr(&unit.full_end[group]));
      return kv_row >= full_begin && kv_row + S.kv_stage_rows() <= full_end;
    }
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
      slot = units.slot;
      open_unit(kv_row);
      DK_NO_UNROLL
      for (; num_stages > 0; --num_stages, kv_row += S.kv_stage_rows()) {
        if constexpr (S.is_mx()) wait_for_stage();  // it says whether it is full
        if (is_full(unit, kv_row))
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
      if (S.is_mx() || ptx::lane_index() == 0) kv_role<S>(args, maps, smem);
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
