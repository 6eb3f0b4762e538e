#include "runtime/ptxas_log.h"

#include <algorithm>
#include <cstdlib>

namespace deep_kernels {

namespace {

// The largest number that stands right before `words`; 0 where they do not occur. A function that
// was not inlined has lines of its own.
int largest_before(const std::string& text, const std::string& words) {
  int largest = 0;
  for (std::size_t end = text.find(words); end != std::string::npos;
       end = text.find(words, end + 1)) {
    std::size_t begin = end;
    while (begin > 0 && text[begin - 1] >= '0' && text[begin - 1] <= '9') --begin;
    largest = std::max(largest, std::atoi(text.substr(begin, end - begin).c_str()));
  }
  return largest;
}

}  // namespace

PtxasNotes parse_ptxas_log(const std::string& log) {
  return {.registers = largest_before(log, " registers"),
          .spill_store_bytes = largest_before(log, " bytes spill stores"),
          .spill_load_bytes = largest_before(log, " bytes spill loads"),
          .wgmma_serialized = log.find("serialized") != std::string::npos};
}

}  // namespace deep_kernels
