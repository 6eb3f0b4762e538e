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
  shared.check_range(smem, size, size, "cp.async", place);
  if (bytes > size) fail("bounds", format("cp.async of %u bytes reads %u", size, bytes), place);
  // The address must be good even where nothing is read.
  global.check_read(from, std::max(bytes, 1u), size, "cp.async", place);
  shared.begin_async_write(smem, size, thread.index, /*proxy=*/false, take_ticket(), place);
  const i64 begin = std::max(identity.time, machine.copies_busy);
  machine.copies_busy = begin + size / cycles::kCopyBytesPerCycle;
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
      u8* to = shared.data(copy.smem);
      std::memcpy(to, copy.global, copy.bytes);
      std::memset(to + copy.bytes, 0, copy.size - copy.bytes);
      shared.end_async_write(copy.smem, copy.size, static_cast<Agent>(thread.index),
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

// `smem` must be aligned: to 128 bytes for a tensor map's box, to 16 for plain bytes.
void start_copy(u32 smem, const MapDescription& map, u32 barrier_addr, i32 rank,
                const i32* coordinates, u32 align, Place place) {
  Thread& thread = self();
  const u32 bytes = box_bytes(map);
  shared.check_range(smem, bytes, align, "TMA load", place);
  Mbarrier& barrier = find_mbarrier(barrier_addr, "TMA load", place);
  if (!barrier.async_visible)
    fail("proxy-fence",
         format(
             "a TMA load counts on mbarrier %s, whose initialisation no fence has made visible to "
             "the async proxy",
             barrier.name.c_str()) +
             cite("initialised at", barrier.init_at),
         place);
  TmaCopy copy{.smem = smem,
               .bytes = bytes,
               .map = map,
               .coordinates = {},
               .barrier = shared.mbarrier_at(barrier_addr),
               .phase = barrier.phase,
               .thread = thread.index,
               .place = place,
               .end = 0};
  const i64 begin = std::max(identity.time, machine.copies_busy);
  machine.copies_busy = begin + bytes / cycles::kCopyBytesPerCycle;
  copy.end = machine.copies_busy + cycles::kCopyLatency;
  trace::work("copy", format("%u bytes to %s", bytes, smem_name(smem).c_str()), thread.warp(),
              begin, copy.end, place);
  spend(cycles::kShared);
  std::copy(coordinates, coordinates + rank, copy.coordinates);
  shared.begin_async_write(smem, bytes, thread.index, /*proxy=*/true, take_ticket(), place);
  ++barrier.copies;
  machine.copies.push_back(copy);
}

}  // namespace

void prefetch_map(const MapDescription& map, bool is_parameter, At at) {
  check_map(map, is_parameter, place_of(at));
}

void tma_load(u32 smem, const MapDescription& map, bool is_parameter, u32 barrier_addr, i32 rank,
              const i32* coordinates, At at) {
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
  start_copy(smem, map, barrier_addr, rank, coordinates, 128, place);
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
  start_copy(smem, map, barrier_addr, 1, coordinates, 16, place);
}

void finish_copy(std::size_t index) {
  const TmaCopy copy = machine.copies[index];
  machine.copies.erase(machine.copies.begin() + static_cast<std::ptrdiff_t>(index));
  const MapDescription& map = copy.map;
  const u32 row_bytes = static_cast<u32>(map.box[0] * bytes_of(map.type));
  std::vector<u8> row(row_bytes);
  i32 step[MapDescription::kMaxRank] = {};
  shared.end_async_write(copy.smem, copy.bytes, machine.mbarriers[copy.barrier].agent,
                         machine.mbarriers[copy.barrier].agent_clock + 1, /*generic=*/false,
                         copy.place);
  for (u32 offset = 0; offset < copy.bytes; offset += row_bytes) {
    i32 position[MapDescription::kMaxRank];
    for (i32 d = 0; d < map.rank; ++d) position[d] = copy.coordinates[d] + step[d];
    load_row(copy, position, row.data());
    for (u32 chunk = 0; chunk < row_bytes; chunk += 16) {
      const u32 to = swizzled(copy.smem + offset + chunk, map.swizzle);
      std::memcpy(shared.data(to), row.data() + chunk, 16);
      shared.set_tag(to, {.present = true,
                          .swizzle = map.swizzle,
                          .chunk = static_cast<u8>(chunk / 16),
                          .place = copy.place});
    }
    for (i32 d = 1; d < map.rank && ++step[d] == map.box[d]; ++d) step[d] = 0;
  }
  complete_bytes(copy);
}

}  // namespace deep_kernels::emulator
