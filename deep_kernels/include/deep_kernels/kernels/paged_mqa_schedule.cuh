// How the work of paged MQA logits is cut over the SMs: tiles of requests, cuts. The main kernels
// use it to find their share, the pre-pass kernel below to write all shares down.
#pragma once

#include "deep_kernels/contract/paged_mqa_logits.h"
#include "deep_kernels/kernels/mqa_schedule.cuh"
#include "deep_kernels/ptx/base.cuh"

namespace deep_kernels {

// Args, here and below: PagedMqaLogitsArgs or PagedMqaScheduleArgs.
template <class Args>
DK_DEVICE i32 load_row_length(const Args& args, i32 request, i32 row) {
  const i64 index = request * args.context_request_stride + row * args.context_row_stride;
  return paged_row_length(args, ptx::load_global(args.context_lens + index), row);
}
// Of the rows of a request. With one length for all of them the last row sees most.
template <class Args>
DK_DEVICE i32 longest_row_length(const Args& args, i32 request) {
  i32 longest = load_row_length(args, request, args.next_n - 1);
  if (args.lens_per_row) {
    DK_NO_UNROLL
    for (i32 row = 0; row < args.next_n - 1; ++row)
      longest = max_of(longest, load_row_length(args, request, row));
  }
  return longest;
}

// The rows that one row of the block table stands for.
struct RequestRows {
  i32 count;    // 0: computed together with the row before
  i32 longest;  // kv tokens that they see
};
template <class Args>
DK_DEVICE RequestRows load_request(const Args& args, i32 request) {
  static_assert(kPagedSharedRows == 2);
  const i32 longest = longest_row_length(args, request);
  const i32 other = request ^ 1;
  if (args.indices == nullptr) return {args.next_n, longest};
  if (other >= args.num_requests) return {1, longest};
  const i32 others = longest_row_length(args, other);
  const i32 index = ptx::load_global(args.indices + request * args.indices_stride);
  if (index != ptx::load_global(args.indices + other * args.indices_stride)) return {1, longest};
  return {request < other ? 2 : 0, max_of(longest, others)};
}
// 0 for requests past the last.
template <class Args>
DK_DEVICE i32 load_num_tiles(const Args& args, i32 request) {
  if (request >= args.num_requests) return 0;
  const RequestRows rows = load_request(args, request);
  return rows.count > 0 ? paged_num_tiles(rows.longest) : 0;
}

// Requests of one warp when kWarps warps share all of them in order: whole steps of 32.
template <i32 kWarps>
DK_DEVICE BlockRange warp_requests(i32 num_requests, i32 warp) {
  const i32 per_warp = align_up(ceil_div(num_requests, kWarps), 32);
  const i32 begin = static_cast<i32>(min_of<i64>(i64{per_warp} * warp, num_requests));
  return {begin, min_of(per_warp, num_requests - begin) + begin};
}

// Calls visit(request, num_tiles) for a warp's requests, 32 at a time, one per lane; past the last
// there are no tiles. The loads of four steps travel together. Converged, also inside the visits.
template <class Args, class Visit>
DK_DEVICE void for_each_request(const Args& args, BlockRange requests, Visit&& visit) {
  constexpr i32 kAhead = 4;
  DK_NO_UNROLL
  for (i32 first = requests.begin; first < requests.end; first += kAhead * 32) {
    const i32 request = first + ptx::lane_index();
    i32 num_tiles[kAhead];
    DK_UNROLL
    for (i32 i = 0; i < kAhead; ++i) {
      const bool mine = request + 32 * i < requests.end;
      num_tiles[i] = mine ? load_num_tiles(args, request + 32 * i) : 0;
    }
    DK_UNROLL
    for (i32 i = 0; i < kAhead; ++i) visit(request + 32 * i, num_tiles[i]);
  }
}

// What the lanes of a warp have before them when each brings its request's cost. Converged.
struct CostSpan {
  i64 begin;
  i64 end;
};
DK_DEVICE CostSpan next_span(i64& before, i32 cost) {
  const i32 sum = prefix_sum<1>(cost);  // at most 32 * 2^26
  const i64 end = before + sum;
  before += ptx::shuffle(sum, 31);
  return {end - cost, end};
}

template <i32 kWarps, class Args>
DK_DEVICE ScheduleSums sum_requests(const Args& args, BlockRange requests, i32 warp,
                                    ScheduleScratch& scratch) {
  i64 seen = 0;
  for_each_request(args, requests,
                   [&](i32, i32 num_tiles) { seen += paged_request_cost(num_tiles); });
  return sum_costs<kWarps>(seen, warp, scratch);
}

DK_DEVICE void store_cut(ScheduleScratch& scratch, i32 side, PagedCut cut) {
  store_cut(scratch, side, MqaCut{cut.request, cut.tile});
}
DK_DEVICE PagedCut stored_paged_cut(const ScheduleScratch& scratch, i32 side) {
  const MqaCut cut = stored_cut(scratch, side);
  return {cut.block, cut.chunk};
}

// Writes the cuts where run `run` of `num_runs` equal runs begins and ends into the scratch.
// All threads of the block together; a block barrier must follow before the cuts are read.
template <i32 kWarps>
DK_DEVICE void derive_paged_cuts(const PagedMqaLogitsArgs& args, i32 run, i32 num_runs,
                                 ScheduleScratch& scratch) {
  const i32 warp = ptx::warp_index();
  const BlockRange requests = warp_requests<kWarps>(args.num_requests, warp);
  const ScheduleSums sums = sum_requests<kWarps>(args, requests, warp, scratch);
  const MqaCutPositions cuts(sums.total, num_runs);
  i64 position[2];
  bool has_cut = false;
  DK_UNROLL
  for (i32 side = 0; side < 2; ++side) {
    position[side] = cuts(run + side);
    has_cut = has_cut || (position[side] >= sums.before && position[side] < sums.before + sums.own);
    if (ptx::thread_index() == 0 && position[side] >= sums.total)  // the end of the last run
      store_cut(scratch, side, PagedCut{args.num_requests, 0});
  }
  if (!has_cut) return;  // only the warps that have a cut among their requests look again
  i64 before = sums.before;
  for_each_request(args, requests, [&](i32 request, i32 num_tiles) {
    const CostSpan span = next_span(before, paged_request_cost(num_tiles));
    DK_UNROLL
    for (i32 side = 0; side < 2; ++side) {
      if (position[side] >= span.begin && position[side] < span.end)
        store_cut(scratch, side,
                  paged_cut_in_request(request, position[side] - span.begin, num_tiles));
    }
  });
}

// The cut before which run `run` of `num_runs` ends, out of a schedule that may hold anything: the
// largest of the first cuts, so that the runs cover every request once whatever the tensor says;
// the first and the last cut are not read. One warp, converged; the same in all lanes.
DK_DEVICE PagedCut load_paged_cut(const PagedMqaLogitsArgs& args, i32 run, i32 num_runs) {
  const i32 index = static_cast<i32>(i64{run} * (args.num_cuts - 1) / num_runs);
  i64 largest = 0;
  DK_NO_UNROLL
  for (i32 i = 1 + ptx::lane_index(); i <= index; i += 32)
    largest = max_of(largest, paged_cut_order(ptx::load_global(args.schedule + 2 * i64{i}),
                                              ptx::load_global(args.schedule + 2 * i64{i} + 1),
                                              args.num_requests));
  DK_UNROLL
  for (i32 step = 1; step < 32; step *= 2)
    largest = max_of(largest, ptx::shuffle_xor(largest, step));
  return run == num_runs ? PagedCut{args.num_requests, 0} : paged_cut_of(largest);
}

// The run of this block, out of the schedule or derived from the lengths, into the scratch. All
// threads of the block together; a block barrier must follow before the cuts are read.
template <PagedMqaLogitsSpec S>
DK_DEVICE void find_paged_run(const PagedMqaLogitsArgs& args, ScheduleScratch& scratch) {
  if (args.schedule == nullptr) {
    derive_paged_cuts<S.num_threads() / 32>(args, ptx::block_index(), ptx::num_blocks(), scratch);
    return;
  }
  const i32 side = ptx::warp_index();
  if (side >= 2) return;
  const PagedCut cut = load_paged_cut(args, ptx::block_index() + side, ptx::num_blocks());
  if (ptx::lane_index() == 0) store_cut(scratch, side, cut);
}

// The tiles of a request that lie in a run.
struct TileRange {
  i32 begin;
  i32 end;
};
DK_DEVICE TileRange run_tiles(PagedCut begin, PagedCut end, i32 request, i32 num_tiles) {
  return {request == begin.request ? min_of(begin.tile, num_tiles) : 0,
          request == end.request ? min_of(end.tile, num_tiles) : num_tiles};
}

// The pre-pass: every cut of num_sms equal runs. All requests are looked at twice: for the sum, and
// to write the cuts that fall into them.
template <PagedMqaScheduleSpec S>
DK_DEVICE void paged_mqa_schedule(const PagedMqaScheduleArgs& args) {
  static_assert(S.invalid() == nullptr);
  static_assert(sizeof(ScheduleScratch) <= S.smem_bytes());
  constexpr i32 kWarps = S.num_threads() / 32;
  ScheduleScratch& scratch = ptx::dynamic_smem<ScheduleScratch>();
  const i32 warp = ptx::warp_index();
  const BlockRange requests = warp_requests<kWarps>(args.num_requests, warp);
  const ScheduleSums sums = sum_requests<kWarps>(args, requests, warp, scratch);
  const auto write = [&](i32 index, PagedCut cut) {
    ptx::store_global(args.schedule + 2 * i64{index}, cut.request);
    ptx::store_global(args.schedule + 2 * i64{index} + 1, cut.tile);
  };
  const MqaCutPositions cuts(sums.total, args.num_sms);
  // Cuts at the very end: the last one, and all of them where there is nothing to do.
  DK_NO_UNROLL
  for (i32 i = ptx::thread_index(); i <= args.num_sms; i += S.num_threads()) {
    if (cuts(i) >= sums.total) write(i, {args.num_requests, 0});
  }
  const float cuts_per_cost = static_cast<float>(args.num_sms) / static_cast<float>(sums.total);
  i64 before = sums.before;
  for_each_request(args, requests, [&](i32 request, i32 num_tiles) {
    const CostSpan span = next_span(before, paged_request_cost(num_tiles));
    for_each_cut(cuts, args.num_sms, cuts_per_cost, span.begin, span.end,
                 [&](i32 index, i64 offset) {
                   write(index, paged_cut_in_request(request, offset, num_tiles));
                 });
  });
}

}  // namespace deep_kernels
