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
  std::string cases;   // of the op that take the row: "fp8, derived schedule"; empty: all
  std::string date;    // of the measurement, as 2026-11-30; empty if there was none
  double gain = 0;     // share of the time that the next best choice would cost more
  std::string reason;
};

}  // namespace deep_kernels
