// Contract of the MQA logits ("lightning indexer") op:
//
//   logits[i, j] = sum_h weights[i, h] * relu(dot(q[i, h, :], kv[j, :])) * kv_scale[j]
//
// for start[i] <= j < end[i]; with MX formats the scales stand inside the dot product, one for
// every 32 elements. Host, kernels, CPU backend and tests read the same structs and the same
// arithmetic here: Args, Spec, Maps, windows, and how work is cut over the SMs.
#pragma once

#include "deep_kernels/contract/types.h"

namespace deep_kernels {

inline constexpr i32 kMqaMaxHeads = 128;

// Where the -inf fill of the columns outside the tiles happens.
enum class Clean : u8 { off, concurrent, deferred };
// Who cuts the work over the SMs: every block for itself, or get_mqa_logits_metadata beforehand. MX
// formats always derive: their kernels came out 6% slower with a schedule (register banks, see
// benchmarks/notes_mqa.md), which saves less than that.
enum class Schedule : u8 { derived, metadata };

// How scores become a logit. folded: sum w relu(x) = sum w/2 |x| + (sum w/2 q) . k, where the
// second part is one more dot product per token, so that a score costs one instruction instead of
// two; what is truly 0 then comes out as rounding noise.
enum class Reduction : u8 { exact, folded };

constexpr const char* name_of(Reduction value) {
  constexpr const char* names[] = {"exact", "folded"};
  return names[static_cast<u8>(value)];
}
constexpr const char* name_of(Clean value) {
  constexpr const char* names[] = {"off", "concurrent", "deferred"};
  return names[static_cast<u8>(value)];
}
constexpr const char* name_of(Schedule value) {
  constexpr const char* names[] = {"derived", "metadata"};
  return names[static_cast<u8>(value)];
}

// What one launch gets. Passed by value.
struct MqaLogitsArgs {
  const u8* q;  // [num_q, num_heads, head_dim] e4m3, mxfp4: [.., head_dim / 2] e2m1 pairs
  const i32* q_exponents;   // [num_q, num_heads] int32, see mqa_rebase; null for fp8
  const u8* kv;             // [num_kv, head_dim] e4m3, last dimension contiguous; MX: of mqa_rebase
  const float* kv_scale;    // [num_kv] float32, contiguous; sm90: at a multiple of 16 bytes
  const i32* kv_exponents;  // [num_kv] int32 of mqa_rebase; null for fp8
  const i32* kv_wide;       // [ceil(num_kv / 16)] int32 of mqa_rebase; null for fp8
  const void* weights;      // [num_q, num_heads] weights_dtype, last dimension contiguous
  const u8* folded;         // [num_q, folded_rows, head_dim] e4m3 of mqa_fold; null unless folded
  const float* folded_scale;  // [num_q] of mqa_fold
  const i32* kv_start;        // [num_q] int32: first kv token of the row's window
  const i32* kv_end;          // [num_q] int32: one past the last
  const i32* schedule;  // [num_cuts, 2] int32 (block, chunk), any content; null unless metadata
  void* logits;         // [num_q, width] logits dtype, last dimension contiguous
  i64 q_token_stride;   // bytes, multiple of 16
  i64 q_head_stride;    // bytes, multiple of 16
  i64 q_exponents_token_stride;  // elements
  i64 q_exponents_head_stride;   // elements
  i64 kv_stride;                 // bytes, multiple of 16
  i64 weights_stride;            // elements
  i64 kv_start_stride;           // elements
  i64 kv_end_stride;             // elements
  i64 logits_stride;             // elements
  i32 num_q;
  i32 num_kv;
  i32 num_heads;  // as given; Spec::num_heads is this rounded up
  i32 width;      // columns of logits: num_kv, or max_seqlen_k when compressed
  i32 num_cuts;   // of schedule; 0 unless metadata
  DType weights_dtype;
  bool compressed;  // column c is kv token start + c
};

// TMA views; only sm90 uses them. Map is MapDescription on the host, the encoded form on the card.
template <class Map>
struct MqaLogitsMaps {
  Map q;         // (bytes, heads, tokens, octets), see mqa_octets_per_copy
  Map kv;        // (head_dim, num_kv), box (head_dim, stage_rows)
  Map kv_scale;  // (num_kv), box (stage_rows)
  Map folded;    // (head_dim, tokens * folded_rows), box (head_dim, 8); unused unless folded
};

// The part of a row's window that exists: half-open, begin == end when empty.
struct MqaWindow {
  i32 begin;
  i32 end;
};
// `limit` is max_seqlen_k of compressed logits (longer windows are cut off there), else num_kv.
constexpr MqaWindow mqa_window(i32 start, i32 end, i32 num_kv, i32 limit) {
  const i32 first = clamp_to(start, 0, num_kv);
  const i32 room = min_of(num_kv - first, limit);
  return {first, first + clamp_to(clamp_to(end, 0, num_kv) - first, 0, room)};
}

// A block of query tokens is computed together, over the union of its windows cut into chunks.
inline constexpr i32 kMqaChunkRows = 256;  // kv tokens per chunk
inline constexpr i32 kMqaSpanAlign = 16;   // a span starts at a multiple: stores fill sectors
inline constexpr i32 kMqaQueryRows = 512;  // (token, head) pairs per block: 4 groups of 128
inline constexpr i32 kMqaGroups = 4;       // groups of 128 query rows; one warpgroup each
inline constexpr i32 kMqaGroupRows = 128;  // query rows per group = columns of one MMA tile
// What opening a block costs beside its chunks, in chunks: its queries and weights, for MX formats
// rebased by the math warps, come too late when the block before has few chunks (measured on an
// H200, benchmarks/notes_mqa.md). Looking at an empty one costs about the latency of a load.
constexpr i32 mqa_open_cost(Format format) { return format == Format::fp8 ? 1 : 2; }
inline constexpr i32 kMqaScheduleOpenCost = mqa_open_cost(Format::fp8);  // MX calls derive cuts
inline constexpr i32 kMqaEmptyBlockCost = 1;

constexpr i32 mqa_padded_heads(i32 num_heads) {
  i32 padded = 8;
  while (padded < num_heads) padded *= 2;
  return padded;
}
constexpr i32 mqa_tokens_per_block(i32 padded_heads) { return kMqaQueryRows / padded_heads; }
constexpr i32 mqa_num_blocks(i32 num_q, i32 padded_heads) {
  return ceil_div(num_q, mqa_tokens_per_block(padded_heads));
}

// Union of a block's windows; num_chunks == 0 when all are empty.
struct MqaSpan {
  i32 begin;
  i32 num_chunks;
};
constexpr MqaSpan mqa_span(i32 lowest_begin, i32 highest_end) {
  if (highest_end <= lowest_begin) return {0, 0};
  const i32 begin = lowest_begin - lowest_begin % kMqaSpanAlign;
  return {begin, (highest_end - begin - 1) / kMqaChunkRows + 1};
}
constexpr i32 mqa_block_cost(i32 num_chunks, i32 open_cost) {
  return num_chunks > 0 ? num_chunks + open_cost : kMqaEmptyBlockCost;
}

// A place in the flattened (block, chunk) order where one SM stops and the next one goes on.
struct MqaCut {
  i32 block;
  i32 chunk;
};
// Where the cuts of num_runs equal runs over a total cost lie; exact for any total and up to 65535
// runs, with one 32-bit division per cut.
struct MqaCutPositions {
  i64 whole;  // total / num_runs
  u32 rest;   // total % num_runs
  u32 num_runs;

