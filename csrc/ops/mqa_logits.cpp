#include "ops/mqa_logits.h"

#include <ATen/ops/clone.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/InferenceMode.h>
#include <fmt/format.h>

#include "cpu/mqa_logits.h"
#include "ops/checks.h"
#include "ops/device.h"
#include "ops/emulator.h"
#include "runtime/errors.h"
#include "runtime/store.h"
#include "runtime/tensor_map.h"

namespace deep_kernels {

namespace {

using namespace checks;

constexpr const char* kOp = kMqaLogitsOp;
constexpr int64_t kRowAlignBytes = 1024;

struct Problem {
  Format format;
  int64_t num_q, num_kv, num_heads, head_dim, width;
  bool compressed;
};

Format format_of(const MqaLogitsCall& call) {
  const at::ScalarType type = call.q.scalar_type();
  if (type == at::kFloat8_e4m3fn) return call.q_scale ? Format::mxfp8 : Format::fp8;
  if (type == at::kChar || type == at::kByte || type == at::kFloat4_e2m1fn_x2) {
    if (call.q_scale) return Format::mxfp4;
    throw ValueError(fmt::format("{}: q scale must be given with {} values (MXFP4), got None", kOp,
                                 dtype_name(type)));
  }
  throw ValueError(fmt::format(
      "{}: q must be float8_e4m3fn [num_q, num_heads, head_dim] or int8, uint8 or float4_e2m1fn_x2 "
      "[num_q, num_heads, head_dim / 2], got {}",
      kOp, describe(call.q)));
}

void check_mx_scale(const char* name, const at::Tensor& scale, Shape packed, Shape unpacked) {
  if (scale.scalar_type() == at::kFloat8_e8m0fnu)
    require(kOp, name, scale, {at::kFloat8_e8m0fnu}, unpacked);
  else
    require(kOp, name, scale, {at::kInt, at::kFloat8_e8m0fnu}, packed);
}

void check_scales(const MqaLogitsCall& call, const Problem& p) {
  if (p.format == Format::fp8) {
    require(kOp, "kv scale", call.kv_scale, {at::kFloat}, {{"num_kv", p.num_kv}});
    require_rows(kOp, "kv scale", call.kv_scale);
    return;
  }
  const int64_t blocks = p.head_dim / 32;
  check_mx_scale("q scale", *call.q_scale, {{"num_q", p.num_q}, {"num_heads", p.num_heads}},
                 {{"num_q", p.num_q}, {"num_heads", p.num_heads}, {"head_dim / 32", blocks}});
  check_mx_scale("kv scale", call.kv_scale, {{"num_kv", p.num_kv}},
                 {{"num_kv", p.num_kv}, {"head_dim / 32", blocks}});
}

Problem check_inputs(const MqaLogitsCall& call) {
  Problem p;
  p.format = format_of(call);
  const bool packed = p.format == Format::mxfp4;
  const char* last = packed ? "head_dim / 2" : "head_dim";
  const Dtypes e4m3 = {at::kFloat8_e4m3fn};
  const Dtypes e2m1 = {at::kChar, at::kByte, at::kFloat4_e2m1fn_x2};
  require(kOp, "q", call.q, packed ? e2m1 : e4m3, {{"num_q", -1}, {"num_heads", -1}, {last, -1}});
  p.num_q = to_i32(kOp, "num_q", call.q.size(0));
  p.num_heads = to_i32(kOp, "num_heads", call.q.size(1));
  p.head_dim = to_i32(kOp, "head_dim", call.q.size(2)) * int64_t{packed ? 2 : 1};
  require(kOp, "kv", call.kv, packed ? e2m1 : e4m3, {{"num_kv", -1}, {last, call.q.size(2)}});
  p.num_kv = to_i32(kOp, "num_kv", call.kv.size(0));
  check_scales(call, p);
  require(kOp, "weights", call.weights, {at::kFloat, at::kBFloat16, at::kHalf},
          {{"num_q", p.num_q}, {"num_heads", p.num_heads}});
  require(kOp, "cu_seq_len_k_start", call.kv_start, {at::kInt}, {{"num_q", p.num_q}});
  require(kOp, "cu_seq_len_k_end", call.kv_end, {at::kInt}, {{"num_q", p.num_q}});
  p.compressed = call.max_seqlen_k != 0;
  p.width = p.compressed ? to_i32(kOp, "max_seqlen_k", call.max_seqlen_k) : p.num_kv;
  if (call.logits_dtype != at::kFloat && call.logits_dtype != at::kBFloat16)
    throw ValueError(fmt::format("{}: logits_dtype must be float32 or bfloat16, got {}", kOp,
                                 dtype_name(call.logits_dtype)));
  if (call.reduction != "exact" && call.reduction != "folded")
    throw ValueError(
        fmt::format("{}: reduction must be 'exact' or 'folded', got '{}'", kOp, call.reduction));
  if (call.schedule) {
    require(kOp, "schedule_meta", *call.schedule, {at::kInt}, {{"length", -1}});
    require_rows(kOp, "schedule_meta", *call.schedule);
    if (call.schedule->size(0) < 4 || call.schedule->size(0) % 2 != 0)
      throw ValueError(fmt::format(
          "{}: schedule_meta must be int32 [2 * (num_sms + 1)] of get_mqa_logits_metadata, got {}",
          kOp, describe(*call.schedule)));
  }
  require_rows(kOp, "q", call.q);
  require_rows(kOp, "kv", call.kv);
  require_rows(kOp, "weights", call.weights);
  require_16_bytes(kOp, "q", call.q);
  require_16_bytes(kOp, "kv", call.kv);
  return p;
}

template <class Visit>
void for_each_input(const MqaLogitsCall& call, Visit&& visit) {
  visit("q", call.q);
  if (call.q_scale) visit("q scale", *call.q_scale);
  visit("kv", call.kv);
  visit("kv scale", call.kv_scale);
  visit("weights", call.weights);
  visit("cu_seq_len_k_start", call.kv_start);
  visit("cu_seq_len_k_end", call.kv_end);
  if (call.schedule) visit("schedule_meta", *call.schedule);
}

at::Tensor check_out(const MqaLogitsCall& call, const Problem& p, const at::Tensor& out) {
  require(kOp, "out", out, {call.logits_dtype}, {{"num_q", p.num_q}, {"width", p.width}});
  require_device(kOp, "out", out, call.q.device(), "q");
  require_no_grad(kOp, "out", out);
  require_rows(kOp, "out", out);
  require_separate_rows(kOp, out);
  if (out.is_inference() && !c10::InferenceMode::is_enabled())
    throw ValueError(fmt::format(
        "{}: out must not be an inference tensor outside of torch.inference_mode()", kOp));
  for_each_input(call, [&](const char* name, const at::Tensor& input) {
    require_no_overlap(kOp, out, name, input);
  });
  // As torch's own functions do that write in place: autograd notices what it saved has changed.
  if (!out.is_inference()) out.unsafeGetTensorImpl()->bump_version();
  return out;
}

at::Tensor new_logits(const MqaLogitsCall& call, const Problem& p) {
  const int64_t per_unit = kRowAlignBytes / (call.logits_dtype == at::kFloat ? 4 : 2);
  return at::empty_strided({p.num_q, p.width}, {align_up(p.width, per_unit), 1},
                           call.q.options().dtype(call.logits_dtype));
}

DType contract_dtype(at::ScalarType type) {
  return type == at::kFloat ? DType::float32
                            : (type == at::kHalf ? DType::float16 : DType::bfloat16);
}

MqaLogitsArgs make_args(const MqaLogitsCall& call, const Problem& p, const at::Tensor& kv_scale,
                        const at::Tensor& out) {
  return {
      .q = static_cast<const u8*>(call.q.const_data_ptr()),
      .kv = static_cast<const u8*>(call.kv.const_data_ptr()),
      .kv_scale = static_cast<const float*>(kv_scale.const_data_ptr()),
      .weights = call.weights.const_data_ptr(),
      .kv_start = static_cast<const i32*>(call.kv_start.const_data_ptr()),
      .kv_end = static_cast<const i32*>(call.kv_end.const_data_ptr()),
      .schedule =
          call.schedule ? static_cast<const i32*>(call.schedule->const_data_ptr()) : nullptr,
      .logits = out.mutable_data_ptr(),
      .q_token_stride = stride_bytes(call.q, 0),
      .q_head_stride = stride_bytes(call.q, 1),
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
}

MqaLogitsCase case_of(const MqaLogitsCall& call, const Problem& p) {
  return {.format = p.format,
          .num_heads = static_cast<int>(p.num_heads),
          .head_dim = static_cast<int>(std::min<int64_t>(p.head_dim, 1 << 30)),
          .weights_dtype = contract_dtype(call.weights.scalar_type()),
          .logits_dtype = contract_dtype(call.logits_dtype),
          .clean = call.clean,
          .metadata = call.schedule.has_value(),
          .placement = mqa_clean_setting()};
}

void refuse_unsupported(const MqaLogitsCase& wanted, Backend backend) {
  if (const auto reason = mqa_logits_refusal(wanted, backend))
    throw UnsupportedError(fmt::format("{}: {}", kOp, *reason));
}

void run_emulated(const MqaLogitsCall& call, const at::Tensor& kv_scale, const MqaLogitsSpec& spec,
                  const MqaLogitsArgs& args, const Arch& arch, int grid, const at::Tensor& out) {
  std::vector<emulator::Buffer> buffers = {emulator::buffer("logits", out, /*writable=*/true)};
  for_each_input(call, [&](const char* name, const at::Tensor& input) {
    buffers.push_back(emulator::buffer(name, &input == &call.kv_scale ? kv_scale : input));
  });
  const MqaLogitsMaps<MapDescription> maps = mqa_logits_maps(spec, args);
  const MapDescription list[] = {maps.q, maps.kv, maps.kv_scale};
  const bool mapped = spec.backend == Backend::sm90;
  emulator::launch(arch, spec, kernel_text(spec), grid, args,
                   mapped ? std::span(list) : std::span<const MapDescription>(),
                   std::move(buffers));
}

void run_kernel(const MqaLogitsCall& call, const Problem& p, const MqaLogitsCase& wanted,
                const Arch& arch, const at::Tensor& out) {
  const c10::Device device = call.q.device();
  const MqaLogitsSpec spec = choose_mqa_logits_spec(wanted, arch);
  // TMA takes bases at multiples of 16 bytes, and boxes that begin at multiples of 16 bytes too: a
  // view that begins elsewhere is copied. It may be freed once the launch is in the stream.
  const bool copies = spec.backend == Backend::sm90 && !is_aligned_16(call.kv_scale);
  const at::Tensor kv_scale = copies ? at::clone(call.kv_scale) : call.kv_scale;
  const MqaLogitsArgs args = make_args(call, p, kv_scale, out);
  const int grid = spec.grid(args, usable_sms(device));
  if (device.is_cpu()) return run_emulated(call, kv_scale, spec, args, arch, grid, out);
  Module& module = get_kernel(arch.target, spec, kernel_text(spec));
  if (spec.backend == Backend::sm90) {
    const MqaLogitsMaps<MapDescription> plain = mqa_logits_maps(spec, args);
    MqaLogitsMaps<EncodedMap> maps{encode(plain.q), encode(plain.kv), encode(plain.kv_scale)};
    launch(module, device, spec, grid, args, maps);
  } else {
    launch(module, device, spec, grid, args);
  }
}

}  // namespace

at::Tensor mqa_logits(const MqaLogitsCall& call, const std::optional<at::Tensor>& out) {
  const Problem p = check_inputs(call);
  const c10::Device device = call.q.device();
  for_each_input(call, [&](const char* name, const at::Tensor& input) {
    require_device(kOp, name, input, device, "q");
    require_no_grad(kOp, name, input);
  });
  const MqaLogitsCase wanted = case_of(call, p);
  const auto emulated = device.is_cpu() ? emulator::arch_of(kOp, call.arch) : std::nullopt;
  if (device.is_cpu() && !emulated) {
    refuse_unsupported(wanted, Backend::cpu);
    at::Tensor logits = out ? check_out(call, p, *out) : new_logits(call, p);
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
  at::Tensor logits = out ? check_out(call, p, *out) : new_logits(call, p);
  if (logits.numel() == 0) return logits;
  if (p.num_kv > 0)
    run_kernel(call, p, wanted, arch, logits);
  else if (call.clean)
    logits.fill_(-std::numeric_limits<double>::infinity());
  return logits;
}

}  // namespace deep_kernels
