// A case in words: the public argument names and their values as text, as supported(), prepare()
// and the command line give them.
#pragma once

#include <map>
#include <optional>
#include <string>

#include "deep_kernels/contract/types.h"

namespace deep_kernels {

using Case = std::map<std::string, std::string>;

class CaseReader {
 public:
  CaseReader(std::string op, Case fields) : op_(std::move(op)), fields_(std::move(fields)) {}

  const std::string& op() const { return op_; }
  // The field's text, or nothing; a field is taken once.
  std::optional<std::string> take(const std::string& name);
  int64_t take_int(const std::string& name, int64_t otherwise);
  bool take_bool(const std::string& name, bool otherwise);
  DType take_dtype(const std::string& name, DType otherwise);
  Format take_format(Format otherwise);
  // Throws ValueError if a field was not taken.
  void finish() const;

 private:
  [[noreturn]] void refuse(const std::string& name, const std::string& expected,
                           const std::string& got) const;

  std::string op_;
  Case fields_;
};

}  // namespace deep_kernels
