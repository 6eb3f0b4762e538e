// The eager path of the FP8 prefill MLP, and what its fake versions check.
#include "ops/silu_fold.h"
#include "python_args.h"
#include "python_lock.h"
#include "python_ops.h"

namespace deep_kernels {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// What an ActivationCall points into.
struct ActivationWords {
  std::string activation;
  std::string scale_fmt;
  ActivationCall call;

  ActivationWords(const PythonArgs& args, py::handle activation_arg, py::handle clamp,
                  py::handle alpha, py::handle up_offset, py::handle scale_fmt_arg)
      : activation(args.text("activation", activation_arg)),
        scale_fmt(args.text("scale_fmt", scale_fmt_arg)),
        call{activation, args.optional_number("clamp", clamp), args.optional_number("alpha", alpha),
             args.number("up_offset", up_offset), scale_fmt} {}
};

// Runs an op and hands over what it made, or `out_arg` if that was given.
template <Purpose kPurpose, class Check, class Run, class Wrap>
py::object answer(const PythonArgs& args, py::handle out_arg, Check&& check, Run&& run,
                  Wrap&& wrap) {
  if (kPurpose == Purpose::check) {
    check();
    return py::none();
  }
  if (!args.is_plain()) return not_plain();
  auto result = [&] {
    const PythonUnlocked unlocked;
    return run();
  }();
  if (!out_arg.is_none()) return py::reinterpret_borrow<py::object>(out_arg);
  return wrap(std::move(result));
}

py::object wrapped_pair(QuantizedPair pair) {
  return py::make_tuple(wrapped(std::move(pair.first)), wrapped(std::move(pair.second)));
}

template <Purpose kPurpose>
py::object silu_fold_call(py::handle x_arg, py::handle x_scale_arg, py::handle w_arg,
                          py::handle w_scale_arg, py::handle activation, py::handle clamp,
                          py::handle alpha, py::handle up_offset, py::handle round_arg,
                          py::handle scale_fmt, py::handle fused_arg, py::handle arch_arg,
                          py::handle out_arg) {
  PythonArgs args(kSiluFoldOp);
  const Tensor& x = args.tensor("x", x_arg);
  const Tensor& x_scale = args.tensor("x_scale", x_scale_arg);
  const Tensor& w = args.tensor("w_gate_up", w_arg);
  const Tensor& w_scale = args.tensor("w_scale", w_scale_arg);
  const ActivationWords words(args, activation, clamp, alpha, up_offset, scale_fmt);
  const OptionalPair out = args.out_pair("out", out_arg);
  const SiluFoldCall call{x,
                          x_scale,
                          w,
                          w_scale,
                          words.call,
                          args.boolean("round_bf16", round_arg),
                          args.optional_boolean("fused", fused_arg),
                          args.optional_text("arch", arch_arg)};
  return answer<kPurpose>(
      args, out_arg, [&] { check_silu_fold(call, out); }, [&] { return silu_fold(call, out); },
      wrapped_pair);
}

template <Purpose kPurpose>
py::object block_gemm_call(py::handle x_arg, py::handle x_scale_arg, py::handle w_arg,
                           py::handle w_scale_arg, py::handle dtype_arg, py::handle residual_arg,
                           py::handle arch_arg, py::handle out_arg) {
  PythonArgs args(kBlockGemmOp);
  const Tensor& x = args.tensor("x", x_arg);
  const Tensor& x_scale = args.tensor("x_scale", x_scale_arg);
  const Tensor& w = args.tensor("w", w_arg);
  const Tensor& w_scale = args.tensor("w_scale", w_scale_arg);
  const OptionalTensor residual = args.optional_tensor("residual", residual_arg);
  const OptionalTensor out = args.out("out", out_arg);
  const BlockGemmCall call{x,
                           x_scale,
                           w,
                           w_scale,
                           args.dtype("out_dtype", dtype_arg),
                           residual,
                           args.optional_text("arch", arch_arg)};
  return answer<kPurpose>(
      args, out_arg, [&] { check_block_gemm(call, out); }, [&] { return block_gemm(call, out); },
      wrapped);
}

template <Purpose kPurpose>
py::object silu_mul_call(py::handle gate_up_arg, py::handle activation, py::handle clamp,
                         py::handle alpha, py::handle up_offset, py::handle scale_fmt,
                         py::handle arch_arg, py::handle out_arg) {
  PythonArgs args(kSiluMulOp);
  const Tensor& gate_up = args.tensor("gate_up", gate_up_arg);
  const ActivationWords words(args, activation, clamp, alpha, up_offset, scale_fmt);
  const OptionalPair out = args.out_pair("out", out_arg);
  const SiluMulCall call{gate_up, words.call, args.optional_text("arch", arch_arg)};
  return answer<kPurpose>(
      args, out_arg, [&] { check_silu_mul(call, out); }, [&] { return silu_mul(call, out); },
      wrapped_pair);
}

py::dict fold_choice(const std::string& arch, i64 num_tokens, i64 num_columns, i64 num_sms) {
  const Arch resolved = resolve_arch("silu_fold_choice", arch, std::nullopt);
  const FoldChoice choice = describe_fold_choice(resolved, {num_tokens, num_columns, num_sms});
  py::dict rounds;
  for (const auto& [tile, count] : choice.rounds) rounds[py::str(tile)] = count;
  py::dict result;
  result["rounds"] = rounds;
  result["tile"] = choice.tile;
  result["fused"] = choice.fused;
  return result;
}

}  // namespace

void add_silu_ops(py::module_& m) {
  m.def("fp8_silu_fold_prefill", silu_fold_call<Purpose::run>);
  m.def("check_fp8_silu_fold_prefill", silu_fold_call<Purpose::check>);
  m.def("fp8_block_gemm_nt", block_gemm_call<Purpose::run>);
  m.def("check_fp8_block_gemm_nt", block_gemm_call<Purpose::check>);
  m.def("silu_mul_to_fp8_block128", silu_mul_call<Purpose::run>);
  m.def("check_silu_mul_to_fp8_block128", silu_mul_call<Purpose::check>);
  m.def("silu_fold_choice", fold_choice);
}

}  // namespace deep_kernels
