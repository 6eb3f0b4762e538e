// The math warpgroups of the paged Hopper kernel: tiles in turn, scores by wgmma, head sums in
// registers.
#pragma once

#include "deep_kernels/kernels/mqa_logits_tile.cuh"
#include "deep_kernels/kernels/mqa_mx.cuh"
#include "deep_kernels/kernels/mqa_wide.cuh"
#include "deep_kernels/kernels/paged_mqa_unit_sm90.cuh"
#include "deep_kernels/ptx/sm90.cuh"
#include "deep_kernels/tile/layout.cuh"
#include "deep_kernels/tile/mma.cuh"
#include "deep_kernels/tile/pipeline.cuh"

namespace deep_kernels::paged_sm90 {

// MXFP4: e4m3 codes of the eight magnitudes of e2m1 for every block of a kv row, times 2^6 and
// divided by how far the block's exponent lies under the greatest. All stay normal numbers of e4m3
// up to a spread of 11; rows that spread further ask for the exact way.
template <PagedMqaLogitsSpec S>
struct Mxfp4Row {
  static constexpr i32 kBlocks = S.head_dim / kMxBlock;
  static constexpr i32 kMaxSpread = 11;
  static constexpr u32 kLow = 0x6c686000u;   // 1.5, 1, 0.5, 0
  static constexpr u32 kHigh = 0x7c787470u;  // 6, 4, 3, 2
  static constexpr u32 kLowStep = 0x08080800u;
  static constexpr u32 kHighStep = 0x08080808u;

  i32 exponent[kBlocks];
  i32 least;
  i32 greatest;

  DK_DEVICE explicit Mxfp4Row(u32 exponents) {
    least = greatest = exponent[0] = mx_exponent(static_cast<i32>(exponents), 0);
    DK_UNROLL
    for (i32 block = 1; block < kBlocks; ++block) {
      exponent[block] = mx_exponent(static_cast<i32>(exponents), block);
      least = min_of(least, exponent[block]);
      greatest = max_of(greatest, exponent[block]);
    }
  }
  // The codes of a word's eight elements: their magnitudes choose bytes of the table, their signs
  // come out of the packed bytes.
  DK_DEVICE void expand(u32 (&code)[2], u32 packed, i32 block) const {
    const u32 down = static_cast<u32>(exponent[block] - greatest);
    const u32 low = kLow + down * kLowStep;
    const u32 high = kHigh + down * kHighStep;
    const u32 magnitudes = packed & 0x77777777u;
    const u32 even = packed << 4;  // brings the signs of even elements to the top of their bytes
    const u32 signs[2] = {ptx::byte_permute(even, packed, 0x5140u),
                          ptx::byte_permute(even, packed, 0x7362u)};
    code[0] = ptx::byte_permute(low, high, magnitudes) | (signs[0] & 0x80808080u);
    code[1] = ptx::byte_permute(low, high, magnitudes >> 16) | (signs[1] & 0x80808080u);
  }
  DK_DEVICE float scale() const {
    constexpr i32 kCodes = 6;
    const bool is_fast = greatest - least <= kMaxSpread && greatest > kCodes && greatest < kMxNan;
    return ptx::float_of(is_fast ? static_cast<u32>(greatest - kCodes) << 23 : kNotANumber);
  }
};

template <PagedMqaLogitsSpec S>
struct Math {
  using Lane = LaneLogits<S>;
  using Sum = typename Lane::Sum;
  using Descriptor = tile::KMajorDescriptor<S.head_dim>;
  static constexpr i32 kColumns = S.pass_columns();
  static constexpr i32 kBlocks = S.head_dim / kMxBlock;  // k-steps
  static_assert(Sum::kSets == 1 && Sum::kSlots == 1);

