// Flash attention by mma.sync, ldmatrix and cp.async. A warp has 16 rows: queries stay in registers
// where there is room, else in shared memory, and powers are rounded to be the first operand of the
// second product where they stand. Tiles of keys and values stream through a ring, one barrier
// each.
#pragma once

#include "deep_kernels/contract/attention.h"
#include "deep_kernels/kernels/attention_softmax.cuh"
#include "deep_kernels/kernels/attention_tiles.cuh"
#include "deep_kernels/ptx/base.cuh"
#include "deep_kernels/tile/fragments.cuh"
#include "deep_kernels/tile/layout.cuh"
#include "deep_kernels/tile/pipeline.cuh"

namespace deep_kernels::flash_sm89 {

inline constexpr i32 kPanelBytes = 2 * kHeadPanel;   // of a row
inline constexpr i32 kPanelSteps = kHeadPanel / 16;  // of an MMA

// Rows lie panel by panel, swizzled.
template <AttentionSpec S>
struct Smem {
  struct Stage {
    u8 k[S.head_panels][S.tile_keys * kPanelBytes];
    u8 v[S.head_panels][S.tile_keys * kPanelBytes];
  };
  alignas(1024) u8 q[S.head_panels][S.tile_rows * kPanelBytes];
  Stage stage[S.k_stages];
};

// Rows from `from` on, of which `left` exist, into panels of kRows rows; the others become zeros.
template <AttentionSpec S, i32 kRows>
DK_DEVICE void copy_rows(u32 to, const u16* from, i64 stride, i32 left) {
  constexpr i32 kChunks = S.head_dim() / 8;  // of 16 bytes
  constexpr i32 kPassRows = S.num_threads() / kChunks;
  static_assert(kRows % kPassRows == 0);
  const i32 thread = ptx::fresh_thread_index();
  const i32 chunk = thread % kChunks;
  const i32 first = thread / kChunks;
  const u16* source = from + first * stride + 8 * chunk;
  to += chunk / 8 * kRows * kPanelBytes;
  DK_UNROLL
  for (i32 row = 0; row < kRows; row += kPassRows) {
    const bool there = first + row < left;
    // An address must be valid even if nothing is read.
    ptx::cp_async_16(to + tile::swizzled_offset<kPanelBytes>(first + row, chunk % 8),
                     there ? source : from, there ? 16 : 0);
    source += kPassRows * stride;
  }
}

// d[first .. first + 4) += a * b
template <DType kType, i32 kCount>
DK_DEVICE void multiply_add(float (&d)[kCount], i32 first, const u32 (&a)[4], const u32 (&b)[2]) {
  float part[4] = {d[first], d[first + 1], d[first + 2], d[first + 3]};
  if constexpr (kType == DType::float16)
    ptx::mma_m16n8k16_f16(part, a, b);
  else
    ptx::mma_m16n8k16_bf16(part, a, b);
  DK_UNROLL
  for (i32 i = 0; i < 4; ++i) d[first + i] = part[i];
}

// A tile of queries against its keys, all warps together.
template <AttentionSpec S>
struct Worker {
  static constexpr i32 kSteps = S.head_dim() / 16;
  static constexpr bool kKeepsQueries = S.head_panels <= 2;  // in registers: 4 a step
  static constexpr i32 kAhead = S.k_stages - 1;              // tiles of keys that are loaded ahead
  static_assert(S.k_stages == S.v_stages && kAhead >= 1);
  static_assert(S.num_threads() == 2 * S.tile_rows);

  using Softmax = flash::RowSoftmax<S>;
  using Scores = float[Softmax::kScores];

  const AttentionArgs& args;
  Smem<S>& smem;
  const flash::RowTile& tile;
  i32 warp_row;  // of the tile
  Softmax softmax;
  u32 queries[kKeepsQueries ? kSteps : 1][4];
  float sums[S.head_dim() / 2];  // of powers times v; octets of columns as in the scores

  DK_DEVICE Worker(const AttentionArgs& args, Smem<S>& smem, const flash::RowTile& tile)
      : args(args), smem(smem), tile(tile), warp_row(16 * ptx::warp_index()) {
    softmax.open();
    DK_UNROLL
    for (i32 i = 0; i < S.head_dim() / 2; ++i) sums[i] = 0.0f;
  }

