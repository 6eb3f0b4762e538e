// Paged MQA logits on Hopper: 64 kv tokens are the rows of a wgmma, the (row, head) pairs of a unit
// its columns. The kernel lives on memory bandwidth. One block per SM, persistent.
//
//   scheduler warp   walks the block's share, posts units, loads queries (TMA) and weights
//   kv warps         follow the block table of the posted units and stream tiles through a ring
//   math warpgroups  take tiles in turn, each all rows of the unit
//   cleaner warp     fills -inf where no tile reaches, while the others compute
//
// Source of the design: the feasibility study for this op on an H200 (pages as the row operand,
// values and scales as two copies on one barrier, the split derived inside the kernel).
#pragma once

#include "deep_kernels/contract/paged_mqa_logits.h"
#include "deep_kernels/kernels/paged_mqa_math_sm90.cuh"
#include "deep_kernels/kernels/paged_mqa_schedule.cuh"
#include "deep_kernels/kernels/paged_mqa_unit_sm90.cuh"
#include "deep_kernels/ptx/sm90.cuh"
#include "deep_kernels/tile/pipeline.cuh"

namespace deep_kernels::paged_sm90 {

// --- scheduler warp -----------------------------------------------------------------------------

template <PagedMqaLogitsSpec S>
DK_DEVICE void post_tokens(const PagedMqaLogitsArgs& args, const Work& work,
                           Unit<S.unit_rows>& unit) {
  const i32 lane = ptx::lane_index();
  if (lane < S.unit_rows) post_token(args, work, lane, unit.token[lane]);
}

// What the kv warps have to know; they start on it at once.
template <i32 kRows>
DK_DEVICE void post_unit(const PagedMqaLogitsArgs& args, const Work& work, Unit<kRows>& unit,
                         u32 unit_posted) {
  if (ptx::lane_index() != 0) return;
  ptx::store_shared_i64(ptx::smem_addr(&unit.table), work.request * args.table_stride);
  ptx::store_shared_i32(ptx::smem_addr(&unit.first_tile), work.tiles.begin);
  ptx::store_shared_i32(ptx::smem_addr(&unit.num_tiles), work.tiles.end - work.tiles.begin);
  ptx::store_shared_i32(ptx::smem_addr(&unit.longest), work.longest);
  ptx::mbarrier_arrive(unit_posted);
}

template <PagedMqaLogitsSpec S, class Maps>
DK_DEVICE void load_queries(const PagedMqaLogitsArgs& args, const Maps& maps, const Work& work,
                            u32 queries, u32 barrier) {
  if (ptx::lane_index() == 0) ptx::mbarrier_arrive_expect_tx(barrier, S.query_load_bytes());
  ptx::sync_warp();
  const bool by_request = args.indices != nullptr;
  DK_NO_UNROLL
  for (i32 octet = ptx::lane_index(); octet < S.unit_columns() / 8; octet += 32) {
    const i32 token = S.token_of(8 * octet);
    ptx::tma_load_4d(queries + octet * 8 * S.row_bytes(), maps.q, barrier, 0, S.head_of(8 * octet),
                     by_request ? work.request + token : work.row + token,
                     by_request ? 0 : work.request);
  }
}

// The weights once more, divided by powers of two where tokens need it. Converged.
template <PagedMqaLogitsSpec S>
DK_DEVICE void post_tamed_weights(const PagedMqaLogitsArgs& args, const Work& work, u32 weights,
                                  Unit<S.unit_rows>& unit) {
  const i32 lane = ptx::lane_index();
  if (lane < S.unit_rows)
    ptx::store_shared_f32(ptx::smem_addr(&unit.token[lane].power),
                          owed_power(args, first_row(args, work) + lane));
  ptx::sync_warp();
  DK_NO_UNROLL
  for (i32 column = lane; column < S.unit_columns(); column += 32) {
    const float power = ptx::load_shared_f32(ptx::smem_addr(&unit.token[S.token_of(column)].power));
    ptx::store_shared_f32(weights + 4 * column,
                          load_column_weight<S>(args, work, column) * reciprocal(power));
  }
}

template <PagedMqaLogitsSpec S>
DK_DEVICE void post_weights(const PagedMqaLogitsArgs& args, const Work& work, u32 weights,
                            Unit<S.unit_rows>& unit) {
  constexpr i32 kAhead = min_of(S.unit_columns() / 32, 4);
  bool extreme = false;
  DK_NO_UNROLL
  for (i32 base = ptx::lane_index(); base < S.unit_columns(); base += kAhead * 32) {
    float weight[kAhead];  // all loads before the first store, so that they travel together
    DK_UNROLL
    for (i32 i = 0; i < kAhead; ++i) weight[i] = load_column_weight<S>(args, work, base + 32 * i);
    DK_UNROLL
    for (i32 i = 0; i < kAhead; ++i) {
      extreme = extreme || is_extreme_weight(weight[i]);
      ptx::store_shared_f32(weights + 4 * (base + 32 * i), weight[i]);
    }
  }
  if (ptx::any(extreme)) post_tamed_weights<S>(args, work, weights, unit);
}

// MX: the weights as they are and the exponents of the rows, to be joined with the rows.
template <PagedMqaLogitsSpec S>
DK_DEVICE void post_mx_columns(const PagedMqaLogitsArgs& args, const Work& work, u32 weights,
                               u32 exponents) {
  constexpr i32 kAhead = min_of(S.unit_columns() / 32, 4);
  DK_NO_UNROLL
  for (i32 base = ptx::lane_index(); base < S.unit_columns(); base += kAhead * 32) {
    float weight[kAhead];
    i32 given[kAhead];
    DK_UNROLL
    for (i32 i = 0; i < kAhead; ++i) {  // all loads before the first store, as above
      weight[i] = load_column_weight<S>(args, work, base + 32 * i);
      given[i] = load_column_exponents<S>(args, work, base + 32 * i);
    }
    DK_UNROLL
    for (i32 i = 0; i < kAhead; ++i) {
      ptx::store_shared_f32(weights + 4 * (base + 32 * i), weight[i]);
      ptx::store_shared_i32(exponents + 4 * (base + 32 * i), given[i]);
    }
  }
  ptx::sync_warp();
}

// MX: query rows as they came become e4m3 codes. Those of a step are read before its codes
// overwrite them and rows above. Converged.
template <PagedMqaLogitsSpec S>
DK_DEVICE void rebase_queries(Smem<S>& smem, i32 slot) {
  DK_NO_UNROLL
  for (i32 task = ptx::lane_index(); task < QueryBlock<S>::kTasks; task += 32) {
    QueryBlock<S> block(task);
    block.load(smem, slot);
    ptx::sync_warp();
    block.store(smem, slot);
  }
  ptx::fence_proxy_async();
}

// The page table entries that the kv warp will ask for next, into the L2 cache.
DK_DEVICE void prefetch_table(const PagedMqaLogitsArgs& args, const Work& work) {
  constexpr i32 kPerLine = 128 / sizeof(i32);
  const i32 first = work.tiles.begin * kPagedTileRows / args.block_kv;
  const i32 page = first + ptx::lane_index() * kPerLine;
  if (i64{page} * args.block_kv < work.longest)
    ptx::prefetch_global_l2(args.block_table + work.request * args.table_stride + page);
}

template <PagedMqaLogitsSpec S, class Maps>
DK_DEVICE void fill_unit(const PagedMqaLogitsArgs& args, const Maps& maps, Smem<S>& smem,
                         const Work& work, tile::Ring<S.query_slots()> slots, bool is_first) {
  auto& unit = smem.unit[slots.slot];
  const u32 filled = ptx::smem_addr(&smem.query_filled[slots.slot]);
  prefetch_table(args, work);
  ptx::mbarrier_wait(ptx::smem_addr(&smem.unit_drained[slots.slot]), slots.parity);
  post_unit(args, work, unit, ptx::smem_addr(&smem.unit_posted[slots.slot]));
  if constexpr (S.is_mx()) {
    const u32 loaded = ptx::smem_addr(&smem.mx.query_loaded[slots.slot]);
    load_queries<S>(args, maps, work, QueryBlock<S>::packed_rows(smem, slots.slot), loaded);
    post_tokens<S>(args, work, unit);
    post_mx_columns<S>(args, work, ptx::smem_addr(&smem.weights[slots.slot][0]),
                       ptx::smem_addr(&smem.mx.query_exponents[slots.slot][0]));
    ptx::mbarrier_wait(loaded, slots.parity ^ 1u);  // as whoever drains the slot
    if (ptx::lane_index() == 0) ptx::store_shared_i32(ptx::smem_addr(&unit.is_raw), is_first);
    if (!is_first) rebase_queries<S>(smem, slots.slot);
  } else {
    load_queries<S>(args, maps, work, ptx::smem_addr(&smem.query[slots.slot][0]), filled);
    post_tokens<S>(args, work, unit);
    post_weights<S>(args, work, ptx::smem_addr(&smem.weights[slots.slot][0]), unit);
  }
  ptx::mbarrier_arrive(filled);  // every lane for what it wrote
}

template <PagedMqaLogitsSpec S, class Maps>
DK_DEVICE void scheduler_role(const PagedMqaLogitsArgs& args, const Maps& maps, Smem<S>& smem) {
  auto slots = tile::Ring<S.query_slots()>::filler();
  bool is_first = kRebasesFirst<S>;
  i32 request = stored_cut(smem.run, 0).request;
  i32 end = stored_cut(smem.run, 1).request;
  if (stored_cut(smem.run, 1).tile > 0) end = min_of(end + 1, args.num_requests);
  DK_NO_UNROLL
  for (; request < end; ++request) {
    const RequestRows rows = load_request(args, request);
    // The cuts are read again for every request: registers are scarcer than these loads.
    const TileRange tiles = run_tiles(stored_cut(smem.run, 0), stored_cut(smem.run, 1), request,
                                      paged_num_tiles(rows.longest));
    if (tiles.begin >= tiles.end) continue;
    DK_NO_UNROLL
    for (i32 row = 0; row < rows.count; row += S.unit_rows, slots.next()) {
      fill_unit<S>(args, maps, smem, {request, row, rows.count - row, rows.longest, tiles}, slots,
                   is_first);
      is_first = false;
    }
  }
  ptx::mbarrier_wait(ptx::smem_addr(&smem.unit_drained[slots.slot]), slots.parity);
  if (ptx::lane_index() == 0) {
    ptx::store_shared_i32(ptx::smem_addr(&smem.unit[slots.slot].num_tiles), 0);
    ptx::mbarrier_arrive(ptx::smem_addr(&smem.unit_posted[slots.slot]));
    if (!S.is_mx()) ptx::mbarrier_arrive(ptx::smem_addr(&smem.query_filled[slots.slot]));
  }
  ptx::mbarrier_arrive(ptx::smem_addr(&smem.query_filled[slots.slot]));
}

// --- kv warps ------------------------------------------------------------------------------------

// A row of the block table, read 32 entries at a time, one read ahead. Entries that no context uses
// are read like others, and not used. Converged.
struct TableWindow {
  i32 width;       // of the table
  i32 num_blocks;  // of the cache
  const i32* row = nullptr;
  i32 base = 0;   // page of lane 0
  i32 entry = 0;  // of page base + lane
  i32 next = 0;   // of page base + 32 + lane

