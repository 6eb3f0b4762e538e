// Paged MQA logits by mma.sync, ldmatrix and cp.async alone: for sm_89 and every newer card. The
// same units, cuts and column order as on Hopper; one block per SM, persistent, 8 warps without
// roles. Each warp takes 16 kv rows of every stage against all query columns of the unit, an octet
// at a time, so that only four accumulators live.
//
// A k-step of the MMA is one block of an MX format: the products of the blocks are scaled one by
// one, and rows that leave float32 go the exact way (mqa_wide.cuh).
#pragma once

#include "deep_kernels/contract/paged_mqa_logits.h"
#include "deep_kernels/kernels/mqa_block_sm89.cuh"
#include "deep_kernels/kernels/paged_mqa_schedule.cuh"
#include "deep_kernels/kernels/paged_mqa_unit.cuh"
#include "deep_kernels/ptx/base.cuh"
#include "deep_kernels/tile/fragments.cuh"
#include "deep_kernels/tile/pipeline.cuh"

namespace deep_kernels::paged_sm89 {

using namespace mqa_sm89;
using namespace paged;

template <PagedMqaLogitsSpec S>
struct Smem {
  alignas(128) u8 query[S.query_bytes()];               // column order, swizzled
  alignas(128) u8 kv[S.kv_stages][S.kv_stage_bytes()];  // swizzled
  alignas(128) u32 kv_scale[S.kv_stages][S.kv_stage_rows()];
  ColumnWeights<S.unit_columns(), S.unit_rows, S.num_threads()> weights;  // column order
  MxColumns<S.unit_columns(), S.is_mx()> mx;
  Token token[S.unit_rows];
  PagedRun run;
};

template <PagedMqaLogitsSpec S>
struct Columns {
  Smem<S>& smem;

  static DK_DEVICE i32 token(i32 column) { return S.token_of(column); }
  static DK_DEVICE i32 head(i32 column) { return S.head_of(column); }
  DK_DEVICE u32 power(i32 token) const { return ptx::smem_addr(&smem.token[token].power); }
};

// Behind the posted weights; a block barrier must follow.
template <PagedMqaLogitsSpec S>
DK_DEVICE void rebase_query(const PagedMqaLogitsArgs& args, const Work& work, Smem<S>& smem) {
  DK_NO_UNROLL
  for (i32 column = ptx::thread_index(); column < S.unit_columns(); column += S.num_threads()) {
    const i32 given = load_column_exponents<S>(args, work, column);
    const MxRow<S.format> row = rebase_row<S.format, S.head_dim>(
        ptx::smem_addr(&smem.query[0]), column, query_row<S>(args, work, column), given);
    const float weight = ptx::load_shared_f32(ptx::smem_addr(&smem.weights.weight[column]));
    smem.mx.post(column, row, given, weight);
  }
}

// The kv tokens of a request in their pages.
struct Pages {
  const PagedMqaLogitsArgs& args;
  const i32* table;  // the request's row
  i32 shift;         // log2 of tokens per page

  DK_DEVICE const u8* page_of(i32 token) const {
    const i32 entry = clamp_to(ptx::load_global(table + (token >> shift)), 0, args.num_blocks - 1);
    return args.kv_cache + entry * args.block_stride;
  }
  DK_DEVICE i32 place_of(i32 token) const { return token & (args.block_kv - 1); }  // in its page
};

// Tokens [first, first + rows of a stage), zeros from `end` on, and their scales.
template <PagedMqaLogitsSpec S>
DK_DEVICE void load_kv(const Pages& pages, i32 first, i32 end, i32 stage, Smem<S>& smem) {
  constexpr i32 kScaleBytes = 4;
  const u8* valid = pages.args.kv_cache;
  copy_rows<S.row_bytes(), S.num_threads()>(
      ptx::smem_addr(&smem.kv[stage][0]), S.kv_stage_rows(), valid, [&](i32 row) -> const u8* {
        const i32 token = first + row;
        if (token >= end) return nullptr;
        return pages.page_of(token) + pages.place_of(token) * S.row_bytes();
      });
  // Four scales to a copy; they belong to one page.
  const i32 row = 4 * ptx::thread_index();
  if (row >= S.kv_stage_rows()) return;
  const i32 token = first + row;
  const u8* from = valid;
  if (token < end)
    from = pages.page_of(token) + paged_scale_offset(pages.args.block_kv, S.row_bytes()) +
           pages.place_of(token) * kScaleBytes;
  ptx::cp_async_16(ptx::smem_addr(&smem.kv_scale[stage][row]), from, token < end ? 16 : 0);
}

// Registers of one warp.
template <PagedMqaLogitsSpec S>
struct Math {
  using Lane = LaneLogits<S>;
  using Sum = typename Lane::Sum;
  using Row = BlockScaledRow<S>;
  static constexpr i32 kSteps = S.head_dim / 32;  // k-steps of the MMA, blocks of MX formats
  static constexpr i32 kPassOctets = S.pass_columns() / 8;
  static_assert(Sum::kSets == 1 && Sum::kSlots == 1);