  constexpr MqaCutPositions(i64 total, i32 runs)
      : whole(total / runs), rest(static_cast<u32>(total % runs)), num_runs(runs) {}
  constexpr i64 operator()(i32 index) const {
    return whole * index + rest * static_cast<u32>(index) / num_runs;
  }
};
// The cut at `offset` cost into a block: what falls into the opening cost moves to its start.
constexpr MqaCut mqa_cut_in_block(i32 block, i64 offset, i32 num_chunks, i32 open_cost) {
  return {block, static_cast<i32>(clamp_to<i64>(offset - open_cost, 0, num_chunks))};
}
// int32 elements of get_mqa_logits_metadata's result: num_sms + 1 cuts.
constexpr i32 mqa_schedule_length(i32 /*num_q*/, i32 /*num_heads*/, i32 num_sms) {
  return 2 * (num_sms + 1);
}

// Columns of a row that no tile touches: [0, left) and [right, width).
struct MqaFill {
  i32 left;
  i32 right;
};
constexpr MqaFill mqa_fill(MqaSpan span, i32 shift, i32 width) {
  if (span.num_chunks == 0) return {0, 0};
  const i64 covered_end = static_cast<i64>(span.begin) + i64{span.num_chunks} * kMqaChunkRows;
  return {clamp_to(span.begin - shift, 0, width),
          static_cast<i32>(clamp_to<i64>(covered_end - shift, 0, width))};
}

// How (token, head) pairs are the columns of an MMA tile. A lane t (lane & 3) holds columns 8j + 2t
// and 8j + 2t + 1, so the heads of one token are dealt to as few lanes as possible. Octet j holds
// heads_per_octet heads of tokens_per_octet tokens; column 8j + c is token c / heads_per_octet of
// the octet. Source: the feasibility study for this op on an H200 (one shuffle at 64 heads and 128
// columns, none at 32).
struct MqaColumnOrder {
  i32 num_columns;
  i32 num_heads;  // a power of two from 8 to num_columns

