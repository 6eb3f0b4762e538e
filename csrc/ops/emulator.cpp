#include "ops/emulator.h"

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <mutex>

#include "ops/knobs.h"
#include "runtime/errors.h"

namespace deep_kernels::emulator {

namespace {

constexpr std::string_view kPrefix = "emulator:";

struct Installed {
  Run run;
  int num_sms;
};
std::mutex lock;
std::shared_ptr<const Installed> current;

std::shared_ptr<const Installed> installed() {
  const std::lock_guard hold(lock);
  return current;
}

}  // namespace

Buffer buffer(std::string name, const at::Tensor& tensor, bool writable) {
  Buffer result{std::move(name),
                tensor.const_data_ptr(),
                tensor.sizes().vec(),
                tensor.strides().vec(),
                static_cast<int64_t>(tensor.element_size()),
                writable};
  for (int64_t& stride : result.strides) stride *= result.element_bytes;
  return result;
}

void install(Run run, int num_sms) {
  auto next = run ? std::make_shared<const Installed>(Installed{std::move(run), num_sms}) : nullptr;
  const std::lock_guard hold(lock);
  current.swap(next);
}

std::optional<Arch> arch_of(const std::string& op, const std::optional<std::string>& arch) {
  if (!arch || !arch->starts_with(kPrefix)) return std::nullopt;
  if (!installed())
    throw ValueError(fmt::format(
        "{}: arch '{}' needs an emulator and none is installed; see docs/emulator.md", op, *arch));
  return resolve_arch(op, arch->substr(kPrefix.size()), std::nullopt);
}

int usable_sms() {
  const auto emulator = installed();
  const int all = emulator ? emulator->num_sms : 1;
  return std::min(knobs::num_sms().value_or(all), all);
}

std::optional<int> num_sms(const std::optional<std::string>& arch) {
  const auto emulator = installed();
  if (!emulator || !arch || !arch->starts_with(kPrefix)) return std::nullopt;
  return emulator->num_sms;
}

void run(const Launch& launch) {
  const auto emulator = installed();
  if (!emulator) throw ValueError(fmt::format("{}: the emulator was taken away", launch.op));
  emulator->run(launch);
}

}  // namespace deep_kernels::emulator
