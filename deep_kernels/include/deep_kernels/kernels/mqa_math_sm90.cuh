// The math warpgroups of the dense Hopper kernel: scores by wgmma, head sums in registers.
#pragma once

#include "deep_kernels/kernels/mqa_logits_tile.cuh"
#include "deep_kernels/kernels/mqa_mx.cuh"
#include "deep_kernels/kernels/mqa_unit_sm90.cuh"
#include "deep_kernels/kernels/mqa_wide.cuh"
#include "deep_kernels/ptx/sm90.cuh"
#include "deep_kernels/tile/layout.cuh"
#include "deep_kernels/tile/pipeline.cuh"

namespace deep_kernels::mqa_sm90 {

// A tile's reduction runs while the tensor cores of the other warpgroups use the register file, and
// is held up where neighbouring instructions read the same one of its two banks more than twice. A
// score's bank is given (the parity of its register), ptxas orders the clamps and the FMAs, and
// lets the clamps run ahead by a lead of its own: 2 modulo 4 is good, 0 is bad, 10% between them.
// What tips the lead is when the scales are read: chosen by counting conflicts in the machine code
// (scripts/bank_conflicts.py, NVRTC 13.0); measurements in benchmarks/notes_mqa.md.
enum class ScaleLoad { before, meanwhile, after };  // than the tensor cores work on the tile
constexpr ScaleLoad scale_load(const MqaLogitsSpec& spec) {
  if (spec.is_mx()) return ScaleLoad::after;
  return spec.logits_dtype == DType::bfloat16 ? ScaleLoad::meanwhile : ScaleLoad::before;
}

template <MqaLogitsSpec S>
struct Math {
  using Sum = HeadSum<S.order(), kRelus<S>>;
  using Logit = typename LogitStorage<S.logits_dtype>::Type;
  using Descriptor = tile::KMajorDescriptor<S.head_dim>;
  using Scores = float[S.group_rows() / 2];
  static constexpr i32 kTiles = S.kv_stage_rows() / kTileRows;
  static constexpr ScaleLoad kScaleLoad = scale_load(S);

  const MqaLogitsArgs& args;
  Smem<S>& smem;
  i32 group;
  i32 tile_row;          // kv row inside a tile that this lane keeps first
  i32 slot;              // of the unit
  bool has_exact_token;  // MX: one of the group's weights cannot be had the fast way
  u32 query_low;         // descriptor of the group's query rows
  u32 kv_low;            // descriptor of kv stage 0
  float weight[32];
  float digit_scale;  // folded: of the lane's first digit column
  // Where kv row tile_row of the coming stage goes. Several tokens leave no registers for several
  // pointers: there they are made anew for every tile.
  static constexpr bool kKeepsPointer = Sum::kSlots == 1;
  Logit* out;
  tile::Ring<S.kv_stages> stages;

