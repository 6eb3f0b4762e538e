// A math warpgroup of flash attention on Hopper: 64 rows against tiles of keys, right to left. The
// scores of the next tile and the sums over this one run on the tensor cores together, softmax
// under the sums. So do the first scores of a unit and the last sums of the one before, whose
// results are stored under those scores. Powers stay in registers as the first operand.
#pragma once

#include "deep_kernels/contract/attention.h"
#include "deep_kernels/kernels/attention_softmax.cuh"
#include "deep_kernels/kernels/attention_unit_sm90.cuh"
#include "deep_kernels/ptx/sm90.cuh"
#include "deep_kernels/tile/cluster.cuh"
#include "deep_kernels/tile/layout.cuh"
#include "deep_kernels/tile/mma.cuh"
#include "deep_kernels/tile/pipeline.cuh"

namespace deep_kernels::flash {

// Which query and head a row is, from the unit's first ones on.
struct RowPlace {
  i32 query;
  i32 head;
};

// The lane's two rows of a group's 64.
template <AttentionSpec S>
struct LaneRows {
  const AttentionArgs& args;
  i32 first_query;  // of the group

  DK_DEVICE RowPlace place(i32 r) const {
    const i32 row = ptx::warp_index() % 4 * 16 + lane_row(r);
    const i32 heads = heads_per_unit<S>(args);
    const i32 query = row / heads;
    return {first_query + query, row - query * heads};
  }
  // Whether the group has it, of a unit with so many queries.
  DK_DEVICE bool has(const RowPlace& place, i32 num_queries) const {
    if constexpr (S.packs_heads)
      num_queries = min_of(num_queries, first_query + group_queries<S>(args));
    return place.query < num_queries;
  }
};

// Where the lane's results of a unit go. result(i): element i of the sums, as it is to be stored.
template <AttentionSpec S>
struct ResultStore {
  static constexpr i32 kSums = S.head_dim() / 2;

  const AttentionArgs& args;
  const RowTile& unit;
  const LaneRows<S>& rows;

  // log2_sum(r): what becomes the lse. Converged.
  template <class Result, class Log2Sum>
  DK_DEVICE void run(Result&& result, Log2Sum&& log2_sum) const {
    DK_UNROLL
    for (i32 r = 0; r < kLaneRows; ++r) {
      const RowPlace place = rows.place(r);
      const bool exists = rows.has(place, unit.member.num_q - unit.first_query);
      const i32 head = unit.head + place.head, query = unit.first_query + place.query;
      if constexpr (S.split)
        store_partial(r, exists, head, query, result, log2_sum(r));
      else
        store_whole(r, exists, head, query, result, log2_sum(r));
    }
  }

