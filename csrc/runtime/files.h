// Whole files by system calls, with the reason when something fails.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

namespace deep_kernels {

// Both return an errno value, 0 for success.
int read_file(const std::filesystem::path& path, std::string& data);
// Creates the file, which must not exist; all parts are on disk when this returns.
int write_new_file(const std::filesystem::path& path,
                   std::initializer_list<std::string_view> parts);

}  // namespace deep_kernels
