#include "runtime/driver.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <array>
#include <atomic>

#include "runtime/errors.h"
#include "runtime/fork_gate.h"

namespace deep_kernels::driver {

namespace {

constexpr int kAttributeNumSms = 16;
constexpr int kAttributeCapabilityMajor = 75;
constexpr int kAttributeCapabilityMinor = 76;
constexpr int kCaptureRelaxed = 2;

template <class Call>
void bind(void* library, const char* name, Call& call) {
  call = reinterpret_cast<Call>(dlsym(library, name));
  if (call == nullptr)
    throw DriverError(fmt::format("the CUDA driver lacks {}: it is older than CUDA 12", name));
}

Api load() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) throw DriverError(fmt::format("no CUDA driver: {}", dlerror()));
  Api api;
  bind(library, "cuInit", api.init);
  bind(library, "cuGetErrorString", api.get_error_string);
  bind(library, "cuGetErrorName", api.get_error_name);
  bind(library, "cuDriverGetVersion", api.driver_version);
  bind(library, "cuDeviceGet", api.device_get);
  bind(library, "cuDeviceGetAttribute", api.device_attribute);
  bind(library, "cuDeviceGetName", api.device_name);
  bind(library, "cuDevicePrimaryCtxRetain", api.primary_context_retain);
  bind(library, "cuCtxGetCurrent", api.context_get_current);
  bind(library, "cuCtxSetCurrent", api.context_set_current);
  bind(library, "cuCtxGetDevice", api.context_get_device);
  bind(library, "cuLibraryLoadData", api.library_load);
  bind(library, "cuLibraryUnload", api.library_unload);
  bind(library, "cuLibraryGetKernel", api.library_get_kernel);
  bind(library, "cuKernelSetAttribute", api.kernel_set_attribute);
  bind(library, "cuLaunchKernelEx", api.launch);
  bind(library, "cuTensorMapEncodeTiled", api.tensor_map_encode);
  bind(library, "cuThreadExchangeStreamCaptureMode", api.exchange_capture_mode);
  return api;
}

int attribute(int device, int id) {
  int value = 0;
  check(api().device_attribute(&value, id, device),
        fmt::format("reading attribute {} of device {}", id, device));
  return value;
}

}  // namespace

const Api& api() {
  static std::atomic<const Api*> known = nullptr;
  if (const Api* table = known.load(std::memory_order_acquire)) return *table;
  const ForkGate gate;
  static const Api table = load();
  known.store(&table, std::memory_order_release);
  return table;
}

void check(Result result, const std::string& what) {
  if (result == 0) return;
  const char* name = "unknown error";
  const char* text = "";
  api().get_error_name(result, &name);
  api().get_error_string(result, &text);
  throw DriverError(fmt::format("{} failed: {} ({})", what, name, text));
}

DeviceFacts device_facts(int device) {
  // One word per device, 0 until asked: capability << 16 | SMs. Racing writers write the same word.
  static std::array<std::atomic<std::uint32_t>, 64> known{};
  const bool cached = device >= 0 && device < static_cast<int>(known.size());
  std::uint32_t word = cached ? known[device].load(std::memory_order_relaxed) : 0;
  if (word == 0) {
    check(api().init(0), "initialising CUDA");
    const int capability = attribute(device, kAttributeCapabilityMajor) * 10 +
                           attribute(device, kAttributeCapabilityMinor);
    word = static_cast<std::uint32_t>(capability) << 16 |
           static_cast<std::uint32_t>(attribute(device, kAttributeNumSms));
    if (cached) known[device].store(word, std::memory_order_relaxed);
  }
  return {static_cast<int>(word >> 16), static_cast<int>(word & 0xffffu)};
}

std::string device_name(int device) {
  std::array<char, 256> name{};
  check(api().init(0), "initialising CUDA");
  check(api().device_name(name.data(), static_cast<int>(name.size()) - 1, device),
        fmt::format("reading the name of device {}", device));
  return name.data();
}

std::string version() {
  int number = 0;
  try {
    if (api().driver_version(&number) != 0 || number == 0) return "";
  } catch (const DriverError&) {
    return "";
  }
  return fmt::format("{}.{}", number / 1000, number % 1000 / 10);
}

void ensure_context(int device) {
  Context current = nullptr;
  Device current_device = -1;
  check(api().context_get_current(&current), "reading the current context");
  if (current != nullptr && api().context_get_device(&current_device) == 0 &&
      current_device == device)
    return;
  Context primary = nullptr;
  check(api().primary_context_retain(&primary, device),
        fmt::format("retaining the primary context of device {}", device));
  check(api().context_set_current(primary),
        fmt::format("making the context of device {} current", device));
}

RelaxedCapture::RelaxedCapture() : previous_(kCaptureRelaxed) {
  check(api().exchange_capture_mode(&previous_), "relaxing the capture mode");
}
RelaxedCapture::~RelaxedCapture() { api().exchange_capture_mode(&previous_); }

}  // namespace deep_kernels::driver
