#include "ops/attention_check.h"

#include <fmt/format.h>

#include <cmath>

#include "ops/checks.h"
#include "runtime/errors.h"

namespace deep_kernels {

namespace {

using namespace checks;

bool is_known(int64_t size) { return size != kUnknown; }

AttentionProblem check_dense(const AttentionCall& call) {
  const char* op = call.op();
  const auto [q, k, v] = std::tie(call.q, call.k, call.v);
  require(op, "q", q, {at::kBFloat16, at::kHalf},
          {{"batch", kUnknown},
           {"num_q", kUnknown},
           {"num_q_heads", kUnknown},
           {"head_dim", kUnknown}});
  AttentionProblem p{.batch = size_i32(op, "batch", q, 0),
                     .num_q = size_i32(op, "num_q", q, 1),
                     .num_kv = kUnknown,
                     .num_q_heads = size_i32(op, "num_q_heads", q, 2),
                     .num_kv_heads = kUnknown,
                     .head_dim = size_of(q, 3)};
  require(op, "k", k, {q.scalar_type()},
          {{"batch", p.batch},
           {"num_kv", kUnknown},
           {"num_kv_heads", kUnknown},
           {"head_dim", p.head_dim}});
  p.num_kv = size_i32(op, "num_kv", k, 1);
  p.num_kv_heads = size_i32(op, "num_kv_heads", k, 2);
  require(op, "v", v, {q.scalar_type()},
          {{"batch", p.batch},
           {"num_kv", p.num_kv},
           {"num_kv_heads", p.num_kv_heads},
           {"head_dim", p.head_dim}});
  return p;
}

AttentionProblem check_packed(const AttentionCall& call) {
  const char* op = call.op();
  const auto [q, k, v] = std::tie(call.q, call.k, call.v);
  require(op, "q", q, {at::kBFloat16, at::kHalf},
          {{"total_q", kUnknown}, {"num_q_heads", kUnknown}, {"head_dim", kUnknown}});
  AttentionProblem p{.batch = kUnknown,
                     .num_q = size_i32(op, "total_q", q, 0),
                     .num_kv = kUnknown,
                     .num_q_heads = size_i32(op, "num_q_heads", q, 1),
                     .num_kv_heads = kUnknown,
                     .head_dim = size_of(q, 2)};
  require(op, "k", k, {q.scalar_type()},
          {{"total_k", kUnknown}, {"num_kv_heads", kUnknown}, {"head_dim", p.head_dim}});
  p.num_kv = size_i32(op, "total_k", k, 0);
  p.num_kv_heads = size_i32(op, "num_kv_heads", k, 1);
  require(op, "v", v, {q.scalar_type()},
          {{"total_k", p.num_kv}, {"num_kv_heads", p.num_kv_heads}, {"head_dim", p.head_dim}});

  const auto& [cu_q, cu_k, max_q, max_k] = *call.packed;
  require(op, "cu_seqlens_q", cu_q, {at::kInt}, {{"batch + 1", kUnknown}});
  const int64_t bounds = size_i32(op, "batch + 1", cu_q, 0);
  if (bounds == 0)
    throw ValueError(fmt::format("{}: cu_seqlens_q must have at least one element, got none", op));
  p.batch = is_known(bounds) ? bounds - 1 : kUnknown;
  require(op, "cu_seqlens_k", cu_k, {at::kInt}, {{"batch + 1", bounds}});
  require_rows(op, "cu_seqlens_q", cu_q);
  require_rows(op, "cu_seqlens_k", cu_k);
  if (max_q) to_i32(op, "max_seqlen_q", *max_q);
  if (max_k) to_i32(op, "max_seqlen_k", *max_k);
  return p;
}

void check_heads(const char* op, const AttentionProblem& p) {
  if (is_known(p.head_dim) && p.head_dim != 64 && p.head_dim != 128 && p.head_dim != 256)
    throw ValueError(
        fmt::format("{}: head_dim of q must be 64, 128 or 256, got {}", op, p.head_dim));
  if (p.num_kv_heads == 0)
    throw ValueError(fmt::format("{}: num_kv_heads of k must be at least 1, got 0", op));
  if (!is_known(p.num_q_heads) || !is_known(p.num_kv_heads)) return;
  if (p.num_q_heads == 0 || p.num_q_heads % p.num_kv_heads != 0)
    throw ValueError(fmt::format(
        "{}: num_q_heads of q [.., tokens, heads, head_dim] must be a positive multiple of "
        "num_kv_heads={}, got {}",
        op, p.num_kv_heads, p.num_q_heads));
}

void check_scale(const char* op, double scale) {
  const auto value = static_cast<float>(scale);
  if (!(value > 0.0f) || !std::isfinite(value))
    throw ValueError(fmt::format(
        "{}: softmax_scale must be a finite float32 greater than 0, got {}", op, scale));
}

void at_least_0(const char* op, const std::string& name, const std::optional<int64_t>& value) {
  if (value && *value < 0)
    throw ValueError(fmt::format("{}: {} must be at least 0, got {}", op, name, *value));
}

}  // namespace

void check_ex2(const char* op, const Ex2Words& words, const char* prefix) {
  const auto& [freq, res, start] = words;
  const auto name = [&](const char* word) { return std::string(prefix) + word; };
  if (!freq && (res || start))
    throw ValueError(fmt::format("{}: {} must be given with {}={}, got None", op, name("freq"),
                                 name(res ? "res" : "start_frg"), res ? *res : *start));
  if (freq && !res)
    throw ValueError(fmt::format("{}: {} must be given with {}={}, got None", op, name("res"),
                                 name("freq"), *freq));
  at_least_0(op, name("freq"), freq);
  at_least_0(op, name("res"), res);
  at_least_0(op, name("start_frg"), start);
  if (freq && *freq > 0 && *res > *freq)
    throw ValueError(fmt::format("{}: {} must be from 0 to {}={}, got {}", op, name("res"),
                                 name("freq"), *freq, *res));
}

void check_num_splits(const char* op, const std::optional<int64_t>& num_splits) {
  if (num_splits && (*num_splits < 1 || *num_splits > kMaxKvSplits))
    throw ValueError(fmt::format("{}: num_splits must be from 1 to {} or None, got {}", op,
                                 kMaxKvSplits, *num_splits));
}

NamedTensors inputs_of(const AttentionCall& call) {
  NamedTensors inputs = {{"q", call.q}, {"k", call.k}, {"v", call.v}};
  if (call.packed) {
    inputs.push_back({"cu_seqlens_q", call.packed->cu_seqlens_q});
    inputs.push_back({"cu_seqlens_k", call.packed->cu_seqlens_k});
  }
  return inputs;
}

AttentionProblem check_attention_inputs(const AttentionCall& call) {
  const char* op = call.op();
  const AttentionProblem p = call.packed ? check_packed(call) : check_dense(call);
  check_heads(op, p);
  require_rows(op, "q", call.q);
  require_rows(op, "k", call.k);
  require_rows(op, "v", call.v);
  require_one_device(op, inputs_of(call));
  if (call.softmax_scale) check_scale(op, *call.softmax_scale);
  check_ex2(op, call.ex2);
  check_num_splits(op, call.num_splits);
  return p;
}

void check_attention_out(const at::Tensor& out, const AttentionCall& call) {
  const char* op = call.op();
  const auto q = [&](int64_t dim) { return size_of(call.q, dim); };
  if (call.packed)
    require(op, "out", out, {call.q.scalar_type()},
            {{"total_q", q(0)}, {"num_q_heads", q(1)}, {"head_dim", q(2)}});
  else
    require(op, "out", out, {call.q.scalar_type()},
            {{"batch", q(0)}, {"num_q", q(1)}, {"num_q_heads", q(2)}, {"head_dim", q(3)}});
  require_device(op, "out", out, call.q.device(), "q");
  require_rows(op, "out", out);
  require_no_self_overlap(op, "out", out);
  for (const NamedTensor& input : inputs_of(call))
    require_no_overlap(op, "out", out, input.name, input.tensor());
}

namespace {

void check_sums(const char* op, const char* name, const at::Tensor& sums, int64_t total) {
  const auto* values = static_cast<const i32*>(sums.const_data_ptr());
  const int64_t last = sums.size(0) - 1;
  if (values[0] != 0)
    throw ValueError(fmt::format("{}: {} must begin with 0, got {}", op, name, values[0]));
  for (int64_t i = 0; i < last; ++i)
    if (values[i + 1] < values[i])
      throw ValueError(fmt::format("{}: {} must not decrease, got {} behind {} at index {}", op,
                                   name, values[i + 1], values[i], i + 1));
  if (values[last] > total)
    throw ValueError(
        fmt::format("{}: {} must end with at most the {} tokens that are there, got {}", op, name,
                    total, values[last]));
}

}  // namespace

void check_cu_seqlens(const AttentionCall& call, const AttentionProblem& p) {
  if (!call.packed || !call.q.device().is_cpu()) return;
  check_sums(call.op(), "cu_seqlens_q", call.packed->cu_seqlens_q, p.num_q);
  check_sums(call.op(), "cu_seqlens_k", call.packed->cu_seqlens_k, p.num_kv);
}

void check_card_strides(const AttentionCall& call, const at::Tensor& out) {
  for (const NamedTensor& one : {NamedTensor("q", call.q), NamedTensor("k", call.k),
                                 NamedTensor("v", call.v), NamedTensor("out", out)})
    require_16_bytes(call.op(), one.name, one.tensor(), one.tensor().dim() - 1);
}

}  // namespace deep_kernels
