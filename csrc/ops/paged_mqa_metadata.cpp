// get_paged_mqa_logits_metadata: tensors -> Args -> kernel -> launch, or the CPU backend.
#include <ATen/ops/empty.h>
#include <fmt/format.h>

#include "cpu/paged_mqa_logits.h"
#include "ops/checks.h"
#include "ops/device.h"
#include "ops/paged_mqa_check.h"
#include "runtime/errors.h"

namespace deep_kernels {

using namespace checks;

namespace {

constexpr const char* kOp = kPagedMqaMetadataOp;

PagedMqaScheduleArgs make_args(const PagedMqaMetadataCall& call, const at::Tensor& schedule) {
  const at::Tensor& lens = call.context_lens;
  const bool lens_per_row = lens.dim() == 2;
  return {
      .context_lens = static_cast<const i32*>(lens.const_data_ptr()),
      .indices = call.indices ? static_cast<const i32*>(call.indices->const_data_ptr()) : nullptr,
      .schedule = static_cast<i32*>(schedule.mutable_data_ptr()),
      .context_request_stride = lens.stride(0),
      .context_row_stride = lens_per_row ? lens.stride(1) : 0,
      .indices_stride = call.indices ? call.indices->stride(0) : 0,
      .num_requests = static_cast<i32>(lens.size(0)),
      .next_n = lens_per_row ? static_cast<i32>(lens.size(1)) : 1,
      .num_sms = static_cast<i32>(schedule.size(0) - 1),
      .lens_per_row = lens_per_row,
  };
}

}  // namespace

void check_paged_mqa_logits_metadata(const PagedMqaMetadataCall& call) {
  check_context_lens(kOp, call.context_lens, kUnknown, call.indices ? 1 : kUnknown);
  const int64_t batch = size_i32(kOp, "batch", call.context_lens, 0);
  if (call.context_lens.dim() == 2) size_i32(kOp, "next_n", call.context_lens, 1);
  if (call.indices) {
    require(kOp, "indices", *call.indices, {at::kInt}, {{"batch", batch}});
    require_device(kOp, "indices", *call.indices, call.context_lens.device(), "context_lens");
  }
  if (call.block_kv)
    if (const auto reason = page_refusal(*call.block_kv))
      throw ValueError(fmt::format("{}: {}", kOp, *reason));
  if (call.num_sms) mqa::checked_num_sms(kOp, *call.num_sms);
}

at::Tensor paged_mqa_logits_metadata(const PagedMqaMetadataCall& call) {
  check_paged_mqa_logits_metadata(call);
  const c10::Device device = call.context_lens.device();
  const auto emulated = device.is_cpu() ? emulator::arch_of(kOp, call.arch) : std::nullopt;
  if (!device.is_cpu() && !device.is_cuda())
    throw ValueError(
        fmt::format("{}: context_lens must be on a CPU or CUDA device, got {}", kOp, device.str()));
  const c10::DeviceGuard guard(device);
  const at::Tensor schedule = at::empty({call.num_sms.value() + 1, 2}, call.context_lens.options());
  const PagedMqaScheduleArgs args = make_args(call, schedule);
  if (device.is_cpu() && !emulated) {
    cpu::paged_mqa_schedule(args);
    return schedule;
  }
  const Arch arch = emulated ? *emulated : arch_of_call(kOp, call.arch, device);
  const PagedMqaScheduleSpec spec{Backend::sm89};
  const auto buffers = [&] {
    std::vector<emulator::Buffer> all = {emulator::buffer("schedule", schedule, /*writable=*/true),
                                         emulator::buffer("context_lens", call.context_lens)};
    if (call.indices) all.push_back(emulator::buffer("indices", *call.indices));
    return all;
  };
  run_kernel(arch, device, spec, spec.grid(args, args.num_sms), args, buffers);
  return schedule;
}

KernelText kernel_text(const PagedMqaScheduleSpec&) {
  return {.header = "deep_kernels/kernels/paged_mqa_schedule.cuh",
          .spec_type = "PagedMqaScheduleSpec",
          .function = "paged_mqa_schedule",
          .params = "DK_GRID_CONSTANT dk::PagedMqaScheduleArgs args",
          .arguments = "args",
          .args_type = "PagedMqaScheduleArgs",
          .args_bytes = sizeof(PagedMqaScheduleArgs)};
}

}  // namespace deep_kernels
