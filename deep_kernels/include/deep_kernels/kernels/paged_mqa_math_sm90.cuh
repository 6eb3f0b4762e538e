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

template <PagedMqaLogitsSpec S>
struct Math {
  using Lane = LaneLogits<S>;
  using Sum = typename Lane::Sum;
  using Descriptor = tile::KMajorDescriptor<S.head_dim>;
  using Exponents = RowExponents<S>;
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
  u32 tokens;     // address of the lane's Token, those of further passes behind it
  float weight[kColumns / 4];
  u32 codes[S.format == Format::mxfp4 ? kBlocks : 1][4];  // mxfp4: the tile's rows as operands
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

  // Starts the scores of one tile that k-steps [begin, end) make: x is valid after a wait.
  DK_DEVICE void start_score(float (&x)[kColumns / 2], i32 pass, i32 begin, i32 end) const {
    const u32 kv = kv_low + stages.slot * (S.kv_stage_bytes() >> 4);
    const u32 query = query_low + pass * (kColumns * S.head_dim >> 4);
    ptx::wgmma_fence();
    DK_UNROLL
    for (i32 k = begin; k < end; ++k) {
      const u64 b = Descriptor::make(query + 2 * k);
      if constexpr (S.format == Format::mxfp4)
        tile::wgmma_k32_e4m3(x, codes[k], b, k > begin);
      else
        tile::wgmma_k32_e4m3(x, Descriptor::make(kv + 2 * k), b, k > begin);
    }
    ptx::wgmma_commit_group();
  }

  // MX: the scores block by block, scaled on the way. Two blocks are in flight where registers
  // allow.
  DK_DEVICE void score_blocks(float (&x)[kColumns / 2], i32 pass) const {
    constexpr i32 kAhead = kColumns == 128 || kBlocks == 1 ? 1 : 2;
    u32 exponents[2];
    DK_UNROLL
    for (i32 r = 0; r < 2; ++r)
      exponents[r] = kv_exponents(warp_row + ptx::lane_index() / 4 + 8 * r);
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
        const float factor = Exponents::factor(exponents[i / 2 % 2], block);
        x[i] = block == 0 ? done[i] * factor : ptx::fma(done[i], factor, x[i]);
      }
      if (block + kAhead < kBlocks) start_score(done, pass, block + kAhead, block + kAhead + 1);
    }
  }

  // Address of the token that the lane's logits of a pass belong to.
  DK_DEVICE u32 token_at(i32 pass) const {
    return tokens + pass * S.order().tokens() * sizeof(Token);
  }
  DK_DEVICE u32 kv_exponents(i32 row) const {
    return static_cast<u32>(ptx::load_shared_i32(ptx::smem_addr(&smem.kv_scale[stages.slot][row])));
  }
  DK_DEVICE float kv_scale(i32 row) const {
    if constexpr (S.is_mx())
      return Exponents::scale(kv_exponents(row));
    else
      return ptx::load_shared_f32(ptx::smem_addr(&smem.kv_scale[stages.slot][row]));
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
        .kv_exponents = {static_cast<i32>(kv_exponents(row)),
                         static_cast<i32>(kv_exponents(row + 8))},
        .query = ptx::smem_addr(&smem.query[slot][column * S.head_dim]),
        .query_exponents = ptx::smem_addr(&smem.mx.query_exponents[slot][column]),
        .weights = ptx::smem_addr(&smem.weights[slot][column])};
    PagedWideSum<S>::mend(logit, at, 0);
  }

  // Rows and scales are read: the stage may be refilled.
  DK_DEVICE void release_stage() const {
    ptx::sync_warp();
    if (ptx::lane_index() == 0) ptx::mbarrier_arrive(ptx::smem_addr(&smem.kv_drained[stages.slot]));
  }

  // Scores, head sums and stores of 64 kv tokens.
  DK_DEVICE void one_tile(i32 tile) {
    ptx::mbarrier_wait(ptx::smem_addr(&smem.kv_filled[stages.slot]), stages.parity);
    if constexpr (S.format == Format::mxfp4) {
      DK_UNROLL
      for (i32 block = 0; block < kBlocks; ++block) tile_rows().load(codes[block], block);
    }
    DK_NO_UNROLL
    for (i32 pass = 0; pass < S.num_passes(); ++pass) one_pass(tile, pass);
  }
  DK_DEVICE void one_pass(i32 tile, i32 pass) {
    const bool is_last = pass == S.num_passes() - 1;
    const i32 row = warp_row + Sum::row();  // that this lane keeps first
    const i32 column = tile * kPagedTileRows + row;
    if (S.num_passes() > 1) load_weights(pass);
    float x[kColumns / 2];
    if constexpr (S.is_mx())
      score_blocks(x, pass);
    else
      start_score(x, pass, 0, kBlocks);
    float scale[Sum::kRows];
    DK_UNROLL
    for (i32 i = 0; i < Sum::kRows; ++i) scale[i] = kv_scale(row + 8 * i);
    if constexpr (!S.is_mx()) {
      ptx::wgmma_wait_group<0>(x);
      if (is_last) release_stage();
    }
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
  DK_DEVICE void open_unit() {
    query_low = Descriptor::low(ptx::smem_addr(&smem.query[slot][0]));
    tokens = ptx::smem_addr(&smem.unit[slot].token[Sum::first_token()]);
    if (S.num_passes() == 1) load_weights(0);
  }

  DK_DEVICE void run() {
    kv_low = Descriptor::low(ptx::smem_addr(&smem.kv[0][0]));
    warp_row = ptx::warp_index() % 4 * 16;
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
