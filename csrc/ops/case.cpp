#include "ops/case.h"

#include <fmt/format.h>

#include <charconv>

#include "runtime/errors.h"

namespace deep_kernels {

void CaseReader::refuse(const std::string& name, const std::string& expected,
                        const std::string& got) const {
  throw ValueError(fmt::format("{}: {} must be {}, got '{}'", op_, name, expected, got));
}

std::optional<std::string> CaseReader::take(const std::string& name) {
  const auto found = fields_.find(name);
  if (found == fields_.end()) return std::nullopt;
  std::string value = std::move(found->second);
  fields_.erase(found);
  return value;
}

int64_t CaseReader::take_int(const std::string& name, int64_t otherwise) {
  const auto text = take(name);
  if (!text) return otherwise;
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), value);
  if (error == std::errc::result_out_of_range) refuse(name, "an integer of 64 bits", *text);
  if (error != std::errc() || end != text->data() + text->size()) refuse(name, "an integer", *text);
  return value;
}

bool CaseReader::take_bool(const std::string& name, bool otherwise) {
  const auto text = take(name);
  if (!text) return otherwise;
  if (*text == "True" || *text == "true" || *text == "1") return true;
  if (*text == "False" || *text == "false" || *text == "0") return false;
  refuse(name, "a bool", *text);
}

DType CaseReader::take_dtype(const std::string& name, DType otherwise) {
  auto text = take(name);
  if (!text) return otherwise;
  const std::string word = text->starts_with("torch.") ? text->substr(6) : *text;
  for (const DType dtype : {DType::float32, DType::bfloat16, DType::float16})
    if (word == name_of(dtype)) return dtype;
  refuse(name, "float32, bfloat16 or float16", *text);
}

Format CaseReader::take_format(Format otherwise) {
  const auto text = take("format");
  if (!text) return otherwise;
  for (const Format format : {Format::fp8, Format::mxfp8, Format::mxfp4})
    if (*text == name_of(format)) return format;
  refuse("format", "fp8, mxfp8 or mxfp4", *text);
}

void CaseReader::finish() const {
  if (fields_.empty()) return;
  std::string names;
  for (const auto& [name, value] : fields_) names += (names.empty() ? "" : ", ") + name;
  throw ValueError(fmt::format("{}: a case has no field named {}", op_, names));
}

}  // namespace deep_kernels
