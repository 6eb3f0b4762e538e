#include "ops/mqa_shared.h"

#include <ATen/ops/empty_strided.h>
#include <c10/core/InferenceMode.h>
#include <fmt/format.h>

#include "deep_kernels/contract/mqa_logits.h"
#include "ops/knobs.h"
#include "runtime/errors.h"

namespace deep_kernels::mqa {

using namespace checks;

namespace {

constexpr int64_t kRowAlignBytes = 1024;  // as _ROW_ALIGN_BYTES of deep_kernels/ops.py

}  // namespace

void require_values(const char* op, const char* argument, const at::Tensor& values, Format format,
                    Shape shape) {
  if (is_packed(format))
    require(op, argument, values, {at::kChar, at::kByte, at::kFloat4_e2m1fn_x2}, shape);
  else
    require(op, argument, values, {at::kFloat8_e4m3fn}, shape);
}

Format format_of(const char* op, const at::Tensor& q, const std::optional<at::Tensor>& q_scale,
                 const char* q_shape) {
  const at::ScalarType type = q.scalar_type();
  if (type == at::kFloat8_e4m3fn) return q_scale ? Format::mxfp8 : Format::fp8;
  if (type == at::kChar || type == at::kByte || type == at::kFloat4_e2m1fn_x2) {
    if (q_scale) return Format::mxfp4;
    throw ValueError(fmt::format("{}: q scale must be given with {} values (MXFP4), got None", op,
                                 dtype_name(type)));
  }
  throw ValueError(
      fmt::format("{0}: q must be float8_e4m3fn [{1}, head_dim] or int8, uint8 or float4_e2m1fn_x2 "
                  "[{1}, head_dim / 2], got {2}",
                  op, q_shape, describe(q)));
}

void check_mx_scale(const char* op, const char* argument, const at::Tensor& scale, Shape packed,
                    Shape unpacked) {
  // Another dtype is refused with the packed form; both are named by the op's docstring.
  if (scale.scalar_type() == at::kFloat8_e8m0fnu)
    require(op, argument, scale, {at::kFloat8_e8m0fnu}, unpacked);
  else
    require(op, argument, scale, {at::kInt}, packed);
}

void check_weights(const char* op, const at::Tensor& weights, int64_t num_q, int64_t num_heads) {
  require(op, "weights", weights, {at::kFloat, at::kBFloat16, at::kHalf},
          {{"num_q", num_q}, {"num_heads", num_heads}});
}

void check_logits_dtype(const char* op, at::ScalarType dtype) {
  if (dtype != at::kFloat && dtype != at::kBFloat16)
    throw ValueError(
        fmt::format("{}: logits_dtype must be float32 or bfloat16, got {}", op, dtype_name(dtype)));
}

void check_out(const char* op, const at::Tensor& out, at::ScalarType dtype, int64_t num_q,
               int64_t width, at::Device device) {
  require(op, "out", out, {dtype}, {{"num_q", num_q}, {"width", width}});
  require_device(op, "out", out, device, "q");
  require_rows(op, "out", out);
  require_separate_rows(op, "out", out);
}

DType contract_dtype(at::ScalarType type) {
  return type == at::kFloat ? DType::float32
                            : (type == at::kHalf ? DType::float16 : DType::bfloat16);
}

// Rows are always further apart than they are wide: whether logits are contiguous is then known for
// every width at once, and a traced program need not be a different one where a width is aligned.
at::Tensor new_logits(int64_t num_q, int64_t width, at::ScalarType dtype, at::Device device) {
  const int64_t per_unit = kRowAlignBytes / (dtype == at::kFloat ? 4 : 2);
  return at::empty_strided({num_q, width}, {align_up(width + 1, per_unit), 1},
                           at::TensorOptions(device).dtype(dtype));
}

at::Tensor writable_out(const char* op, const at::Tensor& out) {
  require_no_grad(op, "out", out);
  if (out.is_inference() && !c10::InferenceMode::is_enabled())
    throw ValueError(fmt::format(
        "{}: out must not be an inference tensor outside of torch.inference_mode()", op));
  // As torch's own functions do that write in place: autograd notices what it saved has changed.
  if (!out.is_inference()) out.unsafeGetTensorImpl()->bump_version();
  return out;
}

void read_case(CaseReader& reader, CaseBase& wanted) {
  wanted.format = reader.take_format(wanted.format);
  wanted.num_heads = reader.take_int("num_heads", wanted.num_heads);
  wanted.head_dim = reader.take_int("head_dim", wanted.head_dim);
  wanted.weights_dtype = reader.take_dtype("weights_dtype", wanted.weights_dtype);
  wanted.logits_dtype = reader.take_dtype("logits_dtype", wanted.logits_dtype);
  wanted.clean = reader.take_bool("clean_logits", wanted.clean);
  wanted.metadata = reader.take_bool("metadata", wanted.metadata);
}

std::optional<std::string> refusal(const CaseBase& wanted, Backend backend) {
  if (wanted.num_heads < 1 || wanted.num_heads > kMqaMaxHeads)
    return fmt::format("num_heads must be from 1 to {}, got {}", kMqaMaxHeads, wanted.num_heads);
  if (wanted.head_dim != 32 && wanted.head_dim != 64 && wanted.head_dim != 128)
    return fmt::format("head_dim must be 32, 64 or 128, got {}", wanted.head_dim);
  if (wanted.format == Format::mxfp4 && wanted.head_dim == 32 && backend != Backend::cpu)
    return std::string("head_dim must be 64 or 128 with mxfp4, got 32");
  if (wanted.logits_dtype == DType::float16)
    return std::string("logits_dtype must be float32 or bfloat16, got float16");
  if (backend == Backend::sm100) return std::string("there are no sm100 kernels for it yet");
  return std::nullopt;
}

i32 checked_num_sms(const char* op, int64_t num_sms) {
  if (num_sms >= 1 && num_sms <= knobs::kMaxSms) return static_cast<i32>(num_sms);
  throw ValueError(
      fmt::format("{}: num_sms must be from 1 to {}, got {}", op, knobs::kMaxSms, num_sms));
}

}  // namespace deep_kernels::mqa