  // Address of the lane's first Token, others of its group behind it.
  DK_DEVICE u32 first_token() const {
    return ptx::smem_addr(
        &smem.unit[slot].token[group * S.tokens_per_group() + Sum::first_token()]);
  }
  DK_DEVICE Logit* row_pointer(u32 token, i32 kv_row) const {
    return static_cast<Logit*>(args.logits) + ptx::load_shared_i64(token) + kv_row + tile_row;
  }
  // Starts the scores of one tile: x is valid after a wait.
  DK_DEVICE void start_score(Scores& x, u32 kv) const {
    ptx::wgmma_fence();
    DK_UNROLL
    for (i32 k = 0; k < S.head_dim / 32; ++k) {
      const u64 a = Descriptor::make(kv + 2 * k);
      const u64 b = Descriptor::make(query_low + 2 * k);
      if constexpr (S.is_folded())
        ptx::wgmma_m64n136k32_e4m3(x, a, b, k > 0);
      else
        ptx::wgmma_m64n128k32_e4m3(x, a, b, k > 0);
    }
    ptx::wgmma_commit_group();
  }
  // The lane's part of the sums over heads of a token set.
  template <i32 kSet>
  DK_DEVICE void sum_heads(float (&sum)[Sum::kSlots][2], const Scores& x) const {
    Sum::template add_set<kSet>(sum, x, weight);
    if constexpr (S.is_folded()) {
      DK_UNROLL
      for (i32 r = 0; r < 2; ++r) {
        const float* digit = x + kMqaGroupRows / 2 + 2 * r;
        sum[0][r] = ptx::fma(ptx::fma(digit[1], 1.0f / 16, digit[0]), digit_scale, sum[0][r]);
      }
    }
  }
  // Where the logits of a token go that belong to kv row tile_row of the stage.
  DK_DEVICE Logit* stage_pointer(u32 token, i32 kv_row) const {
    if constexpr (kKeepsPointer)
      return out;
    else
      return row_pointer(token, kv_row);
  }
  // Address of the kv scale that belongs to the lane's row i of a tile.
  static DK_DEVICE u32 scale_at(u32 scales, i32 tile, i32 i) {
    return scales + 4 * (tile * kTileRows + 8 * i);
  }
  static DK_DEVICE void load_scales(float (&scale)[Sum::kRows], u32 scales, i32 tile) {
    DK_UNROLL
    for (i32 i = 0; i < Sum::kRows; ++i) scale[i] = ptx::load_shared_f32(scale_at(scales, tile, i));
  }
  static DK_DEVICE i32 row_offset(i32 tile, i32 i) { return tile * kTileRows + 8 * i; }

  // Sums and stores the token sets of a tile, which lies inside every window, one after the other.
  template <i32 kSet = 0>
  DK_DEVICE void reduce(const Scores& x, const float (&scale)[Sum::kRows], i32 tile,
                        i32 kv_row) const {
    if constexpr (kSet < Sum::kSets) {
      float sum[Sum::kSlots][2];
      float kept[Sum::kSlots][Sum::kRows];
      sum_heads<kSet>(sum, x);
      Sum::join(kept, sum);
      DK_UNROLL
      for (i32 slot = 0; slot < Sum::kSlots; ++slot) {
        Logit* row =
            stage_pointer(first_token() + sizeof(Token) * Sum::further(kSet, slot), kv_row);
        DK_UNROLL
        for (i32 i = 0; i < Sum::kRows; ++i)
          if (Sum::stores()) store_logit(row + row_offset(tile, i), kept[slot][i] * scale[i]);
      }
      reduce<kSet + 1>(x, scale, tile, kv_row);
    }
  }

  DK_DEVICE WideOperands<WideRows<S.head_dim>> wide_operands(i32 tile, i32 kv_row) const {
    const i32 first = tile * kTileRows + tile_row / 16 * 16;  // of the warp's rows
    WideOperands<WideRows<S.head_dim>> at{
        .kv = {ptx::smem_addr(&smem.kv[stages.slot][0]) + first * S.head_dim},
        .kv_exponents = {},
        .query = ptx::smem_addr(&smem.query[slot][group][0]),
        .query_exponents = ptx::smem_addr(&smem.mx.query_exponents[slot][group][0]),
        .weights = ptx::smem_addr(&smem.weights[slot][group][0])};
    DK_UNROLL
    for (i32 i = 0; i < 2; ++i)
      at.kv_exponents[i] = load_kv_exponents(args, kv_row + first + ptx::lane_index() / 4 + 8 * i);
    return at;
  }

