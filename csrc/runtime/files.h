// Whole files and folders by system calls, with the reason when something fails. Of
// std::filesystem only paths are used: torch's libraries export the iterators of another libstdc++,
// whose inner types differ, so that walking a folder with them may crash.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace deep_kernels {

// Both return an errno value, 0 for success. Only regular files are read: a pipe or a device in
// the place of one would block or never end.
int read_file(const std::filesystem::path& path, std::string& data);
// Creates the file, which must not exist; all parts are on disk when this returns.
int write_new_file(const std::filesystem::path& path,
                   std::initializer_list<std::string_view> parts);

bool is_folder(const std::filesystem::path& path);
bool is_file_or_link(const std::filesystem::path& path);
// With all its parents; returns an errno value, 0 for success or where it exists.
int make_folder(const std::filesystem::path& path);
// What lies in a folder, sorted; nothing where there is no folder. Never throws: folders change
// while they are read, and a network file system may fail at any step.
std::vector<std::filesystem::path> list_folder(const std::filesystem::path& folder);

}  // namespace deep_kernels
