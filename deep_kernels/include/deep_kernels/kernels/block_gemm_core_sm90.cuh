// The main loop of block-scaled FP8 GEMMs on Hopper, shared by the fold and the plain GEMM: TMA
// feeds a ring of k blocks, each math warpgroup multiplies 64 tokens with the 256 rows of w that a
// tile takes and adds every 128 of k to float32 sums, times the scales of the block. One block per
// SM, persistent.
//
//   producer thread  streams x and w of the block's tiles through the ring
//   math warpgroups  64 tokens each: sums in registers, then the epilogue of the op
//
// Scales never pass through shared memory: four lanes share a token's row and each loads every
// fourth block's scale, and the lanes of a warp share the scales of w; shuffles hand them round.
//
// Source of the design: the feasibility study for this op on an H200 (gate and up rows as two boxes
// of one stage, weight rows permuted by the tensor map, float32 promotion every 128 of k).
#pragma once

#include "deep_kernels/contract/silu_fold.h"
#include "deep_kernels/kernels/silu_math.cuh"
#include "deep_kernels/ptx/sm90.cuh"
#include "deep_kernels/tile/layout.cuh"
#include "deep_kernels/tile/mma.cuh"
#include "deep_kernels/tile/pipeline.cuh"

namespace deep_kernels::fold_sm90 {

// Spec, here and below: SiluFoldSpec or BlockGemmSpec.
template <auto S>
struct Smem {
  alignas(1024) u8 x[S.stages][S.tile_tokens() * kScaleBlock];
  alignas(1024) u8 w[S.stages][kFoldTileRows * kScaleBlock];  // gate rows, then up rows
  // Each pair: who arrives, who waits.
  alignas(8) u64 filled[S.stages];  // producer thread, and TMA bytes -> math warps
  u64 drained[S.stages];            // all math warps -> producer thread
};

template <auto S>
DK_DEVICE void init_barriers(Smem<S>& smem) {
  if (ptx::thread_index() == 0) {
    DK_UNROLL
    for (i32 i = 0; i < S.stages; ++i) {
      ptx::mbarrier_init(ptx::smem_addr(&smem.filled[i]), 1);
      ptx::mbarrier_init(ptx::smem_addr(&smem.drained[i]), 4 * S.token_groups);
    }
    ptx::fence_mbarrier_init();
  }
}

// Three warpgroups start with 168 registers each; what the producer's gives up the others take. Two
// have enough from the start.
template <auto S>
struct RoleRegisters {
  static constexpr bool kMoves = S.token_groups == 2;
  static constexpr i32 kProducer = 40;
  static constexpr i32 kMath = 232;
};

// The tiles of a launch in the order in which blocks take them: within bands of 2048 tokens, whose
// x stays in the L2 cache, all tiles of one block of columns after the other.
struct TileOrder {
  static constexpr i32 kBandTokens = 2048;
  i32 token_tiles;
  i32 blocks;  // of columns
  i32 band;    // token tiles per band

  template <auto S>
  static DK_DEVICE TileOrder of(i32 num_tokens, i32 blocks) {
    return {ceil_div(num_tokens, S.tile_tokens()), blocks, kBandTokens / S.tile_tokens()};
  }
  struct Tile {
    i32 token;  // tile of tokens
    i32 block;  // of columns
  };
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

// Which blocks of 128 rows of `gate` and `up` a tile takes.
struct TileRows {
  i32 gate;
  i32 up;
};

template <auto S, class Maps, class RowsOf>
DK_DEVICE void producer_role(const BlockScaledArgs& args, const Maps& maps, Smem<S>& smem,
                             const TileOrder& order, bool permuted, RowsOf&& rows_of) {
  constexpr i32 kHalf = kScaleBlock * kScaleBlock;
  const i32 num_k = ceil_div(args.k, kScaleBlock);
  auto stages = tile::Ring<S.stages>::filler();
  DK_NO_UNROLL
  for (i32 index = ptx::block_index(); index < order.count(); index += ptx::num_blocks()) {
    const TileOrder::Tile tile = order.at(index);
    const TileRows rows = rows_of(tile.block);
    const WeightRows gate = weight_rows_of(rows.gate, permuted);
    const WeightRows up = weight_rows_of(rows.up, permuted);
    DK_NO_UNROLL
    for (i32 k = 0; k < num_k; ++k, stages.next()) {
      const u32 filled = ptx::smem_addr(&smem.filled[stages.slot]);
      const u32 w = ptx::smem_addr(&smem.w[stages.slot][0]);
      ptx::mbarrier_wait(ptx::smem_addr(&smem.drained[stages.slot]), stages.parity);
      ptx::mbarrier_arrive_expect_tx(filled,
                                     fold_stage_bytes(S.tile_tokens(), FoldAlgorithm::one_pass));
      ptx::tma_load_5d(w, maps.gate, filled, k * kScaleBlock, gate.row, 0, 0, gate.group);
      ptx::tma_load_2d(ptx::smem_addr(&smem.x[stages.slot][0]), maps.x, filled, k * kScaleBlock,
                       tile.token * S.tile_tokens());
      ptx::tma_load_5d(w + kHalf, maps.up, filled, k * kScaleBlock, up.row, 0, 0, up.group);
    }
  }
}

// Which of a block's 128 columns element e of pair j of a lane is.
DK_DEVICE i32 column_of(bool permuted, i32 j, i32 e) {
  const i32 lane = ptx::lane_index() % 4;
  return permuted ? j / 4 * 32 + 8 * lane + j % 4 * 2 + e : 8 * j + 2 * lane + e;
}

// Scales of the two rows of x that a lane keeps, four blocks of k at a time: lane t of a quad loads
// block 4q + t.
struct TokenScales {
  float value[2];

