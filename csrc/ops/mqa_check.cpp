// What a call of MQA logits must look like, whether it runs or is being traced.
#include "ops/mqa_check.h"

#include <fmt/format.h>

#include "ops/checks.h"
#include "runtime/errors.h"

namespace deep_kernels {

namespace {

using namespace checks;

constexpr const char* kOp = kMqaLogitsOp;

void check_scales(const MqaLogitsCall& call, const MqaProblem& p) {
  if (p.format == Format::fp8) {
    require(kOp, "kv scale", call.kv_scale, {at::kFloat}, {{"num_kv", p.num_kv}});
    require_rows(kOp, "kv scale", call.kv_scale);
    return;
  }
  const int64_t blocks = p.head_dim == kUnknown ? kUnknown : p.head_dim / 32;
  mqa::check_mx_scale(kOp, "q scale", *call.q_scale,
                      {{"num_q", p.num_q}, {"num_heads", p.num_heads}},
                      {{"num_q", p.num_q}, {"num_heads", p.num_heads}, {"head_dim / 32", blocks}});
  mqa::check_mx_scale(kOp, "kv scale", call.kv_scale, {{"num_kv", p.num_kv}},
                      {{"num_kv", p.num_kv}, {"head_dim / 32", blocks}});
}

MqaProblem check_tensors(const MqaLogitsCall& call) {
  MqaProblem p;
  p.format = mqa::format_of(kOp, call.q, call.q_scale, "num_q, num_heads");
  const bool packed = mqa::is_packed(p.format);
  const char* last = packed ? "head_dim / 2" : "head_dim";
  mqa::require_values(kOp, "q", call.q, p.format,
                      {{"num_q", kUnknown}, {"num_heads", kUnknown}, {last, kUnknown}});
  p.num_q = size_i32(kOp, "num_q", call.q, 0);
  p.num_heads = size_i32(kOp, "num_heads", call.q, 1);
  const int64_t row = size_i32(kOp, "head_dim", call.q, 2);
  p.head_dim = row == kUnknown || !packed ? row : 2 * row;
  mqa::require_values(kOp, "kv", call.kv, p.format, {{"num_kv", kUnknown}, {last, row}});
  p.num_kv = size_i32(kOp, "num_kv", call.kv, 0);
  check_scales(call, p);
  mqa::check_weights(kOp, call.weights, p.num_q, p.num_heads);
  require(kOp, "cu_seq_len_k_start", call.kv_start, {at::kInt}, {{"num_q", p.num_q}});
  require(kOp, "cu_seq_len_k_end", call.kv_end, {at::kInt}, {{"num_q", p.num_q}});
  return p;
}

void check_options(const MqaLogitsCall& call) {
  mqa::check_logits_dtype(kOp, call.logits_dtype);
  if (call.reduction != "exact" && call.reduction != "folded")
    throw ValueError(
        fmt::format("{}: reduction must be 'exact' or 'folded', got '{}'", kOp, call.reduction));
  if (call.schedule) {
    require(kOp, "schedule_meta", *call.schedule, {at::kInt}, {{"length", kUnknown}});
    require_rows(kOp, "schedule_meta", *call.schedule);
    const int64_t length = size_of(*call.schedule, 0);
    if (length != kUnknown && (length < 4 || length % 2 != 0))
      throw ValueError(fmt::format(
          "{}: schedule_meta must be int32 [2 * (num_sms + 1)] of get_mqa_logits_metadata, got {}",
          kOp, describe(*call.schedule)));
  }
}

}  // namespace

MqaProblem check_mqa_inputs(const MqaLogitsCall& call) {
  MqaProblem p = check_tensors(call);
  p.compressed = call.max_seqlen_k != 0;
  if (!p.compressed)
    p.width = p.num_kv;
  else
    p.width = call.max_seqlen_k ? to_i32(kOp, "max_seqlen_k", *call.max_seqlen_k) : kUnknown;
  check_options(call);
  require_rows(kOp, "q", call.q);
  require_rows(kOp, "kv", call.kv);
  require_rows(kOp, "weights", call.weights);
  require_16_bytes(kOp, "q", call.q, 2);
  require_16_bytes(kOp, "kv", call.kv, 1);
  for_each_mqa_input(call, [&](const char* name, const at::Tensor& input) {
    require_device(kOp, name, input, call.q.device(), "q");
  });
  return p;
}

void check_mqa_out(const MqaLogitsCall& call, const MqaProblem& p, const at::Tensor& out) {
  mqa::check_out(kOp, out, call.logits_dtype, p.num_q, p.width, call.q.device());
  for_each_mqa_input(call, [&](const char* name, const at::Tensor& input) {
    require_no_overlap(kOp, "out", out, name, input);
  });
}

}  // namespace deep_kernels
