// The pre-pass of MX formats on cards without block scales: kv rows as e4m3 codes with one exponent
// each, see MqaRebaseArgs. A lane takes a block of 32 elements, a warp 16 rows.
#pragma once

#include "deep_kernels/contract/mqa_logits.h"
#include "deep_kernels/kernels/mqa_mx.cuh"
#include "deep_kernels/ptx/base.cuh"

namespace deep_kernels {

template <MqaRebaseSpec S>
DK_DEVICE void mqa_rebase(const MqaRebaseArgs& args) {
  static_assert(S.invalid() == nullptr);
  constexpr i32 kBlocks = S.head_dim / kMxBlock;             // lanes that share a row
  constexpr i32 kRows = min_of(32 / kBlocks, kMqaWideRows);  // of one step
  const i32 lane = ptx::lane_index();
  const i32 block = lane % kBlocks;
  const i32 first =
      (ptx::block_index() * (S.num_threads() / 32) + ptx::warp_index()) * kMqaWideRows;
  if (first >= args.num_rows) return;  // the whole warp
  bool any_wide = false;
  DK_UNROLL
  for (i32 step = 0; step < kMqaWideRows / kRows; ++step) {
    const i32 in_step = lane / kBlocks;
    const i32 row = first + step * kRows + in_step;
    const bool exists = in_step < kRows && row < args.num_rows;
    MxCodes<S.format> codes{};
    i32 given = 0;
    if (exists) {
      given = ptx::load_global(args.exponents + row * args.exponents_stride);
      const u8* from = args.values + row * args.values_stride + block * mx_block_bytes(S.format);
      codes.load([&](u32(&bytes)[4], i32 offset) { ptx::load_global_x4(bytes, from + offset); });
    }
    MxRow<S.format> found;
    found.add(mx_exponent(given, block), codes.is_zero());
    found.template join<kBlocks>();
    if (exists) {
      codes.rebase(found.shift(mx_exponent(given, block)));
      u8* to = args.codes + i64{row} * S.head_dim + block * kMxBlock;
      ptx::store_global_x4(to, codes.word[0], codes.word[1], codes.word[2], codes.word[3]);
      ptx::store_global_x4(to + 16, codes.word[4], codes.word[5], codes.word[6], codes.word[7]);
      const float power = found.power();
      any_wide = any_wide || power != power;
      if (block == 0) {
        ptx::store_global(args.scale + row, power);
        ptx::store_global(args.code_exponents + row, found.exponents(given));
      }
    }
  }
  any_wide = ptx::any(any_wide);
  if (lane == 0) ptx::store_global(args.wide + first / kMqaWideRows, static_cast<i32>(any_wide));
}

}  // namespace deep_kernels