  // Of blocks [k, k + 4); what does not exist counts 0.
  DK_DEVICE void load(const BlockScaledArgs& args, i32 token, i32 k) {
    const i32 block = k + ptx::lane_index() % 4;
    DK_UNROLL
    for (i32 r = 0; r < 2; ++r) {
      const i32 row = token + 8 * r;
      const bool exists = row < args.num_tokens && block * kScaleBlock < args.k;
      value[r] = exists ? ptx::load_global(args.x_scale + row * args.x_scale_token_stride +
                                           block * args.x_scale_block_stride)
                        : 0.0f;
    }
  }
  DK_DEVICE float at(i32 r, i32 k) const {
    return ptx::shuffle(value[r], (ptx::lane_index() & ~3) + k % 4);
  }
};

// Scales of a tile's two blocks of rows of w, 32 blocks of k at a time, one per lane.
struct WeightScales {
  float value[2];

  static DK_DEVICE float load_one(const BlockScaledArgs& args, i32 row, i32 k) {
    if (k * kScaleBlock >= args.k) return 0.0f;
    const i64 index = row * args.w_scale_row_stride + k * args.w_scale_block_stride;
    if (args.w_scale_dtype == DType::float32)
      return ptx::load_global(static_cast<const float*>(args.w_scale) + index);
    return ptx::float_of_bf16(ptx::load_global(static_cast<const u16*>(args.w_scale) + index));
  }
  // Of blocks [k, k + 32).
  DK_DEVICE void load(const BlockScaledArgs& args, TileRows rows, i32 k) {
    value[0] = load_one(args, rows.gate, k + ptx::lane_index());
    value[1] = load_one(args, rows.up, k + ptx::lane_index());
  }
  DK_DEVICE float at(i32 half, i32 k) const { return ptx::shuffle(value[half], k % 32); }
};

// The first of the two tokens that a lane of a math warp keeps of tile 0.
template <auto S>
DK_DEVICE i32 first_token() {
  return ptx::warp_index() * 16 + ptx::lane_index() / 4;
}

// One math warpgroup.
template <auto S>
struct Math {
  using Descriptor = tile::KMajorDescriptor<kScaleBlock>;
  static constexpr i32 kSteps = kScaleBlock / 32;  // of a k block
  // Accumulators of one wgmma. A warpgroup alone on its SM has two of them in flight, so that one
  // is added up while the other is computed; of two warpgroups each covers for the other.
  static constexpr i32 kPart = S.token_groups == 1 ? 32 : 64;
  static constexpr i32 kParts = 128 / kPart;

  const BlockScaledArgs& args;
  Smem<S>& smem;
  i32 group;
  u32 x_low;  // descriptor of the group's rows in stage 0
  u32 w_low;
  float sum[128];  // gate, then up: sum[64 h + 4j + 2r + e] is row lane / 4 + 8 r, see wgmma
  TokenScales token_scales;  // of the four blocks of k that are being computed, and of the next
  TokenScales ahead;
  WeightScales weight_scales;
  float factor[2][2];  // of the coming block's sums: [gate | up][r]
  tile::Ring<S.stages> stages;

