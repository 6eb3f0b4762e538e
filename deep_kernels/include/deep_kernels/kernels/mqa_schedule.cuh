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

  // Span of block `first_block + lane / kLanes`, the same in all lanes that share it. Converged.
  template <class Args>
  static DK_DEVICE MqaSpan load(const Args& args, i32 first_block) {
    const i32 lane = ptx::lane_index();
    const i32 row = (first_block + lane / kLanes) * kTokens + lane % kLanes;
    const i32 limit = window_limit(args);
    i32 begin = args.num_kv;
    i32 end = 0;
    DK_UNROLL
    for (i32 i = 0; i < kTokensPerLane; ++i) {
      const MqaWindow window = load_window(args, row + i * kLanes, limit);
      if (window.begin < window.end) {
        begin = min_of(begin, window.begin);
        end = max_of(end, window.end);
      }
    }
    DK_UNROLL
    for (i32 step = 1; step < kLanes; step *= 2) {
      begin = min_of(begin, ptx::shuffle_xor(begin, step));
      end = max_of(end, ptx::shuffle_xor(end, step));
    }
    return mqa_span(begin, end);
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

// Cost of a warp's blocks; the same in all lanes. Converged.
template <i32 kTokens, class Args>
DK_DEVICE i64 cost_of_blocks(const Args& args, BlockRange blocks) {
  using Scan = SpanScan<kTokens>;
  const i32 lane = ptx::lane_index();
  i64 cost = 0;
  DK_NO_UNROLL
  for (i32 block = blocks.begin; block < blocks.end; block += Scan::kBlocks) {
    const MqaSpan span = Scan::load(args, block);
    const bool counts = lane % Scan::kLanes == 0 && block + lane / Scan::kLanes < blocks.end;
    cost += counts ? mqa_block_cost(span.num_chunks) : 0;
  }
  DK_UNROLL
  for (i32 step = 1; step < 32; step *= 2) cost += ptx::shuffle_xor(cost, step);
  return cost;
}

// Calls visit(block, position, span) for every block of a warp, in the lane that leads the block;
// `position` is the cost of all blocks before it. Converged around, not inside, the visits.
template <i32 kTokens, class Args, class Visit>
DK_DEVICE void for_each_block(const Args& args, BlockRange blocks, i64 position, Visit&& visit) {
  using Scan = SpanScan<kTokens>;
  const i32 lane = ptx::lane_index();
  DK_NO_UNROLL
  for (i32 first = blocks.begin; first < blocks.end; first += Scan::kBlocks) {
    const i32 block = first + lane / Scan::kLanes;
    const MqaSpan span = Scan::load(args, first);
    const bool leads = lane % Scan::kLanes == 0 && block < blocks.end;
    const i32 cost = leads ? mqa_block_cost(span.num_chunks) : 0;
    i32 sum = cost;  // inclusive prefix over the lanes, at most 32 * 2^23
    DK_UNROLL
    for (i32 step = Scan::kLanes; step < 32; step *= 2) {
      const i32 below = ptx::shuffle_up(sum, step);
      if (lane >= step) sum += below;
    }
    if (leads) visit(block, position + sum - cost, span);
    position += ptx::shuffle(sum, 32 - Scan::kLanes);
  }
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
  i64 before;
  i64 total;
};
// All threads of the block together; ends with a block barrier behind the last write.
template <i32 kTokens, i32 kWarps, class Args>
DK_DEVICE ScheduleSums sum_costs(const Args& args, BlockRange blocks, i32 warp,
                                 ScheduleScratch& scratch) {
  const i64 cost = cost_of_blocks<kTokens>(args, blocks);
  if (ptx::lane_index() == 0) ptx::store_shared_i64(ptx::smem_addr(&scratch.warp_cost[warp]), cost);
  ptx::sync_threads();
  ScheduleSums sums{0, 0};
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
template <i32 kTokens, i32 kWarps, class Args>
DK_DEVICE void derive_cuts(const Args& args, i32 run, i32 num_runs, ScheduleScratch& scratch) {
  const i32 num_blocks = ceil_div(args.num_q, kTokens);
  const i32 warp = ptx::warp_index();
  const BlockRange blocks = warp_blocks<kTokens, kWarps>(num_blocks, warp);
  const ScheduleSums sums = sum_costs<kTokens, kWarps>(args, blocks, warp, scratch);
  const MqaCutPositions cuts(sums.total, num_runs);
  i64 position[2];
  DK_UNROLL
  for (i32 side = 0; side < 2; ++side) {
    position[side] = cuts(run + side);
    if (ptx::thread_index() == 0 && position[side] >= sums.total)  // the end of the last run
      store_cut(scratch, side, {num_blocks, 0});
  }
  for_each_block<kTokens>(args, blocks, sums.before, [&](i32 block, i64 begin, MqaSpan span) {
    const i64 end = begin + mqa_block_cost(span.num_chunks);
    DK_UNROLL
    for (i32 side = 0; side < 2; ++side) {
      if (position[side] >= begin && position[side] < end)
        store_cut(scratch, side, mqa_cut_in_block(block, position[side] - begin, span.num_chunks));
    }
  });
}

// The cut before which run `run` of `num_runs` ends, out of a schedule that may hold anything: the
// largest of the first cuts, so that the runs cover every block once whatever the tensor says; the
// first and the last cut are not read. One warp, converged; the same in all lanes.
DK_DEVICE MqaCut load_cut(const MqaLogitsArgs& args, i32 num_blocks, i32 run, i32 num_runs) {
  const i32 index = static_cast<i32>(i64{run} * (args.num_cuts - 1) / num_runs);
  i64 largest = 0;
  DK_NO_UNROLL
  for (i32 i = 1 + ptx::lane_index(); i <= index; i += 32) {
    const i32 block = clamp_to(ptx::load_global(args.schedule + 2 * i64{i}), 0, num_blocks);
    const i32 chunk = max_of(ptx::load_global(args.schedule + 2 * i64{i} + 1), 0);
    largest = max_of(largest, (i64{block} << 32) | chunk);
  }
  DK_UNROLL
  for (i32 step = 1; step < 32; step *= 2)
    largest = max_of(largest, ptx::shuffle_xor(largest, step));
  if (run == num_runs) return {num_blocks, 0};
  return {static_cast<i32>(largest >> 32), static_cast<i32>(largest)};
}

// The run of this block, out of the schedule or derived from the windows, into the scratch. All
// threads of the block together; a block barrier must follow before the cuts are read.
template <MqaLogitsSpec S>
DK_DEVICE void find_run(const MqaLogitsArgs& args, ScheduleScratch& scratch) {
  constexpr i32 kTokens = S.tokens_per_block();
  if constexpr (S.schedule == Schedule::derived) {
    derive_cuts<kTokens, S.num_threads() / 32>(args, ptx::block_index(), ptx::num_blocks(),
                                               scratch);
  } else {
    const i32 side = ptx::warp_index();
    if (side >= 2) return;
    const MqaCut cut =
        load_cut(args, ceil_div(args.num_q, kTokens), ptx::block_index() + side, ptx::num_blocks());
    if (ptx::lane_index() == 0) store_cut(scratch, side, cut);
  }
}

// The pre-pass: every cut of num_sms equal runs.
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
  const ScheduleSums sums = sum_costs<kTokens, kWarps>(args, blocks, warp, scratch);
  const auto write = [&](i32 index, MqaCut cut) {
    ptx::store_global(args.schedule + 2 * i64{index}, cut.block);
    ptx::store_global(args.schedule + 2 * i64{index} + 1, cut.chunk);
  };
  const MqaCutPositions cuts(sums.total, args.num_sms);
  // Cuts at the very end: the last one, and all of them where there is nothing to do.
  for (i32 i = ptx::thread_index(); i <= args.num_sms; i += S.num_threads()) {
    if (cuts(i) >= sums.total) write(i, {num_blocks, 0});
  }
  const float cuts_per_cost = static_cast<float>(args.num_sms) / static_cast<float>(sums.total);
  for_each_block<kTokens>(args, blocks, sums.before, [&](i32 block, i64 begin, MqaSpan span) {
    const i64 end = begin + mqa_block_cost(span.num_chunks);
    // The first cut at or after `begin`: an estimate from below, then a few steps.
    i32 i = max_of(0, static_cast<i32>(static_cast<float>(begin) * cuts_per_cost) - 2);
    for (; i < args.num_sms; ++i) {
      const i64 position = cuts(i);
      if (position >= end) break;
      if (position >= begin) write(i, mqa_cut_in_block(block, position - begin, span.num_chunks));
    }
  });
}

}  // namespace deep_kernels