  constexpr i32 tokens() const { return num_columns / num_heads; }
  constexpr i32 heads_per_octet() const { return max_of(1, 8 / tokens()); }
  constexpr i32 tokens_per_octet() const { return 8 / heads_per_octet(); }
  constexpr i32 octets_per_token_set() const { return num_heads / heads_per_octet(); }
  constexpr i32 token_of(i32 column) const {
    return column / 8 / octets_per_token_set() * tokens_per_octet() +
           column % 8 / heads_per_octet();
  }
  constexpr i32 head_of(i32 column) const {
    return column / 8 % octets_per_token_set() * heads_per_octet() + column % heads_per_octet();
  }
};

// MX formats. Hopper's tensor cores know no block scales, but UE8M0 scales are powers of two: a row
// is *rebased* to e4m3 codes with one exponent, its greatest, and that exponent leaves the dot
// product (into the weight of a query row, into the scale of a kv row). A row is narrow when
// nothing is lost that counts, else wide, and its logits are computed block by block in float64.
inline constexpr i32 kMxBlock = 32;  // elements that share an exponent
inline constexpr i32 kMxBias = 127;  // UE8M0: 2^(byte - 127)
inline constexpr i32 kMxNan = 0xff;
inline constexpr i32 kMqaWideRows = 16;  // kv rows that share one flag in kv_wide

// e2m1 pairs are expanded to e4m3 codes of 2^6 times their value: up to 384, which leaves the most
// room below.
constexpr i32 mx_code_exponent(Format format) { return format == Format::mxfp4 ? 6 : 0; }
// How far the block exponents of a narrow row may spread. An e2m1 value times 2^-14 is still an
// e4m3 number. An e4m3 block loses what falls under 2^-10 of the row's codes: at a spread of 10 the
// agreement of opposite rows (the greatest query block against the smallest kv block) is 1e-6,
// where 5e-6 is asked (tests/test_mqa_logits_mx.py); 10 is what randn with block factors of 2^-4 to
// 2^4 has.
constexpr i32 mx_narrow_spread(Format format) { return format == Format::mxfp4 ? 14 : 10; }

// Where the rebased kv rows lie in the workspace of an MX call; every part at a multiple of 16
// bytes.
struct MqaWorkspace {
  i64 codes, scale, exponents, wide, bytes;  // offsets, and the size of all
};
constexpr MqaWorkspace mqa_workspace(i32 num_kv, i32 head_dim) {
  MqaWorkspace at{};
  at.scale = align_up<i64>(i64{num_kv} * head_dim, 16);
  at.exponents = at.scale + align_up<i64>(i64{num_kv} * 4, 16);
  at.wide = at.exponents + align_up<i64>(i64{num_kv} * 4, 16);
  at.bytes = at.wide + i64{ceil_div(num_kv, kMqaWideRows)} * 4;
  return at;
}

// Folded reduction. sum w/2 q of a token is written as e4m3 digits, each 16 times finer than the
// one before: four of them hold 16 bits. The digits of a group's tokens fill one octet of columns.
inline constexpr i32 kMqaDigits = 4;
inline constexpr i32 kMqaFoldedRows = 8;  // per group
constexpr i32 mqa_folded_rows_per_token(i32 padded_heads) {
  return kMqaFoldedRows * padded_heads / kMqaGroupRows;  // 4 at 64 heads; 8, half of them 0, at 128
}
// With 32 heads the digits of a group's four tokens need two octets, for which there are no
// registers; a lane has no shuffle to save there either. Rows of 32 elements leave little to save.
constexpr bool mqa_can_fold(Backend backend, Format format, i32 head_dim, i32 padded_heads) {
  return backend == Backend::sm90 && format == Format::fp8 && head_dim >= 64 && padded_heads >= 64;
}

// What the compiler gets. All members are one byte wide: hashable as bytes, no padding.
struct MqaLogitsSpec {
  Backend backend;  // sm89 | sm90
  Format format;
  u8 head_dim;         // 32 | 64 | 128
  u8 num_heads;        // 8 | 16 | 32 | 64 | 128; Args::num_heads rounded up
  DType logits_dtype;  // float32 | bfloat16
  Clean clean;
  Schedule schedule;
  u8 kv_stages;  // ring of kv stages, kv_stage_rows each
  Reduction reduction;

