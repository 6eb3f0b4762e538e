#include "runtime/include_tree.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <filesystem>

#include "runtime/digest.h"
#include "runtime/errors.h"
#include "runtime/files.h"

namespace deep_kernels {

namespace {

// The extension lies in the package beside its include folder.
std::filesystem::path include_folder() {
  Dl_info info{};
  if (dladdr(reinterpret_cast<void*>(&include_tree), &info) == 0 || info.dli_fname == nullptr)
    throw CompileError("the folder of the deep_kernels extension cannot be found");
  return std::filesystem::absolute(info.dli_fname).parent_path() / "include";
}

IncludeTree read_tree() {
  const std::filesystem::path root = include_folder();
  IncludeTree tree;
  std::error_code error;
  for (const auto& file : std::filesystem::recursive_directory_iterator(root, error)) {
    const std::string extension = file.path().extension().string();
    if (extension != ".h" && extension != ".cuh") continue;
    std::string text;
    if (const int fault = read_file(file.path(), text))
      throw CompileError(fmt::format("{}: {}", file.path().string(), std::strerror(fault)));
    tree.headers.push_back(
        {std::filesystem::relative(file.path(), root).generic_string(), std::move(text)});
  }
  if (tree.headers.empty())
    throw CompileError(fmt::format("the device headers are missing from {}", root.string()));
  std::sort(tree.headers.begin(), tree.headers.end(),
            [](const Header& a, const Header& b) { return a.name < b.name; });
  KeyText key;
  for (const Header& header : tree.headers) key.add(header.name).add(header.text);
  tree.digest = hex_digest(key.text(), 16);
  return tree;
}

}  // namespace

const IncludeTree& include_tree() {
  static const IncludeTree tree = read_tree();
  return tree;
}

}  // namespace deep_kernels
