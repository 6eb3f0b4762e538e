// Contract of the FP8 prefill MLP: a GEMM whose operands have a scale per 128 elements, the gated
// activation and its quantization to FP8, as one launch (the fold) or as two. Read by the host, the
// kernels (NVRTC) and the tests.
//
//   g, u    = x w_gate^T, x w_up^T: every 128 of k is summed on the tensor cores, multiplied by
//             x_scale * w_scale in float32 and added
//   s       = bf16(act(g)),  v = bf16(s * (u + up_offset))      (Rounding::float32: not rounded)
//   scale   = max(amax |v| / 448, 1e-12) of 128 columns,  y = e4m3(v * (1 / scale))
#pragma once

#include "deep_kernels/contract/types.h"

namespace deep_kernels {

inline constexpr i32 kScaleBlock = 128;          // elements that share a scale, both ways
inline constexpr float kMaxE4m3 = 448.0f;        // of finite e4m3 numbers
inline constexpr float kMinBlockScale = 1e-12f;  // so that a block of zeros can be divided by it

enum class Activation : u8 {
  silu,           // g * sigmoid(g), nothing else
  silu_adjusted,  // with clamp, alpha or up_offset: g * sigmoid(alpha * g)
  gelu_tanh,      // with clamp and up_offset, if any
};
enum class Rounding : u8 { bfloat16, float32 };  // of act(g) and of the product
enum class ScaleFormat : u8 { float32, ue8m0 };  // of y's scales; ue8m0: rounded up to 2^e
enum class FoldAlgorithm : u8 {
  one_pass,     // sm90: gate and up columns in the accumulators of one warpgroup
  two_pass,     // sm89: gate over all of k into shared memory, then up
  interleaved,  // sm89: both in registers, x loaded once
};

constexpr const char* name_of(Activation value) {
  constexpr const char* names[] = {"silu", "silu_adjusted", "gelu_tanh"};
  return names[static_cast<u8>(value)];
}
constexpr const char* name_of(Rounding value) {
  constexpr const char* names[] = {"bfloat16", "float32"};
  return names[static_cast<u8>(value)];
}
constexpr const char* name_of(ScaleFormat value) {
  constexpr const char* names[] = {"float32", "ue8m0"};
  return names[static_cast<u8>(value)];
}
constexpr const char* name_of(FoldAlgorithm value) {
  constexpr const char* names[] = {"one_pass", "two_pass", "interleaved"};
  return names[static_cast<u8>(value)];
}

struct ActivationArgs {
  float clamp;      // gate at most, up between -clamp and clamp; infinity: none. NaN stays
  float alpha;      // of the sigmoid
  float up_offset;  // added to up behind the clamp
};

// The operands of both GEMMs: x times the transpose of w.
struct BlockScaledArgs {
  const u8* x;           // [num_tokens, k] e4m3
  const float* x_scale;  // [num_tokens, ceil(k / 128)]
  const u8* w;           // [num_rows, k] e4m3; fold: gate rows, then up rows
  const void* w_scale;   // [blocks of rows, ceil(k / 128)] float32 | bfloat16; fold: blocks of gate
                         // rows, then those of up rows
  i64 x_stride;          // bytes, a multiple of 16
  i64 x_scale_token_stride;  // elements
  i64 x_scale_block_stride;  // elements
  i64 w_stride;              // bytes, a multiple of 16
  i64 w_scale_row_stride;    // elements
  i64 w_scale_block_stride;  // elements
  i32 num_tokens;
  i32 k;
  DType w_scale_dtype;
};

struct SiluFoldArgs {
  BlockScaledArgs gemm;
  ActivationArgs activation;
  u8* y;                     // [num_tokens, num_columns] e4m3
  void* y_scale;             // [num_tokens, ceil(num_columns / 128)] float32 | u8 exponents
  i64 y_stride;              // elements
  i64 y_scale_token_stride;  // elements
  i64 y_scale_block_stride;  // elements
  i32 num_columns;           // half of w's rows
};

struct BlockGemmArgs {
  BlockScaledArgs gemm;
  const void* residual;  // [num_tokens, num_columns] bfloat16 | float32; null: none
  void* out;             // [num_tokens, num_columns] bfloat16 | float32
  i64 residual_stride;   // elements
  i64 out_stride;        // elements
  i32 num_columns;       // w's rows
  DType residual_dtype;
};

struct SiluMulArgs {
  const u16* gate_up;  // [num_tokens, 2 * num_columns] bfloat16: gate, then up
  ActivationArgs activation;
  u8* y;  // as SiluFoldArgs
  void* y_scale;
  i64 gate_up_stride;        // elements
  i64 y_stride;              // elements
  i64 y_scale_token_stride;  // elements
  i64 y_scale_block_stride;  // elements
  i32 num_tokens;
  i32 num_columns;
};

template <class Map>
struct BlockGemmMaps {
  Map x;     // (k, tokens), box (128, tokens of a tile that a block of threads loads)
  Map gate;  // rows of w that the first, and the second half of a tile's columns come from: see
  Map up;    // weight_rows_map
};

// A tile's columns are those of two blocks of 128 rows of w: gate and up of the fold, neighbours of
// the plain GEMM. What both Specs have to say of it.
inline constexpr i32 kFoldTileRows = 2 * kScaleBlock;  // of w

// How a tile is shared out. On sm90 by math warpgroups of 64 tokens each, and perhaps by the two
// blocks of threads of a cluster, of which each takes half of the columns of both blocks and both
// load x together; on sm89 by groups of warps, 32 tokens each.
struct FoldTile {
  Backend backend;
  i32 token_groups;
  i32 cluster;  // blocks of threads

