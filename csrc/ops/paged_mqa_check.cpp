#include "ops/paged_mqa_check.h"

#include <fmt/format.h>

#include "ops/checks.h"
#include "runtime/errors.h"

namespace deep_kernels {

namespace {

using namespace checks;

constexpr const char* kOp = kPagedMqaLogitsOp;
constexpr int64_t kScaleBytes = 4;  // of a kv token, behind the values of its page

// The product of two sizes, as far as they are known.
int64_t product(int64_t a, int64_t b) { return a == kUnknown || b == kUnknown ? kUnknown : a * b; }

void check_queries(const PagedMqaLogitsCall& call, PagedMqaProblem& p) {
  p.format = mqa::format_of(kOp, call.q, call.q_scale, "batch, next_n, num_heads");
  const bool packed = mqa::is_packed(p.format);
  mqa::require_values(kOp, "q", call.q, p.format,
                      {{"batch", kUnknown},
                       {"next_n", kUnknown},
                       {"num_heads", kUnknown},
                       {packed ? "head_dim / 2" : "head_dim", kUnknown}});
  p.batch = size_i32(kOp, "batch", call.q, 0);
  p.next_n = size_i32(kOp, "next_n", call.q, 1);
  p.num_heads = size_i32(kOp, "num_heads", call.q, 2);
  const int64_t row = size_i32(kOp, "head_dim", call.q, 3);
  p.head_dim = packed ? product(2, row) : row;
  p.num_q = product(p.batch, p.next_n);
  if (p.num_q != kUnknown) to_i32(kOp, "batch * next_n", p.num_q);
  if (p.next_n == 0)
    throw ValueError(
        fmt::format("{}: q must have next_n of 1 or more, got {}", kOp, describe(call.q)));
  if (p.format == Format::fp8) return;
  const int64_t blocks = p.head_dim == kUnknown ? kUnknown : p.head_dim / 32;
  mqa::check_mx_scale(kOp, "q scale", *call.q_scale,
                      {{"batch", p.batch}, {"next_n", p.next_n}, {"num_heads", p.num_heads}},
                      {{"batch", p.batch},
                       {"next_n", p.next_n},
                       {"num_heads", p.num_heads},
                       {"head_dim / 32", blocks}});
}

// Pages are packed inside; from page to page any stride goes that 16-byte copies can follow.
void check_cache(const PagedMqaLogitsCall& call, PagedMqaProblem& p) {
  const bool packed = mqa::is_packed(p.format);
  const int64_t row = size_of(call.q, 3);
  const int64_t token_bytes = row == kUnknown ? kUnknown : row + kScaleBytes;
  require(kOp, "kv_cache", call.kv_cache, {at::kByte},
          {{"num_blocks", kUnknown},
           {"block_kv", kUnknown},
           {nullptr, 1},
           {packed ? "head_dim / 2 + 4" : "head_dim + 4", token_bytes}});
  p.num_blocks = size_i32(kOp, "num_blocks", call.kv_cache, 0);
  p.block_kv = size_of(call.kv_cache, 1);
  require_packed(kOp, "kv_cache", call.kv_cache, 1);
  require_16_bytes(kOp, "kv_cache", call.kv_cache, 1);
}

void check_rows(const PagedMqaLogitsCall& call, PagedMqaProblem& p) {
  mqa::check_weights(kOp, call.weights, p.num_q, p.num_heads);
  check_context_lens(kOp, call.context_lens, p.batch, p.next_n);
  require(kOp, "block_table", call.block_table, {at::kInt},
          {{"batch", p.batch}, {"max_blocks", kUnknown}});
  p.max_blocks = size_i32(kOp, "max_blocks", call.block_table, 1);
  if (!call.indices) return;
  require(kOp, "indices", *call.indices, {at::kInt}, {{"batch", p.batch}});
  if (p.next_n != kUnknown && p.next_n != 1)
    throw ValueError(
        fmt::format("{}: q must have next_n of 1 with indices, got {}", kOp, describe(call.q)));
}

void check_schedule(const at::Tensor& schedule) {
  require(kOp, "schedule_meta", schedule, {at::kInt}, {{"num_sms + 1", kUnknown}, {nullptr, 2}});
  if (size_of(schedule, 0) == 0 || size_of(schedule, 0) == 1)
    throw ValueError(fmt::format(
        "{}: schedule_meta must be int32 [num_sms + 1, 2] of get_paged_mqa_logits_metadata, got {}",
        kOp, describe(schedule)));
  require_packed(kOp, "schedule_meta", schedule, 0);
}

}  // namespace

void check_context_lens(const char* op, const at::Tensor& context_lens, int64_t batch,
                        int64_t next_n) {
  if (context_lens.dim() == 2)
    require(op, "context_lens", context_lens, {at::kInt}, {{"batch", batch}, {"next_n", next_n}});
  else if (context_lens.dim() == 1)
    require(op, "context_lens", context_lens, {at::kInt}, {{"batch", batch}});
  else
    throw ValueError(
        fmt::format("{}: context_lens must be int32 [batch] or [batch, next_n], got {}", op,
                    describe(context_lens)));
}

PagedMqaProblem check_paged_mqa_inputs(const PagedMqaLogitsCall& call) {
  PagedMqaProblem p;
  check_queries(call, p);
  check_cache(call, p);
  check_rows(call, p);
  p.width = call.max_context_len ? to_i32(kOp, "max_context_len", *call.max_context_len) : kUnknown;
  mqa::check_logits_dtype(kOp, call.logits_dtype);
  if (call.schedule) check_schedule(*call.schedule);
  require_rows(kOp, "q", call.q);
  require_rows(kOp, "weights", call.weights);
  require_rows(kOp, "block_table", call.block_table);
  require_16_bytes(kOp, "q", call.q, 3);
  for_each_paged_mqa_input(call, [&](const char* name, const at::Tensor& input) {
    require_device(kOp, name, input, call.q.device(), "q");
  });
  return p;
}

void check_paged_mqa_out(const PagedMqaLogitsCall& call, const PagedMqaProblem& p,
                         const at::Tensor& out) {
  mqa::check_out(kOp, out, call.logits_dtype, p.num_q, p.width, call.q.device());
  for_each_paged_mqa_input(call, [&](const char* name, const at::Tensor& input) {
    require_no_overlap(kOp, "out", out, name, input);
  });
}

}  // namespace deep_kernels
