// Every environment variable the library reads, in one place; each is read when it is needed.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace deep_kernels::settings {

// DEEP_KERNELS_CACHE_DIR, else the XDG cache folder, else a per-user temporary folder.
struct CacheDir {
  std::filesystem::path path;
  bool in_public_place;  // where every user of the machine may have made the folder before us
};
CacheDir cache_dir();
// DEEP_KERNELS_PREBUILT_DIR: a read-only folder of entries that is asked first.
std::optional<std::filesystem::path> prebuilt_dir();
// DEEP_KERNELS_NVRTC: the NVRTC library to load, before any other place.
std::optional<std::string> nvrtc();
// DEEP_KERNELS_ARCH: backend, target, or "backend:target" for every call that names none.
std::optional<std::string> arch();
// DEEP_KERNELS_NO_COMPILE=1: a missing kernel is an error that names the Spec.
bool no_compile();
// DEEP_KERNELS_LINEINFO=1: source lines for profilers; part of the key.
bool line_info();

// A variable with which an op lets a measured choice of its own be overruled; it lies with the op.
std::optional<std::string> of_op(const char* variable);

// Folders of Python packages that may hold NVRTC, found by the Python package at import.
void set_package_folders(std::vector<std::filesystem::path> folders);
const std::vector<std::filesystem::path>& package_folders();

}  // namespace deep_kernels::settings