  static constexpr const char* op() { return "mqa_logits"; }

  template <class Visit>
  constexpr void fields(Visit&& visit) const {
    visit("backend", backend);
    visit("format", format);
    visit("head_dim", head_dim);
    visit("num_heads", num_heads);
    visit("logits_dtype", logits_dtype);
    visit("clean", clean);
    visit("schedule", schedule);
    visit("kv_stages", kv_stages);
    visit("reduction", reduction);
  }

  constexpr MqaColumnOrder order() const { return {kMqaGroupRows, num_heads}; }
  constexpr i32 tokens_per_group() const { return order().tokens(); }
  constexpr i32 tokens_per_block() const { return mqa_tokens_per_block(num_heads); }
  constexpr i32 heads_per_octet() const { return order().heads_per_octet(); }
  constexpr i32 tokens_per_octet() const { return order().tokens_per_octet(); }
  constexpr i32 octets_per_token_set() const { return order().octets_per_token_set(); }
  constexpr i32 token_of(i32 column) const { return order().token_of(column); }
  constexpr i32 head_of(i32 column) const { return order().head_of(column); }

  // The same for a column of the block's kMqaQueryRows, tokens counted from the block's first.
  constexpr i32 block_token_of(i32 column) const {
    return column / kMqaGroupRows * tokens_per_group() + token_of(column % kMqaGroupRows);
  }

  constexpr i32 kv_stage_rows() const {
    if (backend == Backend::sm90) return 256;
    return is_mx() && head_dim == 128 ? 64 : 128;  // what shared memory has room for
  }
  constexpr i32 num_threads() const { return backend == Backend::sm90 ? 640 : 256; }
  constexpr bool is_mx() const { return format != Format::fp8; }
  constexpr bool is_folded() const { return reduction == Reduction::folded; }
  // Rows of a group in shared memory, columns of an MMA tile: folded ones have an octet more.
  constexpr i32 group_rows() const { return kMqaGroupRows + (is_folded() ? kMqaFoldedRows : 0); }
  constexpr i32 query_bytes() const { return kMqaGroups * group_rows() * head_dim; }  // as e4m3
  // As they come: bytes of one row, and of a block's rows.
  constexpr i32 query_row_bytes() const {
    return format == Format::mxfp4 ? head_dim / 2 : head_dim;
  }
  constexpr i32 query_load_bytes() const { return kMqaGroups * group_rows() * query_row_bytes(); }
  constexpr i32 kv_stage_bytes() const { return kv_stage_rows() * head_dim; }
  static constexpr i32 query_slots() { return 2; }  // sm90: query blocks in flight

  constexpr i32 smem_bytes() const {
    const i32 per_column = is_mx() ? 12 : 4;  // weight; exponents, weight times their power
    if (backend == Backend::sm89)             // rows, columns, scan
      return query_bytes() + kv_stages * kv_stage_bytes() + kMqaQueryRows * per_column + 1024;
    const i32 per_slot = query_bytes() + kMqaQueryRows * per_column + 2304;  // rows, columns, unit
    const i32 per_stage = kv_stage_bytes() + kv_stage_rows() * 4;            // rows, scales
    return query_slots() * per_slot + kv_stages * per_stage + 1152;  // barriers, flags, scan
  }
  // Spilled bytes that are tolerated; a number above 0 needs a reason and a measured gain here.
  static constexpr i32 spill_limit_bytes() { return 0; }
  // wgmma instructions that the machine code must hold: a stage's four 64-row tiles, and one tile
  // with edge tests in a loop, head_dim / 32 k-steps each. ptxas can drop some silently.
  constexpr i32 num_wgmma() const { return backend == Backend::sm90 ? (4 + 1) * head_dim / 32 : 0; }

