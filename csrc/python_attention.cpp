// The eager path of flash attention, and what its fake versions check.
#include <pybind11/stl.h>

#include "ops/attention.h"
#include "python_args.h"
#include "python_lock.h"
#include "python_ops.h"

namespace deep_kernels {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// The keywords that both ops share, in the order of the call.
struct Options {
  bool causal;
  std::optional<double> softmax_scale;
  Ex2Words ex2;
  std::optional<int64_t> num_splits;
  std::optional<std::string> arch;
  bool return_lse;

  Options(const PythonArgs& args, const py::tuple& values)
      : causal(args.boolean("causal", values[0])),
        softmax_scale(args.optional_number("softmax_scale", values[1])),
        ex2{args.optional_integer("ex2_emu_freq", values[2]),
            args.optional_integer("ex2_emu_res", values[3]),
            args.optional_integer("ex2_emu_start_frg", values[4])},
        num_splits(args.optional_integer("num_splits", values[5])),
        arch(args.optional_text("arch", values[6])),
        return_lse(args.boolean("return_lse", values[7])) {}

  // `packed` may be null.
  AttentionCall call(const Tensor& q, const Tensor& k, const Tensor& v,
                     const PackedTokens* packed) const {
    return {q, k, v, packed, causal, softmax_scale, ex2, num_splits, arch};
  }
};

template <Purpose kPurpose>
py::object run_or_check(const PythonArgs& args, const AttentionCall& call, const Options& options,
                        const OptionalTensor& out, py::handle out_arg) {
  if (kPurpose == Purpose::check) {
    check_attention(call, out);
    return py::none();
  }
  if (!args.is_plain()) return not_plain();
  AttentionResult result = [&] {
    const PythonUnlocked unlocked;
    return attention(call, out);
  }();
  py::object values = out_arg.is_none() ? wrapped(std::move(result.out))
                                        : py::reinterpret_borrow<py::object>(out_arg);
  if (!options.return_lse) return values;
  return py::make_tuple(values, wrapped(std::move(result.lse)));
}

template <Purpose kPurpose>
py::object dense_call(py::handle q_arg, py::handle k_arg, py::handle v_arg, const py::tuple& words,
                      py::handle out_arg) {
  PythonArgs args(kAttentionOp);
  const Tensor& q = args.tensor("q", q_arg);
  const Tensor& k = args.tensor("k", k_arg);
  const Tensor& v = args.tensor("v", v_arg);
  const Options options(args, words);
  const OptionalTensor out = args.out("out", out_arg);
  const AttentionCall call = options.call(q, k, v, nullptr);
  return run_or_check<kPurpose>(args, call, options, out, out_arg);
}

template <Purpose kPurpose>
py::object varlen_call(py::handle q_arg, py::handle k_arg, py::handle v_arg, py::handle cu_q_arg,
                       py::handle cu_k_arg, py::handle max_q_arg, py::handle max_k_arg,
                       const py::tuple& words, py::handle out_arg) {
  PythonArgs args(kVarlenAttentionOp);
  const Tensor& q = args.tensor("q", q_arg);
  const Tensor& k = args.tensor("k", k_arg);
  const Tensor& v = args.tensor("v", v_arg);
  const PackedTokens packed{
      args.tensor("cu_seqlens_q", cu_q_arg), args.tensor("cu_seqlens_k", cu_k_arg),
      args.count("max_seqlen_q", max_q_arg), args.count("max_seqlen_k", max_k_arg)};
  const Options options(args, words);
  const OptionalTensor out = args.out("out", out_arg);
  const AttentionCall call = options.call(q, k, v, &packed);
  return run_or_check<kPurpose>(args, call, options, out, out_arg);
}

double share(py::handle freq, py::handle res, py::handle start, py::handle fragment,
             py::handle num_fragments) {
  const PythonArgs args("ex2_emulated_share");
  return ex2_emulated_share(
      {args.integer("freq", freq), args.integer("res", res), args.integer("start_frg", start)},
      args.integer("fragment", fragment), args.integer("num_fragments", num_fragments));
}

// `arch` is "cpu" or as in supported(), whose words a case has.
py::dict ex2_choice(const std::string& arch, const Case& fields) {
  CaseReader reader(kAttentionOp, fields);
  const AttentionCase wanted = read_attention_case(reader);
  reader.finish();
  std::optional<Arch> resolved;
  if (arch != "cpu") resolved = resolve_arch("ex2_choice", arch, std::nullopt);
  const Ex2Choice choice = describe_ex2_choice(wanted, resolved);
  py::dict result;
  result["ex2"] = py::make_tuple(choice.ex2.freq, choice.ex2.res, choice.ex2.start_fragment);
  result["fragment"] = choice.fragments.length;
  result["num_fragments"] = choice.fragments.count;
  result["emulated"] = choice.emulated;
  return result;
}

}  // namespace

void add_attention_ops(py::module_& m) {
  m.def("flash_attn_fwd", dense_call<Purpose::run>);
  m.def("check_flash_attn_fwd", dense_call<Purpose::check>);
  m.def("flash_attn_varlen_fwd", varlen_call<Purpose::run>);
  m.def("check_flash_attn_varlen_fwd", varlen_call<Purpose::check>);
  m.def("ex2_emulated_share", share);
  m.def("ex2_choice", ex2_choice);
}

}  // namespace deep_kernels
