// One instruction or builtin per function, for every card from sm_89 on. Nothing above this layer
// holds inline asm or a CUDA builtin, so that another implementation of these names (the emulator)
// runs the same kernels. Shared memory is addressed by 32-bit addresses from smem_addr().
// Source: PTX ISA 8.7, sections 9.7.3 to 9.7.13; names follow the instructions.
#pragma once

#include "deep_kernels/contract/types.h"

#define DK_DEVICE __device__ __forceinline__
#define DK_KERNEL(threads) extern "C" __global__ void __launch_bounds__(threads, 1)
#define DK_GRID_CONSTANT const __grid_constant__
#define DK_UNROLL _Pragma("unroll")
#define DK_NO_UNROLL _Pragma("unroll 1")

namespace deep_kernels::ptx {

// --- who and where ------------------------------------------------------------------------------

DK_DEVICE i32 thread_index() { return static_cast<i32>(threadIdx.x); }
// The same, of which the compiler does not know that it is: what is made of it is made where it
// stands, and occupies no register around a loop.
DK_DEVICE i32 fresh_thread_index() {
  i32 index = thread_index();
  asm volatile("" : "+r"(index));
  return index;
}
DK_DEVICE i32 lane_index() { return static_cast<i32>(threadIdx.x & 31u); }
// The same value in all lanes, in a form the compiler knows to be uniform.
DK_DEVICE i32 warp_index() {
  return __shfl_sync(0xffffffffu, static_cast<i32>(threadIdx.x >> 5), 0);
}
DK_DEVICE i32 block_index() { return static_cast<i32>(blockIdx.x); }
DK_DEVICE i32 num_blocks() { return static_cast<i32>(gridDim.x); }
// Names what the thread does from here on, for the emulator's reports; nothing on a card.
DK_DEVICE void role(const char*) {}

// --- shared memory ------------------------------------------------------------------------------

// The block's dynamic shared memory as one struct; its base is a multiple of 1024 bytes.
template <class Smem>
DK_DEVICE Smem& dynamic_smem() {
  extern __shared__ __align__(1024) u8 dk_dynamic_smem[];
  return *reinterpret_cast<Smem*>(dk_dynamic_smem);
}
DK_DEVICE u32 smem_addr(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

DK_DEVICE i32 load_shared_i32(u32 addr) {
  i32 value;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(addr) : "memory");
  return value;
}
DK_DEVICE i64 load_shared_i64(u32 addr) {
  i64 value;
  asm volatile("ld.shared.b64 %0, [%1];" : "=l"(value) : "r"(addr) : "memory");
  return value;
}
DK_DEVICE float load_shared_f32(u32 addr) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(addr) : "memory");
  return value;
}
DK_DEVICE void load_shared_f32x2(float (&value)[2], u32 addr) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
               : "=f"(value[0]), "=f"(value[1])
               : "r"(addr)
               : "memory");
}
// 16 bytes; the address is a multiple of 16.
DK_DEVICE void load_shared_x4(u32 (&value)[4], u32 addr) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value[0]), "=r"(value[1]), "=r"(value[2]), "=r"(value[3])
               : "r"(addr)
               : "memory");
}
DK_DEVICE void store_shared_x4(u32 addr, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(addr), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
}
DK_DEVICE void store_shared_i32(u32 addr, i32 value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(addr), "r"(value) : "memory");
}
DK_DEVICE void store_shared_i64(u32 addr, i64 value) {
  asm volatile("st.shared.b64 [%0], %1;" ::"r"(addr), "l"(value) : "memory");
}
DK_DEVICE void store_shared_f32x2(u32 addr, float a, float b) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(addr), "f"(a), "f"(b) : "memory");
}
DK_DEVICE void store_shared_f32(u32 addr, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(addr), "f"(value) : "memory");
}

// --- global memory ------------------------------------------------------------------------------

// Read-only for the length of the kernel.
DK_DEVICE i32 load_global(const i32* address) { return __ldg(address); }
DK_DEVICE float load_global(const float* address) { return __ldg(address); }
DK_DEVICE u16 load_global(const u16* address) { return __ldg(address); }
// 16 bytes; the address is a multiple of 16.
DK_DEVICE void load_global_x4(u32 (&value)[4], const void* address) {
  const uint4 four = __ldg(static_cast<const uint4*>(address));
  value[0] = four.x, value[1] = four.y, value[2] = four.z, value[3] = four.w;
}

// Written by this block before a barrier.
DK_DEVICE i32 load_global_written(const i32* address) { return *address; }

