// Compatibility knobs: process-wide defaults of per-call values, for code written for a library
// that has them as global setters.
#pragma once

#include <cstdint>
#include <optional>

namespace deep_kernels::knobs {

inline constexpr int kMaxSms = 65535;  // no card comes near; schedules are sized by it

// SMs that kernels and schedules may use; nothing means all of the card's.
std::optional<int> num_sms();
void set_num_sms(std::int64_t value);  // 0 goes back to all
// Programmatic dependent launch: a kernel may start its prologue before the one ahead has ended.
bool pdl();
void set_pdl(bool enabled);

}  // namespace deep_kernels::knobs
