// The main loop that the fold and the plain GEMM share where mma.sync, ldmatrix and cp.async are
// all there is: x times the transpose of w, a scale for 128 elements of k.
//
// A tile is a few tokens against one or two halves of 128 rows of w. Eight warps share it: each has
// 32 tokens and the same part of every half, so that gate and up of a column meet in one lane. The
// rows of w are given to the MMA's columns in such an order that a lane ends up with neighbouring
// columns, see `weight_row`. Blocks of 128 of k stream through a ring of stages without regard to
// where a tile ends: the first stage of the next one is on its way while this one is finished.
#pragma once

#include "deep_kernels/contract/silu_fold.h"
#include "deep_kernels/kernels/tile_order.cuh"
#include "deep_kernels/ptx/base.cuh"
#include "deep_kernels/tile/e4m3_mma.cuh"
#include "deep_kernels/tile/fragments.cuh"
#include "deep_kernels/tile/global_words.cuh"
#include "deep_kernels/tile/layout.cuh"
#include "deep_kernels/tile/pipeline.cuh"

namespace deep_kernels::block_scaled_sm89 {

inline constexpr i32 kThreads = 256;
inline constexpr i32 kWarpTokens = 32;   // two MMAs of 16
inline constexpr i32 kRowsPerCopy = 32;  // rows of 128 bytes that all threads copy at once

// How the warps share a tile, and what a lane holds of it.
template <i32 kTokens, i32 kTileHalves, i32 kMostPassOctets = 8>
struct Shape {
  static constexpr i32 kTileTokens = kTokens;
  static constexpr i32 kHalves = kTileHalves;  // of columns, 128 each
  static constexpr i32 kTokenWarps = kTileTokens / kWarpTokens;
  static constexpr i32 kColumnWarps = kThreads / 32 / kTokenWarps;
  static constexpr i32 kWarpColumns = kScaleBlock / kColumnWarps;  // of each half
  static constexpr i32 kOctets = kWarpColumns / 8;                 // of each half
  static constexpr i32 kGroupOctets = min_of(4, kOctets);          // whose columns are permuted
  static constexpr i32 kGroups = kOctets / kGroupOctets;           // of each half
  static constexpr i32 kLaneColumns = 2 * kGroupOctets;            // neighbours, of a group
  static constexpr i32 kPassOctets =
      min_of(kMostPassOctets, kTileHalves* kOctets);  // summed at a time
  static constexpr i32 kPasses = kTileHalves * kOctets / kPassOctets;
  static_assert(kTokenWarps * kColumnWarps * 32 == kThreads && kOctets % 2 == 0);

  static DK_DEVICE i32 warp() { return ptx::thread_index() / 32; }
  static DK_DEVICE i32 warp_token() { return warp() % kTokenWarps * kWarpTokens; }
  static DK_DEVICE i32 column_warp() { return warp() / kTokenWarps; }
  // The lane's token number `row`, 0 to 3: of an MMA's accumulators the first two belong to an even
  // one, the last two to the odd one behind it.
  static DK_DEVICE i32 token(i32 row) { return warp_token() + 8 * row + ptx::lane_index() / 4; }
  // The first of the lane's neighbouring columns of a group, in a half.
  static DK_DEVICE i32 column(i32 group) {
    return column_warp() * kWarpColumns + group * 8 * kGroupOctets +
           ptx::lane_index() % 4 * kLaneColumns;
  }
  // Which row of a half belongs to row `place` of the second operand. Lane t of a quad gets columns
  // 2t and 2t + 1 of octet j: these are number 2j and 2j + 1 of its neighbouring columns.
  static DK_DEVICE i32 weight_row(i32 place) {
    constexpr i32 kGroupRows = 8 * kGroupOctets;
    const i32 octet = place % kGroupRows / 8;
    const i32 lane = place % 8 / 2;
    return place / kGroupRows * kGroupRows + lane * kLaneColumns + 2 * octet + place % 2;
  }
};

// What a tile is made of: tokens, and of w the rows of its first half. Second halves lie the same
// step further in all tiles.
struct TileRows {
  i32 first_token;
  i32 num_columns;  // of the half that exist, perhaps more than 128; may be negative in the second
  i64 first_row;
  i32 scale_row;
};
struct HalfStep {
  i32 rows;
  i32 columns;  // fewer
  i32 scale_rows;
};

template <class Shape, i32 kStages>
struct Rings {
  static constexpr i32 kNumScales = Shape::kTileTokens + Shape::kHalves;  // of x, then of w
  struct Stage {
    u8 x[Shape::kTileTokens * kScaleBlock];            // swizzled
    u8 w[Shape::kHalves * kScaleBlock * kScaleBlock];  // swizzled
  };
  alignas(1024) Stage stage[kStages];
  float scale[kStages][kNumScales];
};

// Sums of a lane: [half, octet][MMA of 16 tokens][accumulator].
template <class Shape>
struct Sums {
  float value[Shape::kHalves * Shape::kOctets][2][4];

