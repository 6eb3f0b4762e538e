// get_mqa_logits_metadata: tensors -> Args -> kernel -> launch, or the CPU backend.
#include <ATen/ops/empty.h>
#include <fmt/format.h>

#include "cpu/mqa_logits.h"
#include "ops/checks.h"
#include "ops/device.h"
#include "ops/emulator.h"
#include "ops/mqa_logits.h"
#include "runtime/errors.h"
#include "runtime/store.h"

namespace deep_kernels {

namespace {
constexpr const char* kOp = "get_mqa_logits_metadata";
}

using namespace checks;

at::Tensor mqa_logits_metadata(const at::Tensor& kv_start, const at::Tensor& kv_end, int64_t num_kv,
                               int64_t num_heads, const std::optional<std::string>& arch_text) {
  const char* op = kOp;
  require(op, "cu_seq_len_k_start", kv_start, {at::kInt}, {{"num_q", -1}});
  require(op, "cu_seq_len_k_end", kv_end, {at::kInt}, {{"num_q", kv_start.size(0)}});
  require_device(op, "cu_seq_len_k_end", kv_end, kv_start.device(), "cu_seq_len_k_start");
  const i32 num_q = to_i32(op, "num_q", kv_start.size(0));
  const i32 num_tokens = to_i32(op, "num_kv_tokens", num_kv);
  if (num_heads < 1 || num_heads > kMqaMaxHeads)
    throw ValueError(
        fmt::format("{}: num_heads must be from 1 to {}, got {}", op, kMqaMaxHeads, num_heads));
  const i32 padded = mqa_padded_heads(static_cast<i32>(num_heads));
  const c10::Device device = kv_start.device();
  const auto make = [&](int num_sms) {
    return at::empty({mqa_schedule_length(num_q, padded, num_sms)}, kv_start.options());
  };
  const auto emulated = device.is_cpu() ? emulator::arch_of(op, arch_text) : std::nullopt;
  if (device.is_cpu() && !emulated) {
    const int num_sms = knobs::num_sms().value_or(1);
    at::Tensor schedule = make(num_sms);
    cpu::mqa_schedule(kv_start, kv_end, num_tokens, num_heads, num_sms, schedule);
    return schedule;
  }
  if (!device.is_cuda() && !emulated)
    throw ValueError(fmt::format("{}: cu_seq_len_k_start must be on a CPU or CUDA device, got {}",
                                 op, device.str()));
  const c10::DeviceGuard guard(device);
  const Arch arch = emulated ? *emulated : arch_of_call(op, arch_text, device);
  const int num_sms = usable_sms(device);
  at::Tensor schedule = make(num_sms);
  const MqaScheduleSpec spec{Backend::sm89, static_cast<u8>(padded)};
  MqaScheduleArgs args{.kv_start = static_cast<const i32*>(kv_start.const_data_ptr()),
                       .kv_end = static_cast<const i32*>(kv_end.const_data_ptr()),
                       .schedule = static_cast<i32*>(schedule.mutable_data_ptr()),
                       .num_chunks = nullptr,
                       .kv_start_stride = kv_start.stride(0),
                       .kv_end_stride = kv_end.stride(0),
                       .num_q = num_q,
                       .num_kv = num_tokens,
                       .num_sms = num_sms};
  const at::Tensor workspace =
      at::empty({spec.workspace_bytes(args)}, kv_start.options().dtype(at::kByte));
  args.num_chunks = static_cast<i32*>(workspace.mutable_data_ptr());
  const int grid = spec.grid(args, num_sms);
  if (emulated) {
    emulator::launch(arch, spec, kernel_text(spec), grid, args, {},
                     {emulator::buffer("schedule", schedule, /*writable=*/true),
                      emulator::buffer("workspace", workspace, /*writable=*/true),
                      emulator::buffer("cu_seq_len_k_start", kv_start),
                      emulator::buffer("cu_seq_len_k_end", kv_end)});
    return schedule;
  }
  Module& module = get_kernel(arch.target, spec, kernel_text(spec));
  launch(module, device, spec, grid, args);
  return schedule;
}

KernelText kernel_text(const MqaScheduleSpec&) {
  return {.header = "deep_kernels/kernels/mqa_schedule.cuh",
          .spec_type = "MqaScheduleSpec",
          .function = "mqa_schedule",
          .params = "DK_GRID_CONSTANT dk::MqaScheduleArgs args",
          .arguments = "args",
          .args_type = "MqaScheduleArgs",
          .args_bytes = sizeof(MqaScheduleArgs)};
}

}  // namespace deep_kernels
