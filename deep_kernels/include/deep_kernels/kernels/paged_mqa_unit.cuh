// What the paged kernels share: units of work and how their rows are posted, kv rows as operands,
// logits and where they go, the -inf fill.
#pragma once

#include "deep_kernels/contract/paged_mqa_logits.h"
#include "deep_kernels/kernels/mqa_logits_tile.cuh"
#include "deep_kernels/kernels/mqa_mx.cuh"
#include "deep_kernels/kernels/mqa_wide.cuh"
#include "deep_kernels/kernels/paged_mqa_schedule.cuh"
#include "deep_kernels/ptx/base.cuh"
#include "deep_kernels/tile/fragments.cuh"
#include "deep_kernels/tile/layout.cuh"

namespace deep_kernels::paged {

// The kernel for MXFP4 on sm90 has more to do on the ALU pipe than memory gives it time for: there
// every octet clamps on the FMA pipe.
template <PagedMqaLogitsSpec S>
inline constexpr Relus kRelus =
    S.backend == Backend::sm90 && S.format == Format::mxfp4 ? Relus::saturate : Relus::clamp;

// --- units ---------------------------------------------------------------------------------------

// Rows of a request that are computed together, and the tiles of it that this block takes.
struct Work {
  i32 request;
  i32 row;       // in the request
  i32 num_rows;  // from `row` on, at most Spec::unit_rows count
  i32 longest;   // kv tokens that the request's rows see
  TileRange tiles;
};

// Row of logits, and of weights.
DK_DEVICE i32 first_row(const PagedMqaLogitsArgs& args, const Work& work) {
  return work.request * args.next_n + work.row;
}

// A row of logits, as the math warps know it.
struct Token {
  i64 origin;     // element of logits where the row begins
  i32 length;     // kv tokens that the row sees
  i32 store_end;  // columns that are stored, -inf behind the length
  float power;    // that the logits of the token owe, see owed_power

  // Bytes before a member: one register with a token's address serves all of them.
  static constexpr u32 kLengthAt = 8;
  static constexpr u32 kStoreEndAt = 12;
  static constexpr u32 kPowerAt = 16;
};
static_assert(sizeof(Token) == 24);

DK_DEVICE void post_token(const PagedMqaLogitsArgs& args, const Work& work, i32 token,
                          Token& posted) {
  i32 length = 0;
  i32 store_end = 0;  // of a row that is not there nothing is stored
  if (token < work.num_rows) {
    // With indices a unit's rows are requests of their own.
    const bool by_request = args.indices != nullptr;
    length = load_row_length(args, by_request ? work.request + token : work.request,
                             by_request ? 0 : work.row + token);
    store_end = args.clean ? args.width : length;
  }
  ptx::store_shared_i64(ptx::smem_addr(&posted.origin),
                        (i64{first_row(args, work)} + token) * args.logits_stride);
  ptx::store_shared_i32(ptx::smem_addr(&posted.length), length);
  ptx::store_shared_i32(ptx::smem_addr(&posted.store_end), store_end);
  ptx::store_shared_f32(ptx::smem_addr(&posted.power), 1.0f);
}

template <PagedMqaLogitsSpec S>
DK_DEVICE float load_column_weight(const PagedMqaLogitsArgs& args, const Work& work, i32 column) {
  return load_weight(args, first_row(args, work) + S.token_of(column), S.head_of(column));
}

// The query row of a column.
struct QueryIndex {
  i64 request;
  i64 row;
  i64 head;
  bool exists;
};
template <PagedMqaLogitsSpec S>
DK_DEVICE QueryIndex query_index(const PagedMqaLogitsArgs& args, const Work& work, i32 column) {
  const i32 token = S.token_of(column);
  const i32 head = S.head_of(column);
  const bool by_request = args.indices != nullptr;
  return {by_request ? work.request + token : work.request, by_request ? 0 : work.row + token, head,
          token < work.num_rows && head < args.num_heads};
}
// Null for rows and heads that are not there.
template <PagedMqaLogitsSpec S>
DK_DEVICE const u8* query_row(const PagedMqaLogitsArgs& args, const Work& work, i32 column) {
  const QueryIndex at = query_index<S>(args, work, column);
  if (!at.exists) return nullptr;
  return args.q + at.request * args.q_request_stride + at.row * args.q_row_stride +
         at.head * args.q_head_stride;
}
// 1.0 for rows and heads that are not there, whose codes are zeros.
template <PagedMqaLogitsSpec S>
DK_DEVICE i32 load_column_exponents(const PagedMqaLogitsArgs& args, const Work& work, i32 column) {
  const QueryIndex at = query_index<S>(args, work, column);
  if (!at.exists) return mx_shared_exponent(kMxBias);
  return ptx::load_global(args.q_scale + at.request * args.q_scale_request_stride +
                          at.row * args.q_scale_row_stride + at.head * args.q_scale_head_stride);
}

// --- kv rows -------------------------------------------------------------------------------------

// MX: what a kv row's exponents are to a fast way that scales the scores block by block. All must
// lie between 2^-63 and 2^64: then neither the scores nor the sums over heads leave float32.
template <PagedMqaLogitsSpec S>
struct BlockScaledRow {
  static constexpr i32 kBlocks = S.head_dim / kMxBlock;
  static constexpr u32 kTopBits = kBlocks == 4 ? 0x80808080u : kBlocks == 2 ? 0x8080u : 0x80u;
  // Packed elements are expanded to 2^kExpanded times their value, see expand_e2m1.
  static constexpr i32 kExpanded = S.format == Format::mxfp4 ? -6 : 0;

