// Backends (which kernels) and targets (what NVRTC compiles for), and which card runs which.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "deep_kernels/contract/types.h"

namespace deep_kernels {

// "sm_90a": major * 10 + minor, and a suffix ('a': this chip only, 'f': this family, 0: none).
struct Target {
  u16 number;
  char suffix;

  std::string name() const;
  bool operator==(const Target&) const = default;
};

struct Arch {
  Backend backend;
  Target target;

  // "sm90 for sm_90a"
  std::string describe() const;
};

// `text` is "sm89", "sm_90a" or "sm89:sm_90a"; with none, DEEP_KERNELS_ARCH, else what suits the
// card. `capability` (major * 10 + minor) is the card at hand, or nothing where code is only
// compiled. Throws ValueError for a text that is none of these, UnsupportedError for a backend or a
// target that the card cannot run; `op` begins the sentence.
Arch resolve_arch(const std::string& op, const std::optional<std::string>& text,
                  std::optional<int> capability);

// The targets that are compiled ahead and tested.
std::vector<std::string> known_targets();

}  // namespace deep_kernels