  const PagedMqaLogitsArgs& args;
  Smem<S>& smem;
  i32 group;
  i32 warp_row;   // first of the 16 kv rows of a tile that this warp takes
  i32 slot;       // of the unit
  u32 kv_low;     // descriptor of kv stage 0
  u32 query_low;  // descriptor of the unit's queries
  // MXFP4: where the lane's words of row lane / 4 lie in a stage, kept where registers allow.
  static constexpr bool kKeepsWords = S.format == Format::mxfp4 && S.num_passes() == 1;
  u32 word_at[kBlocks];
  u32 tokens;  // address of the lane's Token, those of further passes behind it
  float weight[kColumns / 4];
  tile::Ring<S.kv_stages> stages;

  DK_DEVICE void load_weights(i32 pass) {
    const u32 weights = fast_weights() + 4 * pass * kColumns;
    DK_UNROLL
    for (i32 octet = 0; octet < kColumns / 8; ++octet) {
      float pair[2];
      ptx::load_shared_f32x2(pair, weights + 4 * 8 * octet);
      weight[2 * octet] = pair[0];
      weight[2 * octet + 1] = pair[1];
    }
  }

  DK_DEVICE u32 query_descriptor(i32 pass) const {
    return query_low + pass * (kColumns * S.head_dim >> 4);
  }
  // Starts what k-steps [begin, end) make of the scores of one tile: x is valid after a wait.
  DK_DEVICE void start_score(float (&x)[kColumns / 2], i32 pass, i32 begin, i32 end) const {
    const u32 kv = kv_low + stages.slot * (S.kv_stage_bytes() >> 4);
    const u32 query = query_descriptor(pass);
    ptx::wgmma_fence();
    DK_UNROLL
    for (i32 k = begin; k < end; ++k)
      tile::wgmma_k32_e4m3(x, Descriptor::make(kv + 2 * k), Descriptor::make(query + 2 * k),
                           k > begin);
    ptx::wgmma_commit_group();
  }
  DK_DEVICE void score_fp8(float (&x)[kColumns / 2], float (&scale)[Sum::kRows], i32 pass) const {
    start_score(x, pass, 0, kBlocks);
    DK_UNROLL
    for (i32 i = 0; i < Sum::kRows; ++i)
      scale[i] = ptx::float_of(kv_scale(warp_row + Sum::row() + 8 * i));
    ptx::wgmma_wait_group<0>(x);
  }

  // MXFP8: block by block, scaled on the way. Two blocks are in flight where registers allow.
  DK_DEVICE void score_mxfp8(float (&x)[kColumns / 2], float (&scale)[Sum::kRows], i32 pass) const {
    constexpr i32 kAhead = kColumns == 128 || kBlocks == 1 ? 1 : 2;
    const i32 row = warp_row + ptx::lane_index() / 4;
    const BlockScaledRow<S> rows[2] = {{kv_scale(row)}, {kv_scale(row + 8)}};
    float part[kAhead][kColumns / 2];
    DK_UNROLL
    for (i32 block = 0; block < kAhead; ++block) start_score(part[block], pass, block, block + 1);
    DK_UNROLL
    for (i32 block = 0; block < kBlocks; ++block) {
      auto& done = part[block % kAhead];
      if (block + kAhead <= kBlocks)
        ptx::wgmma_wait_group<kAhead - 1>(done);
      else
        ptx::wgmma_wait_group<0>(done);
      DK_UNROLL
      for (i32 i = 0; i < kColumns / 2; ++i) {
        const float factor = rows[i / 2 % 2].factor(block);
        x[i] = block == 0 ? done[i] * factor : ptx::fma(done[i], factor, x[i]);
      }
      if (block + kAhead < kBlocks) start_score(done, pass, block + kAhead, block + kAhead + 1);
    }
    keep(scale, rows[0].scale(), rows[1].scale());
  }