  constexpr i32 grid(const MqaLogitsArgs& args, i32 num_sms) const {
    const i64 chunks = i64{mqa_num_blocks(args.num_q, num_heads)} *
                       max_of(1, ceil_div(args.num_kv, kMqaChunkRows));
    return static_cast<i32>(clamp_to<i64>(chunks, 1, num_sms));
  }
  constexpr i64 workspace_bytes(const MqaLogitsArgs& args) const {
    return is_mx() ? mqa_workspace(args.num_kv, head_dim).bytes : 0;
  }

  // Why this Spec may not exist, or null.
  constexpr const char* invalid() const {
    if (backend != Backend::sm89 && backend != Backend::sm90) return "backend must be sm89 or sm90";
    if (format == Format::mxfp4 && head_dim == 32) return "head_dim must be 64 or 128 with mxfp4";
    if (head_dim != 32 && head_dim != 64 && head_dim != 128)
      return "head_dim must be 32, 64 or 128";
    if (num_heads > kMqaMaxHeads || mqa_padded_heads(num_heads) != num_heads)
      return "num_heads must be 8, 16, 32, 64 or 128";
    if (logits_dtype == DType::float16) return "logits_dtype must be float32 or bfloat16";
    if (is_folded() && !mqa_can_fold(backend, format, head_dim, num_heads))
      return "reduction folded must be for sm90, fp8, head_dim 64 or 128 and 64 or 128 heads";
    if (is_mx() && schedule == Schedule::metadata)
      return "schedule must be derived with MX formats";
    if (kv_stages < 2) return "kv_stages must be at least 2";
    if (smem_bytes() > limits_of(backend).max_smem_bytes) return "shared memory does not fit";
    return nullptr;
  }

