// SHA-256, for keys and for the integrity of cache entries. Source: FIPS 180-4.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

namespace deep_kernels {

std::array<std::uint8_t, 32> sha256(std::string_view data);
// The first `digits` hexadecimal digits.
std::string hex_digest(std::string_view data, int digits);

// Joins parts so that no two lists of parts give the same text: each is preceded by its length.
class KeyText {
 public:
  KeyText& add(std::string_view part);
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

}  // namespace deep_kernels
