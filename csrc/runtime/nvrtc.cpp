#include "runtime/nvrtc.h"

#include <dlfcn.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <link.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <optional>

#include "runtime/errors.h"
#include "runtime/files.h"
#include "runtime/fork_gate.h"
#include "runtime/settings.h"

namespace deep_kernels {

namespace {

constexpr int kOldestMajor = 12;  // C++20

// "libnvrtc.so.13", "libnvrtc-1234.so.12", ... but not its helper libraries.
bool is_nvrtc(const std::string& file) {
  return file.starts_with("libnvrtc") && file.find(".so") != std::string::npos &&
         !file.starts_with("libnvrtc-builtins") && file.find(".alt.") == std::string::npos;
}

std::optional<std::string> loaded_nvrtc() {
  std::optional<std::string> found;
  dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t, void* result) {
        const std::filesystem::path path = info->dlpi_name;
        if (!is_nvrtc(path.filename().string())) return 0;
        *static_cast<std::optional<std::string>*>(result) = path.string();
        return 1;
      },
      &found);
  return found;
}

std::vector<std::string> packaged_nvrtcs() {
  std::vector<std::string> found;
  for (const std::filesystem::path& folder : settings::package_folders())
    for (const std::filesystem::path& file : list_folder(folder))
      if (is_nvrtc(file.filename().string())) found.push_back(file.string());
  return found;
}

std::vector<std::string> candidates() {
  if (const auto named = settings::nvrtc()) return {*named};
  std::vector<std::string> paths;
  if (const auto loaded = loaded_nvrtc()) paths.push_back(*loaded);
  for (auto& path : packaged_nvrtcs()) paths.push_back(std::move(path));
  for (const char* name : {"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"})
    paths.push_back(name);
  return paths;
}

template <class Function>
void bind(void* library, const char* name, const std::string& path, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (function == nullptr) throw CompileError(fmt::format("{} lacks {}", path, name));
}

}  // namespace

Nvrtc::Nvrtc(void* library, std::string path) : path_(std::move(path)) {
  bind(library, "nvrtcVersion", path_, version_call_);
  bind(library, "nvrtcCreateProgram", path_, create_);
  bind(library, "nvrtcDestroyProgram", path_, destroy_);
  bind(library, "nvrtcCompileProgram", path_, compile_);
  bind(library, "nvrtcGetCUBINSize", path_, cubin_size_);
  bind(library, "nvrtcGetCUBIN", path_, cubin_);
  bind(library, "nvrtcGetPTXSize", path_, ptx_size_);
  bind(library, "nvrtcGetPTX", path_, ptx_);
  bind(library, "nvrtcGetProgramLogSize", path_, log_size_);
  bind(library, "nvrtcGetProgramLog", path_, log_);
  bind(library, "nvrtcGetErrorString", path_, error_string_);
  int major = 0, minor = 0;
  version_call_(&major, &minor);
  version_ = fmt::format("{}.{}", major, minor);
  has_cache_ = major > 12 || (major == 12 && minor >= 9);
  if (major < kOldestMajor)
    throw CompileError(
        fmt::format("{} is version {}, {}.0 or newer is needed", path_, version_, kOldestMajor));
}

Nvrtc Nvrtc::load() {
  std::vector<std::string> failures;
  for (const std::string& path : candidates()) {
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      failures.push_back(dlerror());
      continue;
    }
    Dl_info info{};
    const bool known = dladdr(dlsym(library, "nvrtcVersion"), &info) != 0 && info.dli_fname;
    try {
      return Nvrtc(library, known ? info.dli_fname : path);
    } catch (const CompileError& error) {
      failures.push_back(error.what());  // stays loaded: others in this process may use it
    }
  }
  if (const auto named = settings::nvrtc())
    throw CompileError(fmt::format("DEEP_KERNELS_NVRTC names '{}', which is no NVRTC to use: {}",
                                   *named, fmt::join(failures, "; ")));
  throw CompileError(fmt::format(
      "NVRTC was not found: install a CUDA build of torch or the package nvidia-cuda-nvrtc, or set "
      "DEEP_KERNELS_NVRTC to the library; tried: {}",
      fmt::join(failures, "; ")));
}

const Nvrtc& Nvrtc::get() {
  const ForkGate gate;
  static const Nvrtc nvrtc = load();  // a failure is retried by the next call
  return nvrtc;
}

CompileResult Nvrtc::compile(const std::string& name, const std::string& source,
                             const std::vector<Header>& headers,
                             const std::vector<std::string>& options, Output output) const {
  const ForkGate gate;
  const auto begin = std::chrono::steady_clock::now();
  std::vector<const char*> names, texts, flags;
  for (const Header& header : headers) {
    names.push_back(header.name.c_str());
    texts.push_back(header.text.c_str());
  }
  for (const std::string& option : options) flags.push_back(option.c_str());
  // NVRTC's own cache asks the driver, and a process that has initialised CUDA cannot fork. The
  // result is the same without it.
  if (has_cache_) flags.push_back("--no-cache");

  struct Guard {
    const Nvrtc& nvrtc;
    Program program = nullptr;
    ~Guard() {
      if (program != nullptr) nvrtc.destroy_(&program);
    }
  } guard{*this};
  const auto check = [&](int result, const char* call) {
    if (result != 0)
      throw CompileError(
          fmt::format("{}: {} ({}, version {})", call, error_string_(result), path_, version_));
  };
  check(create_(&guard.program, source.c_str(), name.c_str(), static_cast<int>(names.size()),
                texts.data(), names.data()),
        "nvrtcCreateProgram");
  const int compiled = compile_(guard.program, static_cast<int>(flags.size()), flags.data());

  CompileResult result{.ok = compiled == 0, .code = {}, .log = {}, .seconds = 0};
  std::size_t size = 0;
  check(log_size_(guard.program, &size), "nvrtcGetProgramLogSize");
  result.log.resize(size);
  check(log_(guard.program, result.log.data()), "nvrtcGetProgramLog");
  while (!result.log.empty() && result.log.back() == '\0') result.log.pop_back();
  if (compiled != 0) {
    result.log = fmt::format("{}\n{}", error_string_(compiled), result.log);
  } else {
    const bool ptx = output == Output::ptx;
    check((ptx ? ptx_size_ : cubin_size_)(guard.program, &size),
          ptx ? "nvrtcGetPTXSize" : "nvrtcGetCUBINSize");
    result.code.resize(size);
    check((ptx ? ptx_ : cubin_)(guard.program, result.code.data()),
          ptx ? "nvrtcGetPTX" : "nvrtcGetCUBIN");
    while (ptx && !result.code.empty() && result.code.back() == '\0') result.code.pop_back();
  }
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begin;
  result.seconds = elapsed.count();
  return result;
}

}  // namespace deep_kernels