  DK_DEVICE i32 load(i32 page) const { return page < width ? ptx::load_global(row + page) : 0; }
  DK_DEVICE void open(const i32* of_row, i32 first_page) {
    if (row == of_row && base == first_page) return;
    row = of_row;
    base = first_page;
    entry = load(base + ptx::lane_index());
    next = load(base + 32 + ptx::lane_index());
  }
  // Makes the entries from `page` on available: as many as share a tile. Pages are asked for in
  // order and the window begins with a tile's first page.
  DK_DEVICE void move_to(i32 page) {
    if (page < base + 32) return;
    base += 32;
    entry = next;
    next = load(base + 32 + ptx::lane_index());
  }
  // Whatever the table says, a page that exists. (Not done by load(), which would wait.)
  DK_DEVICE i32 at(i32 page) const {
    return clamp_to(ptx::shuffle(entry, page - base), 0, num_blocks - 1);
  }
};

template <PagedMqaLogitsSpec S, class Maps>
DK_DEVICE void kv_role(const PagedMqaLogitsArgs& args, const Maps& maps, Smem<S>& smem, i32 turn) {
  constexpr u32 kBytes = S.kv_stage_bytes() + kPagedTileRows * sizeof(float);
  const i32 lane = ptx::lane_index();
  const i32 box_rows = min_of(args.block_kv, kPagedTileRows);
  const i32 boxes = kPagedTileRows / box_rows;  // of a tile, one lane each
  const i32 shift = paged_block_shift(args.block_kv);
  const u64 policy = ptx::evict_first_policy();
  const u8* scales = args.kv_cache + paged_scale_offset(args.block_kv, S.row_bytes());
  auto units = tile::Ring<S.query_slots()>::drainer();
  auto stages = tile::Ring<S.kv_stages>::filler(turn);
  i32 next = turn;  // the next tile of this warp, counted from the unit's first
  TableWindow table{.width = args.table_width, .num_blocks = args.num_blocks};
  // The run most likely begins at its first cut: entries travel while the scheduler looks.
  const PagedCut cut = stored_cut(smem.run, 0);
  if (cut.request < args.num_requests && cut.tile <= args.width / kPagedTileRows)
    table.open(args.block_table + cut.request * args.table_stride,
               (cut.tile + turn) * kPagedTileRows >> shift);
  DK_NO_UNROLL
  for (;; units.next()) {
    ptx::mbarrier_wait(ptx::smem_addr(&smem.unit_posted[units.slot]), units.parity);
    const auto& unit = smem.unit[units.slot];
    const i32 num_tiles = ptx::load_shared_i32(ptx::smem_addr(&unit.num_tiles));
    if (num_tiles == 0) return;
    const i32 first_tile = ptx::load_shared_i32(ptx::smem_addr(&unit.first_tile));
    const i32 last_page = (ptx::load_shared_i32(ptx::smem_addr(&unit.longest)) - 1) >> shift;
    const i32* row = args.block_table + ptx::load_shared_i64(ptx::smem_addr(&unit.table));
    ptx::sync_warp();  // all lanes have read the unit
    if (lane == 0) ptx::mbarrier_arrive(ptx::smem_addr(&smem.unit_drained[units.slot]));
    if (next < num_tiles) table.open(row, (first_tile + next) * kPagedTileRows >> shift);
    DK_NO_UNROLL
    for (; next < num_tiles; next += kKvWarps, stages.advance(kKvWarps)) {
      const i32 token = (first_tile + next) * kPagedTileRows;
      const u32 filled = ptx::smem_addr(&smem.kv_filled[stages.slot]);
      table.move_to(token >> shift);
      // Of small pages the last tile may use a part: then the last one stands for the others.
      const i32 page = table.at(min_of((token >> shift) + min_of(lane, boxes - 1), last_page));
      const i32 first_row = token & (args.block_kv - 1);  // in the page
      ptx::mbarrier_wait(ptx::smem_addr(&smem.kv_drained[stages.slot]), stages.parity);
      if (lane == 0) ptx::mbarrier_arrive_expect_tx(filled, kBytes);
      ptx::sync_warp();
      if (lane >= boxes) continue;
      ptx::tma_load_3d(ptx::smem_addr(&smem.kv[stages.slot][0]) + lane * box_rows * S.row_bytes(),
                       maps.kv, filled, 0, first_row, page, policy);
      ptx::bulk_load(ptx::smem_addr(&smem.kv_scale[stages.slot][0]) + lane * box_rows * 4,
                     scales + page * args.block_stride + first_row * 4, box_rows * 4, filled,
                     policy);
    }
    next -= num_tiles;
  }
}

}  // namespace deep_kernels::paged_sm90

