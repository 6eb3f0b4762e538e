#include "ops/attention.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <fmt/format.h>

#include "cpu/attention.h"
#include "ops/attention_check.h"
#include "ops/checks.h"
#include "ops/device.h"
#include "ops/mqa_shared.h"
#include "ops/place.h"
#include "runtime/errors.h"

namespace deep_kernels {

namespace {

using namespace checks;

Place prepare_call(const AttentionCall& call) {
  const NamedTensors inputs = inputs_of(call);
  for (const NamedTensor& input : inputs) require_no_grad(call.op(), input.name, input.tensor());
  const c10::DeviceGuard guard(call.q.device());
  const Place place = place_of(call.op(), inputs[0], call.arch);
  // Of the case its checks have refused already what no backend serves.
  if (const auto reason = attention_refusal({}, place.backend()))
    throw UnsupportedError(fmt::format("{}: {}", call.op(), *reason));
  return place;
}

AttentionCase case_of(const AttentionCall& call, const AttentionProblem& p) {
  return {.dtype = mqa::contract_dtype(call.q.scalar_type()),
          .head_dim = p.head_dim,
          .num_q_heads = p.num_q_heads,
          .num_kv_heads = p.num_kv_heads,
          .num_q = call.packed ? call.packed->max_seqlen_q.value_or(0) : p.num_q,
          .num_kv = call.packed ? call.packed->max_seqlen_k.value_or(0) : p.num_kv,
          .causal = call.causal,
          .varlen = call.packed != nullptr,
          .ex2 = call.ex2,
          .num_splits = call.num_splits};
}

AttentionResult new_result(const AttentionCall& call, const AttentionProblem& p,
                           const std::optional<at::Tensor>& out) {
  if (out) check_attention_out(*out, call);
  const at::TensorOptions options = call.q.options();
  const at::TensorOptions sums = options.dtype(at::kFloat);
  return {out ? mqa::writable_out(call.op(), *out) : at::empty(call.q.sizes(), options),
          call.packed ? at::empty({p.num_q_heads, p.num_q}, sums)
                      : at::empty({p.batch, p.num_q_heads, p.num_q}, sums)};
}

// Without cu_seqlens a batch is dense, [batch, tokens, heads, head_dim], else [tokens, heads, ..].
struct Strides {
  i64 batch, token, head;

  Strides(const at::Tensor& tensor, bool packed)
      : batch(packed ? 0 : elements(tensor, 0)),
        token(elements(tensor, packed ? 0 : 1)),
        head(elements(tensor, packed ? 1 : 2)) {}

