// What the MQA logits kernels share once a tile of scores [rows of kv, 128 query rows] lies in MMA
// accumulators: weights in registers, the sum over heads, scaling, stores, and the -inf fill.
//
// Accumulator order of both MMAs, per lane with g = lane / 4, t = lane % 4 and octet j:
//   x[4j + 2r + e] is kv row g + 8r, query column 8j + 2t + e.
#pragma once

#include "deep_kernels/contract/mqa_logits.h"
#include "deep_kernels/kernels/mqa_mx.cuh"
#include "deep_kernels/kernels/mqa_schedule.cuh"
#include "deep_kernels/ptx/base.cuh"

namespace deep_kernels {

inline constexpr u32 kNegativeInfinity = 0xff800000u;

DK_DEVICE void store_logit(float* address, float value) { ptx::store_global(address, value); }
DK_DEVICE void store_logit(u16* address, float value) {
  ptx::store_global(address, ptx::bf16_of(value));
}

// relu(x) costs one ALU instruction as max(x, 0). On Hopper every third octet clamps by mul.sat
// instead, on the FMA pipe: x * 2^-25 lies in [-1, 1] for every score (|x| <= 128 * 448^2 < 2^25),
// and its weights carry 2^25. Same bits: both factors are powers of two. Source: measured on an
// H200 in the feasibility study, +3 to 4% against max alone.
inline constexpr float kSatScore = 0x1p-25f;
inline constexpr float kSatWeight = 0x1p25f;
enum class Relu { clamp, saturate, fold };          // fold: the magnitude, see Reduction
enum class Relus { clamp, saturate, mixed, fold };  // of all octets
constexpr Relu relu_of(Relus relus, i32 octet) {
  if (relus == Relus::fold) return Relu::fold;
  if (relus == Relus::mixed) return octet % 3 == 0 ? Relu::saturate : Relu::clamp;
  return relus == Relus::saturate ? Relu::saturate : Relu::clamp;
}
// What the weights of an octet's columns carry for it.
constexpr float octet_factor(Relus relus, i32 octet) {
  const Relu relu = relu_of(relus, octet);
  return relu == Relu::clamp ? 1.0f : relu == Relu::fold ? 0.5f : kSatWeight;
}

// Args, here and below: MqaLogitsArgs or PagedMqaLogitsArgs.
template <class Args>
DK_DEVICE float load_weight(const Args& args, i32 row, i32 head) {
  if (row >= args.num_q || head >= args.num_heads) return 0.0f;
  const i64 index = row * args.weights_stride + head;
  switch (args.weights_dtype) {
    case DType::float32:
      return ptx::load_global(static_cast<const float*>(args.weights) + index);
    case DType::bfloat16:
      return ptx::float_of_bf16(ptx::load_global(static_cast<const u16*>(args.weights) + index));
    case DType::float16:
      break;
  }
  return ptx::float_of_f16(ptx::load_global(static_cast<const u16*>(args.weights) + index));
}

// Weights of 2^95 and more could leave float32 in the sum over heads (a factor below 2^25 * 128) or
// with kSatWeight, weights below 2^-90 lose bits in it. A token whose greatest weight is such a one
// computes with all its weights divided by a power of two, which its logits owe: 1 for every
// ordinary token. Per token, so that no logit depends on what else a call holds.
inline constexpr i32 kMinWeightExponent = -90;
inline constexpr i32 kMaxWeightExponent = 94;
inline constexpr i32 kNoExponent = -128;
// kNoExponent for zeros, infinities and NaNs, which no power of two changes; denormals: -127.
DK_DEVICE i32 exponent_of(float value) {
  const u32 magnitude = ptx::bits_of(value) & 0x7fffffffu;
  const i32 biased = static_cast<i32>(magnitude >> 23);
  return magnitude == 0 || biased == 255 ? kNoExponent : biased - 127;
}
DK_DEVICE bool is_extreme(i32 exponent) {
  return exponent > kMaxWeightExponent ||
         (exponent < kMinWeightExponent && exponent != kNoExponent);
}
// Whether a weight calls for a look at its whole token.
DK_DEVICE bool is_extreme_weight(float weight) { return is_extreme(exponent_of(weight)); }
// For a token whose greatest weight has this exponent.
DK_DEVICE float power_of(i32 greatest) {
  if (!is_extreme(greatest)) return 1.0f;
  // Up to 126 either way: there the reciprocal is a normal number too.
  return ptx::float_of(static_cast<u32>(clamp_to(greatest, -126, 126) + 127) << 23);
}
template <class Args>
DK_DEVICE float owed_power(const Args& args, i32 row) {
  i32 greatest = kNoExponent;
  DK_NO_UNROLL
  for (i32 head = 0; head < args.num_heads; ++head)
    greatest = max_of(greatest, exponent_of(load_weight(args, row, head)));
  return power_of(greatest);
}
DK_DEVICE float reciprocal(float power) {
  return ptx::float_of((254u << 23) - ptx::bits_of(power));
}
// A logit from its sum over heads. Neither product leaves float32 before the logit does.
DK_DEVICE float scaled_sum(float sum, float scale, float power) {
  const bool opposite = (ptx::abs(scale) < 1.0f) == (power > 1.0f);
  return opposite ? sum * (scale * power) : sum * scale * power;
}

// MX formats: a weight times the power of its query row. NaN, which asks for the exact way, where
// the product leaves the range above.
DK_DEVICE float powered_weight(float weight, float power) {
  const float product = weight * power;
  const i32 exponent = exponent_of(product);
  const bool is_lost = exponent == kNoExponent && exponent_of(weight) != kNoExponent;
  return is_lost || is_extreme(exponent) ? ptx::float_of(kNotANumber) : product;
}
// Exponents of a query row; 1.0 for padding heads, whose codes are zeros.
DK_DEVICE i32 load_query_exponents(const MqaLogitsArgs& args, i32 row, i32 head) {
  if (row >= args.num_q || head >= args.num_heads) return mx_shared_exponent(kMxBias);
  return ptx::load_global(args.q_exponents + row * args.q_exponents_token_stride +
                          head * args.q_exponents_head_stride);
}
DK_DEVICE i32 load_kv_exponents(const MqaLogitsArgs& args, i32 row) {
  return row < args.num_kv ? ptx::load_global(args.kv_exponents + row) : 0;
}

// How the four lanes that share a kv row split and join the heads of their tokens.
template <MqaColumnOrder O, Relus kRelus = Relus::clamp>
struct HeadSum {
  static constexpr i32 kOctets = O.num_columns / 8;
  // A token set is what consecutive octets share: all tokens of the tile, or half of them at 8
  // heads and 128 columns.
  static constexpr i32 kSets = kOctets / O.octets_per_token_set();
  // Lanes that share a token's heads.
  static constexpr i32 kLanes = O.tokens_per_octet() >= 4 ? 1 : 4 / O.tokens_per_octet();
  // Tokens of one set whose columns a lane holds: its slots. 2 where every column is another token.
  static constexpr i32 kSlots = O.tokens_per_octet() == 8 ? 2 : 1;
  // Kv rows a lane keeps after joining with its neighbours: both, or one of them.
  static constexpr i32 kRows = kLanes == 1 ? 2 : 1;

