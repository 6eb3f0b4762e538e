// Hopper's instructions, one per function: mbarrier, TMA, clusters, wgmma, setmaxnreg. Needs target
// sm_90a. Source: PTX ISA 8.7, sections 9.7.9.25 and 9.7.9.27 (bulk copies), 9.7.13.15 (mbarrier),
// 9.7.15 (wgmma), 9.7.19.5 (setmaxnreg), 9.7.13.13 (griddepcontrol); for clusters 9.7.9.12
// (st.async), 9.7.9.23 (mapa), 9.7.13.3 (barrier.cluster), 10.16 (%cluster_ctarank).
#pragma once

#include "deep_kernels/ptx/base.cuh"

namespace deep_kernels::ptx {

// A tensor map as the driver encodes it; a kernel parameter, never in local memory.
struct alignas(64) TensorMap {
  u8 bytes[128];
};

// --- mbarrier: 8 bytes of shared memory ----------------------------------------------------------

DK_DEVICE void mbarrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Makes initialised barriers visible to the async proxy.
DK_DEVICE void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// Makes this thread's ordinary accesses to shared memory, and those it knows of, visible to what
// TMA and wgmma do after it.
DK_DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
DK_DEVICE void mbarrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// One arrival, and `bytes` more to come by async copies before the phase completes.
DK_DEVICE void mbarrier_arrive_expect_tx(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
// Waits for the phase of this parity to complete.
DK_DEVICE void mbarrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n"
      ".reg .pred complete;\n"
      "WAIT:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 complete, [%0], %1;\n"
      "@complete bra DONE;\n"
      "bra WAIT;\n"
      "DONE:\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// --- TMA: global to shared, completion counted in bytes on an mbarrier ---------------------------

DK_DEVICE void prefetch_tensor_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}
DK_DEVICE void tma_load_1d(u32 smem, const TensorMap& map, u32 barrier, i32 x) {
  asm volatile(
      "cp.async.bulk.tensor.1d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, "
      "{%3}], "
      "[%2];" ::"r"(smem),
      "l"(&map), "r"(barrier), "r"(x)
      : "memory");
}
DK_DEVICE void tma_load_2d(u32 smem, const TensorMap& map, u32 barrier, i32 x, i32 y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, "
      "%4}], [%2];" ::"r"(smem),
      "l"(&map), "r"(barrier), "r"(x), "r"(y)
      : "memory");
}
DK_DEVICE void tma_load_3d(u32 smem, const TensorMap& map, u32 barrier, i32 x, i32 y, i32 z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, "
      "%4, %5}], [%2];" ::"r"(smem),
      "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z)
      : "memory");
}

DK_DEVICE void tma_load_4d(u32 smem, const TensorMap& map, u32 barrier, i32 x, i32 y, i32 z,
                           i32 w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, "
      "%4, %5, %6}], [%2];" ::"r"(smem),
      "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}

DK_DEVICE void tma_load_5d(u32 smem, const TensorMap& map, u32 barrier, i32 x, i32 y, i32 z, i32 w,
                           i32 v) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, "
      "%4, %5, %6, %7}], [%2];" ::"r"(smem),
      "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w), "r"(v)
      : "memory");
}

// What a copy leaves in the L2 cache is the first to go.
DK_DEVICE u64 evict_first_policy() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
DK_DEVICE void tma_load_3d(u32 smem, const TensorMap& map, u32 barrier, i32 x, i32 y, i32 z,
                           u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(smem),
      "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z), "l"(policy)
      : "memory");
}
// Plain bytes; addresses and count are multiples of 16.
DK_DEVICE void bulk_load(u32 smem, const void* global, u32 bytes, u32 barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1], "
      "%2, [%3], %4;" ::"r"(smem),
      "l"(global), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

// --- clusters: blocks that reach each other's shared memory
// ---------------------------------------

