// How the work of MQA logits is cut over the SMs: windows, spans of query blocks, cuts. The main
// kernels use it to find their share, the pre-pass kernel below to write all shares down.
#pragma once

#include "deep_kernels/contract/mqa_logits.h"
#include "deep_kernels/ptx/base.cuh"

namespace deep_kernels {

// The row's window; rows past the last are empty. Args: MqaLogitsArgs or MqaScheduleArgs.
template <class Args>
DK_DEVICE MqaWindow load_window(const Args& args, i32 row, i32 limit) {
  if (row >= args.num_q) return {0, 0};
  return mqa_window(ptx::load_global(args.kv_start + row * args.kv_start_stride),
                    ptx::load_global(args.kv_end + row * args.kv_end_stride), args.num_kv, limit);
}
DK_DEVICE i32 window_limit(const MqaLogitsArgs& args) {
  return args.compressed ? args.width : args.num_kv;
}
DK_DEVICE i32 window_limit(const MqaScheduleArgs& args) { return args.num_kv; }

// One warp looks at kBlocks consecutive query blocks of kTokens tokens at once: kLanes lanes share
// a block, every lane takes kTokensPerLane of its tokens.
template <i32 kTokens>
struct SpanScan {
  static constexpr i32 kLanes = kTokens < 32 ? kTokens : 32;
  static constexpr i32 kTokensPerLane = kTokens / kLanes;
  static constexpr i32 kBlocks = 32 / kLanes;

