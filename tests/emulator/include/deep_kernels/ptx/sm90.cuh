// The emulator's ptx/sm90.cuh: Hopper's instructions, done by a host program.
#pragma once

#include "deep_kernels/ptx/base.cuh"

namespace deep_kernels::ptx {

// Here a tensor map is its plain description. It counts how often it was copied: the instructions
// take parameters of the kernel alone, which are copies of what the host has given.
struct alignas(64) TensorMap {
  MapDescription description;
  u8 copies;

  TensorMap() = default;
  TensorMap(const TensorMap& other)
      : description(other.description), copies(static_cast<u8>(other.copies + 1)) {}
  bool is_parameter() const { return copies == 1; }
};
static_assert(sizeof(TensorMap) == 128);

// --- mbarrier -----------------------------------------------------------------------------------

inline void mbarrier_init(u32 barrier, u32 arrivals, At at = At::current()) {
  emulator::mbarrier_init(barrier, arrivals, at);
}
inline void fence_mbarrier_init(At at = At::current()) { emulator::fence_mbarrier_init(at); }
inline void mbarrier_arrive(u32 barrier, At at = At::current()) {
  emulator::mbarrier_arrive(barrier, 0, at);
}
inline void mbarrier_arrive_expect_tx(u32 barrier, u32 bytes, At at = At::current()) {
  emulator::mbarrier_arrive(barrier, bytes, at);
}
inline void mbarrier_wait(u32 barrier, u32 parity, At at = At::current()) {
  emulator::mbarrier_wait(barrier, parity, at);
}
inline void fence_proxy_async(At at = At::current()) { emulator::fence_proxy_async(at); }

// --- TMA ----------------------------------------------------------------------------------------

inline void prefetch_tensor_map(const TensorMap& map, At at = At::current()) {
  emulator::prefetch_map(map.description, map.is_parameter(), at);
}
inline void tma_load_1d(u32 smem, const TensorMap& map, u32 barrier, i32 x, At at = At::current()) {
  const i32 coordinates[] = {x};
  emulator::tma_load(smem, map.description, map.is_parameter(), barrier, 1, coordinates, 0, at);
}
inline void tma_load_2d(u32 smem, const TensorMap& map, u32 barrier, i32 x, i32 y,
                        At at = At::current()) {
  const i32 coordinates[] = {x, y};
  emulator::tma_load(smem, map.description, map.is_parameter(), barrier, 2, coordinates, 0, at);
}
inline void tma_load_3d(u32 smem, const TensorMap& map, u32 barrier, i32 x, i32 y, i32 z,
                        At at = At::current()) {
  const i32 coordinates[] = {x, y, z};
  emulator::tma_load(smem, map.description, map.is_parameter(), barrier, 3, coordinates, 0, at);
}

inline void tma_load_4d(u32 smem, const TensorMap& map, u32 barrier, i32 x, i32 y, i32 z, i32 w,
                        At at = At::current()) {
  const i32 coordinates[] = {x, y, z, w};
  emulator::tma_load(smem, map.description, map.is_parameter(), barrier, 4, coordinates, 0, at);
}
inline void tma_load_5d(u32 smem, const TensorMap& map, u32 barrier, i32 x, i32 y, i32 z, i32 w,
                        i32 v, At at = At::current()) {
  const i32 coordinates[] = {x, y, z, w, v};
  emulator::tma_load(smem, map.description, map.is_parameter(), barrier, 5, coordinates, 0, at);
}

// There is no cache to steer.
inline u64 evict_first_policy() { return 0; }
inline void tma_load_3d(u32 smem, const TensorMap& map, u32 barrier, i32 x, i32 y, i32 z, u64,
                        At at = At::current()) {
  tma_load_3d(smem, map, barrier, x, y, z, at);
}
inline void bulk_load(u32 smem, const void* global, u32 bytes, u32 barrier, u64,
                      At at = At::current()) {
  emulator::bulk_load(smem, global, bytes, barrier, at);
}

// --- clusters -----------------------------------------------------------------------------------

inline i32 cluster_rank() { return emulator::identity.rank; }
inline u32 peer_smem(u32 smem, i32 rank, At at = At::current()) {
  return emulator::peer_smem(smem, rank, at);
}
inline void mbarrier_arrive_peer(u32 peer_barrier, At at = At::current()) {
  emulator::mbarrier_arrive_peer(peer_barrier, at);
}
inline void tma_load_2d_multicast(u32 smem, const TensorMap& map, u32 barrier, i32 x, i32 y,
                                  u16 mask, At at = At::current()) {
  const i32 coordinates[] = {x, y};
  emulator::check_multicast(mask, at);
  emulator::tma_load(smem, map.description, map.is_parameter(), barrier, 2, coordinates, mask, at);
}
inline void tma_load_5d_multicast(u32 smem, const TensorMap& map, u32 barrier, i32 x, i32 y, i32 z,
                                  i32 w, i32 v, u16 mask, At at = At::current()) {
  const i32 coordinates[] = {x, y, z, w, v};
  emulator::check_multicast(mask, at);
  emulator::tma_load(smem, map.description, map.is_parameter(), barrier, 5, coordinates, mask, at);
}
inline void store_async(u32 peer_addr, u32 a, u32 peer_barrier, At at = At::current()) {
  emulator::store_async(peer_addr, &a, 1, peer_barrier, at);
}
inline void store_async_x2(u32 peer_addr, u32 a, u32 b, u32 peer_barrier, At at = At::current()) {
  const u32 words[] = {a, b};
  emulator::store_async(peer_addr, words, 2, peer_barrier, at);
}
inline void store_async_x4(u32 peer_addr, u32 a, u32 b, u32 c, u32 d, u32 peer_barrier,
                           At at = At::current()) {
  const u32 words[] = {a, b, c, d};
  emulator::store_async(peer_addr, words, 4, peer_barrier, at);
}
inline void cluster_arrive_relaxed(At at = At::current()) { emulator::cluster_arrive(true, at); }
inline void cluster_arrive(At at = At::current()) { emulator::cluster_arrive(false, at); }
inline void cluster_wait(At at = At::current()) { emulator::cluster_wait(at); }

// --- wgmma --------------------------------------------------------------------------------------

inline void wgmma_fence(At at = At::current()) { emulator::meet(Meeting::wgmma_fence, 0, 0, at); }
inline void wgmma_commit_group(At at = At::current()) {
  emulator::meet(Meeting::wgmma_commit, 0, 0, at);
}
template <i32 kPending, i32 kCount>
void wgmma_wait_group(float (&d)[kCount], At at = At::current()) {
  emulator::wgmma_wait_group(kPending, at);
  emulator::wgmma_ready(d, kCount, at);
}
inline void wgmma_m64n32k32_e4m3(float (&d)[16], u64 a, u64 b, bool accumulate,
                                 At at = At::current()) {
  emulator::wgmma_e4m3(d, a, b, 32, accumulate, at);
}
inline void wgmma_m64n64k32_e4m3(float (&d)[32], u64 a, u64 b, bool accumulate,
                                 At at = At::current()) {
  emulator::wgmma_e4m3(d, a, b, 64, accumulate, at);
}
template <i32 kPending>
void wgmma_wait_group(float (&d)[68], At at = At::current()) {
  emulator::wgmma_wait_group(kPending, at);
  emulator::wgmma_ready(d, 68, at);
}
inline void wgmma_m64n136k32_e4m3(float (&d)[68], u64 a, u64 b, bool accumulate,
                                  At at = At::current()) {
  emulator::wgmma_e4m3(d, a, b, 136, accumulate, at);
}
inline void wgmma_m64n128k32_e4m3(float (&d)[64], u64 a, u64 b, bool accumulate,
                                  At at = At::current()) {
  emulator::wgmma_e4m3(d, a, b, 128, accumulate, at);
}
template <i32 kSign>
void wgmma_m64n32k32_e4m3(float (&d)[16], const u32 (&a)[4], u64 b, bool accumulate,
                          At at = At::current()) {
  emulator::wgmma_e4m3(d, a, kSign, b, 32, accumulate, at);
}
template <i32 kSign>
void wgmma_m64n64k32_e4m3(float (&d)[32], const u32 (&a)[4], u64 b, bool accumulate,
                          At at = At::current()) {
  emulator::wgmma_e4m3(d, a, kSign, b, 64, accumulate, at);
}
template <i32 kSign>
void wgmma_m64n128k32_e4m3(float (&d)[64], const u32 (&a)[4], u64 b, bool accumulate,
                           At at = At::current()) {
  emulator::wgmma_e4m3(d, a, kSign, b, 128, accumulate, at);
}
inline void wgmma_m64n64k16_bf16(float (&d)[32], u64 a, u64 b, bool accumulate,
                                 At at = At::current()) {
  emulator::wgmma_k16(WgmmaType::bf16, d, a, b, 64, accumulate, at);
}
inline void wgmma_m64n64k16_f16(float (&d)[32], u64 a, u64 b, bool accumulate,
                                At at = At::current()) {
  emulator::wgmma_k16(WgmmaType::f16, d, a, b, 64, accumulate, at);
}
inline void wgmma_m64n80k16_bf16(float (&d)[40], u64 a, u64 b, bool accumulate,
                                 At at = At::current()) {
  emulator::wgmma_k16(WgmmaType::bf16, d, a, b, 80, accumulate, at);
}
inline void wgmma_m64n80k16_f16(float (&d)[40], u64 a, u64 b, bool accumulate,
                                At at = At::current()) {
  emulator::wgmma_k16(WgmmaType::f16, d, a, b, 80, accumulate, at);
}
inline void wgmma_m64n128k16_bf16(float (&d)[64], u64 a, u64 b, bool accumulate,
                                  At at = At::current()) {
  emulator::wgmma_k16(WgmmaType::bf16, d, a, b, 128, accumulate, at);
}
inline void wgmma_m64n128k16_f16(float (&d)[64], u64 a, u64 b, bool accumulate,
                                 At at = At::current()) {
  emulator::wgmma_k16(WgmmaType::f16, d, a, b, 128, accumulate, at);
}
inline void wgmma_m64n64k16_bf16(float (&d)[32], const u32 (&a)[4], u64 b, bool accumulate,
                                 At at = At::current()) {
  emulator::wgmma_k16(WgmmaType::bf16, d, a, b, 64, accumulate, at);
}
inline void wgmma_m64n64k16_f16(float (&d)[32], const u32 (&a)[4], u64 b, bool accumulate,
                                At at = At::current()) {
  emulator::wgmma_k16(WgmmaType::f16, d, a, b, 64, accumulate, at);
}
inline void wgmma_m64n128k16_bf16(float (&d)[64], const u32 (&a)[4], u64 b, bool accumulate,
                                  At at = At::current()) {
  emulator::wgmma_k16(WgmmaType::bf16, d, a, b, 128, accumulate, at);
}
inline void wgmma_m64n128k16_f16(float (&d)[64], const u32 (&a)[4], u64 b, bool accumulate,
                                 At at = At::current()) {
  emulator::wgmma_k16(WgmmaType::f16, d, a, b, 128, accumulate, at);
}
inline void wgmma_m64n256k16_bf16(float (&d)[128], const u32 (&a)[4], u64 b, bool accumulate,
                                  At at = At::current()) {
  emulator::wgmma_k16(WgmmaType::bf16, d, a, b, 256, accumulate, at);
}
inline void wgmma_m64n256k16_f16(float (&d)[128], const u32 (&a)[4], u64 b, bool accumulate,
                                 At at = At::current()) {
  emulator::wgmma_k16(WgmmaType::f16, d, a, b, 256, accumulate, at);
}

// --- dependent launch, registers ----------------------------------------------------------------

inline void grid_dependency_wait(At at = At::current()) { emulator::grid_dependency_wait(at); }
inline void grid_dependency_launch() {}  // a launch at a time

template <i32 kRegisters>
void set_max_registers_up(At at = At::current()) {
  emulator::set_max_registers(kRegisters, true, at);
}
template <i32 kRegisters>
void set_max_registers_down(At at = At::current()) {
  emulator::set_max_registers(kRegisters, false, at);
}

}  // namespace deep_kernels::ptx
