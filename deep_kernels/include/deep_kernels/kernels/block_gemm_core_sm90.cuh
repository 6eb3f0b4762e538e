// The main loop of block-scaled FP8 GEMMs on Hopper, shared by the fold and the plain GEMM: TMA
// feeds a ring of k blocks, each math warpgroup multiplies 64 tokens with the 256 rows of w that a
// tile takes and adds every 128 of k to float32 sums, times the scales of the block. One block per
// SM, persistent.
//
//   producer thread  streams x and w of the block's tiles through the ring
//   scale warps      their scales, multiplied, one for each math warpgroup
//   math warpgroups  64 tokens each: sums in registers, then the epilogue of the op
//
// Where tiles are few, two blocks of a cluster share one (S.cluster): each multiplies the tile's
// tokens with half of the columns, and each loads half of x for both, by multicast. A stage is then
// filled by two producers, which both wait until both blocks have drained it.
//
// Source of the design: the feasibility study for this op on an H200 (gate and up rows as two boxes
// of one stage, weight rows permuted by the tensor map, float32 promotion every 128 of k).
#pragma once

#include "deep_kernels/contract/silu_fold.h"
#include "deep_kernels/kernels/silu_math.cuh"
#include "deep_kernels/kernels/tile_order.cuh"
#include "deep_kernels/ptx/sm90.cuh"
#include "deep_kernels/tile/cluster.cuh"
#include "deep_kernels/tile/global_words.cuh"
#include "deep_kernels/tile/layout.cuh"
#include "deep_kernels/tile/mma.cuh"
#include "deep_kernels/tile/pipeline.cuh"

