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

// Requests of one warp when kWarps warps share all of them in order: whole steps of 32, one request
// per lane. Up to 32 * kWarps requests it is one step.
template <i32 kWarps>
DK_DEVICE BlockRange warp_requests(i32 num_requests, i32 warp) {
  const i32 per_warp = align_up(ceil_div(num_requests, kWarps), 32);
  const i32 begin = static_cast<i32>(min_of<i64>(i64{per_warp} * warp, num_requests));
  return {begin, min_of(per_warp, num_requests - begin) + begin};
}

// Shared by all warps of a block: costs on the way, the block's run at the end.
struct PagedRun {
  u32 warp_cost[32];
  i32 request[2];  // of the cut before the run, and of the cut behind it
  i32 tile[2];
};
DK_DEVICE void store_cut(PagedRun& run, i32 side, PagedCut cut) {
  ptx::store_shared_i32(ptx::smem_addr(&run.request[side]), cut.request);
  ptx::store_shared_i32(ptx::smem_addr(&run.tile[side]), cut.tile);
}
DK_DEVICE PagedCut stored_cut(const PagedRun& run, i32 side) {
  return {ptx::load_shared_i32(ptx::smem_addr(&run.request[side])),
          ptx::load_shared_i32(ptx::smem_addr(&run.tile[side]))};
}

// The costs of all requests, added up twice: first in total, then in order of the requests. What
// one step of loads has found is not loaded again.
template <i32 kWarps, class Args>
struct CostScan {
  const Args& args;
  BlockRange requests;
  i32 num_tiles;  // of the lane's request in the only step, or in the last one
  u32 before;     // cost of the requests of warps below
  u32 own;        // of this warp
  u32 total;

  DK_DEVICE i32 load(i32 first) const {
    const i32 request = first + ptx::lane_index();
    return request < requests.end ? load_num_tiles(args, request) : 0;
  }
  // All threads of the block together; holds a block barrier.
  DK_DEVICE void sum(PagedRun& run) {
    const i32 warp = ptx::warp_index();
    const i32 lane = ptx::lane_index();
    requests = warp_requests<kWarps>(args.num_requests, warp);
    num_tiles = 0;
    u32 cost = 0;
    DK_NO_UNROLL
    for (i32 first = requests.begin; first < requests.end; first += 32) {
      num_tiles = load(first);
      cost += static_cast<u32>(paged_request_cost(num_tiles));
    }
    own = ptx::reduce_add(cost);
    if (lane == 0)
      ptx::store_shared_i32(ptx::smem_addr(&run.warp_cost[warp]), static_cast<i32>(own));
    ptx::sync_threads();
    const u32 other =
        lane < kWarps ? static_cast<u32>(ptx::load_shared_i32(ptx::smem_addr(&run.warp_cost[lane])))
                      : 0;
    before = ptx::reduce_add(lane < warp ? other : 0);
    total = ptx::reduce_add(other);
  }
  // Calls visit(request, num_tiles, begin, end), one request per lane with the costs before and
  // behind it. Converged, also inside the visits.
  template <class Visit>
  DK_DEVICE void for_each_request(Visit&& visit) const {
    const bool one_step = requests.end - requests.begin <= 32;
    u32 position = before;
    DK_NO_UNROLL
    for (i32 first = requests.begin; first < requests.end; first += 32) {
      const i32 tiles = one_step ? num_tiles : load(first);
      const u32 cost = static_cast<u32>(paged_request_cost(tiles));
      const u32 end = position + static_cast<u32>(prefix_sum<1>(static_cast<i32>(cost)));
      visit(first + ptx::lane_index(), tiles, end - cost, end);
      position = static_cast<u32>(ptx::shuffle(static_cast<i32>(end), 31));
    }
  }
};

// Writes the cuts where run `index` of `num_runs` equal runs begins and ends. All threads of the
// block together; a block barrier must follow before the cuts are read.
template <i32 kWarps>
DK_DEVICE void derive_paged_run(const PagedMqaLogitsArgs& args, i32 index, i32 num_runs,
                                PagedRun& run) {
  CostScan<kWarps, PagedMqaLogitsArgs> scan{.args = args};
  scan.sum(run);
  const PagedCutPositions cuts(scan.total, num_runs);
  u32 position[2];
  bool has_cut = false;
  DK_UNROLL
  for (i32 side = 0; side < 2; ++side) {
    position[side] = cuts(index + side);
    has_cut = has_cut || position[side] - scan.before < scan.own;
    if (ptx::thread_index() == 0 && position[side] >= scan.total)  // the end of the last run
      store_cut(run, side, {args.num_requests, 0});
  }
  if (!has_cut) return;  // only the warps that have a cut among their requests look again
  scan.for_each_request([&](i32 request, i32 num_tiles, u32 begin, u32 end) {
    DK_UNROLL
    for (i32 side = 0; side < 2; ++side) {
      if (position[side] >= begin && position[side] < end)
        store_cut(run, side, paged_cut_in_request(request, position[side] - begin, num_tiles));
    }
  });
}