DK_DEVICE void store_global(u8* address, u8 value) { *address = value; }
DK_DEVICE void store_global(i32* address, i32 value) { *address = value; }
DK_DEVICE void store_global(float* address, float value) { *address = value; }
DK_DEVICE void store_global(u16* address, u16 value) { *address = value; }
// Fetches the line of an address into the L2 cache; the address need not be good.
DK_DEVICE void prefetch_global_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}
// 4 bytes; the address is a multiple of 4.
DK_DEVICE void store_global_x1(void* address, u32 a) { *static_cast<u32*>(address) = a; }
// 8 bytes; the address is a multiple of 8.
DK_DEVICE void store_global_x2(void* address, u32 a, u32 b) {
  *static_cast<uint2*>(address) = make_uint2(a, b);
}
// 16 bytes; the address is a multiple of 16.
DK_DEVICE void store_global_x4(void* address, u32 a, u32 b, u32 c, u32 d) {
  *static_cast<uint4*>(address) = make_uint4(a, b, c, d);
}
// Bytes from the address up to the next multiple of `unit` (a power of two).
DK_DEVICE u32 bytes_to_aligned(const void* address, u32 unit) {
  return static_cast<u32>(-reinterpret_cast<u64>(address)) & (unit - 1);
}

// --- arithmetic ---------------------------------------------------------------------------------

DK_DEVICE float fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
// a + b rounded toward -inf.
DK_DEVICE float add_rm(float a, float b) { return __fadd_rd(a, b); }
// max(a, b) where a NaN loses against a number.
DK_DEVICE float max(float a, float b) { return fmaxf(a, b); }
// max(a, b) where a NaN wins.
DK_DEVICE float max_nan(float a, float b) {
  float value;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(value) : "f"(a), "f"(b));
  return value;
}
// The greater magnitude of two bfloat16 each, under the product of their signs; a NaN wins.
DK_DEVICE u32 max_nan_abs_bf16x2(u32 a, u32 b) {
  u32 value;
  asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(value) : "r"(a), "r"(b));
  return value;
}
// 2^a to about 2 ulp; what lies below 2^-126 is 0. NaN stays.
DK_DEVICE float ex2_approx_ftz(float a) {
  float value;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(a));
  return value;
}
// log2(a) to 2^-22, in absolute terms within [0.5, 2] and relative ones elsewhere; 0 gives -inf.
DK_DEVICE float lg2_approx_ftz(float a) {
  float value;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(a));
  return value;
}
// 1 / a to 1 ulp; what lies below 2^-126 is 0. NaN stays.
DK_DEVICE float rcp_approx_ftz(float a) {
  float value;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(a));
  return value;
}
// Often no instruction of its own: a sign that the one that reads it leaves out.
DK_DEVICE float abs(float a) { return fabsf(a); }
// a * 2^n, where the low bits of `n` as an integer are n and neither a nor the product leaves the
// normal numbers. As one operation from float to float: the compiler keeps what comes out of an
// integer one as an integer, and copies it where a wgmma has its registers.
DK_DEVICE float add_to_exponent(float a, float n) {
  float value;
  asm("{\n.reg .b32 bits, low;\nmov.b32 bits, %1;\nmov.b32 low, %2;\nshl.b32 low, low, 23;\n"
      "add.s32 bits, bits, low;\nmov.b32 %0, bits;\n}"
      : "=f"(value)
      : "f"(a), "f"(n));
  return value;
}
// a * b clamped to [0, 1]; NaN gives 0.
DK_DEVICE float mul_sat(float a, float b) {
  float value;
  asm("mul.rn.sat.f32 %0, %1, %2;" : "=f"(value) : "f"(a), "f"(b));
  return value;
}
DK_DEVICE u32 bits_of(float value) { return __float_as_uint(value); }
DK_DEVICE float float_of(u32 bits) { return __uint_as_float(bits); }
DK_DEVICE double double_of(u64 bits) { return __longlong_as_double(static_cast<i64>(bits)); }
DK_DEVICE float float_of_f16(u16 bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}
DK_DEVICE float float_of_bf16(u16 bits) { return __uint_as_float(static_cast<u32>(bits) << 16); }
// Round to nearest even; NaN becomes 0x7fff.
DK_DEVICE u16 bf16_of(float value) {
  u16 bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}
// The same for two, the first one in the lower half.
DK_DEVICE u32 bf16x2_of(float low, float high) {
  u32 bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}
// The same for float16.
DK_DEVICE u32 f16x2_of(float low, float high) {
  u32 bits;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}
