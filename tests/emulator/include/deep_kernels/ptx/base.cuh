// The emulator's ptx/base.cuh: the same functions as the package's, done by a host program. Each
// takes one more argument, the place in the text it was called from.
#pragma once

#include <bit>
#include <cmath>

#include "core/device.h"
#include "core/numeric.h"
#include "deep_kernels/contract/types.h"

#define DK_DEVICE inline
#define DK_KERNEL(threads)                            \
  extern "C" const int dk_emulator_threads = threads; \
  extern "C" void
#define DK_GRID_CONSTANT const
#define DK_UNROLL
#define DK_NO_UNROLL

namespace deep_kernels::ptx {

using emulator::At;
using emulator::Meeting;
using emulator::WgmmaType;

inline void role(const char* name) { emulator::set_role(name); }

// --- who and where ------------------------------------------------------------------------------

inline i32 thread_index() { return emulator::identity.thread; }
inline i32 fresh_thread_index() { return emulator::identity.thread; }
inline i32 lane_index() { return emulator::identity.thread % 32; }
inline i32 warp_index(At at = At::current()) {
  return static_cast<i32>(emulator::meet(Meeting::shuffle, emulator::identity.thread / 32, 0, at));
}
inline i32 block_index() { return emulator::identity.block; }
inline i32 num_blocks() { return emulator::identity.num_blocks; }

// --- shared memory ------------------------------------------------------------------------------

template <class Smem>
Smem& dynamic_smem(At at = At::current()) {
  return *static_cast<Smem*>(emulator::dynamic_smem(sizeof(Smem), at));
}
inline u32 smem_addr(const void* pointer, At at = At::current()) {
  return emulator::smem_addr(pointer, at);
}

inline i32 load_shared_i32(u32 addr, At at = At::current()) {
  i32 value;
  emulator::load_shared(&value, addr, sizeof(value), at);
  return value;
}
inline i64 load_shared_i64(u32 addr, At at = At::current()) {
  i64 value;
  emulator::load_shared(&value, addr, sizeof(value), at);
  return value;
}
inline float load_shared_f32(u32 addr, At at = At::current()) {
  float value;
  emulator::load_shared(&value, addr, sizeof(value), at);
  return value;
}
inline void load_shared_f32x2(float (&value)[2], u32 addr, At at = At::current()) {
  emulator::load_shared(value, addr, sizeof(value), at);
}
inline void load_shared_x4(u32 (&value)[4], u32 addr, At at = At::current()) {
  emulator::load_shared(value, addr, sizeof(value), at);
}
inline void store_shared_x4(u32 addr, u32 a, u32 b, u32 c, u32 d, At at = At::current()) {
  const u32 words[4] = {a, b, c, d};
  emulator::store_shared(addr, words, sizeof(words), at);
}
inline void store_shared_i32(u32 addr, i32 value, At at = At::current()) {
  emulator::store_shared(addr, &value, sizeof(value), at);
}
inline void store_shared_i64(u32 addr, i64 value, At at = At::current()) {
  emulator::store_shared(addr, &value, sizeof(value), at);
}
inline void store_shared_f32x2(u32 addr, float a, float b, At at = At::current()) {
  const float values[] = {a, b};
  emulator::store_shared(addr, values, sizeof(values), at);
}
inline void store_shared_f32(u32 addr, float value, At at = At::current()) {
  emulator::store_shared(addr, &value, sizeof(value), at);
}

// --- global memory ------------------------------------------------------------------------------

inline i32 load_global(const i32* address, At at = At::current()) {
  i32 value;
  emulator::load_global(&value, address, sizeof(value), at);
  return value;
}
inline float load_global(const float* address, At at = At::current()) {
  float value;
  emulator::load_global(&value, address, sizeof(value), at);
  return value;
}
inline u16 load_global(const u16* address, At at = At::current()) {
  u16 value;
  emulator::load_global(&value, address, sizeof(value), at);
  return value;
}

inline void load_global_x4(u32 (&value)[4], const void* address, At at = At::current()) {
  emulator::load_global(value, address, sizeof(value), at);
}

inline i32 load_global_written(const i32* address, At at = At::current()) {
  i32 value;
  emulator::load_global_written(&value, address, sizeof(value), at);
  return value;
}

inline void store_global(u8* address, u8 value, At at = At::current()) {
  emulator::store_global(address, &value, sizeof(value), at);
}
inline void store_global(i32* address, i32 value, At at = At::current()) {
  emulator::store_global(address, &value, sizeof(value), at);
}
inline void store_global(float* address, float value, At at = At::current()) {
  emulator::store_global(address, &value, sizeof(value), at);
}
inline void store_global(u16* address, u16 value, At at = At::current()) {
  emulator::store_global(address, &value, sizeof(value), at);
}
inline void store_global_x1(void* address, u32 a, At at = At::current()) {
  emulator::store_global(address, &a, sizeof(a), at);
}
inline void store_global_x2(void* address, u32 a, u32 b, At at = At::current()) {
  const u32 words[2] = {a, b};
  emulator::store_global(address, words, sizeof(words), at);
}
inline void store_global_x4(void* address, u32 a, u32 b, u32 c, u32 d, At at = At::current()) {
  const u32 words[4] = {a, b, c, d};
  emulator::store_global(address, words, sizeof(words), at);
}
inline void prefetch_global_l2(const void*) {}
inline u32 bytes_to_aligned(const void* address, u32 unit) {
  return static_cast<u32>(-reinterpret_cast<u64>(address)) & (unit - 1);
}

// --- arithmetic ---------------------------------------------------------------------------------

inline float fma(float a, float b, float c, At at = At::current()) {
  emulator::check_poison(a, at);
  emulator::check_poison(b, at);
  emulator::check_poison(c, at);
  emulator::identity.time += emulator::kAluCycles;
  return emulator::numeric::fma(a, b, c);
}
inline float add_rm(float a, float b, At at = At::current()) {
  emulator::check_poison(a, at);
  emulator::check_poison(b, at);
  emulator::identity.time += emulator::kAluCycles;
  return emulator::numeric::add_rm(a, b);
}
inline float max(float a, float b, At at = At::current()) {
  emulator::check_poison(a, at);
  emulator::check_poison(b, at);
  emulator::identity.time += emulator::kAluCycles;
  return emulator::numeric::max(a, b);
}
inline float max_nan(float a, float b, At at = At::current()) {
  emulator::check_poison(a, at);
  emulator::check_poison(b, at);
  emulator::identity.time += emulator::kAluCycles;
  return emulator::numeric::max_nan(a, b);
}
inline u32 max_nan_abs_bf16x2(u32 a, u32 b) {
  return emulator::numeric::max_nan_abs_bf16(static_cast<u16>(a), static_cast<u16>(b)) |
         static_cast<u32>(emulator::numeric::max_nan_abs_bf16(static_cast<u16>(a >> 16),
                                                              static_cast<u16>(b >> 16)))
             << 16;
}
inline float ex2_approx_ftz(float a, At at = At::current()) {
  emulator::check_poison(a, at);
  return emulator::numeric::ex2_approx_ftz(a);
}
// No exact model of the card's is known: the correct value, at most 2^-22 away from it.
inline float lg2_approx_ftz(float a, At at = At::current()) {
  emulator::check_poison(a, at);
  return std::log2(emulator::numeric::flushed(a));
}
// No exact model of the card's is known: the correct value, at most 0.975 ulp away from it.
inline float rcp_approx_ftz(float a, At at = At::current()) {
  emulator::check_poison(a, at);
  return emulator::numeric::flushed(1.0f / emulator::numeric::flushed(a));
}
inline float abs(float a, At at = At::current()) {
  emulator::check_poison(a, at);
  return std::fabs(a);
}
inline float add_to_exponent(float a, float n, At at = At::current()) {
  emulator::check_poison(a, at);
  emulator::check_poison(n, at);
  return std::bit_cast<float>(std::bit_cast<u32>(a) + (std::bit_cast<u32>(n) << 23));
}
inline float mul_sat(float a, float b, At at = At::current()) {
  emulator::check_poison(a, at);
  emulator::check_poison(b, at);
  emulator::identity.time += emulator::kAluCycles;
  return emulator::numeric::saturate(a * b);
}
inline u32 bits_of(float value, At at = At::current()) {
  emulator::check_poison(value, at);
  return std::bit_cast<u32>(value);
}
inline float float_of(u32 bits) { return std::bit_cast<float>(bits); }
inline double double_of(u64 bits) { return std::bit_cast<double>(bits); }
inline float float_of_f16(u16 bits) { return emulator::numeric::float_of_f16(bits); }
inline u32 byte_permute(u32 a, u32 b, u32 selector) {
  return emulator::numeric::byte_permute(a, b, selector);
}
inline u32 f16x2_of_e4m3x2(u16 pair) {
  return emulator::numeric::f16_of_e4m3(static_cast<u8>(pair)) |
         static_cast<u32>(emulator::numeric::f16_of_e4m3(static_cast<u8>(pair >> 8))) << 16;
}
template <i32 kPair>
u32 f16x2_of_e4m3x4(u32 four) {
  return f16x2_of_e4m3x2(static_cast<u16>(four >> 16 * kPair));
}
inline u16 e4m3x2_of_f16x2(u32 pair) {
  const auto half = [](u32 bits) {
    return emulator::numeric::e4m3_of(emulator::numeric::float_of_f16(static_cast<u16>(bits)));
  };
  return static_cast<u16>(half(pair & 0xffffu) | half(pair >> 16) << 8);
}
inline u16 e4m3x2_of_f32x2(float low, float high, At at = At::current()) {
  emulator::check_poison(low, at);
  emulator::check_poison(high, at);
  return static_cast<u16>(emulator::numeric::e4m3_of(low) | emulator::numeric::e4m3_of(high) << 8);
}
inline u32 mul_f16x2(u32 a, u32 b) {
  return emulator::numeric::f16_of(float_of_f16(static_cast<u16>(a)) *
                                   float_of_f16(static_cast<u16>(b))) |
         static_cast<u32>(emulator::numeric::f16_of(float_of_f16(static_cast<u16>(a >> 16)) *
                                                    float_of_f16(static_cast<u16>(b >> 16))))
             << 16;
}
inline float float_of_bf16(u16 bits) { return std::bit_cast<float>(static_cast<u32>(bits) << 16); }
inline u16 bf16_of(float value, At at = At::current()) {
  emulator::check_poison(value, at);
  return emulator::numeric::bf16_of(value);
}

inline u32 bf16x2_of(float low, float high, At at = At::current()) {
  return bf16_of(low, at) | static_cast<u32>(bf16_of(high, at)) << 16;
}
inline u32 f16x2_of(float low, float high, At at = At::current()) {
  emulator::check_poison(low, at);
  emulator::check_poison(high, at);
  return emulator::numeric::f16_of(low) | static_cast<u32>(emulator::numeric::f16_of(high)) << 16;
}

// --- converged ----------------------------------------------------------------------------------

inline void sync_warp(At at = At::current()) { emulator::meet(Meeting::sync_warp, 0, 0, at); }
inline float shuffle_xor(float value, i32 mask, At at = At::current()) {
  emulator::check_poison(value, at);
  return float_of(
      static_cast<u32>(emulator::meet(Meeting::shuffle_xor, std::bit_cast<u32>(value), mask, at)));
}
inline double shuffle_xor(double value, i32 mask, At at = At::current()) {
  return std::bit_cast<double>(
      emulator::meet(Meeting::shuffle_xor, std::bit_cast<u64>(value), mask, at));
}
inline i32 shuffle_xor(i32 value, i32 mask, At at = At::current()) {
  return static_cast<i32>(emulator::meet(Meeting::shuffle_xor, static_cast<u32>(value), mask, at));
}
inline i64 shuffle_xor(i64 value, i32 mask, At at = At::current()) {
  return static_cast<i64>(emulator::meet(Meeting::shuffle_xor, static_cast<u64>(value), mask, at));
}
inline i32 shuffle_up(i32 value, i32 delta, At at = At::current()) {
  return static_cast<i32>(emulator::meet(Meeting::shuffle_up, static_cast<u32>(value), delta, at));
}
inline float shuffle(float value, i32 lane, At at = At::current()) {
  emulator::check_poison(value, at);
  return float_of(
      static_cast<u32>(emulator::meet(Meeting::shuffle, std::bit_cast<u32>(value), lane, at)));
}
inline i32 shuffle(i32 value, i32 lane, At at = At::current()) {
  return static_cast<i32>(emulator::meet(Meeting::shuffle, static_cast<u32>(value), lane, at));
}
inline bool any(bool predicate, At at = At::current()) {
  return emulator::meet(Meeting::any, predicate ? 1 : 0, 0, at) != 0;
}
inline u32 reduce_add(u32 value, At at = At::current()) {
  return static_cast<u32>(emulator::meet(Meeting::reduce_add, value, 0, at));
}
inline i32 reduce_min(i32 value, At at = At::current()) {
  return static_cast<i32>(emulator::meet(Meeting::reduce_min, static_cast<u32>(value), 0, at));
}
inline i32 reduce_max(i32 value, At at = At::current()) {
  return static_cast<i32>(emulator::meet(Meeting::reduce_max, static_cast<u32>(value), 0, at));
}

// --- block barriers -----------------------------------------------------------------------------

inline void sync_threads(At at = At::current()) { emulator::sync_threads(at); }
inline void barrier_sync(u32 id, u32 num_threads, At at = At::current()) {
  emulator::barrier_sync(id, num_threads, at);
}
inline void barrier_arrive(u32 id, u32 num_threads, At at = At::current()) {
  emulator::barrier_arrive(id, num_threads, at);
}

// --- cp.async, ldmatrix, mma.sync ---------------------------------------------------------------

inline void cp_async_16(u32 smem, const void* global, u32 bytes, At at = At::current()) {
  emulator::cp_async(smem, global, 16, bytes, at);
}
inline void cp_async_commit_group(At at = At::current()) { emulator::cp_async_commit_group(at); }
template <i32 kPending>
void cp_async_wait_group(At at = At::current()) {
  emulator::cp_async_wait_group(kPending, at);
}
inline void ldmatrix_x4(u32 (&fragment)[4], u32 addr, At at = At::current()) {
  emulator::ldmatrix(fragment, 4, false, addr, at);
}
inline void ldmatrix_x4_trans(u32 (&fragment)[4], u32 addr, At at = At::current()) {
  emulator::ldmatrix(fragment, 4, true, addr, at);
}
inline void ldmatrix_x2(u32 (&fragment)[2], u32 addr, At at = At::current()) {
  emulator::ldmatrix(fragment, 2, false, addr, at);
}
inline void mma_m16n8k32_e4m3(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2],
                              At at = At::current()) {
  emulator::mma_m16n8(emulator::MmaType::e4m3, d, a, b, at);
}
// The machine is a Hopper card, unless the build is told otherwise.
#ifdef DK_EMULATE_E4M3_MMA
inline constexpr bool kHasE4m3Mma = true;
#else
inline constexpr bool kHasE4m3Mma = false;
#endif
inline void mma_m16n8k16_f16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2],
                             At at = At::current()) {
  emulator::mma_m16n8(emulator::MmaType::f16, d, a, b, at);
}
inline void mma_m16n8k16_bf16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2],
                              At at = At::current()) {
  emulator::mma_m16n8(emulator::MmaType::bf16, d, a, b, at);
}

}  // namespace deep_kernels::ptx
