#include "shared.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>

#include "report.h"

namespace deep_kernels::emulator {

std::vector<SharedMemory> memories;

void* SharedMemory::view() {
  static void* const view =
      mmap(nullptr, kViewBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (view == MAP_FAILED) std::abort();
  return view;
}

SharedMemory& peer_memory(u32 addr, u32 bytes, u32 align, const char* use, Place at) {
  const u32 rank = addr >> kRankShift;
  if (rank >= static_cast<u32>(machine.cluster))
    fail("bounds",
         format("%s at shared address 0x%x, which is of rank %u in a cluster of %d", use, addr,
                rank, machine.cluster),
         at);
  require_peer(static_cast<i32>(rank), use, at);
  memories[rank].check_range(addr, bytes, align, use, at);
  return memories[rank];
}

void SharedMemory::begin_block(i32 rank, u32 bytes) {
  rank_ = rank;
  base_ = smem_base(rank);
  first_warp_ = rank * machine.block_warps;
  bytes_ = bytes;
  const u32 room = align_up(bytes, 32u);
  // What a card's shared memory holds at the start is whatever ran there before.
  data_.assign(room, 0xcd);
  cells_.assign(room / 4, Cell{});
  pending_.assign(room / 16, 0);
  pending_at_.assign(room / 16, 0);
  read_clock_.assign(static_cast<std::size_t>(machine.block_warps) * (room / 32), 0);
  in_flight_.assign(read_clock_.size(), 0);
  stores_in_flight_ = 0;
  storing_at_.clear();
  read_at_.assign(room / 32, 0);
  tags_.assign(room / 16, Tag{});
  mbarriers_.assign(room / 8, -1);
  free_lists_.clear();
  for (std::size_t i = 0; i < reader_lists_.size(); ++i) free_lists_.push_back(static_cast<i32>(i));
}

void SharedMemory::check_range(u32 addr, u32 bytes, u32 align, const char* use, Place at) {
  const u32 rank = addr >> kRankShift;
  if (rank != static_cast<u32>(rank_) && rank < static_cast<u32>(machine.cluster))
    fail("bounds",
         format("%s at %s, which is memory of another block: it takes addresses of rank %d", use,
                smem_name(addr).c_str(), rank_),
         at);
  if (addr < base_ || addr + u64{bytes} > u64{base_} + bytes_)
    fail("bounds",
         format("%s of %u bytes at shared address 0x%x (smem%+lld): the block has %u bytes", use,
                bytes, addr, static_cast<long long>(addr) - base_, bytes_),
         at);
  if (addr % align != 0)
    fail("alignment",
         format("%s at %s: the address must be a multiple of %u", use, smem_name(addr).c_str(),
                align),
         at);
}

void SharedMemory::race(u32 addr, const char* mine, const char* theirs, Agent other, Place other_at,
                        Place at) {
  fail("race",
       format("%s shared memory at %s that %s %s: nothing orders the two", mine,
              smem_name(addr).c_str(), agent_name(other).c_str(), theirs) +
           cite("the other is at", other_at),
       at);
}

void SharedMemory::still_reading(u32 addr, i32 warp, const char* what, Place at) {
  fail("pending-async",
       format("%s shared memory at %s that %s still reads", what, smem_name(addr).c_str(),
              agent_name(machine.wgmma_agent(first_warp_ + warp)).c_str()) +
           cite("read by", read_at_[(addr - base_) / 32]),
       at);
}

void SharedMemory::check_pending(u32 addr, u32 bytes, const char* what, Place at) {
  for (u32 unit = (addr - base_) / 16; unit <= (addr + bytes - 1 - base_) / 16; ++unit)
    if (pending_[unit] != 0)
      fail("pending-async",
           format("%s shared memory at %s while a copy into it is in flight", what,
                  smem_name(base_ + 16 * unit).c_str()) +
               cite("the copy is from", pending_at_[unit]),
           at);
  if (stores_in_flight_ == 0) return;
  for (u32 base = addr & ~3u; base < addr + bytes; base += 4)
    if (storing_at_[first_cell(base)] != 0)
      fail("pending-async",
           format("%s shared memory at %s while a store of another block into it is in flight",
                  what, smem_name(base).c_str()) +
               cite("the store is from", storing_at_[first_cell(base)]),
           at);
}

namespace {

// Bytes of the cell at `cell_addr` that [addr, addr + bytes) covers, as a mask.
u8 mask_of(u32 cell_addr, u32 addr, u32 bytes) {
  if (cell_addr >= addr && cell_addr + 4 <= addr + bytes) return 15;
  u8 mask = 0;
  for (u32 i = 0; i < 4; ++i)
    if (cell_addr + i >= addr && cell_addr + i < addr + bytes) mask |= static_cast<u8>(1u << i);
  return mask;
}

bool knows(i32 thread, Agent agent, u32 clock) { return machine.clocks_of(thread)[agent] >= clock; }

}  // namespace

void SharedMemory::note_read(Cell& cell, i32 thread, u8 mask, Place at) {
  const u32 clock = machine.clock_of(thread);
  const i32 first_thread = first_warp_ * kWarp;
  cell.read_at = at;
  cell.read_bytes |= mask;
  if (cell.readers >= 0) {
    reader_lists_[cell.readers][thread - first_thread] = clock;
    return;
  }
  if (cell.reader == kNobody || cell.reader == thread ||
      knows(thread, cell.reader, cell.read_clock)) {
    cell.reader = static_cast<Agent>(thread);
    cell.read_clock = clock;
    return;
  }
  if (free_lists_.empty()) {
    free_lists_.push_back(static_cast<i32>(reader_lists_.size()));
    reader_lists_.emplace_back();
  }
  cell.readers = free_lists_.back();
  free_lists_.pop_back();
  auto& list = reader_lists_[cell.readers];
  list.assign(machine.block_threads, 0);
  list[cell.reader - first_thread] = cell.read_clock;
  list[thread - first_thread] = clock;
}

void SharedMemory::forget_readers(Cell& cell) {
  if (cell.readers >= 0) free_lists_.push_back(cell.readers);
  cell.readers = -1;
  cell.reader = kNobody;
  cell.read_bytes = 0;
}

void SharedMemory::read(u32 addr, u32 bytes, i32 thread, Place at) {
  check_pending(addr, bytes, "reads", at);
  for (u32 base = addr & ~3u; base < addr + bytes; base += 4) {
    Cell& cell = cells_[first_cell(base)];
    const u8 mask = mask_of(base, addr, bytes);
    if (mbarriers_[(base - base_) / 8] >= 0)
      fail("mbarrier", format("reads %s as data: an mbarrier lies there", smem_name(base).c_str()),
           at);
    if ((cell.valid & mask) != mask)
      fail("uninitialized",
           format("reads shared memory at %s that nothing was written to", smem_name(base).c_str()),
           at);
    if ((cell.write_bytes & mask) != 0 && !knows(thread, cell.writer, cell.write_clock))
      race(base, "reads", "wrote", cell.writer, cell.write_at, at);
    note_read(cell, thread, mask, at);
  }
}

void SharedMemory::check_write(u32 addr, u32 bytes, i32 thread, bool async, const char* what,
                               Place at) {
  check_pending(addr, bytes, what, at);
  const u32* clocks = machine.clocks_of(thread);
  const u32 units = static_cast<u32>(read_at_.size());
  for (u32 unit = (addr - base_) / 32; unit <= (addr + bytes - 1 - base_) / 32; ++unit) {
    if (read_at_[unit] == 0) continue;
    for (i32 warp = 0; warp < machine.block_warps; ++warp) {
      const std::size_t index = static_cast<std::size_t>(warp) * units + unit;
      const Agent agent = machine.wgmma_agent(first_warp_ + warp);
      if (in_flight_[index] != 0) still_reading(base_ + 32 * unit, warp, what, at);
      if (read_clock_[index] > clocks[agent])
        race(base_ + 32 * unit, what, "reads", agent, read_at_[unit], at);
    }
  }
  for (u32 base = addr & ~3u; base < addr + bytes; base += 4) {
    Cell& cell = cells_[first_cell(base)];
    const u8 mask = mask_of(base, addr, bytes);
    if (mbarriers_[(base - base_) / 8] >= 0)
      fail("mbarrier", format("%s %s: an mbarrier lies there", what, smem_name(base).c_str()), at);
    if ((cell.write_bytes & mask) != 0) {
      if (clocks[cell.writer] < cell.write_clock)
        race(base, what, "wrote", cell.writer, cell.write_at, at);
      if (async && cell.generic && machine.proxy_of(thread)[cell.writer] < cell.write_clock)
        fail(
            "proxy-fence",
            format("an asynchronous copy overwrites %s, written by an ordinary store, and no proxy "
                   "fence lies between",
                   smem_name(base).c_str()) +
                cite("the store is at", cell.write_at),
            at);
    }
    if ((cell.read_bytes & mask) == 0) continue;
    if (cell.readers < 0) {
      if (clocks[cell.reader] < cell.read_clock)
        race(base, what, "reads", cell.reader, cell.read_at, at);
      continue;
    }
    const auto& list = reader_lists_[cell.readers];
    const i32 first_thread = first_warp_ * kWarp;
    for (i32 other = 0; other < machine.block_threads; ++other)
      if (list[other] > clocks[first_thread + other])
        race(base, what, "reads", static_cast<Agent>(first_thread + other), cell.read_at, at);
  }
}

void SharedMemory::write(u32 addr, u32 bytes, i32 thread, Place at) {
  check_write(addr, bytes, thread, false, "writes", at);
  for (u32 base = addr & ~3u; base < addr + bytes; base += 4) {
    Cell& cell = cells_[first_cell(base)];
    const u8 mask = mask_of(base, addr, bytes);
    const bool follows = cell.writer == thread && cell.write_clock == machine.clock_of(thread);
    cell.writer = static_cast<Agent>(thread);
    cell.write_clock = machine.clock_of(thread);
    cell.write_at = at;
    cell.write_bytes = follows ? cell.write_bytes | mask : mask;
    cell.valid |= mask;
    cell.generic = true;
    forget_readers(cell);
  }
  for (u32 unit = (addr - base_) / 16; unit <= (addr + bytes - 1 - base_) / 16; ++unit)
    tags_[unit].present = false;
}

void SharedMemory::begin_async_write(u32 addr, u32 bytes, i32 thread, bool proxy, i32 ticket,
                                     Place at) {
  check_write(addr, bytes, thread, proxy, "a copy overwrites", at);
  for (u32 unit = (addr - base_) / 16; unit < (addr + bytes - base_) / 16; ++unit) {
    pending_[unit] = ticket;
    pending_at_[unit] = at;
  }
  // Whoever reads the bytes before the copy is done, or misses it, shall not find the old ones.
  std::memset(data(addr), 0xcd, bytes);
}

void SharedMemory::end_async_write(u32 addr, u32 bytes, Agent agent, u32 clock, bool generic,
                                   Place at) {
  for (u32 unit = (addr - base_) / 16; unit < (addr + bytes - base_) / 16; ++unit) {
    pending_[unit] = 0;
    tags_[unit].present = false;
  }
  note_async_write(addr, bytes, agent, clock, generic, at);
}

void SharedMemory::begin_store(u32 addr, u32 bytes, i32 thread, Place at) {
  check_write(addr, bytes, thread, false, "a store overwrites", at);
  storing_at_.resize(cells_.size(), 0);
  for (u32 base = addr; base < addr + bytes; base += 4) storing_at_[first_cell(base)] = at;
  ++stores_in_flight_;
  std::memset(data(addr), 0xcd, bytes);
}

void SharedMemory::end_store(u32 addr, u32 bytes, Agent agent, u32 clock, Place at) {
  for (u32 base = addr; base < addr + bytes; base += 4) {
    storing_at_[first_cell(base)] = 0;
    tags_[(base - base_) / 16].present = false;
  }
  --stores_in_flight_;
  note_async_write(addr, bytes, agent, clock, /*generic=*/true, at);
}

void SharedMemory::note_async_write(u32 addr, u32 bytes, Agent agent, u32 clock, bool generic,
                                    Place at) {
  for (u32 base = addr; base < addr + bytes; base += 4) {
    Cell& cell = cells_[first_cell(base)];
    cell.writer = agent;
    cell.write_clock = clock;
    cell.write_at = at;
    cell.write_bytes = 15;
    cell.valid = 15;
    cell.generic = generic;
    forget_readers(cell);
  }
}

void SharedMemory::begin_async_read(u32 addr, i32 warp, u32 clock, Place at) {
  check_pending(addr, 32, "wgmma reads", at);
  const i32 first_thread = warp * kWarp;
  for (u32 base = addr; base < addr + 32; base += 4) {
    const Cell& cell = cells_[first_cell(base)];
    if (cell.valid != 15)
      fail("uninitialized",
           format("wgmma reads shared memory at %s that nothing was written to",
                  smem_name(base).c_str()),
           at);
    // A warp's lanes meet before the instruction starts: it is enough that one of them knows.
    i32 knowing = -1;
    for (i32 lane = 0; lane < kWarp && knowing < 0; ++lane)
      if (knows(first_thread + lane, cell.writer, cell.write_clock)) knowing = first_thread + lane;
    if (knowing < 0) race(base, "wgmma reads", "wrote", cell.writer, cell.write_at, at);
    if (!cell.generic) continue;
    bool visible = false;
    for (i32 lane = 0; lane < kWarp && !visible; ++lane)
      visible = machine.proxy_of(first_thread + lane)[cell.writer] >= cell.write_clock;
    if (!visible)
      fail("proxy-fence",
           format("wgmma reads %s, written by an ordinary store, and no proxy fence lies between",
                  smem_name(base).c_str()) +
               cite("the store is at", cell.write_at),
           at);
  }
  const u32 unit = (addr - base_) / 32;
  const std::size_t index = static_cast<std::size_t>(warp - first_warp_) * read_at_.size() + unit;
  read_clock_[index] = clock;
  read_at_[unit] = at;
  ++in_flight_[index];
}

void SharedMemory::end_async_read(u32 addr, i32 warp) {
  --in_flight_[static_cast<std::size_t>(warp - first_warp_) * read_at_.size() +
               (addr - base_) / 32];
}

}  // namespace deep_kernels::emulator