  u32 exponents;

  DK_DEVICE float factor(i32 block) const {
    return ptx::float_of((exponents >> (8 * block) & 0xffu) << 23);
  }
  // What the row's logits are multiplied by; NaN asks for the exact way. The upper two bits of
  // every exponent must differ.
  DK_DEVICE float scale() const {
    constexpr u32 kUnit = static_cast<u32>(kMxBias - kExpanded) << 23;
    const bool is_fast = ((exponents ^ exponents << 1) & kTopBits) == kTopBits;
    return ptx::float_of(is_fast ? kUnit : kNotANumber);
  }
};

// Where the 16 rows of a tile lie that a warp takes, and how their blocks become operands of an
// MMA. Packed e2m1 rows are expanded on the way: a lane's word of a block is all that it brings of
// it, which makes the order that of query rows, see MxCodes.
template <PagedMqaLogitsSpec S>
struct TileRows {
  u32 rows;

  // MXFP4: address of the lane's word of row lane / 4; row 8 further lies 8 rows behind.
  DK_DEVICE u32 word_at(i32 block) const {
    const i32 lane = ptx::lane_index();
    return rows + tile::swizzled_offset<S.row_bytes()>(lane / 4, block) + 4 * (lane % 4);
  }
  DK_DEVICE u32 word(i32 r, i32 block) const {
    return static_cast<u32>(ptx::load_shared_i32(word_at(block) + 8 * r * S.row_bytes()));
  }
  DK_DEVICE void load(u32 (&a)[4], i32 block) const {
    if constexpr (S.format == Format::mxfp4) {
      DK_UNROLL
      for (i32 r = 0; r < 2; ++r) {
        u32 code[2];
        expand_e2m1(code, word(r, block));
        a[r] = code[0];
        a[2 + r] = code[1];
      }
    } else {
      tile::load_a_fragment<S.head_dim>(a, rows, block);
    }
  }
};

// Logits that the fast way has made NaN, once more the exact way. Query rows were rebased.
template <PagedMqaLogitsSpec S>
using PagedWideSum =
    WideSum<S.order(), S.head_dim, mx_code_exponent(S.format) + BlockScaledRow<S>::kExpanded>;

// --- logits --------------------------------------------------------------------------------------

// A lane's logits of one row and of kv tokens `column` and 8 further; `token` is the row's address.
template <PagedMqaLogitsSpec S>
struct LaneLogits {
  using Sum = HeadSum<S.order(), kRelus<S>>;
  using Logit = typename LogitStorage<S.logits_dtype>::Type;

  // -inf behind the row's length: what lies there may be anything.
  static DK_DEVICE void finish(float (&logit)[Sum::kRows], const float (&scale)[Sum::kRows],
                               u32 token, i32 column) {
    const i32 length = ptx::load_shared_i32(token + Token::kLengthAt);
    const float power = ptx::load_shared_f32(token + Token::kPowerAt);
    DK_UNROLL
    for (i32 i = 0; i < Sum::kRows; ++i) {
      const float value = S.is_mx() ? logit[i] * scale[i] : scaled_sum(logit[i], scale[i], power);
      logit[i] = column + 8 * i < length ? value : ptx::float_of(kNegativeInfinity);
    }
  }
  static DK_DEVICE void store(void* logits, const float (&logit)[Sum::kRows], u32 token,
                              i32 column) {
    const i32 store_end = ptx::load_shared_i32(token + Token::kStoreEndAt);
    Logit* row = static_cast<Logit*>(logits) + ptx::load_shared_i64(token) + column;
    if (!Sum::stores()) return;
    DK_UNROLL
    for (i32 i = 0; i < Sum::kRows; ++i)
      if (column + 8 * i < store_end) store_logit(row + 8 * i, logit[i]);
  }
};

// -inf into the columns behind the tiles of every row, pieces of rows dealt to `num_warps` warps of
// every block.
template <class Logit>
DK_DEVICE void fill_behind_tiles(const PagedMqaLogitsArgs& args, i32 warp, i32 num_warps) {
  constexpr i32 kPiece = 8192;  // columns
  if (!args.clean) return;
  const i32 pieces = (args.width - 1) / kPiece + 1;
  const i64 total = i64{args.num_q} * pieces;
  DK_NO_UNROLL
  for (i64 i = ptx::block_index() * num_warps + warp; i < total;
       i += ptx::num_blocks() * num_warps) {
    const i32 row = static_cast<i32>(i / pieces);
    const i32 begin = static_cast<i32>(i % pieces) * kPiece;
    const RequestRows rows = load_request(args, row / args.next_n);
    const i64 covered = i64{paged_num_tiles(rows.longest)} * kPagedTileRows;
    fill_row(static_cast<Logit*>(args.logits) + row * args.logits_stride,
             static_cast<i32>(clamp_to<i64>(covered, begin, args.width)),
             begin + min_of(kPiece, args.width - begin));
  }
}

}  // namespace deep_kernels::paged
