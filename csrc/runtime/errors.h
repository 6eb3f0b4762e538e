// What the library throws; bindings.cpp says what each becomes in Python.
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

namespace deep_kernels {

// A tensor's content, shape, stride, dtype or device, or a setting's text.
struct ValueError : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};
// An argument of the wrong Python type.
struct TypeError : std::runtime_error {
  using std::runtime_error::runtime_error;
};
// What supported() refuses.
struct UnsupportedError : std::runtime_error {
  using std::runtime_error::runtime_error;
};
// NVRTC is missing, refuses the source, or would be needed but is switched off.
struct CompileError : std::runtime_error {
  using std::runtime_error::runtime_error;
};
// The CUDA driver is missing or a call of it failed.
struct DriverError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Shows one sentence to the user: a Python warning once bindings.cpp has installed it, else stderr.
using WarningSink = void (*)(const std::string& text);
void set_warning_sink(WarningSink sink);
void warn(const std::string& text);

// For its lifetime this thread's warnings wait. Showing one takes Python's lock, which a thread
// that waits for this one may hold.
class HeldWarnings {
 public:
  HeldWarnings();
  ~HeldWarnings();
  HeldWarnings(const HeldWarnings&) = delete;
  HeldWarnings& operator=(const HeldWarnings&) = delete;

 private:
  std::vector<std::string>* outer_;
  std::vector<std::string> texts_;
};

}  // namespace deep_kernels