  // --- loads
  DK_DEVICE void load_queries() const {
    const u16* from = args.q + tile.member.batch * args.q_batch_stride +
                      (tile.member.first_q + tile.first_query) * args.q_token_stride +
                      tile.head * args.q_head_stride;
    copy_rows<S, S.tile_rows>(ptx::smem_addr(smem.q), from, args.q_token_stride,
                              tile.member.num_q - tile.first_query);
  }
  // Behind the last key there are zeros, so that no power, which is 0 there, meets a NaN.
  DK_DEVICE void load_keys(i32 key_tile, i32 slot) const {
    const auto& stage = smem.stage[slot];
    const i32 first = key_tile * S.tile_keys;
    const i64 token = tile.member.first_kv + first;
    const i32 left = tile.member.num_kv - first;
    copy_rows<S, S.tile_keys>(ptx::smem_addr(stage.k),
                              args.k + tile.member.batch * args.k_batch_stride +
                                  token * args.k_token_stride + tile.kv_head * args.k_head_stride,
                              args.k_token_stride, left);
    copy_rows<S, S.tile_keys>(ptx::smem_addr(stage.v),
                              args.v + tile.member.batch * args.v_batch_stride +
                                  token * args.v_token_stride + tile.kv_head * args.v_head_stride,
                              args.v_token_stride, left);
  }

  // --- products
  DK_DEVICE void query_fragment(u32 (&a)[4], i32 step) const {
    tile::load_a_fragment<kPanelBytes>(
        a, ptx::smem_addr(smem.q[step / kPanelSteps]) + warp_row * kPanelBytes, step % kPanelSteps);
  }
  DK_DEVICE void keep_queries() {
    if constexpr (kKeepsQueries) {
      DK_UNROLL
      for (i32 step = 0; step < kSteps; ++step) query_fragment(queries[step], step);
    }
  }

  DK_DEVICE void multiply_keys(Scores& scores, i32 slot) const {
    DK_UNROLL
    for (i32 i = 0; i < Softmax::kScores; ++i) scores[i] = 0.0f;
    DK_UNROLL
    for (i32 step = 0; step < kSteps; ++step) {
      u32 a[4];
      if constexpr (kKeepsQueries) {
        DK_UNROLL
        for (i32 i = 0; i < 4; ++i) a[i] = queries[step][i];
      } else {
        query_fragment(a, step);
      }
      const u32 rows = ptx::smem_addr(smem.stage[slot].k[step / kPanelSteps]);
      DK_UNROLL
      for (i32 key = 0; key < S.tile_keys; key += 16) {
        u32 b[2][2];
        tile::load_b_fragments<kPanelBytes>(b, rows + key * kPanelBytes, step % kPanelSteps);
        DK_UNROLL
        for (i32 i = 0; i < 2; ++i) multiply_add<S.dtype>(scores, (key / 8 + i) * 4, a, b[i]);
      }
    }
  }
  DK_DEVICE void add_values(const Scores& powers, i32 slot) {
    DK_UNROLL
    for (i32 key = 0; key < S.tile_keys; key += 16) {
      u32 a[4];
      flash::powers_as_a<S.dtype>(a, powers, key / 16);
      DK_UNROLL
      for (i32 step = 0; step < kSteps; ++step) {
        u32 b[2][2];
        tile::load_transposed_b_fragments<kPanelBytes>(
            b, ptx::smem_addr(smem.stage[slot].v[step / kPanelSteps]) + key * kPanelBytes,
            step % kPanelSteps);
        DK_UNROLL
        for (i32 i = 0; i < 2; ++i) multiply_add<S.dtype>(sums, (2 * step + i) * 4, a, b[i]);
      }
    }
  }

  // --- a tile of keys
  DK_DEVICE i32 query(i32 row) const { return tile.first_query + warp_row + flash::lane_row(row); }
  // Of the keys from `first_key` on.
  DK_DEVICE i32 visible(i32 of_query, i32 first_key) const {
    return attention_visible_end(of_query, tile.member.num_q, tile.member.num_kv, S.causal) -
           first_key;
  }

  template <bool kMasked>
  DK_DEVICE void add_tile(i32 key_tile, i32 slot) {
    const i32 first_key = key_tile * S.tile_keys;
    // The whole warp: its last row sees most.
    if (kMasked && visible(tile.first_query + warp_row + 15, first_key) <= 0) return;
    Scores scores;
    multiply_keys(scores, slot);
    if constexpr (kMasked)
      flash::mask_scores(scores, {visible(query(0), first_key), visible(query(1), first_key)});
    float factor[flash::kLaneRows];
    if (softmax.add(scores, args.scale_log2, factor)) {
      DK_UNROLL
      for (i32 i = 0; i < S.head_dim() / 2; ++i) sums[i] *= factor[flash::row_of_element(i)];
    }
    add_values(scores, slot);
  }

