// Shared memory and its shadow: for every 4 bytes who wrote and read them last, whether they hold a
// value, and what asynchronous work still touches them.
#pragma once

#include "machine.h"

namespace deep_kernels::emulator {

// Shared addresses of a block begin here, as they do on a card, where the system keeps the first
// KiB. The rank of the block in its cluster stands in the bits from 24 on.
inline constexpr u32 kSmemBase = 1024;
inline constexpr u32 kRankShift = 24;
inline u32 smem_base(i32 rank) { return (static_cast<u32>(rank) << kRankShift) + kSmemBase; }
// The same place in the block of another rank.
inline u32 smem_of_rank(u32 addr, i32 rank) {
  return (addr & ((1u << kRankShift) - 1)) | static_cast<u32>(rank) << kRankShift;
}

struct Cell {
  u32 write_clock = 0;
  u32 read_clock = 0;
  Agent writer = kNobody;
  Agent reader = kNobody;
  Place write_at = 0;
  Place read_at = 0;
  u8 valid = 0;          // bytes that hold a value
  u8 write_bytes = 0;    // of the last write
  u8 read_bytes = 0;     // of the reads since
  bool generic = false;  // written through the generic proxy
  i32 readers = -1;      // list of readers when one is not enough
};

// What a copy of a tensor map left behind in 16 bytes, to check descriptors against.
struct Tag {
  bool present = false;
  Swizzle swizzle = Swizzle::none;
  u8 chunk = 0;   // 16-byte chunk of the box's row
  u16 row = 0;    // along the box's second dimension
  u16 panel = 0;  // along all dimensions behind it
  u32 start = 0;  // where the box went
  Place place = 0;
};

class SharedMemory {
 public:
  void begin_block(i32 rank, u32 bytes);
  // An address range that faults when touched: kernels only do arithmetic on it.
  static void* view();
  static u32 view_bytes() { return kViewBytes; }
  u32 bytes() const { return bytes_; }
  u8* data(u32 addr) { return data_.data() + (addr - base_); }

  // Refuses what lies outside or is not aligned.
  void check_range(u32 addr, u32 bytes, u32 align, const char* use, Place at);

  // Ordinary reads and writes by a thread: every conflict is refused, then it is noted.
  void read(u32 addr, u32 bytes, i32 thread, Place at);
  void write(u32 addr, u32 bytes, i32 thread, Place at);

  // A write that has been started: nobody may touch the bytes until it ends.
  void begin_async_write(u32 addr, u32 bytes, i32 thread, bool proxy, i32 ticket, Place at);
  void end_async_write(u32 addr, u32 bytes, Agent agent, u32 clock, bool generic, Place at);

  // The same for st.async, which writes 4 to 16 bytes and is no copy of the async proxy.
  void begin_store(u32 addr, u32 bytes, i32 thread, Place at);
  void end_store(u32 addr, u32 bytes, Agent agent, u32 clock, Place at);

  // 32 bytes that a warp's wgmma reads from now on until end_async_read.
  void begin_async_read(u32 addr, i32 warp, u32 clock, Place at);
  void end_async_read(u32 addr, i32 warp);

  void set_tag(u32 addr, Tag tag) { tags_[(addr - base_) / 16] = tag; }
  Tag tag(u32 addr) const { return tags_[(addr - base_) / 16]; }

  void mark_mbarrier(u32 addr, i32 index) {
    mbarriers_[(addr - base_) / 8] = static_cast<i16>(index);
  }
  i32 mbarrier_at(u32 addr) const { return mbarriers_[(addr - base_) / 8]; }

 private:
  using i16 = short;
  static constexpr u32 kViewBytes = 1u << 20;

  u32 first_cell(u32 addr) const { return (addr - base_) / 4; }
  void check_write(u32 addr, u32 bytes, i32 thread, bool async, const char* what, Place at);
  void note_read(Cell& cell, i32 thread, u8 mask, Place at);
  void forget_readers(Cell& cell);
  [[noreturn]] void race(u32 addr, const char* mine, const char* theirs, Agent other,
                         Place other_at, Place at);
  [[noreturn]] void still_reading(u32 addr, i32 warp, const char* what, Place at);
  void check_pending(u32 addr, u32 bytes, const char* what, Place at);

  // What ends with a write that somebody else has made.
  void note_async_write(u32 addr, u32 bytes, Agent agent, u32 clock, bool generic, Place at);

  u32 base_ = kSmemBase;
  i32 rank_ = 0;
  i32 first_warp_ = 0;  // of the block
  u32 bytes_ = 0;
  std::vector<u8> data_;
  std::vector<Cell> cells_;
  std::vector<i32> pending_;  // per 16 bytes: ticket of the write in flight, or 0
  std::vector<Place> pending_at_;
  i32 stores_in_flight_ = 0;
  std::vector<Place> storing_at_;  // per cell: where the store in flight was made, or 0
  std::vector<u32> read_clock_;    // per warp and 32 bytes: the last wgmma that read them
  std::vector<Place> read_at_;     // per 32 bytes
  std::vector<u8> in_flight_;      // per warp and 32 bytes: reads not waited for
  std::vector<Tag> tags_;
  std::vector<i16> mbarriers_;  // per 8 bytes: index, or -1
  std::vector<std::vector<u32>> reader_lists_;
  std::vector<i32> free_lists_;
};
// By rank.
extern std::vector<SharedMemory> memories;
inline SharedMemory& own_memory() { return memories[self().rank]; }
// Of an address that is good.
inline SharedMemory& memory_of(u32 addr) { return memories[addr >> kRankShift]; }
// Of an address in any block of the cluster, which has to be there: see require_peer().
SharedMemory& peer_memory(u32 addr, u32 bytes, u32 align, const char* use, Place at);

}  // namespace deep_kernels::emulator