  // The lane's tokens inside the tile: the first, and how much further the others are.
  static DK_DEVICE i32 first_token() { return O.token_of(2 * (ptx::lane_index() % 4)); }
  static constexpr i32 further(i32 set, i32 slot) { return set * O.tokens_per_octet() + slot; }
  // First kv row of the 16-row MMA tile that the lane keeps; the second, if any, is 8 further.
  static DK_DEVICE i32 row() {
    const i32 lane = ptx::lane_index();
    return lane / 4 + (kRows == 1 ? 8 * (lane & 1) : 0);
  }
  // Where four lanes share a token two of them end up with the same sum; one of them stores it.
  static DK_DEVICE bool stores() { return kLanes < 4 || ptx::lane_index() % 4 < 2; }

  // sum[slot][r] += weights times relu of one octet's four scores x[2r + e], or times their
  // magnitude. With kFirst it begins the sum.
  template <Relu kRelu, bool kFirst>
  static DK_DEVICE void add(float (&sum)[kSlots][2], const float* x, const float* weight) {
    DK_UNROLL
    for (i32 e = 0; e < 2; ++e) {
      DK_UNROLL
      for (i32 r = 0; r < 2; ++r) {
        float& total = sum[kSlots == 1 ? 0 : e][r];
        const float score = x[2 * r + e];
        const float part = kRelu == Relu::saturate ? ptx::mul_sat(score, kSatScore)
                           : kRelu == Relu::clamp  ? ptx::max(score, 0.0f)
                                                   : ptx::abs(score);
        const bool begins = kFirst && (kSlots > 1 || e == 0);
        total = begins ? part * weight[e] : ptx::fma(part, weight[e], total);
      }
    }
  }
  // All octets of a token set.
  template <i32 kSet, i32 kOctet = kSet * O.octets_per_token_set()>
  static DK_DEVICE void add_set(float (&sum)[kSlots][2], const float* x,
                                const float (&weight)[2 * kOctets]) {
    if constexpr (kOctet < (kSet + 1) * O.octets_per_token_set()) {
      constexpr bool kFirst = kOctet % O.octets_per_token_set() == 0;
      add<relu_of(kRelus, kOctet), kFirst>(sum, x + 4 * kOctet, weight + 2 * kOctet);
      add_set<kSet, kOctet + 1>(sum, x, weight);
    }
  }