  template <bool kMasked>
  DK_DEVICE void add_tiles(i32 begin, i32 end, tile::Ring<S.k_stages>& drains,
                           tile::Ring<S.k_stages>& fills) {
    DK_NO_UNROLL
    for (i32 key_tile = begin; key_tile < end; ++key_tile) {
      ptx::cp_async_wait_group<kAhead - 1>();
      ptx::sync_threads();  // the tile is there for all, and all are done with the one before it
      load_ahead(key_tile + kAhead, fills);
      add_tile<kMasked>(key_tile, drains.slot);
      drains.next();
    }
  }
  // One group, perhaps without copies.
  DK_DEVICE void load_ahead(i32 key_tile, tile::Ring<S.k_stages>& fills) const {
    if (key_tile < tile.keys.end) load_keys(key_tile, fills.slot);
    ptx::cp_async_commit_group();
    fills.next();
  }

  DK_DEVICE void run() {
    auto drains = tile::Ring<S.k_stages>::drainer();
    auto fills = tile::Ring<S.k_stages>::filler();
    const auto [begin, end] = tile.keys;
    load_queries();  // travel with the first keys
    DK_UNROLL
    for (i32 ahead = 0; ahead < kAhead; ++ahead) load_ahead(begin + ahead, fills);
    if constexpr (kKeepsQueries) {
      ptx::cp_async_wait_group<kAhead - 1>();
      ptx::sync_threads();
      keep_queries();
    }
    const i32 full_end = clamp_to(tile.template full_end<S>(0), begin, end);
    add_tiles<false>(begin, full_end, drains, fills);
    add_tiles<true>(full_end, end, drains, fills);
    store();
    ptx::cp_async_wait_group<0>();
    ptx::sync_threads();  // before the next tile's rows overwrite these
  }

  // --- what comes out
  DK_DEVICE void store() {
    softmax.close();
    DK_UNROLL
    for (i32 row = 0; row < flash::kLaneRows; ++row)
      if (query(row) < tile.member.num_q) store_row(row);
  }
  DK_DEVICE void store_row(i32 row) const {
    const bool stores_sum = ptx::lane_index() % 4 == 0;
    const float log2_sum = softmax.log2_sum(row);
    if constexpr (S.split) {
      const i64 index = flash::partial_row(args, tile.member, tile.split, tile.head, query(row));
      if (stores_sum) ptx::store_global(args.partial_lse + index, log2_sum);
      store_values(args.partial_out + index * S.head_dim(), row);
    } else {
      if (stores_sum) flash::store_lse(args, tile.member, tile.head, query(row), log2_sum);
      store_values(flash::out_row(args, tile.member, tile.head, query(row)), row);
    }
  }
  // Two columns of every octet.
  template <class Element>
  DK_DEVICE void store_values(Element* to, i32 row) const {
    const flash::Divisor divisor = softmax.divisor(row);
    DK_UNROLL
    for (i32 octet = 0; octet < S.head_dim() / 8; ++octet) {
      const float first = divisor.divide(sums[4 * octet + 2 * row]);
      const float second = divisor.divide(sums[4 * octet + 2 * row + 1]);
      Element* place = to + 8 * octet + flash::lane_column();
      if constexpr (S.split)
        ptx::store_global_x2(place, ptx::bits_of(first), ptx::bits_of(second));
      else
        ptx::store_global_x1(place, flash::rounded_pair<S.dtype>(first, second));
    }
  }
};

}  // namespace deep_kernels::flash_sm89

namespace deep_kernels {

template <AttentionSpec S>
DK_DEVICE void attention_sm89(const AttentionArgs& args) {
  using namespace flash_sm89;
  static_assert(S.invalid() == nullptr);
  static_assert(sizeof(Smem<S>) <= S.smem_bytes());
  auto& smem = ptx::dynamic_smem<Smem<S>>();
  const i64 num_tiles = S.num_units(args);
  for (i64 index = ptx::block_index(); index < num_tiles; index += ptx::num_blocks()) {
    const flash::RowTile tile = flash::row_tile<S>(args, index);
    if (tile.exists()) Worker<S>(args, smem, tile).run();
  }
}

}  // namespace deep_kernels
