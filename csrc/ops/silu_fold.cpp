#include "ops/silu_fold.h"

#include <ATen/ops/empty.h>
#include <fmt/format.h>

#include "cpu/silu_fold.h"
#include "ops/checks.h"
#include "ops/device.h"
#include "ops/mqa_shared.h"
#include "ops/place.h"
#include "ops/silu_check.h"
#include "runtime/errors.h"

namespace deep_kernels {

namespace {

using namespace checks;

void refuse_unsupported(const char* op, const Place& place) {
  // Of the case its checks have refused already what no backend serves.
  if (const auto reason = silu_refusal({}, place.backend()))
    throw UnsupportedError(fmt::format("{}: {}", op, *reason));
}

Place prepare_call(const char* op, const NamedTensors& inputs,
                   const std::optional<std::string>& arch) {
  for (const NamedTensor& input : inputs) require_no_grad(op, input.name, input.tensor());
  const c10::DeviceGuard guard(inputs[0].tensor().device());
  const Place place = place_of(op, inputs[0], arch);
  refuse_unsupported(op, place);
  return place;
}

QuantizedPair new_pair(const char* op, const GemmProblem& p, const NamedTensors& inputs,
                       const OptionalPair& out) {
  if (out) {
    check_quantized_out(op, *out, p, inputs);
    return {mqa::writable_out(op, out->first), mqa::writable_out(op, out->second)};
  }
  const at::TensorOptions options(inputs[0].tensor().device());
  return {at::empty({p.num_tokens, p.num_columns}, options.dtype(at::kFloat8_e4m3fn)),
          at::empty({p.num_tokens, ceil_div<int64_t>(p.num_columns, kScaleBlock)},
                    options.dtype(scale_dtype(p.wanted.scale_format)))};
}

BlockScaledArgs gemm_args(const at::Tensor& x, const at::Tensor& x_scale, const at::Tensor& w,
                          const at::Tensor& w_scale) {
  return {.x = static_cast<const u8*>(x.const_data_ptr()),
          .x_scale = static_cast<const float*>(x_scale.const_data_ptr()),
          .w = static_cast<const u8*>(w.const_data_ptr()),
          .w_scale = w_scale.const_data_ptr(),
          .x_stride = stride_bytes(x, 0),
          .x_scale_token_stride = x_scale.stride(0),
          .x_scale_block_stride = x_scale.stride(1),
          .w_stride = stride_bytes(w, 0),
          .w_scale_row_stride = w_scale.stride(0),
          .w_scale_block_stride = w_scale.stride(1),
          .num_tokens = static_cast<i32>(x.size(0)),
          .k = static_cast<i32>(x.size(1)),
          .w_scale_dtype = mqa::contract_dtype(w_scale.scalar_type())};
}

void run_fold(const SiluFoldCall& call, const SiluCase& wanted, const Place& place,
              const GemmSizes& sizes, const QuantizedPair& out) {
  const auto& [y, y_scale] = out;
  const SiluFoldArgs args{.gemm = gemm_args(call.x, call.x_scale, call.w_gate_up, call.w_scale),
                          .activation = activation_args(call.activation),
                          .y = static_cast<u8*>(y.mutable_data_ptr()),
                          .y_scale = y_scale.mutable_data_ptr(),
                          .y_stride = y.stride(0),
                          .y_scale_token_stride = y_scale.stride(0),
                          .y_scale_block_stride = y_scale.stride(1),
                          .num_columns = static_cast<i32>(sizes.num_columns)};
  if (!place.arch)
    return cpu::silu_fold(args, wanted.activation, wanted.rounding, wanted.scale_format);
  const SiluFoldSpec spec = choose_silu_fold_spec(wanted, *place.arch, sizes);
  const auto maps = block_gemm_maps(args.gemm, spec.tile(), args.num_columns, true);
  const auto buffers = [&] {
    return buffers_of(inputs_of(call), {{"out", y}, {"out scale", y_scale}});
  };
  run_kernel(*place.arch, place.device, spec, spec.grid(args, static_cast<i32>(sizes.num_sms)),
             args, buffers, maps.x, maps.gate, maps.up);
}

// `num_sms` of the sizes is filled in for places that have any.
GemmSizes sizes_of(const GemmProblem& p, const Place& place) {
  return {.num_tokens = p.num_tokens,
          .num_columns = p.num_columns,
          .num_sms = place.arch ? usable_sms(place.device) : 1};
}

void run_gemm(const BlockGemmCall& call, const Place& place, const GemmProblem& p,
              const at::Tensor& out) {
  BlockGemmArgs args{.gemm = gemm_args(call.x, call.x_scale, call.w, call.w_scale),
                     .residual = call.residual ? call.residual->const_data_ptr() : nullptr,
                     .out = out.mutable_data_ptr(),
                     .residual_stride = call.residual ? call.residual->stride(0) : 0,
                     .out_stride = out.stride(0),
                     .num_columns = static_cast<i32>(p.num_columns),
                     .residual_dtype = call.residual
                                           ? mqa::contract_dtype(call.residual->scalar_type())
                                           : DType::bfloat16};
  SiluCase wanted;
  wanted.out_dtype = mqa::contract_dtype(call.out_dtype);
  if (!place.arch) return cpu::block_gemm(args, wanted.out_dtype);
  const GemmSizes sizes = sizes_of(p, place);
  const BlockGemmSpec spec = choose_block_gemm_spec(wanted, *place.arch, sizes);
  const auto maps = block_gemm_maps(args.gemm, spec.tile(), args.num_columns, false);
  const auto buffers = [&] { return buffers_of(inputs_of(call), {{"out", out}}); };
  run_kernel(*place.arch, place.device, spec, spec.grid(args, static_cast<i32>(sizes.num_sms)),
             args, buffers, maps.x, maps.gate, maps.up);
}

void run_mul(const SiluMulCall& call, const Place& place, const GemmProblem& p,
             const QuantizedPair& out) {
  const auto& [y, y_scale] = out;
  const SiluMulArgs args{.gate_up = static_cast<const u16*>(call.gate_up.const_data_ptr()),
                         .activation = activation_args(call.activation),
                         .y = static_cast<u8*>(y.mutable_data_ptr()),
                         .y_scale = y_scale.mutable_data_ptr(),
                         .gate_up_stride = call.gate_up.stride(0),
                         .y_stride = y.stride(0),
                         .y_scale_token_stride = y_scale.stride(0),
                         .y_scale_block_stride = y_scale.stride(1),
                         .num_tokens = static_cast<i32>(p.num_tokens),
                         .num_columns = static_cast<i32>(p.num_columns)};
  if (!place.arch) return cpu::silu_mul(args, p.wanted.activation, p.wanted.scale_format);
  const SiluMulSpec spec = choose_silu_mul_spec(p.wanted);
  const auto buffers = [&] {
    return buffers_of(inputs_of(call), {{"out", y}, {"out scale", y_scale}});
  };
  run_kernel(*place.arch, place.device, spec, spec.grid(args, 0), args, buffers);
}

// The two launches: one GEMM of all rows where their scales' blocks go on from gate to up, else one
// for gate and one for up.
void run_two_launches(const SiluFoldCall& call, const Place& place, const GemmProblem& p,
                      const QuantizedPair& out) {
  const int64_t columns = p.num_columns;
  const at::Tensor gate_up =
      at::empty({p.num_tokens, 2 * columns}, call.x.options().dtype(at::kBFloat16));
  const int64_t parts = columns % kScaleBlock == 0 ? 1 : 2;
  const int64_t rows = 2 * columns / parts;
  const int64_t scale_rows = call.w_scale.size(0) / parts;
  const std::optional<at::Tensor> no_residual;
  for (int64_t part = 0; part < parts; ++part) {
    const at::Tensor w = call.w_gate_up.narrow(0, part * rows, rows);
    const at::Tensor w_scale = call.w_scale.narrow(0, part * scale_rows, scale_rows);
    run_gemm({call.x, call.x_scale, w, w_scale, at::kBFloat16, no_residual, call.arch}, place,
             {p.num_tokens, p.k, rows, {}}, gate_up.narrow(1, part * rows, rows));
  }
  run_mul({gate_up, call.activation, call.arch}, place, p, out);
}

}  // namespace

QuantizedPair silu_fold(const SiluFoldCall& call, const OptionalPair& out) {
  const GemmProblem p = check_silu_fold_inputs(call);
  const NamedTensors inputs = inputs_of(call);
  const Place place = prepare_call(kSiluFoldOp, inputs, call.arch);
  const c10::DeviceGuard guard(place.device);
  QuantizedPair result = new_pair(kSiluFoldOp, p, inputs, out);
  if (p.num_tokens == 0) return result;
  const GemmSizes sizes = sizes_of(p, place);
  const bool fuses =
      call.fused.value_or(!call.round_bf16 || !place.arch || choose_fused(*place.arch, sizes));
  if (fuses)
    run_fold(call, p.wanted, place, sizes, result);
  else
    run_two_launches(call, place, p, result);
  return result;
}
void check_silu_fold(const SiluFoldCall& call, const OptionalPair& out) {
  const GemmProblem p = check_silu_fold_inputs(call);
  if (out) check_quantized_out(kSiluFoldOp, *out, p, inputs_of(call));
}

at::Tensor block_gemm(const BlockGemmCall& call, const std::optional<at::Tensor>& out) {
  const GemmProblem p = check_block_gemm_inputs(call);
  const Place place = prepare_call(kBlockGemmOp, inputs_of(call), call.arch);
  const c10::DeviceGuard guard(place.device);
  if (out) check_gemm_out(*out, call, p);
  const at::Tensor result =
      out ? mqa::writable_out(kBlockGemmOp, *out)
          : at::empty({p.num_tokens, p.num_columns}, call.x.options().dtype(call.out_dtype));
  if (p.num_tokens > 0) run_gemm(call, place, p, result);
  return result;
}
void check_block_gemm(const BlockGemmCall& call, const std::optional<at::Tensor>& out) {
  const GemmProblem p = check_block_gemm_inputs(call);
  if (out) check_gemm_out(*out, call, p);
}

QuantizedPair silu_mul(const SiluMulCall& call, const OptionalPair& out) {
  const GemmProblem p = check_silu_mul_inputs(call);
  const NamedTensors inputs = inputs_of(call);
  const Place place = prepare_call(kSiluMulOp, inputs, call.arch);
  const c10::DeviceGuard guard(place.device);
  QuantizedPair result = new_pair(kSiluMulOp, p, inputs, out);
  if (p.num_tokens > 0) run_mul(call, place, p, result);
  return result;
}
void check_silu_mul(const SiluMulCall& call, const OptionalPair& out) {
  const GemmProblem p = check_silu_mul_inputs(call);
  if (out) check_quantized_out(kSiluMulOp, *out, p, inputs_of(call));
}

}  // namespace deep_kernels