  constexpr i32 tokens() const { return (backend == Backend::sm90 ? 64 : 32) * token_groups; }
  // Of both blocks of rows of w, per block of threads.
  constexpr i32 rows() const { return kFoldTileRows / cluster; }
  constexpr i32 num_threads() const {
    return backend == Backend::sm90 ? 128 * (token_groups + 1) : 256;
  }
  constexpr i32 stage_bytes(FoldAlgorithm algorithm) const {
    const i32 w = algorithm == FoldAlgorithm::two_pass ? kScaleBlock : rows();
    return (tokens() + w) * kScaleBlock;
  }
  constexpr i32 smem_bytes(i32 stages, FoldAlgorithm algorithm, Rounding rounding) const {
    const i32 rings = stages * stage_bytes(algorithm);
    if (backend == Backend::sm90) {
      const i32 factors = stages * tokens() * 2 * 4;
      const i32 maxima = (cluster - 1) * 2 * tokens() * 4;  // of two tiles, from the other block
      return rings + factors + maxima + 1024;               // barriers
    }
    const i32 element_bytes = rounding == Rounding::bfloat16 ? 2 : 4;
    const bool keeps_gate = algorithm == FoldAlgorithm::two_pass;
    const i32 gate = keeps_gate ? tokens() * kScaleBlock * element_bytes : 0;
    return rings + gate + 3072;  // act(gate); scales, maxima
  }
  // Accumulators of one wgmma. A warpgroup that has all 256 columns for itself computes them in
  // quarters, of which one is added up while the next is computed; of several each covers for the
  // others.
  constexpr i32 part() const { return cluster == 1 && token_groups == 1 ? 32 : 64; }
  // Whether a k block is one part, and one or two warpgroups have those of two blocks in flight.
  constexpr bool takes_turns() const { return cluster == 2 && token_groups < 3; }
  // Whether a tile's first wgmma may run under the epilogue of the one before. The small tiles are
  // for few tokens, where there is rarely a second; three warpgroups lost 5% by it.
  constexpr bool may_overlap() const { return token_groups == 2 && cluster == 1; }
  // wgmma instructions that the machine code must hold: ptxas can drop some silently. Parts that
  // take turns are in the code four times: the first one, two in the loop, one of an even number of
  // blocks. Overlapping there are a first tile's loop, and of others a first block and a loop.
  constexpr i32 num_wgmma(bool overlaps) const {
    if (backend != Backend::sm90) return 0;
    const i32 copies = takes_turns() ? 4 : rows() / 2 / part() * (overlaps ? 3 : 1);
    return copies * kScaleBlock / 32;
  }
  // Blocks of threads: all tiles of tokens and of `blocks` of columns, taken in turns.
  constexpr i32 grid(i32 num_tokens, i32 blocks, i32 num_sms) const {
    const i64 tiles = i64{ceil_div(num_tokens, tokens())} * blocks;
    return static_cast<i32>(min_of<i64>(tiles * cluster, whole_clusters(num_sms, cluster)));
  }
  constexpr const char* invalid() const {
    const bool is_power = token_groups == 1 || token_groups == 2 || token_groups == 4;
    if (backend != Backend::sm90) {
      if (cluster != 1) return "cluster must be 1";
      return is_power ? nullptr : "token_groups must be 1, 2 or 4";  // of eight warps
    }
    if (cluster != 1 && cluster != 2) return "cluster must be 1 or 2";
    if (token_groups < 1 || token_groups > cluster + 1)  // registers
      return cluster == 1 ? "token_groups must be 1 or 2" : "token_groups must be 1 to 3";
    return nullptr;
  }
};

// What the compiler gets. All members are one byte wide: hashable as bytes, no padding.
struct SiluFoldSpec {
  Backend backend;  // sm89 | sm90
  FoldAlgorithm algorithm;
  Activation activation;
  Rounding rounding;
  ScaleFormat scale_format;
  u8 token_groups;  // see FoldTile
  u8 cluster;
  u8 stages;  // ring of k blocks