  static i64 elements(const at::Tensor& tensor, int64_t dim) {
    return stride_bytes(tensor, dim) / static_cast<i64>(sizeof(u16));
  }
};

AttentionArgs args_of(const AttentionCall& call, const AttentionProblem& p,
                      const AttentionResult& result) {
  const PackedTokens* packed = call.packed;
  const bool is_packed = packed != nullptr;
  const Strides q(call.q, is_packed), k(call.k, is_packed), v(call.v, is_packed);
  const Strides out(result.out, is_packed);
  const double scale = call.softmax_scale.value_or(1.0 / std::sqrt(double(p.head_dim)));
  const auto words = [](const at::Tensor& x) {
    return static_cast<const u16*>(x.const_data_ptr());
  };
  const auto sums = [](const at::Tensor& x) { return static_cast<const i32*>(x.const_data_ptr()); };
  return {.q = words(call.q),
          .k = words(call.k),
          .v = words(call.v),
          .out = static_cast<u16*>(result.out.mutable_data_ptr()),
          .lse = static_cast<float*>(result.lse.mutable_data_ptr()),
          .cu_seqlens_q = packed ? sums(packed->cu_seqlens_q) : nullptr,
          .cu_seqlens_k = packed ? sums(packed->cu_seqlens_k) : nullptr,
          .partial_out = nullptr,
          .partial_lse = nullptr,
          .q_batch_stride = q.batch,
          .q_token_stride = q.token,
          .q_head_stride = q.head,
          .k_batch_stride = k.batch,
          .k_token_stride = k.token,
          .k_head_stride = k.head,
          .v_batch_stride = v.batch,
          .v_token_stride = v.token,
          .v_head_stride = v.head,
          .out_batch_stride = out.batch,
          .out_token_stride = out.token,
          .out_head_stride = out.head,
          .total_q = is_packed ? p.num_q : p.batch * p.num_q,
          .total_kv = is_packed ? p.num_kv : p.batch * p.num_kv,
          .batch = static_cast<i32>(p.batch),
          .num_q = static_cast<i32>(packed ? *packed->max_seqlen_q : p.num_q),
          .num_kv = static_cast<i32>(packed ? *packed->max_seqlen_k : p.num_kv),
          .num_q_heads = static_cast<i32>(p.num_q_heads),
          .num_kv_heads = static_cast<i32>(p.num_kv_heads),
          .num_splits = 1,
          .scale_log2 = static_cast<float>(scale * kLog2E)};
}

// Gives Args their splits, and the scratch memory that those need; it has to outlive the launch.
at::Tensor set_splits(AttentionArgs& args, i32 num_splits, i64 head_dim, c10::Device device) {
  args.num_splits = num_splits;
  const i64 bytes = AttentionSpec::workspace_bytes(args, static_cast<i32>(head_dim));
  at::Tensor workspace = at::empty({bytes / 4}, at::TensorOptions(device).dtype(at::kFloat));
  if (num_splits == 1) return workspace;
  args.partial_out = static_cast<float*>(workspace.mutable_data_ptr());
  args.partial_lse = args.partial_out + num_splits * args.num_rows() * head_dim;
  return workspace;
}

void run_on_cpu(const AttentionCase& wanted, AttentionArgs& args) {
  i32 longest = args.num_kv;
  for (i32 index = 0; index < args.batch; ++index)
    longest = max_of(longest, attention_member(args, index).num_kv);
  const i32 num_splits = choose_num_splits(wanted, cpu::attention_num_tiles(args),
                                           at::get_num_threads(), ceil_div(longest, kCpuTileKeys));
  const at::Tensor workspace = set_splits(args, num_splits, wanted.head_dim, at::kCPU);
  cpu::attention(args, wanted.dtype, static_cast<i32>(wanted.head_dim), wanted.causal,
                 choose_ex2(wanted, Backend::cpu, kCpuTileKeys));
}

// Of the units there may be with cu_seqlens, those that have rows if the longest member is as said.
i64 num_units_with_rows(const AttentionSpec& spec, const AttentionArgs& args) {
  const i64 of_member = ceil_div(args.num_q, spec.unit_queries(args)) * spec.unit_heads(args);
  return min_of(spec.num_units(args), of_member * args.batch);
}

void run_on_card(const AttentionCall& call, const AttentionCase& wanted, const Place& place,
                 AttentionArgs& args, const AttentionResult& result) {
  check_card_strides(call, result.out);
  const Arch& arch = *place.arch;
  const i32 num_sms = usable_sms(place.device);
  AttentionSpec spec = choose_attention_spec(wanted, arch, /*split=*/false);
  const i32 num_splits =
      choose_num_splits(wanted, num_units_with_rows(spec, args), num_sms / spec.cluster,
                        ceil_div<i64>(args.num_kv, spec.tile_keys));
  spec.split = num_splits > 1;
  const at::Tensor workspace = set_splits(args, num_splits, wanted.head_dim, place.device);
  if (const i64 units = spec.num_units(args); units > kMaxUnits)
    throw ValueError(
        fmt::format("{}: batch, num_q_heads and num_splits must make at most {} tiles of queries, "
                    "got {}",
                    call.op(), kMaxUnits, units));
  const NamedTensor scratch("workspace", workspace), out("out", result.out), lse("lse", result.lse);
  const auto buffers = [&] { return buffers_of(inputs_of(call), {out, lse, scratch}); };
  const auto maps = attention_maps(args, spec);
  run_kernel(arch, place.device, spec, spec.grid(args, num_sms), args, buffers, maps.q, maps.k,
             maps.v);
  if (!spec.split) return;
  const AttentionJoinSpec join = choose_attention_join_spec(wanted, arch);
  run_kernel(arch, place.device, join, join.grid(args, num_sms), args, [&] {
    NamedTensors inputs = inputs_of(call);
    inputs.push_back(scratch);
    return buffers_of(inputs, {out, lse});
  });
}

}  // namespace

AttentionResult attention(const AttentionCall& call, const std::optional<at::Tensor>& out) {
  const AttentionProblem p = check_attention_inputs(call);
  const Place place = prepare_call(call);
  check_cu_seqlens(call, p);
  const c10::DeviceGuard guard(place.device);
  AttentionResult result = new_result(call, p, out);
  if (p.batch == 0 || p.num_q == 0) return result;
  AttentionArgs args = args_of(call, p, result);
  const AttentionCase wanted = case_of(call, p);
  if (place.arch)
    run_on_card(call, wanted, place, args, result);
  else
    run_on_cpu(wanted, args);
  return result;
}

void check_attention(const AttentionCall& call, const std::optional<at::Tensor>& out) {
  check_attention_inputs(call);
  if (out) check_attention_out(*out, call);
}

}  // namespace deep_kernels