// Rank of the block in its cluster. Blocks of a cluster of n have the indices n * c to n * c + n -
// 1 and their ranks in this order.
DK_DEVICE i32 cluster_rank() {
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<i32>(rank);
}
// Where the block of this rank has what this block has at `smem`; good for the functions of this
// section alone. The rank stands in the bits from 24 on.
DK_DEVICE u32 peer_smem(u32 smem, i32 rank) {
  u32 addr;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(addr) : "r"(smem), "r"(rank));
  return addr;
}
// One arrival at an mbarrier of another block. Whoever waits for it may overwrite what this thread
// has read, also by the wgmma it has waited for. It releases no stores to the other block: that
// would take the scope of the cluster, and costs a fence of the whole memory.
DK_DEVICE void mbarrier_arrive_peer(u32 peer_barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(peer_barrier) : "memory");
}
// The box goes to the same place of every block whose rank's bit is set in `mask`, and each of them
// counts its bytes on its own mbarrier, at the same place again.
DK_DEVICE void tma_load_2d_multicast(u32 smem, const TensorMap& map, u32 barrier, i32 x, i32 y,
                                     u16 mask) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(smem),
      "l"(&map), "r"(barrier), "r"(x), "r"(y), "h"(mask)
      : "memory");
}
DK_DEVICE void tma_load_5d_multicast(u32 smem, const TensorMap& map, u32 barrier, i32 x, i32 y,
                                     i32 z, i32 w, i32 v, u16 mask) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(smem),
      "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w), "r"(v), "h"(mask)
      : "memory");
}
// Stores to another block, counted in bytes on an mbarrier of that block, which whoever reads them
// waits for. Both in one block; addresses are multiples of the 4, 8 or 16 bytes. Of the generic
// proxy; undefined where the cluster is one block.
DK_DEVICE void store_async(u32 peer_addr, u32 a, u32 peer_barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(peer_addr),
      "r"(a), "r"(peer_barrier)
      : "memory");
}
DK_DEVICE void store_async_x2(u32 peer_addr, u32 a, u32 b, u32 peer_barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(
          peer_addr),
      "r"(a), "r"(b), "r"(peer_barrier)
      : "memory");
}
DK_DEVICE void store_async_x4(u32 peer_addr, u32 a, u32 b, u32 c, u32 d, u32 peer_barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(peer_addr),
      "r"(a), "r"(b), "r"(c), "r"(d), "r"(peer_barrier)
      : "memory");
}
// The barrier of all threads of the cluster, in two halves that every thread goes through by turns.
// An exited thread counts as arrived. A relaxed arrival says that the thread is there, as it has to
// be before others reach its block and when they have done with it; of its work it releases
// mbarriers alone, initialised before fence_mbarrier_init().
DK_DEVICE void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
DK_DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.aligned;" ::: "memory"); }
DK_DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

// --- wgmma: all 128 threads of a warpgroup -------------------------------------------------------

