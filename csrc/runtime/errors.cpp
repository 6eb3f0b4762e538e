#include "runtime/errors.h"

#include <cstdio>

namespace deep_kernels {

namespace {
WarningSink sink = nullptr;
thread_local std::vector<std::string>* held = nullptr;
}  // namespace

void set_warning_sink(WarningSink value) { sink = value; }

void warn(const std::string& text) {
  if (held != nullptr)
    held->push_back(text);
  else if (sink != nullptr)
    sink(text);
  else
    std::fprintf(stderr, "%s\n", text.c_str());
}

HeldWarnings::HeldWarnings() : outer_(held) { held = &texts_; }

HeldWarnings::~HeldWarnings() {
  held = outer_;
  for (const std::string& text : texts_) warn(text);
}

}  // namespace deep_kernels
