// The math warpgroups of the paged Hopper kernel: tiles in turn, scores by wgmma, head sums in
// registers.
#pragma once

#include "deep_kernels/kernels/mqa_logits_tile.cuh"
#include "deep_kernels/kernels/paged_mqa_unit_sm90.cuh"
#include "deep_kernels/ptx/sm90.cuh"
#include "deep_kernels/tile/layout.cuh"
#include "deep_kernels/tile/mma.cuh"
#include "deep_kernels/tile/pipeline.cuh"

namespace deep_kernels::paged_sm90 {

template <PagedMqaLogitsSpec S>
struct Math {
  using Sum = HeadSum<S.order(), /*kMaySaturate=*/false>;
  using Logit = typename LogitStorage<S.logits_dtype>::Type;
  using Descriptor = tile::KMajorDescriptor<S.head_dim>;
  static constexpr i32 kColumns = S.pass_columns();
  static_assert(Sum::kSets == 1 && Sum::kSlots == 1);

  const PagedMqaLogitsArgs& args;
  Smem<S>& smem;
  i32 group;
  i32 tile_row;   // kv row inside a tile that this lane keeps first
  u32 kv_low;     // descriptor of kv stage 0
  u32 query_low;  // descriptor of the unit's queries
  u32 weights;    // address of the lane's first weight
  u32 tokens;     // address of the lane's Token, those of further passes behind it
  float weight[kColumns / 4];
  tile::Ring<S.kv_stages> stages;

  DK_DEVICE void load_weights(i32 pass) {
    DK_UNROLL
    for (i32 octet = 0; octet < kColumns / 8; ++octet) {
      float pair[2];
      ptx::load_shared_f32x2(pair, weights + 4 * (pass * kColumns + 8 * octet));
      weight[2 * octet] = pair[0];
      weight[2 * octet + 1] = pair[1];
    }
  }

  // Starts the scores of one tile: x is valid after a wait.
  DK_DEVICE void start_score(float (&x)[kColumns / 2], i32 pass) const {
    const u32 kv = kv_low + stages.slot * (S.kv_stage_bytes() >> 4);
    const u32 query = query_low + pass * (kColumns * S.head_dim >> 4);
    ptx::wgmma_fence();
    DK_UNROLL
    for (i32 k = 0; k < S.head_dim / 32; ++k)
      tile::wgmma_k32_e4m3(x, Descriptor::make(kv + 2 * k), Descriptor::make(query + 2 * k), k > 0);
    ptx::wgmma_commit_group();
  }

  DK_DEVICE void store(const float (&kept)[1][Sum::kRows], const float (&scale)[Sum::kRows],
                       i32 pass, i32 tile) const {
    const u32 token = tokens + pass * S.order().tokens() * sizeof(Token);
    const i32 length = ptx::load_shared_i32(token + Token::kLengthAt);
    const i32 store_end = ptx::load_shared_i32(token + Token::kStoreEndAt);
    const float power = ptx::load_shared_f32(token + Token::kPowerAt);
    const i32 column = tile * kPagedTileRows + tile_row;
    Logit* row = static_cast<Logit*>(args.logits) + ptx::load_shared_i64(token) + column;
    if (!Sum::stores()) return;
    DK_UNROLL
    for (i32 i = 0; i < Sum::kRows; ++i) {
      const float value = scaled_sum(kept[0][i], scale[i], power);
      if (column + 8 * i < store_end)
        store_logit(row + 8 * i,
                    column + 8 * i < length ? value : ptx::float_of(kNegativeInfinity));
    }
  }

  // Rows and scales are read: the stage may be refilled.
  DK_DEVICE void release_stage() const {
    ptx::sync_warp();
    if (ptx::lane_index() == 0) ptx::mbarrier_arrive(ptx::smem_addr(&smem.kv_drained[stages.slot]));
  }

  // Scores, head sums and stores of 64 kv tokens.
  DK_DEVICE void one_tile(i32 tile) {
    ptx::mbarrier_wait(ptx::smem_addr(&smem.kv_filled[stages.slot]), stages.parity);
    const u32 scales = ptx::smem_addr(&smem.kv_scale[stages.slot][tile_row]);
    DK_NO_UNROLL
    for (i32 pass = 0; pass < S.num_passes(); ++pass) {
      float x[kColumns / 2];
      start_score(x, pass);
      if (S.num_passes() > 1) load_weights(pass);
      float scale[Sum::kRows];
      DK_UNROLL
      for (i32 i = 0; i < Sum::kRows; ++i) scale[i] = ptx::load_shared_f32(scales + 4 * 8 * i);
      ptx::wgmma_wait_group<0>(x);
      if (pass == S.num_passes() - 1) release_stage();
      float sum[1][2];
      float kept[1][Sum::kRows];
      Sum::template add_set<0>(sum, x, weight);
      Sum::join(kept, sum);
      store(kept, scale, pass, tile);
    }
  }

  DK_DEVICE void open_unit(i32 slot) {
    query_low = Descriptor::low(ptx::smem_addr(&smem.query[slot][0]));
    weights = ptx::smem_addr(&smem.weights[slot][2 * (ptx::lane_index() % 4)]);
    tokens = ptx::smem_addr(&smem.unit[slot].token[Sum::first_token()]);
    if (S.num_passes() == 1) load_weights(0);
  }

  DK_DEVICE void run() {
    kv_low = Descriptor::low(ptx::smem_addr(&smem.kv[0][0]));
    tile_row = ptx::warp_index() % 4 * 16 + Sum::row();
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
      open_unit(units.slot);
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