namespace deep_kernels {

template <PagedMqaLogitsSpec S, class Maps>
DK_DEVICE void paged_mqa_logits_sm90(const PagedMqaLogitsArgs& args, const Maps& maps) {
  using namespace paged_sm90;
  static_assert(S.invalid() == nullptr);
  static_assert(sizeof(Smem<S>) <= S.smem_bytes());
  using Logit = typename LogitStorage<S.logits_dtype>::Type;
  using Registers = RoleRegisters<S>;
  auto& smem = ptx::dynamic_smem<Smem<S>>();
  const i32 warp = ptx::warp_index();
  const i32 helper = warp - 4 * S.math_groups;

  // The last warp has nothing to look for in find_paged_run as long as requests are few.
  if (ptx::thread_index() == S.num_threads() - 32) {
    ptx::prefetch_tensor_map(maps.q);
    ptx::prefetch_tensor_map(maps.kv);
    init_barriers<S>(smem);
  }
  ptx::grid_dependency_wait();  // nothing above reads what a kernel ahead may have written
  find_paged_run<S>(args, smem.run);
  ptx::sync_threads();

  if (helper < 0) {
    ptx::role("math");
    ptx::set_max_registers_up<Registers::kMath>();
    Math<S>{.args = args, .smem = smem, .group = warp / 4}.run();
    return;
  }
  ptx::set_max_registers_down<Registers::kHelper>();
  if (helper < kKvWarps) {
    ptx::role("kv");
    kv_role<S>(args, maps, smem, helper);
  } else if (helper == kSchedulerWarp) {
    ptx::role("scheduler");
    scheduler_role<S>(args, maps, smem);
  } else {
    ptx::role("cleaner");
    fill_behind_tiles<Logit>(args, helper - kSchedulerWarp - 1, kCleanerWarps);
  }
}

}  // namespace deep_kernels
