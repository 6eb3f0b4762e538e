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
#include "deep_kernels/kernels/mqa_math_sm90.cuh"
#include "deep_kernels/kernels/mqa_schedule.cuh"
#include "deep_kernels/kernels/mqa_unit_sm90.cuh"
#include "deep_kernels/ptx/sm90.cuh"
#include "deep_kernels/tile/pipeline.cuh"

namespace deep_kernels::mqa_sm90 {

// --- scheduler warp -----------------------------------------------------------------------------

DK_DEVICE void post_token(Token& token, i64 origin, RowEdge edge) {
  ptx::store_shared_i64(ptx::smem_addr(&token.origin), origin);
  ptx::store_shared_i32(ptx::smem_addr(&token.edge.begin), edge.begin);
  ptx::store_shared_i32(ptx::smem_addr(&token.edge.end), edge.end);
  ptx::store_shared_i32(ptx::smem_addr(&token.edge.first), edge.first);
  ptx::store_shared_i32(ptx::smem_addr(&token.edge.last), edge.last);
  ptx::store_shared_f32(ptx::smem_addr(&token.power), 1.0f);
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
    i32 reach_begin = window.begin < window.end ? window.begin : args.num_kv;
    i32 reach_end = window.begin < window.end ? window.end : 0;
    DK_UNROLL
    for (i32 step = 1; step < kPerGroup; step *= 2) {
      full_begin = max_of(full_begin, ptx::shuffle_xor(full_begin, step));
      full_end = min_of(full_end, ptx::shuffle_xor(full_end, step));
      reach_begin = min_of(reach_begin, ptx::shuffle_xor(reach_begin, step));
      reach_end = max_of(reach_end, ptx::shuffle_xor(reach_end, step));
    }
    if (in_block) {
      post_token(unit.token[token], row_origin(args, window, row), row_edge(args, window, row));
      if constexpr (S.is_folded())
        ptx::store_shared_f32(ptx::smem_addr(&unit.token[token].folded_scale),
                              row < args.num_q ? ptx::load_global(args.folded_scale + row) : 0.0f);
      if (token % kPerGroup == 0) {
        ptx::store_shared_i32(ptx::smem_addr(&unit.full_begin[token / kPerGroup]), full_begin);
        ptx::store_shared_i32(ptx::smem_addr(&unit.full_end[token / kPerGroup]), full_end);
        ptx::store_shared_i32(ptx::smem_addr(&unit.reach_begin[token / kPerGroup]), reach_begin);
        ptx::store_shared_i32(ptx::smem_addr(&unit.reach_end[token / kPerGroup]), reach_end);
      }
    }
  }
  return mqa_span(ptx::reduce_min(lowest), ptx::reduce_max(highest));
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
  constexpr i32 kAhead = 8;
  DK_NO_UNROLL
  for (i32 base = ptx::lane_index(); base < kMqaQueryRows; base += kAhead * 32) {
    // All loads before the first store, so that they travel together: short windows wait for them.
    float weight[kAhead];
    DK_UNROLL
    for (i32 i = 0; i < kAhead; ++i)
      weight[i] = load_column_weight<S>(args, first_row, base + 32 * i);
    DK_UNROLL
    for (i32 i = 0; i < kAhead; ++i) {
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
  constexpr i32 kAhead = 4;
  DK_NO_UNROLL
  for (i32 base = ptx::lane_index(); base < kMqaQueryRows; base += kAhead * 32) {
    float weight[kAhead];
    i32 given[kAhead];
    DK_UNROLL
    for (i32 i = 0; i < kAhead; ++i) {  // all loads before the first store, as above
      const i32 column = base + 32 * i;
      weight[i] = load_column_weight<S>(args, first_row, column);
      given[i] = load_query_exponents(args, first_row + S.block_token_of(column),
                                      S.head_of(column % kMqaGroupRows));
    }
    DK_UNROLL
    for (i32 i = 0; i < kAhead; ++i) {
      ptx::store_shared_f32(weights + 4 * (base + 32 * i), weight[i]);
      ptx::store_shared_i32(exponents + 4 * (base + 32 * i), given[i]);
    }
  }
}

template <MqaLogitsSpec S, class Maps>
DK_DEVICE void load_queries(const MqaLogitsArgs& args, const Maps& maps, Smem<S>& smem, i32 slot,
                            i32 block) {
  constexpr i32 kOctets = kMqaQueryRows / 8;
  const i32 per_copy = mqa_octets_per_copy(S, args.num_heads);
  const u32 filled = ptx::smem_addr(&smem.query_filled[slot]);
  const u32 rows = ptx::smem_addr(&smem.query[slot][0][0]);
  DK_NO_UNROLL
  for (i32 octet = ptx::lane_index() * per_copy; octet < kOctets; octet += 32 * per_copy) {
    const i32 column = octet % (kMqaGroupRows / 8) * 8;
    const i32 token = block * S.tokens_per_block() +
                      octet / (kMqaGroupRows / 8) * S.tokens_per_group() + S.token_of(column);
    // Packed rows lie at the beginning of their group's place until they are expanded there.
    const u32 group_at = octet / (kMqaGroupRows / 8) * S.group_rows() * S.head_dim;
    ptx::tma_load_4d(rows + group_at + column * S.query_row_bytes(), maps.q, filled, 0,
                     S.head_of(column), token, 0);
  }
  if constexpr (S.is_folded()) {
    const i32 group = ptx::lane_index();
    if (group < kMqaGroups)
      ptx::tma_load_2d(rows + (group * S.group_rows() + kMqaGroupRows) * S.head_dim, maps.folded,
                       filled, 0, (block * kMqaGroups + group) * kMqaFoldedRows);
  }
}

// What a block's scheduling waits for one load after the other, into the L2 cache.
template <MqaLogitsSpec S>
DK_DEVICE void prefetch_columns(const MqaLogitsArgs& args, i32 block) {
  const i32 column = ptx::lane_index() * (kMqaQueryRows / 32);  // in memory order
  const i32 row = block * S.tokens_per_block() + column / S.num_heads;
  const i32 head = column % S.num_heads;
  if (row >= args.num_q || head >= args.num_heads) return;
  const i64 weight = row * args.weights_stride + head;
  ptx::prefetch_global_l2(static_cast<const u8*>(args.weights) +
                          weight * bytes_of(args.weights_dtype));
  if constexpr (S.is_mx())
    ptx::prefetch_global_l2(args.q_exponents + row * args.q_exponents_token_stride +
                            head * args.q_exponents_head_stride);
  if (head != 0) return;
  ptx::prefetch_global_l2(args.kv_start + row * args.kv_start_stride);
  ptx::prefetch_global_l2(args.kv_end + row * args.kv_end_stride);
}

// Hands the unit to the kv warp, which for MX formats reads the windows that the lanes wrote.
// Converged.
template <MqaLogitsSpec S>
DK_DEVICE void arrive_posted(Smem<S>& smem, i32 slot) {
  if (S.is_mx() || ptx::lane_index() == 0)
    ptx::mbarrier_arrive(ptx::smem_addr(&smem.unit_posted[slot]));
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
    prefetch_columns<S>(args, block);
    ptx::mbarrier_wait(ptx::smem_addr(&smem.unit_drained[slots.slot]), slots.parity);
    const MqaSpan span = post_windows<S>(args, block, unit);
    const i32 first = block == begin.block ? min_of(begin.chunk, span.num_chunks) : 0;
    const i32 last = block == end.block ? min_of(end.chunk, span.num_chunks) : span.num_chunks;
    if (first >= last) continue;
    const u32 query_filled = ptx::smem_addr(&smem.query_filled[slots.slot]);
    if (lane == 0) {
      ptx::store_shared_i32(ptx::smem_addr(&unit.kv_begin), span.begin + first * kMqaChunkRows);
      ptx::store_shared_i32(ptx::smem_addr(&unit.num_stages), last - first);
      ptx::mbarrier_arrive_expect_tx(query_filled, S.query_load_bytes());
    }
    arrive_posted<S>(smem, slots.slot);
    ptx::sync_warp();
    load_queries<S>(args, maps, smem, slots.slot, block);
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
    ptx::mbarrier_arrive(ptx::smem_addr(&smem.query_filled[slots.slot]));
  }
  arrive_posted<S>(smem, slots.slot);
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
    if constexpr (S.is_mx())
      ptx::sync_warp();  // all lanes have read the unit before lane 0 goes on
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