  // MXFP4: codes are made in registers, which the tensor cores take as they are.
  DK_DEVICE void score_mxfp4(float (&x)[kColumns / 2], float (&scale)[Sum::kRows], i32 pass) const {
    const i32 row = warp_row + ptx::lane_index() / 4;
    const Mxfp4Row<S> rows[2] = {Mxfp4Row<S>(kv_scale(row)), Mxfp4Row<S>(kv_scale(row + 8))};
    keep(scale, rows[0].scale(), rows[1].scale());
    u32 codes[kBlocks][4];
    // The tensor cores work on a block while the codes of the next one are made.
    DK_UNROLL
    for (i32 block = 0; block < kBlocks; ++block) {
      DK_UNROLL
      for (i32 r = 0; r < 2; ++r) {
        u32 half[2];
        rows[r].expand(half, word(r, block), block);
        codes[block][r] = half[0];
        codes[block][2 + r] = half[1];
      }
      ptx::wgmma_fence();
      tile::wgmma_k32_e4m3<1>(x, codes[block], Descriptor::make(query_descriptor(pass) + 2 * block),
                              block > 0);
    }
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>(x);
  }
  DK_DEVICE u32 word(i32 r, i32 block) const {
    if constexpr (!kKeepsWords) return tile_rows().word(r, block);
    const u32 stage = ptx::smem_addr(&smem.kv[0][0]) + stages.slot * S.kv_stage_bytes();
    return static_cast<u32>(ptx::load_shared_i32(stage + word_at[block] + 8 * r * S.row_bytes()));
  }
  // Of two values for rows lane / 4 and 8 further those of the rows that the lane keeps.
  static DK_DEVICE void keep(float (&kept)[Sum::kRows], float first, float second) {
    if constexpr (Sum::kRows == 2) {
      kept[0] = first;
      kept[1] = second;
    } else {
      kept[0] = (ptx::lane_index() & 1) != 0 ? second : first;
    }
  }

  // Address of the token that the lane's logits of a pass belong to.
  DK_DEVICE u32 token_at(i32 pass) const {
    return tokens + pass * S.order().tokens() * sizeof(Token);
  }
  // As it lies in the page: a float32, or four exponents.
  DK_DEVICE u32 kv_scale(i32 row) const {
    return static_cast<u32>(ptx::load_shared_i32(ptx::smem_addr(&smem.kv_scale[stages.slot][row])));
  }

  // The warp's rows of the stage.
  DK_DEVICE TileRows<S> tile_rows() const {
    return {ptx::smem_addr(&smem.kv[stages.slot][0]) + warp_row * S.row_bytes()};
  }
  // MX: logits that the fast way has made NaN, once more the exact way.
  DK_DEVICE void mend(float (&logit)[1][Sum::kRows], i32 pass) const {
    const i32 row = warp_row + ptx::lane_index() / 4;
    const i32 column = pass * kColumns;
    const WideOperands<TileRows<S>> at{
        .kv = tile_rows(),
        .kv_exponents = {static_cast<i32>(kv_scale(row)), static_cast<i32>(kv_scale(row + 8))},
        .query = ptx::smem_addr(&smem.query[slot][column * S.head_dim]),
        .query_exponents = ptx::smem_addr(&smem.mx.query_exponents[slot][column]),
        .weights = ptx::smem_addr(&smem.weights[slot][column])};
    PagedWideSum<S>::mend(logit, 0, [&] { return at; });
  }

  // Rows and scales are read: the stage may be refilled.
  DK_DEVICE void release_stage() const {
    ptx::sync_warp();
    if (ptx::lane_index() == 0) ptx::mbarrier_arrive(ptx::smem_addr(&smem.kv_drained[stages.slot]));
  }

  // Scores, head sums and stores of 64 kv tokens.
  DK_DEVICE void one_tile(i32 tile) {
    ptx::mbarrier_wait(ptx::smem_addr(&smem.kv_filled[stages.slot]), stages.parity);
    DK_NO_UNROLL
    for (i32 pass = 0; pass < S.num_passes(); ++pass) one_pass(tile, pass);
  }
  DK_DEVICE void one_pass(i32 tile, i32 pass) {
    const bool is_last = pass == S.num_passes() - 1;
    const i32 row = warp_row + Sum::row();  // that this lane keeps first
    const i32 column = tile * kPagedTileRows + row;
    if (S.num_passes() > 1) load_weights(pass);
    float x[kColumns / 2];
    float scale[Sum::kRows];
    if constexpr (S.format == Format::fp8)
      score_fp8(x, scale, pass);
    else if constexpr (S.format == Format::mxfp8)
      score_mxfp8(x, scale, pass);
    else
      score_mxfp4(x, scale, pass);
    if (!S.is_mx() && is_last) release_stage();
    float sum[1][2];
    float logit[1][Sum::kRows];
    Sum::template add_set<0>(sum, x, weight);
    Sum::join(logit, sum);
    Lane::finish(logit[0], scale, token_at(pass), column);
    if constexpr (S.is_mx()) {
      mend(logit, pass);
      if (is_last) release_stage();
    }
    Lane::store(args.logits, logit[0], token_at(pass), column);
  }

