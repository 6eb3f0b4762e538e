// Flash attention forward: what host, kernels and the CPU backend have to agree on.
//
//   s[i][j] = scale * log2(e) * dot(q[i], k[j]),   p[i][j] = 2^(s[i][j] - m[i]),
//   out[i]  = sum_j p[i][j] v[j] / sum_j p[i][j],  lse[i] = ln(2) * (m[i] + log2(sum_j p[i][j]))
//
// over the keys j that query i sees; a kv head serves num_q_heads / num_kv_heads query heads.
#pragma once

#include "deep_kernels/contract/types.h"

namespace deep_kernels {

inline constexpr double kLog2E = 1.4426950408889634;
inline constexpr i32 kMaxKvSplits = 128;

struct AttentionArgs {
  const u16* q;             // [batch, num_q, num_q_heads, head_dim] bfloat16 | float16
  const u16* k;             // [batch, num_kv, num_kv_heads, head_dim] as q
  const u16* v;             // as k
  u16* out;                 // as q
  float* lse;               // [batch, num_q_heads, num_q], rows contiguous
  const i32* cu_seqlens_q;  // [batch + 1]; null: every member has num_q queries
  const i32* cu_seqlens_k;  // [batch + 1]; null with cu_seqlens_q
  float* partial_out;       // [num_splits, num_rows(), head_dim], each divided by its own sum
  float* partial_lse;       // [num_splits, num_rows()], base 2; both null where num_splits is 1
  // Strides in elements; head_dim has stride 1. With cu_seqlens there is no batch dimension: tokens
  // of all members follow each other, and so do those of lse, [num_q_heads, total_q].
  i64 q_batch_stride, q_token_stride, q_head_stride;
  i64 k_batch_stride, k_token_stride, k_head_stride;
  i64 v_batch_stride, v_token_stride, v_head_stride;
  i64 out_batch_stride, out_token_stride, out_head_stride;
  i64 total_q;  // tokens of all members
  i64 total_kv;
  i32 batch;
  i32 num_q;  // of a member; with cu_seqlens what the caller said is the most, which may be wrong
  i32 num_kv;
  i32 num_q_heads;
  i32 num_kv_heads;
  i32 num_splits;    // parts of the keys that are worked on apart and joined
  float scale_log2;  // softmax_scale * log2(e)

