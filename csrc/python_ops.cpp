// The eager path, where NotImplemented sends the caller to torch.ops, and what fake versions check.
#include "python_ops.h"

#include "ops/mqa_logits.h"
#include "ops/paged_mqa_logits.h"
#include "python_args.h"
#include "python_lock.h"

namespace deep_kernels {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

template <Purpose kPurpose>
py::object mqa_logits_call(py::handle q_pair, py::handle kv_pair, py::handle weights_arg,
                           py::handle start_arg, py::handle end_arg, py::handle clean_arg,
                           py::handle max_seqlen_arg, py::handle dtype_arg, py::handle schedule_arg,
                           py::handle reduction_arg, py::handle arch_arg, py::handle out_arg) {
  PythonArgs args(kMqaLogitsOp);
  const auto [q_object, q_scale_object] = args.pair("q", q_pair);
  const auto [kv_object, kv_scale_object] = args.pair("kv", kv_pair);
  const Tensor& q = args.tensor("q", q_object);
  const OptionalTensor q_scale = args.optional_tensor("q scale", q_scale_object);
  const Tensor& kv = args.tensor("kv", kv_object);
  const Tensor& kv_scale = args.tensor("kv scale", kv_scale_object);
  const Tensor& weights = args.tensor("weights", weights_arg);
  const Tensor& start = args.tensor("cu_seq_len_k_start", start_arg);
  const Tensor& end = args.tensor("cu_seq_len_k_end", end_arg);
  const OptionalTensor schedule = args.optional_tensor("schedule_meta", schedule_arg);
  const OptionalTensor out = args.out("out", out_arg);
  const bool clean = args.boolean("clean_logits", clean_arg);
  const std::string reduction = args.text("reduction", reduction_arg);
  const at::ScalarType dtype = args.dtype("logits_dtype", dtype_arg);
  const std::optional<std::string> arch = args.optional_text("arch", arch_arg);
  const std::optional<int64_t> max_seqlen_k = args.count("max_seqlen_k", max_seqlen_arg);
  const MqaLogitsCall call{q,     q_scale,      kv,    kv_scale, weights,   start, end,
                           clean, max_seqlen_k, dtype, schedule, reduction, arch};
  if (kPurpose == Purpose::check) {
    check_mqa_logits(call, out);
    return py::none();
  }
  if (!args.is_plain()) return not_plain();
  Tensor result;
  {
    const PythonUnlocked unlocked;
    result = mqa_logits(call, out);
  }
  if (out) return py::reinterpret_borrow<py::object>(out_arg);
  return wrapped(std::move(result));
}

// num_sms: None for as many as the device and set_num_sms() say.
template <Purpose kPurpose>
py::object mqa_metadata_call(py::handle start_arg, py::handle end_arg, py::handle num_kv_arg,
                             py::handle num_heads_arg, py::handle num_sms_arg,
                             py::handle arch_arg) {
  PythonArgs args("get_mqa_logits_metadata");
  const Tensor& start = args.tensor("cu_seq_len_k_start", start_arg);
  const Tensor& end = args.tensor("cu_seq_len_k_end", end_arg);
  const std::optional<std::string> arch = args.optional_text("arch", arch_arg);
  const std::optional<int64_t> num_kv = args.count("num_kv_tokens", num_kv_arg);
  const std::optional<int64_t> num_heads = args.count("num_heads", num_heads_arg);
  const std::optional<int64_t> num_sms =
      num_sms_arg.is_none() ? std::nullopt : args.count("num_sms", num_sms_arg);
  const MqaMetadataCall call{start, end, num_kv, num_heads, num_sms, arch};
  if (kPurpose == Purpose::check) {
    check_mqa_logits_metadata(call);
    return py::none();
  }
  if (!args.is_plain()) return not_plain();
  Tensor result;
  {
    const PythonUnlocked unlocked;
    result = mqa_logits_metadata(call);
  }
  return wrapped(std::move(result));
}

template <Purpose kPurpose>
py::object paged_mqa_logits_call(py::handle q_pair, py::handle cache_arg, py::handle weights_arg,
                                 py::handle lens_arg, py::handle table_arg, py::handle schedule_arg,
                                 py::handle max_len_arg, py::handle clean_arg, py::handle dtype_arg,
                                 py::handle indices_arg, py::handle arch_arg, py::handle out_arg) {
  PythonArgs args(kPagedMqaLogitsOp);
  const auto [q_object, q_scale_object] = args.pair("q", q_pair);
  const Tensor& q = args.tensor("q", q_object);
  const OptionalTensor q_scale = args.optional_tensor("q scale", q_scale_object);
  const Tensor& cache = args.tensor("kv_cache", cache_arg);
  const Tensor& weights = args.tensor("weights", weights_arg);
  const Tensor& lens = args.tensor("context_lens", lens_arg);
  const Tensor& table = args.tensor("block_table", table_arg);
  const OptionalTensor schedule = args.optional_tensor("schedule_meta", schedule_arg);
  const OptionalTensor indices = args.optional_tensor("indices", indices_arg);
  const OptionalTensor out = args.out("out", out_arg);
  const std::optional<int64_t> max_len = args.count("max_context_len", max_len_arg);
  const bool clean = args.boolean("clean_logits", clean_arg);
  const at::ScalarType dtype = args.dtype("logits_dtype", dtype_arg);
  const std::optional<std::string> arch = args.optional_text("arch", arch_arg);
  const PagedMqaLogitsCall call{q,        q_scale, cache, weights, lens,    table,
                                schedule, max_len, clean, dtype,   indices, arch};
  if (kPurpose == Purpose::check) {
    check_paged_mqa_logits(call, out);
    return py::none();
  }
  if (!args.is_plain()) return not_plain();
  Tensor result;
  {
    const PythonUnlocked unlocked;
    result = paged_mqa_logits(call, out);
  }
  if (out) return py::reinterpret_borrow<py::object>(out_arg);
  return wrapped(std::move(result));
}

template <Purpose kPurpose>
py::object paged_mqa_metadata_call(py::handle lens_arg, py::handle block_kv_arg,
                                   py::handle num_sms_arg, py::handle indices_arg,
                                   py::handle arch_arg) {
  PythonArgs args(kPagedMqaMetadataOp);
  const Tensor& lens = args.tensor("context_lens", lens_arg);
  const OptionalTensor indices = args.optional_tensor("indices", indices_arg);
  const std::optional<int64_t> block_kv = args.count("block_kv", block_kv_arg);
  const std::optional<int64_t> num_sms = args.count("num_sms", num_sms_arg);
  const std::optional<std::string> arch = args.optional_text("arch", arch_arg);
  const PagedMqaMetadataCall call{lens, block_kv, num_sms, indices, arch};
  if (kPurpose == Purpose::check) {
    check_paged_mqa_logits_metadata(call);
    return py::none();
  }
  if (!args.is_plain()) return not_plain();
  Tensor result;
  {
    const PythonUnlocked unlocked;
    result = paged_mqa_logits_metadata(call);
  }
  return wrapped(std::move(result));
}

}  // namespace