  // What a lane has seen of its block: an empty window changes nothing.
  struct Bounds {
    i32 begin;
    i32 end;
  };
  template <class Args>
  static DK_DEVICE Bounds look(const Args& args, i32 first_block) {
    const i32 lane = ptx::lane_index();
    const i32 row = (first_block + lane / kLanes) * kTokens + lane % kLanes;
    const i32 limit = window_limit(args);
    Bounds seen{args.num_kv, 0};
    DK_UNROLL
    for (i32 i = 0; i < kTokensPerLane; ++i) {
      const MqaWindow window = load_window(args, row + i * kLanes, limit);
      if (window.begin < window.end) {
        seen.begin = min_of(seen.begin, window.begin);
        seen.end = max_of(seen.end, window.end);
      }
    }
    return seen;
  }
  // Joins the lanes of a block. Converged.
  static DK_DEVICE MqaSpan span(Bounds seen) {
    DK_UNROLL
    for (i32 step = 1; step < kLanes; step *= 2) {
      seen.begin = min_of(seen.begin, ptx::shuffle_xor(seen.begin, step));
      seen.end = max_of(seen.end, ptx::shuffle_xor(seen.end, step));
    }
    return mqa_span(seen.begin, seen.end);
  }
  // Span of block `first_block + lane / kLanes`, the same in all lanes that share it. Converged.
  template <class Args>
  static DK_DEVICE MqaSpan load(const Args& args, i32 first_block) {
    return span(look(args, first_block));
  }
};

// Blocks of one warp when kWarps warps share all of them in order.
struct BlockRange {
  i32 begin;
  i32 end;
};
template <i32 kTokens, i32 kWarps>
DK_DEVICE BlockRange warp_blocks(i32 num_blocks, i32 warp) {
  const i32 per_warp = align_up(ceil_div(num_blocks, kWarps), SpanScan<kTokens>::kBlocks);
  const i32 begin = static_cast<i32>(min_of<i64>(i64{per_warp} * warp, num_blocks));
  return {begin, min_of(begin + per_warp, num_blocks)};
}

// Calls visit(block, span, leads) for a warp's blocks, kBlocks at a time: `block` is the lane's,
// and one lane of each block that exists leads it. The windows of kAhead steps are loaded together:
// the loads are all latency, but every step more is code to compile. Converged, also inside the
// visits.
template <i32 kTokens, i32 kAhead, class Args, class Visit>
DK_DEVICE void for_each_span(const Args& args, BlockRange blocks, Visit&& visit) {
  using Scan = SpanScan<kTokens>;
  const i32 lane = ptx::lane_index();
  DK_NO_UNROLL
  for (i32 first = blocks.begin; first < blocks.end; first += kAhead * Scan::kBlocks) {
    typename Scan::Bounds seen[kAhead];
    DK_UNROLL
    for (i32 i = 0; i < kAhead; ++i) seen[i] = Scan::look(args, first + i * Scan::kBlocks);
    DK_UNROLL
    for (i32 i = 0; i < kAhead; ++i) {
      const i32 block = first + i * Scan::kBlocks + lane / Scan::kLanes;
      visit(block, Scan::span(seen[i]), lane % Scan::kLanes == 0 && block < blocks.end);
    }
  }
}

// Inclusive prefix sum over the lanes, of which every kEvery-th has a value. Converged.
template <i32 kEvery>
DK_DEVICE i32 prefix_sum(i32 value) {
  const i32 lane = ptx::lane_index();
  DK_UNROLL
  for (i32 step = kEvery; step < 32; step *= 2) {
    const i32 below = ptx::shuffle_up(value, step);
    if (lane >= step) value += below;
  }
  return value;
}

// Shared by all warps of a block: costs on the way, the block's run at the end.
struct ScheduleScratch {
  i64 warp_cost[32];
  i32 cut_block[2];  // of the cut before the run, and of the cut behind it
  i32 cut_chunk[2];
};
DK_DEVICE void store_cut(ScheduleScratch& scratch, i32 side, MqaCut cut) {
  ptx::store_shared_i32(ptx::smem_addr(&scratch.cut_block[side]), cut.block);
  ptx::store_shared_i32(ptx::smem_addr(&scratch.cut_chunk[side]), cut.chunk);
}
DK_DEVICE MqaCut stored_cut(const ScheduleScratch& scratch, i32 side) {
  return {ptx::load_shared_i32(ptx::smem_addr(&scratch.cut_block[side])),
          ptx::load_shared_i32(ptx::smem_addr(&scratch.cut_chunk[side]))};
}

struct ScheduleSums {
  i64 before;  // of the warps below
  i64 own;     // of this warp
  i64 total;
};
// Adds the costs up that the lanes of all warps have seen. All threads of the block together; holds
// a block barrier.
template <i32 kWarps>
DK_DEVICE ScheduleSums sum_costs(i64 cost, i32 warp, ScheduleScratch& scratch) {
  DK_UNROLL
  for (i32 step = 1; step < 32; step *= 2) cost += ptx::shuffle_xor(cost, step);
  if (ptx::lane_index() == 0) ptx::store_shared_i64(ptx::smem_addr(&scratch.warp_cost[warp]), cost);
  ptx::sync_threads();
  ScheduleSums sums{0, cost, 0};
  DK_NO_UNROLL
  for (i32 i = 0; i < kWarps; ++i) {
    const i64 other = ptx::load_shared_i64(ptx::smem_addr(&scratch.warp_cost[i]));
    sums.before += i < warp ? other : 0;
    sums.total += other;
  }
  return sums;
}

// Writes the cuts where run `run` of `num_runs` equal runs begins and ends into the scratch.
// All threads of the block together; a block barrier must follow before the cuts are read.
template <i32 kTokens, i32 kWarps, i32 kOpenCost, class Args>
DK_DEVICE void derive_cuts(const Args& args, i32 run, i32 num_runs, ScheduleScratch& scratch) {
  const i32 num_blocks = ceil_div(args.num_q, kTokens);
  const i32 warp = ptx::warp_index();
  const BlockRange blocks = warp_blocks<kTokens, kWarps>(num_blocks, warp);
  i64 seen = 0;
  for_each_span<kTokens, 1>(args, blocks, [&](i32, MqaSpan span, bool leads) {
    seen += leads ? mqa_block_cost(span.num_chunks, kOpenCost) : 0;
  });
  const ScheduleSums sums = sum_costs<kWarps>(seen, warp, scratch);
  const MqaCutPositions cuts(sums.total, num_runs);
  i64 position[2];
  DK_UNROLL
  for (i32 side = 0; side < 2; ++side) {
    position[side] = cuts(run + side);
    if (ptx::thread_index() == 0 && position[side] >= sums.total)  // the end of the last run
      store_cut(scratch, side, {num_blocks, 0});
  }
  // Only the warps that have a cut among their blocks look at them again.
  bool has_cut = false;
  DK_UNROLL
  for (i32 side = 0; side < 2; ++side)
    has_cut = has_cut || (position[side] >= sums.before && position[side] < sums.before + sums.own);
  if (!has_cut) return;
  i64 before = sums.before;
  for_each_span<kTokens, 1>(args, blocks, [&](i32 block, MqaSpan span, bool leads) {
    constexpr i32 kLanes = SpanScan<kTokens>::kLanes;
    const i32 cost = leads ? mqa_block_cost(span.num_chunks, kOpenCost) : 0;
    const i32 sum = prefix_sum<kLanes>(cost);  // at most 32 * 2^23
    const i64 end = before + sum;
    DK_UNROLL
    for (i32 side = 0; side < 2; ++side) {
      if (leads && position[side] >= end - cost && position[side] < end)
        store_cut(
            scratch, side,
            mqa_cut_in_block(block, position[side] - (end - cost), span.num_chunks, kOpenCost));
    }
    before += ptx::shuffle(sum, 32 - kLanes);
  });
}

// The largest of load(1) to load(last), 0 if there is none: a place in the order of cuts, as one
// number. One warp, converged; the same in all lanes.
template <class Load>
DK_DEVICE i64 largest_cut(i32 last, Load&& load) {
  constexpr i32 kAhead = 5;  // loads that travel together: all of them up to 160 SMs
  i64 largest = 0;
  DK_NO_UNROLL
  for (i32 first = 1 + ptx::lane_index(); first <= last; first += 32 * kAhead) {
    DK_UNROLL
    for (i32 i = 0; i < kAhead; ++i) largest = max_of(largest, load(min_of(first + 32 * i, last)));
  }
  DK_UNROLL
  for (i32 step = 1; step < 32; step *= 2)
    largest = max_of(largest, ptx::shuffle_xor(largest, step));
  return largest;
}

// The cut before which run `run` of `num_runs` ends, out of a schedule that may hold anything: the
// largest of the first cuts, so that the runs cover every block once whatever the tensor says; the
// first and the last cut are not read. One warp, converged; the same in all lanes.
DK_DEVICE MqaCut load_cut(const MqaLogitsArgs& args, i32 num_blocks, i32 run, i32 num_runs) {
  const i32 index = static_cast<i32>(i64{run} * (args.num_cuts - 1) / num_runs);
  const i64 largest = largest_cut(index, [&](i32 i) {
    const i32 block = clamp_to(ptx::load_global(args.schedule + 2 * i64{i}), 0, num_blocks);
    const i32 chunk = max_of(ptx::load_global(args.schedule + 2 * i64{i} + 1), 0);
    return (i64{block} << 32) | chunk;
  });
  if (run == num_runs) return {num_blocks, 0};
  return {static_cast<i32>(largest >> 32), static_cast<i32>(largest)};
}

// The run of this block, out of the schedule or derived from the windows, into the scratch. All
// threads of the block together; a block barrier must follow before the cuts are read.
template <MqaLogitsSpec S>
DK_DEVICE void find_run(const MqaLogitsArgs& args, ScheduleScratch& scratch) {
  constexpr i32 kTokens = S.tokens_per_block();
  if constexpr (S.schedule == Schedule::derived) {
    derive_cuts<kTokens, S.num_threads() / 32, mqa_open_cost(S.format)>(args, ptx::block_index(),
                                                                        ptx::num_blocks(), scratch);
  } else {
    const i32 side = ptx::warp_index();
    if (side >= 2) return;
    const MqaCut cut =
        load_cut(args, ceil_div(args.num_q, kTokens), ptx::block_index() + side, ptx::num_blocks());
    if (ptx::lane_index() == 0) store_cut(scratch, side, cut);
  }
}

// The pre-pass: every cut of num_sms equal runs. First all spans are looked at, and the chunks of
// each block noted down; then every lane takes a block and writes the cuts that fall into it.
template <MqaScheduleSpec S>
DK_DEVICE void mqa_schedule(const MqaScheduleArgs& args) {
  static_assert(S.invalid() == nullptr);
  static_assert(sizeof(ScheduleScratch) <= S.smem_bytes());
  constexpr i32 kTokens = mqa_tokens_per_block(S.num_heads);
  constexpr i32 kWarps = S.num_threads() / 32;
  ScheduleScratch& scratch = ptx::dynamic_smem<ScheduleScratch>();
  const i32 num_blocks = ceil_div(args.num_q, kTokens);
  const i32 warp = ptx::warp_index();
  const BlockRange blocks = warp_blocks<kTokens, kWarps>(num_blocks, warp);
  constexpr i32 kOpenCost = kMqaScheduleOpenCost;
  i64 seen = 0;
  for_each_span<kTokens, 4>(args, blocks, [&](i32 block, MqaSpan span, bool leads) {
    if (!leads) return;
    seen += mqa_block_cost(span.num_chunks, kOpenCost);
    ptx::store_global(args.num_chunks + block, span.num_chunks);
  });
  const ScheduleSums sums = sum_costs<kWarps>(seen, warp, scratch);
  const auto write = [&](i32 index, MqaCut cut) {
    ptx::store_global(args.schedule + 2 * i64{index}, cut.block);
    ptx::store_global(args.schedule + 2 * i64{index} + 1, cut.chunk);
  };
  const MqaCutPositions cuts(sums.total, args.num_sms);
  // Cuts at the very end: the last one, and all of them where there is nothing to do.
  DK_NO_UNROLL
  for (i32 i = ptx::thread_index(); i <= args.num_sms; i += S.num_threads()) {
    if (cuts(i) >= sums.total) write(i, {num_blocks, 0});
  }
  const float cuts_per_cost = static_cast<float>(args.num_sms) / static_cast<float>(sums.total);
  i64 before = sums.before;
  DK_NO_UNROLL
  for (i32 first = blocks.begin; first < blocks.end; first += 32) {
    const i32 block = first + ptx::lane_index();
    const bool exists = block < blocks.end;
    // Written by this warp: its lanes met at a block barrier since.
    const i32 num_chunks = exists ? ptx::load_global_written(args.num_chunks + block) : 0;
    const i32 cost = exists ? mqa_block_cost(num_chunks, kOpenCost) : 0;
    const i32 sum = prefix_sum<1>(cost);
    const i64 end = before + sum;
    const i64 begin = end - cost;
    // The first cut at or after `begin`: an estimate from below, then a few steps.
    i32 i = max_of(0, static_cast<i32>(static_cast<float>(begin) * cuts_per_cost) - 2);
    DK_NO_UNROLL
    for (; exists && i < args.num_sms; ++i) {
      const i64 position = cuts(i);
      if (position >= end) break;
      if (position >= begin)
        write(i, mqa_cut_in_block(block, position - begin, num_chunks, kOpenCost));
    }
    before += ptx::shuffle(sum, 31);
  }
}

}  // namespace deep_kernels
