// Flash attention forward on Hopper. Persistent blocks:
//
//   kv warp           streams tiles of keys and values through two rings, right to left
//   query warp        loads the queries of every math warpgroup
//   tail warp         with cu_seqlens: clears the values behind a member's last one
//   math warpgroups   64 queries each: scores of the next tile and the sums over this one run on
//   the
//                     tensor cores together; powers stay in registers as the first operand
//
// Source of the design: the feasibility study for this op on an H200 (order of the products, one
// tensor map of five dimensions for all panels of a tile, lazy rescale, tiles).
#pragma once

#include "deep_kernels/contract/attention.h"
#include "deep_kernels/kernels/attention_queue.cuh"
#include "deep_kernels/kernels/attention_softmax.cuh"
#include "deep_kernels/ptx/sm90.cuh"
#include "deep_kernels/tile/global_words.cuh"
#include "deep_kernels/tile/layout.cuh"
#include "deep_kernels/tile/mma.cuh"
#include "deep_kernels/tile/pipeline.cuh"

namespace deep_kernels::flash {

template <AttentionSpec S>
struct Smem {
  static constexpr i32 kGroups = S.tile_rows / kAttentionGroupRows;
  alignas(1024) u16 q[kGroups][S.head_panels][kAttentionGroupRows][kHeadPanel];
  alignas(1024) u16 k[S.k_stages][S.head_panels][S.tile_keys][kHeadPanel];
  alignas(1024) u16 v[S.v_stages][S.head_panels][S.tile_keys][kHeadPanel];
  // Each pair: who arrives, who waits.
  alignas(8) u64 q_filled[kGroups];  // query warp, and TMA bytes -> warps of the group
  u64 q_drained[kGroups];            // and back
  u64 k_filled[S.k_stages];          // kv warp, and TMA bytes -> math warps
  u64 k_drained[S.k_stages];         // and back
  u64 v_landed[S.v_stages];          // with cu_seqlens: kv warp, and TMA bytes -> tail warp
  u64 v_filled[S.v_stages];          // tail warp, or kv warp and TMA bytes -> math warps
  u64 v_drained[S.v_stages];         // math warps -> kv warp
};

template <AttentionSpec S>
DK_DEVICE void init_barriers(Smem<S>& smem) {
  if (ptx::thread_index() != 0) return;
  constexpr i32 kGroups = Smem<S>::kGroups;
  const auto init = [](u64& barrier, i32 arrivals) {
    ptx::mbarrier_init(ptx::smem_addr(&barrier), static_cast<u32>(arrivals));
  };
  DK_UNROLL
  for (i32 i = 0; i < kGroups; ++i) init(smem.q_filled[i], 1), init(smem.q_drained[i], 4);
  DK_UNROLL
  for (i32 i = 0; i < S.k_stages; ++i)
    init(smem.k_filled[i], 1), init(smem.k_drained[i], 4 * kGroups);
  DK_UNROLL
  for (i32 i = 0; i < S.v_stages; ++i) {
    init(smem.v_landed[i], 1);
    init(smem.v_filled[i], 1);
    init(smem.v_drained[i], 4 * kGroups);
  }
  ptx::fence_mbarrier_init();
}

// Three or four warpgroups start with 168 or 128 registers each; what the loading warps give up the
// math warpgroups take.
template <AttentionSpec S>
struct RoleRegisters {
  static constexpr bool kThree = Smem<S>::kGroups == 3;
  static constexpr i32 kMath = !kThree ? 232 : S.head_dim() == 64 ? 160 : 152;
  static constexpr i32 kLoads = !kThree ? 40 : S.head_dim() == 64 ? 32 : 56;
};

// One warp that loads for the block's units; a lane issues, all of them find out what.
template <AttentionSpec S, class Maps>
struct Loader {
  static constexpr i32 kTileBytes = S.tile_keys * S.head_dim() * 2;

  const AttentionArgs& args;
  const Maps& maps;
  Smem<S>& smem;

  template <class Load>
  DK_DEVICE void each_unit(Load&& load) const {
    const TileQueue<S> queue(args);
    DK_NO_UNROLL
    for (i32 turn = 0; queue.has(turn); ++turn) {
      const i64 index = queue.index(turn);
      if (index < 0) continue;
      const RowTile unit = queue.at(index);
      if (unit.keys.end > unit.keys.begin) load(unit);
    }
  }

