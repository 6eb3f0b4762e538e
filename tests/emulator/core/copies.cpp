// Asynchronous copies from global to shared memory: cp.async and TMA. Data lands when it must, or
// when the seed says so; until then the bytes it goes to belong to nobody.
#include <algorithm>

#include "global.h"
#include "report.h"
#include "shared.h"
#include "trace.h"

namespace deep_kernels::emulator {

namespace {

i32 next_ticket = 0;

i32 take_ticket() {
  next_ticket = next_ticket == 0x7fffffff ? 1 : next_ticket + 1;
  return next_ticket;
}

}  // namespace

// --- cp.async
// ---------------------------------------------------------------------------------------------

void cp_async(u32 smem, const void* from, u32 size, u32 bytes, At at) {
  maybe_yield();
  const Place place = place_of(at);
  Thread& thread = self();
  thread.touched_global = true;
  SharedMemory& memory = own_memory();
  memory.check_range(smem, size, size, "cp.async", place);
  if (bytes > size) fail("bounds", format("cp.async of %u bytes reads %u", size, bytes), place);
  // The address must be good even where nothing is read.
  global.check_read(from, std::max(bytes, 1u), size, "cp.async", place);
  memory.begin_async_write(smem, size, thread.index, /*proxy=*/false, take_ticket(), place);
  i64& busy = own_block().copies_busy;
  const i64 begin = std::max(identity.time, busy);
  busy = begin + size / cycles::kCopyBytesPerCycle;
  thread.open_copies.push_back({.smem = smem,
                                .global = static_cast<const u8*>(from),
                                .size = size,
                                .bytes = bytes,
                                .place = place,
                                .end = begin + cycles::kCopyLatency});
  spend(cycles::kShared);
}

void cp_async_commit_group(At) {
  Thread& thread = self();
  thread.committed_copies.push_back(std::move(thread.open_copies));
  thread.open_copies.clear();
}

void cp_async_wait_group(i32 pending, At at) {
  Thread& thread = self();
  i64 end = 0;
  while (static_cast<i32>(thread.committed_copies.size()) > pending) {
    for (const CopyAsync& copy : thread.committed_copies.front()) {
      end = std::max(end, copy.end);
      u8* to = own_memory().data(copy.smem);
      std::memcpy(to, copy.global, copy.bytes);
      std::memset(to + copy.bytes, 0, copy.size - copy.bytes);
      own_memory().end_async_write(copy.smem, copy.size, static_cast<Agent>(thread.index),
                                   machine.clock_of(thread.index), /*generic=*/true, copy.place);
    }
    thread.committed_copies.pop_front();
  }
  trace::wait("cp.async", -1, end, place_of(at));
  wait_until(end);
  // Groups without copies hold nothing that could be forgotten.
  auto& groups = thread.committed_copies;
  if (std::all_of(groups.begin(), groups.end(), [](const auto& group) { return group.empty(); }) &&
      pending == 0)
    groups.clear();
}

// --- TMA
// --------------------------------------------------------------------------------------------------

namespace {

u32 swizzle_bytes(Swizzle swizzle) {
  switch (swizzle) {
    case Swizzle::none:
      return 0;
    case Swizzle::b32:
      return 32;
    case Swizzle::b64:
      return 64;
    case Swizzle::b128:
      return 128;
  }
  return 0;
}

// Where the 16 bytes at this address go: bits of the 128-byte line's number into those of the
// chunk's.
u32 swizzled(u32 addr, Swizzle swizzle) {
  const u32 span = swizzle_bytes(swizzle);
  return span == 0 ? addr : addr ^ ((addr >> 7 & (span / 16 - 1)) << 4);
}

// What the driver's encoder refuses. Source: CUDA Driver API, cuTensorMapEncodeTiled.
void check_map(const MapDescription& map, bool is_parameter, Place at) {
  const auto refuse = [&](const std::string& what) {
    fail("tensor-map", "tensor map: " + what, at);
  };
  if (!is_parameter) refuse("it is not a parameter of the kernel but a copy of one");
  if (map.rank < 1 || map.rank > MapDescription::kMaxRank)
    refuse(format("rank %d must be from 1 to 5", map.rank));
  if (reinterpret_cast<u64>(map.base) % 16 != 0)
    refuse(format("base %p must be a multiple of 16", map.base));
  const i32 element = bytes_of(map.type);
  for (i32 d = 0; d < map.rank; ++d) {
    if (map.dims[d] < 1 || map.dims[d] > i64{1} << 32)
      refuse(format("dimension %d is %lld, must be from 1 to 2^32", d, map.dims[d]));
    if (map.box[d] < 1 || map.box[d] > 256)
      refuse(format("box dimension %d is %d, must be from 1 to 256", d, map.box[d]));
    if (d > 0 && (map.strides[d] % 16 != 0 || map.strides[d] < 0 || map.strides[d] >= i64{1} << 40))
      refuse(format("stride %d is %lld bytes, must be a multiple of 16 below 2^40", d,
                    map.strides[d]));
  }
  const i32 inner = map.box[0] * element;
  if (inner % 16 != 0)
    refuse(format("the box's inner dimension has %d bytes, must be a multiple of 16", inner));
  const auto span = static_cast<i32>(swizzle_bytes(map.swizzle));
  if (span != 0 && inner > span)
    refuse(
        format("the box's inner dimension has %d bytes, more than the swizzle's %d", inner, span));
}

u32 box_bytes(const MapDescription& map) {
  u32 bytes = static_cast<u32>(bytes_of(map.type));
  for (i32 d = 0; d < map.rank; ++d) bytes *= static_cast<u32>(map.box[d]);
  return bytes;
}

// One row of the box from global memory; what lies outside of the tensor is zero.
void load_row(const TmaCopy& copy, const i32* position, u8* row) {
  const MapDescription& map = copy.map;
  const i32 element = bytes_of(map.type);
  std::memset(row, 0, static_cast<std::size_t>(map.box[0]) * element);
  const auto* source = static_cast<const u8*>(map.base);
  for (i32 d = 1; d < map.rank; ++d) {
    if (position[d] < 0 || position[d] >= map.dims[d]) return;
    source += position[d] * map.strides[d];
  }
  const i64 first = std::max<i64>(0, position[0]);
  const i64 last = std::min<i64>(map.dims[0], i64{position[0]} + map.box[0]);
  if (first >= last) return;
  const auto bytes = static_cast<u32>((last - first) * element);
  source += first * element;
  global.check_read(source, bytes, 1, "TMA load", copy.place, copy.thread);
  std::memcpy(row + (first - position[0]) * element, source, bytes);
}

// Into one block; how long it takes is known already.
void start_copy_into(SharedMemory& memory, TmaCopy copy, u32 barrier_addr) {
  Mbarrier& barrier = find_mbarrier(barrier_addr, "TMA load", copy.place);
  if (!barrier.async_visible)
    fail("proxy-fence",
         format(
             "a TMA load counts on mbarrier %s, whose initialisation no fence has made visible to "
             "the async proxy",
             barrier.name.c_str()) +
             cite("initialised at", barrier.init_at),
         copy.place);
  copy.barrier = memory.mbarrier_at(barrier_addr);
  copy.phase = barrier.phase;
  memory.begin_async_write(copy.smem, copy.bytes, copy.thread, /*proxy=*/true, take_ticket(),
                           copy.place);
  ++barrier.copies;
  machine.copies.push_back(copy);
}

// `smem` must be aligned: to 128 bytes for a tensor map's box, to 16 for plain bytes.
void start_copy(u32 smem, const MapDescription& map, u32 barrier_addr, i32 rank,
                const i32* coordinates, u32 align, u32 mask, Place place) {
  const Thread& thread = self();
  const u32 bytes = box_bytes(map);
  own_memory().check_range(smem, bytes, align, "TMA load", place);
  own_memory().check_range(barrier_addr, 8, 8, "TMA load", place);
  TmaCopy copy{.smem = smem,
               .bytes = bytes,
               .words = {},
               .map = map,
               .coordinates = {},
               .barrier = 0,
               .phase = 0,
               .thread = thread.index,
               .place = place,
               .end = 0};
  std::copy(coordinates, coordinates + rank, copy.coordinates);
  i64& busy = own_block().copies_busy;
  const i64 begin = std::max(identity.time, busy);
  busy = begin + bytes / cycles::kCopyBytesPerCycle;
  copy.end = busy + cycles::kCopyLatency;
  trace::work("copy", format("%u bytes to %s", bytes, smem_name(smem).c_str()), thread.warp(),
              begin, copy.end, place);
  spend(cycles::kShared);
  if (mask == 0) return start_copy_into(own_memory(), copy, barrier_addr);
  for (; mask != 0; mask &= mask - 1) {
    const i32 to = std::countr_zero(mask);
    require_peer(to, "a multicast TMA load", place);
    copy.smem = smem_of_rank(smem, to);
    start_copy_into(memories[to], copy, smem_of_rank(barrier_addr, to));
  }
}

}  // namespace

void prefetch_map(const MapDescription& map, bool is_parameter, At at) {
  check_map(map, is_parameter, place_of(at));
}

void tma_load(u32 smem, const MapDescription& map, bool is_parameter, u32 barrier_addr, i32 rank,
              const i32* coordinates, u32 mask, At at) {
  maybe_yield();
  const Place place = place_of(at);
  self().touched_global = true;
  check_map(map, is_parameter, place);
  if (map.rank != rank)
    fail("tensor-map", format("a %d-D load through a tensor map of rank %d", rank, map.rank),
         place);
  // Seen on an H200: an illegal instruction.
  const i64 first_byte = i64{coordinates[0]} * bytes_of(map.type);
  if (first_byte % 16 != 0)
    fail(
        "tensor-map",
        format("a load from coordinate %d, which is byte %lld of the row: must be a multiple of 16",
               coordinates[0], first_byte),
        place);
  start_copy(smem, map, barrier_addr, rank, coordinates, 128, mask, place);
}

void bulk_load(u32 smem, const void* from, u32 bytes, u32 barrier_addr, At at) {
  maybe_yield();
  const Place place = place_of(at);
  self().touched_global = true;
  if (bytes == 0 || bytes % 16 != 0)
    fail("bounds", format("a bulk copy of %u bytes: must be a multiple of 16", bytes), place);
  global.check_read(from, bytes, 16, "bulk copy", place);
  // As a box of one row of bytes, which has no limits of its own.
  MapDescription map{.base = from, .rank = 1};
  map.dims[0] = bytes;
  map.box[0] = static_cast<i32>(bytes);
  const i32 coordinates[] = {0};
  start_copy(smem, map, barrier_addr, 1, coordinates, 16, /*mask=*/0, place);
}

void check_multicast(u32 mask, At at) {
  if (mask == 0 || mask >> machine.cluster != 0)
    fail("bounds",
         format("a multicast to the ranks 0x%x in a cluster of %d blocks", mask, machine.cluster),
         place_of(at));
}

// --- st.async
// ---------------------------------------------------------------------------------------------

void store_async(u32 smem, const u32* words, i32 count, u32 barrier_addr, At at) {
  maybe_yield();
  const Place place = place_of(at);
  const u32 bytes = 4 * static_cast<u32>(count);
  if (machine.cluster == 1)
    fail("cluster", "st.async in a block that is no cluster of several: undefined", place);
  for (i32 i = 0; i < count; ++i)
    if (words[i] == kPoison) meet_poison(at);
  SharedMemory& memory = peer_memory(smem, bytes, bytes, "st.async", place);
  peer_memory(barrier_addr, 8, 8, "st.async", place);
  if (smem >> kRankShift != barrier_addr >> kRankShift)
    fail("cluster",
         format("st.async to %s counts on an mbarrier at %s: both must be in one block",
                smem_name(smem).c_str(), smem_name(barrier_addr).c_str()),
         place);
  Mbarrier& barrier = find_mbarrier(barrier_addr, "st.async", place);
  TmaCopy copy{.smem = smem,
               .bytes = bytes,
               .words = {},
               .map = {},
               .coordinates = {},
               .barrier = memory.mbarrier_at(barrier_addr),
               .phase = barrier.phase,
               .thread = self().index,
               .place = place,
               .end = identity.time + cycles::kPeerLatency};
  std::copy(words, words + count, copy.words);
  spend(cycles::kShared);
  memory.begin_store(smem, bytes, copy.thread, place);
  ++barrier.copies;
  machine.copies.push_back(copy);
}

// --- the end
// ----------------------------------------------------------------------------------------------

namespace {

void land_box(const TmaCopy& copy) {
  SharedMemory& memory = memory_of(copy.smem);
  const Mbarrier& barrier = machine.mbarriers[copy.barrier];
  const MapDescription& map = copy.map;
  const u32 row_bytes = static_cast<u32>(map.box[0] * bytes_of(map.type));
  const u32 panel_rows = map.rank > 1 ? static_cast<u32>(map.box[1]) : 1;
  std::vector<u8> row(row_bytes);
  i32 step[MapDescription::kMaxRank] = {};
  memory.end_async_write(copy.smem, copy.bytes, barrier.agent, barrier.agent_clock + 1,
                         /*generic=*/false, copy.place);
  for (u32 offset = 0; offset < copy.bytes; offset += row_bytes) {
    i32 position[MapDescription::kMaxRank];
    for (i32 d = 0; d < map.rank; ++d) position[d] = copy.coordinates[d] + step[d];
    load_row(copy, position, row.data());
    const u32 line = offset / row_bytes;
    for (u32 chunk = 0; chunk < row_bytes; chunk += 16) {
      const u32 to = swizzled(copy.smem + offset + chunk, map.swizzle);
      std::memcpy(memory.data(to), row.data() + chunk, 16);
      memory.set_tag(to, {.present = true,
                          .swizzle = map.swizzle,
                          .chunk = static_cast<u8>(chunk / 16),
                          .row = static_cast<u16>(line % panel_rows),
                          .panel = static_cast<u16>(line / panel_rows),
                          .start = copy.smem,
                          .place = copy.place});
    }
    for (i32 d = 1; d < map.rank && ++step[d] == map.box[d]; ++d) step[d] = 0;
  }
}

void land_words(const TmaCopy& copy) {
  SharedMemory& memory = memory_of(copy.smem);
  const Mbarrier& barrier = machine.mbarriers[copy.barrier];
  std::memcpy(memory.data(copy.smem), copy.words, copy.bytes);
  memory.end_store(copy.smem, copy.bytes, barrier.agent, barrier.agent_clock + 1, copy.place);
}

}  // namespace

void finish_copy(std::size_t index) {
  const TmaCopy copy = machine.copies[index];
  machine.copies.erase(machine.copies.begin() + static_cast<std::ptrdiff_t>(index));
  if (copy.map.rank == 0)
    land_words(copy);
  else
    land_box(copy);
  complete_bytes(copy);
}

}  // namespace deep_kernels::emulator
