// Get or build: memory, then disk, then compile. The only mutable object of the runtime.
#pragma once

#include <array>
#include <cstring>
#include <memory>
#include <string>
#include <type_traits>

#include "runtime/compile.h"
#include "runtime/module.h"

namespace deep_kernels {

// What the hot path looks up by: op, target and the Spec's bytes, without a string.
struct SpecKey {
  std::array<std::uint64_t, 4> words{};
  bool operator==(const SpecKey&) const = default;
};

// How a kernel came to be.
struct BuildReport {
  std::string entry;   // dk_<op>_<target>_<key>
  std::string origin;  // "prebuilt", "cache", "memory" or "compiled"
  std::string file;    // where it lies on disk; empty if nowhere
  std::string about;   // the entry's JSON
  double seconds;
};

namespace store {

// The kernel that calls use, or null.
Module* find(const SpecKey& key);
// Finds it on disk or compiles it; then it stays in memory.
Module& build(const SpecKey& key, const BuildRequest& request);
// The same without a GPU and without keeping what is on disk: for compiling ahead. Always asks the
// disk. What the disk did not take stays in memory ("memory" is where it comes from then), and so
// does what another thread has just built. Different keys build in parallel, one key once.
BuildReport prepare(const BuildRequest& request);

}  // namespace store

template <class Spec>
SpecKey spec_key(const Target& target, const Spec& spec) {
  static_assert(std::has_unique_object_representations_v<Spec>, "hashed as bytes");
  static_assert(sizeof(Spec) <= 24);
  SpecKey key;
  std::uint32_t op = 2166136261u;  // FNV-1a of the op's name, at compile time
  for (const char* c = Spec::op(); *c != '\0'; ++c)
    op = (op ^ static_cast<unsigned char>(*c)) * 16777619u;
  key.words[0] = std::uint64_t{op} << 32 | std::uint64_t{target.number} << 8 |
                 static_cast<unsigned char>(target.suffix);
  std::memcpy(&key.words[1], &spec, sizeof(Spec));
  return key;
}

template <class Spec>
BuildRequest build_request(const Target& target, const Spec& spec, const KernelText& text) {
  return {.op = Spec::op(),
          .target = target,
          .spec_text = describe_spec(spec),
          .spec_json = spec_json(spec),
          .source =
              [](const void* bytes, const KernelText& parts, const std::string& entry) {
                return generate_source(*static_cast<const Spec*>(bytes), parts, entry);
              },
          .spec = &spec,
          .text = text,
          .spill_limit_bytes = spec.spill_limit_bytes(),
          .num_wgmma = spec.num_wgmma()};
}

template <class Spec>
Module& get_kernel(const Target& target, const Spec& spec, const KernelText& text) {
  const SpecKey key = spec_key(target, spec);
  if (Module* module = store::find(key)) return *module;
  return store::build(key, build_request(target, spec, text));
}

}  // namespace deep_kernels