  constexpr i32 heads_per_kv() const { return num_q_heads / num_kv_heads; }
  constexpr i64 num_rows() const { return total_q * num_q_heads; }
};

// --- which keys a query sees
// ----------------------------------------------------------------------

// One member of the batch. What cu_seqlens says is cut to what is there.
struct AttentionMember {
  i64 batch;    // along the batch strides: 0 with cu_seqlens
  i64 first_q;  // along the token strides: 0 without
  i64 first_kv;
  i32 num_q;
  i32 num_kv;
};
constexpr AttentionMember attention_member(const AttentionArgs& args, i32 index) {
  if (args.cu_seqlens_q == nullptr) return {index, 0, 0, args.num_q, args.num_kv};
  const i64 q = clamp_to<i64>(args.cu_seqlens_q[index], 0, args.total_q);
  const i64 kv = clamp_to<i64>(args.cu_seqlens_k[index], 0, args.total_kv);
  return {0, q, kv,
          static_cast<i32>(clamp_to<i64>(args.cu_seqlens_q[index + 1], q, args.total_q) - q),
          static_cast<i32>(clamp_to<i64>(args.cu_seqlens_k[index + 1], kv, args.total_kv) - kv)};
}

// Where the results of a query and head stand in partial_out and partial_lse, and in lse.
constexpr i64 attention_row(const AttentionArgs& args, const AttentionMember& member, i32 head,
                            i32 query) {
  return (member.batch * args.num_q + member.first_q + query) * args.num_q_heads + head;
}
constexpr i64 attention_lse_index(const AttentionArgs& args, const AttentionMember& member,
                                  i32 head, i32 query) {
  const i64 tokens = args.cu_seqlens_q == nullptr ? args.num_q : args.total_q;
  return (member.batch * args.num_q_heads + head) * tokens + member.first_q + query;
}

// Query i sees the keys [0, end). Causal masks end at the bottom right.
constexpr i32 attention_visible_end(i32 query, i32 num_q, i32 num_kv, bool causal) {
  if (!causal) return num_kv;
  return static_cast<i32>(clamp_to<i64>(i64{query} + 1 + num_kv - num_q, 0, num_kv));
}

// Tiles of keys begin at multiples of their size whatever the queries are, so that a row is worked
// on alike wherever it stands. A split takes [begin, end) of them.
struct KeyTiles {
  i32 begin;
  i32 end;
};
constexpr KeyTiles attention_split(i32 split, i32 num_splits, i32 num_kv, i32 tile_keys) {
  const i32 tiles = static_cast<i32>(ceil_div<i64>(num_kv, tile_keys));
  const i32 each = tiles / num_splits;
  const i32 longer = tiles % num_splits;  // the first ones take one more
  return {each * split + min_of(split, longer), each * (split + 1) + min_of(split + 1, longer)};
}

// Into how many parts the keys are cut where a call leaves it open: what takes the least time, the
// fewest of equals. Units go over the workers in rounds; a round costs its tiles of keys and what
// begins and ends a unit, and parts are written, and read by a launch that joins them, all counted
// in tiles. Units that fill the card stay whole unless their queries are few: only then they are so
// small that a last round of a few of them is worth sharing.
inline constexpr i64 kFewQueries = 16;    // of a member
inline constexpr i64 kMinSplitTiles = 4;  // of a part
constexpr i32 attention_num_splits(i64 num_units, i64 num_workers, i64 num_key_tiles, i64 num_q) {
  constexpr i64 kUnitCost = 2, kPartCost = 2, kJoinCost = 3;
  if (num_units >= num_workers && num_q > kFewQueries) return 1;
  const i64 most = min_of<i64>(num_key_tiles / kMinSplitTiles, kMaxKvSplits);
  i64 best = 1, least = ceil_div(num_units, num_workers) * (num_key_tiles + kUnitCost);
  for (i64 splits = 2; splits <= most; ++splits) {
    const i64 work = num_units * (num_key_tiles + splits * (kUnitCost + kPartCost));
    if (work >= num_workers * least) break;  // too much even in whole rounds, as all that follow
    const i64 round = ceil_div(num_key_tiles, splits) + kUnitCost + kPartCost;
    const i64 cost = ceil_div(num_units * splits, num_workers) * round + kJoinCost;
    if (cost < least) best = splits, least = cost;
  }
  return static_cast<i32>(best);
}

// --- softmax
// --------------------------------------------------------------------------------------

// A row's reference m follows its maximum only where that has grown by more than this, base 2. Rows
// decide by themselves; a vote among them may only skip what none of them needs. The first tile
// with a score above -inf always sets it, and so does a maximum that is NaN.
inline constexpr float kRescaleThreshold = 8.0f;
// How far below the maximum it is set where P is rounded to float16, whose powers below 2^-14 lose
// bits: then none above 2^-21 of the greatest does, and none gets to 2^16.
constexpr float reference_below_maximum(DType p) { return p == DType::float16 ? 7.0f : 0.0f; }

// 2^x by fused multiply-adds: x, at least kEx2Lowest, is split into its floor, by adding kEx2Magic
// rounding down, and a fraction f in [0, 1]; the polynomial 1 + c1 f + c2 f^2 + .. is evaluated
// from the highest coefficient on, and the floor added to its exponent as an integer. NaN stays.
// Worst relative error on [-126, 16], coefficients and sums in float32, every f that is a multiple
// of 2^-24: degree 3 8.57e-5, degree 4 2.96e-6. Below -126 results are subnormal, off by at most
// 2^-127, and that of kEx2Lowest, which stands for all below it and for masked scores, is exactly
// 0, since the polynomial is exactly 1 at 0. Coefficients are the minimax ones under that
// condition, by Remez' exchange.
inline constexpr float kEx2Lowest = -127.0f;
inline constexpr float kEx2Magic = 12582912.0f;  // 1.5 * 2^23
inline constexpr float kEx2Degree3[] = {0.695116758f, 0.227644995f, 0.0770670399f};
inline constexpr float kEx2Degree4[] = {0.693044841f, 0.241280198f, 0.0522424728f, 0.0134266838f};

// P is rounded to the dtype of V: degree 3 changes 1% of bfloat16 values, but 8% of float16 ones.
constexpr i32 ex2_degree(DType dtype) { return dtype == DType::float16 ? 4 : 3; }

// How a thread holds its part of a row of one tile of scores: `count` pieces of `length` elements
// in the order of the accumulator.
struct RowFragments {
  i32 length;
  i32 count;
};
inline constexpr i32 kCpuTileKeys = 128;
constexpr RowFragments attention_fragments(Backend backend, i32 tile_keys) {
  if (backend == Backend::cpu) return {32, tile_keys / 32};
  return {tile_keys / 4, 1};  // both MMA leave two neighbours of every eight columns to a lane
}
inline constexpr i32 kMaxFragment = 64;  // elements, of any tile that a Spec may have

// Which exponentials are emulated. All 0: none.
struct Ex2Emulation {
  u8 freq;
  u8 res;
  u8 start_fragment;

