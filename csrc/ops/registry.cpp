#include "ops/registry.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "deep_kernels/contract/mqa_logits.h"
#include "ops/attention.h"
#include "ops/mqa_fold.h"
#include "ops/mqa_logits.h"
#include "ops/mqa_rebase.h"
#include "ops/paged_mqa_logits.h"
#include "ops/silu_fold.h"
#include "runtime/errors.h"
#include "runtime/settings.h"

namespace deep_kernels::registry {

namespace {

template <class Spec>
BuildReport build(const Target& target, const Spec& spec) {
  return store::prepare(build_request(target, spec, kernel_text(spec)));
}

// What supported() and prepare() ask of an op.
struct Op {
  const char* name;
  // Sentence without the op's name, or nothing.
  std::optional<std::string> (*refusal)(CaseReader& reader, Backend backend);
  std::vector<BuildReport> (*prepare)(CaseReader& reader, const Arch& arch);
};

std::optional<std::string> mqa_refusal(CaseReader& reader, Backend backend) {
  const MqaLogitsCase wanted = read_mqa_logits_case(reader);
  reader.finish();
  auto reason = mqa_logits_refusal(wanted, backend);
  // What a call would read, so that a setting with a wrong text is not found out by the call.
  if (!reason && backend != Backend::cpu) choose_mqa_clean(wanted, backend);
  return reason;
}

std::vector<BuildReport> prepare_schedule(int64_t num_heads, const Arch& arch) {
  const i32 padded = mqa_padded_heads(static_cast<i32>(num_heads));
  return {build(arch.target, MqaScheduleSpec{Backend::sm89, static_cast<u8>(padded)})};
}

std::vector<BuildReport> mqa_prepare(CaseReader& reader, const Arch& arch) {
  const MqaLogitsCase wanted = read_mqa_logits_case(reader);
  const MqaLogitsSpec spec = choose_mqa_logits_spec(wanted, arch);
  std::vector<BuildReport> reports = {build(arch.target, spec)};
  if (wanted.metadata) reports.push_back(prepare_schedule(wanted.num_heads, arch)[0]);
  if (wanted.format != Format::fp8)
    reports.push_back(build(arch.target, MqaRebaseSpec{Backend::sm89, wanted.format,
                                                       static_cast<u8>(wanted.head_dim)}));
  if (spec.is_folded())
    reports.push_back(
        build(arch.target, MqaFoldSpec{Backend::sm89, spec.head_dim, spec.num_heads}));
  return reports;
}

int64_t read_num_heads(CaseReader& reader) { return reader.take_int("num_heads", 64); }

std::optional<std::string> metadata_refusal(CaseReader& reader, Backend backend) {
  const int64_t num_heads = read_num_heads(reader);
  reader.finish();
  if (num_heads < 1 || num_heads > kMqaMaxHeads)
    return fmt::format("num_heads must be from 1 to {}, got {}", kMqaMaxHeads, num_heads);
  if (backend == Backend::sm100) return std::string("there are no sm100 kernels for it yet");
  return std::nullopt;
}

std::vector<BuildReport> metadata_prepare(CaseReader& reader, const Arch& arch) {
  return prepare_schedule(read_num_heads(reader), arch);
}

BuildReport prepare_paged_schedule(const Arch& arch) {
  return build(arch.target, PagedMqaScheduleSpec{Backend::sm89});
}

std::optional<std::string> paged_refusal(CaseReader& reader, Backend backend) {
  const PagedMqaLogitsCase wanted = read_paged_mqa_logits_case(reader);
  reader.finish();
  return paged_mqa_logits_refusal(wanted, backend);
}

std::vector<BuildReport> paged_prepare(CaseReader& reader, const Arch& arch) {
  const PagedMqaLogitsCase wanted = read_paged_mqa_logits_case(reader);
  std::vector<BuildReport> reports = {
      build(arch.target, choose_paged_mqa_logits_spec(wanted, arch))};
  if (wanted.metadata) reports.push_back(prepare_paged_schedule(arch));
  return reports;
}

std::optional<std::string> paged_metadata_refusal(CaseReader& reader, Backend backend) {
  const int64_t block_kv = reader.take_int("block_kv", PagedMqaLogitsCase().block_kv);
  reader.take_bool("indices", false);  // both run in one kernel
  reader.finish();
  if (auto reason = page_refusal(block_kv)) return reason;
  if (backend == Backend::sm100) return std::string("there are no sm100 kernels for it yet");
  return std::nullopt;
}

std::vector<BuildReport> paged_metadata_prepare(CaseReader&, const Arch& arch) {
  return {prepare_paged_schedule(arch)};
}

// Of the ops of the prefill MLP.
template <SiluCase (*kRead)(CaseReader&)>
std::optional<std::string> silu_op_refusal(CaseReader& reader, Backend backend) {
  const SiluCase wanted = kRead(reader);
  reader.finish();
  return silu_refusal(wanted, backend);
}

template <class Spec>
void build_all(const std::vector<Spec>& specs, const Arch& arch,
               std::vector<BuildReport>& reports) {
  for (const Spec& spec : specs) reports.push_back(build(arch.target, spec));
}

std::vector<BuildReport> silu_fold_prepare(CaseReader& reader, const Arch& arch) {
  const SiluCase wanted = read_silu_fold_case(reader);
  std::vector<BuildReport> reports;
  if (wanted.fused != false) build_all(silu_fold_specs(wanted, arch), arch, reports);
  const bool may_split = wanted.rounding == Rounding::bfloat16 && wanted.fused != true;
  if (!may_split) return reports;
  build_all(block_gemm_specs(wanted, arch), arch, reports);
  reports.push_back(build(arch.target, choose_silu_mul_spec(wanted)));
  return reports;
}
std::vector<BuildReport> block_gemm_prepare(CaseReader& reader, const Arch& arch) {
  std::vector<BuildReport> reports;
  build_all(block_gemm_specs(read_block_gemm_case(reader), arch), arch, reports);
  return reports;
}
std::vector<BuildReport> silu_mul_prepare(CaseReader& reader, const Arch& arch) {
  return {build(arch.target, choose_silu_mul_spec(read_silu_mul_case(reader)))};
}

std::optional<std::string> attention_op_refusal(CaseReader& reader, Backend backend) {
  const AttentionCase wanted = read_attention_case(reader);
  reader.finish();
  return attention_refusal(wanted, backend);
}

// Calls that leave num_splits open may take either kernel, by their sizes.
std::vector<BuildReport> attention_prepare(CaseReader& reader, const Arch& arch) {
  const AttentionCase wanted = read_attention_case(reader);
  const bool may_split = wanted.num_splits != 1, may_not = wanted.num_splits.value_or(1) == 1;
  std::vector<BuildReport> reports;
  const auto build_all = [&](bool split) {
    for (const AttentionSpec& spec : attention_specs_of(wanted, arch, split))
      reports.push_back(build(arch.target, spec));
  };
  if (may_not) build_all(false);
  if (!may_split) return reports;
  build_all(true);
  reports.push_back(build(arch.target, choose_attention_join_spec(wanted, arch)));
  return reports;
}

constexpr Op kOps[] = {
    {"fp8_fp4_mqa_logits", mqa_refusal, mqa_prepare},
    {"get_mqa_logits_metadata", metadata_refusal, metadata_prepare},
    {kPagedMqaLogitsOp, paged_refusal, paged_prepare},
    {kPagedMqaMetadataOp, paged_metadata_refusal, paged_metadata_prepare},
    {kSiluFoldOp, silu_op_refusal<read_silu_fold_case>, silu_fold_prepare},
    {kBlockGemmOp, silu_op_refusal<read_block_gemm_case>, block_gemm_prepare},
    {kSiluMulOp, silu_op_refusal<read_silu_mul_case>, silu_mul_prepare},
    {kAttentionOp, attention_op_refusal, attention_prepare},
    {kVarlenAttentionOp, attention_op_refusal, attention_prepare},
};

const Op& find(const std::string& name) {
  for (const Op& op : kOps)
    if (name == op.name) return op;
  throw ValueError(fmt::format("op must be one of {}, got '{}'", fmt::join(ops(), ", "), name));
}

std::optional<Arch> arch_or_cpu(const Op& op, const std::optional<std::string>& arch,
                                std::optional<int> capability) {
  const std::optional<std::string> wanted = arch ? arch : settings::arch();
  if (wanted ? *wanted == name_of(Backend::cpu) : !capability) return std::nullopt;
  return resolve_arch(op.name, arch, capability);
}

// A named target is compiled for, whatever card is at hand.
std::optional<int> card_for(const std::optional<std::string>& arch, std::optional<int> capability) {
  return arch && arch->find("sm_") != std::string::npos ? std::nullopt : capability;
}

}  // namespace

std::vector<std::string> ops() {
  std::vector<std::string> names;
  for (const Op& op : kOps) names.push_back(op.name);
  return names;
}

std::optional<std::string> supported(const std::string& name,
                                     const std::optional<std::string>& arch, const Case& fields,
                                     std::optional<int> capability) {
  const Op& op = find(name);
  CaseReader reader(name, fields);
  Backend backend = Backend::cpu;
  try {
    if (const auto found = arch_or_cpu(op, arch, card_for(arch, capability)))
      backend = found->backend;
  } catch (const UnsupportedError& error) {
    return error.what();
  }
  if (const auto reason = op.refusal(reader, backend)) return fmt::format("{}: {}", name, *reason);
  return std::nullopt;
}

std::vector<BuildReport> prepare(const std::string& name, const std::optional<std::string>& arch,
                                 const Case& fields, std::optional<int> capability) {
  const Op& op = find(name);
  if (const auto reason = supported(name, arch, fields, capability))
    throw UnsupportedError(*reason);
  const auto found = arch_or_cpu(op, arch, card_for(arch, capability));
  if (!found) return {};
  CaseReader reader(name, fields);
  return op.prepare(reader, *found);
}

std::vector<LegalSpec> legal_specs(const std::string& text) {
  const Arch arch = resolve_arch("compile", text, std::nullopt);
  std::vector<LegalSpec> specs;
  const auto add = [&](const auto& spec) {
    specs.push_back(
        {spec.op(), spec_json(spec), [target = arch.target, spec] { return build(target, spec); }});
  };
  for_each_mqa_logits_spec(arch.backend, add);
  for_each_mqa_schedule_spec(Backend::sm89, add);
  for_each_paged_mqa_logits_spec(arch.backend, add);
  for_each_paged_mqa_schedule_spec(Backend::sm89, add);
  for_each_mqa_rebase_spec(Backend::sm89, add);
  for_each_mqa_fold_spec(Backend::sm89, add);
  for_each_silu_fold_spec(arch.backend, add);
  for_each_block_gemm_spec(arch.backend, add);
  for_each_silu_mul_spec(Backend::sm89, add);
  if (!attention_refusal({}, arch.backend)) {
    for_each_attention_spec(arch.backend, add);
    for_each_attention_join_spec(arch.backend, add);
  }
  return specs;
}

std::vector<TuningRow> tuning_rows() {
  std::vector<TuningRow> rows = mqa_logits_tuning();
  for (TuningRow& row : silu_tuning()) rows.push_back(std::move(row));
  for (TuningRow& row : attention_tuning()) rows.push_back(std::move(row));
  return rows;
}

}  // namespace deep_kernels::registry
