// Shared memory and its shadow: for every 4 bytes who wrote and read them last, whether they hold a
// value, and what asynchronous work still touches them.
#pragma once

#include "machine.h"

namespace deep_kernels::emulator {

// Shared addresses begin here, as they do on a card, where the system keeps the first KiB.
inline constexpr u32 kSmemBase = 1024;

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
  u8 chunk = 0;  // 16-byte chunk of the box's row
  Place place = 0;
};

class SharedMemory {
 public:
  void begin_block(u32 bytes);
  // An address range that faults when touched: kernels only do arithmetic on it.
  void* view();
  u32 view_bytes() const { return kViewBytes; }
  u32 bytes() const { return bytes_; }
  u8* data(u32 addr) { return data_.data() + (addr - kSmemBase); }

  // Refuses what lies outside or is not aligned.
  void check_range(u32 addr, u32 bytes, u32 align, const char* use, Place at);

  // Ordinary reads and writes by a thread: every conflict is refused, then it is noted.
  void read(u32 addr, u32 bytes, i32 thread, Place at);
  void write(u32 addr, u32 bytes, i32 thread, Place at);

  // A write that has been started: nobody may touch the bytes until it ends.
  void begin_async_write(u32 addr, u32 bytes, i32 thread, bool proxy, i32 ticket, Place at);
  void end_async_write(u32 addr, u32 bytes, Agent agent, u32 clock, bool generic, Place at);

  // 32 bytes that a warp's wgmma reads from now on until end_async_read.
  void begin_async_read(u32 addr, i32 warp, u32 clock, Place at);
  void end_async_read(u32 addr, i32 warp);

  void set_tag(u32 addr, Tag tag) { tags_[(addr - kSmemBase) / 16] = tag; }
  Tag tag(u32 addr) const { return tags_[(addr - kSmemBase) / 16]; }

  void mark_mbarrier(u32 addr, i32 index) {
    mbarriers_[(addr - kSmemBase) / 8] = static_cast<i16>(index);
  }
  i32 mbarrier_at(u32 addr) const { return mbarriers_[(addr - kSmemBase) / 8]; }

 private:
  using i16 = short;
  static constexpr u32 kViewBytes = 1u << 20;

  u32 first_cell(u32 addr) const { return (addr - kSmemBase) / 4; }
  void check_write(u32 addr, u32 bytes, i32 thread, bool async, const char* what, Place at);
  void note_read(Cell& cell, i32 thread, u8 mask, Place at);
  void forget_readers(Cell& cell);
  [[noreturn]] void race(u32 addr, const char* mine, const char* theirs, Agent other,
                         Place other_at, Place at);
  [[noreturn]] void still_reading(u32 addr, i32 warp, const char* what, Place at);
  void check_pending(u32 addr, u32 bytes, const char* what, Place at);

  void* view_ = nullptr;
  u32 bytes_ = 0;
  std::vector<u8> data_;
  std::vector<Cell> cells_;
  std::vector<i32> pending_;  // per 16 bytes: ticket of the write in flight, or 0
  std::vector<Place> pending_at_;
  std::vector<u32> read_clock_;  // per warp and 32 bytes: the last wgmma that read them
  std::vector<Place> read_at_;   // per 32 bytes
  std::vector<u8> in_flight_;    // per warp and 32 bytes: reads not waited for
  std::vector<Tag> tags_;
  std::vector<i16> mbarriers_;  // per 8 bytes: index, or -1
  std::vector<std::vector<u32>> reader_lists_;
  std::vector<i32> free_lists_;
};
extern SharedMemory shared;

}  // namespace deep_kernels::emulator