  constexpr bool operator==(const Ex2Emulation&) const = default;
};

// Whether element k of a fragment is emulated. Pairs are alike, and only the even k counts: (4, 3)
// takes every second pair.
template <class Int>
constexpr bool ex2_pair_is_emulated(Int freq, Int res, Int k) {
  return freq > 0 && (k - k % 2) % freq >= freq - res;
}
// The last fragment is left out where there are several, and those before the first one asked for.
constexpr bool ex2_fragment_is_emulated(i64 start, i32 fragment, i32 count) {
  return fragment >= start && (count == 1 || fragment + 1 < count);
}
constexpr bool ex2_is_emulated(Ex2Emulation ex2, i32 k, i32 fragment, i32 count) {
  return ex2_fragment_is_emulated(ex2.start_fragment, fragment, count) &&
         ex2_pair_is_emulated<i32>(ex2.freq, ex2.res, k);
}

// Emulated elements of a row; any freq and 0 <= res <= freq.
constexpr i64 ex2_num_emulated(i64 freq, i64 res, i64 start, RowFragments fragments) {
  i64 of_fragment = 0;
  for (i32 k = 0; k < fragments.length; ++k) of_fragment += ex2_pair_is_emulated<i64>(freq, res, k);
  const i64 eligible = fragments.count == 1 ? 1 : fragments.count - 1;
  return of_fragment * max_of<i64>(eligible - start, 0);
}

// The same set of elements in few words: what emulates nothing is {}, and a freq beyond every
// fragment is cut to their length.
constexpr Ex2Emulation ex2_canonical(i64 freq, i64 res, i64 start, RowFragments fragments) {
  if (ex2_num_emulated(freq, res, start, fragments) == 0) return {};
  if (freq > kMaxFragment) {
    res = kMaxFragment - (freq - res);
    freq = kMaxFragment;
  }
  return {static_cast<u8>(freq), static_cast<u8>(res), static_cast<u8>(start)};
}

// --- kernels
// --------------------------------------------------------------------------------------

inline constexpr i32 kHeadPanel = 64;           // elements: 128 bytes, the widest swizzle
inline constexpr i32 kAttentionGroupRows = 64;  // of a math warpgroup, sm90
inline constexpr i64 kFewRows = 128;            // of a member, and of any tile that packs heads
inline constexpr i64 kMaxUnits = 1 << 30;       // of a launch
inline constexpr i32 kMaxQueueClusters = 160;   // of a launch, sm90: no card has as many SMs

template <class Map>
struct AttentionMaps {
  Map q;  // (64, tokens, head_dim / 64, heads, batch), box (64, 64, head_dim / 64), or of a Spec
          // that packs heads (64, heads, tokens, ..), box (64, heads_per_kv, group_queries)
  Map k;  // as q without, box (64, tile_keys, head_dim / 64 / cluster)
  Map v;
};

// What the compiler gets. All members are one byte wide: hashable as bytes, no padding.
struct AttentionSpec {
  Backend backend;  // sm89 | sm90
  DType dtype;      // bfloat16 | float16
  u8 head_panels;   // head_dim / 64: 1, 2 or 4
  bool causal;
  bool varlen;  // tokens by cu_seqlens
  bool split;   // writes partial_out and partial_lse
  // Rows are the queries of all heads of a kv head, heads fastest, sm90: row r of a math warpgroup
  // is query r / heads_per_kv, and what no whole query fills has no query.
  bool packs_heads;
  u8 ex2_freq;
  u8 ex2_res;
  u8 ex2_start_fragment;
  // From here on an AttentionTile, see with_tile.
  u8 tile_rows = 0;  // of a block: sm90 64 per math warpgroup, sm89 16 per warp
  u8 tile_keys = 0;
  u8 k_stages = 0;
  u8 v_stages = 0;
  u8 cluster = 1;        // blocks that share what is loaded of keys and values, sm90: 1 or 2
  bool ordered = false;  // math warpgroups issue their products one after the other, sm90

