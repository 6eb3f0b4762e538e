// MQA logits by mma.sync, ldmatrix and cp.async alone: for sm_89 and every newer card. The same
// blocks, groups and column order as on Hopper; one block per SM, persistent, 8 warps without
// roles.
//
// Warp w works for group w / 2 (query rows [128 g, 128 g + 128)) on one half of the kv rows of
// every stage: 16 rows at a time against 16 octets of query columns. An octet's scores are summed
// into the heads at once, so that only four accumulators live.
//
// Octets go by four in a loop that is not unrolled: given all 16 ptxas moves so many loads ahead
// that it spills, least of all able to afford it where the hardware has no e4m3 mma.sync (sm_90)
// and both operands are converted to float16.
#pragma once

#include "deep_kernels/contract/mqa_logits.h"
#include "deep_kernels/kernels/mqa_block_sm89.cuh"
#include "deep_kernels/kernels/mqa_logits_tile.cuh"
#include "deep_kernels/kernels/mqa_mx.cuh"
#include "deep_kernels/kernels/mqa_schedule.cuh"
#include "deep_kernels/kernels/mqa_wide.cuh"
#include "deep_kernels/ptx/base.cuh"
#include "deep_kernels/tile/fragments.cuh"
#include "deep_kernels/tile/layout.cuh"
#include "deep_kernels/tile/pipeline.cuh"

namespace deep_kernels::mqa_sm89 {

template <MqaLogitsSpec S>
struct Smem {
  alignas(128) u8 query[kMqaQueryRows * S.head_dim];                // column order, swizzled
  alignas(128) u8 kv[S.kv_stages][S.kv_stage_rows() * S.head_dim];  // swizzled
  ColumnWeights<kMqaQueryRows, S.tokens_per_block(), S.num_threads()> weights;  // column order
  MxColumns<kMqaQueryRows, S.is_mx()> mx;
  float power[S.tokens_per_block()];  // that the logits of the tokens owe, see owed_power
  ScheduleScratch schedule;
};

inline constexpr i32 kWarpsPerGroup = 2;

template <MqaLogitsSpec S>
struct Columns {
  Smem<S>& smem;

  static DK_DEVICE i32 token(i32 column) { return S.block_token_of(column); }
  static DK_DEVICE i32 head(i32 column) { return S.head_of(column % kMqaGroupRows); }
  DK_DEVICE u32 power(i32 token) const { return ptx::smem_addr(&smem.power[token]); }
};

// Where the query row of a column lies; null for one that is not there.
template <MqaLogitsSpec S>
DK_DEVICE const u8* query_row(const MqaLogitsArgs& args, i32 first_row, i32 column) {
  const i32 row = first_row + Columns<S>::token(column);
  const i32 head = Columns<S>::head(column);
  if (row >= args.num_q || head >= args.num_heads) return nullptr;
  return args.q + row * args.q_token_stride + head * args.q_head_stride;
}

template <MqaLogitsSpec S>
DK_DEVICE void load_query(const MqaLogitsArgs& args, i32 first_row, Smem<S>& smem) {
  copy_rows<S.head_dim, S.num_threads()>(
      ptx::smem_addr(&smem.query[0]), kMqaQueryRows, args.q,
      [&](i32 column) { return query_row<S>(args, first_row, column); });
}

// MX: the same rows as e4m3 with one exponent each, which goes into the weights. Behind the posted
// weights; a block barrier must follow.
template <MqaLogitsSpec S>
DK_DEVICE void rebase_query(const MqaLogitsArgs& args, i32 first_row, Smem<S>& smem) {
  DK_NO_UNROLL
  for (i32 column = ptx::thread_index(); column < kMqaQueryRows; column += S.num_threads()) {
    const i32 given =
        load_query_exponents(args, first_row + Columns<S>::token(column), Columns<S>::head(column));
    const MxRow<S.format> row = rebase_row<S.format, S.head_dim>(
        ptx::smem_addr(&smem.query[0]), column, query_row<S>(args, first_row, column), given);
    const float weight = ptx::load_shared_f32(ptx::smem_addr(&smem.weights.weight[column]));
    smem.mx.post(column, row, given, weight);
  }
}

template <MqaLogitsSpec S>
DK_DEVICE void load_kv(const MqaLogitsArgs& args, i32 first_row, i32 stage, Smem<S>& smem) {
  copy_rows<S.head_dim, S.num_threads()>(ptx::smem_addr(&smem.kv[stage][0]), S.kv_stage_rows(),
                                         args.kv, [&](i32 row) -> const u8* {
                                           if (first_row + row >= args.num_kv) return nullptr;
                                           return args.kv + (first_row + row) * args.kv_stride;
                                         });
}

// Registers of one warp for one unit: a query block and the run of its stages.
template <MqaLogitsSpec S>
struct Math {
  using Sum = HeadSum<S.order()>;
  using Logit = typename LogitStorage<S.logits_dtype>::Type;
  using Query = tile::RowsAsB<S.head_dim>;
  static constexpr i32 kWarpRows = S.kv_stage_rows() / kWarpsPerGroup;  // of a stage
  static constexpr i32 kSteps = S.head_dim / 32;                        // k-steps of the MMA

