// All ops by name: what can run, what a case compiles to, and every legal Spec.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "ops/case.h"
#include "ops/tuning.h"
#include "runtime/store.h"

namespace deep_kernels::registry {

std::vector<std::string> ops();

// Why the case cannot run, in one sentence that begins with the op's name, or nothing. `arch` as in
// resolve_arch, or "cpu"; with none and no card at hand: cpu.
std::optional<std::string> supported(const std::string& op, const std::optional<std::string>& arch,
                                     const Case& fields, std::optional<int> capability);

// Compiles what one call of the case would need; nothing for the CPU. Throws UnsupportedError with
// the sentence of supported().
std::vector<BuildReport> prepare(const std::string& op, const std::optional<std::string>& arch,
                                 const Case& fields, std::optional<int> capability);

// Every legal Spec that a target compiles: kernel name, Spec as JSON, and how to build it.
struct LegalSpec {
  std::string kernel;
  std::string json;
  std::function<BuildReport()> build;
};
std::vector<LegalSpec> legal_specs(const std::string& arch);

// The measured choices of all ops.
std::vector<TuningRow> tuning_rows();

}  // namespace deep_kernels::registry