  static constexpr const char* op() { return "attention"; }

  template <class Visit>
  constexpr void fields(Visit&& visit) const {
    visit("backend", backend);
    visit("dtype", dtype);
    visit("head_panels", head_panels);
    visit("causal", causal);
    visit("varlen", varlen);
    visit("split", split);
    visit("packs_heads", packs_heads);
    visit("ex2_freq", ex2_freq);
    visit("ex2_res", ex2_res);
    visit("ex2_start_fragment", ex2_start_fragment);
    visit("tile_rows", tile_rows);
    visit("tile_keys", tile_keys);
    visit("k_stages", k_stages);
    visit("v_stages", v_stages);
    visit("cluster", cluster);
    visit("ordered", ordered);
  }

  constexpr i32 head_dim() const { return head_panels * kHeadPanel; }
  constexpr Ex2Emulation ex2() const { return {ex2_freq, ex2_res, ex2_start_fragment}; }
  constexpr RowFragments fragments() const { return attention_fragments(backend, tile_keys); }
  constexpr i32 num_threads() const {
    return backend == Backend::sm90 ? 128 * (tile_rows / 64 + 1) : 2 * tile_rows;
  }
  constexpr i32 cluster_size() const { return cluster; }
  // A unit of work: rows that are dealt out at once.
  constexpr i32 unit_rows() const { return tile_rows * cluster; }
  constexpr i32 heads_per_unit(const AttentionArgs& args) const {
    return packs_heads ? args.heads_per_kv() : 1;
  }
  constexpr i32 group_queries(const AttentionArgs& args) const {
    return kAttentionGroupRows / heads_per_unit(args);
  }
  constexpr i32 unit_queries(const AttentionArgs& args) const {
    return packs_heads ? unit_rows() / kAttentionGroupRows * group_queries(args) : unit_rows();
  }
  constexpr i32 unit_heads(const AttentionArgs& args) const {  // units side by side
    return packs_heads ? args.num_kv_heads : args.num_q_heads;
  }
  // Queries of the next unit come while those of this one are in use, where shared memory has room.
  constexpr i32 q_stages() const { return backend == Backend::sm90 && head_panels <= 2 ? 2 : 1; }
  constexpr i32 smem_bytes() const {
    const i32 rows = q_stages() * tile_rows + (k_stages + v_stages) * tile_keys;
    return rows * head_dim() * 2 + (backend == Backend::sm90 ? 2048 : 0);  // barriers, units
  }
  // What the polynomials of emulated powers need beside a row's scores and sums.
  constexpr i32 spill_limit_bytes() const {
    return backend == Backend::sm90 && ex2_res > 0 ? 32 : 0;
  }
  // Both products of a tile, of which masked ones have a loop of their own, and where a unit begins
  // and ends: with those of another unit and alone.
  constexpr i32 num_wgmma() const {
    if (backend != Backend::sm90) return 0;
    const i32 places = causal ? 4 : 3;
    return places * (head_dim() / 16 + tile_keys / 16);
  }
  // Units, which clusters take in turn. With cu_seqlens as many as fit the totals: what the caller
  // said is the longest member is not relied on.
  constexpr i64 num_units(const AttentionArgs& args) const {
    const i64 of_head = varlen ? ceil_div<i64>(args.total_q, unit_queries(args)) + args.batch
                               : i64{ceil_div<i32>(args.num_q, unit_queries(args))} * args.batch;
    return of_head * unit_heads(args) * args.num_splits;
  }
  constexpr i32 grid(const AttentionArgs& args, i32 num_sms) const {
    if (backend == Backend::sm90) num_sms = min_of(num_sms, kMaxQueueClusters * cluster);
    return static_cast<i32>(
        clamp_to<i64>(num_units(args) * cluster, cluster, whole_clusters(num_sms, cluster)));
  }
  static constexpr i64 workspace_bytes(const AttentionArgs& args, i32 head_dim) {
    return args.num_splits == 1 ? 0 : 4 * args.num_splits * args.num_rows() * (head_dim + 1);
  }
  constexpr bool operator==(const AttentionSpec&) const = default;
  // Why this Spec may not exist; null if it may.
  constexpr const char* invalid() const {
    if (backend != Backend::sm89 && backend != Backend::sm90) return "backend must be sm89 or sm90";
    if (dtype == DType::float32) return "dtype must be bfloat16 or float16";
    if (head_panels != 1 && head_panels != 2 && head_panels != 4)
      return "head_dim must be 64, 128 or 256";
    if (ex2_res > ex2_freq) return "ex2_res must be at most ex2_freq";
    const i32 row_unit = backend == Backend::sm90 ? 64 : 16;
    if (tile_rows == 0 || tile_rows % row_unit != 0) return "tile_rows must be whole MMA rows";
    if (tile_keys == 0 || tile_keys % 16 != 0 || fragments().length > kMaxFragment)
      return "tile_keys must be a multiple of 16 up to 240";
    if (k_stages == 0 || v_stages == 0) return "k_stages and v_stages must be at least 1";
    if (backend != Backend::sm90 && (cluster != 1 || ordered || packs_heads))
      return "cluster must be 1, ordered and packs_heads false";
    if (cluster != 1 && cluster != 2) return "cluster must be 1 or 2";
    if (cluster == 2 && (head_panels == 1 || tile_rows != 128))
      return "cluster of 2 needs a head_dim of 128 or 256 and tile_rows of 128";
    if (smem_bytes() > limits_of(backend).max_smem_bytes) return "not enough shared memory";
    return nullptr;
  }
};

struct AttentionTile {
  u8 rows;
  u8 keys;
  u8 k_stages;
  u8 v_stages;
  u8 cluster;
  bool ordered;
};
constexpr AttentionSpec with_tile(AttentionSpec spec, const AttentionTile& tile) {
  spec.tile_rows = tile.rows;
  spec.tile_keys = tile.keys;
  spec.k_stages = tile.k_stages;
  spec.v_stages = tile.v_stages;
  spec.cluster = tile.cluster;
  spec.ordered = tile.ordered;
  return spec;
}
// For members of num_rows rows at most, 0 if that is not known, by what was measured (H200,
// 2026-11; sm89: what fits). The keys of a tile do not depend on the rows: their bits would. Few
// rows wait for memory: stages enough that it is never idle, and no more, since what is on its way
// is in the way of the rest.
constexpr AttentionTile attention_tile(Backend backend, i32 head_dim, bool causal, i64 num_rows) {
  if (backend == Backend::sm89)
    return head_dim == 256 ? AttentionTile{64, 32, 2, 2, 1, false}
                           : AttentionTile{128, 64, 2, 2, 1, false};
  if (num_rows > 0 && num_rows <= 64)
    return head_dim == 64    ? AttentionTile{64, 128, 2, 2, 1, false}
           : head_dim == 128 ? AttentionTile{64, 80, 2, 2, 1, false}
           : causal          ? AttentionTile{64, 64, 3, 3, 1, false}
                             : AttentionTile{64, 80, 2, 2, 1, false};
  if (num_rows > 0 && num_rows <= kFewRows)
    return head_dim == 64    ? AttentionTile{128, 128, 2, 2, 1, true}
           : head_dim == 128 ? AttentionTile{128, 80, 2, 2, 1, true}
           : causal          ? AttentionTile{128, 64, 3, 2, 1, false}
                             : AttentionTile{128, 80, 2, 2, 1, false};
  return head_dim == 64    ? AttentionTile{192, 128, 2, 2, 1, true}
         : head_dim == 128 ? AttentionTile{192, 80, 3, 3, 1, true}
         : causal          ? AttentionTile{128, 64, 3, 2, 2, false}
                           : AttentionTile{128, 80, 2, 2, 2, false};
}

// Emulation that is compiled ahead, for tiles of few rows none: they wait for memory. Other values
// are legal and compiled when they are asked for.
inline constexpr Ex2Emulation kPublishedEx2[] = {{0, 0, 0}, {4, 3, 0}, {14, 6, 0}};

// The Spec with each tile that it may get, of one head and of packed ones.
template <class Visit>
constexpr void for_each_attention_tile(AttentionSpec spec, Visit&& visit) {
  AttentionSpec last{};
  for (bool packs_heads : {false, true})
    for (i64 num_rows : {i64{0}, kFewRows, i64{64}}) {
      if (num_rows == 0 ? packs_heads : !(spec.ex2() == Ex2Emulation{})) continue;
      spec.packs_heads = packs_heads;
      spec = with_tile(spec, attention_tile(spec.backend, spec.head_dim(), spec.causal, num_rows));
      if (spec.invalid() != nullptr || spec == last) continue;
      visit(spec);
      last = spec;
    }
}
template <class Visit>
constexpr void for_each_attention_spec(Backend backend, Visit&& visit) {
  for (DType dtype : {DType::bfloat16, DType::float16})
    for (u8 panels : {u8{1}, u8{2}, u8{4}})
      for (bool causal : {false, true})
        for (bool varlen : {false, true})
          for (bool split : {false, true})
            for (Ex2Emulation ex2 : kPublishedEx2)
              for_each_attention_tile({.backend = backend,
                                       .dtype = dtype,
                                       .head_panels = panels,
                                       .causal = causal,
                                       .varlen = varlen,
                                       .split = split,
                                       .packs_heads = false,
                                       .ex2_freq = ex2.freq,
                                       .ex2_res = ex2.res,
                                       .ex2_start_fragment = ex2.start_fragment},
                                      visit);
}

// A tensor as maps see it, for boxes of its tokens, panels and heads.
struct MappedTensor {
  const u16* base;
  i64 tokens, panels, heads, batch;
  i64 token_stride, head_stride, batch_stride;

