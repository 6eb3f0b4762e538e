// ldmatrix and mma.sync: operands spread over the lanes of a warp. Registers of a warpgroup.
#include "report.h"
#include "shared.h"
#include "tensor_core.h"

namespace deep_kernels::emulator {

void ldmatrix(u32* fragment, i32 count, bool transposed, u32 addr, At at) {
  LdmatrixOperands operands{fragment, addr};
  meet(transposed ? Meeting::ldmatrix_trans : Meeting::ldmatrix, reinterpret_cast<u64>(&operands),
       count, at);
}

void run_ldmatrix(Warp& warp, i32 first_thread, i32 count, Place at) {
  SharedMemory& memory = own_memory();
  const bool transposed = warp.meeting == Meeting::ldmatrix_trans;
  for (i32 matrix = 0; matrix < count; ++matrix) {
    u16 element[8][8];
    for (i32 row = 0; row < 8; ++row) {
      const i32 giver = 8 * matrix + row;
      const u32 addr = reinterpret_cast<const LdmatrixOperands*>(warp.value[giver])->addr;
      memory.check_range(addr, 16, 16, "ldmatrix", at);
      memory.read(addr, 16, first_thread + giver, at);
      std::memcpy(element[row], memory.data(addr), 16);
    }
    for (i32 lane = 0; lane < kWarp; ++lane) {
      const i32 line = lane / 4;
      const i32 first = lane % 4 * 2;
      const u16 low = transposed ? element[first][line] : element[line][first];
      const u16 high = transposed ? element[first + 1][line] : element[line][first + 1];
      reinterpret_cast<const LdmatrixOperands*>(warp.value[lane])->fragment[matrix] =
          low | static_cast<u32>(high) << 16;
    }
  }
}

void mma_m16n8(MmaType type, float* d, const u32* a, const u32* b, At at) {
  for (i32 i = 0; i < 4; ++i) check_poison(d[i], at);
  MmaOperands operands{d, a, b};
  meet(Meeting::mma, reinterpret_cast<u64>(&operands), static_cast<i64>(type), at);
}

// Fragments of m16n8k32 of bytes and of m16n8k16 of 16-bit elements are the same bytes.
// Source: PTX ISA 8.7, sections 9.7.14.5.8 and 9.7.14.5.11.
void run_mma(Warp& warp, Place) {
  u8 a[16 * 32];
  u8 b[8 * 32];
  float c[16 * 8];
  const auto operands = [&](i32 lane) -> const MmaOperands& {
    return *reinterpret_cast<const MmaOperands*>(warp.value[lane]);
  };
  for (i32 lane = 0; lane < kWarp; ++lane) {
    const i32 group = lane / 4;
    const i32 in_group = lane % 4;
    for (i32 i = 0; i < 4; ++i) {
      const i32 row = group + (i % 2) * 8;
      std::memcpy(a + row * 32 + i / 2 * 16 + in_group * 4, &operands(lane).a[i], 4);
      c[(group + i / 2 * 8) * 8 + in_group * 2 + i % 2] = operands(lane).d[i];
    }
    for (i32 i = 0; i < 2; ++i)
      std::memcpy(b + group * 32 + i * 16 + in_group * 4, &operands(lane).b[i], 4);
  }
  const auto type = static_cast<MmaType>(warp.parameter[0]);
  if (type == MmaType::e4m3) {
    tensor_core::mma_m16n8k32_e4m3(a, b, c);
  } else {
    u16 wide_a[16 * 16];
    u16 wide_b[8 * 16];
    std::memcpy(wide_a, a, sizeof(a));
    std::memcpy(wide_b, b, sizeof(b));
    const auto half = type == MmaType::f16 ? tensor_core::Half::f16 : tensor_core::Half::bf16;
    tensor_core::step_k16(half, 16, 8, wide_a, wide_b, c);
  }
  for (i32 lane = 0; lane < kWarp; ++lane)
    for (i32 i = 0; i < 4; ++i)
      operands(lane).d[i] = c[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2];
}

// --- setmaxnreg
// ----------------------------------------------------------------------------------------

void set_registers(i32 index, i32 registers, bool up, Place at) {
  Warp& warp = machine.warps[index];
  if (registers % 8 != 0 || registers < 24 || registers > 256)
    fail("registers", format("setmaxnreg %d: must be a multiple of 8 from 24 to 256", registers),
         at);
  if (up ? registers < warp.registers : registers > warp.registers)
    fail("registers",
         format("setmaxnreg.%s to %d from %d", up ? "inc" : "dec", registers, warp.registers), at);
  for (i32 w = machine.warpgroup_begin(index); w < machine.warpgroup_end(index); ++w) {
    const Warp& other = machine.warps[w];
    if (other.registers_at != 0 && warp.registers_at == 0 && other.registers_at != at)
      fail("registers",
           format("setmaxnreg of warp %d is not the one of warp %d of its warpgroup",
                  index % machine.block_warps, w % machine.block_warps) +
               cite("that is at", other.registers_at),
           at);
  }
  warp.registers_at = at;
  warp.needs_registers = up;
  if (up) return;
  machine.block_of(index).free_registers += (warp.registers - registers) * kWarp;
  warp.registers = registers;
  for (Thread& thread : machine.threads)
    if (thread.waits == Wait::registers) wake(thread.index);
}

void set_max_registers(i32 registers, bool up, At at) {
  const Place place = place_of(at);
  meet(Meeting::registers, up ? 1 : 0, registers, at);
  Warp& warp = machine.warps[self().warp()];
  while (warp.needs_registers) {
    const i32 wanted = (registers - warp.registers) * kWarp;
    if (wanted <= own_block().free_registers) {
      own_block().free_registers -= wanted;
      warp.registers = registers;
      warp.needs_registers = false;
    } else {
      wait_for(Wait::registers, place);
    }
  }
  // Lanes that still wait find that one of them has got it.
  for (i32 lane = 0; lane < kWarp; ++lane) {
    Thread& other = machine.threads[self().warp() * kWarp + lane];
    if (other.waits == Wait::registers) wake(other.index);
  }
}

}  // namespace deep_kernels::emulator