namespace deep_kernels::fold_sm90 {

// What the other block of a cluster sends: of two tiles in turn, the maxima of its columns. Of 0
// tokens: nothing is sent.
template <i32 kTokens>
struct Mailbox {
  static constexpr i32 kWarps = kTokens / 16;
  float maxima[2][kTokens];
  // 16 of them, and the two warps that have the tokens -> the warp of this block.
  alignas(8) u64 received[2][kWarps];
};
template <>
struct Mailbox<0> {};

// Spec, here and below: SiluFoldSpec or BlockGemmSpec.
template <auto S>
struct Smem {
  alignas(1024) u8 x[S.stages][S.tile_tokens() * kScaleBlock];
  alignas(1024) u8 w[S.stages][S.tile().rows() * kScaleBlock];  // gate rows, then up rows
  // Of the sums: [.. of 16 tokens][token % 8][token / 8 % 2][gate | up], what a lane reads
  // together.
  alignas(16) float factor[S.stages][S.tile_tokens() / 16][8][2][2];
  // Each pair: who arrives, who waits.
  // producer thread, TMA bytes, eight lanes of each scale warp -> math warps
  alignas(8) u64 filled[S.stages];
  u64 drained[S.stages];  // all math warps of the cluster -> producer thread, scale warps
  Mailbox<S.exchanges_maxima() ? S.tile_tokens() : 0> mailbox;
};

template <auto S>
DK_DEVICE void init_barriers(Smem<S>& smem) {
  if (ptx::thread_index() == 0) {
    DK_UNROLL
    for (i32 i = 0; i < S.stages; ++i) {
      ptx::mbarrier_init(ptx::smem_addr(&smem.filled[i]), 1 + 8 * S.token_groups);
      ptx::mbarrier_init(ptx::smem_addr(&smem.drained[i]), 4 * S.token_groups * S.cluster);
    }
    if constexpr (S.exchanges_maxima()) {
      DK_UNROLL
      for (i32 i = 0; i < 2 * smem.mailbox.kWarps; ++i)
        ptx::mbarrier_init(ptx::smem_addr(&smem.mailbox.received[i % 2][i / 2]), 2);
    }
    ptx::fence_mbarrier_init();
  }
}

// Three or four warpgroups start with 168 or 128 registers each; what the producer's gives up the
// others take. Two have enough from the start.
template <auto S>
struct RoleRegisters {
  static constexpr bool kMoves = S.token_groups > 1;
  static constexpr i32 kProducer = S.token_groups == 2 ? 40 : 56;
  static constexpr i32 kMath = S.token_groups == 2 ? 232 : 152;
};

// Which tiles the cluster takes.
template <auto S>
DK_DEVICE i32 first_tile() {
  return ptx::block_index() / S.cluster;
}
template <auto S>
DK_DEVICE i32 tile_step() {
  return ptx::num_blocks() / S.cluster;
}

// Which blocks of 128 rows of `gate` and `up` a tile takes.
struct TileRows {
  i32 gate;
  i32 up;
};

// This block's share of x, for all blocks of the cluster.
template <auto S, class Maps>
DK_DEVICE void load_tokens(const Maps& maps, Smem<S>& smem, i32 slot, i32 rank, i32 k,
                           i32 first_token) {
  constexpr i32 kShare = S.tile_tokens() / S.cluster;
  const u32 filled = ptx::smem_addr(&smem.filled[slot]);
  const u32 x = ptx::smem_addr(&smem.x[slot][rank * kShare * kScaleBlock]);
  const i32 token = first_token + rank * kShare;
  if constexpr (S.cluster == 1)
    ptx::tma_load_2d(x, maps.x, filled, k * kScaleBlock, token);
  else
    ptx::tma_load_2d_multicast(x, maps.x, filled, k * kScaleBlock, token, (1u << S.cluster) - 1);
}

template <auto S, class Maps, class RowsOf>
DK_DEVICE void producer_role(const BlockScaledArgs& args, const Maps& maps, Smem<S>& smem,
                             const TileOrder& order, bool permuted, RowsOf&& rows_of) {
  constexpr i32 kHalfRows = S.tile().rows() / 2;
  const i32 rank = tile::block_rank<S.cluster>();
  const i32 num_k = ceil_div(args.k, kScaleBlock);
  auto stages = tile::Ring<S.stages>::filler();
  DK_NO_UNROLL
  for (i32 index = first_tile<S>(); index < order.count(); index += tile_step<S>()) {
    const TileOrder::Tile tile = order.at(index);
    const TileRows rows = rows_of(tile.block);
    const WeightRows gate = weight_rows_of(rows.gate * kScaleBlock + rank * kHalfRows, permuted);
    const WeightRows up = weight_rows_of(rows.up * kScaleBlock + rank * kHalfRows, permuted);
    DK_NO_UNROLL
    for (i32 k = 0; k < num_k; ++k, stages.next()) {
      const u32 filled = ptx::smem_addr(&smem.filled[stages.slot]);
      const u32 w = ptx::smem_addr(&smem.w[stages.slot][0]);
      ptx::mbarrier_wait(ptx::smem_addr(&smem.drained[stages.slot]), stages.parity);
      ptx::mbarrier_arrive_expect_tx(filled, S.tile().stage_bytes(FoldAlgorithm::one_pass));
      ptx::tma_load_5d(w, maps.gate, filled, k * kScaleBlock, gate.row, 0, 0, gate.group);
      load_tokens<S>(maps, smem, stages.slot, rank, k, tile.token * S.tile_tokens());
      ptx::tma_load_5d(w + kHalfRows * kScaleBlock, maps.up, filled, k * kScaleBlock, up.row, 0, 0,
                       up.group);
    }
  }
  tile::drain_ring<S.cluster>(smem.drained, stages);
}

// Which of 128 columns, or of the 64 of a cluster's block, element e of pair j of a lane is.
DK_DEVICE i32 column_of(bool permuted, i32 j, i32 e) {
  const i32 lane = ptx::lane_index() % 4;
  return permuted ? j / 4 * 32 + 8 * lane + j % 4 * 2 + e : 8 * j + 2 * lane + e;
}

// One warp per math warpgroup: what the sums of a stage are multiplied by, for every token of the
// group. The scales come four k blocks at a time, so that a load meets few lines of the cache: each
// costs the pipe that the tensor cores read their operands by as much as one of their own reads.
// Loaded and handed round in the math warps they took 16% of the kernel, here with a line for every
// token and k block 7%.
template <auto S>
struct ScaleRole {
  static constexpr i32 kBlocks = 4;  // at a time

  const BlockScaledArgs& args;
  Smem<S>& smem;
  i32 group;
  i32 num_k;
  tile::Ring<S.stages> stages = tile::Ring<S.stages>::filler();

  DK_DEVICE ScaleRole(const BlockScaledArgs& args, Smem<S>& smem, i32 group)
      : args(args), smem(smem), group(group), num_k(ceil_div(args.k, kScaleBlock)) {}

