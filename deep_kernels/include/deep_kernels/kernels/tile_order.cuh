// The order in which blocks of threads take the tiles of a GEMM's output.
#pragma once

#include "deep_kernels/ptx/base.cuh"

namespace deep_kernels {

// Within bands of 2048 tokens, whose rows of x stay in the L2 cache, all tiles of one block of
// columns after the other.
struct TileOrder {
  struct Tile {
    i32 token;  // tile of tokens
    i32 block;  // of columns
  };
  i32 token_tiles;
  i32 blocks;  // of columns
  i32 band;    // token tiles per band

  static DK_DEVICE TileOrder of(i32 num_tokens, i32 tile_tokens, i32 blocks) {
    constexpr i32 kBandTokens = 2048;
    return {ceil_div(num_tokens, tile_tokens), blocks, kBandTokens / tile_tokens};
  }
  DK_DEVICE i32 count() const { return token_tiles * blocks; }
  DK_DEVICE Tile at(i32 index) const {
    const u32 size = static_cast<u32>(band * blocks);
    const u32 which = static_cast<u32>(index) / size;
    const i32 first = static_cast<i32>(which) * band;  // token tile of the band
    const u32 inside = static_cast<u32>(index) - which * size;
    const u32 width = static_cast<u32>(min_of(band, token_tiles - first));
    const u32 block = inside / width;
    return {first + static_cast<i32>(inside - block * width), static_cast<i32>(block)};
  }
};

}  // namespace deep_kernels
