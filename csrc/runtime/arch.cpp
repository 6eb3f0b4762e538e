#include "runtime/arch.h"

#include <fmt/format.h>

#include "runtime/errors.h"
#include "runtime/settings.h"

namespace deep_kernels {

namespace {

std::optional<Backend> parse_backend(const std::string& text) {
  for (const Backend backend : {Backend::sm89, Backend::sm90, Backend::sm100})
    if (text == name_of(backend)) return backend;
  return std::nullopt;
}

std::optional<Target> parse_target(const std::string& text) {
  if (!text.starts_with("sm_")) return std::nullopt;
  std::size_t i = 3;
  int number = 0;
  for (; i < text.size() && text[i] >= '0' && text[i] <= '9' && number < 1000; ++i)
    number = number * 10 + (text[i] - '0');
  const std::string suffix = text.substr(i);
  if (number < 10 || (suffix != "" && suffix != "a" && suffix != "f")) return std::nullopt;
  if (number < (suffix == "f" ? 100 : suffix == "a" ? 90 : 0)) return std::nullopt;
  return Target{static_cast<u16>(number), suffix.empty() ? '\0' : suffix[0]};
}

// Tensor-memory kernels are for family 10; wgmma exists on 9.0 alone; mma.sync everywhere.
Backend backend_of(Target target) {
  if (target.suffix != 0 && target.number == 90) return Backend::sm90;
  if (target.suffix != 0 && target.number / 10 == 10) return Backend::sm100;
  return Backend::sm89;
}

Target default_target(Backend backend) {
  if (backend == Backend::sm90) return {90, 'a'};
  if (backend == Backend::sm100) return {100, 'f'};
  return {89, 0};
}

Target target_of_card(int capability) {
  return {static_cast<u16>(capability), capability == 90 ? 'a' : '\0'};
}

bool compiles_for(Backend backend, Target target) {
  if (backend == Backend::sm89) return target.number >= 89;
  return backend_of(target) == backend;
}

// Machine code runs on the same major version from its minor version on; with 'a' on that chip
// only.
bool runs_on(Target target, int capability) {
  if (target.suffix == 'a') return target.number == capability;
  return target.number / 10 == capability / 10 && target.number <= capability;
}

std::string card_name(int capability) {
  return fmt::format("{}.{}", capability / 10, capability % 10);
}

}  // namespace

std::string Target::name() const {
  std::string text = fmt::format("sm_{}", number);
  if (suffix != 0) text += suffix;
  return text;
}

std::string Arch::describe() const {
  return fmt::format("{} for {}", name_of(backend), target.name());
}

Arch resolve_arch(const std::string& op, const std::optional<std::string>& text,
                  std::optional<int> capability) {
  const std::optional<std::string> wanted = text ? text : settings::arch();
  Arch arch;
  if (!wanted) {
    if (!capability)
      throw ValueError(fmt::format(
          "{}: arch must be given where there is no GPU, for example arch=\"sm_90a\"", op));
    if (*capability < 89)
      throw UnsupportedError(
          fmt::format("{}: a card of compute capability 8.9 or newer is needed, this one has {}",
                      op, card_name(*capability)));
    arch.target = target_of_card(*capability);
    arch.backend = *capability == 90 ? Backend::sm90 : Backend::sm89;
    return arch;
  }

  if (*wanted == name_of(Backend::cpu))
    throw UnsupportedError(fmt::format("{}: backend cpu runs on CPU tensors only", op));
  const std::size_t colon = wanted->find(':');
  const std::string first = wanted->substr(0, colon);
  const std::optional<Backend> backend = parse_backend(first);
  const std::optional<Target> target =
      parse_target(colon == std::string::npos ? first : wanted->substr(colon + 1));
  if (colon == std::string::npos ? !backend && !target : !backend || !target)
    throw ValueError(fmt::format(
        "{}: {} must be a backend (sm89, sm90, sm100), a target such as sm_90a, or both as "
        "sm89:sm_90a, got '{}'",
        op, text ? "arch" : "DEEP_KERNELS_ARCH", *wanted));
  if (target) {
    arch = {backend.value_or(backend_of(*target)), *target};
  } else {
    arch = {*backend, default_target(*backend)};
    if (capability && compiles_for(*backend, target_of_card(*capability)))
      arch.target = target_of_card(*capability);
  }
  if (!compiles_for(arch.backend, arch.target))
    throw UnsupportedError(fmt::format("{}: backend {} cannot be compiled for target {}", op,
                                       name_of(arch.backend), arch.target.name()));
  if (capability && !runs_on(arch.target, *capability))
    throw UnsupportedError(fmt::format("{}: this card (compute capability {}) cannot run {}", op,
                                       card_name(*capability), arch.describe()));
  return arch;
}

std::vector<std::string> known_targets() { return {"sm_89", "sm_90a"}; }

}  // namespace deep_kernels
