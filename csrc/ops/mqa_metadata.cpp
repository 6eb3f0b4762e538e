// get_mqa_logits_metadata: tensors -> Args -> kernel -> launch, or the CPU backend.
#include <ATen/ops/empty.h>
#include <fmt/format.h>

#include "cpu/mqa_logits.h"
#include "ops/checks.h"
#include "ops/device.h"
#include "ops/mqa_logits.h"
#include "runtime/errors.h"

namespace deep_kernels {

using namespace checks;

namespace {

constexpr const char* kOp = "get_mqa_logits_metadata";

i32 checked_num_heads(int64_t num_heads) {
  if (num_heads >= 1 && num_heads <= kMqaMaxHeads) return static_cast<i32>(num_heads);
  throw ValueError(
      fmt::format("{}: num_heads must be from 1 to {}, got {}", kOp, kMqaMaxHeads, num_heads));
}

void check_windows(const MqaMetadataCall& call) {
  require(kOp, "cu_seq_len_k_start", call.kv_start, {at::kInt}, {{"num_q", kUnknown}});
  require(kOp, "cu_seq_len_k_end", call.kv_end, {at::kInt}, {{"num_q", size_of(call.kv_start, 0)}});
  require_device(kOp, "cu_seq_len_k_end", call.kv_end, call.kv_start.device(),
                 "cu_seq_len_k_start");
  size_i32(kOp, "num_q", call.kv_start, 0);
}

at::Tensor new_schedule(const MqaMetadataCall& call, i32 num_heads, i32 num_sms) {
  const i32 num_q = static_cast<i32>(call.kv_start.size(0));
  return at::empty({mqa_schedule_length(num_q, num_heads, num_sms)}, call.kv_start.options());
}

at::Tensor run_schedule(const MqaMetadataCall& call, const Arch& arch, i32 num_kv, i32 num_heads,
                        i32 num_sms) {
  const c10::Device device = call.kv_start.device();
  at::Tensor schedule = new_schedule(call, num_heads, num_sms);
  const MqaScheduleSpec spec{Backend::sm89, static_cast<u8>(num_heads)};
  MqaScheduleArgs args{.kv_start = static_cast<const i32*>(call.kv_start.const_data_ptr()),
                       .kv_end = static_cast<const i32*>(call.kv_end.const_data_ptr()),
                       .schedule = static_cast<i32*>(schedule.mutable_data_ptr()),
                       .num_chunks = nullptr,
                       .kv_start_stride = call.kv_start.stride(0),
                       .kv_end_stride = call.kv_end.stride(0),
                       .num_q = static_cast<i32>(call.kv_start.size(0)),
                       .num_kv = num_kv,
                       .num_sms = num_sms};
  const at::Tensor workspace =
      at::empty({spec.workspace_bytes(args)}, call.kv_start.options().dtype(at::kByte));
  args.num_chunks = static_cast<i32*>(workspace.mutable_data_ptr());
  const auto buffers = [&] {
    return std::vector{emulator::buffer("schedule", schedule, /*writable=*/true),
                       emulator::buffer("workspace", workspace, /*writable=*/true),
                       emulator::buffer("cu_seq_len_k_start", call.kv_start),
                       emulator::buffer("cu_seq_len_k_end", call.kv_end)};
  };
  run_kernel(arch, device, spec, spec.grid(args, num_sms), args, buffers);
  return schedule;
}

}  // namespace

void check_mqa_logits_metadata(const MqaMetadataCall& call) {
  check_windows(call);
  if (call.num_kv) to_i32(kOp, "num_kv_tokens", *call.num_kv);
  if (call.num_heads) checked_num_heads(*call.num_heads);
  if (call.num_sms) mqa::checked_num_sms(kOp, *call.num_sms);
}

at::Tensor mqa_logits_metadata(const MqaMetadataCall& call) {
  check_mqa_logits_metadata(call);
  const i32 num_kv = static_cast<i32>(call.num_kv.value());
  const i32 padded = mqa_padded_heads(static_cast<i32>(call.num_heads.value()));
  const c10::Device device = call.kv_start.device();
  const auto emulated = device.is_cpu() ? emulator::arch_of(kOp, call.arch) : std::nullopt;
  if (device.is_cpu() && !emulated) {
    const i32 num_sms = static_cast<i32>(call.num_sms.value_or(knobs::num_sms().value_or(1)));
    at::Tensor schedule = new_schedule(call, padded, num_sms);
    cpu::mqa_schedule(call.kv_start, call.kv_end, num_kv, *call.num_heads, num_sms, schedule);
    return schedule;
  }
  if (!device.is_cuda() && !emulated)
    throw ValueError(fmt::format("{}: cu_seq_len_k_start must be on a CPU or CUDA device, got {}",
                                 kOp, device.str()));
  const c10::DeviceGuard guard(device);
  const Arch arch = emulated ? *emulated : arch_of_call(kOp, call.arch, device);
  const i32 num_sms = call.num_sms ? static_cast<i32>(*call.num_sms) : usable_sms(device);
  return run_schedule(call, arch, num_kv, padded, num_sms);
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