  DK_DEVICE void clear() {
    DK_UNROLL
    for (i32 i = 0; i < Shape::kHalves * Shape::kOctets; ++i) DK_UNROLL
    for (i32 j = 0; j < 8; ++j) value[i][j / 4][j % 4] = 0.0f;
  }
  // Two neighbouring columns, see Shape::token and Shape::column.
  DK_DEVICE void pair(float (&columns)[2], i32 half, i32 octet, i32 row) const {
    const float(&sums)[4] = value[half * Shape::kOctets + octet][row / 2];
    columns[0] = sums[row % 2 * 2];
    columns[1] = sums[row % 2 * 2 + 1];
  }
};

// Work is a list of units, whose rows are multiplied one after the other:
//   i32 num_units(); TileRows rows(i32 unit); HalfStep half_step()
// Of these a block takes every num_blocks()th run of Work::kUnitsPerTile.
template <class Shape, i32 kStages, class Work>
struct Multiplier {
  static constexpr i32 kAhead = kStages - 1;    // stages that are loaded ahead
  static_assert(kStages == 1 || kStages == 2);  // a thread carries one scale

  // What a thread copies: 16 bytes of k of every 32nd row.
  struct Source {
    const u8* x;
    const u8* w;
    i32 tokens;   // that are left from the first of its rows on
    i32 columns;  // the same of w, first half
    i64 scale;    // index of the thread's scale in those of x or of w; negative: none
  };

  const BlockScaledArgs& args;
  const Work& work;
  Rings<Shape, kStages>& rings;
  Source source;  // of the block that is loaded next
  float scale;    // the thread's, of the block that was loaded last
  tile::Ring<kStages> drains;

  DK_DEVICE Multiplier(const BlockScaledArgs& args, const Work& work, Rings<Shape, kStages>& rings)
      : args(args),
        work(work),
        rings(rings),
        source{},
        scale(0.0f),
        drains(tile::Ring<kStages>::drainer()) {
    if constexpr (kAhead == 0) return;
    find_source(ptx::block_index() * Work::kUnitsPerTile);
    load(0, 0);
  }

  DK_DEVICE i32 num_k_blocks() const { return ceil_div(args.k, kScaleBlock); }
  // The unit that this block works at next.
  static DK_DEVICE i32 unit_behind(i32 unit) {
    const i32 next = unit + 1;
    return next % Work::kUnitsPerTile != 0 ? next
                                           : next + (ptx::num_blocks() - 1) * Work::kUnitsPerTile;
  }

  // --- loads
  static DK_DEVICE i32 copied_row(i32 thread) { return thread / 8; }
  static DK_DEVICE i32 copied_chunk(i32 thread) { return thread % 8; }

