// What the emulator's ptx/ headers call: the machine as one emulated thread sees it. Every function
// takes the place in the kernel's text it was called from, for reports.
#pragma once

#include <bit>
#include <source_location>

#include "deep_kernels/contract/types.h"

namespace deep_kernels::emulator {

using At = std::source_location;

// The thread that runs right now; thread_index() and its kin read it without a call.
struct Identity {
  i32 thread;  // in its block
  i32 block;
  i32 num_blocks;
  i32 rank;  // of its block in the cluster
  i64 time;  // cycles of the timeline, see trace.h
};
extern Identity identity;
// What an arithmetic instruction takes when warps share a scheduler.
inline constexpr i64 kAluCycles = 2;

// What a thread's accumulators hold while a wgmma is in flight: a NaN whose payload no instruction
// makes, so that whoever meets it knows what happened.
inline constexpr u32 kPoison = 0x7fe5dead;
void meet_poison(At at);
inline void check_poison(float value, At at) {
  if (std::bit_cast<u32>(value) == kPoison) [[unlikely]]
    meet_poison(at);
}

void set_role(const char* name);

// --- memory
// --------------------------------------------------------------------------------------------

void* dynamic_smem(u32 bytes, At at);
u32 smem_addr(const void* pointer, At at);
void load_shared(void* to, u32 addr, u32 bytes, At at);
void store_shared(u32 addr, const void* from, u32 bytes, At at);
void load_global(void* to, const void* address, u32 bytes, At at);
void load_global_written(void* to, const void* address, u32 bytes, At at);
void store_global(void* address, const void* from, u32 bytes, At at);

// --- converged: all 32 lanes of a warp meet at one place in the text
// ------------------------------------

enum class Meeting : u8 {
  sync_warp,
  shuffle,
  shuffle_xor,
  shuffle_up,
  any,
  reduce_add,
  reduce_min,
  reduce_max,
  ldmatrix,
  ldmatrix_trans,
  mma,
  barrier_sync,
  barrier_arrive,
  registers,
  wgmma_fence,
  wgmma,
  wgmma_commit,
  wgmma_wait,
  cluster_arrive,
  cluster_wait,
};
// `value` is what the lane brings, `parameter` the lane it asks for or the like; returns what the
// lane gets.
u64 meet(Meeting what, u64 value, i64 parameter, At at);

struct LdmatrixOperands {
  u32* fragment;
  u32 addr;
};
enum class MmaType : u8 { e4m3, f16, bf16 };  // 32 or 16 of k: rows of 32 bytes
struct MmaOperands {
  float* d;
  const u32* a;
  const u32* b;
};
void ldmatrix(u32* fragment, i32 count, bool transposed, u32 addr, At at);
void mma_m16n8(MmaType type, float* d, const u32* a, const u32* b, At at);

void sync_threads(At at);
void barrier_sync(u32 id, u32 num_threads, At at);
void barrier_arrive(u32 id, u32 num_threads, At at);
void set_max_registers(i32 registers, bool up, At at);

// --- asynchronous copies
// --------------------------------------------------------------------------------

void cp_async(u32 smem, const void* global, u32 size, u32 bytes, At at);
void cp_async_commit_group(At at);
void cp_async_wait_group(i32 pending, At at);

void mbarrier_init(u32 barrier, u32 arrivals, At at);
void mbarrier_arrive(u32 barrier, u32 expected_bytes, At at);
void mbarrier_wait(u32 barrier, u32 parity, At at);
void fence_mbarrier_init(At at);
void fence_proxy_async(At at);

void prefetch_map(const MapDescription& map, bool is_parameter, At at);
// `mask`: ranks of the blocks that the box goes to, 0 for the own one alone.
void tma_load(u32 smem, const MapDescription& map, bool is_parameter, u32 barrier, i32 rank,
              const i32* coordinates, u32 mask, At at);
void bulk_load(u32 smem, const void* from, u32 bytes, u32 barrier, At at);
void grid_dependency_wait(At at);

// --- clusters
// -------------------------------------------------------------------------------------------

u32 peer_smem(u32 smem, i32 rank, At at);
void mbarrier_arrive_peer(u32 barrier, At at);
void check_multicast(u32 mask, At at);
void store_async(u32 smem, const u32* words, i32 count, u32 barrier, At at);
void cluster_arrive(bool relaxed, At at);
void cluster_wait(At at);

// --- wgmma
// -------------------------------------------------------------------------------------------------

enum class WgmmaType : u8 { e4m3, bf16, f16 };  // 32 or 16 of k: rows of 32 bytes
struct WgmmaOperands {
  float* d;
  u64 a;
  u64 b;
  const u32* fragment;  // a in registers, 4 of each lane; null: in shared memory
  i32 n;
  bool accumulate;
  WgmmaType type = WgmmaType::e4m3;
  bool b_mn_major = false;
  i32 sign = 1;  // -1: of e4m3, a is negated
};
void wgmma_e4m3(float* d, u64 a, u64 b, i32 n, bool accumulate, At at);
void wgmma_e4m3(float* d, const u32* a, i32 sign, u64 b, i32 n, bool accumulate, At at);
// Of 16-bit elements; with a in registers b is MN-major.
void wgmma_k16(WgmmaType type, float* d, u64 a, u64 b, i32 n, bool accumulate, At at);
void wgmma_k16(WgmmaType type, float* d, const u32* a, u64 b, i32 n, bool accumulate, At at);
void wgmma_wait_group(i32 pending, At at);
void wgmma_ready(const float* d, i32 count, At at);

}  // namespace deep_kernels::emulator