  DK_DEVICE void load_keys_and_values() const {
    auto ks = tile::Ring<S.k_stages>::filler();
    auto vs = tile::Ring<S.v_stages>::filler();
    each_unit([&](const RowTile& unit) {
      if (ptx::lane_index() == 0) {
        i32 tile = unit.keys.end - 1;
        load_keys(unit, tile, ks);
        DK_NO_UNROLL
        for (; tile > unit.keys.begin; --tile) {
          load_keys(unit, tile - 1, ks);
          load_values(unit, tile, vs);
        }
        load_values(unit, tile, vs);
      }
      ptx::sync_warp();
    });
  }
  DK_DEVICE void load_keys(const RowTile& unit, i32 tile, tile::Ring<S.k_stages>& stages) const {
    const u32 filled = ptx::smem_addr(&smem.k_filled[stages.slot]);
    ptx::mbarrier_wait(ptx::smem_addr(&smem.k_drained[stages.slot]), stages.parity);
    ptx::mbarrier_arrive_expect_tx(filled, kTileBytes);
    load_tile(unit, maps.k, ptx::smem_addr(&smem.k[stages.slot]), filled, tile);
    stages.next();
  }
  DK_DEVICE void load_values(const RowTile& unit, i32 tile, tile::Ring<S.v_stages>& stages) const {
    u64& barrier = S.varlen ? smem.v_landed[stages.slot] : smem.v_filled[stages.slot];
    const u32 filled = ptx::smem_addr(&barrier);
    ptx::mbarrier_wait(ptx::smem_addr(&smem.v_drained[stages.slot]), stages.parity);
    ptx::mbarrier_arrive_expect_tx(filled, kTileBytes);
    load_tile(unit, maps.v, ptx::smem_addr(&smem.v[stages.slot]), filled, tile);
    stages.next();
  }
  template <class Map>
  DK_DEVICE void load_tile(const RowTile& unit, const Map& map, u32 to, u32 filled,
                           i32 tile) const {
    ptx::tma_load_5d(to, map, filled, 0,
                     static_cast<i32>(unit.member.first_kv) + tile * S.tile_keys, 0, unit.kv_head,
                     static_cast<i32>(unit.member.batch));
  }

  DK_DEVICE void load_queries() const {
    auto turns = tile::Ring<1>::filler();
    each_unit([&](const RowTile& unit) {
      if (ptx::lane_index() == 0) {
        DK_NO_UNROLL
        for (i32 group = 0; group < Smem<S>::kGroups; ++group) {
          const u32 filled = ptx::smem_addr(&smem.q_filled[group]);
          ptx::mbarrier_wait(ptx::smem_addr(&smem.q_drained[group]), turns.parity);
          ptx::mbarrier_arrive_expect_tx(filled, kAttentionGroupRows * S.head_dim() * 2);
          ptx::tma_load_5d(ptx::smem_addr(&smem.q[group]), maps.q, filled, 0,
                           static_cast<i32>(unit.member.first_q) + unit.first_query +
                               group * kAttentionGroupRows,
                           0, unit.head, static_cast<i32>(unit.member.batch));
        }
      }
      ptx::sync_warp();
      turns.next();
    });
  }

  // Behind a member's last value in memory stands another member's, whose NaN would not vanish when
  // it is multiplied by 0.
  DK_DEVICE void clear_tails() const {
    auto stages = tile::Ring<S.v_stages>::drainer();
    each_unit([&](const RowTile& unit) {
      DK_NO_UNROLL
      for (i32 tile = unit.keys.end - 1; tile >= unit.keys.begin; --tile, stages.next()) {
        const i32 values = unit.member.num_kv - tile * S.tile_keys;
        ptx::mbarrier_wait(ptx::smem_addr(&smem.v_landed[stages.slot]), stages.parity);
        if (values < S.tile_keys) clear_rows(smem.v[stages.slot], values);
        ptx::sync_warp();
        if (ptx::lane_index() == 0)
          ptx::mbarrier_arrive(ptx::smem_addr(&smem.v_filled[stages.slot]));
      }
    });
  }
  template <class Tile>
  static DK_DEVICE void clear_rows(Tile& tile, i32 first) {
    DK_NO_UNROLL
    for (i32 panel = 0; panel < S.head_panels; ++panel) {
      const u32 begin = ptx::smem_addr(&tile[panel]);
      constexpr i32 kRowBytes = kHeadPanel * 2;
      DK_NO_UNROLL
      for (i32 at = first * kRowBytes + 16 * ptx::lane_index(); at < S.tile_keys * kRowBytes;
           at += 16 * 32)
        ptx::store_shared_x4(begin + static_cast<u32>(at), 0, 0, 0, 0);
    }
    ptx::fence_proxy_async();
  }
};

// One math warpgroup.
template <AttentionSpec S>
struct Math {
  using KMajor = tile::KMajorDescriptor<kHeadPanel * 2>;
  using MnMajor = tile::MnMajorDescriptor<S.tile_keys>;
  static constexpr i32 kScoreSteps = S.head_dim() / 16;
  static constexpr i32 kSumSteps = S.tile_keys / 16;
  static constexpr i32 kSums = S.head_dim() / 2;
  using Scores = float[S.tile_keys / 2];