  // Scales of one of the blocks, which only every fourth lane has: of tokens 8i + lane / 4.
  struct Scales {
    float token[8];
    float weight[2];  // gate, up
  };
  // Of tokens and blocks that do not exist anything.
  DK_DEVICE void load(Scales& scales, i32 first_token, TileRows rows, i32 first_block) const {
    const i32 lane =
        ptx::fresh_thread_index() % 32;  // what is made of it would be kept, and spilled
    const i32 k = min_of(first_block + lane % kBlocks, num_k - 1);
    const i32 token = first_token + lane / kBlocks;
    const float* row =
        args.x_scale + token * args.x_scale_token_stride + k * args.x_scale_block_stride;
    DK_UNROLL
    for (i32 i = 0; i < 8; ++i)
      scales.token[i] = token + 8 * i < args.num_tokens
                            ? ptx::load_global(row + 8 * i * args.x_scale_token_stride)
                            : 0.0f;
    scales.weight[0] = weight(rows.gate, k);
    scales.weight[1] = weight(rows.up, k);
  }
  DK_DEVICE float weight(i32 row, i32 k) const {
    return tile::load_float(args.w_scale,
                            row * args.w_scale_row_stride + k * args.w_scale_block_stride,
                            args.w_scale_dtype);
  }
  DK_DEVICE void store(const Scales& scales) const {
    const auto& [token, weight] = scales;
    DK_UNROLL
    for (i32 i = 0; i < 4; ++i) {
      const auto& to = smem.factor[stages.slot][4 * group + i][ptx::lane_index() / kBlocks];
      ptx::store_shared_x4(ptx::smem_addr(&to), ptx::bits_of(token[2 * i] * weight[0]),
                           ptx::bits_of(token[2 * i] * weight[1]),
                           ptx::bits_of(token[2 * i + 1] * weight[0]),
                           ptx::bits_of(token[2 * i + 1] * weight[1]));
    }
  }
  DK_DEVICE void fill_tile(TileOrder::Tile tile, TileRows rows) {
    const i32 first_token = tile.token * S.tile_tokens() + 64 * group;
    DK_NO_UNROLL
    for (i32 first = 0; first < num_k; first += kBlocks) {
      Scales scales;
      load(scales, first_token, rows, first);
      DK_NO_UNROLL
      for (i32 i = 0; i < min_of(kBlocks, num_k - first); ++i, stages.next()) {
        ptx::mbarrier_wait(ptx::smem_addr(&smem.drained[stages.slot]), stages.parity);
        if (ptx::lane_index() % kBlocks == i) {
          store(scales);
          ptx::mbarrier_arrive(ptx::smem_addr(&smem.filled[stages.slot]));
        }
      }
    }
  }
  template <class ScaleRowsOf>
  DK_DEVICE void run(const TileOrder& order, ScaleRowsOf& rows_of) {
    DK_NO_UNROLL
    for (i32 index = first_tile<S>(); index < order.count(); index += tile_step<S>()) {
      const TileOrder::Tile tile = order.at(index);
      fill_tile(tile, rows_of(tile.block));
    }
  }
};

// The first of the two tokens of a tile that a lane of a math warp keeps; the other is eight after.
// Converged.
DK_DEVICE i32 lane_token() { return ptx::warp_index() * 16 + ptx::lane_index() / 4; }

// One math warpgroup.
template <auto S>
struct Math {
  using Descriptor = tile::KMajorDescriptor<kScaleBlock>;
  static constexpr i32 kSteps = kScaleBlock / 32;  // of a k block
  static constexpr i32 kSums = S.tile().rows() / 2;
  static constexpr i32 kPart = S.tile().part();
  static constexpr i32 kParts = kSums / kPart;

  const BlockScaledArgs& args;
  Smem<S>& smem;
  i32 group;
  u32 x_low;  // descriptor of the group's rows in stage 0
  u32 w_low;
  u32 factors;  // of the lane's tokens, in stage 0
  // Gate, then up: sum[kSums / 2 * h + 4j + 2r + e] is row lane / 4 + 8 r, see wgmma.
  float sum[kSums];
  float factor[2][2];  // of the block's sums: [r][gate | up]
  tile::Ring<S.stages> stages;

  DK_DEVICE Math(const BlockScaledArgs& args, Smem<S>& smem, i32 group)
      : args(args), smem(smem), group(group), stages(tile::Ring<S.stages>::drainer()) {
    x_low = Descriptor::low(ptx::smem_addr(&smem.x[0][group * 64 * kScaleBlock]));
    w_low = Descriptor::low(ptx::smem_addr(&smem.w[0][0]));
    factors = ptx::smem_addr(&smem.factor[0][ptx::warp_index()][ptx::lane_index() / 4]);
  }
  // The first of the two tokens that the lane keeps of a tile.
  DK_DEVICE i32 token_of(i32 tile) const { return tile * S.tile_tokens() + lane_token(); }

