// Compiled kernels on disk: one file each, written privately, renamed into place once. A damaged
// file is a miss, never an error; a folder that cannot be written is no reason to fail.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace deep_kernels::cache {

struct Entry {
  std::string about;  // JSON: spec, target, options, registers, spills, compile seconds
  std::string source;
  std::string cubin;
};

inline constexpr const char* kSuffix = ".dk";

// What is wrong with the file, or the entry. A missing file is neither.
struct Loaded {
  std::optional<Entry> entry;
  std::string fault;
};
Loaded load(const std::filesystem::path& file);

// Returns false (after one warning in the life of the process) where the folder takes no file.
bool save(const std::filesystem::path& file, const Entry& entry);

// Files of a folder whose names begin with `prefix`, sorted; none where there is no folder.
std::vector<std::filesystem::path> files(const std::filesystem::path& folder,
                                         const std::string& prefix = "");
// Removes entries and what killed processes left half-written; returns how many files went.
int clear(const std::filesystem::path& folder);

}  // namespace deep_kernels::cache