  DK_DEVICE Math(const BlockScaledArgs& args, Smem<S>& smem, i32 group)
      : args(args), smem(smem), group(group), stages(tile::Ring<S.stages>::drainer()) {
    x_low = Descriptor::low(ptx::smem_addr(&smem.x[0][group * 64 * kScaleBlock]));
    w_low = Descriptor::low(ptx::smem_addr(&smem.w[0][0]));
  }
  // The first of the two tokens that the lane keeps of a tile.
  DK_DEVICE i32 token_of(i32 tile) const { return tile * S.tile_tokens() + first_token<S>(); }
  // The scales that a tile begins with.
  DK_DEVICE void load_first_scales(TileOrder::Tile tile, TileRows rows) {
    token_scales.load(args, token_of(tile.token), 0);
    ahead.load(args, token_of(tile.token), 4);
    weight_scales.load(args, rows, 0);
  }
  // Makes the factors of block k, in order of k, and asks for scales that will be needed.
  DK_DEVICE void prepare_factors(TileOrder::Tile tile, TileRows rows, i32 k) {
    if (k > 0 && k % 4 == 0) {
      token_scales = ahead;
      ahead.load(args, token_of(tile.token), k + 4);
      if (k % 32 == 0) weight_scales.load(args, rows, k);
    }
    DK_UNROLL
    for (i32 half = 0; half < 2; ++half) {
      const float weight = weight_scales.at(half, k);
      DK_UNROLL
      for (i32 r = 0; r < 2; ++r) factor[half][r] = token_scales.at(r, k) * weight;
    }
  }

  // Starts the products of the coming stage with the part-th share of the tile's rows of w.
  DK_DEVICE void start(float (&part)[kPart], i32 index) const {
    const u32 x = x_low + stages.slot * (S.tile_tokens() * kScaleBlock >> 4);
    const u32 w = w_low + stages.slot * (kFoldTileRows * kScaleBlock >> 4) +
                  index * (2 * kPart * kScaleBlock >> 4);
    ptx::wgmma_fence();
    DK_UNROLL
    for (i32 step = 0; step < kSteps; ++step)
      tile::wgmma_k32_e4m3(part, Descriptor::make(x + 2 * step), Descriptor::make(w + 2 * step),
                           step > 0);
    ptx::wgmma_commit_group();
  }
  DK_DEVICE void promote(const float (&part)[kPart], i32 index, const float (&by)[2][2]) {
    const i32 half = index * kPart / 64;
    DK_UNROLL
    for (i32 i = 0; i < kPart; ++i)
      sum[index * kPart + i] = ptx::fma(part[i], by[half][i / 2 % 2], sum[index * kPart + i]);
  }
  static DK_DEVICE void release(u32 drained) {
    ptx::sync_warp();
    if (ptx::lane_index() == 0) ptx::mbarrier_arrive(drained);
  }

  static constexpr i32 kAhead = S.token_groups == 1 ? 2 : 1;  // parts in flight
  using Parts = float[kAhead][kPart];

  DK_DEVICE void wait_for_stage() const {
    ptx::mbarrier_wait(ptx::smem_addr(&smem.filled[stages.slot]), stages.parity);
  }
  // The first parts of the coming stage, which has been waited for.
  DK_DEVICE void start_block(Parts& part) const {
    DK_UNROLL
    for (i32 i = 0; i < kAhead; ++i) start(part[i], i);
  }
  // The rest of block k, whose factors are made. What the next block needs is done while the tensor
  // cores work on the last parts of this one: between the blocks they would wait for it. So is
  // meanwhile().
  template <class Meanwhile>
  DK_DEVICE void finish_block(Parts& part, TileOrder::Tile tile, TileRows rows, i32 k,
                              Meanwhile&& meanwhile) {
    const float by[2][2] = {{factor[0][0], factor[0][1]}, {factor[1][0], factor[1][1]}};
    const u32 drained = ptx::smem_addr(&smem.drained[stages.slot]);
    DK_UNROLL
    for (i32 i = 0; i < kParts; ++i) {
      if (i == kParts - kAhead) {
        meanwhile();
        stages.next();
        if (k + 1 < ceil_div(args.k, kScaleBlock)) {
          prepare_factors(tile, rows, k + 1);
          wait_for_stage();
        }
      }
      float(&done)[kPart] = part[i % kAhead];
      if (i + kAhead <= kParts)
        ptx::wgmma_wait_group<kAhead - 1>(done);
      else
        ptx::wgmma_wait_group<0>(done);
      if (i == kParts - 1) release(drained);
      promote(done, i, by);
      if (i + kAhead < kParts) start(done, i + kAhead);
    }
  }

