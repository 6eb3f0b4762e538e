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
  Map x;     // (k, tokens), box (128, tokens of a tile)
  Map gate;  // rows of w that the first, and the second half of a tile's columns come from: see
  Map up;    // weight_rows_map
};

// A tile's columns are those of two blocks of 128 rows of w: gate and up of the fold, neighbours of
// the plain GEMM. What both Specs have to say of it.
inline constexpr i32 kFoldTileRows = 2 * kScaleBlock;  // of w

constexpr i32 fold_tile_tokens(Backend backend, i32 token_groups) {
  return (backend == Backend::sm90 ? 64 : 32) * token_groups;
}
constexpr i32 fold_stage_bytes(i32 tile_tokens, FoldAlgorithm algorithm) {
  return (tile_tokens + (algorithm == FoldAlgorithm::two_pass ? kScaleBlock : kFoldTileRows)) *
         kScaleBlock;
}
constexpr const char* fold_groups_refusal(Backend backend, i32 token_groups) {
  if (backend == Backend::sm90)
    return token_groups == 1 || token_groups == 2 ? nullptr : "token_groups must be 1 or 2";
  const bool shared = token_groups == 1 || token_groups == 2 || token_groups == 4;
  return shared ? nullptr : "token_groups must be 1, 2 or 4";  // eight warps share the columns
}
constexpr i32 fold_num_threads(Backend backend, i32 token_groups) {
  return backend == Backend::sm90 ? 128 * (token_groups + 1) : 256;
}
constexpr i32 fold_smem_bytes(Backend backend, i32 token_groups, i32 stages,
                              FoldAlgorithm algorithm, Rounding rounding) {
  const i32 tokens = fold_tile_tokens(backend, token_groups);
  const i32 rings = stages * fold_stage_bytes(tokens, algorithm);
  if (backend == Backend::sm90) return rings + 1024;  // barriers
  const i32 element_bytes = rounding == Rounding::bfloat16 ? 2 : 4;
  const i32 gate = algorithm == FoldAlgorithm::two_pass ? tokens * kScaleBlock * element_bytes : 0;
  return rings + gate + 3072;  // act(gate); scales, maxima
}
// wgmma instructions that the machine code must hold, where it has `copies` of a k block: ptxas can
// drop some silently. A warpgroup that is alone splits its 256 columns into quarters, else halves.
constexpr i32 fold_num_wgmma(Backend backend, i32 token_groups, i32 copies) {
  return backend != Backend::sm90 ? 0 : copies * 4 * (token_groups == 1 ? 4 : 2);
}
// Tiles of all tokens and columns, and how many blocks of the grid take turns.
constexpr i64 fold_num_tiles(i32 num_tokens, i32 num_blocks, i32 tile_tokens) {
  return i64{ceil_div(num_tokens, tile_tokens)} * num_blocks;
}

// What the compiler gets. All members are one byte wide: hashable as bytes, no padding.
struct SiluFoldSpec {
  Backend backend;  // sm89 | sm90
  FoldAlgorithm algorithm;
  Activation activation;
  Rounding rounding;
  ScaleFormat scale_format;
  u8 token_groups;  // sm90: math warpgroups, 64 tokens each; sm89: warps, 32 tokens each
  u8 stages;        // ring of k blocks

  static constexpr const char* op() { return "silu_fold"; }

  template <class Visit>
  constexpr void fields(Visit&& visit) const {
    visit("backend", backend);
    visit("algorithm", algorithm);
    visit("activation", activation);
    visit("rounding", rounding);
    visit("scale_format", scale_format);
    visit("token_groups", token_groups);
    visit("stages", stages);
  }

  constexpr i32 tile_tokens() const { return fold_tile_tokens(backend, token_groups); }
  constexpr i32 num_threads() const { return fold_num_threads(backend, token_groups); }
  constexpr i32 smem_bytes() const {
    return fold_smem_bytes(backend, token_groups, stages, algorithm, rounding);
  }
  static constexpr i32 spill_limit_bytes() { return 0; }
  // Whether a tile's first wgmma run under the epilogue of the one before. A warpgroup that is
  // alone rarely has a second tile; products that are not rounded leave no registers for it.
  constexpr bool overlaps() const { return token_groups == 2 && rounding == Rounding::bfloat16; }
  // Overlapping: a first tile's loop, and of others a first block and a loop.
  constexpr i32 num_wgmma() const {
    return fold_num_wgmma(backend, token_groups, overlaps() ? 3 : 1);
  }
  constexpr i32 grid(const SiluFoldArgs& args, i32 num_sms) const {
    const i32 blocks = ceil_div(args.num_columns, kScaleBlock);
    return static_cast<i32>(
        clamp_to<i64>(fold_num_tiles(args.gemm.num_tokens, blocks, tile_tokens()), 1, num_sms));
  }
  static constexpr i64 workspace_bytes(const SiluFoldArgs&) { return 0; }
  // Why this Spec may not exist; null if it may.
  constexpr const char* invalid() const {
    if (backend != Backend::sm89 && backend != Backend::sm90) return "backend must be sm89 or sm90";
    if ((backend == Backend::sm90) != (algorithm == FoldAlgorithm::one_pass))
      return "one_pass is the algorithm of sm90 alone";
    if (const char* refused = fold_groups_refusal(backend, token_groups)) return refused;
    if (smem_bytes() > limits_of(backend).max_smem_bytes) return "not enough shared memory";
    return nullptr;
  }
};

struct BlockGemmSpec {
  Backend backend;  // sm89 | sm90
  DType out_dtype;  // float32 | bfloat16
  u8 token_groups;  // as SiluFoldSpec
  u8 stages;

  static constexpr const char* op() { return "block_gemm"; }