  static constexpr const char* op() { return "silu_fold"; }

  template <class Visit>
  constexpr void fields(Visit&& visit) const {
    visit("backend", backend);
    visit("algorithm", algorithm);
    visit("activation", activation);
    visit("rounding", rounding);
    visit("scale_format", scale_format);
    visit("token_groups", token_groups);
    visit("cluster", cluster);
    visit("stages", stages);
  }

  constexpr FoldTile tile() const { return {backend, token_groups, cluster}; }
  constexpr i32 tile_tokens() const { return tile().tokens(); }
  constexpr i32 cluster_size() const { return cluster; }
  constexpr i32 num_threads() const { return tile().num_threads(); }
  constexpr i32 smem_bytes() const { return tile().smem_bytes(stages, algorithm, rounding); }
  static constexpr i32 spill_limit_bytes() { return 0; }
  // Whether the maximum of a token's 128 columns comes from both blocks of a cluster.
  constexpr bool exchanges_maxima() const { return cluster > 1; }
  // See FoldTile; products that are not rounded leave no registers for it.
  constexpr bool overlaps() const { return tile().may_overlap() && rounding == Rounding::bfloat16; }
  constexpr i32 num_wgmma() const { return tile().num_wgmma(overlaps()); }
  constexpr i32 grid(const SiluFoldArgs& args, i32 num_sms) const {
    return tile().grid(args.gemm.num_tokens, ceil_div(args.num_columns, kScaleBlock), num_sms);
  }
  static constexpr i64 workspace_bytes(const SiluFoldArgs&) { return 0; }
  // Why this Spec may not exist; null if it may.
  constexpr const char* invalid() const {
    if (backend != Backend::sm89 && backend != Backend::sm90) return "backend must be sm89 or sm90";
    if ((backend == Backend::sm90) != (algorithm == FoldAlgorithm::one_pass))
      return "one_pass is the algorithm of sm90 alone";
    if (const char* refused = tile().invalid()) return refused;
    if (smem_bytes() > limits_of(backend).max_smem_bytes) return "not enough shared memory";
    return nullptr;
  }
};

struct BlockGemmSpec {
  Backend backend;  // sm89 | sm90
  DType out_dtype;  // float32 | bfloat16
  u8 token_groups;  // as SiluFoldSpec
  u8 cluster;
  u8 stages;

  static constexpr const char* op() { return "block_gemm"; }

  template <class Visit>
  constexpr void fields(Visit&& visit) const {
    visit("backend", backend);
    visit("out_dtype", out_dtype);
    visit("token_groups", token_groups);
    visit("cluster", cluster);
    visit("stages", stages);
  }