  const AttentionArgs& args;
  Smem<S>& smem;
  i32 group;
  u32 q_low;  // descriptors of the group's queries, and of stages 0
  u32 k_low;
  u32 v_low;
  RowTile unit;
  RowSoftmax<S> softmax;
  float sum[kSums];  // sum[4j + 2r + e]: row r of the lane, column 8j + lane_column() + e
  u32 powers[kSumSteps][4];
  tile::Ring<S.k_stages> ks = tile::Ring<S.k_stages>::drainer();
  tile::Ring<S.v_stages> vs = tile::Ring<S.v_stages>::drainer();
  tile::Ring<1> turns = tile::Ring<1>::drainer();

  DK_DEVICE Math(const AttentionArgs& args, Smem<S>& smem, i32 group)
      : args(args), smem(smem), group(group) {
    q_low = KMajor::low(ptx::smem_addr(&smem.q[group]));
    k_low = KMajor::low(ptx::smem_addr(&smem.k[0]));
    v_low = MnMajor::low(ptx::smem_addr(&smem.v[0]));
  }

  // The lane's row r, as a query of the member.
  DK_DEVICE i32 query(i32 r) const {
    return unit.first_query + group * kAttentionGroupRows + ptx::warp_index() % 4 * 16 +
           lane_row(r);
  }

  static DK_DEVICE void arrive(u64& barrier) {
    ptx::sync_warp();
    if (ptx::lane_index() == 0) ptx::mbarrier_arrive(ptx::smem_addr(&barrier));
  }
  DK_DEVICE void wait_for_keys() const {
    ptx::mbarrier_wait(ptx::smem_addr(&smem.k_filled[ks.slot]), ks.parity);
  }
  DK_DEVICE void wait_for_values() const {
    ptx::mbarrier_wait(ptx::smem_addr(&smem.v_filled[vs.slot]), vs.parity);
  }
  DK_DEVICE void release_keys() {
    arrive(smem.k_drained[ks.slot]);
    ks.next();
  }
  DK_DEVICE void release_values() {
    arrive(smem.v_drained[vs.slot]);
    vs.next();
  }

  DK_DEVICE void start_scores(Scores& scores) const {
    const u32 k = k_low + ks.slot * (S.tile_keys * S.head_dim() * 2 >> 4);
    ptx::wgmma_fence();
    DK_UNROLL
    for (i32 step = 0; step < kScoreSteps; ++step)
      tile::wgmma_k16<S.dtype>(scores,
                               KMajor::make(q_low + tile::k_major_step<kAttentionGroupRows>(step)),
                               KMajor::make(k + tile::k_major_step<S.tile_keys>(step)), step > 0);
    ptx::wgmma_commit_group();
  }
  // sum = powers * values, added to what it is if `adds`.
  DK_DEVICE void start_sums(bool adds) {
    const u32 v = v_low + vs.slot * (S.tile_keys * S.head_dim() * 2 >> 4);
    ptx::wgmma_fence();
    DK_UNROLL
    for (i32 step = 0; step < kSumSteps; ++step)
      tile::wgmma_k16<S.dtype>(sum, powers[step], MnMajor::make(v + MnMajor::step(step)),
                               step > 0 || adds);
    ptx::wgmma_commit_group();
  }
  DK_DEVICE void mask(Scores& scores, i32 tile) const {
    i32 visible[kLaneRows];
    DK_UNROLL
    for (i32 r = 0; r < kLaneRows; ++r)
      visible[r] =
          attention_visible_end(query(r), unit.member.num_q, unit.member.num_kv, S.causal) -
          tile * S.tile_keys;
    mask_scores(scores, visible);
  }
  DK_DEVICE void keep_powers(const Scores& scores) {
    DK_UNROLL
    for (i32 step = 0; step < kSumSteps; ++step) powers_as_a<S.dtype>(powers[step], scores, step);
  }

