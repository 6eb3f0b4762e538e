// The operators of torch.ops.deep_kernels: schemas and addresses.
#include <torch/library.h>

#include "ops/mqa_logits.h"
#include "ops/paged_mqa_logits.h"
#include "ops/silu_fold.h"
#include "python_errors.h"
#include "torch_ops.h"

namespace deep_kernels {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

Tensor mqa_logits_op(const Tensor& q, const OptionalTensor& q_scale, const Tensor& kv,
                     const Tensor& kv_scale, const Tensor& weights, const Tensor& kv_start,
                     const Tensor& kv_end, bool clean, int64_t max_seqlen_k,
                     at::ScalarType logits_dtype, const OptionalTensor& schedule,
                     std::string_view reduction, std::optional<std::string_view> arch) {
  return raising_in_python([&] {
    return mqa_logits({q, q_scale, kv, kv_scale, weights, kv_start, kv_end, clean, max_seqlen_k,
                       logits_dtype, schedule, reduction, owned(arch)},
                      std::nullopt);
  });
}

void mqa_logits_out_op(const Tensor& q, const OptionalTensor& q_scale, const Tensor& kv,
                       const Tensor& kv_scale, const Tensor& weights, const Tensor& kv_start,
                       const Tensor& kv_end, bool clean, int64_t max_seqlen_k,
                       at::ScalarType logits_dtype, const OptionalTensor& schedule,
                       std::string_view reduction, std::optional<std::string_view> arch,
                       Tensor& out) {
  raising_in_python([&] {
    mqa_logits({q, q_scale, kv, kv_scale, weights, kv_start, kv_end, clean, max_seqlen_k,
                logits_dtype, schedule, reduction, owned(arch)},
               out);
  });
}

Tensor mqa_metadata_op(const Tensor& kv_start, const Tensor& kv_end, int64_t num_kv,
                       int64_t num_heads, int64_t num_sms, std::optional<std::string_view> arch) {
  return raising_in_python([&] {
    return mqa_logits_metadata({kv_start, kv_end, num_kv, num_heads, num_sms, owned(arch)});
  });
}

Tensor paged_mqa_logits_op(const Tensor& q, const OptionalTensor& q_scale, const Tensor& kv_cache,
                           const Tensor& weights, const Tensor& context_lens,
                           const Tensor& block_table, const OptionalTensor& schedule,
                           int64_t max_context_len, bool clean, at::ScalarType logits_dtype,
                           const OptionalTensor& indices, std::optional<std::string_view> arch) {
  return raising_in_python([&] {
    return paged_mqa_logits({q, q_scale, kv_cache, weights, context_lens, block_table, schedule,
                             max_context_len, clean, logits_dtype, indices, owned(arch)},
                            std::nullopt);
  });
}

void paged_mqa_logits_out_op(const Tensor& q, const OptionalTensor& q_scale, const Tensor& kv_cache,
                             const Tensor& weights, const Tensor& context_lens,
                             const Tensor& block_table, const OptionalTensor& schedule,
                             int64_t max_context_len, bool clean, at::ScalarType logits_dtype,
                             const OptionalTensor& indices, std::optional<std::string_view> arch,
                             Tensor& out) {
  raising_in_python([&] {
    paged_mqa_logits({q, q_scale, kv_cache, weights, context_lens, block_table, schedule,
                      max_context_len, clean, logits_dtype, indices, owned(arch)},
                     out);
  });
}

Tensor paged_mqa_metadata_op(const Tensor& context_lens, int64_t block_kv, int64_t num_sms,
                             const OptionalTensor& indices, std::optional<std::string_view> arch) {
  return raising_in_python([&] {
    return paged_mqa_logits_metadata({context_lens, block_kv, num_sms, indices, owned(arch)});
  });
}

using OptionalNumber = std::optional<double>;
using OptionalText = std::optional<std::string_view>;

std::tuple<Tensor, Tensor> silu_fold_op(const Tensor& x, const Tensor& x_scale, const Tensor& w,
                                        const Tensor& w_scale, std::string_view activation,
                                        OptionalNumber clamp, OptionalNumber alpha,
                                        double up_offset, bool round_bf16,
                                        std::string_view scale_fmt, std::optional<bool> fused,
                                        OptionalText arch) {
  return raising_in_python([&]() -> std::tuple<Tensor, Tensor> {
    return silu_fold({x,
                      x_scale,
                      w,
                      w_scale,
                      {activation, clamp, alpha, up_offset, scale_fmt},
                      round_bf16,
                      fused,
                      owned(arch)},
                     std::nullopt);
  });
}

void silu_fold_out_op(const Tensor& x, const Tensor& x_scale, const Tensor& w,
                      const Tensor& w_scale, std::string_view activation, OptionalNumber clamp,
                      OptionalNumber alpha, double up_offset, bool round_bf16,
                      std::string_view scale_fmt, std::optional<bool> fused, OptionalText arch,
                      Tensor& out, Tensor& out_scale) {
  raising_in_python([&] {
    silu_fold({x,
               x_scale,
               w,
               w_scale,
               {activation, clamp, alpha, up_offset, scale_fmt},
               round_bf16,
               fused,
               owned(arch)},
              QuantizedPair{out, out_scale});
  });
}

Tensor block_gemm_op(const Tensor& x, const Tensor& x_scale, const Tensor& w, const Tensor& w_scale,
                     at::ScalarType out_dtype, const OptionalTensor& residual, OptionalText arch) {
  return raising_in_python([&] {
    return block_gemm({x, x_scale, w, w_scale, out_dtype, residual, owned(arch)}, std::nullopt);
  });
}

void block_gemm_out_op(const Tensor& x, const Tensor& x_scale, const Tensor& w,
                       const Tensor& w_scale, at::ScalarType out_dtype,
                       const OptionalTensor& residual, OptionalText arch, Tensor& out) {
  raising_in_python(
      [&] { block_gemm({x, x_scale, w, w_scale, out_dtype, residual, owned(arch)}, out); });
}

std::tuple<Tensor, Tensor> silu_mul_op(const Tensor& gate_up, std::string_view activation,
                                       OptionalNumber clamp, OptionalNumber alpha, double up_offset,
                                       std::string_view scale_fmt, OptionalText arch) {
  return raising_in_python([&]() -> std::tuple<Tensor, Tensor> {
    return silu_mul({gate_up, {activation, clamp, alpha, up_offset, scale_fmt}, owned(arch)},
                    std::nullopt);
  });
}

void silu_mul_out_op(const Tensor& gate_up, std::string_view activation, OptionalNumber clamp,
                     OptionalNumber alpha, double up_offset, std::string_view scale_fmt,
                     OptionalText arch, Tensor& out, Tensor& out_scale) {
  raising_in_python([&] {
    silu_mul({gate_up, {activation, clamp, alpha, up_offset, scale_fmt}, owned(arch)},
             QuantizedPair{out, out_scale});
  });
}

TORCH_LIBRARY(deep_kernels, m) {
  m.def(
      "fp8_fp4_mqa_logits(Tensor q, Tensor? q_scale, Tensor kv, Tensor kv_scale, Tensor weights, "
      "Tensor cu_seq_len_k_start, Tensor cu_seq_len_k_end, bool clean_logits=True, "
      "SymInt max_seqlen_k=0, ScalarType logits_dtype=float, Tensor? schedule_meta=None, "
      "str reduction=\"exact\", str? arch=None) -> Tensor");
  m.def(
      "fp8_fp4_mqa_logits_out(Tensor q, Tensor? q_scale, Tensor kv, Tensor kv_scale, "
      "Tensor weights, Tensor cu_seq_len_k_start, Tensor cu_seq_len_k_end, bool clean_logits, "
      "SymInt max_seqlen_k, ScalarType logits_dtype, Tensor? schedule_meta, str reduction, "
      "str? arch, Tensor(a!) out) -> ()");
  // num_sms sets the result's length: an argument, so that a traced call keeps its promise whatever
  // set_num_sms() says when it runs.
  m.def(
      "get_mqa_logits_metadata(Tensor cu_seq_len_k_start, Tensor cu_seq_len_k_end, "
      "SymInt num_kv_tokens, SymInt num_heads, SymInt num_sms, str? arch=None) -> Tensor");
  m.def(
      "fp8_fp4_paged_mqa_logits(Tensor q, Tensor? q_scale, Tensor kv_cache, Tensor weights, "
      "Tensor context_lens, Tensor block_table, Tensor? schedule_meta, SymInt max_context_len, "
      "bool clean_logits=False, ScalarType logits_dtype=float, Tensor? indices=None, "
      "str? arch=None) -> Tensor");
  m.def(
      "fp8_fp4_paged_mqa_logits_out(Tensor q, Tensor? q_scale, Tensor kv_cache, Tensor weights, "
      "Tensor context_lens, Tensor block_table, Tensor? schedule_meta, SymInt max_context_len, "
      "bool clean_logits, ScalarType logits_dtype, Tensor? indices, str? arch, Tensor(a!) out) "
      "-> ()");
  m.def(
      "get_paged_mqa_logits_metadata(Tensor context_lens, SymInt block_kv, SymInt num_sms, "
      "Tensor? indices=None, str? arch=None) -> Tensor");
  m.def(
      "fp8_silu_fold_prefill(Tensor x, Tensor x_scale, Tensor w_gate_up, Tensor w_scale, "
      "str activation=\"silu\", float? clamp=None, float? alpha=None, float up_offset=0.0, "
      "bool round_bf16=True, str scale_fmt=\"fp32\", bool? fused=None, str? arch=None) "
      "-> (Tensor, Tensor)");
  m.def(
      "fp8_silu_fold_prefill_out(Tensor x, Tensor x_scale, Tensor w_gate_up, Tensor w_scale, "
      "str activation, float? clamp, float? alpha, float up_offset, bool round_bf16, "
      "str scale_fmt, bool? fused, str? arch, Tensor(a!) out, Tensor(b!) out_scale) -> ()");
  m.def(
      "fp8_block_gemm_nt(Tensor x, Tensor x_scale, Tensor w, Tensor w_scale, "
      "ScalarType out_dtype=bfloat16, Tensor? residual=None, str? arch=None) -> Tensor");
  m.def(
      "fp8_block_gemm_nt_out(Tensor x, Tensor x_scale, Tensor w, Tensor w_scale, "
      "ScalarType out_dtype, Tensor? residual, str? arch, Tensor(a!) out) -> ()");
  m.def(
      "silu_mul_to_fp8_block128(Tensor gate_up, str activation=\"silu\", float? clamp=None, "
      "float? alpha=None, float up_offset=0.0, str scale_fmt=\"fp32\", str? arch=None) "
      "-> (Tensor, Tensor)");
  m.def(
      "silu_mul_to_fp8_block128_out(Tensor gate_up, str activation, float? clamp, float? alpha, "
      "float up_offset, str scale_fmt, str? arch, Tensor(a!) out, Tensor(b!) out_scale) -> ()");
}

void register_kernels(torch::Library& m) {
  m.impl("fp8_fp4_mqa_logits", mqa_logits_op);
  m.impl("fp8_fp4_mqa_logits_out", mqa_logits_out_op);
  m.impl("get_mqa_logits_metadata", mqa_metadata_op);
  m.impl("fp8_fp4_paged_mqa_logits", paged_mqa_logits_op);
  m.impl("fp8_fp4_paged_mqa_logits_out", paged_mqa_logits_out_op);
  m.impl("get_paged_mqa_logits_metadata", paged_mqa_metadata_op);
  m.impl("fp8_silu_fold_prefill", silu_fold_op);
  m.impl("fp8_silu_fold_prefill_out", silu_fold_out_op);
  m.impl("fp8_block_gemm_nt", block_gemm_op);
  m.impl("fp8_block_gemm_nt_out", block_gemm_out_op);
  m.impl("silu_mul_to_fp8_block128", silu_mul_op);
  m.impl("silu_mul_to_fp8_block128_out", silu_mul_out_op);
}
TORCH_LIBRARY_IMPL(deep_kernels, CPU, m) { register_kernels(m); }
TORCH_LIBRARY_IMPL(deep_kernels, CUDA, m) { register_kernels(m); }

TORCH_LIBRARY_IMPL(deep_kernels, Autograd, m) {
  for (const char* name :
       {"fp8_fp4_mqa_logits", "fp8_fp4_mqa_logits_out", "get_mqa_logits_metadata",
        "fp8_fp4_paged_mqa_logits", "fp8_fp4_paged_mqa_logits_out", "get_paged_mqa_logits_metadata",
        "fp8_silu_fold_prefill", "fp8_silu_fold_prefill_out", "fp8_block_gemm_nt",
        "fp8_block_gemm_nt_out", "silu_mul_to_fp8_block128", "silu_mul_to_fp8_block128_out"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&guard_op>());
}
void refuse_lazy_outs(torch::Library& m) {
  for (const char* name :
       {"fp8_fp4_mqa_logits_out", "fp8_fp4_paged_mqa_logits_out", "fp8_silu_fold_prefill_out",
        "fp8_block_gemm_nt_out", "silu_mul_to_fp8_block128_out"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&refuse_lazy_out_op>());
}
TORCH_LIBRARY_IMPL(deep_kernels, Negative, m) { refuse_lazy_outs(m); }
TORCH_LIBRARY_IMPL(deep_kernels, Conjugate, m) { refuse_lazy_outs(m); }

}  // namespace
}  // namespace deep_kernels