// Orders register accesses before the first wgmma of a group.
DK_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DK_DEVICE void wgmma_commit_group() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until at most kPending groups are in flight. The accumulators pass through, so that the
// compiler moves no read of them above the wait that makes them valid.
template <i32 kPending>
DK_DEVICE void wgmma_wait_group(float (&d)[64]) {
  asm volatile("wgmma.wait_group.sync.aligned %64;"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
                 "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]),
                 "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]),
                 "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
                 "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]),
                 "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]),
                 "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]),
                 "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
                 "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]),
                 "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]),
                 "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
               : "n"(kPending)
               : "memory");
}
template <i32 kPending>
DK_DEVICE void wgmma_wait_group(float (&d)[68]) {
  asm volatile(
      "wgmma.wait_group.sync.aligned %68;"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
        "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),
        "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]),
        "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]),
        "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
        "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]),
        "+f"(d[63]), "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67])
      : "n"(kPending)
      : "memory");
}
template <i32 kPending>
DK_DEVICE void wgmma_wait_group(float (&d)[16]) {
  asm volatile("wgmma.wait_group.sync.aligned %16;"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
                 "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]),
                 "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
               : "n"(kPending)
               : "memory");
}
template <i32 kPending>
DK_DEVICE void wgmma_wait_group(float (&d)[32]) {
  asm volatile("wgmma.wait_group.sync.aligned %32;"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
                 "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]),
                 "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]),
                 "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
                 "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]),
                 "+f"(d[31])
               : "n"(kPending)
               : "memory");
}
// The same for any number of accumulators: behind the wait each of them passes through nothing.
template <i32 kPending, i32 kCount>
DK_DEVICE void wgmma_wait_group(float (&d)[kCount]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
#pragma unroll
  for (i32 i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
// d = a * b + (accumulate ? d : 0): a [64, 32], b [n, 32] e4m3, both K-major in shared memory.
DK_DEVICE void wgmma_m64n32k32_e4m3(float (&d)[16], u64 a, u64 b, bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred accumulate;\n"
      "setp.ne.b32 accumulate, %18, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
      "}, %16, %17, accumulate, 1, 1;\n"
      "}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
        "+f"(d[14]), "+f"(d[15])
      : "l"(a), "l"(b), "r"(static_cast<i32>(accumulate)));
}
DK_DEVICE void wgmma_m64n64k32_e4m3(float (&d)[32], u64 a, u64 b, bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred accumulate;\n"
      "setp.ne.b32 accumulate, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, %32, %33, accumulate, 1, 1;\n"
      "}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
        "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),
        "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "l"(a), "l"(b), "r"(static_cast<i32>(accumulate)));
}
DK_DEVICE void wgmma_m64n128k32_e4m3(float (&d)[64], u64 a, u64 b, bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred accumulate;\n"
      "setp.ne.b32 accumulate, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "
      "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, "
      "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, "
      "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, %64, %65, accumulate, 1, 1;\n"
      "}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
        "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),
        "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]),
        "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]),
        "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
        "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]),
        "+f"(d[63])
      : "l"(a), "l"(b), "r"(static_cast<i32>(accumulate)));
}
// d = a * b + (accumulate ? d : 0): a [64, 32], b [136, 32] e4m3, both K-major in shared memory.
DK_DEVICE void wgmma_m64n136k32_e4m3(float (&d)[68], u64 a, u64 b, bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred accumulate;\n"
      "setp.ne.b32 accumulate, %70, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n136k32.f32.e4m3.e4m3 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "
      "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, "
      "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, "
      "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, "
      "%66, %67"
      "}, %68, %69, accumulate, 1, 1;\n"
      "}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
        "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),
        "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]),
        "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]),
        "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
        "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]),
        "+f"(d[63]), "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67])
      : "l"(a), "l"(b), "r"(static_cast<i32>(accumulate)));
}
// The same with a in registers: lane 4g + t of warp w brings, for rows 16w + g (a[0], a[2]) and
// 16w + g + 8 (a[1], a[3]), the bytes of k = 4t to 4t + 3 and, in a[2] and a[3], those 16 further.
// kSign: 1, or -1 for -a.
template <i32 kSign>
DK_DEVICE void wgmma_m64n32k32_e4m3(float (&d)[16], const u32 (&a)[4], u64 b, bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred accumulate;\n"
      "setp.ne.b32 accumulate, %21, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
      "}, {%16, %17, %18, %19}, %20, accumulate, %22, 1;\n"
      "}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
        "+f"(d[14]), "+f"(d[15])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<i32>(accumulate)),
        "n"(kSign));
}
template <i32 kSign>
DK_DEVICE void wgmma_m64n64k32_e4m3(float (&d)[32], const u32 (&a)[4], u64 b, bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred accumulate;\n"
      "setp.ne.b32 accumulate, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, {%32, %33, %34, %35}, %36, accumulate, %38, 1;\n"
      "}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
        "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),
        "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<i32>(accumulate)),
        "n"(kSign));
}
template <i32 kSign>
DK_DEVICE void wgmma_m64n128k32_e4m3(float (&d)[64], const u32 (&a)[4], u64 b, bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred accumulate;\n"
      "setp.ne.b32 accumulate, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, {%64, %65, %66, %67}, %68, accumulate, %70, 1;\n"
      "}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
        "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),
        "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]),
        "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]),
        "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
        "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]),
        "+f"(d[63])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<i32>(accumulate)),
        "n"(kSign));
}

// wgmma of 16-bit operands, written with macros: DK_PLACES_n names the operands 0 to n - 1 in the
// text, DK_FLOATS_n(d) binds the floats of d to them. `type` is that of a and of b.
#define DK_PLACES_TEN(t) \
  "%" t "0, %" t "1, %" t "2, %" t "3, %" t "4, %" t "5, %" t "6, %" t "7, %" t "8, %" t "9"
#define DK_PLACES_30 DK_PLACES_TEN("") ", " DK_PLACES_TEN("1") ", " DK_PLACES_TEN("2")
#define DK_PLACES_60 \
  DK_PLACES_30 ", " DK_PLACES_TEN("3") ", " DK_PLACES_TEN("4") ", " DK_PLACES_TEN("5")
#define DK_PLACES_90 \
  DK_PLACES_60 ", " DK_PLACES_TEN("6") ", " DK_PLACES_TEN("7") ", " DK_PLACES_TEN("8")