  // Behind the last unit there is nothing: zeros come.
  DK_DEVICE void find_source(i32 unit) {
    if (unit >= work.num_units()) {
      source.tokens = source.columns = 0;
      source.scale = -1;
      return;
    }
    const TileRows rows = work.rows(unit);
    const i32 thread = ptx::fresh_thread_index();
    const i32 token = rows.first_token + copied_row(thread);
    const i32 row = Shape::weight_row(copied_row(thread));
    const i32 byte = 16 * copied_chunk(thread);
    source.x = args.x + token * args.x_stride + byte;
    source.w = args.w + (rows.first_row + row) * args.w_stride + byte;
    source.tokens = args.num_tokens - token;
    source.columns = rows.num_columns - row;
    source.scale = scale_index(rows, thread);
  }
  // Where the scale number `i` of a stage lies.
  DK_DEVICE i64 scale_index(const TileRows& rows, i32 i) const {
    const HalfStep step = work.half_step();
    const i32 token = rows.first_token + i;
    const i32 half = i - Shape::kTileTokens;
    if (half < 0) return token < args.num_tokens ? token * args.x_scale_token_stride : -1;
    if (half >= Shape::kHalves || half * step.columns >= rows.num_columns) return -1;
    return (rows.scale_row + half * step.scale_rows) * args.w_scale_row_stride;
  }

  // Of `left` rows the first, the 32nd behind it and so on. Nothing is read where none is left.
  template <i32 kRows>
  DK_DEVICE void copy_rows(u32 to, const u8* from, i64 stride, i32 left) const {
    DK_UNROLL
    for (i32 row = 0; row < kRows; row += kRowsPerCopy) {
      const bool there = row < left;
      // An address must be valid even if nothing is read.
      ptx::cp_async_16(to + row * kScaleBlock, there ? from : args.x, there ? 16 : 0);
      from += kRowsPerCopy * stride;
    }
  }

  // A block of k of the source into a stage, one copy group.
  DK_DEVICE void load(i32 block, i32 slot) {
    const HalfStep step = work.half_step();
    const i32 thread = ptx::fresh_thread_index();
    const u32 place = tile::swizzled_offset<kScaleBlock>(copied_row(thread), copied_chunk(thread));
    const i32 k = block * kScaleBlock;
    const bool has_k = k + 16 * copied_chunk(thread) < args.k;
    const auto& stage = rings.stage[slot];
    copy_rows<Shape::kTileTokens>(ptx::smem_addr(stage.x) + place, source.x + k, args.x_stride,
                                  has_k ? source.tokens : 0);
    DK_UNROLL
    for (i32 half = 0; half < Shape::kHalves; ++half)
      copy_rows<kScaleBlock>(ptx::smem_addr(stage.w) + half * kScaleBlock * kScaleBlock + place,
                             source.w + k + half * i64{step.rows} * args.w_stride, args.w_stride,
                             has_k ? source.columns - half * step.columns : 0);
    ptx::cp_async_commit_group();
    scale = load_scale(block, thread);
  }

  DK_DEVICE float load_scale(i32 block, i32 thread) const {
    if (source.scale < 0) return 0.0f;
    if (thread < Shape::kTileTokens)
      return ptx::load_global(args.x_scale + source.scale + block * args.x_scale_block_stride);
    return tile::load_float(args.w_scale, source.scale + block * args.w_scale_block_stride,
                            args.w_scale_dtype);
  }
  // The scale that came with the stage that is drained next; a barrier must follow.
  DK_DEVICE void post_scale() const {
    const i32 thread = ptx::fresh_thread_index();
    if (thread < Rings<Shape, kStages>::kNumScales)
      ptx::store_shared_f32(ptx::smem_addr(&rings.scale[drains.slot][thread]), scale);
  }

  // --- products
  using Mma = tile::E4m3Mma<>;
  using Part = float[Shape::kPassOctets][2][4];