  // The weights that the fast way takes, from the lane's first column on.
  DK_DEVICE u32 fast_weights() const {
    const i32 column = 2 * (ptx::lane_index() % 4);
    if constexpr (S.is_mx())
      return ptx::smem_addr(&smem.mx.powered[slot][column]);
    else
      return ptx::smem_addr(&smem.weights[slot][column]);
  }
  // MX: the query rows of the first unit, by all math warps.
  DK_DEVICE void rebase_queries() const {
    constexpr i32 kThreads = 128 * S.math_groups;
    constexpr u32 kBarrier = static_cast<u32>(Barrier::queries_rebased);
    constexpr i32 kTasks = QueryBlock<S>::kTasks;
    DK_NO_UNROLL
    for (i32 first = 0; first < kTasks; first += kThreads) {
      // Whole warps, in order: codes lie over packed rows that have been read.
      const i32 task = first + ptx::thread_index();
      QueryBlock<S> block(task);
      if (task < kTasks) block.load(smem, slot);
      ptx::barrier_sync(kBarrier, kThreads);
      if (task < kTasks) block.store(smem, slot);
    }
    ptx::fence_proxy_async();
    ptx::barrier_sync(kBarrier, kThreads);
  }
  DK_DEVICE void open_unit() {
    query_low = Descriptor::low(ptx::smem_addr(&smem.query[slot][0]));
    tokens = ptx::smem_addr(&smem.unit[slot].token[Sum::first_token()]);
    if (S.num_passes() == 1) load_weights(0);
  }

  DK_DEVICE void run() {
    kv_low = Descriptor::low(ptx::smem_addr(&smem.kv[0][0]));
    warp_row = ptx::warp_index() % 4 * 16;
    if constexpr (kKeepsWords) {
      DK_UNROLL
      for (i32 block = 0; block < kBlocks; ++block)
        word_at[block] = TileRows<S>{static_cast<u32>(warp_row * S.row_bytes())}.word_at(block);
    }
    stages = tile::Ring<S.kv_stages>::drainer(group);
    auto units = tile::Ring<S.query_slots()>::drainer();
    i32 next = group;  // the next tile of this group, counted from the unit's first
    DK_NO_UNROLL
    for (;; units.next()) {
      ptx::mbarrier_wait(ptx::smem_addr(&smem.query_filled[units.slot]), units.parity);
      const auto& unit = smem.unit[units.slot];
      const i32 num_tiles = ptx::load_shared_i32(ptx::smem_addr(&unit.num_tiles));
      if (num_tiles == 0) return;
      const i32 first_tile = ptx::load_shared_i32(ptx::smem_addr(&unit.first_tile));
      slot = units.slot;
      if constexpr (kRebasesFirst<S>)
        if (ptx::load_shared_i32(ptx::smem_addr(&unit.is_raw)) != 0) rebase_queries();
      open_unit();
      DK_NO_UNROLL
      for (; next < num_tiles; next += S.math_groups, stages.advance(S.math_groups))
        one_tile(first_tile + next);
      next -= num_tiles;
      ptx::sync_warp();
      if (ptx::lane_index() == 0)
        ptx::mbarrier_arrive(ptx::smem_addr(&smem.unit_drained[units.slot]));
    }
  }
};

}  // namespace deep_kernels::paged_sm90
