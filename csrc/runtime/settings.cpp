#include "runtime/settings.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cstdlib>

#include "runtime/errors.h"

namespace deep_kernels {

namespace settings {

namespace {

std::optional<std::string> text(const char* name) {
  const char* value = std::getenv(name);
  if (value == nullptr || *value == '\0') return std::nullopt;
  return std::string(value);
}

bool flag(const char* name) {
  const std::optional<std::string> value = text(name);
  if (!value || *value == "0") return false;
  if (*value == "1") return true;
  throw ValueError(fmt::format("{} must be 0 or 1, got '{}'", name, *value));
}

std::vector<std::filesystem::path>& folders() {
  static std::vector<std::filesystem::path> value;
  return value;
}

}  // namespace

CacheDir cache_dir() {
  if (const auto dir = text("DEEP_KERNELS_CACHE_DIR")) return {*dir, false};
  // The XDG specification: a relative path is not valid and to be ignored.
  if (const auto dir = text("XDG_CACHE_HOME"); dir && dir->starts_with('/'))
    return {std::filesystem::path(*dir) / "deep_kernels", false};
  if (const auto home = text("HOME"))
    return {std::filesystem::path(*home) / ".cache" / "deep_kernels", false};
  const auto tmp = text("TMPDIR").value_or("/tmp");
  return {std::filesystem::path(tmp) / fmt::format("deep_kernels-{}", geteuid()), true};
}

std::optional<std::filesystem::path> prebuilt_dir() { return text("DEEP_KERNELS_PREBUILT_DIR"); }
std::optional<std::string> nvrtc() { return text("DEEP_KERNELS_NVRTC"); }
std::optional<std::string> arch() { return text("DEEP_KERNELS_ARCH"); }
std::optional<std::string> of_op(const char* variable) { return text(variable); }
bool no_compile() { return flag("DEEP_KERNELS_NO_COMPILE"); }
bool line_info() { return flag("DEEP_KERNELS_LINEINFO"); }

void set_package_folders(std::vector<std::filesystem::path> value) { folders() = std::move(value); }
const std::vector<std::filesystem::path>& package_folders() { return folders(); }

}  // namespace settings
}  // namespace deep_kernels
