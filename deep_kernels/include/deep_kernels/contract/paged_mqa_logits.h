// Contract of the paged MQA logits op (decode): as in mqa_logits.h, but the kv tokens of a request
// lie in pages that its row of a block table names, and a row sees the first tokens of its request.
//
//   logits[r, j] = sum_h weights[r, h] * relu(dot(q[r, h, :], kv[j, :])) * kv_scale[j],  j < length
//
// Host, kernels, CPU backend and tests read the same structs and the same arithmetic here: Args,
// Spec, Maps, lengths of rows, where bytes lie in a page, and how work is cut over the SMs.
#pragma once

#include "deep_kernels/contract/mqa_logits.h"

namespace deep_kernels {

inline constexpr i32 kPagedMinBlock = 16;  // tokens per page: a power of two between these
inline constexpr i32 kPagedMaxBlock = 256;
// The unit in which work is cut: kv tokens of one MMA tile, whatever the page size.
inline constexpr i32 kPagedTileRows = 64;
// With indices, rows 2k and 2k + 1 are computed together if they belong to one request.
inline constexpr i32 kPagedSharedRows = 2;

// What one launch gets. Passed by value. A *row* is one row of logits; a *request* is what has a
// row of the block table: next_n rows of q, or one row each with indices.
struct PagedMqaLogitsArgs {
  const u8* q;              // [num_requests, next_n, num_heads, row bytes] e4m3 | e2m1 pairs
  const i32* q_scale;       // [num_requests, next_n, num_heads] int32 UE8M0 exponents; null: fp8
  const u8* kv_cache;       // [num_blocks, block_bytes], at a multiple of 16 bytes, see paged_page
  const void* weights;      // [num_requests * next_n, num_heads] weights_dtype
  const i32* context_lens;  // [num_requests], or [num_requests, next_n] if lens_per_row
  const i32* block_table;   // [num_requests, table_width] int32; what no context uses may be junk
  const i32* indices;       // [num_requests] int32, request of each row; null, or next_n is 1
  const i32* schedule;      // [num_cuts, 2] int32 (request, tile), any content; null: derived
  void* logits;             // [num_requests * next_n, width] logits dtype
  i64 q_request_stride;     // bytes, multiple of 16
  i64 q_row_stride;         // bytes, multiple of 16
  i64 q_head_stride;        // bytes, multiple of 16
  i64 q_scale_request_stride;  // elements
  i64 q_scale_row_stride;      // elements
  i64 q_scale_head_stride;     // elements
  i64 block_stride;            // bytes between pages, multiple of 16
  i64 weights_stride;          // elements
  i64 context_request_stride;  // elements
  i64 context_row_stride;      // elements; 0 unless lens_per_row
  i64 table_stride;            // elements
  i64 indices_stride;          // elements
  i64 logits_stride;           // elements
  i32 num_requests;
  i32 next_n;
  i32 num_q;        // num_requests * next_n
  i32 num_heads;    // as given; Spec::num_heads is this rounded up
  i32 width;        // columns of logits: max_context_len
  i32 table_width;  // columns of block_table
  i32 num_blocks;   // of kv_cache; table entries outside count as the nearest page
  i32 block_kv;     // tokens per page: 16, 32, 64, 128 or 256
  i32 num_cuts;     // of schedule; 0 without one
  DType weights_dtype;
  bool lens_per_row;
  bool clean;  // -inf into every column that a row does not see
};

// TMA views; only sm90 uses them.
template <class Map>
struct PagedMqaLogitsMaps {
  Map q;   // (row bytes, heads, rows, requests), box (row bytes, heads and tokens of an octet, 1)
  Map kv;  // (row bytes, rows of a page, pages), box (row bytes, at most kPagedTileRows, 1)
};

constexpr i32 paged_row_bytes(Format format, i32 head_dim) {
  return format == Format::mxfp4 ? head_dim / 2 : head_dim;
}
constexpr bool is_paged_block(i64 block_kv) {
  return block_kv >= kPagedMinBlock && block_kv <= kPagedMaxBlock &&
         (block_kv & (block_kv - 1)) == 0;
}
constexpr i32 paged_block_shift(i32 block_kv) {  // log2
  i32 shift = 0;
  while (1 << shift < block_kv) ++shift;
  return shift;
}
// Within a page all values come first, then four bytes of scale for every token.
constexpr i32 paged_scale_offset(i32 block_kv, i32 row_bytes) { return block_kv * row_bytes; }

// Tokens that a row sees. `context` is its entry of context_lens, `row` its place in the request.
// Neither the table nor the logits are left.
constexpr i32 paged_row_length(const PagedMqaLogitsArgs& args, i32 context, i32 row) {
  const i64 behind = args.lens_per_row ? 0 : i64{args.next_n} - 1 - row;
  const i64 room = min_of<i64>(args.width, i64{args.table_width} * args.block_kv);
  return static_cast<i32>(clamp_to<i64>(context - behind, 0, room));
}
constexpr i32 paged_num_tiles(i32 length) {
  return length > 0 ? (length - 1) / kPagedTileRows + 1 : 0;  // up to the largest length
}
// With indices: whether this row is computed together with the one before.
constexpr bool paged_may_follow(i32 row) { return row % kPagedSharedRows != 0; }

// How the work is cut. The tiles of all requests are flattened in order; every SM gets an equal
// run. A request counts as the tiles of its longest row, and with indices as those of the rows that
// are computed together (none for a row that follows another). What opening a request costs beside
// its tiles, in tiles: its queries and the first page table entry.
inline constexpr i32 kPagedOpenCost = 1;
// More tiles of one request (64M tokens) do not count, so that 4096 requests can be added up in 32
// bits whatever their lengths say. (Those that a call computes can in any case: their logits have
// room in memory.)
inline constexpr i32 kPagedMaxCost = 1 << 20;
constexpr i32 paged_request_cost(i32 num_tiles) {
  return num_tiles > 0 ? min_of(num_tiles, kPagedMaxCost) + kPagedOpenCost : 0;
}
// Where the cuts of num_runs equal runs over a total cost lie: floor(total * index / num_runs).
struct PagedCutPositions {
  u32 whole;  // total / num_runs
  u32 rest;   // total % num_runs
  u32 num_runs;