  // Starts the products of the coming stage with the part-th share of the tile's rows of w.
  DK_DEVICE void start(float (&part)[kPart], i32 index) const {
    const u32 x = x_low + stages.slot * (S.tile_tokens() * kScaleBlock >> 4);
    const u32 w = w_low + stages.slot * (S.tile().rows() * kScaleBlock >> 4) +
                  index * (2 * kPart * kScaleBlock >> 4);
    ptx::wgmma_fence();
    DK_UNROLL
    for (i32 step = 0; step < kSteps; ++step)
      tile::wgmma_k32_e4m3(part, Descriptor::make(x + 2 * step), Descriptor::make(w + 2 * step),
                           step > 0);
    ptx::wgmma_commit_group();
  }
  DK_DEVICE void promote(const float (&part)[kPart], i32 index) {
    DK_UNROLL
    for (i32 i = 0; i < kPart; ++i) {
      float& total = sum[index * kPart + i];
      total = ptx::fma(part[i], factor[i / 2 % 2][(index * kPart + i) / (kSums / 2)], total);
    }
  }

  static constexpr i32 kAhead = S.token_groups == 1 ? 2 : 1;  // parts in flight
  using Parts = float[kAhead][kPart];

  DK_DEVICE void wait_for_stage() const {
    ptx::mbarrier_wait(ptx::smem_addr(&smem.filled[stages.slot]), stages.parity);
  }
  // Of the block whose stage has been waited for.
  DK_DEVICE void load_factors() {
    u32 bits[4];
    ptx::load_shared_x4(bits, factors + stages.slot * sizeof(smem.factor[0]));
    DK_UNROLL
    for (i32 i = 0; i < 4; ++i) factor[i / 2][i % 2] = ptx::float_of(bits[i]);
  }
  // The first parts of the coming stage, which has been waited for.
  DK_DEVICE void start_block(Parts& part) const {
    DK_UNROLL
    for (i32 i = 0; i < kAhead; ++i) start(part[i], i);
  }
  // The rest of block k. The next stage is waited for while the tensor cores work on the last parts
  // of this one: between the blocks they would wait for it. So is meanwhile() done.
  template <class Meanwhile>
  DK_DEVICE void finish_block(Parts& part, i32 k, Meanwhile&& meanwhile) {
    const u32 drained = ptx::smem_addr(&smem.drained[stages.slot]);
    load_factors();
    DK_UNROLL
    for (i32 i = 0; i < kParts; ++i) {
      if (i == kParts - kAhead) {
        meanwhile();
        stages.next();
        if (k + 1 < ceil_div(args.k, kScaleBlock)) wait_for_stage();
      }
      float(&done)[kPart] = part[i % kAhead];
      if (i + kAhead <= kParts)
        ptx::wgmma_wait_group<kAhead - 1>(done);
      else
        ptx::wgmma_wait_group<0>(done);
      if (i == kParts - 1) tile::arrive_in_blocks<S.cluster>(drained);
      promote(done, i);
      if (i + kAhead < kParts) start(done, i + kAhead);
    }
  }

  // Block k, of one part that has been started, and the start of the next.
  DK_DEVICE void take_turn(float (&part)[kPart], float (&next)[kPart]) {
    const u32 drained = ptx::smem_addr(&smem.drained[stages.slot]);
    load_factors();
    stages.next();
    wait_for_stage();
    start(next, 0);
    ptx::wgmma_wait_group<1>(part);
    tile::arrive_in_blocks<S.cluster>(drained);
    promote(part, 0);
  }
  DK_DEVICE void take_last_turn(float (&part)[kPart]) {
    load_factors();
    ptx::wgmma_wait_group<0>(part);
    tile::arrive_in_blocks<S.cluster>(ptx::smem_addr(&smem.drained[stages.slot]));
    promote(part, 0);
    stages.next();
  }
  // All k blocks of a tile, the first of which is waited for.
  DK_DEVICE void accumulate_in_turns() {
    const i32 num_k = ceil_div(args.k, kScaleBlock);
    float part[2][kPart];
    start(part[0], 0);
    i32 k = 0;
    DK_NO_UNROLL
    for (; k + 2 < num_k; k += 2) {
      take_turn(part[0], part[1]);
      take_turn(part[1], part[0]);
    }
    if (k + 2 == num_k) {
      take_turn(part[0], part[1]);
      take_last_turn(part[1]);
    } else {
      take_last_turn(part[0]);
    }
  }

