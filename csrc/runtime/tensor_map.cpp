#include "runtime/tensor_map.h"

#include <fmt/format.h>

#include "runtime/driver.h"
#include "runtime/errors.h"

namespace deep_kernels {

namespace {

// Values of the driver's enums.
int data_type(MapType type) {
  switch (type) {
    case MapType::u8_:
      return 0;
    case MapType::f32_:
      return 7;
    case MapType::bf16_:
      return 9;
  }
  return 0;
}
int promotion_of(L2Promotion promotion) { return promotion == L2Promotion::b128 ? 2 : 3; }

}  // namespace

EncodedMap encode(const MapDescription& map) {
  std::uint64_t dims[MapDescription::kMaxRank];
  std::uint64_t strides[MapDescription::kMaxRank] = {};
  std::uint32_t box[MapDescription::kMaxRank];
  std::uint32_t steps[MapDescription::kMaxRank];
  for (int i = 0; i < map.rank; ++i) {
    dims[i] = static_cast<std::uint64_t>(map.dims[i]);
    if (i > 0) strides[i - 1] = static_cast<std::uint64_t>(map.strides[i]);
    box[i] = static_cast<std::uint32_t>(map.box[i]);
    steps[i] = 1;
  }
  EncodedMap encoded;
  const driver::Result result = driver::api().tensor_map_encode(
      &encoded, data_type(map.type), static_cast<std::uint32_t>(map.rank),
      const_cast<void*>(map.base), dims, strides, box, steps, /*interleave=*/0,
      static_cast<int>(map.swizzle), promotion_of(map.promotion), /*out of bounds: zeros*/ 0);
  if (result != 0) {
    std::string text;
    for (int i = 0; i < map.rank; ++i)
      text += fmt::format(" [dim {} stride {} box {}]", map.dims[i], map.strides[i], map.box[i]);
    driver::check(result, fmt::format("encoding a tensor map at {}:{}", map.base, text));
  }
  return encoded;
}

}  // namespace deep_kernels