  constexpr PagedCutPositions(u32 total, i32 runs)
      : whole(total / static_cast<u32>(runs)),
        rest(total % static_cast<u32>(runs)),
        num_runs(static_cast<u32>(runs)) {}
  constexpr u32 operator()(i32 index) const {
    return whole * static_cast<u32>(index) + rest * static_cast<u32>(index) / num_runs;
  }
};
// A place in the flattened order where one SM stops and the next one goes on.
struct PagedCut {
  i32 request;
  i32 tile;
};
// The cut at `offset` cost into a request: what falls into the opening cost moves to its start.
constexpr PagedCut paged_cut_in_request(i32 request, i64 offset, i32 num_tiles) {
  return {request, static_cast<i32>(clamp_to<i64>(offset - kPagedOpenCost, 0, num_tiles))};
}
// Cuts as one number, which orders them; whatever a schedule holds becomes one that exists.
constexpr i64 paged_cut_order(i32 request, i32 tile, i32 num_requests) {
  return (i64{clamp_to(request, 0, num_requests)} << 32) | max_of(tile, 0);
}
constexpr PagedCut paged_cut_of(i64 order) {
  return {static_cast<i32>(order >> 32), static_cast<i32>(order & 0x7fffffff)};
}

// What the compiler gets. All members are one byte wide: hashable as bytes, no padding.
struct PagedMqaLogitsSpec {
  Backend backend;     // sm89 | sm90
  Format format;       // fp8 | mxfp8 | mxfp4
  u8 head_dim;         // 32 | 64 | 128; mxfp4: 64 | 128
  u8 num_heads;        // 8 | 16 | 32 | 64 | 128; Args::num_heads rounded up
  DType logits_dtype;  // float32 | bfloat16
  u8 unit_rows;        // rows of a request that share every tile: 1 | 2 | 4
  u8 kv_stages;        // ring of tiles
  u8 math_groups;      // warpgroups (sm90) that take tiles in turn

