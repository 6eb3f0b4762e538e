// The exact way of MX formats: logits of 16 kv rows whose exponents, or those of their query rows,
// spread further than one e4m3 row holds, or leave what a float32 sum can. Every block of 32
// elements is a product of its own, scaled in float64. A logit goes this way when the fast way made
// it NaN: scales and weights that cannot be had the fast way are NaN there (see MxRow::power), so
// that the choice depends on the row and the token alone.
#pragma once

#include "deep_kernels/kernels/mqa_logits_tile.cuh"
#include "deep_kernels/kernels/mqa_mx.cuh"
#include "deep_kernels/ptx/base.cuh"
#include "deep_kernels/tile/fragments.cuh"

namespace deep_kernels {

// 16 kv rows of codes in shared memory, swizzled.
template <i32 kHeadDim>
struct WideRows {
  u32 rows;

  // A block of every row as the first operand of an MMA.
  DK_DEVICE void load(u32 (&a)[4], i32 block) const {
    tile::load_a_fragment<kHeadDim>(a, rows, block);
  }
};

// Where the operands of one warp lie, in shared memory.
template <class Rows>
struct WideOperands {
  Rows kv;              // 16 rows, see WideRows
  i32 kv_exponents[2];  // of the codes' blocks, rows lane / 4 and 8 further
  u32 query;            // rows of codes in column order, swizzled
  u32 query_exponents;  // int32 of every column
  u32 weights;          // float32 of every column, as given
};

// kCodeExponents: see mx_factor.
template <MqaColumnOrder O, i32 kHeadDim, i32 kCodeExponents>
struct WideSum {
  using Sum = HeadSum<O>;
  static constexpr i32 kBlocks = kHeadDim / kMxBlock;  // one k-step of the MMA each

  // Adds an octet of query columns to the sums over heads, as HeadSum::add does.
  template <class Rows>
  static DK_DEVICE void add_octet(double (&sum)[Sum::kSlots][2], const WideOperands<Rows>& at,
                                  i32 octet) {
    const i32 column = 8 * octet + 2 * (ptx::lane_index() % 4);
    i32 query_exponents[2];
    float weight[2];
    DK_UNROLL
    for (i32 e = 0; e < 2; ++e)
      query_exponents[e] = ptx::load_shared_i32(at.query_exponents + 4 * (column + e));
    ptx::load_shared_f32x2(weight, at.weights + 4 * column);
    double score[4] = {};
    DK_NO_UNROLL  // operands are read where they are used: the fast way's registers stay alive
        for (i32 block = 0; block < kBlocks; ++block) {
      u32 a[4];
      at.kv.load(a, block);
      u32 b[2];
      tile::load_b_fragment<kHeadDim>(b, at.query + 8 * octet * kHeadDim, block);
      float x[4] = {};
      ptx::mma_m16n8k32_e4m3(x, a, b);
      DK_UNROLL
      for (i32 i = 0; i < 4; ++i)
        score[i] += static_cast<double>(x[i]) *
                    mx_factor<kCodeExponents>(mx_exponent(at.kv_exponents[i / 2], block),
                                              mx_exponent(query_exponents[i % 2], block));
    }
    DK_UNROLL
    for (i32 i = 0; i < 4; ++i) {
      const double positive = score[i] < 0.0 ? 0.0 : score[i];  // NaN stays
      sum[Sum::kSlots == 1 ? 0 : i % 2][i / 2] += positive * static_cast<double>(weight[i % 2]);
    }
  }

  // logit[slot][i] of kv row Sum::row() + 8 i where it is NaN. operands() gives WideOperands, whose
  // loads ordinary tiles are spared. Converged.
  template <class Operands>
  static DK_DEVICE void mend(float (&logit)[Sum::kSlots][Sum::kRows], i32 set,
                             Operands&& operands) {
    bool broken = false;
    DK_UNROLL
    for (i32 slot = 0; slot < Sum::kSlots; ++slot) {
      DK_UNROLL
      for (i32 i = 0; i < Sum::kRows; ++i) broken = broken || logit[slot][i] != logit[slot][i];
    }
    if (!ptx::any(broken)) return;
    const auto at = operands();
    double sum[Sum::kSlots][2] = {};
    DK_NO_UNROLL
    for (i32 i = 0; i < O.octets_per_token_set(); ++i)
      add_octet(sum, at, set * O.octets_per_token_set() + i);
    double kept[Sum::kSlots][Sum::kRows];
    Sum::join(kept, sum);
    DK_UNROLL
    for (i32 slot = 0; slot < Sum::kSlots; ++slot) {
      DK_UNROLL
      for (i32 i = 0; i < Sum::kRows; ++i)
        if (logit[slot][i] != logit[slot][i]) logit[slot][i] = static_cast<float>(kept[slot][i]);
    }
  }
};

// With codes that mqa_rebase and the kernels' query rows have.
template <MqaLogitsSpec S>
using RebasedWideSum = WideSum<S.order(), S.head_dim, 2 * mx_code_exponent(S.format)>;

}  // namespace deep_kernels
