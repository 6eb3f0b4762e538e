// What a call of MQA logits must look like, whether it runs or is being traced.
#include "ops/mqa_check.h"

#include <fmt/format.h>

#include "ops/checks.h"
#include "runtime/errors.h"

namespace deep_kernels {

namespace {

using namespace checks;

constexpr const char* kOp = kMqaLogitsOp;

Format format_of(const MqaLogitsCall& call) {
  const at::ScalarType type = call.q.scalar_type();
  if (type == at::kFloat8_e4m3fn) return call.q_scale ? Format::mxfp8 : Format::fp8;
  if (type == at::kChar || type == at::kByte || type == at::kFloat4_e2m1fn_x2) {
    if (call.q_scale) return Format::mxfp4;
    throw ValueError(fmt::format("{}: q scale must be given with {} values (MXFP4), got None", kOp,
                                 dtype_name(type)));
  }
  throw ValueError(fmt::format(
      "{}: q must be float8_e4m3fn [num_q, num_heads, head_dim] or int8, uint8 or float4_e2m1fn_x2 "
      "[num_q, num_heads, head_dim / 2], got {}",
      kOp, describe(call.q)));
}

void check_mx_scale(const char* name, const at::Tensor& scale, Shape packed, Shape unpacked) {
  if (scale.scalar_type() == at::kFloat8_e8m0fnu)
    require(kOp, name, scale, {at::kFloat8_e8m0fnu}, unpacked);
  else
    require(kOp, name, scale, {at::kInt, at::kFloat8_e8m0fnu}, packed);
}

void check_scales(const MqaLogitsCall& call, const MqaProblem& p) {
  if (p.format == Format::fp8) {
    require(kOp, "kv scale", call.kv_scale, {at::kFloat}, {{"num_kv", p.num_kv}});
    require_rows(kOp, "kv scale", call.kv_scale);
    return;
  }
  const int64_t blocks = p.head_dim == kUnknown ? kUnknown : p.head_dim / 32;
  check_mx_scale("q scale", *call.q_scale, {{"num_q", p.num_q}, {"num_heads", p.num_heads}},
                 {{"num_q", p.num_q}, {"num_heads", p.num_heads}, {"head_dim / 32", blocks}});
  check_mx_scale("kv scale", call.kv_scale, {{"num_kv", p.num_kv}},
                 {{"num_kv", p.num_kv}, {"head_dim / 32", blocks}});
}

MqaProblem check_tensors(const MqaLogitsCall& call) {
  MqaProblem p;
  p.format = format_of(call);
  const bool packed = p.format == Format::mxfp4;
  const char* last = packed ? "head_dim / 2" : "head_dim";
  const Dtypes e4m3 = {at::kFloat8_e4m3fn};
  const Dtypes e2m1 = {at::kChar, at::kByte, at::kFloat4_e2m1fn_x2};
  require(kOp, "q", call.q, packed ? e2m1 : e4m3,
          {{"num_q", kUnknown}, {"num_heads", kUnknown}, {last, kUnknown}});
  p.num_q = size_i32(kOp, "num_q", call.q, 0);
  p.num_heads = size_i32(kOp, "num_heads", call.q, 1);
  const int64_t row = size_i32(kOp, "head_dim", call.q, 2);
  p.head_dim = row == kUnknown || !packed ? row : 2 * row;
  require(kOp, "kv", call.kv, packed ? e2m1 : e4m3, {{"num_kv", kUnknown}, {last, row}});
  p.num_kv = size_i32(kOp, "num_kv", call.kv, 0);
  check_scales(call, p);
  require(kOp, "weights", call.weights, {at::kFloat, at::kBFloat16, at::kHalf},
          {{"num_q", p.num_q}, {"num_heads", p.num_heads}});
  require(kOp, "cu_seq_len_k_start", call.kv_start, {at::kInt}, {{"num_q", p.num_q}});
  require(kOp, "cu_seq_len_k_end", call.kv_end, {at::kInt}, {{"num_q", p.num_q}});
  return p;
}

void check_options(const MqaLogitsCall& call) {
  if (call.logits_dtype != at::kFloat && call.logits_dtype != at::kBFloat16)
    throw ValueError(fmt::format("{}: logits_dtype must be float32 or bfloat16, got {}", kOp,
                                 dtype_name(call.logits_dtype)));
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
  require_16_bytes(kOp, "q", call.q);
  require_16_bytes(kOp, "kv", call.kv);
  for_each_mqa_input(call, [&](const char* name, const at::Tensor& input) {
    require_device(kOp, name, input, call.q.device(), "q");
  });
  return p;
}

void check_mqa_out(const MqaLogitsCall& call, const MqaProblem& p, const at::Tensor& out) {
  require(kOp, "out", out, {call.logits_dtype}, {{"num_q", p.num_q}, {"width", p.width}});
  require_device(kOp, "out", out, call.q.device(), "q");
  require_rows(kOp, "out", out);
  require_separate_rows(kOp, out);
  for_each_mqa_input(call, [&](const char* name, const at::Tensor& input) {
    require_no_overlap(kOp, out, name, input);
  });
}

}  // namespace deep_kernels