  static constexpr const char* op() { return "paged_mqa_logits"; }

  template <class Visit>
  constexpr void fields(Visit&& visit) const {
    visit("backend", backend);
    visit("format", format);
    visit("head_dim", head_dim);
    visit("num_heads", num_heads);
    visit("logits_dtype", logits_dtype);
    visit("unit_rows", unit_rows);
    visit("kv_stages", kv_stages);
    visit("math_groups", math_groups);
  }

  constexpr bool is_mx() const { return format != Format::fp8; }
  constexpr i32 row_bytes() const { return paged_row_bytes(format, head_dim); }
  // (row, head) pairs of a unit, and how many of them are one MMA's columns: MX tiles need a second
  // set of accumulators, and make more passes instead.
  constexpr i32 unit_columns() const { return unit_rows * num_heads; }
  constexpr i32 pass_columns() const {
    return min_of(unit_columns(), is_mx() ? max_of<i32>(64, num_heads) : 128);
  }
  constexpr i32 num_passes() const { return unit_columns() / pass_columns(); }
  constexpr MqaColumnOrder order() const { return {pass_columns(), num_heads}; }
  // Of a column of the unit: its row, counted from the unit's first, and its head.
  constexpr i32 token_of(i32 column) const {
    return column / pass_columns() * order().tokens() + order().token_of(column % pass_columns());
  }
  constexpr i32 head_of(i32 column) const { return order().head_of(column % pass_columns()); }

  constexpr i32 num_threads() const {
    return backend == Backend::sm90 ? 128 * (math_groups + 1) : 256;
  }
  constexpr i32 query_bytes() const { return unit_columns() * head_dim; }          // e4m3, MX too
  constexpr i32 query_load_bytes() const { return unit_columns() * row_bytes(); }  // as they come
  constexpr i32 kv_stage_rows() const {
    return backend == Backend::sm89 ? 2 * kPagedTileRows : kPagedTileRows;
  }
  constexpr i32 kv_stage_bytes() const { return kv_stage_rows() * row_bytes(); }
  // Units in flight. On sm90 more than two let short contexts overlap.
  constexpr i32 query_slots() const {
    return backend == Backend::sm89 ? 1 : query_bytes() <= 16384 ? 3 : 2;
  }

  constexpr i32 smem_bytes() const {
    const i32 per_column = is_mx() ? 12 : 4;  // weight; exponents, weight times their power
    const i32 per_slot = query_bytes() + unit_columns() * per_column + 256;  // rows, columns, unit
    const i32 per_stage = kv_stage_bytes() + kv_stage_rows() * 4;            // rows, scales
    return query_slots() * per_slot + kv_stages * per_stage + 2048;          // barriers, scan
  }
  // Spilled bytes that are tolerated; a number above 0 needs a reason and a measured gain here.
  static constexpr i32 spill_limit_bytes() { return 0; }
  // wgmma instructions that the machine code must hold: one tile, head_dim / 32 k-steps.
  constexpr i32 num_wgmma() const { return backend == Backend::sm90 ? head_dim / 32 : 0; }

  constexpr i32 grid(const PagedMqaLogitsArgs& args, i32 num_sms) const {
    const i64 tiles = i64{args.num_requests} * max_of(1, paged_num_tiles(args.width));
    return static_cast<i32>(clamp_to<i64>(tiles, 1, num_sms));
  }
  constexpr i64 workspace_bytes(const PagedMqaLogitsArgs&) const { return 0; }

