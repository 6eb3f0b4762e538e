#include "runtime/include_tree.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <filesystem>

#include "runtime/digest.h"
#include "runtime/errors.h"
#include "runtime/files.h"
#include "runtime/fork_gate.h"

namespace deep_kernels {

namespace {

constexpr int kMaxDepth = 8;  // of folders; links may form a loop

// The extension lies in the package beside its include folder.
std::filesystem::path include_folder() {
  Dl_info info{};
  if (dladdr(reinterpret_cast<void*>(&include_tree), &info) == 0 || info.dli_fname == nullptr)
    throw CompileError("the folder of the deep_kernels extension cannot be found");
  return std::filesystem::path(info.dli_fname).parent_path() / "include";
}

// Names come from the folders walked through, never from where links lead: some installers make
// every file of a package a link into their own store.
void add_headers(IncludeTree& tree, const std::filesystem::path& folder, const std::string& prefix,
                 int depth) {
  for (const std::filesystem::path& path : list_folder(folder)) {
    const std::string name = prefix + path.filename().string();
    const std::string extension = path.extension().string();
    if (is_folder(path)) {
      if (depth < kMaxDepth) add_headers(tree, path, name + "/", depth + 1);
    } else if (extension == ".h" || extension == ".cuh") {
      std::string text;
      if (const int fault = read_file(path, text))
        throw CompileError(fmt::format("{}: {}", path.string(), std::strerror(fault)));
      tree.headers.push_back({name, std::move(text)});
    }
  }
}

IncludeTree read_tree() {
  const std::filesystem::path root = include_folder();
  IncludeTree tree;
  add_headers(tree, root, "", 0);
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
  const ForkGate gate;
  static const IncludeTree tree = read_tree();
  return tree;
}

}  // namespace deep_kernels
