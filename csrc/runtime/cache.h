// Compiled kernels on disk: one file each, written privately, renamed into place once. A damaged
// file is a miss, never an error; a folder that cannot be written is no reason to fail.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace deep_kernels::cache {

struct Entry {
  std::string about;  // JSON: entry (always first), spec, target, options, registers, spills, ...
  std::string source;
  std::string cubin;
};

// Goes up when the file's form, the generated text or the meaning of a key changes; part of every
// key, so that versions of the library that share a folder do not meet.
inline constexpr int kSchema = 1;

inline constexpr const char* kSuffix = ".dk";
// "dk_<op>_<target>_<key>-nvrtc13.0.dk"; without a version the beginning that all versions share.
std::string file_name(const std::string& entry, const std::string& nvrtc_version);
std::string file_prefix(const std::string& entry);

// What is wrong with the file, or the entry. A missing file is neither. An entry under another
// entry's name is wrong, too.
struct Loaded {
  std::optional<Entry> entry;
  std::string fault;
};
Loaded load(const std::filesystem::path& file);

// Returns false (after one warning in the life of the process) where the folder takes no file.
// What stands in the entry's place is replaced; a folder there is moved aside.
bool save(const std::filesystem::path& file, const Entry& entry);

// For a folder that anyone could have made before us, and filled with code that we would run:
// makes it for this user alone. Returns false (after one warning) if it is not ours alone.
bool make_private(const std::filesystem::path& folder);

// Files of a folder that are named as entries and begin with `prefix`, sorted; none where there is
// no folder.
std::vector<std::filesystem::path> files(const std::filesystem::path& folder,
                                         const std::string& prefix = "dk_");
// All that clear() removes: entries, and what killed processes left half-written. Whatever only
// looks alike, and a folder that was moved aside, is somebody else's.
std::vector<std::filesystem::path> removable(const std::filesystem::path& folder);
// Returns how many went.
int clear(const std::filesystem::path& folder);

}  // namespace deep_kernels::cache