  bool operator==(const MqaLogitsSpec&) const = default;
};

// The ring depth that fills the shared memory without passing what pays.
constexpr u8 mqa_kv_stages(Backend backend, i32 head_dim) {
  if (backend == Backend::sm89) return head_dim == 128 ? 2 : 3;
  return head_dim == 128 ? 2 : 4;
}

// Every legal Spec of a backend, in a fixed order.
template <class Visit>
constexpr void for_each_mqa_logits_spec(Backend backend, Visit&& visit) {
  constexpr DType dtypes[] = {DType::float32, DType::bfloat16};
  constexpr Clean cleanings[] = {Clean::off, Clean::concurrent, Clean::deferred};
  constexpr Schedule schedules[] = {Schedule::derived, Schedule::metadata};
  constexpr Format formats[] = {Format::fp8, Format::mxfp8, Format::mxfp4};
  constexpr Reduction reductions[] = {Reduction::exact, Reduction::folded};
  for (Format format : formats)
    for (i32 head_dim = 32; head_dim <= 128; head_dim *= 2)
      for (i32 num_heads = 8; num_heads <= kMqaMaxHeads; num_heads *= 2)
        for (DType logits : dtypes)
          for (Clean clean : cleanings)
            for (Schedule schedule : schedules)
              for (Reduction reduction : reductions) {
                const MqaLogitsSpec spec{backend,
                                         format,
                                         static_cast<u8>(head_dim),
                                         static_cast<u8>(num_heads),
                                         logits,
                                         clean,
                                         schedule,
                                         mqa_kv_stages(backend, head_dim),
                                         reduction};
                if (spec.invalid() == nullptr) visit(spec);
              }
}

// Octets of query rows that one copy brings: a token set, or a single one where the last octet has
// only some of its heads, so that the copy can end at the last head.
constexpr i32 mqa_octets_per_copy(const MqaLogitsSpec& spec, i32 num_heads) {
  return num_heads % spec.heads_per_octet() == 0 ? spec.octets_per_token_set() : 1;
}

template <class Map = MapDescription>
constexpr MqaLogitsMaps<Map> mqa_logits_maps(const MqaLogitsSpec& spec, const MqaLogitsArgs& args) {
  MqaLogitsMaps<Map> maps{};
  const Swizzle swizzle = swizzle_for(spec.head_dim);
  // Rows in column order: the heads of an octet, its tokens, and (all or one of) the octets.
  const i32 octets = mqa_octets_per_copy(spec, args.num_heads);
  const i32 heads = octets == 1 ? args.num_heads : spec.heads_per_octet();
  maps.q = {
      .base = args.q,
      .dims = {spec.query_row_bytes(), heads, args.num_q, args.num_heads / heads},
      .strides = {1, args.q_head_stride, args.q_token_stride, heads * args.q_head_stride},
      .box = {spec.query_row_bytes(), spec.heads_per_octet(), spec.tokens_per_octet(), octets},
      .rank = 4,
      .type = MapType::u8_,
      .swizzle = swizzle_for(spec.query_row_bytes())};
  maps.kv = {.base = args.kv,
             .dims = {spec.head_dim, args.num_kv},
             .strides = {1, args.kv_stride},
             .box = {spec.head_dim, spec.kv_stage_rows()},
             .rank = 2,
             .type = MapType::u8_,
             .swizzle = swizzle,
             .promotion = L2Promotion::b256};
  maps.kv_scale = {.base = args.kv_scale,
                   .dims = {args.num_kv},
                   .strides = {4},
                   .box = {spec.kv_stage_rows()},
                   .rank = 1,
                   .type = MapType::f32_,
                   .swizzle = Swizzle::none};
  if (!spec.is_folded()) return maps;
  const i64 num_rows = i64{args.num_q} * mqa_folded_rows_per_token(spec.num_heads);
  maps.folded = {.base = args.folded,
                 .dims = {spec.head_dim, num_rows},
                 .strides = {1, spec.head_dim},
                 .box = {spec.head_dim, kMqaFoldedRows},
                 .rank = 2,
                 .type = MapType::u8_,
                 .swizzle = swizzle};
  return maps;
}

// The pre-pass of MX formats: rebases kv rows, a warp for every kMqaWideRows.
struct MqaRebaseArgs {
  const u8* values;      // [num_rows, head_dim] e4m3 | [num_rows, head_dim / 2] e2m1 pairs
  const i32* exponents;  // [num_rows] int32: byte b is the UE8M0 exponent of block b
  u8* codes;             // [num_rows, head_dim] e4m3, contiguous
  float* scale;          // [num_rows]: the power of two of the codes; NaN for wide and NaN rows
  i32* code_exponents;   // [num_rows]: UE8M0 exponents of the codes, see mx_code_exponent
  i32* wide;             // [ceil(num_rows / 16)]: not 0 where one of 16 rows has no scale
  i64 values_stride;     // bytes, multiple of 16
  i64 exponents_stride;  // elements
  i32 num_rows;
};

struct MqaRebaseSpec {
  Backend backend;  // sm89: runs on every card
  Format format;    // mxfp8 | mxfp4
  u8 head_dim;      // 32 | 64 | 128

  static constexpr const char* op() { return "mqa_rebase"; }

  template <class Visit>
  constexpr void fields(Visit&& visit) const {
    visit("backend", backend);
    visit("format", format);
    visit("head_dim", head_dim);
  }
  constexpr i32 num_threads() const { return 256; }
  constexpr i32 smem_bytes() const { return 0; }
  constexpr i32 spill_limit_bytes() const { return 0; }
  constexpr i32 num_wgmma() const { return 0; }
  constexpr i32 grid(const MqaRebaseArgs& args, i32 /*num_sms*/) const {
    return ceil_div(args.num_rows, kMqaWideRows * num_threads() / 32);
  }
  constexpr i64 workspace_bytes(const MqaRebaseArgs&) const { return 0; }
  constexpr const char* invalid() const {
    if (backend != Backend::sm89) return "backend must be sm89";
    if (format != Format::mxfp8 && format != Format::mxfp4) return "format must be mxfp8 or mxfp4";
    if (head_dim != 64 && head_dim != 128 && (head_dim != 32 || format == Format::mxfp4))
      return "head_dim must be 32 (mxfp8), 64 or 128";
    return nullptr;
  }
  bool operator==(const MqaRebaseSpec&) const = default;
};

template <class Visit>
constexpr void for_each_mqa_rebase_spec(Backend backend, Visit&& visit) {
  if (backend != Backend::sm89) return;
  constexpr Format formats[] = {Format::mxfp8, Format::mxfp4};
  for (Format format : formats)
    for (i32 head_dim = 32; head_dim <= 128; head_dim *= 2) {
      const MqaRebaseSpec spec{backend, format, static_cast<u8>(head_dim)};
      if (spec.invalid() == nullptr) visit(spec);
    }
}

// The pre-pass of the folded reduction: a warp for every token.
struct MqaFoldArgs {
  MqaLogitsArgs logits;  // of the call: queries and weights
  u8* folded;            // [num_q, folded_rows, head_dim] e4m3
  float* folded_scale;   // [num_q]
};

struct MqaFoldSpec {
  Backend backend;  // sm89: runs on every card
  u8 head_dim;      // 64 | 128
  u8 num_heads;     // 64 | 128; rounded up

