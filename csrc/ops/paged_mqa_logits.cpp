#include "ops/paged_mqa_logits.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "cpu/paged_mqa_logits.h"
#include "ops/checks.h"
#include "ops/device.h"
#include "ops/mqa_rebase.h"
#include "ops/paged_mqa_check.h"
#include "runtime/errors.h"

namespace deep_kernels {

namespace {

using namespace checks;

constexpr const char* kOp = kPagedMqaLogitsOp;

at::Tensor logits_of(const PagedMqaLogitsCall& call, const PagedMqaProblem& p,
                     const std::optional<at::Tensor>& out) {
  if (!out) return mqa::new_logits(p.num_q, p.width, call.logits_dtype, call.q.device());
  check_paged_mqa_out(call, p, *out);
  return mqa::writable_out(kOp, *out);
}

const i32* data_of(const std::optional<at::Tensor>& tensor) {
  return tensor ? static_cast<const i32*>(tensor->const_data_ptr()) : nullptr;
}

// q_scale is int32 here.
PagedMqaLogitsArgs make_args(const PagedMqaLogitsCall& call, const PagedMqaProblem& p,
                             const std::optional<at::Tensor>& q_scale, const at::Tensor& out) {
  const bool lens_per_row = call.context_lens.dim() == 2;
  return {
      .q = static_cast<const u8*>(call.q.const_data_ptr()),
      .q_scale = data_of(q_scale),
      .kv_cache = static_cast<const u8*>(call.kv_cache.const_data_ptr()),
      .weights = call.weights.const_data_ptr(),
      .context_lens = data_of(call.context_lens),
      .block_table = data_of(call.block_table),
      .indices = data_of(call.indices),
      .schedule = data_of(call.schedule),
      .logits = out.mutable_data_ptr(),
      .q_request_stride = stride_bytes(call.q, 0),
      .q_row_stride = stride_bytes(call.q, 1),
      .q_head_stride = stride_bytes(call.q, 2),
      .q_scale_request_stride = q_scale ? q_scale->stride(0) : 0,
      .q_scale_row_stride = q_scale ? q_scale->stride(1) : 0,
      .q_scale_head_stride = q_scale ? q_scale->stride(2) : 0,
      .block_stride = stride_bytes(call.kv_cache, 0),
      .weights_stride = call.weights.stride(0),
      .context_request_stride = call.context_lens.stride(0),
      .context_row_stride = lens_per_row ? call.context_lens.stride(1) : 0,
      .table_stride = call.block_table.stride(0),
      .indices_stride = call.indices ? call.indices->stride(0) : 0,
      .logits_stride = out.stride(0),
      .num_requests = static_cast<i32>(p.batch),
      .next_n = static_cast<i32>(p.next_n),
      .num_q = static_cast<i32>(p.num_q),
      .num_heads = static_cast<i32>(p.num_heads),
      .width = static_cast<i32>(p.width),
      .table_width = static_cast<i32>(p.max_blocks),
      .num_blocks = static_cast<i32>(p.num_blocks),
      .block_kv = static_cast<i32>(p.block_kv),
      .num_cuts = call.schedule ? static_cast<i32>(call.schedule->size(0)) : 0,
      .weights_dtype = mqa::contract_dtype(call.weights.scalar_type()),
      .lens_per_row = lens_per_row,
      .clean = call.clean,
  };
}

PagedMqaLogitsCase case_of(const PagedMqaLogitsCall& call, const PagedMqaProblem& p) {
  return {{.format = p.format,
           .num_heads = p.num_heads,
           .head_dim = p.head_dim,
           .weights_dtype = mqa::contract_dtype(call.weights.scalar_type()),
           .logits_dtype = mqa::contract_dtype(call.logits_dtype),
           .clean = call.clean,
           .metadata = call.schedule.has_value()},
          p.block_kv,
          p.next_n,
          call.indices.has_value()};
}

void refuse_unsupported(const PagedMqaLogitsCase& wanted, Backend backend) {
  if (const auto reason = paged_mqa_logits_refusal(wanted, backend))
    throw UnsupportedError(fmt::format("{}: {}", kOp, *reason));
}

void run_on_device(const PagedMqaLogitsCall& call, const PagedMqaLogitsCase& wanted,
                   const Arch& arch, const PagedMqaLogitsArgs& args,
                   const std::optional<at::Tensor>& q_scale, const at::Tensor& out) {
  const c10::Device device = call.q.device();
  const PagedMqaLogitsSpec spec = choose_paged_mqa_logits_spec(wanted, arch);
  const auto buffers = [&] {
    std::vector<emulator::Buffer> all = {emulator::buffer("logits", out, /*writable=*/true)};
    for_each_paged_mqa_input(call, [&](const char* name, const at::Tensor& input) {
      const bool is_q_scale = call.q_scale && &input == &*call.q_scale;
      all.push_back(emulator::buffer(name, is_q_scale ? *q_scale : input));
    });
    return all;
  };
  const PagedMqaLogitsMaps<MapDescription> maps = paged_mqa_logits_maps(spec, args);
  run_kernel(arch, device, spec, spec.grid(args, usable_sms(device)), args, buffers, maps.q,
             maps.kv);
}

}  // namespace

void check_paged_mqa_logits(const PagedMqaLogitsCall& call, const std::optional<at::Tensor>& out) {
  const PagedMqaProblem p = check_paged_mqa_inputs(call);
  // What the CPU refuses no backend runs; which one it will be is not known here.
  const auto known = {p.num_heads, p.head_dim, p.block_kv, p.next_n};
  if (std::ranges::find(known, kUnknown) == known.end())
    refuse_unsupported(case_of(call, p), Backend::cpu);
  if (out) check_paged_mqa_out(call, p, *out);
}

at::Tensor paged_mqa_logits(const PagedMqaLogitsCall& call, const std::optional<at::Tensor>& out) {
  const PagedMqaProblem p = check_paged_mqa_inputs(call);
  const c10::Device device = call.q.device();
  for_each_paged_mqa_input(
      call, [&](const char* name, const at::Tensor& input) { require_no_grad(kOp, name, input); });
  const auto emulated = device.is_cpu() ? emulator::arch_of(kOp, call.arch) : std::nullopt;
  const bool on_cpu = device.is_cpu() && !emulated;
  if (!device.is_cpu() && !device.is_cuda())
    throw ValueError(
        fmt::format("{}: q must be on a CPU or CUDA device, got {}", kOp, device.str()));

  const c10::DeviceGuard guard(device);
  const Arch arch = emulated ? *emulated
                    : on_cpu ? Arch{Backend::cpu, {}}
                             : arch_of_call(kOp, call.arch, device);
  const PagedMqaLogitsCase wanted = case_of(call, p);
  refuse_unsupported(wanted, arch.backend);
  at::Tensor logits = logits_of(call, p, out);
  if (logits.numel() == 0) return logits;
  if (p.num_blocks == 0 ||
      p.max_blocks == 0) {  // nothing to see, and no page for a map to begin at
    if (call.clean) logits.fill_(-std::numeric_limits<double>::infinity());
    return logits;
  }
  std::optional<at::Tensor> q_scale;
  if (call.q_scale) q_scale = packed_exponents(*call.q_scale);
  const PagedMqaLogitsArgs args = make_args(call, p, q_scale, logits);
  if (on_cpu)
    cpu::paged_mqa_logits(p.format, static_cast<i32>(p.head_dim), wanted.logits_dtype, args);
  else
    run_on_device(call, wanted, arch, args, q_scale, logits);
  return logits;
}

}  // namespace deep_kernels