#define DK_PLACES_120 \
  DK_PLACES_90 ", " DK_PLACES_TEN("9") ", " DK_PLACES_TEN("10") ", " DK_PLACES_TEN("11")
#define DK_PLACES_32 DK_PLACES_30 ", %30, %31"
#define DK_PLACES_40 DK_PLACES_30 ", " DK_PLACES_TEN("3")
#define DK_PLACES_64 DK_PLACES_60 ", %60, %61, %62, %63"
#define DK_PLACES_128 DK_PLACES_120 ", %120, %121, %122, %123, %124, %125, %126, %127"

#define DK_FLOATS_AT(d, i)                                                                    \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define DK_FLOATS_32(d) \
  DK_FLOATS_AT(d, 0), DK_FLOATS_AT(d, 8), DK_FLOATS_AT(d, 16), DK_FLOATS_AT(d, 24)
#define DK_FLOATS_40(d) DK_FLOATS_32(d), DK_FLOATS_AT(d, 32)
#define DK_FLOATS_64(d) \
  DK_FLOATS_40(d), DK_FLOATS_AT(d, 40), DK_FLOATS_AT(d, 48), DK_FLOATS_AT(d, 56)
#define DK_FLOATS_96(d)                                                           \
  DK_FLOATS_64(d), DK_FLOATS_AT(d, 64), DK_FLOATS_AT(d, 72), DK_FLOATS_AT(d, 80), \
      DK_FLOATS_AT(d, 88)
#define DK_FLOATS_128(d)                                                            \
  DK_FLOATS_96(d), DK_FLOATS_AT(d, 96), DK_FLOATS_AT(d, 104), DK_FLOATS_AT(d, 112), \
      DK_FLOATS_AT(d, 120)

// `operands` and `accumulate` are the places behind the accumulators', `transposed` says of each
// operand in shared memory whether it is MN-major.
#define DK_WGMMA_K16(shape, type, accumulators, operands, accumulate, transposed)              \
  "{\n"                                                                                        \
  ".reg .pred accumulate;\n"                                                                   \
  "setp.ne.b32 accumulate, " accumulate                                                        \
  ", 0;\n"                                                                                     \
  "wgmma.mma_async.sync.aligned." shape ".f32." type "." type " {" accumulators "}, " operands \
  ", accumulate, 1, 1, " transposed                                                            \
  ";\n"                                                                                        \
  "}"