  const PagedMqaLogitsArgs& args;
  Smem<S>& smem;
  i32 warp_row;  // first kv row of the warp in a stage

  DK_DEVICE u32 kv_scale(i32 stage, i32 row) const {
    return static_cast<u32>(ptx::load_shared_i32(ptx::smem_addr(&smem.kv_scale[stage][row])));
  }
  // The weights that the fast way takes.
  DK_DEVICE u32 fast_weights(i32 column) const {
    if constexpr (S.is_mx())
      return ptx::smem_addr(&smem.mx.powered[column]);
    else
      return ptx::smem_addr(&smem.weights.weight[column]);
  }

  // Scores of one octet of query columns, summed into their heads. `exponents`: of the lane's two
  // kv rows.
  DK_DEVICE void add_octet(float (&sum)[1][2], const u32 (&a)[kSteps][4], const u32 (&exponents)[2],
                           const tile::RowsAsB<S.head_dim>& query, i32 octet) const {
    u32 b[kSteps][2];
    query.load(b, octet * 8 * S.head_dim);
    float x[4] = {};
    DK_UNROLL
    for (i32 step = 0; step < kSteps; ++step) {
      if constexpr (S.is_mx()) {
        float part[4] = {};
        ptx::mma_m16n8k32_e4m3(part, a[step], b[step]);
        DK_UNROLL
        for (i32 i = 0; i < 4; ++i)
          x[i] = ptx::fma(part[i], Row{exponents[i / 2]}.factor(step), x[i]);
      } else {
        ptx::mma_m16n8k32_e4m3(x, a[step], b[step]);
      }
    }
    float weight[2];
    ptx::load_shared_f32x2(weight, fast_weights(8 * octet + 2 * (ptx::lane_index() % 4)));
    Sum::template add<Relu::clamp, false>(sum, x, weight);
  }

  // Logits of one pass of query columns, scaled.
  DK_DEVICE void score(float (&logit)[1][Sum::kRows], const u32 (&a)[kSteps][4],
                       const u32 (&exponents)[2], i32 pass) const {
    // Unrolled as far as registers go where the hardware has no e4m3 mma.sync (sm_90).
    constexpr i32 kTogether = S.is_mx() ? 1 : 4;
    const tile::RowsAsB<S.head_dim> query(ptx::smem_addr(&smem.query[0]));
    float sum[1][2] = {};
    DK_NO_UNROLL
    for (i32 first = 0; first < kPassOctets; first += kTogether) {
      DK_UNROLL
      for (i32 i = 0; i < kTogether; ++i)
        add_octet(sum, a, exponents, query, pass * kPassOctets + first + i);
    }
    Sum::join(logit, sum);
  }

  DK_DEVICE float scale_of(u32 bits) const {
    if constexpr (S.is_mx())
      return Row{bits}.scale();
    else
      return ptx::float_of(bits);
  }
  // MX: logits that the fast way has made NaN, once more the exact way.
  DK_DEVICE void mend(float (&logit)[1][Sum::kRows], const TileRows<S>& rows,
                      const u32 (&exponents)[2], i32 pass) const {
    PagedWideSum<S>::mend(logit, 0, [&] {
      const i32 column = pass * S.pass_columns();
      return WideOperands<TileRows<S>>{
          .kv = rows,
          .kv_exponents = {static_cast<i32>(exponents[0]), static_cast<i32>(exponents[1])},
          .query = ptx::smem_addr(&smem.query[column * S.head_dim]),
          .query_exponents = ptx::smem_addr(&smem.mx.exponents[column]),
          .weights = ptx::smem_addr(&smem.weights.weight[column])};
    });
  }

  // The warp's 16 rows of a stage whose first kv token is `token`.
  DK_DEVICE void one_stage(i32 token, i32 stage) const {
    const TileRows<S> rows{ptx::smem_addr(&smem.kv[stage][0]) + warp_row * S.row_bytes()};
    u32 a[kSteps][4];
    DK_UNROLL
    for (i32 step = 0; step < kSteps; ++step) rows.load(a[step], step);
    u32 exponents[2];
    DK_UNROLL
    for (i32 i = 0; i < 2; ++i)
      exponents[i] = kv_scale(stage, warp_row + ptx::lane_index() / 4 + 8 * i);
    float scale[Sum::kRows];
    DK_UNROLL
    for (i32 i = 0; i < Sum::kRows; ++i)
      scale[i] = scale_of(kv_scale(stage, warp_row + Sum::row() + 8 * i));
    const i32 column = token + warp_row + Sum::row();
    DK_NO_UNROLL
    for (i32 pass = 0; pass < S.num_passes(); ++pass) {
      const i32 row = pass * S.order().tokens() + Sum::first_token();
      const u32 at = ptx::smem_addr(&smem.token[row]);
      float logit[1][Sum::kRows];
      score(logit, a, exponents, pass);
      Lane::finish(logit[0], scale, at, column);
      if constexpr (S.is_mx()) mend(logit, rows, exponents, pass);
      Lane::store(args.logits, logit[0], at, column);
    }
  }

