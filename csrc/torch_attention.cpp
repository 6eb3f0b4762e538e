// Flash attention among the operators of torch.ops.deep_kernels: schemas and addresses.
#include "ops/attention.h"
#include "torch_ops.h"

namespace deep_kernels {
namespace {

using at::Tensor;
using OptionalNumber = std::optional<double>;
using OptionalText = std::optional<std::string_view>;
using OptionalInt = std::optional<int64_t>;

AttentionCall attention_call(const Tensor& q, const Tensor& k, const Tensor& v,
                             const PackedTokens* packed, bool causal, OptionalNumber softmax_scale,
                             OptionalInt ex2_freq, OptionalInt ex2_res, OptionalInt ex2_start,
                             OptionalInt num_splits, OptionalText arch) {
  return {q,          k,          v, packed, causal, softmax_scale, {ex2_freq, ex2_res, ex2_start},
          num_splits, owned(arch)};
}

std::tuple<Tensor, Tensor> attention_op(const Tensor& q, const Tensor& k, const Tensor& v,
                                        bool causal, OptionalNumber softmax_scale,
                                        OptionalInt ex2_freq, OptionalInt ex2_res,
                                        OptionalInt ex2_start, OptionalInt num_splits,
                                        OptionalText arch) {
  return raising_in_python([&]() -> std::tuple<Tensor, Tensor> {
    auto [out, lse] = attention(attention_call(q, k, v, nullptr, causal, softmax_scale, ex2_freq,
                                               ex2_res, ex2_start, num_splits, arch),
                                std::nullopt);
    return {out, lse};
  });
}

Tensor attention_out_op(const Tensor& q, const Tensor& k, const Tensor& v, bool causal,
                        OptionalNumber softmax_scale, OptionalInt ex2_freq, OptionalInt ex2_res,
                        OptionalInt ex2_start, OptionalInt num_splits, OptionalText arch,
                        Tensor& out) {
  return raising_in_python([&] {
    return attention(attention_call(q, k, v, nullptr, causal, softmax_scale, ex2_freq, ex2_res,
                                    ex2_start, num_splits, arch),
                     out)
        .lse;
  });
}

std::tuple<Tensor, Tensor> varlen_attention_op(const Tensor& q, const Tensor& k, const Tensor& v,
                                               const Tensor& cu_q, const Tensor& cu_k,
                                               int64_t max_q, int64_t max_k, bool causal,
                                               OptionalNumber softmax_scale, OptionalInt ex2_freq,
                                               OptionalInt ex2_res, OptionalInt ex2_start,
                                               OptionalInt num_splits, OptionalText arch) {
  return raising_in_python([&]() -> std::tuple<Tensor, Tensor> {
    const PackedTokens packed{cu_q, cu_k, max_q, max_k};
    auto [out, lse] = attention(attention_call(q, k, v, &packed, causal, softmax_scale, ex2_freq,
                                               ex2_res, ex2_start, num_splits, arch),
                                std::nullopt);
    return {out, lse};
  });
}

Tensor varlen_attention_out_op(const Tensor& q, const Tensor& k, const Tensor& v,
                               const Tensor& cu_q, const Tensor& cu_k, int64_t max_q, int64_t max_k,
                               bool causal, OptionalNumber softmax_scale, OptionalInt ex2_freq,
                               OptionalInt ex2_res, OptionalInt ex2_start, OptionalInt num_splits,
                               OptionalText arch, Tensor& out) {
  return raising_in_python([&] {
    const PackedTokens packed{cu_q, cu_k, max_q, max_k};
    return attention(attention_call(q, k, v, &packed, causal, softmax_scale, ex2_freq, ex2_res,
                                    ex2_start, num_splits, arch),
                     out)
        .lse;
  });
}

TORCH_LIBRARY_FRAGMENT(deep_kernels, m) {
  m.def(
      "flash_attn_fwd(Tensor q, Tensor k, Tensor v, bool causal=False, float? softmax_scale=None, "
      "int? ex2_emu_freq=None, int? ex2_emu_res=None, int? ex2_emu_start_frg=None, "
      "int? num_splits=None, str? arch=None) -> (Tensor, Tensor)");
  m.def(
      "flash_attn_fwd_out(Tensor q, Tensor k, Tensor v, bool causal, float? softmax_scale, "
      "int? ex2_emu_freq, int? ex2_emu_res, int? ex2_emu_start_frg, int? num_splits, str? arch, "
      "Tensor(a!) out) -> Tensor");
  m.def(
      "flash_attn_varlen_fwd(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, "
      "Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, bool causal=False, "
      "float? softmax_scale=None, int? ex2_emu_freq=None, int? ex2_emu_res=None, "
      "int? ex2_emu_start_frg=None, int? num_splits=None, str? arch=None) -> (Tensor, Tensor)");
  m.def(
      "flash_attn_varlen_fwd_out(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, "
      "Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, bool causal, "
      "float? softmax_scale, int? ex2_emu_freq, int? ex2_emu_res, int? ex2_emu_start_frg, "
      "int? num_splits, str? arch, Tensor(a!) out) -> Tensor");
}

void register_attention(torch::Library& m) {
  m.impl("flash_attn_fwd", attention_op);
  m.impl("flash_attn_fwd_out", attention_out_op);
  m.impl("flash_attn_varlen_fwd", varlen_attention_op);
  m.impl("flash_attn_varlen_fwd_out", varlen_attention_out_op);
}
TORCH_LIBRARY_IMPL(deep_kernels, CPU, m) { register_attention(m); }
TORCH_LIBRARY_IMPL(deep_kernels, CUDA, m) { register_attention(m); }

TORCH_LIBRARY_IMPL(deep_kernels, Autograd, m) {
  for (const char* name : {"flash_attn_fwd", "flash_attn_fwd_out", "flash_attn_varlen_fwd",
                           "flash_attn_varlen_fwd_out"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&guard_op>());
}
void refuse_lazy_outs(torch::Library& m) {
  for (const char* name : {"flash_attn_fwd_out", "flash_attn_varlen_fwd_out"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&refuse_lazy_out_op>());
}
TORCH_LIBRARY_IMPL(deep_kernels, Negative, m) { refuse_lazy_outs(m); }
TORCH_LIBRARY_IMPL(deep_kernels, Conjugate, m) { refuse_lazy_outs(m); }

}  // namespace
}  // namespace deep_kernels