  template <class Visit>
  constexpr void fields(Visit&& visit) const {
    visit("backend", backend);
    visit("out_dtype", out_dtype);
    visit("token_groups", token_groups);
    visit("stages", stages);
  }

  static constexpr FoldAlgorithm algorithm(Backend backend) {
    return backend == Backend::sm90 ? FoldAlgorithm::one_pass : FoldAlgorithm::interleaved;
  }
  constexpr i32 tile_tokens() const { return fold_tile_tokens(backend, token_groups); }
  constexpr i32 num_threads() const { return fold_num_threads(backend, token_groups); }
  constexpr i32 smem_bytes() const {
    return fold_smem_bytes(backend, token_groups, stages, algorithm(backend), Rounding::bfloat16);
  }
  static constexpr i32 spill_limit_bytes() { return 0; }
  constexpr i32 num_wgmma() const { return fold_num_wgmma(backend, token_groups, 1); }
  constexpr i32 grid(const BlockGemmArgs& args, i32 num_sms) const {
    const i32 blocks = ceil_div(args.num_columns, kFoldTileRows);
    return static_cast<i32>(
        clamp_to<i64>(fold_num_tiles(args.gemm.num_tokens, blocks, tile_tokens()), 1, num_sms));
  }
  static constexpr i64 workspace_bytes(const BlockGemmArgs&) { return 0; }
  constexpr const char* invalid() const {
    if (backend != Backend::sm89 && backend != Backend::sm90) return "backend must be sm89 or sm90";
    if (out_dtype == DType::float16) return "out_dtype must be float32 or bfloat16";
    if (const char* refused = fold_groups_refusal(backend, token_groups)) return refused;
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

// --- the finite lists
// ----------------------------------------------------------------------------

constexpr i32 fold_stages(Backend backend, i32 token_groups) {
  if (backend == Backend::sm90) return token_groups == 1 ? 5 : 4;
  return 2;
}
// The smallest tile of sm89 comes also with one stage: least shared memory.
constexpr bool fold_has_stages(Backend backend, i32 token_groups, i32 stages) {
  return stages == fold_stages(backend, token_groups) ||
         (backend == Backend::sm89 && token_groups == 1 && stages == 1);
}
inline constexpr i32 kMaxFoldStages = 5;

template <class Visit>
constexpr void for_each_silu_fold_spec(Backend backend, Visit&& visit) {
  for (Activation activation : {Activation::silu, Activation::silu_adjusted, Activation::gelu_tanh})
    for (Rounding rounding : {Rounding::bfloat16, Rounding::float32})
      for (ScaleFormat scale : {ScaleFormat::float32, ScaleFormat::ue8m0})
        for (FoldAlgorithm algorithm :
             {FoldAlgorithm::one_pass, FoldAlgorithm::two_pass, FoldAlgorithm::interleaved})
          for (u8 groups : {u8{1}, u8{2}, u8{4}})
            for (u8 stages = 1; stages <= kMaxFoldStages; ++stages) {
              const SiluFoldSpec spec{backend, algorithm, activation, rounding,
                                      scale,   groups,    stages};
              if (fold_has_stages(backend, groups, stages) && spec.invalid() == nullptr)
                visit(spec);
            }
}
template <class Visit>
constexpr void for_each_block_gemm_spec(Backend backend, Visit&& visit) {
  for (DType out : {DType::float32, DType::bfloat16})
    for (u8 groups : {u8{1}, u8{2}, u8{4}}) {
      const BlockGemmSpec spec{backend, out, groups, static_cast<u8>(fold_stages(backend, groups))};
      if (spec.invalid() == nullptr) visit(spec);
    }
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
// The second and the last coordinate of a block's copy.
struct WeightRows {
  i32 row;
  i32 group;  // of 32 rows
};
constexpr WeightRows weight_rows_of(i32 block, bool permuted) {
  return permuted ? WeightRows{0, 4 * block} : WeightRows{block * kScaleBlock, 0};
}
template <class Map>
constexpr Map weight_rows_map(const BlockScaledArgs& args, i64 first_row, i32 num_rows) {
  Map map{};
  map.base = args.w + first_row * args.w_stride;
  map.rank = 5;
  map.type = MapType::u8_;
  map.swizzle = Swizzle::b128;
  const i64 row = args.w_stride;
  const bool permuted = weight_rows_permuted(num_rows);
  // Elements of a pair, lanes, pairs, and 32 columns after the other.
  const i64 dims[] = {args.k, permuted ? 2 : num_rows, permuted ? 4 : 1, permuted ? 4 : 1,
                      permuted ? num_rows / 32 : 1};
  const i64 strides[] = {1, row, 8 * row, 2 * row, 32 * row};
  const i32 box[] = {kScaleBlock, permuted ? 2 : kScaleBlock, permuted ? 4 : 1, permuted ? 4 : 1,
                     permuted ? 4 : 1};
  for (i32 i = 0; i < 5; ++i) {
    map.dims[i] = dims[i];
    map.strides[i] = strides[i];
    map.box[i] = box[i];
  }
  return map;
}

template <class Map = MapDescription>
constexpr BlockGemmMaps<Map> block_gemm_maps(const BlockScaledArgs& args, i32 tile_tokens,
                                             i32 gate_rows, bool has_up_rows) {
  BlockGemmMaps<Map> maps{};
  maps.x = {.base = args.x,
            .dims = {args.k, args.num_tokens},
            .strides = {1, args.x_stride},
            .box = {kScaleBlock, tile_tokens},
            .rank = 2,
            .type = MapType::u8_,
            .swizzle = Swizzle::b128};
  maps.gate = weight_rows_map<Map>(args, 0, gate_rows);
  maps.up = weight_rows_map<Map>(args, has_up_rows ? gate_rows : 0, gate_rows);
  return maps;
}

}  // namespace deep_kernels
