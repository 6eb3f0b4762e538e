#include "ops/knobs.h"

#include <fmt/format.h>

#include <atomic>

#include "runtime/errors.h"

namespace deep_kernels::knobs {

namespace {
std::atomic<int> wanted_sms = 0;
std::atomic<bool> wanted_pdl = false;
}  // namespace

std::optional<int> num_sms() {
  const int value = wanted_sms.load(std::memory_order_relaxed);
  return value > 0 ? std::optional<int>(value) : std::nullopt;
}

void set_num_sms(std::int64_t value) {
  if (value < 0 || value > kMaxSms)
    throw ValueError(
        fmt::format("set_num_sms: num_sms must be 0 (all) or up to {}, got {}", kMaxSms, value));
  wanted_sms.store(static_cast<int>(value), std::memory_order_relaxed);
}

bool pdl() { return wanted_pdl.load(std::memory_order_relaxed); }
void set_pdl(bool enabled) { wanted_pdl.store(enabled, std::memory_order_relaxed); }

}  // namespace deep_kernels::knobs
