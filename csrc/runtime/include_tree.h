// The device headers that ship with the package, read once: what is hashed is what is compiled.
#pragma once

#include <string>
#include <vector>

#include "runtime/nvrtc.h"

namespace deep_kernels {

struct IncludeTree {
  std::vector<Header> headers;  // sorted by name
  std::string digest;
};
const IncludeTree& include_tree();

}  // namespace deep_kernels