  const MqaLogitsArgs& args;
  Smem<S>& smem;
  i32 group;
  i32 warp_row;  // first kv row of the warp in a stage

  // 16 rows of kv as the MMA's first operand.
  DK_DEVICE void load_kv_fragments(u32 (&a)[kSteps][4], u32 rows) const {
    DK_UNROLL
    for (i32 step = 0; step < kSteps; ++step)
      tile::load_a_fragment<S.head_dim>(a[step], rows, step);
  }

  // Scores of one octet of query columns, summed into their heads.
  DK_DEVICE void add_octet(float (&sum)[Sum::kSlots][2], const u32 (&a)[kSteps][4],
                           const Query& query, u32 weights, i32 octet) const {
    u32 b[kSteps][2];
    query.load(b, octet * 8 * S.head_dim);
    float x[4] = {};
    DK_UNROLL
    for (i32 step = 0; step < kSteps; ++step) ptx::mma_m16n8k32_e4m3(x, a[step], b[step]);
    float weight[2];
    ptx::load_shared_f32x2(weight, weights + octet * 8 * sizeof(float));
    Sum::template add<Relu::clamp, false>(sum, x, weight);
  }

  // The weights that the fast way takes.
  DK_DEVICE u32 fast_weights(i32 column) const {
    if constexpr (S.is_mx())
      return ptx::smem_addr(&smem.mx.powered[column]);
    else
      return ptx::smem_addr(&smem.weights.weight[column]);
  }

  DK_DEVICE WideOperands<WideRows<S.head_dim>> wide_operands(u32 rows, i32 kv_row) const {
    const i32 column = group * kMqaGroupRows;
    WideOperands<WideRows<S.head_dim>> at{
        .kv = {rows},
        .kv_exponents = {},
        .query = ptx::smem_addr(&smem.query[column * S.head_dim]),
        .query_exponents = ptx::smem_addr(&smem.mx.exponents[column]),
        .weights = ptx::smem_addr(&smem.weights.weight[column])};
    DK_UNROLL
    for (i32 i = 0; i < 2; ++i)
      at.kv_exponents[i] = load_kv_exponents(args, kv_row + ptx::lane_index() / 4 + 8 * i);
    return at;
  }

  DK_DEVICE void stage(i32 first_row, i32 kv_row, i32 stage) const {
    const Query query(ptx::smem_addr(&smem.query[group * kMqaGroupRows * S.head_dim]));
    const u32 weights = fast_weights(group * kMqaGroupRows + 2 * (ptx::lane_index() % 4));
    const u32 rows = ptx::smem_addr(&smem.kv[stage][0]);
    DK_NO_UNROLL
    for (i32 row = warp_row; row < warp_row + kWarpRows; row += kTileRows) {
      u32 a[kSteps][4];
      load_kv_fragments(a, rows + row * S.head_dim);
      DK_NO_UNROLL
      for (i32 set = 0; set < Sum::kSets; ++set) {
        float sum[Sum::kSlots][2] = {};
        DK_NO_UNROLL
        for (i32 first = 0; first < S.octets_per_token_set(); first += 4) {
          DK_UNROLL
          for (i32 i = 0; i < 4; ++i)
            add_octet(sum, a, query, weights, set * S.octets_per_token_set() + first + i);
        }
        float logit[Sum::kSlots][Sum::kRows];
        Sum::join(logit, sum);
        scale(logit, set, kv_row + row + Sum::row());
        if constexpr (S.is_mx())
          RebasedWideSum<S>::mend(
              logit, set, [&] { return wide_operands(rows + row * S.head_dim, kv_row + row); });
        store(logit, set, first_row, kv_row + row + Sum::row());
      }
    }
  }

  // The lane's token inside the block.
  DK_DEVICE i32 token_of(i32 set, i32 slot) const {
    return group * S.tokens_per_group() + Sum::first_token() + Sum::further(set, slot);
  }
  DK_DEVICE void scale(float (&logit)[Sum::kSlots][Sum::kRows], i32 set, i32 kv_row) const {
    DK_UNROLL
    for (i32 i = 0; i < Sum::kRows; ++i) {
      const i32 j = kv_row + 8 * i;
      const float kv_scale = j < args.num_kv ? ptx::load_global(args.kv_scale + j) : 0.0f;
      DK_UNROLL
      for (i32 slot = 0; slot < Sum::kSlots; ++slot)
        logit[slot][i] =
            scaled_sum(logit[slot][i], kv_scale,
                       ptx::load_shared_f32(ptx::smem_addr(&smem.power[token_of(set, slot)])));
    }
  }
  DK_DEVICE void store(const float (&logit)[Sum::kSlots][Sum::kRows], i32 set, i32 first_row,
                       i32 kv_row) const {
    if (!Sum::stores()) return;
    DK_UNROLL
    for (i32 slot = 0; slot < Sum::kSlots; ++slot) {
      const i32 row = first_row + token_of(set, slot);
      const MqaWindow window = load_window(args, row, window_limit(args));
      const RowEdge edge = row_edge(args, window, row);
      Logit* origin = static_cast<Logit*>(args.logits) + row_origin(args, window, row);
      DK_UNROLL
      for (i32 i = 0; i < Sum::kRows; ++i) {
        const i32 j = kv_row + 8 * i;
        store_edge<S.clean != Clean::off>(origin + j, j, edge, logit[slot][i]);
      }
    }
  }

