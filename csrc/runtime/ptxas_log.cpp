#include "runtime/ptxas_log.h"

#include <cstdlib>

namespace deep_kernels {

namespace {

// The number that stands right before `words`; 0 where the words do not occur.
int number_before(const std::string& text, const std::string& words) {
  const std::size_t end = text.find(words);
  if (end == std::string::npos || end == 0) return 0;
  std::size_t begin = end;
  while (begin > 0 && text[begin - 1] >= '0' && text[begin - 1] <= '9') --begin;
  return std::atoi(text.substr(begin, end - begin).c_str());
}

}  // namespace

PtxasNotes parse_ptxas_log(const std::string& log) {
  return {.registers = number_before(log, " registers"),
          .spill_store_bytes = number_before(log, " bytes spill stores"),
          .spill_load_bytes = number_before(log, " bytes spill loads"),
          .wgmma_serialized = log.find("serialized") != std::string::npos};
}

}  // namespace deep_kernels