// Four bytes out of the eight of a (0 to 3) and b (4 to 7): nibble i of the selector's lower half
// names the one for byte i; with its top bit, that byte's sign eight times over.
DK_DEVICE u32 byte_permute(u32 a, u32 b, u32 selector) {
  u32 value;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(value) : "r"(a), "r"(b), "r"(selector));
  return value;
}
// Pairs of e4m3 and of float16. Exact upwards; back to nearest even, what is too large to +-448.
DK_DEVICE u32 f16x2_of_e4m3x2(u16 pair) {
  u32 value;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(value) : "h"(pair));
  return value;
}
// The same of the first two out of four e4m3, or of the last two.
template <i32 kPair>
DK_DEVICE u32 f16x2_of_e4m3x4(u32 four) {
  u32 value;
  if constexpr (kPair == 0)
    asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, low;}"
        : "=r"(value)
        : "r"(four));
  else
    asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, high;}"
        : "=r"(value)
        : "r"(four));
  return value;
}
DK_DEVICE u16 e4m3x2_of_f16x2(u32 pair) {
  u16 value;
  asm("cvt.rn.satfinite.e4m3x2.f16x2 %0, %1;" : "=h"(value) : "r"(pair));
  return value;
}
DK_DEVICE u16 e4m3x2_of_f32x2(float low, float high) {
  u16 value;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(value) : "f"(high), "f"(low));
  return value;
}
DK_DEVICE u32 mul_f16x2(u32 a, u32 b) {
  u32 value;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(value) : "r"(a), "r"(b));
  return value;
}

// --- converged: called by all 32 lanes at one place ----------------------------------------------

DK_DEVICE void sync_warp() { __syncwarp(); }
DK_DEVICE float shuffle_xor(float value, i32 mask) {
  return __shfl_xor_sync(0xffffffffu, value, mask);
}
DK_DEVICE double shuffle_xor(double value, i32 mask) {
  return __shfl_xor_sync(0xffffffffu, value, mask);
}
DK_DEVICE i32 shuffle_xor(i32 value, i32 mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }
DK_DEVICE i64 shuffle_xor(i64 value, i32 mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }
// The value of the lane `delta` below; lanes under delta keep their own.
DK_DEVICE i32 shuffle_up(i32 value, i32 delta) { return __shfl_up_sync(0xffffffffu, value, delta); }
DK_DEVICE float shuffle(float value, i32 lane) { return __shfl_sync(0xffffffffu, value, lane); }
DK_DEVICE i32 shuffle(i32 value, i32 lane) { return __shfl_sync(0xffffffffu, value, lane); }
DK_DEVICE bool any(bool predicate) { return __any_sync(0xffffffffu, predicate) != 0; }
DK_DEVICE i32 reduce_min(i32 value) { return __reduce_min_sync(0xffffffffu, value); }
DK_DEVICE u32 reduce_add(u32 value) { return __reduce_add_sync(0xffffffffu, value); }
DK_DEVICE i32 reduce_max(i32 value) { return __reduce_max_sync(0xffffffffu, value); }

// --- block barriers ------------------------------------------------------------------------------

DK_DEVICE void sync_threads() { __syncthreads(); }
// Barrier 0 belongs to sync_threads(). num_threads: multiple of 32, all participants.
DK_DEVICE void barrier_sync(u32 id, u32 num_threads) {
  asm volatile("barrier.sync.aligned %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}
// The warp counts as there and goes on. When all have come, those in barrier_sync() see what it did
// before. It sees nothing of theirs, not even that the phase is complete: something else has to
// tell it that before it comes to this barrier again.
DK_DEVICE void barrier_arrive(u32 id, u32 num_threads) {
  asm volatile("barrier.arrive.aligned %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}

// --- cp.async, ldmatrix, mma.sync ----------------------------------------------------------------

// Copies `bytes` (0 or 16) from global to shared and fills the rest of the 16 with zeros.
DK_DEVICE void cp_async_16(u32 smem, const void* global, u32 bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem), "l"(global), "r"(bytes)
               : "memory");
}
DK_DEVICE void cp_async_commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <i32 kPending>
DK_DEVICE void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}
// Four 8x8 matrices of 16-bit elements; lane l gives the row address of matrix l / 8, row l % 8.
DK_DEVICE void ldmatrix_x4(u32 (&fragment)[4], u32 addr) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(addr)
               : "memory");
}
// The same with each matrix transposed: a lane gets neighbours of a column.
DK_DEVICE void ldmatrix_x4_trans(u32 (&fragment)[4], u32 addr) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(addr)
               : "memory");
}
// Two 8x8 matrices; lanes 0 to 15 give the addresses.
DK_DEVICE void ldmatrix_x2(u32 (&fragment)[2], u32 addr) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(fragment[0]), "=r"(fragment[1])
               : "r"(addr)
               : "memory");
}
// d += a * b: a [16, 32] e4m3 row-major, b [32, 8] e4m3 column-major, d [16, 8] float32.
DK_DEVICE void mma_m16n8k32_e4m3(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// Whether that is an instruction of the card. Hopper's tensor cores read e4m3 by wgmma alone: the
// assembler makes conversions to float16, two multiplications and four float32 additions of it.
#if __CUDA_ARCH__ == 900
inline constexpr bool kHasE4m3Mma = false;
#else
inline constexpr bool kHasE4m3Mma = true;
#endif
// d += a * b: a [16, 16] float16 row-major, b [16, 8] float16 column-major, d [16, 8] float32.
DK_DEVICE void mma_m16n8k16_f16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// The same in bfloat16.
DK_DEVICE void mma_m16n8k16_bf16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

}  // namespace deep_kernels::ptx