  // Why this Spec may not exist, or null.
  constexpr const char* invalid() const {
    if (backend != Backend::sm89 && backend != Backend::sm90) return "backend must be sm89 or sm90";
    if (head_dim != 64 && head_dim != 128 && (head_dim != 32 || format == Format::mxfp4))
      return "head_dim must be 32 (not with mxfp4), 64 or 128";
    if (num_heads > kMqaMaxHeads || mqa_padded_heads(num_heads) != num_heads)
      return "num_heads must be 8, 16, 32, 64 or 128";
    if (logits_dtype == DType::float16) return "logits_dtype must be float32 or bfloat16";
    if (unit_rows != 1 && unit_rows != 2 && unit_rows != 4) return "unit_rows must be 1, 2 or 4";
    if (unit_columns() < 32) return "unit_rows * num_heads must be at least 32";
    if (kv_stages < 2) return "kv_stages must be at least 2";
    if (math_groups > 4 || math_groups < (backend == Backend::sm90 ? 2 : 1))
      return "math_groups must be from 2 to 4, or 1 on sm89";
    if (backend == Backend::sm90 && (kv_stages % math_groups != 0 || kv_stages % 2 != 0))
      return "kv_stages must be a multiple of math_groups and of 2";
    if (smem_bytes() > limits_of(backend).max_smem_bytes) return "shared memory does not fit";
    return nullptr;
  }

