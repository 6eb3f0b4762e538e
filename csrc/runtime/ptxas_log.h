// What the assembler says of a kernel, read from NVRTC's log.
#pragma once

#include <string>

namespace deep_kernels {

struct PtxasNotes {
  int registers = 0;
  int spill_store_bytes = 0;
  int spill_load_bytes = 0;
  bool wgmma_serialized = false;  // correct but slow: the pipeline of wgmma was broken up
};
PtxasNotes parse_ptxas_log(const std::string& log);

}  // namespace deep_kernels
