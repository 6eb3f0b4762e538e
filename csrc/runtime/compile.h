// From a Spec to a compiled kernel with all that is known of it; no state, no disk.
#pragma once

#include <string>
#include <vector>

#include "runtime/arch.h"
#include "runtime/cache.h"
#include "runtime/errors.h"
#include "runtime/nvrtc.h"
#include "runtime/source.h"

namespace deep_kernels {

// Everything a build needs; made only on a miss in memory.
struct BuildRequest {
  std::string op;
  Target target;
  std::string spec_text;  // for messages
  std::string spec_json;  // for the key and the entry
  std::string (*source)(const void* spec, const KernelText& text, const std::string& entry);
  const void* spec;
  KernelText text;
  int spill_limit_bytes;
  int num_wgmma;  // that the machine code must hold
};

// "dk_<op>_<target>_<key>". The key is a digest of schema, op, Spec, target, options, the shipped
// include tree and the generated lines.
std::string entry_name(const BuildRequest& request);
std::vector<std::string> compile_options(const Target& target);

// Throws CompileError with everything that a bug report needs.
cache::Entry compile(const BuildRequest& request, const std::string& entry, const Nvrtc& nvrtc);
// What to throw where it may not or cannot be compiled.
CompileError compiling_is_forbidden(const BuildRequest& request);
CompileError nvrtc_is_missing(const BuildRequest& request, const std::string& reason);

}  // namespace deep_kernels