  // The same for a tile that may cross the edges of windows, or holds what the fast way cannot do.
  // All sets are summed before the first is looked at: then the scores' registers are free.
  DK_DEVICE void reduce_edge(const Scores& x, u32 scales, i32 tile, i32 kv_row) const {
    float logit[Sum::kSets][Sum::kSlots][Sum::kRows];
    sum_edge(logit, x, scales, tile);
    DK_UNROLL
    for (i32 set = 0; set < Sum::kSets; ++set) {
      if constexpr (S.is_mx())
        RebasedWideSum<S>::mend(logit[set], set, [&] { return wide_operands(tile, kv_row); });
      DK_UNROLL
      for (i32 slot = 0; slot < Sum::kSlots; ++slot) {
        const u32 token = first_token() + sizeof(Token) * Sum::further(set, slot);
        Logit* row = stage_pointer(token, kv_row);
        DK_UNROLL
        for (i32 i = 0; i < Sum::kRows; ++i) {
          const i32 offset = row_offset(tile, i);
          if (Sum::stores())
            store_edge<S.clean != Clean::off>(row + offset, kv_row + tile_row + offset,
                                              load_edge(token + Token::kEdgeAt),
                                              logit[set][slot][i]);
        }
      }
    }
  }
  template <i32 kSet = 0>
  DK_DEVICE void sum_edge(float (&logit)[Sum::kSets][Sum::kSlots][Sum::kRows], const Scores& x,
                          u32 scales, i32 tile) const {
    if constexpr (kSet < Sum::kSets) {
      float sum[Sum::kSlots][2];
      sum_heads<kSet>(sum, x);
      Sum::join(logit[kSet], sum);
      DK_UNROLL
      for (i32 slot = 0; slot < Sum::kSlots; ++slot) {
        const u32 token = first_token() + sizeof(Token) * Sum::further(kSet, slot);
        DK_UNROLL
        for (i32 i = 0; i < Sum::kRows; ++i)
          logit[kSet][slot][i] =
              scaled_sum(logit[kSet][slot][i], ptx::load_shared_f32(scale_at(scales, tile, i)),
                         ptx::load_shared_f32(token + Token::kPowerAt));
      }
      sum_edge<kSet + 1>(logit, x, scales, tile);
    }
  }

  // Rows and scales are read: the stage may be refilled.
  DK_DEVICE void release_stage() const {
    ptx::sync_warp();
    if (ptx::lane_index() == 0) ptx::mbarrier_arrive(ptx::smem_addr(&smem.kv_drained[stages.slot]));
  }
  // Scores, head sums and stores of 64 kv rows.
  template <bool kEdge>
  DK_DEVICE void one_tile(i32 tile, u32 kv, u32 scales, i32 kv_row) const {
    Scores x;
    float scale[Sum::kRows];
    if constexpr (!kEdge && kScaleLoad == ScaleLoad::before) load_scales(scale, scales, tile);
    start_score(x, kv + tile * (kTileRows * S.head_dim >> 4));
    if constexpr (!kEdge && kScaleLoad == ScaleLoad::meanwhile) load_scales(scale, scales, tile);
    ptx::wgmma_wait_group<0>(x);
    if constexpr (!kEdge && kScaleLoad == ScaleLoad::after) load_scales(scale, scales, tile);
    if constexpr (kEdge)  // scales are read where they are used: the edge tests need registers
      reduce_edge(x, scales, tile, kv_row);
    else
      reduce(x, scale, tile, kv_row);
    if (tile == kTiles - 1) release_stage();
  }

  DK_DEVICE void wait_for_stage() const {
    ptx::mbarrier_wait(ptx::smem_addr(&smem.kv_filled[stages.slot]), stages.parity);
  }
  template <bool kEdge>
  DK_DEVICE void stage(i32 kv_row) {
    if constexpr (!S.is_mx()) wait_for_stage();
    const u32 scales = ptx::smem_addr(&smem.kv_scale[stages.slot][0]) + 4 * tile_row;
    const u32 kv = kv_low + stages.slot * (S.kv_stage_bytes() >> 4);
    if constexpr (kEdge) {  // few of them: one copy of the tile, which compiles faster
      DK_NO_UNROLL
      for (i32 tile = 0; tile < kTiles; ++tile) one_tile<kEdge>(tile, kv, scales, kv_row);
    } else {
      DK_UNROLL
      for (i32 tile = 0; tile < kTiles; ++tile) one_tile<kEdge>(tile, kv, scales, kv_row);
    }
    stages.next();
    if constexpr (kKeepsPointer) out += S.kv_stage_rows();
  }