  bool operator==(const PagedMqaLogitsSpec&) const = default;
};

// One warpgroup needs about 700 clocks for a tile that comes in 500 (same study). MXFP8 needs
// registers for scores of single blocks, and 128 columns for twice as many.
constexpr u8 paged_math_groups(Backend backend, Format format, i32 num_heads) {
  if (backend == Backend::sm89) return 1;
  if (format != Format::fp8 && num_heads == 128) return 2;
  return format == Format::mxfp8 ? 3 : 4;
}
// Bytes in flight decide: deeper rings stream no faster and make the SMs finish further apart
// (feasibility study for this op on an H200: 8 stages of 64 tokens at 128 bytes are the best of
// 8, 14 and 23). Smaller rows get as many more stages as keep the bytes.
//
// Every stage belongs to one math group and one kv warp: multiples of both. Copies of different
// tiles end in any order, so that a group whose tiles came early would otherwise reach a stage
// before the tile of another group that was there a round ago, and take the parity of that round
// for its own.
constexpr u8 paged_kv_stages(Backend backend, Format format, i32 head_dim, i32 math_groups) {
  if (backend == Backend::sm89) return head_dim == 128 ? 2 : 3;
  const i32 stages = min_of(8 * 128 / paged_row_bytes(format, head_dim), 16);
  return static_cast<u8>(math_groups == 3 ? align_up(stages, 6) : stages);
}
// How many rows share a tile: as many as a request has, up to 4 or what fits into shared memory,
// and enough to fill an MMA.
constexpr i32 paged_max_unit_rows(Backend backend, i32 padded_heads) {
  return backend == Backend::sm89 && padded_heads == 128 ? 2 : 4;
}
constexpr u8 paged_unit_rows(Backend backend, i32 padded_heads, i32 next_n, bool has_indices) {
  const i32 rows = has_indices ? kPagedSharedRows : next_n;
  i32 unit = max_of(1, 32 / padded_heads);
  while (unit < min_of(rows, paged_max_unit_rows(backend, padded_heads))) unit *= 2;
  return static_cast<u8>(unit);
}
constexpr PagedMqaLogitsSpec paged_mqa_logits_spec(Backend backend, Format format, i32 head_dim,
                                                   i32 padded_heads, DType logits_dtype,
                                                   i32 unit_rows) {
  const u8 math_groups = paged_math_groups(backend, format, padded_heads);
  return {backend,
          format,
          static_cast<u8>(head_dim),
          static_cast<u8>(padded_heads),
          logits_dtype,
          static_cast<u8>(unit_rows),
          paged_kv_stages(backend, format, head_dim, math_groups),
          math_groups};
}

// Every legal Spec of a backend, in a fixed order.
template <class Visit>
constexpr void for_each_paged_mqa_logits_spec(Backend backend, Visit&& visit) {
  constexpr Format formats[] = {Format::fp8, Format::mxfp8, Format::mxfp4};
  constexpr DType dtypes[] = {DType::float32, DType::bfloat16};
  for (Format format : formats)
    for (i32 head_dim = format == Format::mxfp4 ? 64 : 32; head_dim <= 128; head_dim *= 2)
      for (i32 num_heads = 8; num_heads <= kMqaMaxHeads; num_heads *= 2)
        for (DType logits : dtypes)
          for (i32 rows = paged_unit_rows(backend, num_heads, 1, false);
               rows <= paged_max_unit_rows(backend, num_heads); rows *= 2)
            visit(paged_mqa_logits_spec(backend, format, head_dim, num_heads, logits, rows));
}

template <class Map = MapDescription>
constexpr PagedMqaLogitsMaps<Map> paged_mqa_logits_maps(const PagedMqaLogitsSpec& spec,
                                                        const PagedMqaLogitsArgs& args) {
  PagedMqaLogitsMaps<Map> maps{};
  const i32 row_bytes = spec.row_bytes();
  const Swizzle swizzle = swizzle_for(row_bytes);
  // With indices the rows of a unit follow each other as requests do.
  const bool by_request = args.indices != nullptr;
  const i64 rows = by_request ? args.num_requests : args.next_n;
  const i64 groups = by_request ? 1 : args.num_requests;
  // What a dimension of one element has for a stride may be anything.
  const auto stride_of = [](i64 stride, i64 size) { return size > 1 ? stride : 16; };
  maps.q = {.base = args.q,
            .dims = {row_bytes, args.num_heads, rows, groups},
            .strides = {1, stride_of(args.q_head_stride, args.num_heads),
                        stride_of(by_request ? args.q_request_stride : args.q_row_stride, rows),
                        stride_of(args.q_request_stride, groups)},
            .box = {row_bytes, spec.order().heads_per_octet(), spec.order().tokens_per_octet(), 1},
            .rank = 4,
            .type = MapType::u8_,
            .swizzle = swizzle};
  maps.kv = {.base = args.kv_cache,
             .dims = {row_bytes, args.block_kv, args.num_blocks},
             .strides = {1, row_bytes, stride_of(args.block_stride, args.num_blocks)},
             .box = {row_bytes, min_of(args.block_kv, kPagedTileRows), 1},
             .rank = 3,
             .type = MapType::u8_,
             .swizzle = swizzle};
  return maps;
}

// The pre-pass that cuts the work over the SMs (get_paged_mqa_logits_metadata), one block of
// threads. It knows neither the width of the logits nor, with 1-D lengths, next_n: the schedule is
// a hint.
struct PagedMqaScheduleArgs {
  const i32* context_lens;     // [num_requests], or [num_requests, next_n] if lens_per_row
  const i32* indices;          // [num_requests] int32 or null
  i32* schedule;               // [num_sms + 1, 2] int32 (request, tile)
  i64 context_request_stride;  // elements
  i64 context_row_stride;      // elements; 0 unless lens_per_row
  i64 indices_stride;          // elements
  i32 num_requests;
  i32 next_n;  // 1 unless lens_per_row
  i32 num_sms;
  bool lens_per_row;
};
constexpr i32 paged_row_length(const PagedMqaScheduleArgs&, i32 context, i32 /*row*/) {
  return max_of(context, 0);
}

struct PagedMqaScheduleSpec {
  Backend backend;  // sm89: runs on every card

  static constexpr const char* op() { return "paged_mqa_schedule"; }

  template <class Visit>
  constexpr void fields(Visit&& visit) const {
    visit("backend", backend);
  }
  constexpr i32 num_threads() const { return 1024; }
  constexpr i32 smem_bytes() const { return 1024; }
  constexpr i32 spill_limit_bytes() const { return 0; }
  constexpr i32 num_wgmma() const { return 0; }
  constexpr i32 grid(const PagedMqaScheduleArgs&, i32 /*num_sms*/) const { return 1; }
  constexpr i64 workspace_bytes(const PagedMqaScheduleArgs&) const { return 0; }
  constexpr const char* invalid() const {
    return backend == Backend::sm89 ? nullptr : "backend must be sm89";
  }
  bool operator==(const PagedMqaScheduleSpec&) const = default;
};

template <class Visit>
constexpr void for_each_paged_mqa_schedule_spec(Backend backend, Visit&& visit) {
  if (backend == Backend::sm89) visit(PagedMqaScheduleSpec{backend});
}

}  // namespace deep_kernels
