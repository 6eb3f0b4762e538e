// Words shared by every contract: integers, formats, backends and their limits, tensor-map
// descriptions. Plain C++20 without includes: read by the host compiler, by NVRTC and by tests.
#pragma once

namespace deep_kernels {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;

template <class T>
constexpr T ceil_div(T value, T unit) {
  return (value + unit - 1) / unit;
}
template <class T>
constexpr T align_up(T value, T unit) {
  return ceil_div(value, unit) * unit;
}
template <class T>
constexpr T min_of(T a, T b) {
  return b < a ? b : a;
}
template <class T>
constexpr T max_of(T a, T b) {
  return a < b ? b : a;
}
template <class T>
constexpr T clamp_to(T value, T low, T high) {
  return max_of(low, min_of(value, high));
}

// Every enum that may stand in a Spec is one byte wide, so that a Spec is hashable as bytes.
enum class Backend : u8 { cpu, sm89, sm90, sm100 };
enum class Format : u8 { fp8, mxfp8, mxfp4 };
enum class DType : u8 { float32, bfloat16, float16 };

constexpr const char* name_of(Backend value) {
  constexpr const char* names[] = {"cpu", "sm89", "sm90", "sm100"};
  return names[static_cast<u8>(value)];
}
constexpr const char* name_of(Format value) {
  constexpr const char* names[] = {"fp8", "mxfp8", "mxfp4"};
  return names[static_cast<u8>(value)];
}
constexpr const char* name_of(DType value) {
  constexpr const char* names[] = {"float32", "bfloat16", "float16"};
  return names[static_cast<u8>(value)];
}
constexpr i32 bytes_of(DType value) { return value == DType::float32 ? 4 : 2; }

// What a block may use. Source: CUDA C++ Programming Guide, table "Technical Specifications per
// Compute Capability" (shared memory per block after opt-in).
struct BackendLimits {
  i32 max_smem_bytes;
  i32 max_registers_per_block;
};
constexpr BackendLimits limits_of(Backend value) {
  switch (value) {
    case Backend::sm89:
      return {101376, 65536};  // 99 KiB: sm_89 and sm_120
    case Backend::sm90:
      return {232448, 65536};  // 227 KiB
    case Backend::sm100:
      return {232448, 65536};  // 227 KiB
    case Backend::cpu:
      break;
  }
  return {0, 0};
}

// Blocks that a kernel runs in clusters of: a Spec without cluster_size() has no clusters.
template <class Spec>
constexpr i32 cluster_size_of(const Spec& spec) {
  if constexpr (requires { spec.cluster_size(); })
    return spec.cluster_size();
  else
    return 1;
}
// Blocks of a persistent kernel: one per SM, as many as make whole clusters, at least one cluster.
constexpr i32 whole_clusters(i32 num_sms, i32 cluster) {
  return max_of(num_sms / cluster, 1) * cluster;
}

// One TMA tensor map in plain words. The driver encodes it for the card; an emulator reads it as it
// is. Dimension 0 is the contiguous one; the first coordinate of a load times the element size must
// be a multiple of 16 bytes, else the card stops with an illegal instruction (seen on an H200).
enum class MapType : u8 { u8_, f32_, bf16_ };
enum class Swizzle : u8 { none, b32, b64, b128 };
// How much of memory comes to the L2 cache for what a copy reads. What streams through all SMs is
// slower with 256 bytes (H200: decode of attention 9%, the fold 2 to 3%, paged logits 1 to 2%);
// only keys whose rows follow each other without a gap, read by many, lose 0.5% with 128.
enum class L2Promotion : u8 { b128, b256 };

constexpr i32 bytes_of(MapType value) {
  return value == MapType::f32_ ? 4 : value == MapType::bf16_ ? 2 : 1;
}
// The swizzle whose span is one row of `row_bytes` bytes.
constexpr Swizzle swizzle_for(i32 row_bytes) {
  return row_bytes == 128  ? Swizzle::b128
         : row_bytes == 64 ? Swizzle::b64
         : row_bytes == 32 ? Swizzle::b32
                           : Swizzle::none;
}

struct MapDescription {
  static constexpr i32 kMaxRank = 5;
  const void* base = nullptr;  // multiple of 16 bytes
  i64 dims[kMaxRank] = {};     // elements; what lies beyond reads as zero
  i64 strides[kMaxRank] = {};  // bytes, multiples of 16; strides[0] is implied
  i32 box[kMaxRank] = {};      // elements
  i32 rank = 0;
  MapType type = MapType::u8_;
  Swizzle swizzle = Swizzle::none;
  L2Promotion promotion = L2Promotion::b128;
};
// All dimensions at once, of any type of map; strides in elements of this many bytes.
template <class Map, i32 kRank>
constexpr void set_dimensions(Map& map, const i64 (&dims)[kRank], const i64 (&strides)[kRank],
                              i32 element_bytes, const i32 (&box)[kRank]) {
  map.rank = kRank;
  for (i32 i = 0; i < kRank; ++i) {
    map.dims[i] = dims[i];
    map.strides[i] = i == 0 ? 1 : element_bytes * strides[i];
    map.box[i] = box[i];
  }
}

}  // namespace deep_kernels
