// A measured choice in words, for the inspector.
#pragma once

#include <string>

#include "deep_kernels/contract/types.h"

namespace deep_kernels {

struct TuningRow {
  std::string op;
  Backend backend;     // every card of this backend takes the row, also one that was not measured
  std::string gpu;     // that it was measured on; empty if it was not
  std::string choice;  // "clean_logits fills concurrent"
};

}  // namespace deep_kernels
