// The boundary to the driver outside (ctypes): plain structs and one function.
#pragma once

#include "deep_kernels/contract/types.h"

extern "C" {

// One tensor the launch may touch. Strides in bytes; dimensions of any order.
struct DkTensor {
  const char* name;
  const void* data;
  const long long* sizes;
  const long long* strides;
  int rank;
  int element_bytes;
  int writable;
};

struct DkLaunch {
  const char* kernel;
  void (*entry)(void* const* params);  // of the kernel's library, once per thread
  void* const* params;
  const char* source_roots;  // ':'-separated folders that file names in reports are relative to
  const struct DkTensor* tensors;
  int num_tensors;
  int grid;
  int cluster;  // blocks that run together
  int block;
  int smem_bytes;
  int programmatic;         // may start before the kernel ahead of it has ended
  unsigned long long seed;  // 0: one fixed order, copies as late as they may be
  const char* trace_file;   // where events go as JSON lines; null: nowhere
};

// 0 if the launch ran to its end; else `fault` holds "kind\ntext", and `calls` where the kernel
// was: offsets into its library, innermost first, then 0.
int dk_emulator_run(const struct DkLaunch* launch, char* fault, int fault_bytes,
                    unsigned long long* calls, int max_calls);

// The arithmetic alone, for tests: d[m][n] = fused chain over k of a[m][k], b[n][k], c[m][n].
void dk_emulator_wgmma_e4m3(int m, int n, int k, const unsigned char* a, const unsigned char* b,
                            const float* c, float* d);
void dk_emulator_k16(int is_f16, int m, int n, const unsigned short* a, const unsigned short* b,
                     const float* c, float* d);  // k = 16
// e4m3 of float32, float16 of e4m3, ex2.approx.ftz of float32.
void dk_emulator_e4m3_of(int count, const float* from, unsigned char* to);
void dk_emulator_f16_of_e4m3(int count, const unsigned char* from, unsigned short* to);
void dk_emulator_ex2(int count, const float* from, float* to);
void dk_emulator_mma_e4m3(const unsigned char* a, const unsigned char* b, const float* c, float* d);
}