  // The first tile of a row, the rightmost one; the sums get nothing yet.
  DK_DEVICE void first_tile(i32 tile) {
    Scores scores;
    float factor[kLaneRows];
    wait_for_keys();
    start_scores(scores);
    ptx::wgmma_wait_group<0>(scores);
    release_keys();
    mask(scores, tile);
    softmax.add(scores, args.scale_log2, factor);
    keep_powers(scores);
  }
  // The scores of a tile, and the sums over the one before it.
  template <bool kMasks>
  DK_DEVICE void next_tile(i32 tile, bool adds) {
    Scores scores;
    float factor[kLaneRows];
    wait_for_keys();
    start_scores(scores);
    wait_for_values();
    start_sums(adds);
    ptx::wgmma_wait_group<1>(scores);
    release_keys();
    if constexpr (kMasks) mask(scores, tile);
    const bool rescales = softmax.add(scores, args.scale_log2, factor);
    ptx::wgmma_wait_group<0>(sum);
    release_values();
    if (rescales) {
      DK_UNROLL
      for (i32 i = 0; i < kSums; ++i) sum[i] *= factor[row_of_element(i)];
    }
    keep_powers(scores);
  }
  DK_DEVICE void last_sums(bool adds) {
    wait_for_values();
    start_sums(adds);
    ptx::wgmma_wait_group<0>(sum);
    release_values();
  }

  // Tiles that only other groups of the unit see.
  DK_DEVICE void skip(i32 count) {
    DK_NO_UNROLL
    for (i32 i = 0; i < count; ++i) {
      wait_for_keys();
      release_keys();
      wait_for_values();
      release_values();
    }
  }
  // All tiles [begin, end) that the group sees.
  DK_DEVICE void add_tiles(i32 begin, i32 end) {
    // Tiles before this one are seen by all rows, as a whole.
    const i32 first_masked =
        S.causal ? unit.template full_end<S>(group * kAttentionGroupRows) : end - 1;
    i32 tile = end - 1;
    first_tile(tile);
    bool adds = false;
    if constexpr (S.causal) {
      DK_NO_UNROLL
      for (--tile; tile >= max_of(begin, first_masked); --tile, adds = true)
        next_tile<true>(tile, adds);
      ++tile;
    }
    DK_NO_UNROLL
    for (--tile; tile >= begin; --tile, adds = true) next_tile<false>(tile, adds);
    arrive(smem.q_drained[group]);
    last_sums(adds);
  }

  DK_DEVICE void run() {
    const TileQueue<S> queue(args);
    DK_NO_UNROLL
    for (i32 turn = 0; queue.has(turn); ++turn) {
      const i64 index = queue.index(turn);
      if (index < 0) continue;
      unit = queue.at(index);
      if (!unit.exists()) continue;
      softmax.open();
      const auto [begin, loaded] = unit.keys;
      const i32 end = unit.template seen_end<S>(group * kAttentionGroupRows, kAttentionGroupRows);
      if (loaded > begin) {
        ptx::mbarrier_wait(ptx::smem_addr(&smem.q_filled[group]), turns.parity);
        turns.next();
        skip(loaded - end);
        if (end > begin) {
          add_tiles(begin, end);
          softmax.close();
          const Divisor divisor[] = {softmax.divisor(0), softmax.divisor(1)};
          store([&](i32 i) { return divisor[row_of_element(i)].divide(sum[i]); });
          continue;
        }
        arrive(smem.q_drained[group]);
      }
      store([](i32) { return 0.0f; });
    }
  }

