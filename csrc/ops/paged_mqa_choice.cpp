// Which Spec serves a case of paged MQA logits, and why some are refused.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <vector>

#include "ops/checks.h"
#include "ops/paged_mqa_logits.h"

namespace deep_kernels {

namespace {

std::vector<i32> page_sizes() {
  std::vector<i32> sizes;
  for (i32 size = kPagedMinBlock; size <= kPagedMaxBlock; size *= 2) sizes.push_back(size);
  return sizes;
}

}  // namespace

PagedMqaLogitsCase read_paged_mqa_logits_case(CaseReader& reader) {
  PagedMqaLogitsCase wanted;
  wanted.clean = false;
  mqa::read_case(reader, wanted);
  wanted.block_kv = reader.take_int("block_kv", wanted.block_kv);
  wanted.next_n =
      checks::to_i32(reader.op().c_str(), "next_n", reader.take_int("next_n", wanted.next_n));
  wanted.indices = reader.take_bool("indices", wanted.indices);
  checks::to_i32(reader.op().c_str(), "max_context_len", reader.take_int("max_context_len", 0));
  return wanted;
}

std::optional<std::string> page_refusal(int64_t block_kv) {
  if (is_paged_block(block_kv)) return std::nullopt;
  return fmt::format("block_kv must be one of {}, got {}", fmt::join(page_sizes(), ", "), block_kv);
}

std::optional<std::string> paged_mqa_logits_refusal(const PagedMqaLogitsCase& wanted,
                                                    Backend backend) {
  if (auto reason = mqa::refusal(wanted, backend)) return reason;
  if (auto reason = page_refusal(wanted.block_kv)) return reason;
  if (wanted.next_n < 1) return fmt::format("next_n must be 1 or more, got {}", wanted.next_n);
  if (wanted.indices && wanted.next_n != 1)
    return fmt::format("next_n must be 1 with indices, got {}", wanted.next_n);
  return std::nullopt;
}

PagedMqaLogitsSpec choose_paged_mqa_logits_spec(const PagedMqaLogitsCase& wanted,
                                                const Arch& arch) {
  const i32 padded = mqa_padded_heads(static_cast<i32>(wanted.num_heads));
  return paged_mqa_logits_spec(
      arch.backend, wanted.format, static_cast<i32>(wanted.head_dim), padded, wanted.logits_dtype,
      paged_unit_rows(arch.backend, padded, static_cast<i32>(wanted.next_n), wanted.indices));
}

KernelText kernel_text(const PagedMqaLogitsSpec& spec) {
  const bool uses_maps = spec.backend == Backend::sm90;
  return {.header = uses_maps ? "deep_kernels/kernels/paged_mqa_logits_sm90.cuh"
                              : "deep_kernels/kernels/paged_mqa_logits_sm89.cuh",
          .spec_type = "PagedMqaLogitsSpec",
          .function = uses_maps ? "paged_mqa_logits_sm90" : "paged_mqa_logits_sm89",
          .params = uses_maps ? "DK_GRID_CONSTANT dk::PagedMqaLogitsArgs args,\n"
                                "DK_GRID_CONSTANT dk::PagedMqaLogitsMaps<dk::ptx::TensorMap> maps"
                              : "DK_GRID_CONSTANT dk::PagedMqaLogitsArgs args",
          .arguments = uses_maps ? "args, maps" : "args",
          .args_type = "PagedMqaLogitsArgs",
          .args_bytes = sizeof(PagedMqaLogitsArgs)};
}

}  // namespace deep_kernels
