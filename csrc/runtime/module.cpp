#include "runtime/module.h"

#include <fmt/format.h>

namespace deep_kernels {

namespace {
constexpr int kMaxDynamicSharedBytes = 8;  // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
}

// Process exit may have taken the driver down already: what the driver says then is of no use.
Module::~Module() {
  if (library_ != nullptr) driver::api().library_unload(library_);
}

driver::Kernel Module::handle(int device, int smem_bytes) {
  const bool tracked = device < static_cast<int>(ready_.size());
  if (tracked && ready_[device].load(std::memory_order_acquire))
    return kernel_.load(std::memory_order_relaxed);

  const std::scoped_lock lock(loading_);
  const driver::RelaxedCapture relaxed;
  const driver::Api& api = driver::api();
  if (library_ == nullptr) {
    driver::Library library = nullptr;
    driver::check(
        api.library_load(&library, cubin_.data(), nullptr, nullptr, 0, nullptr, nullptr, 0),
        fmt::format("loading {}", entry_));
    library_ = library;
    driver::Kernel kernel = nullptr;
    driver::check(api.library_get_kernel(&kernel, library_, entry_.c_str()),
                  fmt::format("finding {}", entry_));
    kernel_.store(kernel, std::memory_order_relaxed);
  }
  driver::Kernel kernel = kernel_.load(std::memory_order_relaxed);
  driver::check(api.kernel_set_attribute(kMaxDynamicSharedBytes, smem_bytes, kernel, device),
                fmt::format("giving {} {} bytes of shared memory", entry_, smem_bytes));
  if (tracked) ready_[device].store(true, std::memory_order_release);
  return kernel;
}

void Module::launch(int device, driver::Stream stream, const LaunchShape& shape, void** params) {
  driver::ensure_context(device);
  driver::Kernel kernel = handle(device, shape.smem_bytes);
  driver::LaunchAttribute attributes[2]{};
  unsigned num_attributes = 0;
  if (shape.programmatic)
    attributes[num_attributes++] = {.id = driver::kProgrammaticStreamSerialization, .flag = 1};
  if (shape.cluster > 1)
    attributes[num_attributes++] = {
        .id = driver::kClusterDimension,
        .dimensions = {static_cast<std::uint32_t>(shape.cluster), 1, 1},
    };
  const driver::LaunchConfig config{
      .grid_x = static_cast<unsigned>(shape.grid),
      .grid_y = 1,
      .grid_z = 1,
      .block_x = static_cast<unsigned>(shape.block),
      .block_y = 1,
      .block_z = 1,
      .smem_bytes = static_cast<unsigned>(shape.smem_bytes),
      .stream = stream,
      .attributes = attributes,
      .num_attributes = num_attributes,
  };
  const driver::Result result = driver::api().launch(&config, kernel, params, nullptr);
  if (result != 0)
    driver::check(result,
                  fmt::format("launching {} with {} blocks of {} threads and {} bytes of "
                              "shared memory in clusters of {}",
                              entry_, shape.grid, shape.block, shape.smem_bytes, shape.cluster));
}

}  // namespace deep_kernels