  // No window of the group reaches the coming stage: -inf, a quarter of its columns per warp.
  DK_DEVICE void skip_stage(i32 kv_row) {
    if constexpr (!S.is_mx()) wait_for_stage();
    release_stage();
    if constexpr (S.clean != Clean::off) {
      constexpr i32 kColumns = S.kv_stage_rows() / 4;
      const i32 begin = kv_row + ptx::warp_index() % 4 * kColumns;
      DK_NO_UNROLL
      for (i32 i = 0; i < S.tokens_per_group(); ++i) {
        const u32 token = ptx::smem_addr(&smem.unit[slot].token[group * S.tokens_per_group() + i]);
        const RowEdge edge = load_edge(token + Token::kEdgeAt);
        fill_row(static_cast<Logit*>(args.logits) + ptx::load_shared_i64(token),
                 max_of(begin, edge.first), min_of(begin + kColumns, edge.last));
      }
    }
    stages.next();
    if constexpr (kKeepsPointer) out += S.kv_stage_rows();
  }

  // MX: the group's query rows as e4m3 rows with one exponent each, which goes into the weights.
  // Thread i of the group takes column i.
  DK_DEVICE void rebase_queries() const {
    constexpr i32 kBlocks = S.head_dim / kMxBlock;
    constexpr i32 kChunks = mx_block_bytes(S.format) / 16;
    constexpr bool kExpands = S.format == Format::mxfp4;
    const i32 column = ptx::thread_index() % kMqaGroupRows;
    const u32 rows = ptx::smem_addr(&smem.query[slot][group][0]);
    const u32 barrier = static_cast<u32>(Barrier::group_rebased) + group;
    const u32 exponents = ptx::smem_addr(&smem.mx.query_exponents[slot][group][column]);
    const i32 given = ptx::load_shared_i32(exponents);
    MxCodes<S.format> codes[kBlocks];
    MxRow<S.format> found;
    DK_UNROLL
    for (i32 block = 0; block < kBlocks; ++block) {
      codes[block].load([&](u32(&bytes)[4], i32 offset) {
        ptx::load_shared_x4(bytes, rows + tile::swizzled_offset<S.query_row_bytes()>(
                                              column, block * kChunks + offset / 16));
      });
      found.add(mx_exponent(given, block), codes[block].is_zero());
    }
    if constexpr (kExpands) ptx::barrier_sync(barrier, kMqaGroupRows);  // all packed rows are read
    DK_UNROLL
    for (i32 block = 0; block < kBlocks; ++block) {
      const i32 shift = found.shift(mx_exponent(given, block));
      if (!kExpands && shift == 0) continue;
      codes[block].rebase(shift);
      DK_UNROLL
      for (i32 half = 0; half < 2; ++half) {
        const u32* word = codes[block].word + 4 * half;
        ptx::store_shared_x4(rows + tile::swizzled_offset<S.head_dim>(column, 2 * block + half),
                             word[0], word[1], word[2], word[3]);
      }
    }
    ptx::store_shared_i32(exponents, found.exponents(given));
    const float weight = ptx::load_shared_f32(ptx::smem_addr(&smem.weights[slot][group][column]));
    ptx::store_shared_f32(ptx::smem_addr(&smem.mx.powered[slot][group][column]),
                          powered_weight(weight, found.power()) * column_factor<S>(column));
    ptx::fence_proxy_async();
    ptx::barrier_sync(barrier, kMqaGroupRows);
  }
  // The weights that the fast way takes, of the lane's first column.
  DK_DEVICE u32 fast_weights() const {
    const i32 column = 2 * (ptx::lane_index() % 4);
    if constexpr (S.is_mx())
      return ptx::smem_addr(&smem.mx.powered[slot][group][column]);
    else
      return ptx::smem_addr(&smem.weights[slot][group][column]);
  }

