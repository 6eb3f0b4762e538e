// Flash attention forward: tensors -> Args -> Spec -> kernel -> launch, or the CPU backend.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "deep_kernels/contract/attention.h"
#include "ops/case.h"
#include "ops/tuning.h"
#include "runtime/arch.h"
#include "runtime/source.h"

namespace deep_kernels {

inline constexpr const char* kAttentionOp = "flash_attn_fwd";
inline constexpr const char* kVarlenAttentionOp = "flash_attn_varlen_fwd";

// The emulation as it was asked for; nothing: the measured table.
struct Ex2Words {
  std::optional<int64_t> freq;
  std::optional<int64_t> res;
  std::optional<int64_t> start_frg;
};

// Members of the batch one after the other, told apart by running sums of their lengths.
struct PackedTokens {
  const at::Tensor& cu_seqlens_q;
  const at::Tensor& cu_seqlens_k;
  std::optional<int64_t> max_seqlen_q;  // nothing: being traced
  std::optional<int64_t> max_seqlen_k;
};

struct AttentionCall {
  const at::Tensor& q;
  const at::Tensor& k;
  const at::Tensor& v;
  const PackedTokens* packed;  // null: a dense batch
  bool causal;
  std::optional<double> softmax_scale;
  Ex2Words ex2;
  std::optional<int64_t> num_splits;
  std::optional<std::string> arch;

  const char* op() const { return packed ? kVarlenAttentionOp : kAttentionOp; }
};

struct AttentionResult {
  at::Tensor out;
  at::Tensor lse;
};
// Allocates `out`, or writes into the given one and returns it.
AttentionResult attention(const AttentionCall& call, const std::optional<at::Tensor>& out);
// Refuses, in the same words, what no device would run, of a call that is being traced.
void check_attention(const AttentionCall& call, const std::optional<at::Tensor>& out);

// Share of a row's exponentials that is emulated, where a thread's part of a tile of scores is
// num_fragments fragments.
double ex2_emulated_share(const Ex2Words& ex2, int64_t fragment, int64_t num_fragments);

// A case as supported() and prepare() see it.
struct AttentionCase {
  DType dtype = DType::bfloat16;
  int64_t head_dim = 128;
  int64_t num_q_heads = 1;
  int64_t num_kv_heads = 1;
  int64_t num_q = 0;   // of the longest member; 0: not said, a call takes it for many
  int64_t num_kv = 0;  // of the longest member
  bool causal = false;
  bool varlen = false;
  Ex2Words ex2;
  std::optional<int64_t> num_splits;
};
AttentionCase read_attention_case(CaseReader& reader);
std::optional<std::string> attention_refusal(const AttentionCase& wanted, Backend backend);

// Throws ValueError for words that mean nothing.
void check_ex2(const char* op, const Ex2Words& words, const char* prefix = "ex2_emu_");
void check_num_splits(const char* op, const std::optional<int64_t>& num_splits);

Ex2Emulation choose_ex2(const AttentionCase& wanted, Backend backend, i32 tile_keys);
// What was asked for, or what keeps `num_workers` threads or SMs busy.
i32 choose_num_splits(const AttentionCase& wanted, i64 num_units, i64 num_workers,
                      i64 num_key_tiles);
AttentionSpec choose_attention_spec(const AttentionCase& wanted, const Arch& arch, bool split);
// That one; where num_q is not said, those of all numbers of queries, each once.
std::vector<AttentionSpec> attention_specs_of(const AttentionCase& wanted, const Arch& arch,
                                              bool split);
AttentionJoinSpec choose_attention_join_spec(const AttentionCase& wanted, const Arch& arch);

// What a case gets, for the tuner. Words that mean the same set emulate the same elements.
struct Ex2Choice {
  Ex2Emulation ex2;
  RowFragments fragments;
  std::vector<i32> emulated;  // places in a row's fragments, one after the other
};
// No arch: the CPU backend.
Ex2Choice describe_ex2_choice(const AttentionCase& wanted, const std::optional<Arch>& arch);

// What was measured, for the inspector.
std::vector<TuningRow> attention_tuning();

KernelText kernel_text(const AttentionSpec& spec);
KernelText kernel_text(const AttentionJoinSpec& spec);

}  // namespace deep_kernels