  // Both dtypes have two bytes, and nothing is computed by a copy: zeros beyond the end are alike.
  // Of no tokens there can be no map (rank 0), and nothing asks for one.
  template <class Map>
  constexpr Map map(const i64 (&dims)[5], const i64 (&strides)[5], const i32 (&box)[5]) const {
    Map map{};
    map.base = base;
    map.type = MapType::bf16_;
    map.swizzle = Swizzle::b128;
    set_dimensions(map, dims, strides, sizeof(u16), box);
    if (tokens == 0) map.rank = 0;
    return map;
  }
  // Tokens of one head, panel by panel.
  template <class Map>
  constexpr Map of_head(i32 box_tokens, i32 box_panels) const {
    return map<Map>({kHeadPanel, tokens, panels, heads, batch},
                    {1, token_stride, kHeadPanel, head_stride, batch_stride},
                    {kHeadPanel, box_tokens, box_panels, 1, 1});
  }
  // Heads of tokens, a panel alone.
  template <class Map>
  constexpr Map of_heads(i32 box_heads, i32 box_tokens) const {
    return map<Map>({kHeadPanel, heads, tokens, panels, batch},
                    {1, head_stride, token_stride, kHeadPanel, batch_stride},
                    {kHeadPanel, box_heads, box_tokens, 1, 1});
  }
};

template <class Map = MapDescription>
constexpr AttentionMaps<Map> attention_maps(const AttentionArgs& args, const AttentionSpec& spec) {
  const bool packed = args.cu_seqlens_q != nullptr;
  const i64 batch = packed ? 1 : args.batch;
  const i64 num_q = packed ? args.total_q : args.num_q;
  const i64 num_kv = packed ? args.total_kv : args.num_kv;
  const i32 panels = spec.head_panels;
  const MappedTensor q{.base = args.q,
                       .tokens = num_q,
                       .panels = panels,
                       .heads = args.num_q_heads,
                       .batch = batch,
                       .token_stride = args.q_token_stride,
                       .head_stride = args.q_head_stride,
                       .batch_stride = args.q_batch_stride};
  const MappedTensor k{.base = args.k,
                       .tokens = num_kv,
                       .panels = panels,
                       .heads = args.num_kv_heads,
                       .batch = batch,
                       .token_stride = args.k_token_stride,
                       .head_stride = args.k_head_stride,
                       .batch_stride = args.k_batch_stride};
  MappedTensor v = k;
  v.base = args.v;
  v.token_stride = args.v_token_stride;
  v.head_stride = args.v_head_stride;
  v.batch_stride = args.v_batch_stride;
  const i32 share = panels / spec.cluster;
  return {spec.packs_heads ? q.of_heads<Map>(spec.heads_per_unit(args), spec.group_queries(args))
                           : q.of_head<Map>(kAttentionGroupRows, panels),
          k.of_head<Map>(spec.tile_keys, share), v.of_head<Map>(spec.tile_keys, share)};
}

// --- joining splits
// -------------------------------------------------------------------------------

inline constexpr i32 kJoinAhead = 4;  // splits of a row that a warp loads at once

struct AttentionJoinSpec {
  Backend backend;  // sm89, or one that may start before the kernel ahead has ended: sm90
  DType dtype;
  u8 head_panels;

