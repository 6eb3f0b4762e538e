// Which Spec serves a case of MQA logits, and why some are refused.
#include <fmt/format.h>

#include "ops/checks.h"
#include "ops/mqa_clean_table.h"
#include "ops/mqa_logits.h"
#include "runtime/errors.h"
#include "runtime/settings.h"

namespace deep_kernels {

namespace {

// concurrent or deferred: overrules the table.
constexpr const char* kCleanVariable = "DEEP_KERNELS_MQA_CLEAN";

Clean parse_placement(const std::string& where, const std::string& text) {
  if (text == "concurrent") return Clean::concurrent;
  if (text == "deferred") return Clean::deferred;
  throw ValueError(fmt::format("{} must be concurrent or deferred, got '{}'", where, text));
}

}  // namespace

Clean choose_mqa_clean(const MqaLogitsCase& wanted, Backend backend) {
  if (!wanted.clean) return Clean::off;
  if (wanted.placement) return *wanted.placement;
  if (const auto text = settings::of_op(kCleanVariable))
    return parse_placement(kCleanVariable, *text);
  const Schedule given = wanted.metadata ? Schedule::metadata : Schedule::derived;
  const CleanRow* row = find_clean_row(kCleanTable, backend, wanted.format, given);
  return row ? row->placement : Clean::deferred;  // which needs no warp of its own
}

MqaLogitsCase read_mqa_logits_case(CaseReader& reader) {
  MqaLogitsCase wanted;
  mqa::read_case(reader, wanted);
  reader.take_bool("compressed", false);  // both run in one kernel
  checks::to_i32(reader.op().c_str(), "max_seqlen_k", reader.take_int("max_seqlen_k", 0));
  if (const auto reduction = reader.take("reduction")) {
    if (*reduction != "exact" && *reduction != "folded")
      throw ValueError(fmt::format("{}: reduction must be 'exact' or 'folded', got '{}'",
                                   reader.op(), *reduction));
    wanted.folded = *reduction == "folded";
  }
  if (const auto placement = reader.take("clean_placement"))
    wanted.placement = parse_placement(reader.op() + ": clean_placement", *placement);
  return wanted;
}

std::vector<TuningRow> mqa_logits_tuning() {
  std::vector<TuningRow> rows;
  for (const CleanRow& row : kCleanTable)
    rows.push_back(
        {.op = kMqaLogitsOp,
         .backend = row.backend,
         .gpu = row.gpu,
         .choice = fmt::format("clean_logits fills {}", name_of(row.placement)),
         .cases = fmt::format("{}, {} schedule", name_of(row.format), name_of(row.schedule)),
         .date = row.date,
         .gain = row.gain,
         .reason = row.reason});
  return rows;
}

std::optional<std::string> mqa_logits_refusal(const MqaLogitsCase& wanted, Backend backend) {
  return mqa::refusal(wanted, backend);
}

MqaLogitsSpec choose_mqa_logits_spec(const MqaLogitsCase& wanted, const Arch& arch) {
  const i32 num_heads = mqa_padded_heads(static_cast<i32>(wanted.num_heads));
  const bool uses_schedule = wanted.metadata && wanted.format == Format::fp8;  // see Schedule
  const bool folds = wanted.folded && mqa_can_fold(arch.backend, wanted.format,
                                                   static_cast<i32>(wanted.head_dim), num_heads);
  return {.backend = arch.backend,
          .format = wanted.format,
          .head_dim = static_cast<u8>(wanted.head_dim),
          .num_heads = static_cast<u8>(num_heads),
          .logits_dtype = wanted.logits_dtype,
          .clean = choose_mqa_clean(wanted, arch.backend),
          .schedule = uses_schedule ? Schedule::metadata : Schedule::derived,
          .kv_stages = mqa_kv_stages(arch.backend, static_cast<i32>(wanted.head_dim)),
          .reduction = folds ? Reduction::folded : Reduction::exact};
}

KernelText kernel_text(const MqaLogitsSpec& spec) {
  const bool uses_maps = spec.backend == Backend::sm90;
  return {.header = uses_maps ? "deep_kernels/kernels/mqa_logits_sm90.cuh"
                              : "deep_kernels/kernels/mqa_logits_sm89.cuh",
          .spec_type = "MqaLogitsSpec",
          .function = uses_maps ? "mqa_logits_sm90" : "mqa_logits_sm89",
          .params = uses_maps ? "DK_GRID_CONSTANT dk::MqaLogitsArgs args,\n"
                                "DK_GRID_CONSTANT dk::MqaLogitsMaps<dk::ptx::TensorMap> maps"
                              : "DK_GRID_CONSTANT dk::MqaLogitsArgs args",
          .arguments = uses_maps ? "args, maps" : "args",
          .args_type = "MqaLogitsArgs",
          .args_bytes = sizeof(MqaLogitsArgs)};
}

}  // namespace deep_kernels