  // Queries, weights and tokens of a unit, for all warps; a block barrier must follow.
  DK_DEVICE void post_unit(const Work& work) const {
    const Columns<S> columns{smem};
    const i32 thread = ptx::thread_index();
    if (thread < S.unit_rows) post_token(args, work, thread, smem.token[thread]);
    smem.weights.post(args, first_row(args, work), columns);
    ptx::sync_threads();
    if constexpr (S.is_mx())
      rebase_query<S>(args, work, smem);
    else
      smem.weights.tame(args, first_row(args, work), columns);
  }

  // All warps together: the tiles of one unit.
  DK_DEVICE void run_unit(const Work& work) const {
    constexpr i32 kAhead = S.kv_stages - 1;
    const Pages pages{.args = args,
                      .table = args.block_table + work.request * args.table_stride,
                      .shift = paged_block_shift(args.block_kv)};
    const i32 first = work.tiles.begin * kPagedTileRows;
    const i32 last = work.tiles.end * kPagedTileRows;
    const i32 end = min_of(last, work.longest);  // of pages behind it nothing is known
    const i32 num_stages = ceil_div(last - first, S.kv_stage_rows());
    if constexpr (!S.is_mx())
      copy_rows<S.head_dim, S.num_threads()>(
          ptx::smem_addr(&smem.query[0]), S.unit_columns(), args.q,
          [&](i32 column) { return query_row<S>(args, work, column); });
    // One copy group per stage; the query travels with the first.
    DK_UNROLL
    for (i32 i = 0; i < kAhead; ++i) {
      if (i < num_stages) load_kv<S>(pages, first + i * S.kv_stage_rows(), end, i, smem);
      ptx::cp_async_commit_group();
    }
    post_unit(work);
    auto stages = tile::Ring<S.kv_stages>::drainer();
    auto fills = tile::Ring<S.kv_stages>::filler();
    DK_UNROLL
    for (i32 i = 0; i < kAhead; ++i) fills.next();
    DK_NO_UNROLL
    for (i32 i = 0; i < num_stages; ++i, stages.next(), fills.next()) {
      ptx::cp_async_wait_group<S.kv_stages - 2>();
      ptx::sync_threads();  // the stage is there for all, and all are done with the one before it
      const i32 token = first + i * S.kv_stage_rows();
      if (i + kAhead < num_stages)
        load_kv<S>(pages, token + kAhead * S.kv_stage_rows(), end, fills.slot, smem);
      ptx::cp_async_commit_group();
      if (token + warp_row < last) one_stage(token, stages.slot);
    }
    ptx::cp_async_wait_group<0>();
    ptx::sync_threads();  // before the next unit's query overwrites this one
  }
};

}  // namespace deep_kernels::paged_sm89

namespace deep_kernels {

template <PagedMqaLogitsSpec S>
DK_DEVICE void paged_mqa_logits_sm89(const PagedMqaLogitsArgs& args) {
  using namespace paged_sm89;
  static_assert(S.invalid() == nullptr);
  static_assert(sizeof(Smem<S>) <= S.smem_bytes());
  constexpr i32 kWarps = S.num_threads() / 32;
  static_assert(S.kv_stage_rows() == kWarps * kTileRows);
  using Logit = typename LogitStorage<S.logits_dtype>::Type;
  auto& smem = ptx::dynamic_smem<Smem<S>>();
  const i32 warp = ptx::warp_index();

  find_paged_run<S>(args, smem.run);
  ptx::sync_threads();
  const Math<S> math{.args = args, .smem = smem, .warp_row = warp * kTileRows};
  const PagedCut begin = stored_cut(smem.run, 0);
  const PagedCut end = stored_cut(smem.run, 1);
  DK_NO_UNROLL
  for (i32 request = begin.request; request <= end.request && request < args.num_requests;
       ++request) {
    const RequestRows rows = load_request(args, request);
    const TileRange tiles = run_tiles(begin, end, request, paged_num_tiles(rows.longest));
    if (tiles.begin >= tiles.end) continue;
    DK_NO_UNROLL
    for (i32 row = 0; row < rows.count; row += S.unit_rows)
      math.run_unit({request, row, rows.count - row, rows.longest, tiles});
  }
  fill_behind_tiles<Logit>(args, warp, kWarps);  // without roles nobody is free to do it meanwhile
}

}  // namespace deep_kernels
