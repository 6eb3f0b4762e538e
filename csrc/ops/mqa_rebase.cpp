#include "ops/mqa_rebase.h"

#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>

#include "ops/checks.h"
#include "ops/device.h"

namespace deep_kernels {

using namespace checks;

namespace {

constexpr int64_t kWord = 4;  // bytes of a row's exponents

bool has_words(const at::Tensor& bytes) {
  const int64_t last = bytes.dim() - 1;
  bool fits =
      bytes.size(last) == kWord && bytes.stride(last) == 1 && bytes.storage_offset() % kWord == 0;
  for (int64_t i = 0; i < last; ++i) fits = fits && bytes.stride(i) % kWord == 0;
  return fits;
}

}  // namespace

at::Tensor packed_exponents(const at::Tensor& scale) {
  if (scale.scalar_type() == at::kInt) return scale;
  at::Tensor bytes = scale.view(at::kByte);
  if (!has_words(bytes))
    bytes = at::constant_pad_nd(bytes, {0, kWord - bytes.size(-1)}, 0).contiguous();
  return bytes.view(at::kInt).squeeze(-1);
}

RebasedKv rebase_kv(const Arch& arch, Format format, i32 head_dim, const at::Tensor& kv,
                    const at::Tensor& kv_scale) {
  const c10::Device device = kv.device();
  const i32 num_kv = static_cast<i32>(kv.size(0));
  const MqaWorkspace at = mqa_workspace(num_kv, head_dim);
  const at::Tensor workspace = at::empty({at.bytes}, kv.options().dtype(at::kByte));
  const at::Tensor exponents = packed_exponents(kv_scale);
  u8* base = static_cast<u8*>(workspace.mutable_data_ptr());
  MqaRebaseArgs args{.values = static_cast<const u8*>(kv.const_data_ptr()),
                     .exponents = static_cast<const i32*>(exponents.const_data_ptr()),
                     .codes = base + at.codes,
                     .scale = reinterpret_cast<float*>(base + at.scale),
                     .code_exponents = reinterpret_cast<i32*>(base + at.exponents),
                     .wide = reinterpret_cast<i32*>(base + at.wide),
                     .values_stride = stride_bytes(kv, 0),
                     .exponents_stride = exponents.stride(0),
                     .num_rows = num_kv};
  const MqaRebaseSpec spec{Backend::sm89, format, static_cast<u8>(head_dim)};
  const auto buffers = [&] {
    return std::vector{emulator::buffer("workspace", workspace, /*writable=*/true),
                       emulator::buffer("kv", kv), emulator::buffer("kv scale", exponents)};
  };
  run_kernel(arch, device, spec, spec.grid(args, 0), args, buffers);
  return {workspace, args.codes, args.scale, args.code_exponents, args.wide};
}

KernelText kernel_text(const MqaRebaseSpec&) {
  return {.header = "deep_kernels/kernels/mqa_rebase.cuh",
          .spec_type = "MqaRebaseSpec",
          .function = "mqa_rebase",
          .params = "DK_GRID_CONSTANT dk::MqaRebaseArgs args",
          .arguments = "args",
          .args_type = "MqaRebaseArgs",
          .args_bytes = sizeof(MqaRebaseArgs)};
}

}  // namespace deep_kernels
