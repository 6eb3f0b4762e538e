// What the kernels that use mma.sync alone share, dense and paged: rows into shared memory, and the
// query columns of a block with their weights.
#pragma once

#include "deep_kernels/kernels/mqa_logits_tile.cuh"
#include "deep_kernels/kernels/mqa_mx.cuh"
#include "deep_kernels/ptx/base.cuh"
#include "deep_kernels/tile/layout.cuh"

namespace deep_kernels::mqa_sm89 {

inline constexpr i32 kTileRows = 16;  // kv rows of one MMA

// 16-byte chunks of `rows` rows into swizzled shared memory; source(row) is null for a row of
// zeros. All threads of the block.
template <i32 kRowBytes, i32 kThreads, class Source>
DK_DEVICE void copy_rows(u32 smem, i32 rows, const u8* valid, Source&& source) {
  constexpr i32 kChunks = kRowBytes / 16;
  for (i32 i = ptx::thread_index(); i < rows * kChunks; i += kThreads) {
    const i32 row = i / kChunks;
    const i32 chunk = i % kChunks;
    const u8* from = source(row);
    const u32 bytes = from != nullptr ? 16 : 0;  // an address must be valid even if nothing is read
    ptx::cp_async_16(smem + tile::swizzled_offset<kRowBytes>(row, chunk),
                     from != nullptr ? from + 16 * chunk : valid, bytes);
  }
}

// MX: a query row, null for zeros, as e4m3 codes with one exponent, see MxCodes. `given`: its
// exponents.
template <Format kFormat, i32 kHeadDim>
DK_DEVICE MxRow<kFormat> rebase_row(u32 rows, i32 column, const u8* from, i32 given) {
  constexpr i32 kBlocks = kHeadDim / kMxBlock;
  MxCodes<kFormat> codes[kBlocks] = {};
  MxRow<kFormat> found;
  DK_UNROLL
  for (i32 block = 0; block < kBlocks; ++block) {
    if (from != nullptr)
      codes[block].load([&](u32(&bytes)[4], i32 offset) {
        ptx::load_global_x4(bytes, from + block * mx_block_bytes(kFormat) + offset);
      });
    found.add(mx_exponent(given, block), codes[block].is_zero());
  }
  DK_UNROLL
  for (i32 block = 0; block < kBlocks; ++block) {
    codes[block].rebase(found.shift(mx_exponent(given, block)));
    DK_UNROLL
    for (i32 half = 0; half < 2; ++half) {
      const u32* word = codes[block].word + 4 * half;
      ptx::store_shared_x4(rows + tile::swizzled_offset<kHeadDim>(column, 2 * block + half),
                           word[0], word[1], word[2], word[3]);
    }
  }
  return found;
}

// What MX formats keep beside the weights of a query column.
template <i32 kColumns, bool kIsMx>
struct MxColumns {
  alignas(128) i32 exponents[kColumns];  // of the codes
  alignas(128) float powered[kColumns];  // weights times the power of their row

  template <Format kFormat>
  DK_DEVICE void post(i32 column, const MxRow<kFormat>& row, i32 given, float weight) {
    ptx::store_shared_i32(ptx::smem_addr(&exponents[column]), row.exponents(given));
    ptx::store_shared_f32(ptx::smem_addr(&powered[column]), powered_weight(weight, row.power()));
  }
};
template <i32 kColumns>
struct MxColumns<kColumns, false> {};

// The weights of a block's query columns, and powers that the logits of its tokens owe.
// Columns says of a column its token, counted from `first_row`, and its head, and where the power
// of a token lies.
template <i32 kColumns, i32 kTokens, i32 kThreads>
struct ColumnWeights {
  alignas(128) float weight[kColumns];
  i32 has_extreme[kThreads / 32];  // whether a warp saw such weights, see owed_power

  // All threads; a block barrier must follow.
  template <class Args, class Columns>
  DK_DEVICE void post(const Args& args, i32 first_row, const Columns& columns) {
    const i32 warp = ptx::warp_index();
    bool extreme = false;
    for (i32 column = ptx::thread_index(); column < kColumns; column += kThreads) {
      const float value =
          load_weight(args, first_row + columns.token(column), columns.head(column));
      extreme = extreme || is_extreme_weight(value);
      ptx::store_shared_f32(ptx::smem_addr(&weight[column]), value);
    }
    extreme = ptx::any(extreme);
    if (ptx::lane_index() == 0) ptx::store_shared_i32(ptx::smem_addr(&has_extreme[warp]), extreme);
    if (ptx::thread_index() < kTokens)
      ptx::store_shared_f32(columns.power(ptx::thread_index()), 1.0f);
  }
  // Behind that barrier: divides the weights of the tokens that need it by powers of two.
  template <class Args, class Columns>
  DK_DEVICE void tame(const Args& args, i32 first_row, const Columns& columns) {
    i32 extreme = 0;
    DK_NO_UNROLL
    for (i32 warp = 0; warp < kThreads / 32; ++warp)
      extreme |= ptx::load_shared_i32(ptx::smem_addr(&has_extreme[warp]));
    if (extreme == 0) return;  // all threads alike
    if (ptx::thread_index() < kTokens)
      ptx::store_shared_f32(columns.power(ptx::thread_index()),
                            owed_power(args, first_row + ptx::thread_index()));
    ptx::sync_threads();
    for (i32 column = ptx::thread_index(); column < kColumns; column += kThreads) {
      const float power = ptx::load_shared_f32(columns.power(columns.token(column)));
      const u32 address = ptx::smem_addr(&weight[column]);
      ptx::store_shared_f32(address, ptx::load_shared_f32(address) * reciprocal(power));
    }
    ptx::sync_threads();
  }
};

}  // namespace deep_kernels::mqa_sm89