// d = a * b + (accumulate ? d : 0): a [64, 16], b [n, 16], both K-major in shared memory.
DK_DEVICE void wgmma_m64n64k16_bf16(float (&d)[32], u64 a, u64 b, bool accumulate) {
  asm volatile(DK_WGMMA_K16("m64n64k16", "bf16", DK_PLACES_32, "%32, %33", "%34", "0, 0")
               : DK_FLOATS_32(d)
               : "l"(a), "l"(b), "r"(static_cast<i32>(accumulate)));
}
DK_DEVICE void wgmma_m64n64k16_f16(float (&d)[32], u64 a, u64 b, bool accumulate) {
  asm volatile(DK_WGMMA_K16("m64n64k16", "f16", DK_PLACES_32, "%32, %33", "%34", "0, 0")
               : DK_FLOATS_32(d)
               : "l"(a), "l"(b), "r"(static_cast<i32>(accumulate)));
}
DK_DEVICE void wgmma_m64n80k16_bf16(float (&d)[40], u64 a, u64 b, bool accumulate) {
  asm volatile(DK_WGMMA_K16("m64n80k16", "bf16", DK_PLACES_40, "%40, %41", "%42", "0, 0")
               : DK_FLOATS_40(d)
               : "l"(a), "l"(b), "r"(static_cast<i32>(accumulate)));
}
DK_DEVICE void wgmma_m64n80k16_f16(float (&d)[40], u64 a, u64 b, bool accumulate) {
  asm volatile(DK_WGMMA_K16("m64n80k16", "f16", DK_PLACES_40, "%40, %41", "%42", "0, 0")
               : DK_FLOATS_40(d)
               : "l"(a), "l"(b), "r"(static_cast<i32>(accumulate)));
}
DK_DEVICE void wgmma_m64n128k16_bf16(float (&d)[64], u64 a, u64 b, bool accumulate) {
  asm volatile(DK_WGMMA_K16("m64n128k16", "bf16", DK_PLACES_64, "%64, %65", "%66", "0, 0")
               : DK_FLOATS_64(d)
               : "l"(a), "l"(b), "r"(static_cast<i32>(accumulate)));
}
DK_DEVICE void wgmma_m64n128k16_f16(float (&d)[64], u64 a, u64 b, bool accumulate) {
  asm volatile(DK_WGMMA_K16("m64n128k16", "f16", DK_PLACES_64, "%64, %65", "%66", "0, 0")
               : DK_FLOATS_64(d)
               : "l"(a), "l"(b), "r"(static_cast<i32>(accumulate)));
}
// The same with a in registers and b [16, n] MN-major, k by k, in shared memory. Lane 4g + t of
// warp w brings, for rows 16w + g (a[0], a[2]) and 16w + g + 8 (a[1], a[3]), the elements of k = 2t
// and 2t + 1, the lower k in the lower half, and, in a[2] and a[3], those 8 further.
DK_DEVICE void wgmma_m64n64k16_bf16(float (&d)[32], const u32 (&a)[4], u64 b, bool accumulate) {
  asm volatile(
      DK_WGMMA_K16("m64n64k16", "bf16", DK_PLACES_32, "{%32, %33, %34, %35}, %36", "%37", "1")
      : DK_FLOATS_32(d)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<i32>(accumulate)));
}
DK_DEVICE void wgmma_m64n64k16_f16(float (&d)[32], const u32 (&a)[4], u64 b, bool accumulate) {
  asm volatile(
      DK_WGMMA_K16("m64n64k16", "f16", DK_PLACES_32, "{%32, %33, %34, %35}, %36", "%37", "1")
      : DK_FLOATS_32(d)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<i32>(accumulate)));
}
DK_DEVICE void wgmma_m64n128k16_bf16(float (&d)[64], const u32 (&a)[4], u64 b, bool accumulate) {
  asm volatile(
      DK_WGMMA_K16("m64n128k16", "bf16", DK_PLACES_64, "{%64, %65, %66, %67}, %68", "%69", "1")
      : DK_FLOATS_64(d)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<i32>(accumulate)));
}
DK_DEVICE void wgmma_m64n128k16_f16(float (&d)[64], const u32 (&a)[4], u64 b, bool accumulate) {
  asm volatile(
      DK_WGMMA_K16("m64n128k16", "f16", DK_PLACES_64, "{%64, %65, %66, %67}, %68", "%69", "1")
      : DK_FLOATS_64(d)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<i32>(accumulate)));
}
DK_DEVICE void wgmma_m64n256k16_bf16(float (&d)[128], const u32 (&a)[4], u64 b, bool accumulate) {
  asm volatile(DK_WGMMA_K16("m64n256k16", "bf16", DK_PLACES_128, "{%128, %129, %130, %131}, %132",
                            "%133", "1")
               : DK_FLOATS_128(d)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b),
                 "r"(static_cast<i32>(accumulate)));
}
DK_DEVICE void wgmma_m64n256k16_f16(float (&d)[128], const u32 (&a)[4], u64 b, bool accumulate) {
  asm volatile(DK_WGMMA_K16("m64n256k16", "f16", DK_PLACES_128, "{%128, %129, %130, %131}, %132",
                            "%133", "1")
               : DK_FLOATS_128(d)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b),
                 "r"(static_cast<i32>(accumulate)));
}

#undef DK_PLACES_TEN
#undef DK_PLACES_30
#undef DK_PLACES_60
#undef DK_PLACES_90
#undef DK_PLACES_120
#undef DK_PLACES_32
#undef DK_PLACES_40
#undef DK_PLACES_64
#undef DK_PLACES_128
#undef DK_FLOATS_AT
#undef DK_FLOATS_32
#undef DK_FLOATS_40
#undef DK_FLOATS_64
#undef DK_FLOATS_96
#undef DK_FLOATS_128
#undef DK_WGMMA_K16

// --- dependent launch ----------------------------------------------------------------------------

// Waits for the kernels ahead in the stream and their writes; returns at once unless this one was
// launched programmatically dependent.
DK_DEVICE void grid_dependency_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// From here on, as soon as all blocks have come so far, the next kernel of the stream may start if
// it is launched programmatically dependent. What it sees before its wait is not what this one
// does.
DK_DEVICE void grid_dependency_launch() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// --- registers of a warpgroup --------------------------------------------------------------------

template <i32 kRegisters>
DK_DEVICE void set_max_registers_up() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <i32 kRegisters>
DK_DEVICE void set_max_registers_down() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace deep_kernels::ptx