  static constexpr FoldAlgorithm algorithm(Backend backend) {
    return backend == Backend::sm90 ? FoldAlgorithm::one_pass : FoldAlgorithm::interleaved;
  }
  constexpr FoldTile tile() const { return {backend, token_groups, cluster}; }
  constexpr i32 tile_tokens() const { return tile().tokens(); }
  constexpr i32 cluster_size() const { return cluster; }
  constexpr i32 num_threads() const { return tile().num_threads(); }
  constexpr i32 smem_bytes() const {
    return tile().smem_bytes(stages, algorithm(backend), Rounding::bfloat16);
  }
  static constexpr i32 spill_limit_bytes() { return 0; }
  static constexpr bool exchanges_maxima() { return false; }
  // Wide stores leave no registers for it.
  constexpr bool overlaps() const { return tile().may_overlap() && out_dtype == DType::bfloat16; }
  constexpr i32 num_wgmma() const { return tile().num_wgmma(overlaps()); }
  constexpr i32 grid(const BlockGemmArgs& args, i32 num_sms) const {
    return tile().grid(args.gemm.num_tokens, ceil_div(args.num_columns, kFoldTileRows), num_sms);
  }
  static constexpr i64 workspace_bytes(const BlockGemmArgs&) { return 0; }
  constexpr const char* invalid() const {
    if (backend != Backend::sm89 && backend != Backend::sm90) return "backend must be sm89 or sm90";
    if (out_dtype == DType::float16) return "out_dtype must be float32 or bfloat16";
    if (const char* refused = tile().invalid()) return refused;
    if (smem_bytes() > limits_of(backend).max_smem_bytes) return "not enough shared memory";
    return nullptr;
  }
};

// The activation of the two-launch way: half a warp for 128 columns of a token.
struct SiluMulSpec {
  Backend backend;  // sm89: for every card
  Activation activation;
  ScaleFormat scale_format;

  static constexpr const char* op() { return "silu_mul"; }

  template <class Visit>
  constexpr void fields(Visit&& visit) const {
    visit("backend", backend);
    visit("activation", activation);
    visit("scale_format", scale_format);
  }