  static constexpr const char* op() { return "mqa_fold"; }

  template <class Visit>
  constexpr void fields(Visit&& visit) const {
    visit("backend", backend);
    visit("head_dim", head_dim);
    visit("num_heads", num_heads);
  }
  constexpr i32 folded_rows() const { return mqa_folded_rows_per_token(num_heads); }
  constexpr i32 num_threads() const { return 256; }
  constexpr i32 smem_bytes() const { return 0; }
  constexpr i32 spill_limit_bytes() const { return 0; }
  constexpr i32 num_wgmma() const { return 0; }
  constexpr i32 grid(const MqaFoldArgs& args, i32 /*num_sms*/) const {
    return ceil_div(args.logits.num_q, num_threads() / 32);
  }
  constexpr i64 workspace_bytes(const MqaFoldArgs&) const { return 0; }
  constexpr const char* invalid() const {
    if (backend != Backend::sm89) return "backend must be sm89";
    if (head_dim != 64 && head_dim != 128) return "head_dim must be 64 or 128";
    if (num_heads != 64 && num_heads != 128) return "num_heads must be 64 or 128";
    return nullptr;
  }
  bool operator==(const MqaFoldSpec&) const = default;
};

template <class Visit>
constexpr void for_each_mqa_fold_spec(Backend backend, Visit&& visit) {
  if (backend != Backend::sm89) return;
  for (i32 head_dim = 64; head_dim <= 128; head_dim *= 2)
    for (i32 num_heads = 64; num_heads <= kMqaMaxHeads; num_heads *= 2)
      visit(MqaFoldSpec{backend, static_cast<u8>(head_dim), static_cast<u8>(num_heads)});
}

// The pre-pass that cuts the work over the SMs, one block of threads.
struct MqaScheduleArgs {
  const i32* kv_start;  // [num_q] int32
  const i32* kv_end;    // [num_q] int32
  i32* schedule;        // [num_sms + 1, 2] int32
  i32* num_chunks;      // [num_blocks] int32, workspace
  i64 kv_start_stride;  // elements
  i64 kv_end_stride;    // elements
  i32 num_q;
  i32 num_kv;
  i32 num_sms;
};

struct MqaScheduleSpec {
  Backend backend;  // sm89: runs on every card
  u8 num_heads;     // rounded up; sets the tokens of a block

  static constexpr const char* op() { return "mqa_schedule"; }

  template <class Visit>
  constexpr void fields(Visit&& visit) const {
    visit("backend", backend);
    visit("num_heads", num_heads);
  }
  constexpr i32 num_threads() const { return 1024; }
  constexpr i32 smem_bytes() const { return 1024; }
  constexpr i32 spill_limit_bytes() const { return 0; }
  constexpr i32 num_wgmma() const { return 0; }
  constexpr i32 grid(const MqaScheduleArgs&, i32 /*num_sms*/) const { return 1; }
  constexpr i64 workspace_bytes(const MqaScheduleArgs& args) const {
    return i64{mqa_num_blocks(args.num_q, num_heads)} * 4;
  }
  constexpr const char* invalid() const {
    if (backend != Backend::sm89) return "backend must be sm89";
    if (num_heads > kMqaMaxHeads || mqa_padded_heads(num_heads) != num_heads)
      return "num_heads must be 8, 16, 32, 64 or 128";
    return nullptr;
  }
  bool operator==(const MqaScheduleSpec&) const = default;
};

template <class Visit>
constexpr void for_each_mqa_schedule_spec(Backend backend, Visit&& visit) {
  if (backend != Backend::sm89) return;
  for (i32 num_heads = 8; num_heads <= kMqaMaxHeads; num_heads *= 2)
    visit(MqaScheduleSpec{backend, static_cast<u8>(num_heads)});
}

}  // namespace deep_kernels