  // result(i): what element i of the sums became. Converged.
  template <class Result>
  DK_DEVICE void store(Result&& result) const {
    DK_UNROLL
    for (i32 r = 0; r < kLaneRows; ++r) {
      if constexpr (S.split)
        store_partial(r, query(r), result);
      else
        store_whole(r, query(r), result);
    }
  }
  template <class Result>
  DK_DEVICE void store_partial(i32 r, i32 row, Result&& result) const {
    if (row >= unit.member.num_q) return;
    const i64 index = partial_row(args, unit.member, unit.split, unit.head, row);
    if (ptx::lane_index() % 4 == 0)
      ptx::store_global(args.partial_lse + index, softmax.log2_sum(r));
    float* to = args.partial_out + index * S.head_dim() + lane_column();
    DK_UNROLL
    for (i32 i = 2 * r; i < kSums; i += 4)
      ptx::store_global_x2(to + column_of_element(i), ptx::bits_of(result(i)),
                           ptx::bits_of(result(i + 1)));
  }
  // A quad exchanges its pairs of columns, so that every lane has eight neighbours of 32.
  template <class Result>
  DK_DEVICE void store_whole(i32 r, i32 row, Result&& result) const {
    const bool exists = row < unit.member.num_q;
    if (exists && ptx::lane_index() % 4 == 0)
      store_lse(args, unit.member, unit.head, row, softmax.log2_sum(r));
    u16* to = out_row(args, unit.member, unit.head, row) + ptx::lane_index() % 4 * 8;
    DK_UNROLL
    for (i32 part = 0; part < S.head_dim() / 32; ++part) {
      u32 word[4];
      DK_UNROLL
      for (i32 j = 0; j < 4; ++j) {
        const i32 i = 4 * (4 * part + j) + 2 * r;
        word[j] = rounded_pair<S.dtype>(result(i), result(i + 1));
      }
      transpose_quad(word);
      if (exists) tile::store_words(to + 32 * part, word);
    }
  }
  // word[i] of lane t of a quad becomes word[t] of lane i. Converged.
  static DK_DEVICE void transpose_quad(u32 (&word)[4]) {
    const i32 lane = ptx::lane_index();
    DK_UNROLL
    for (i32 step = 1; step < 4; step *= 2) {
      const bool upper = (lane & step) != 0;
      DK_UNROLL
      for (i32 i = 0; i < 4; ++i) {
        if ((i & step) != 0) continue;
        const u32 sent = upper ? word[i] : word[i + step];
        const u32 got = static_cast<u32>(ptx::shuffle_xor(static_cast<i32>(sent), step));
        word[i] = upper ? got : word[i];
        word[i + step] = upper ? word[i + step] : got;
      }
    }
  }
};

}  // namespace deep_kernels::flash

namespace deep_kernels {

template <AttentionSpec S, class Maps>
DK_DEVICE void attention_sm90(const AttentionArgs& args, const Maps& maps) {
  using namespace flash;
  static_assert(S.invalid() == nullptr);
  static_assert(sizeof(Smem<S>) <= S.smem_bytes());
  using Registers = RoleRegisters<S>;
  auto& smem = ptx::dynamic_smem<Smem<S>>();
  constexpr i32 kMathWarps = 4 * Smem<S>::kGroups;
  const i32 warp = ptx::warp_index();
  if (ptx::thread_index() == S.num_threads() - 32) {
    ptx::prefetch_tensor_map(maps.q);
    if (args.total_kv > 0) {  // of no keys there are no maps
      ptx::prefetch_tensor_map(maps.k);
      ptx::prefetch_tensor_map(maps.v);
    }
  }
  init_barriers<S>(smem);
  ptx::grid_dependency_wait();  // nothing above reads what a kernel ahead may have written
  ptx::sync_threads();

  if (warp >= kMathWarps) {
    ptx::set_max_registers_down<Registers::kLoads>();
    const Loader<S, Maps> loader{args, maps, smem};
    if (warp == kMathWarps) {
      ptx::role("keys and values");
      loader.load_keys_and_values();
    } else if (warp == kMathWarps + 1) {
      ptx::role("queries");
      loader.load_queries();
    } else if (S.varlen && warp == kMathWarps + 2) {
      ptx::role("tails");
      loader.clear_tails();
    }
    return;
  }
  ptx::set_max_registers_up<Registers::kMath>();
  ptx::role("math");
  Math<S> math(args, smem, warp / 4);
  math.run();
}

}  // namespace deep_kernels