 private:
  template <class Result>
  DK_DEVICE void store_partial(i32 r, bool exists, i32 head, i32 query, Result& result,
                               float log2_sum) const {
    if (!exists) return;
    const i64 index = partial_row(args, unit.member, unit.split, head, query);
    if (ptx::lane_index() % 4 == 0) ptx::store_global(args.partial_lse + index, log2_sum);
    float* to = args.partial_out + index * S.head_dim() + lane_column();
    DK_UNROLL
    for (i32 i = 2 * r; i < kSums; i += 4)
      ptx::store_global_x2(to + column_of_element(i), ptx::bits_of(result(i)),
                           ptx::bits_of(result(i + 1)));
  }
  // A quad exchanges its pairs of columns, so that every lane has eight neighbours of 32: rows of
  // the result are multiples of 16 bytes.
  template <class Result>
  DK_DEVICE void store_whole(i32 r, bool exists, i32 head, i32 query, Result& result,
                             float log2_sum) const {
    if (exists && ptx::lane_index() % 4 == 0) store_lse(args, unit.member, head, query, log2_sum);
    u16* to = out_row(args, unit.member, head, query) + ptx::lane_index() % 4 * 8;
    DK_UNROLL
    for (i32 part = 0; part < S.head_dim() / 32; ++part) {
      u32 word[4];
      DK_UNROLL
      for (i32 j = 0; j < 4; ++j) {
        const i32 i = 4 * (4 * part + j) + 2 * r;
        word[j] = rounded_pair<S.dtype>(result(i), result(i + 1));
      }
      transpose_quad(word);
      if (exists) ptx::store_global_x4(to + 32 * part, word[0], word[1], word[2], word[3]);
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

template <AttentionSpec S>
struct Math {
  using KMajor = tile::KMajorDescriptor<kHeadPanel * 2>;
  using MnMajor = tile::MnMajorDescriptor<S.tile_keys>;
  static constexpr i32 kGroups = Smem<S>::kGroups;
  static constexpr i32 kStageUnits = S.tile_keys * S.head_dim() * 2 >> 4;  // of a descriptor
  static constexpr i32 kQueryStageUnits = S.tile_rows * S.head_dim() * 2 >> 4;
  static constexpr i32 kScoreSteps = S.head_dim() / 16;
  static constexpr i32 kSumSteps = S.tile_keys / 16;
  static constexpr i32 kSums = S.head_dim() / 2;
  using Scores = float[S.tile_keys / 2];

  const AttentionArgs& args;
  Smem<S>& smem;
  i32 group;
  LaneRows<S> rows;
  u32 q_low;  // descriptors of stages 0: the group's queries, keys, values
  u32 k_low;
  u32 v_low;
  RowSoftmax<S> softmax;
  float sum[kSums] = {};  // sum[4j + 2r + e]: row r of the lane, column 8j + lane_column() + e
  u32 powers[kSumSteps][4];
  Units<S> units{smem};
  tile::Ring<S.k_stages> ks = tile::Ring<S.k_stages>::drainer();
  tile::Ring<S.v_stages> vs = tile::Ring<S.v_stages>::drainer();
  tile::Ring<S.q_stages()> qs = tile::Ring<S.q_stages()>::drainer();

  DK_DEVICE Math(const AttentionArgs& args, Smem<S>& smem, i32 group)
      : args(args), smem(smem), group(group), rows{args, first_query_of<S>(args, group)} {
    q_low = KMajor::low(ptx::smem_addr(&smem.q[0][group]));
    k_low = KMajor::low(ptx::smem_addr(&smem.k[0]));
    v_low = MnMajor::low(ptx::smem_addr(&smem.v[0]));
  }

  // --- the pipeline

  DK_DEVICE void wait_for_keys() const {
    ptx::mbarrier_wait(ptx::smem_addr(&smem.k_filled[ks.slot]), ks.parity);
  }
  DK_DEVICE void wait_for_values() const {
    ptx::mbarrier_wait(ptx::smem_addr(&smem.v_filled[vs.slot]), vs.parity);
  }
  DK_DEVICE void release_keys() {
    tile::arrive_in_blocks<S.cluster>(ptx::smem_addr(&smem.k_drained[ks.slot]));
    ks.next();
  }
  DK_DEVICE void release_values() {
    tile::arrive_in_blocks<S.cluster>(ptx::smem_addr(&smem.v_drained[vs.slot]));
    vs.next();
  }
  DK_DEVICE void release_queries() {
    tile::arrive_in_blocks<1>(ptx::smem_addr(&smem.q_drained[qs.slot][group]));
    qs.next();
  }

  // Ordered groups issue their products one after the other, so that one has its softmax while the
  // tensor cores work for another. Each takes as many turns for a unit as that has tiles of keys.
  DK_DEVICE void take_turn() const {
    if constexpr (S.ordered) ptx::barrier_sync(1 + group, 256);
  }
  DK_DEVICE void pass_turn() const {
    if constexpr (S.ordered) ptx::barrier_arrive(1 + (group + 1) % kGroups, 256);
  }

  DK_DEVICE void start_scores(Scores& scores) const {
    const u32 q = q_low + qs.slot * kQueryStageUnits;
    const u32 k = k_low + ks.slot * kStageUnits;
    ptx::wgmma_fence();
    DK_UNROLL
    for (i32 step = 0; step < kScoreSteps; ++step)
      tile::wgmma_k16<S.dtype>(scores,
                               KMajor::make(q + tile::k_major_step<kAttentionGroupRows>(step)),
                               KMajor::make(k + tile::k_major_step<S.tile_keys>(step)), step > 0);
    ptx::wgmma_commit_group();
  }
  // sum = powers * values, added to what it is if `adds`.
  DK_DEVICE void start_sums(bool adds) {
    const u32 v = v_low + vs.slot * kStageUnits;
    ptx::wgmma_fence();
    DK_UNROLL
    for (i32 step = 0; step < kSumSteps; ++step)
      tile::wgmma_k16<S.dtype>(sum, powers[step], MnMajor::make(v + MnMajor::step(step)),
                               step > 0 || adds);
    ptx::wgmma_commit_group();
  }

  // --- tiles of keys

  // What the group has to do of a unit: tiles [begin, end) of keys, of which those from
  // first_masked on are not seen as a whole; those up to `loaded` are for other groups.
  struct Share {
    i32 begin;
    i32 first_masked;
    i32 end;
    i32 loaded;
    VisibleKeys visible;

    DK_DEVICE bool sees() const { return end > begin; }
    // Whether there are fewer keys than the last tile has room for.
    DK_DEVICE bool ends_inside() const {
      return visible.count - (end - 1) * S.tile_keys < S.tile_keys;
    }
  };
  DK_DEVICE Share share_of(const RowTile& unit) const {
    const i32 first = rows.first_query;
    Share share{};
    share.begin = unit.keys.begin;
    share.end = unit.template seen_end<S>(first, group_queries<S>(args));
    share.loaded = unit.keys.end;
    share.first_masked =
        S.causal ? max_of(unit.template full_end<S>(first), share.begin) : share.end - 1;
    share.visible = unit.template visible_keys<S>();
    return share;
  }

  DK_DEVICE void mask(Scores& scores, const Share& share, i32 tile) const {
    i32 visible[kLaneRows];
    DK_UNROLL
    for (i32 r = 0; r < kLaneRows; ++r)
      visible[r] = share.visible.end(rows.place(r).query) - tile * S.tile_keys;
    mask_scores(scores, visible);
  }
  DK_DEVICE void keep_powers(const Scores& scores) {
    DK_UNROLL
    for (i32 step = 0; step < kSumSteps; ++step) powers_as_a<S.dtype>(powers[step], scores, step);
  }

  // Tiles that only other groups of the unit see.
  DK_DEVICE void skip_keys(i32 count) {
    DK_NO_UNROLL
    for (i32 i = 0; i < count; ++i) {
      wait_for_keys();
      take_turn();
      pass_turn();
      release_keys();
    }
  }
  DK_DEVICE void skip_values(i32 count) {
    DK_NO_UNROLL
    for (i32 i = 0; i < count; ++i) {
      wait_for_values();
      release_values();
    }
  }
  DK_DEVICE void skip(i32 count) {
    DK_NO_UNROLL
    for (i32 i = 0; i < count; ++i) {
      skip_keys(1);
      skip_values(1);
    }
  }
  DK_DEVICE void wait_for_queries() const {
    ptx::mbarrier_wait(ptx::smem_addr(&smem.q_filled[qs.slot][group]), qs.parity);
  }
  // Starts the scores of a unit's first tile, the rightmost one that the group sees.
  DK_DEVICE void start_unit(Scores& scores) const {
    wait_for_queries();
    wait_for_keys();
    take_turn();
    start_scores(scores);
    pass_turn();
  }
  DK_DEVICE void end_scores(Scores& scores) {
    ptx::wgmma_wait_group<0>(scores);
    release_keys();
  }
  DK_DEVICE void first_powers(Scores& scores, const Share& share) {
    float factor[kLaneRows];
    if (S.causal || share.ends_inside()) mask(scores, share, share.end - 1);
    softmax.add(scores, args.scale_log2, factor);
    keep_powers(scores);
    if (share.end - 1 > share.begin) wait_for_keys();
  }
  // The scores of a tile, whose keys are there, and the sums over the one before it.
  template <bool kMasks>
  DK_DEVICE void next_tile(Scores& scores, const Share& share, i32 tile, bool adds) {
    float factor[kLaneRows];
    take_turn();
    start_scores(scores);
    wait_for_values();
    start_sums(adds);
    pass_turn();
    ptx::wgmma_wait_group<1>(scores);
    release_keys();
    if constexpr (kMasks) mask(scores, share, tile);
    const bool rescales = softmax.add(scores, args.scale_log2, factor);
    // Of the next tile. It also is a branch, over which ptxas does not move the wait for the sums
    // up into the softmax; the additions of that it would move down, were they not asked for here:
    // they fill the gaps between powers.
    if (tile > share.begin && softmax.has_added()) wait_for_keys();
    ptx::wgmma_wait_group<0>(sum);
    release_values();
    if (rescales) {
      DK_UNROLL
      for (i32 i = 0; i < kSums; ++i) sum[i] *= factor[row_of_element(i)];
    }
    keep_powers(scores);
  }
  // All tiles, of which the first has its scores, but the sums over the last one, which are to be
  // added to what there is if it returns true.
  DK_DEVICE bool add_tiles(Scores& scores, const Share& share) {
    first_powers(scores, share);
    i32 tile = share.end - 2;
    bool adds = false;
    if constexpr (S.causal) {
      DK_NO_UNROLL
      for (; tile >= share.first_masked; --tile, adds = true)
        next_tile<true>(scores, share, tile, adds);
    }
    DK_NO_UNROLL
    for (; tile >= share.begin; --tile, adds = true) next_tile<false>(scores, share, tile, adds);
    release_queries();
    return adds;
  }

  // --- units

  // Of the unit in this slot, which is given back.
  DK_DEVICE void store(i32 slot) {
    softmax.close();
    const RowTile unit = tile::load_shared(smem.unit[slot]);
    const Divisor divisor[] = {softmax.divisor(0), softmax.divisor(1)};
    if (ptx::any(divisor[0].saw_nothing || divisor[1].saw_nothing)) {
      DK_UNROLL
      for (i32 i = 0; i < kSums; ++i)
        if (divisor[row_of_element(i)].saw_nothing) sum[i] = 0.0f;
    }
    const ResultStore<S> results{args, unit, rows};
    results.run([&](i32 i) { return divisor[row_of_element(i)].divide_finite(sum[i]); },
                [&](i32 r) { return softmax.log2_sum(r); });
    units.give_back(slot);
  }

  DK_DEVICE void run() {
    if (group == kGroups - 1) pass_turn();  // the first one is group 0's
    Scores scores;
    bool has_scores = false;  // those of the unit's first tile
    RowTile unit = units.look();
    Share share = share_of(unit);
    skip(share.loaded - share.end);
    DK_NO_UNROLL
    while (unit.exists()) {
      softmax.open();
      const bool sees = share.sees();
      bool adds = false;
      if (sees) {
        if (!has_scores) {
          start_unit(scores);
          end_scores(scores);
        }
        adds = add_tiles(scores, share);
      } else if (share.loaded > share.begin) {
        wait_for_queries();
        release_queries();
      }
      const i32 slot = units.slots.slot;
      units.slots.next();
      unit = units.look();
      share = share_of(unit);
      has_scores = sees && share.sees() && share.end == share.loaded;
      if (has_scores) {
        wait_for_values();
        start_sums(adds);
        start_unit(scores);
        ptx::wgmma_wait_group<1>(sum);
        release_values();
        store(slot);
        end_scores(scores);
      } else {
        i32 skipped = 0;
        if (sees) {
          wait_for_values();
          start_sums(adds);
          // Others wait for the turns, and no longer for these values than there are stages.
          skipped = min_of<i32>(share.loaded - share.end, S.v_stages);
          skip_keys(skipped);
          ptx::wgmma_wait_group<0>(sum);
          release_values();
          skip_values(skipped);
        }
        skip(share.loaded - share.end - skipped);
        store(slot);
      }
    }
    if (group == 0) take_turn();  // which the last group has passed on
  }
};

}  // namespace deep_kernels::flash
