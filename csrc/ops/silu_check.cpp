#include "ops/silu_check.h"

#include <fmt/format.h>

#include <cmath>

#include "ops/checks.h"
#include "runtime/errors.h"

namespace deep_kernels {

namespace {

using namespace checks;

constexpr int64_t kAlign = 16;  // elements that k and columns are multiples of

int64_t blocks_of(int64_t size) {
  return size == kUnknown ? kUnknown : ceil_div<int64_t>(size, kScaleBlock);
}

int64_t sixteens(const char* op, const char* what, int64_t size) {
  if (size != kUnknown && (size < kAlign || size % kAlign != 0))
    throw ValueError(
        fmt::format("{}: {} must be a positive multiple of {}, got {}", op, what, kAlign, size));
  return size;
}

// x and x_scale; k and the tokens are taken from x.
GemmProblem check_x(const char* op, const at::Tensor& x, const at::Tensor& x_scale) {
  require(op, "x", x, {at::kFloat8_e4m3fn}, {{"num_tokens", kUnknown}, {"k", kUnknown}});
  GemmProblem p{.num_tokens = size_i32(op, "num_tokens", x, 0),
                .k = sixteens(op, "k of x", size_i32(op, "k", x, 1)),
                .num_columns = kUnknown,
                .wanted = {}};
  require_rows(op, "x", x);
  require_16_bytes(op, "x", x, 1);
  require(op, "x_scale", x_scale, {at::kFloat},
          {{"num_tokens", p.num_tokens}, {"ceil(k / 128)", blocks_of(p.k)}});
  return p;
}

void check_weight(const char* op, const char* name, const at::Tensor& w) {
  require_rows(op, name, w);
  require_16_bytes(op, name, w, 1);
}

double positive(const char* op, const char* name, double value) {
  if (!(value > 0.0))
    throw ValueError(fmt::format("{}: {} must be greater than 0, got {}", op, name, value));
  return value;
}
void finite(const char* op, const char* name, double value) {
  if (!std::isfinite(static_cast<float>(value)))
    throw ValueError(fmt::format("{}: {} must be a finite float32, got {}", op, name, value));
}

}  // namespace

NamedTensors inputs_of(const SiluFoldCall& call) {
  return {{"x", call.x},
          {"x_scale", call.x_scale},
          {"w_gate_up", call.w_gate_up},
          {"w_scale", call.w_scale}};
}
NamedTensors inputs_of(const BlockGemmCall& call) {
  NamedTensors inputs = {
      {"x", call.x}, {"x_scale", call.x_scale}, {"w", call.w}, {"w_scale", call.w_scale}};
  if (call.residual) inputs.push_back({"residual", *call.residual});
  return inputs;
}
NamedTensors inputs_of(const SiluMulCall& call) { return {{"gate_up", call.gate_up}}; }

at::ScalarType scale_dtype(ScaleFormat format) {
  return format == ScaleFormat::float32 ? at::kFloat : at::kFloat8_e8m0fnu;
}

SiluCase activation_case(const char* op, const ActivationCall& call) {
  const bool is_gelu = call.activation == "gelu_tanh";
  if (!is_gelu && call.activation != "silu")
    throw ValueError(
        fmt::format("{}: activation must be 'silu' or 'gelu_tanh', got '{}'", op, call.activation));
  if (call.scale_fmt != "fp32" && call.scale_fmt != "ue8m0")
    throw ValueError(
        fmt::format("{}: scale_fmt must be 'fp32' or 'ue8m0', got '{}'", op, call.scale_fmt));
  if (call.clamp) positive(op, "clamp", *call.clamp);
  if (call.alpha) {
    if (is_gelu)
      throw ValueError(fmt::format("{}: alpha must be None with activation 'gelu_tanh', got {}", op,
                                   *call.alpha));
    finite(op, "alpha", *call.alpha);
  }
  finite(op, "up_offset", call.up_offset);
  const bool adjusted = call.clamp || call.alpha || call.up_offset != 0.0;
  SiluCase wanted;
  wanted.activation = is_gelu    ? Activation::gelu_tanh
                      : adjusted ? Activation::silu_adjusted
                                 : Activation::silu;
  wanted.scale_format = call.scale_fmt == "ue8m0" ? ScaleFormat::ue8m0 : ScaleFormat::float32;
  return wanted;
}

ActivationArgs activation_args(const ActivationCall& call) {
  return {.clamp = call.clamp ? static_cast<float>(*call.clamp) : INFINITY,
          .alpha = static_cast<float>(call.alpha.value_or(1.0)),
          .up_offset = static_cast<float>(call.up_offset)};
}

GemmProblem check_silu_fold_inputs(const SiluFoldCall& call) {
  constexpr const char* op = kSiluFoldOp;
  GemmProblem p = check_x(op, call.x, call.x_scale);
  require(op, "w_gate_up", call.w_gate_up, {at::kFloat8_e4m3fn},
          {{"2 * intermediate_size", kUnknown}, {"k", p.k}});
  const int64_t rows = size_i32(op, "2 * intermediate_size", call.w_gate_up, 0);
  if (rows != kUnknown && (rows % (2 * kAlign) != 0 || rows == 0))
    throw ValueError(
        fmt::format("{}: w_gate_up must have 2 * intermediate_size rows, intermediate_size a "
                    "positive multiple of {}, got {} rows",
                    op, kAlign, rows));
  p.num_columns = rows == kUnknown ? kUnknown : rows / 2;
  check_weight(op, "w_gate_up", call.w_gate_up);
  const int64_t blocks = blocks_of(p.num_columns);
  require(op, "w_scale", call.w_scale, {at::kFloat, at::kBFloat16},
          {{"2 * ceil(intermediate_size / 128)", blocks == kUnknown ? kUnknown : 2 * blocks},
           {"ceil(k / 128)", blocks_of(p.k)}});
  require_one_device(op, inputs_of(call));
  p.wanted = activation_case(op, call.activation);
  p.wanted.rounding = call.round_bf16 ? Rounding::bfloat16 : Rounding::float32;
  if (!call.round_bf16 && call.fused == false)
    throw ValueError(fmt::format("{}: {}", op, kUnroundedSplit));
  return p;
}

GemmProblem check_block_gemm_inputs(const BlockGemmCall& call) {
  constexpr const char* op = kBlockGemmOp;
  GemmProblem p = check_x(op, call.x, call.x_scale);
  require(op, "w", call.w, {at::kFloat8_e4m3fn}, {{"n", kUnknown}, {"k", p.k}});
  p.num_columns = sixteens(op, "n of w", size_i32(op, "n", call.w, 0));
  check_weight(op, "w", call.w);
  require(op, "w_scale", call.w_scale, {at::kFloat, at::kBFloat16},
          {{"ceil(n / 128)", blocks_of(p.num_columns)}, {"ceil(k / 128)", blocks_of(p.k)}});
  if (call.out_dtype != at::kBFloat16 && call.out_dtype != at::kFloat)
    throw ValueError(fmt::format("{}: {}, got {}", op, kGemmDtypes, dtype_name(call.out_dtype)));
  if (call.residual) {
    if (call.out_dtype == at::kFloat)
      require(op, "residual", *call.residual, {at::kBFloat16, at::kFloat},
              {{"num_tokens", p.num_tokens}, {"n", p.num_columns}});
    else
      require(op, "residual", *call.residual, {at::kBFloat16},
              {{"num_tokens", p.num_tokens}, {"n", p.num_columns}});
    require_rows(op, "residual", *call.residual);
  }
  require_one_device(op, inputs_of(call));
  return p;
}

GemmProblem check_silu_mul_inputs(const SiluMulCall& call) {
  constexpr const char* op = kSiluMulOp;
  require(op, "gate_up", call.gate_up, {at::kBFloat16},
          {{"num_tokens", kUnknown}, {"2 * intermediate_size", kUnknown}});
  const int64_t columns = size_i32(op, "2 * intermediate_size", call.gate_up, 1);
  if (columns != kUnknown && (columns % (2 * kAlign) != 0 || columns == 0))
    throw ValueError(
        fmt::format("{}: gate_up must have 2 * intermediate_size columns, intermediate_size a "
                    "positive multiple of {}, got {} columns",
                    op, kAlign, columns));
  require_rows(op, "gate_up", call.gate_up);
  const SiluCase wanted = activation_case(op, call.activation);
  return {.num_tokens = size_i32(op, "num_tokens", call.gate_up, 0),
          .k = kUnknown,
          .num_columns = columns == kUnknown ? kUnknown : columns / 2,
          .wanted = wanted};
}

void check_quantized_out(const char* op, const QuantizedPair& out, const GemmProblem& p,
                         const NamedTensors& inputs) {
  const auto& [y, y_scale] = out;
  const at::Device device = inputs[0].tensor().device();
  require(op, "out", y, {at::kFloat8_e4m3fn},
          {{"num_tokens", p.num_tokens}, {"intermediate_size", p.num_columns}});
  require(
      op, "out scale", y_scale, {scale_dtype(p.wanted.scale_format)},
      {{"num_tokens", p.num_tokens}, {"ceil(intermediate_size / 128)", blocks_of(p.num_columns)}});
  const NamedTensor outs[] = {{"out", y}, {"out scale", y_scale}};
  for (const NamedTensor& one : outs) {
    require_device(op, one.name, one.tensor(), device, inputs[0].name);
    require_rows(op, one.name, one.tensor());
    require_separate_rows(op, one.name, one.tensor());
    for (const NamedTensor& input : inputs)
      require_no_overlap(op, one.name, one.tensor(), input.name, input.tensor());
  }
  require_no_overlap(op, "out", y, "out scale", y_scale);
}

void check_gemm_out(const at::Tensor& out, const BlockGemmCall& call, const GemmProblem& p) {
  constexpr const char* op = kBlockGemmOp;
  require(op, "out", out, {call.out_dtype}, {{"num_tokens", p.num_tokens}, {"n", p.num_columns}});
  require_device(op, "out", out, call.x.device(), "x");
  require_rows(op, "out", out);
  require_separate_rows(op, "out", out);
  for (const NamedTensor& input : inputs_of(call))
    require_no_overlap(op, "out", out, input.name, input.tensor());
}

}  // namespace deep_kernels