  // Joins the lanes of a token: kept[slot][i] belongs to kv row row() + 8 i. Converged. Number:
  // float or double.
  template <class Number>
  static DK_DEVICE void join(Number (&kept)[kSlots][kRows], const Number (&sum)[kSlots][2]) {
    if constexpr (kRows == 2) {
      DK_UNROLL
      for (i32 slot = 0; slot < kSlots; ++slot) {
        kept[slot][0] = sum[slot][0];
        kept[slot][1] = sum[slot][1];
      }
    } else {
      const bool odd = (ptx::lane_index() & 1) != 0;
      const Number mine = odd ? sum[0][1] : sum[0][0];
      const Number other = odd ? sum[0][0] : sum[0][1];
      kept[0][0] = mine + ptx::shuffle_xor(other, 1);
      if constexpr (kLanes == 4) kept[0][0] += ptx::shuffle_xor(kept[0][0], 2);
    }
  }
};

// What the edge tiles of a row have to know, in kv tokens.
struct RowEdge {
  i32 begin;  // window
  i32 end;
  i32 first;  // kv tokens that have a column, [first, last); none for a row that is not there
  i32 last;
};
DK_DEVICE RowEdge row_edge(const MqaLogitsArgs& args, MqaWindow window, i32 row) {
  const i32 first = args.compressed ? window.begin : 0;
  const i64 last = row < args.num_q ? i64{first} + args.width : first;
  return {window.begin, window.end, first, static_cast<i32>(min_of<i64>(last, 0x7fffffff))};
}
// Element of logits where kv token 0 of the row would be; before the row itself when compressed.
DK_DEVICE i64 row_origin(const MqaLogitsArgs& args, MqaWindow window, i32 row) {
  return row * args.logits_stride - (args.compressed ? window.begin : 0);
}
// `address` is where kv token `token` of the row goes.
template <bool kClean, class Logit>
DK_DEVICE void store_edge(Logit* address, i32 token, RowEdge edge, float value) {
  if (token < edge.first || token >= edge.last) return;
  if (token >= edge.begin && token < edge.end)
    store_logit(address, value);
  else if (kClean)
    store_logit(address, ptx::float_of(kNegativeInfinity));
}

template <class Logit>
DK_DEVICE constexpr u32 negative_infinity_pair() {
  return sizeof(Logit) == 4 ? kNegativeInfinity : kNegativeInfinity >> 16 | kNegativeInfinity;
}
// -inf into [begin, end) of a row, one warp: single stores up to 16-byte alignment, then vectors.
template <class Logit>
DK_DEVICE void fill_row(Logit* row, i32 begin, i32 end) {
  constexpr i32 kPerStore = 16 / sizeof(Logit);
  const i32 lane = ptx::lane_index();
  if (begin >= end) return;
  const i32 lead = static_cast<i32>(ptx::bytes_to_aligned(row + begin, 16) / sizeof(Logit));
  const i32 first = min_of(begin + lead, end);
  const i32 last = first + (end - first) / kPerStore * kPerStore;
  if (begin + lane < first) store_logit(row + begin + lane, ptx::float_of(kNegativeInfinity));
  constexpr u32 kPair = negative_infinity_pair<Logit>();
  DK_NO_UNROLL
  for (i32 column = first + lane * kPerStore; column < last; column += 32 * kPerStore)
    ptx::store_global_x4(row + column, kPair, kPair, kPair, kPair);
  if (last + lane < end) store_logit(row + last + lane, ptx::float_of(kNegativeInfinity));
}

// -inf into every column that no tile touches, rows dealt to `num_warps` warps. Converged warps.
template <MqaLogitsSpec S, class Logit>
DK_DEVICE void fill_untouched(const MqaLogitsArgs& args, i32 warp, i32 num_warps) {
  constexpr i32 kTokens = S.tokens_per_block();
  using Scan = SpanScan<kTokens>;
  const i32 num_blocks = ceil_div(args.num_q, kTokens);
  DK_NO_UNROLL
  for (i32 block = ptx::block_index(); block < num_blocks; block += ptx::num_blocks()) {
    MqaSpan span = Scan::load(args, block);  // of this and maybe further blocks: take lane 0's
    span.begin = ptx::shuffle(span.begin, 0);
    span.num_chunks = ptx::shuffle(span.num_chunks, 0);
    const i32 end = min_of((block + 1) * kTokens, args.num_q);
    DK_NO_UNROLL
    for (i32 row = block * kTokens + warp; row < end; row += num_warps) {
      const MqaWindow window = load_window(args, row, window_limit(args));
      const MqaFill fill = mqa_fill(span, args.compressed ? window.begin : 0, args.width);
      Logit* origin = static_cast<Logit*>(args.logits) + row * args.logits_stride;
      fill_row(origin, 0, fill.left);
      fill_row(origin, fill.right, args.width);
    }
  }
}

// float32 or the bits of bfloat16.
template <DType kType>
struct LogitStorage {
  using Type = u16;
};
template <>
struct LogitStorage<DType::float32> {
  using Type = float;
};

}  // namespace deep_kernels