  // All warps together: the stages [kv_begin, kv_begin + num_stages * rows) of one query block.
  DK_DEVICE void run_unit(i32 first_row, i32 kv_begin, i32 num_stages) {
    if constexpr (!S.is_mx()) load_query<S>(args, first_row, smem);
    // One copy group per stage; the query travels with the first.
    DK_UNROLL
    for (i32 ahead = 0; ahead < S.kv_stages - 1; ++ahead) {
      if (ahead < num_stages) load_kv<S>(args, kv_begin + ahead * S.kv_stage_rows(), ahead, smem);
      ptx::cp_async_commit_group();
    }
    const Columns<S> columns{smem};
    smem.weights.post(args, first_row, columns);
    ptx::sync_threads();
    if constexpr (S.is_mx()) {
      rebase_query<S>(args, first_row, smem);  // the first stage's barrier is ahead
    } else {
      smem.weights.tame(args, first_row, columns);
    }
    auto stages = tile::Ring<S.kv_stages>::drainer();
    auto fills = tile::Ring<S.kv_stages>::filler();
    DK_UNROLL
    for (i32 ahead = 0; ahead < S.kv_stages - 1; ++ahead) fills.next();
    DK_NO_UNROLL
    for (i32 i = 0; i < num_stages; ++i) {
      ptx::cp_async_wait_group<S.kv_stages - 2>();
      ptx::sync_threads();  // the stage is there for all, and all are done with the one before it
      if (i + S.kv_stages - 1 < num_stages)
        load_kv<S>(args, kv_begin + (i + S.kv_stages - 1) * S.kv_stage_rows(), fills.slot, smem);
      ptx::cp_async_commit_group();
      stage(first_row, kv_begin + i * S.kv_stage_rows(), stages.slot);
      stages.next();
      fills.next();
    }
    ptx::cp_async_wait_group<0>();
    ptx::sync_threads();  // before the next unit's query overwrites this one
  }
};

}  // namespace deep_kernels::mqa_sm89

namespace deep_kernels {

template <MqaLogitsSpec S>
DK_DEVICE void mqa_logits_sm89(const MqaLogitsArgs& args) {
  using namespace mqa_sm89;
  static_assert(S.invalid() == nullptr);
  static_assert(sizeof(Smem<S>) <= S.smem_bytes());
  static_assert(S.num_threads() == 32 * kMqaGroups * kWarpsPerGroup);
  using Logit = typename LogitStorage<S.logits_dtype>::Type;
  using Scan = SpanScan<S.tokens_per_block()>;
  constexpr i32 kStagesPerChunk = kMqaChunkRows / S.kv_stage_rows();
  auto& smem = ptx::dynamic_smem<Smem<S>>();
  const i32 warp = ptx::warp_index();
  const i32 num_warps = S.num_threads() / 32;

  find_run<S>(args, smem.schedule);
  ptx::sync_threads();
  const MqaCut begin = stored_cut(smem.schedule, 0);
  const MqaCut end = stored_cut(smem.schedule, 1);
  // Without roles nobody is free to fill meanwhile: concurrent fills first, deferred last.
  if constexpr (S.clean == Clean::concurrent) fill_untouched<S, Logit>(args, warp, num_warps);

  Math<S> math{.args = args,
               .smem = smem,
               .group = warp / kWarpsPerGroup,
               .warp_row = warp % kWarpsPerGroup * Math<S>::kWarpRows};
  const i32 num_blocks = ceil_div(args.num_q, S.tokens_per_block());
  for (i32 block = begin.block; block <= end.block && block < num_blocks; ++block) {
    MqaSpan span = Scan::load(args, block);  // lane 0 looks at `block`, others further on
    span.begin = ptx::shuffle(span.begin, 0);
    span.num_chunks = ptx::shuffle(span.num_chunks, 0);
    const i32 first = block == begin.block ? min_of(begin.chunk, span.num_chunks) : 0;
    const i32 last = block == end.block ? min_of(end.chunk, span.num_chunks) : span.num_chunks;
    if (first < last)
      math.run_unit(block * S.tokens_per_block(), span.begin + first * kMqaChunkRows,
                    (last - first) * kStagesPerChunk);
  }
  if constexpr (S.clean == Clean::deferred) {
    ptx::sync_threads();
    fill_untouched<S, Logit>(args, warp, num_warps);
  }
}

}  // namespace deep_kernels