// The cut before which run `run` of `num_runs` ends, out of a schedule that may hold anything: the
// largest of the first cuts, so that the runs cover every request once whatever the tensor says;
// the first and the last cut are not read. One warp, converged; the same in all lanes.
DK_DEVICE PagedCut load_paged_cut(const PagedMqaLogitsArgs& args, i32 run, i32 num_runs) {
  const i32 index = static_cast<i32>(i64{run} * (args.num_cuts - 1) / num_runs);
  const i64 largest = largest_cut(index, [&](i32 i) {
    return paged_cut_order(ptx::load_global(args.schedule + 2 * i64{i}),
                           ptx::load_global(args.schedule + 2 * i64{i} + 1), args.num_requests);
  });
  return run == num_runs ? PagedCut{args.num_requests, 0} : paged_cut_of(largest);
}

// The run of this block, out of the schedule or derived from the lengths. All threads of the block
// together; a block barrier must follow before the cuts are read.
template <PagedMqaLogitsSpec S>
DK_DEVICE void find_paged_run(const PagedMqaLogitsArgs& args, PagedRun& run) {
  if (args.schedule == nullptr) {
    derive_paged_run<S.num_threads() / 32>(args, ptx::block_index(), ptx::num_blocks(), run);
    return;
  }
  const i32 side = ptx::warp_index();
  if (side >= 2) return;
  const PagedCut cut = load_paged_cut(args, ptx::block_index() + side, ptx::num_blocks());
  if (ptx::lane_index() == 0) store_cut(run, side, cut);
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

// The pre-pass: every cut of num_sms equal runs.
template <PagedMqaScheduleSpec S>
DK_DEVICE void paged_mqa_schedule(const PagedMqaScheduleArgs& args) {
  static_assert(S.invalid() == nullptr);
  static_assert(sizeof(PagedRun) <= S.smem_bytes());
  CostScan<S.num_threads() / 32, PagedMqaScheduleArgs> scan{.args = args};
  scan.sum(ptx::dynamic_smem<PagedRun>());
  const auto write = [&](i32 index, PagedCut cut) {
    ptx::store_global(args.schedule + 2 * i64{index}, cut.request);
    ptx::store_global(args.schedule + 2 * i64{index} + 1, cut.tile);
  };
  const PagedCutPositions cuts(scan.total, args.num_sms);
  // Cuts at the very end: the last one, and all of them where there is nothing to do.
  DK_NO_UNROLL
  for (i32 i = ptx::thread_index(); i <= args.num_sms; i += S.num_threads()) {
    if (cuts(i) >= scan.total) write(i, {args.num_requests, 0});
  }
  // The first cut at or behind a position.
  const auto first_cut = [&](u32 position) {
    const u64 scaled = u64{position} * static_cast<u32>(args.num_sms) + scan.total - 1;
    return scan.total > 0 ? static_cast<i32>(scaled / scan.total) : 0;
  };
  scan.for_each_request([&](i32 request, i32 num_tiles, u32 begin, u32 end) {
    // A cut per lane, however many of them a request has: looked up among the lanes' requests.
    const i32 first = first_cut(static_cast<u32>(ptx::shuffle(static_cast<i32>(begin), 0)));
    const i32 last =
        min_of(first_cut(static_cast<u32>(ptx::shuffle(static_cast<i32>(end), 31))), args.num_sms);
    DK_NO_UNROLL
    for (i32 base = first; base < last; base += 32) {
      const i32 i = base + ptx::lane_index();
      const u32 position = cuts(min_of(i, last - 1));
      i32 lane = 0;  // the first one whose request ends behind the position
      DK_UNROLL
      for (i32 step = 16; step > 0; step /= 2)
        if (static_cast<u32>(ptx::shuffle(static_cast<i32>(end), lane + step - 1)) <= position)
          lane += step;
      const PagedCut cut = paged_cut_in_request(
          ptx::shuffle(request, lane),
          position - static_cast<u32>(ptx::shuffle(static_cast<i32>(begin), lane)),
          ptx::shuffle(num_tiles, lane));
      if (i < last) write(i, cut);
    }
  });
}

}  // namespace deep_kernels
