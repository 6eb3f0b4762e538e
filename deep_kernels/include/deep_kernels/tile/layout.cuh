// Where bytes lie: swizzled rows in shared memory and the descriptors that name them.
#pragma once

#include "deep_kernels/ptx/base.cuh"

namespace deep_kernels::tile {

// Byte offset of 16-byte chunk `chunk` of row `row` in a tile whose rows are kRowBytes (32, 64 or
// 128) long and whose chunks are XOR-swizzled over 8 rows. The same places the 32, 64 and 128-byte
// swizzles of TMA use, when the tile starts at a multiple of 8 rows.
template <i32 kRowBytes>
DK_DEVICE u32 swizzled_offset(i32 row, i32 chunk) {
  constexpr i32 kChunks = kRowBytes / 16;
  constexpr i32 kRowsPerSpan = 8 / kChunks;  // rows that share one 128-byte span
  return static_cast<u32>(row * kRowBytes + ((chunk ^ (row / kRowsPerSpan % kChunks)) << 4));
}

// wgmma matrix descriptor of a K-major tile, rows of kRowBytes bytes swizzled over kRowBytes.
// Bits: 0-13 address / 16, 16-29 leading offset / 16 (unused by swizzled K-major: 1),
// 32-45 stride between 8-row groups / 16, 62-63 swizzle (1: 128 B, 2: 64 B, 3: 32 B).
// Source: PTX ISA 8.7, section 9.7.15.5.1, "Matrix descriptor".
template <i32 kRowBytes>
struct KMajorDescriptor {
  static constexpr u32 kSwizzleBits = kRowBytes == 128 ? 1u : kRowBytes == 64 ? 2u : 3u;
  static constexpr u32 kHigh = static_cast<u32>(8 * kRowBytes >> 4) | (kSwizzleBits << 30);

  // The low word is all that changes from tile to tile: callers keep it and add bytes / 16. Of the
  // address the upper bits, where a cluster has the block's rank, would land in the leading offset.
  static DK_DEVICE u32 low(u32 smem_addr) { return ((smem_addr & 0x3ffffu) >> 4) | (1u << 16); }
  static DK_DEVICE u64 make(u32 low) { return (static_cast<u64>(kHigh) << 32) | low; }
};

// A tile of 16-bit elements in panels, as TMA writes it with a box of (64 elements, rows, panels)
// and the 128-byte swizzle: [panel of 64 elements][kRows rows][128 bytes], from a multiple of 1024
// bytes on. Steps are in units of 16 bytes: what a descriptor's low word grows by.

// Rows of such a tile against k along the row (the Q and K of attention), by KMajorDescriptor<128>:
// from the tile's first element of k to that of its step `k` of 16 elements.
template <i32 kRows>
DK_DEVICE u32 k_major_step(i32 k) {
  return static_cast<u32>((k / 4 * (kRows * 128) + k % 4 * 32) >> 4);
}

// The tile transposed: k along the rows, n along the row and from panel to panel (the V of
// attention). Bits as above, but 16-29 hold what lies between panels of 64 elements / 16, and 32-45
// what lies between groups of 8 rows / 16.
template <i32 kRows>
struct MnMajorDescriptor {
  static_assert(kRows % 16 == 0, "k of a wgmma is 16 rows");
  static constexpr u32 kPanelUnits = static_cast<u32>(kRows * 128) >> 4;
  static_assert(kPanelUnits < 1u << 14, "a panel's stride has 14 bits");
  static constexpr u32 kHigh = static_cast<u32>(8 * 128 >> 4) | (1u << 30);

  static DK_DEVICE u32 low(u32 smem_addr) {
    return ((smem_addr & 0x3ffffu) >> 4) | (kPanelUnits << 16);
  }
  static DK_DEVICE u64 make(u32 low) { return (static_cast<u64>(kHigh) << 32) | low; }
  // From the tile's first row to those of its step `k` of 16 rows.
  static DK_DEVICE u32 step(i32 k) { return static_cast<u32>(k * 16 * 128) >> 4; }
};

}  // namespace deep_kernels::tile
