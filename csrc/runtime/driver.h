// The CUDA driver, loaded at first use. Only the handful of calls that launching needs, declared
// here, so that neither building nor running takes a toolkit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace deep_kernels::driver {

// cuda.h in a few lines.
using Result = int;
using Device = int;
using Context = void*;
using Library = void*;
using Kernel = void*;
using Function = void*;
using Stream = void*;

struct LaunchAttribute {
  std::int32_t id;
  std::int32_t padding;
  union {
    std::int32_t flag;
    std::uint32_t dimensions[3];
    char bytes[64];
  };
};
inline constexpr std::int32_t kClusterDimension = 4;
inline constexpr std::int32_t kProgrammaticStreamSerialization = 6;

struct LaunchConfig {
  unsigned grid_x, grid_y, grid_z;
  unsigned block_x, block_y, block_z;
  unsigned smem_bytes;
  Stream stream;
  LaunchAttribute* attributes;
  unsigned num_attributes;
};

struct Api {
  Result (*init)(unsigned);
  Result (*get_error_string)(Result, const char**);
  Result (*get_error_name)(Result, const char**);
  Result (*driver_version)(int*);
  Result (*device_get)(Device*, int);
  Result (*device_attribute)(int*, int, Device);
  Result (*device_name)(char*, int, Device);
  Result (*primary_context_retain)(Context*, Device);
  Result (*context_get_current)(Context*);
  Result (*context_set_current)(Context);
  Result (*context_get_device)(Device*);
  Result (*library_load)(Library*, const void*, void*, void*, unsigned, void*, void*, unsigned);
  Result (*library_unload)(Library);
  Result (*library_get_kernel)(Kernel*, Library, const char*);
  Result (*kernel_set_attribute)(int, int, Kernel, Device);
  Result (*launch)(const LaunchConfig*, Function, void**, void**);
  Result (*tensor_map_encode)(void*, int, std::uint32_t, void*, const std::uint64_t*,
                              const std::uint64_t*, const std::uint32_t*, const std::uint32_t*, int,
                              int, int, int);
  Result (*exchange_capture_mode)(int*);
};

// Throws DriverError where there is no driver.
const Api& api();
// Throws DriverError with the driver's words for anything but success; `what` says what was tried.
void check(Result result, const std::string& what);

struct DeviceFacts {
  int capability;  // major * 10 + minor
  int num_sms;
};
// Of any device index; asked once per device.
DeviceFacts device_facts(int device);
std::string device_name(int device);
// "13.0", or nothing where there is no driver; never initialises CUDA.
std::string version();

// Makes the device's primary context current in this thread, which may never have touched CUDA.
void ensure_context(int device);

// For its lifetime, calls that a stream capture in this process would forbid are allowed: loading a
// module inside a capture is sound, it touches no stream.
class RelaxedCapture {
 public:
  RelaxedCapture();
  ~RelaxedCapture();
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  int previous_;
};

}  // namespace deep_kernels::driver