  static constexpr const char* op() { return "attention_join"; }

  template <class Visit>
  constexpr void fields(Visit&& visit) const {
    visit("backend", backend);
    visit("dtype", dtype);
    visit("head_panels", head_panels);
  }

  static constexpr i32 num_threads() { return 256; }
  static constexpr i32 num_warps() { return num_threads() / 32; }
  // Warps that share a row: a power of two, all of a block at most.
  static constexpr i32 warps_per_row(i32 num_splits) {
    i32 warps = 1;
    while (warps < num_warps() && warps * kJoinAhead < num_splits) warps *= 2;
    return warps;
  }
  // It follows what it joins: its launch need not wait for more than it does itself.
  constexpr bool follows_own_kernel() const { return backend != Backend::sm89; }
  constexpr i32 smem_bytes() const { return num_warps() * head_panels * kHeadPanel * 4; }
  static constexpr i32 spill_limit_bytes() { return 0; }
  static constexpr i32 num_wgmma() { return 0; }
  constexpr i32 grid(const AttentionArgs& args, i32 num_sms) const {
    const i32 rows = num_warps() / warps_per_row(args.num_splits);
    return static_cast<i32>(clamp_to<i64>(ceil_div<i64>(args.num_rows(), rows), 1, 8 * num_sms));
  }
  constexpr bool operator==(const AttentionJoinSpec&) const = default;
  constexpr const char* invalid() const {
    if (backend != Backend::sm89 && backend != Backend::sm90) return "backend must be sm89 or sm90";
    if (dtype == DType::float32) return "dtype must be bfloat16 or float16";
    return head_panels == 1 || head_panels == 2 || head_panels == 4
               ? nullptr
               : "head_dim must be 64, 128 or 256";
  }
};

template <class Visit>
constexpr void for_each_attention_join_spec(Backend backend, Visit&& visit) {
  for (DType dtype : {DType::bfloat16, DType::float16})
    for (u8 panels : {u8{1}, u8{2}, u8{4}}) {
      const AttentionJoinSpec spec{backend, dtype, panels};
      if (spec.invalid() == nullptr) visit(spec);
    }
}

}  // namespace deep_kernels