  // Octets of a pass against the warp's tokens, 32 of k. `x`, `w`: the warp's rows of a stage.
  static DK_DEVICE void multiply(Part& part, u32 x, u32 w, i32 pass, i32 step) {
    Mma::A a[2];
    DK_UNROLL
    for (i32 i = 0; i < 2; ++i) {
      u32 bytes[4];
      tile::load_a_fragment<kScaleBlock>(bytes, x + 16 * i * kScaleBlock, step);
      a[i] = Mma::first(bytes);
    }
    DK_UNROLL
    for (i32 octet = 0; octet < Shape::kPassOctets; octet += 2) {
      const i32 of_tile = pass * Shape::kPassOctets + octet;
      const i32 row = of_tile / Shape::kOctets * kScaleBlock + of_tile % Shape::kOctets * 8;
      u32 bytes[2][2];
      tile::load_b_fragments<kScaleBlock>(bytes, w + row * kScaleBlock, step);
      DK_UNROLL
      for (i32 i = 0; i < 2; ++i) {
        const Mma::B b = Mma::second(bytes[i]);
        DK_UNROLL
        for (i32 j = 0; j < 2; ++j) Mma::add(part[octet + i][j], a[j], b);
      }
    }
  }
  // All of a stage's k. With two passes ptxas has no registers left to look further ahead than one
  // step, tries nevertheless, and spills.
  static DK_DEVICE void multiply(Part& part, u32 x, u32 w, i32 pass) {
    constexpr i32 kSteps = kScaleBlock / 32;
    if constexpr (Shape::kPasses == 1) {
      DK_UNROLL
      for (i32 step = 0; step < kSteps; ++step) multiply(part, x, w, pass, step);
    } else {
      DK_NO_UNROLL
      for (i32 step = 0; step < kSteps; ++step) multiply(part, x, w, pass, step);
    }
  }

  DK_DEVICE void add_stage(Sums<Shape>& sums) const {
    const auto& stage = rings.stage[drains.slot];
    const u32 x = ptx::smem_addr(stage.x) + Shape::warp_token() * kScaleBlock;
    const u32 w =
        ptx::smem_addr(stage.w) + Shape::column_warp() * Shape::kWarpColumns * kScaleBlock;
    DK_UNROLL
    for (i32 pass = 0; pass < Shape::kPasses; ++pass) {
      Part part = {};
      multiply(part, x, w, pass);
      promote(sums, part, pass);
    }
  }
  DK_DEVICE void promote(Sums<Shape>& sums, const Part& part, i32 pass) const {
    const u32 scales = ptx::smem_addr(&rings.scale[drains.slot][0]);
    float of_token[4];
    float of_half[Shape::kHalves];
    DK_UNROLL
    for (i32 row = 0; row < 4; ++row)
      of_token[row] = ptx::load_shared_f32(scales + Shape::token(row) * sizeof(float));
    DK_UNROLL
    for (i32 half = 0; half < Shape::kHalves; ++half)
      of_half[half] = ptx::load_shared_f32(scales + (Shape::kTileTokens + half) * sizeof(float));
    DK_UNROLL
    for (i32 octet = 0; octet < Shape::kPassOctets; ++octet) {
      const i32 of_tile = pass * Shape::kPassOctets + octet;
      DK_UNROLL
      for (i32 i = 0; i < 8; ++i) {
        float& sum = sums.value[of_tile][i / 4][i % 4];
        sum = ptx::fma(part[octet][i / 4][i % 4],
                       of_token[i / 2] * of_half[of_tile / Shape::kOctets], sum);
      }
    }
  }

  // All threads: the sums of one unit over all of k. Units come in the order of unit_behind().
  DK_DEVICE void run(Sums<Shape>& sums, i32 unit) {
    sums.clear();
    if constexpr (kAhead == 0) find_source(unit);
    DK_NO_UNROLL
    for (i32 block = 0; block < num_k_blocks(); ++block) {
      if constexpr (kAhead == 0) {
        ptx::sync_threads();  // all are done with the only stage
        load(block, 0);
        post_scale();
        ptx::cp_async_wait_group<0>();
        ptx::sync_threads();
      } else {
        post_scale();
        ptx::cp_async_wait_group<kAhead - 1>();
        ptx::sync_threads();  // the stage is there for all, and all are done with the one before it
        load_ahead(unit, block);
      }
      add_stage(sums);
      drains.next();
    }
  }
  // The block of k behind this one, perhaps of another unit.
  DK_DEVICE void load_ahead(i32 unit, i32 block) {
    const bool unit_ends = block + 1 == num_k_blocks();
    if (unit_ends) find_source(unit_behind(unit));
    auto fills = drains;
    fills.next();
    load(unit_ends ? 0 : block + 1, fills.slot);
  }
  // Behind the last unit.
  static DK_DEVICE void close() { ptx::cp_async_wait_group<0>(); }
};

}  // namespace deep_kernels::block_scaled_sm89