  // The k blocks [begin, num_k) of a tile, the first of which is waited for; those before have been
  // added.
  DK_DEVICE void accumulate(i32 begin) {
    const i32 num_k = ceil_div(args.k, kScaleBlock);
    DK_NO_UNROLL
    for (i32 k = begin; k < num_k; ++k) {
      Parts part;
      start_block(part);
      finish_block(part, k, [] {});
    }
  }
  DK_DEVICE void clear() {
    DK_UNROLL
    for (i32 i = 0; i < kSums; ++i) sum[i] = 0.0f;
  }
  // What accumulate expects of block 0.
  DK_DEVICE void begin() {
    clear();
    wait_for_stage();
  }
};

// The tiles of a block one after the other. An epilogue has two halves: collect(math, tile) takes
// what it needs out of the sums, store(collected, tile) does the rest.
template <auto S, class Epilogue>
DK_DEVICE void math_role(Math<S>& math, const TileOrder& order, Epilogue& epilogue) {
  DK_NO_UNROLL
  for (i32 index = first_tile<S>(); index < order.count(); index += tile_step<S>()) {
    const TileOrder::Tile tile = order.at(index);
    math.begin();
    if constexpr (S.tile().takes_turns())
      math.accumulate_in_turns();
    else
      math.accumulate(0);
    epilogue.store(epilogue.collect(math, tile), tile);
  }
}
// The same where the epilogue is long: the first wgmma of a tile run under that of the tile before,
// the first parts while it collects, the last ones while it stores. They must not cross the end of
// the loop, where ptxas would wait for them.
template <auto S, class Epilogue>
DK_DEVICE void overlapping_math_role(Math<S>& math, const TileOrder& order, Epilogue& epilogue) {
  i32 index = first_tile<S>();
  if (index >= order.count()) return;
  TileOrder::Tile tile = order.at(index);
  math.begin();
  math.accumulate(0);
  DK_NO_UNROLL
  for (index += tile_step<S>(); index < order.count(); index += tile_step<S>()) {
    const TileOrder::Tile done = tile;
    tile = order.at(index);
    typename Math<S>::Parts part;
    math.wait_for_stage();
    math.start_block(part);
    const auto collected = epilogue.collect(math, done);
    math.clear();
    math.finish_block(part, 0, [&] { epilogue.store(collected, done); });
    math.accumulate(1);
  }
  epilogue.store(epilogue.collect(math, tile), tile);
}

// The whole kernel. rows_of(block): which rows of w a tile takes, and their scales' rows by
// scale_rows_of; the epilogue: see math_role.
template <auto S, class Maps, class RowsOf, class ScaleRowsOf, class Epilogue>
DK_DEVICE void run(const BlockScaledArgs& args, const Maps& maps, i32 blocks, bool permuted,
                   RowsOf&& rows_of, ScaleRowsOf&& scale_rows_of, Epilogue&& epilogue) {
  static_assert(S.invalid() == nullptr);
  static_assert(sizeof(Smem<S>) <= S.smem_bytes());
  using Registers = RoleRegisters<S>;
  auto& smem = ptx::dynamic_smem<Smem<S>>();
  const i32 warp = ptx::warp_index();
  const TileOrder order = TileOrder::of(args.num_tokens, S.tile_tokens(), blocks);
  if (ptx::thread_index() == S.num_threads() - 32) {
    ptx::prefetch_tensor_map(maps.x);
    ptx::prefetch_tensor_map(maps.gate);
    ptx::prefetch_tensor_map(maps.up);
  }
  init_barriers<S>(smem);
  ptx::grid_dependency_wait();  // nothing above reads what a kernel ahead may have written
  tile::sync_blocks<S.cluster>();

  constexpr i32 kProducer = 4 * S.token_groups;
  if (warp >= kProducer) {
    if constexpr (Registers::kMoves) ptx::set_max_registers_down<Registers::kProducer>();
    if (warp > kProducer + S.token_groups) return;
    ptx::role(warp == kProducer ? "producer" : "scales");
    if (warp > kProducer)
      ScaleRole<S>(args, smem, warp - kProducer - 1).run(order, scale_rows_of);
    else if (ptx::lane_index() == 0)
      producer_role<S>(args, maps, smem, order, permuted, rows_of);
    return;
  }
  if constexpr (Registers::kMoves) ptx::set_max_registers_up<Registers::kMath>();
  ptx::role("math");
  Math<S> math(args, smem, warp / 4);
  if constexpr (S.overlaps())
    overlapping_math_role(math, order, epilogue);
  else
    math_role(math, order, epilogue);
}

}  // namespace deep_kernels::fold_sm90