py::object not_plain() { return py::reinterpret_borrow<py::object>(Py_NotImplemented); }

py::object wrapped(Tensor tensor) {
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(std::move(tensor)));
}

void add_ops(py::module_& m) {
  add_silu_ops(m);
  add_attention_ops(m);
  m.def("fp8_fp4_mqa_logits", mqa_logits_call<Purpose::run>);
  m.def("check_fp8_fp4_mqa_logits", mqa_logits_call<Purpose::check>);
  m.def("get_mqa_logits_metadata", mqa_metadata_call<Purpose::run>);
  m.def("check_get_mqa_logits_metadata", mqa_metadata_call<Purpose::check>);
  m.def("fp8_fp4_paged_mqa_logits", paged_mqa_logits_call<Purpose::run>);
  m.def("check_fp8_fp4_paged_mqa_logits", paged_mqa_logits_call<Purpose::check>);
  m.def("get_paged_mqa_logits_metadata", paged_mqa_metadata_call<Purpose::run>);
  m.def("check_get_paged_mqa_logits_metadata", paged_mqa_metadata_call<Purpose::check>);
  m.def("mqa_schedule_length", [](int num_q, int num_heads, int num_sms) {
    return mqa_schedule_length(num_q, num_heads, num_sms);
  });
}

}  // namespace deep_kernels
