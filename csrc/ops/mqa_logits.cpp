#include "ops/mqa_logits.h"

#include <ATen/ops/clone.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/InferenceMode.h>
#include <fmt/format.h>

#include "cpu/mqa_logits.h"
#include "ops/checks.h"
#include "ops/device.h"
#include "ops/emulator.h"
#include "ops/mqa_check.h"
#include "ops/mqa_fold.h"
#include "ops/mqa_rebase.h"
#include "runtime/errors.h"
#include "runtime/store.h"
#include "runtime/tensor_map.h"

namespace deep_kernels {

namespace {

using namespace checks;

constexpr const char* kOp = kMqaLogitsOp;
constexpr int64_t kRowAlignBytes = 1024;  // as _ROW_ALIGN_BYTES of deep_kernels/ops.py

// Rows are always further apart than they are wide: whether logits are contiguous is then known for
// every width at once, and a traced program need not be a different one where a width is aligned.
at::Tensor new_logits(const MqaLogitsCall& call, const MqaProblem& p) {
  const int64_t per_unit = kRowAlignBytes / (call.logits_dtype == at::kFloat ? 4 : 2);
  return at::empty_strided({p.num_q, p.width}, {align_up(p.width + 1, per_unit), 1},
                           call.q.options().dtype(call.logits_dtype));
}

at::Tensor checked_out(const MqaLogitsCall& call, const MqaProblem& p, const at::Tensor& out) {
  check_mqa_out(call, p, out);
  require_no_grad(kOp, "out", out);
  if (out.is_inference() && !c10::InferenceMode::is_enabled())
    throw ValueError(fmt::format(
        "{}: out must not be an inference tensor outside of torch.inference_mode()", kOp));
  // As torch's own functions do that write in place: autograd notices what it saved has changed.
  if (!out.is_inference()) out.unsafeGetTensorImpl()->bump_version();
  return out;
}

DType contract_dtype(at::ScalarType type) {
  return type == at::kFloat ? DType::float32
                            : (type == at::kHalf ? DType::float16 : DType::bfloat16);
}

// What stands in a kernel's Args for q's scales and for kv, whose tensors must live until the launch.
struct Operands {
  at::Tensor q_exponents;  // MX: int32 [num_q, num_heads]
  at::Tensor kv_scale;     // fp8
  RebasedKv kv;            // MX
  at::Tensor folded;       // folded reduction
};

// TMA takes bases at multiples of 16 bytes, and boxes that begin at multiples of 16 bytes too: scales
// that begin elsewhere are copied. What is made here may be freed once the launch is in the stream.
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
      .weights_dtype = contract_dtype(call.weights.scalar_type()),
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
  return {.format = p.format,
          .num_heads = p.num_heads,
          .head_dim = p.head_dim,
          .weights_dtype = contract_dtype(call.weights.scalar_type()),
          .logits_dtype = contract_dtype(call.logits_dtype),
          .clean = call.clean,
          .metadata = call.schedule.has_value(),
          .folded = call.reduction == "folded",
          .placement = std::nullopt};
}

void refuse_unsupported(const MqaLogitsCase& wanted, Backend backend) {
  if (const auto reason = mqa_logits_refusal(wanted, backend))
    throw UnsupportedError(fmt::format("{}: {}", kOp, *reason));
}

void run_emulated(const MqaLogitsCall& call, const Operands& operands, const MqaLogitsSpec& spec,
                  const MqaLogitsArgs& args, const Arch& arch, int grid, const at::Tensor& out) {
  std::vector<emulator::Buffer> buffers = {emulator::buffer("logits", out, /*writable=*/true)};
  for_each_mqa_input(call, [&](const char* name, const at::Tensor& input) {
    const bool replaced = &input == &call.kv_scale || (spec.is_mx() && &input == &call.kv) ||
                          (call.q_scale && &input == &*call.q_scale);
    if (!replaced) buffers.push_back(emulator::buffer(name, input));
  });
  if (spec.is_mx()) {
    buffers.push_back(emulator::buffer("q scale", operands.q_exponents));
    buffers.push_back(emulator::buffer("workspace", operands.kv.workspace));
  } else {
    buffers.push_back(emulator::buffer("kv scale", operands.kv_scale));
  }
  if (spec.is_folded()) buffers.push_back(emulator::buffer("folded", operands.folded));
  const MqaLogitsMaps<MapDescription> maps = mqa_logits_maps(spec, args);
  const MapDescription list[] = {maps.q, maps.kv, maps.kv_scale, maps.folded};
  const bool mapped = spec.backend == Backend::sm90;
  emulator::launch(arch, spec, kernel_text(spec), grid, args,
                   mapped ? std::span(list) : std::span<const MapDescription>(),
                   std::move(buffers));
}

void run_kernel(const MqaLogitsCall& call, const MqaProblem& p, const MqaLogitsCase& wanted,
                const Arch& arch, const at::Tensor& out) {
  const c10::Device device = call.q.device();
  const MqaLogitsSpec spec = choose_mqa_logits_spec(wanted, arch);
  Operands operands = prepare_operands(call, p, arch);
  MqaLogitsArgs args = make_args(call, p, operands, out);
  if (spec.is_folded()) operands.folded = fold_queries(arch, spec, call, args);
  const int grid = spec.grid(args, usable_sms(device));
  if (device.is_cpu()) return run_emulated(call, operands, spec, args, arch, grid, out);
  Module& module = get_kernel(arch.target, spec, kernel_text(spec));
  if (spec.backend == Backend::sm90) {
    const MqaLogitsMaps<MapDescription> plain = mqa_logits_maps(spec, args);
    MqaLogitsMaps<EncodedMap> maps{encode(plain.q), encode(plain.kv), encode(plain.kv_scale), {}};
    if (spec.is_folded()) maps.folded = encode(plain.folded);
    launch(module, device, spec, grid, args, maps);
  } else {
    launch(module, device, spec, grid, args);
  }
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
    at::Tensor logits = out ? checked_out(call, p, *out) : new_logits(call, p);
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
  at::Tensor logits = out ? checked_out(call, p, *out) : new_logits(call, p);
  if (logits.numel() == 0) return logits;
  if (p.num_kv > 0)
    run_kernel(call, p, wanted, arch, logits);
  else if (call.clean)
    logits.fill_(-std::numeric_limits<double>::infinity());
  return logits;
}

}  // namespace deep_kernels
