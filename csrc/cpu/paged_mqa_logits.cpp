#include "cpu/paged_mqa_logits.h"

#include <cstring>

#include "cpu/mqa_tiles.h"

namespace deep_kernels::cpu {
namespace {

MqaQueries queries_of(Format format, i32 head_dim, const PagedMqaLogitsArgs& args) {
  return {.format = format,
          .head_dim = head_dim,
          .num_heads = args.num_heads,
          .num_q = args.num_q,
          .num_per_sequence = args.next_n,
          .width = args.width,
          .weights = args.weights,
          .weights_dtype = args.weights_dtype,
          .weights_stride = args.weights_stride};
}

CodeRows query_rows(const PagedMqaLogitsArgs& args) {
  constexpr i64 kElement = sizeof(i32);
  return {
      .values = args.q,
      .exponents = reinterpret_cast<const u8*>(args.q_scale),
      .value_strides = {args.q_request_stride, args.q_row_stride, args.q_head_stride},
      .exponent_strides = {args.q_scale_request_stride * kElement,
                           args.q_scale_row_stride * kElement, args.q_scale_head_stride * kElement},
      .block_stride = 1};
}

// A sequence is a request here.
struct PagedMqaInputs : MqaQueries {
  const PagedMqaLogitsArgs& args;
  CodeRows q;  // [num_requests, next_n, num_heads]
  i32 row_bytes;
  i32 scale_offset;

  PagedMqaInputs(Format format, i32 head_dim, const PagedMqaLogitsArgs& args)
      : MqaQueries(queries_of(format, head_dim, args)),
        args(args),
        q(query_rows(args)),
        row_bytes(paged_row_bytes(format, head_dim)),
        scale_offset(paged_scale_offset(args.block_kv, row_bytes)) {}

  MqaWindow window(i64 token) const {
    const i64 request = token / args.next_n;
    const i32 row = static_cast<i32>(token % args.next_n);
    const i32 context =
        args.context_lens[request * args.context_request_stride + row * args.context_row_stride];
    return {0, paged_row_length(args, context, row)};
  }
  i64 column_of_zero(MqaWindow) const { return 0; }
  CodeRow query(i64 token, i64 head) const {
    return q.at(token / args.next_n, token % args.next_n, head);
  }
  CodeRow kv_row(i64 request, i64 j) const {
    const u8* page = page_of(request, j);
    return {page + j % args.block_kv * row_bytes, is_mx() ? scale_at(page, j) : nullptr, 1};
  }
  float scale_of(i64 request, i64 j) const {
    float value;
    std::memcpy(&value, scale_at(page_of(request, j), j), sizeof value);
    return value;
  }
  // What lies behind a context is nobody's: not even its table entries need be any.
  i64 readable_end(i64 end, i64 /*unit*/) const { return end; }

 private:
  const u8* page_of(i64 request, i64 j) const {
    const i32 block = args.block_table[request * args.table_stride + j / args.block_kv];
    return args.kv_cache + clamp_to(block, 0, args.num_blocks - 1) * args.block_stride;
  }
  const u8* scale_at(const u8* page, i64 j) const {
    return page + scale_offset + j % args.block_kv * i64{sizeof(i32)};
  }
};

}  // namespace

void paged_mqa_logits(Format format, i32 head_dim, DType logits_dtype,
                      const PagedMqaLogitsArgs& args) {
  score(PagedMqaInputs(format, head_dim, args), logits_dtype, args.logits, args.logits_stride,
        args.clean);
}

}  // namespace deep_kernels::cpu
