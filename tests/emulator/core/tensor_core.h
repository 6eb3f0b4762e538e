// Arithmetic of Hopper's tensor cores, bit by bit.
//
// One step adds n products and c at once: the largest exponent among them (of a product the sum of
// its factors' exponents) sets a grid of 2^(top - F); every term is cut toward zero to the grid,
// the sum is exact, and the result is cut toward zero to M fraction bits.
//   wgmma e4m3:          32 products, F = 13, M = 13
//   wgmma and mma.sync bf16 or f16: 16 products, F = 25, M = 23
//   mma.sync e4m3 on sm_90a: no such instruction; the assembler converts to f16 and takes two steps
//     of 16 products (k mod 4 < 2 first) from c = 0 with F = 25, M = 23, then adds c in float32.
//     What an sm_89 does by itself has not been measured; it is emulated in the same way.
// NaN operands, NaN c, and infinities that cancel give 0x7fffffff; a sum of 0 is +0.
// Source: measured on an H200 (CUDA 13.0), no mismatch in more than 10^9 dots per type. Not
// measured: c = +-inf, taken here as an infinity that absorbs.
#pragma once

#include "deep_kernels/contract/types.h"

namespace deep_kernels::emulator::tensor_core {

// d[m][n] of float32: on entry c, on return c + a * b. a [m][32], b [n][32] e4m3 bytes; n a
// multiple of 8, at most 256.
void wgmma_k32_e4m3(i32 m, i32 n, const u8* a, const u8* b, float* d);
// The same with the second operand decoded beforehand, for many calls with one b.
struct Decoded {
  float value[32][256];
  signed char exponent[32][256];
  bool nan[256];
};
void decode(i32 n, const u8* b, Decoded& decoded);
void wgmma_k32_e4m3(i32 m, i32 n, const u8* a, const Decoded& b, float* d);

// d[m][n]: on entry c, on return c + a * b. a [m][16], b [n][16], bits of bfloat16 or float16.
// n at most 256.
enum class Half : u8 { bf16, f16 };
void step_k16(Half type, i32 m, i32 n, const u16* a, const u16* b, float* d);

// c [16][8], a [16][32], b [8][32].
void mma_m16n8k32_e4m3(const u8* a, const u8* b, float* c);

}  // namespace deep_kernels::emulator::tensor_core