  DK_DEVICE void open_unit(i32 kv_row) {
    if constexpr (S.is_mx()) rebase_queries();
    query_low = Descriptor::low(ptx::smem_addr(&smem.query[slot][group][0]));
    const u32 weights = fast_weights();
    DK_UNROLL
    for (i32 octet = 0; octet < 16; ++octet) {
      float pair[2];
      ptx::load_shared_f32x2(pair, weights + 4 * 8 * octet);
      weight[2 * octet] = pair[0];
      weight[2 * octet + 1] = pair[1];
    }
    if constexpr (S.is_mx()) {  // four lanes hold all columns of the group
      bool is_nan = false;
      DK_UNROLL
      for (i32 i = 0; i < 32; ++i) is_nan = is_nan || weight[i] != weight[i];
      has_exact_token = ptx::any(is_nan);
    }
    if constexpr (S.is_folded()) {
      // Digit columns 2t, 2t + 1 of lane t; behind the last digit stand zeros.
      const bool is_later = (ptx::lane_index() & 1) != 0;
      digit_scale = ptx::load_shared_f32(first_token() + Token::kFoldedScaleAt) *
                    (is_later ? 1.0f / 256 : 1.0f);
    }
    if constexpr (kKeepsPointer) out = row_pointer(first_token(), kv_row);
  }
  // Whether the coming stage lies inside every window of the group, and can be had the fast way.
  DK_DEVICE bool is_full(const Unit<S.tokens_per_block()>& unit, i32 kv_row) const {
    if constexpr (S.is_mx()) {
      const i32 groups = ptx::load_shared_i32(ptx::smem_addr(&smem.mx.full_groups[stages.slot]));
      return (groups >> group & 1) != 0 && !has_exact_token;
    } else {
      // Read for every stage: registers are scarcer than these loads.
      const i32 full_begin = ptx::load_shared_i32(ptx::smem_addr(&unit.full_begin[group]));
      const i32 full_end = ptx::load_shared_i32(ptx::smem_addr(&unit.full_end[group]));
      return kv_row >= full_begin && kv_row + S.kv_stage_rows() <= full_end;
    }
  }

  // Whether some window of the group reaches the coming stage.
  DK_DEVICE bool is_reached(const Unit<S.tokens_per_block()>& unit, i32 kv_row) const {
    return kv_row < ptx::load_shared_i32(ptx::smem_addr(&unit.reach_end[group])) &&
           kv_row + S.kv_stage_rows() >
               ptx::load_shared_i32(ptx::smem_addr(&unit.reach_begin[group]));
  }

  DK_DEVICE void run() {
    kv_low = Descriptor::low(ptx::smem_addr(&smem.kv[0][0]));
    tile_row = ptx::warp_index() % 4 * 16 + Sum::row();
    stages = tile::Ring<S.kv_stages>::drainer();
    auto units = tile::Ring<S.query_slots()>::drainer();
    DK_NO_UNROLL
    for (;; units.next()) {
      ptx::mbarrier_wait(ptx::smem_addr(&smem.query_filled[units.slot]), units.parity);
      const auto& unit = smem.unit[units.slot];
      i32 num_stages = ptx::load_shared_i32(ptx::smem_addr(&unit.num_stages));
      if (num_stages == 0) return;
      i32 kv_row = ptx::load_shared_i32(ptx::smem_addr(&unit.kv_begin));
      slot = units.slot;
      open_unit(kv_row);
      DK_NO_UNROLL
      for (; num_stages > 0; --num_stages, kv_row += S.kv_stage_rows()) {
        if constexpr (S.is_mx()) wait_for_stage();  // it says whether it is full
        if (is_full(unit, kv_row))
          stage<false>(kv_row);
        else if (is_reached(unit, kv_row))
          stage<true>(kv_row);
        else
          skip_stage(kv_row);
      }
      ptx::sync_warp();
      if (ptx::lane_index() == 0)
        ptx::mbarrier_arrive(ptx::smem_addr(&smem.unit_drained[units.slot]));
    }
  }
};

}  // namespace deep_kernels::mqa_sm90