  // The k blocks [begin, num_k) of a tile, the first of which is waited for; those before have been
  // added.
  DK_DEVICE void accumulate(TileOrder::Tile tile, TileRows rows, i32 begin) {
    const i32 num_k = ceil_div(args.k, kScaleBlock);
    DK_NO_UNROLL
    for (i32 k = begin; k < num_k; ++k) {
      Parts part;
      start_block(part);
      finish_block(part, tile, rows, k, [] {});
    }
  }
  DK_DEVICE void clear() {
    DK_UNROLL
    for (i32 i = 0; i < 128; ++i) sum[i] = 0.0f;
  }
  // What accumulate expects of block 0.
  DK_DEVICE void begin(TileOrder::Tile tile, TileRows rows) {
    load_first_scales(tile, rows);
    clear();
    prepare_factors(tile, rows, 0);
    wait_for_stage();
  }
};

// The tiles of a block one after the other. An epilogue has two halves: collect(math, tile) takes
// what it needs out of the sums, store(collected, tile) does the rest.
template <auto S, class ScaleRowsOf, class Epilogue>
DK_DEVICE void math_role(Math<S>& math, const TileOrder& order, ScaleRowsOf&& rows_of,
                         const Epilogue& epilogue) {
  DK_NO_UNROLL
  for (i32 index = ptx::block_index(); index < order.count(); index += ptx::num_blocks()) {
    const TileOrder::Tile tile = order.at(index);
    const TileRows rows = rows_of(tile.block);
    math.begin(tile, rows);
    math.accumulate(tile, rows, 0);
    epilogue.store(epilogue.collect(math, tile), tile);
  }
}
// The same where the epilogue is long: the first wgmma of a tile run under that of the tile before,
// the first parts while it collects, the last ones while it stores. They must not cross the end of
// the loop, where ptxas would wait for them.
template <auto S, class ScaleRowsOf, class Epilogue>
DK_DEVICE void overlapping_math_role(Math<S>& math, const TileOrder& order, ScaleRowsOf&& rows_of,
                                     const Epilogue& epilogue) {
  i32 index = ptx::block_index();
  if (index >= order.count()) return;
  TileOrder::Tile tile = order.at(index);
  math.begin(tile, rows_of(tile.block));
  math.accumulate(tile, rows_of(tile.block), 0);
  DK_NO_UNROLL
  for (index += ptx::num_blocks(); index < order.count(); index += ptx::num_blocks()) {
    const TileOrder::Tile done = tile;
    tile = order.at(index);
    const TileRows rows = rows_of(tile.block);
    math.load_first_scales(tile, rows);
    typename Math<S>::Parts part;
    math.wait_for_stage();
    math.start_block(part);
    const auto collected = epilogue.collect(math, done);
    math.clear();
    math.prepare_factors(tile, rows, 0);
    math.finish_block(part, tile, rows, 0, [&] { epilogue.store(collected, done); });
    math.accumulate(tile, rows, 1);
  }
  epilogue.store(epilogue.collect(math, tile), tile);
}

// The whole kernel. rows_of(block): which rows of w a tile takes, and their scales' rows by
// scale_rows_of; the epilogue: see math_role.
template <auto S, bool kOverlaps, class Maps, class RowsOf, class ScaleRowsOf, class Epilogue>
DK_DEVICE void run(const BlockScaledArgs& args, const Maps& maps, i32 blocks, bool permuted,
                   RowsOf&& rows_of, ScaleRowsOf&& scale_rows_of, const Epilogue& epilogue) {
  static_assert(S.invalid() == nullptr);
  static_assert(sizeof(Smem<S>) <= S.smem_bytes());
  using Registers = RoleRegisters<S>;
  auto& smem = ptx::dynamic_smem<Smem<S>>();
  const i32 warp = ptx::warp_index();
  const TileOrder order = TileOrder::of<S>(args.num_tokens, blocks);
  if (ptx::thread_index() == S.num_threads() - 32) {
    ptx::prefetch_tensor_map(maps.x);
    ptx::prefetch_tensor_map(maps.gate);
    ptx::prefetch_tensor_map(maps.up);
  }
  init_barriers<S>(smem);
  ptx::grid_dependency_wait();  // nothing above reads what a kernel ahead may have written
  ptx::sync_threads();

  if (warp >= 4 * S.token_groups) {
    if constexpr (Registers::kMoves) ptx::set_max_registers_down<Registers::kProducer>();
    ptx::role("producer");
    if (warp == 4 * S.token_groups && ptx::lane_index() == 0)
      producer_role<S>(args, maps, smem, order, permuted, rows_of);
    return;
  }
  if constexpr (Registers::kMoves) ptx::set_max_registers_up<Registers::kMath>();
  ptx::role("math");
  Math<S> math(args, smem, warp / 4);
  if constexpr (kOverlaps)
    overlapping_math_role(math, order, scale_rows_of, epilogue);
  else
    math_role(math, order, scale_rows_of, epilogue);
}

}  // namespace deep_kernels::fold_sm90
