#include "ops/mqa_fold.h"

#include <ATen/ops/empty.h>

#include "ops/device.h"
#include "ops/emulator.h"
#include "runtime/store.h"

namespace deep_kernels {

at::Tensor fold_queries(const Arch& arch, const MqaLogitsSpec& spec, const MqaLogitsCall& call,
                        MqaLogitsArgs& args) {
  const c10::Device device = call.q.device();
  const MqaFoldSpec fold{Backend::sm89, spec.head_dim, spec.num_heads};
  const i64 rows_bytes = i64{args.num_q} * fold.folded_rows() * fold.head_dim;
  const at::Tensor workspace =
      at::empty({rows_bytes + i64{args.num_q} * 4}, call.q.options().dtype(at::kByte));
  u8* base = static_cast<u8*>(workspace.mutable_data_ptr());
  MqaFoldArgs fold_args{
      .logits = args, .folded = base, .folded_scale = reinterpret_cast<float*>(base + rows_bytes)};
  const auto buffers = [&]() -> std::vector<emulator::Buffer> {
    return {emulator::buffer("workspace", workspace, /*writable=*/true),
            emulator::buffer("q", call.q), emulator::buffer("weights", call.weights)};
  };
  run_kernel(arch, device, fold, fold.grid(fold_args, 0), fold_args, buffers);
  args.folded = fold_args.folded;
  args.folded_scale = fold_args.folded_scale;
  return workspace;
}

KernelText kernel_text(const MqaFoldSpec&) {
  return {.header = "deep_kernels/kernels/mqa_fold.cuh",
          .spec_type = "MqaFoldSpec",
          .function = "mqa_fold",
          .params = "DK_GRID_CONSTANT dk::MqaFoldArgs args",
          .arguments = "args",
          .args_type = "MqaFoldArgs",
          .args_bytes = sizeof(MqaFoldArgs)};
}

}  // namespace deep_kernels
