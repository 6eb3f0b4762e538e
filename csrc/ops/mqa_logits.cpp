#include "ops/mqa_logits.h"

#include <ATen/ops/clone.h>
#include <fmt/format.h>

#include "cpu/mqa_logits.h"
#include "ops/checks.h"
#include "ops/device.h"
#include "ops/mqa_check.h"
#include "ops/mqa_fold.h"
#include "ops/mqa_rebase.h"
#include "runtime/errors.h"

namespace deep_kernels {

namespace {

using namespace checks;

constexpr const char* kOp = kMqaLogitsOp;

at::Tensor logits_of(const MqaLogitsCall& call, const MqaProblem& p,
                     const std::optional<at::Tensor>& out) {
  if (!out) return mqa::new_logits(p.num_q, p.width, call.logits_dtype, call.q.device());
  check_mqa_out(call, p, *out);
  return mqa::writable_out(kOp, *out);
}

// What stands in a kernel's Args for q's scales and for kv, whose tensors must live until the
// launch.
struct Operands {
  at::Tensor q_exponents;  // MX: int32 [num_q, num_heads]
  at::Tensor kv_scale;     // fp8
  RebasedKv kv;            // MX
  at::Tensor folded;       // folded reduction
};

// TMA takes bases at multiples of 16 bytes, and boxes that begin at multiples of 16 bytes too:
// scales that begin elsewhere are copied. What is made here may be freed once the launch is in the
// stream.
Operands prepare_operands(const MqaLogitsCall& call, const MqaProblem& p, const Arch& arch) {
  if (p.format != Format::fp8)
    return {.q_exponents = packed_exponents(*call.q_scale),
            .kv_scale = {},
            .kv = rebase_kv(arch, p.format, static_cast<i32>(p.head_dim), call.kv, call.kv_scale),
            .folded = {}};
  const bool copies = arch.backend == Backend::sm90 && !is_aligned_16(call.kv_scale);
  return {.q_exponents = {},
          .kv_scale = copies ? at::clone(call.kv_scale) : call.kv_scale,
          .kv = {},
          .folded = {}};
}

MqaLogitsArgs make_args(const MqaLogitsCall& call, const MqaProblem& p, const Operands& operands,
                        const at::Tensor& out) {
  MqaLogitsArgs args{
      .q = static_cast<const u8*>(call.q.const_data_ptr()),
      .q_exponents = nullptr,
      .kv = static_cast<const u8*>(call.kv.const_data_ptr()),
      .kv_scale = nullptr,
      .kv_exponents = nullptr,
      .kv_wide = nullptr,
      .weights = call.weights.const_data_ptr(),
      .folded = nullptr,
      .folded_scale = nullptr,
      .kv_start = static_cast<const i32*>(call.kv_start.const_data_ptr()),
      .kv_end = static_cast<const i32*>(call.kv_end.const_data_ptr()),
      .schedule =
          call.schedule ? static_cast<const i32*>(call.schedule->const_data_ptr()) : nullptr,
      .logits = out.mutable_data_ptr(),
      .q_token_stride = stride_bytes(call.q, 0),
      .q_head_stride = stride_bytes(call.q, 1),
      .q_exponents_token_stride = 0,
      .q_exponents_head_stride = 0,
      .kv_stride = stride_bytes(call.kv, 0),
      .weights_stride = call.weights.stride(0),
      .kv_start_stride = call.kv_start.stride(0),
      .kv_end_stride = call.kv_end.stride(0),
      .logits_stride = out.stride(0),
      .num_q = static_cast<i32>(p.num_q),
      .num_kv = static_cast<i32>(p.num_kv),
      .num_heads = static_cast<i32>(p.num_heads),
      .width = static_cast<i32>(p.width),
      .num_cuts = call.schedule ? static_cast<i32>(call.schedule->size(0) / 2) : 0,
      .weights_dtype = mqa::contract_dtype(call.weights.scalar_type()),
      .compressed = p.compressed,
  };
  if (p.format == Format::fp8) {
    args.kv_scale = static_cast<const float*>(operands.kv_scale.const_data_ptr());
    return args;
  }
  args.q_exponents = static_cast<const i32*>(operands.q_exponents.const_data_ptr());
  args.q_exponents_token_stride = operands.q_exponents.stride(0);
  args.q_exponents_head_stride = operands.q_exponents.stride(1);
  args.kv = operands.kv.codes;
  args.kv_scale = operands.kv.scale;
  args.kv_exponents = operands.kv.exponents;
  args.kv_wide = operands.kv.wide;
  args.kv_stride = p.head_dim;
  return args;
}

MqaLogitsCase case_of(const MqaLogitsCall& call, const MqaProblem& p) {
  return {{.format = p.format,
           .num_heads = p.num_heads,
           .head_dim = p.head_dim,
           .weights_dtype = mqa::contract_dtype(call.weights.scalar_type()),
           .logits_dtype = mqa::contract_dtype(call.logits_dtype),
           .clean = call.clean,
           .metadata = call.schedule.has_value()},
          /*folded=*/call.reduction == "folded",
          /*placement=*/std::nullopt};
}

void refuse_unsupported(const MqaLogitsCase& wanted, Backend backend) {
  if (const auto reason = mqa_logits_refusal(wanted, backend))
    throw UnsupportedError(fmt::format("{}: {}", kOp, *reason));
}

void run_on_device(const MqaLogitsCall& call, const MqaProblem& p, const MqaLogitsCase& wanted,
                   const Arch& arch, const at::Tensor& out) {
  const c10::Device device = call.q.device();
  const MqaLogitsSpec spec = choose_mqa_logits_spec(wanted, arch);
  Operands operands = prepare_operands(call, p, arch);
  MqaLogitsArgs args = make_args(call, p, operands, out);
  if (spec.is_folded()) operands.folded = fold_queries(arch, spec, call, args);
  const auto buffers = [&] {
    std::vector<emulator::Buffer> all = {emulator::buffer("logits", out, /*writable=*/true)};
    for_each_mqa_input(call, [&](const char* name, const at::Tensor& input) {
      const bool replaced = &input == &call.kv_scale || (spec.is_mx() && &input == &call.kv) ||
                            (call.q_scale && &input == &*call.q_scale);
      if (!replaced) all.push_back(emulator::buffer(name, input));
    });
    if (spec.is_mx()) {
      all.push_back(emulator::buffer("q scale", operands.q_exponents));
      all.push_back(emulator::buffer("workspace", operands.kv.workspace));
    } else {
      all.push_back(emulator::buffer("kv scale", operands.kv_scale));
    }
    if (spec.is_folded()) all.push_back(emulator::buffer("folded", operands.folded));
    return all;
  };
  const MqaLogitsMaps<MapDescription> maps = mqa_logits_maps(spec, args);
  run_kernel(arch, device, spec, spec.grid(args, usable_sms(device)), args, buffers, maps.q,
             maps.kv, maps.kv_scale, maps.folded);
}

}  // namespace

void check_mqa_logits(const MqaLogitsCall& call, const std::optional<at::Tensor>& out) {
  const MqaProblem p = check_mqa_inputs(call);
  // What the CPU refuses no backend runs; which one it will be is not known here.
  if (p.num_heads != kUnknown && p.head_dim != kUnknown)
    refuse_unsupported(case_of(call, p), Backend::cpu);
  if (out) check_mqa_out(call, p, *out);
}

at::Tensor mqa_logits(const MqaLogitsCall& call, const std::optional<at::Tensor>& out) {
  const MqaProblem p = check_mqa_inputs(call);
  const c10::Device device = call.q.device();
  for_each_mqa_input(
      call, [&](const char* name, const at::Tensor& input) { require_no_grad(kOp, name, input); });
  const MqaLogitsCase wanted = case_of(call, p);
  const auto emulated = device.is_cpu() ? emulator::arch_of(kOp, call.arch) : std::nullopt;
  if (device.is_cpu() && !emulated) {
    refuse_unsupported(wanted, Backend::cpu);
    at::Tensor logits = logits_of(call, p, out);
    cpu::mqa_logits(p.format, call.q, call.q_scale, call.kv, call.kv_scale, call.weights,
                    call.kv_start, call.kv_end, logits, call.clean, p.compressed);
    return logits;
  }
  if (!device.is_cuda() && !emulated)
    throw ValueError(
        fmt::format("{}: q must be on a CPU or CUDA device, got {}", kOp, device.str()));

  const c10::DeviceGuard guard(device);
  const Arch arch = emulated ? *emulated : arch_of_call(kOp, call.arch, device);
  refuse_unsupported(wanted, arch.backend);
  at::Tensor logits = logits_of(call, p, out);
  if (logits.numel() == 0) return logits;
  if (p.num_kv > 0)
    run_on_device(call, p, wanted, arch, logits);
  else if (call.clean)
    logits.fill_(-std::numeric_limits<double>::infinity());
  return logits;
}

}  // namespace deep_kernels