  static constexpr i32 num_threads() { return 256; }
  static constexpr i32 smem_bytes() { return 0; }
  static constexpr i32 spill_limit_bytes() { return 0; }
  static constexpr i32 num_wgmma() { return 0; }
  static constexpr i32 blocks_per_pass() { return num_threads() / 16; }  // of 128 columns
  constexpr i32 grid(const SiluMulArgs& args, i32 /*num_sms*/) const {
    const i64 blocks = i64{args.num_tokens} * ceil_div(args.num_columns, kScaleBlock);
    return static_cast<i32>(clamp_to<i64>(ceil_div<i64>(blocks, blocks_per_pass()), 1, 1 << 20));
  }
  static constexpr i64 workspace_bytes(const SiluMulArgs&) { return 0; }
  constexpr const char* invalid() const {
    return backend == Backend::sm89 ? nullptr : "one kernel serves every card";
  }
};

// --- the finite lists ----------------------------------------------------------------------------

constexpr i32 fold_stages(const FoldTile& tile) {
  if (tile.backend != Backend::sm90) return 2;
  constexpr i32 kStages[2][3] = {{5, 4, 0}, {8, 6, 5}};
  return kStages[tile.cluster - 1][tile.token_groups - 1];
}
// The smallest tile of sm89 comes also with one stage: least shared memory.
constexpr bool fold_has_stages(const FoldTile& tile, i32 stages) {
  return stages == fold_stages(tile) ||
         (tile.backend == Backend::sm89 && tile.token_groups == 1 && stages == 1);
}
inline constexpr i32 kMaxFoldStages = 8;
// Largest last.
template <class Visit>
constexpr void for_each_fold_tile(Backend backend, Visit&& visit) {
  for (i32 cluster : {1, 2})
    for (i32 groups : {1, 2, 3, 4}) {
      const FoldTile tile{backend, groups, cluster};
      if (tile.invalid() == nullptr) visit(tile);
    }
}

template <class Visit>
constexpr void for_each_silu_fold_spec(Backend backend, Visit&& visit) {
  for (Activation activation : {Activation::silu, Activation::silu_adjusted, Activation::gelu_tanh})
    for (Rounding rounding : {Rounding::bfloat16, Rounding::float32})
      for (ScaleFormat scale : {ScaleFormat::float32, ScaleFormat::ue8m0})
        for (FoldAlgorithm algorithm :
             {FoldAlgorithm::one_pass, FoldAlgorithm::two_pass, FoldAlgorithm::interleaved})
          for_each_fold_tile(backend, [&](const FoldTile& tile) {
            for (u8 stages = 1; stages <= kMaxFoldStages; ++stages) {
              const SiluFoldSpec spec{.backend = backend,
                                      .algorithm = algorithm,
                                      .activation = activation,
                                      .rounding = rounding,
                                      .scale_format = scale,
                                      .token_groups = static_cast<u8>(tile.token_groups),
                                      .cluster = static_cast<u8>(tile.cluster),
                                      .stages = stages};
              if (fold_has_stages(tile, stages) && spec.invalid() == nullptr) visit(spec);
            }
          });
}
template <class Visit>
constexpr void for_each_block_gemm_spec(Backend backend, Visit&& visit) {
  for (DType out : {DType::float32, DType::bfloat16})
    for_each_fold_tile(backend, [&](const FoldTile& tile) {
      const BlockGemmSpec spec{.backend = backend,
                               .out_dtype = out,
                               .token_groups = static_cast<u8>(tile.token_groups),
                               .cluster = static_cast<u8>(tile.cluster),
                               .stages = static_cast<u8>(fold_stages(tile))};
      if (spec.invalid() == nullptr) visit(spec);
    });
}
template <class Visit>
constexpr void for_each_silu_mul_spec(Backend backend, Visit&& visit) {
  for (Activation activation : {Activation::silu, Activation::silu_adjusted, Activation::gelu_tanh})
    for (ScaleFormat scale : {ScaleFormat::float32, ScaleFormat::ue8m0}) {
      const SiluMulSpec spec{backend, activation, scale};
      if (spec.invalid() == nullptr) visit(spec);
    }
}

// Rows of w that a tile's half takes. Where whole blocks of 128 rows exist they come permuted:
// lane t of a quad holds accumulator columns 8j + 2t + e, of which pairs 4q to 4q + 3 are given the
// eight neighbouring output columns from 32q + 8t on, so that a quad stores whole sectors. Without
// (a last block that is cut off) columns stand in order.
constexpr bool weight_rows_permuted(i32 num_columns) { return num_columns % kScaleBlock == 0; }
// The second and the last coordinate of a copy that begins with row `first`, a multiple of 32.
struct WeightRows {
  i32 row;
  i32 group;  // of 32 rows
};
constexpr WeightRows weight_rows_of(i32 first, bool permuted) {
  return permuted ? WeightRows{0, first / 32} : WeightRows{first, 0};
}
template <class Map>
constexpr Map weight_rows_map(const BlockScaledArgs& args, i64 first_row, i32 num_rows,
                              i32 box_rows) {
  Map map{};
  map.base = args.w + first_row * args.w_stride;
  map.type = MapType::u8_;
  map.swizzle = Swizzle::b128;
  const i64 row = args.w_stride;
  const bool permuted = weight_rows_permuted(num_rows);
  // Elements of a pair, lanes, pairs, and 32 columns after the other.
  const i64 dims[] = {args.k, permuted ? 2 : num_rows, permuted ? 4 : 1, permuted ? 4 : 1,
                      permuted ? num_rows / 32 : 1};
  const i64 strides[] = {1, row, 8 * row, 2 * row, 32 * row};
  const i32 box[] = {kScaleBlock, permuted ? 2 : box_rows, permuted ? 4 : 1, permuted ? 4 : 1,
                     permuted ? box_rows / 32 : 1};
  set_dimensions(map, dims, strides, 1, box);
  return map;
}

template <class Map = MapDescription>
constexpr BlockGemmMaps<Map> block_gemm_maps(const BlockScaledArgs& args, const FoldTile& tile,
                                             i32 gate_rows, bool has_up_rows) {
  BlockGemmMaps<Map> maps{};
  maps.x = {.base = args.x,
            .dims = {args.k, args.num_tokens},
            .strides = {1, args.x_stride},
            .box = {kScaleBlock, tile.tokens() / tile.cluster},
            .rank = 2,
            .type = MapType::u8_,
            .swizzle = Swizzle::b128};
  const i32 box_rows = tile.rows() / 2;
  maps.gate = weight_rows_map<Map>(args, 0, gate_rows, box_rows);
  maps.up = weight_rows_map<Map>(args, has_up_rows ? gate_rows : 0, gate_rows, box_rows);
  return maps;
}

}  // namespace deep_kernels
