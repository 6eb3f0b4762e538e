// wgmma: operations of a warpgroup that run when someone waits for them. Until then the
// accumulators hold poison and nobody may write what the operands are read from.
#include <algorithm>

#include "report.h"
#include "shared.h"
#include "tensor_core.h"
#include "trace.h"

namespace deep_kernels::emulator {

namespace {

constexpr i32 kRows = 64;
constexpr i32 kStepBytes = 32;  // K of one instruction

// A matrix in shared memory as its descriptor says. Source: PTX ISA 8.7, section 9.7.15.5.1.
struct Layout {
  u32 start;
  u32 leading;  // bytes between 16-byte columns; only without swizzle
  u32 stride;   // bytes between groups of 8 rows
  u32 span;     // bytes of the swizzle, 0: none
  Swizzle swizzle;

  // Address of 16-byte chunk `chunk` (0 or 1) of a row.
  u32 address(i32 row, i32 chunk) const {
    const u32 group = start + static_cast<u32>(row / 8) * stride;
    if (span == 0)
      return group + static_cast<u32>(chunk) * leading + static_cast<u32>(row % 8) * 16;
    const u32 linear = group + static_cast<u32>(row % 8) * span + static_cast<u32>(chunk) * 16;
    return linear ^ ((linear >> 7 & (span / 16 - 1)) << 4);
  }
};

Layout decode(u64 descriptor, const char* operand, Place at) {
  const auto refuse = [&](const std::string& what) {
    fail("descriptor", format("descriptor of operand %s (0x%016llx): ", operand, descriptor) + what,
         at);
  };
  constexpr u64 kUnused = u64{3} << 14 | u64{3} << 30 | u64{7} << 46 | u64{1023} << 52;
  if ((descriptor & kUnused) != 0) refuse("bits that must be 0 are set");
  constexpr Swizzle swizzles[] = {Swizzle::none, Swizzle::b128, Swizzle::b64, Swizzle::b32};
  constexpr u32 spans[] = {0, 128, 64, 32};
  const auto mode = static_cast<u32>(descriptor >> 62);
  const Layout layout{
      .start = smem_of_rank(static_cast<u32>(descriptor & 0x3fff) << 4, self().rank),
      .leading = static_cast<u32>(descriptor >> 16 & 0x3fff) << 4,
      .stride = static_cast<u32>(descriptor >> 32 & 0x3fff) << 4,
      .span = spans[mode],
      .swizzle = swizzles[mode]};
  if ((descriptor >> 49 & 7) != 0) refuse("a base offset is not supported by the emulator");
  if (layout.span == 0) return layout;
  if (layout.leading > 16)
    refuse(
        format("a leading offset of %u bytes: with a swizzle it is not used and 0 or 1 unit; was "
               "the rank in the address not masked?",
               layout.leading));
  const u32 repeat = 8 * layout.span;
  const u32 column = layout.start % layout.span;
  if (layout.start % repeat >= layout.span)
    refuse(format("start %s does not lie in the first row of a %u-byte pattern",
                  smem_name(layout.start).c_str(), repeat));
  if (column + kStepBytes > layout.span)
    refuse(format("column %u of rows of %u bytes leaves no room for 32", column, layout.span));
  if (layout.stride % repeat != 0)
    refuse(format("stride %u between groups of 8 rows is no multiple of the pattern's %u",
                  layout.stride, repeat));
  return layout;
}

// Both chunks of a row lie in one unit of 32 bytes when swizzled; without swizzle each stands
// alone.
template <class Visit>
void for_each_unit(const Layout& layout, i32 first_row, i32 num_rows, Visit&& visit) {
  for (i32 row = first_row; row < first_row + num_rows; ++row) {
    const u32 low = layout.address(row, 0) & ~31u;
    const u32 high = layout.address(row, 1) & ~31u;
    visit(low);
    if (high != low) visit(high);
  }
}

void check_layout(const Layout& layout, i32 first_row, i32 num_rows, const char* operand,
                  Place at) {
  for (i32 row = first_row; row < first_row + num_rows; ++row) {
    for (i32 chunk = 0; chunk < 2; ++chunk) {
      const u32 addr = layout.address(row, chunk);
      own_memory().check_range(addr, 16, 16, "wgmma", at);
      const Tag tag = own_memory().tag(addr);
      if (!tag.present) continue;
      const u32 wanted = layout.span == 0 ? 0 : layout.start % layout.span / 16 + chunk;
      constexpr const char* names[] = {"no", "32-byte", "64-byte", "128-byte"};
      if (tag.swizzle != layout.swizzle)
        fail("descriptor",
             format("operand %s at %s: the descriptor says %s swizzle, the copy that wrote it %s",
                    operand, smem_name(addr).c_str(), names[static_cast<u8>(layout.swizzle)],
                    names[static_cast<u8>(tag.swizzle)]) +
                 cite("copied at", tag.place),
             at);
      if (layout.span != 0 && tag.chunk != wanted)
        fail(
            "descriptor",
            format("operand %s, row %d: at %s the descriptor expects 16-byte column %u of the row, "
                   "the copy put column %u there",
                   operand, row, smem_name(addr).c_str(), wanted, tag.chunk) +
                cite("copied at", tag.place),
            at);
    }
  }
}

const WgmmaOperands& operands_of(const Warp& warp, i32 lane) {
  return *reinterpret_cast<const WgmmaOperands*>(warp.value[lane]);
}

// Row and column of accumulator register i of a thread in the warpgroup.
i32 row_of(i32 thread, i32 i) { return thread / kWarp * 16 + thread % kWarp / 4 + (i / 2 % 2) * 8; }
i32 column_of(i32 thread, i32 i) { return i / 4 * 8 + thread % 4 * 2 + i % 2; }

void require_same(const Wgmma& operation, const WgmmaOperands& mine, i64 previous, Place at) {
  const WgmmaOperands& theirs = operation.operands;
  const bool same_kind = (mine.fragment == nullptr) == (theirs.fragment == nullptr);
  if (same_kind && operation.place == at && mine.a == theirs.a && mine.b == theirs.b &&
      mine.n == theirs.n && mine.accumulate == theirs.accumulate && previous == operation.previous)
    return;
  fail("divergence",
       format("the warps of a warpgroup issue different wgmma: a %llx against %llx, b %llx against "
              "%llx, accumulate %d against %d",
              mine.a, theirs.a, mine.b, theirs.b, mine.accumulate, theirs.accumulate) +
           cite("the other is at", operation.place),
       at);
}

void read_operand(const Layout& layout, i32 rows, u8* to) {
  for (i32 row = 0; row < rows; ++row)
    for (i32 chunk = 0; chunk < 2; ++chunk)
      std::memcpy(to + row * kStepBytes + chunk * 16,
                  memory_of(layout.start).data(layout.address(row, chunk)), 16);
}

void execute(Warpgroup& group, i64 number) {
  Wgmma& operation = group.operation(number);
  static u8 a[kRows * kStepBytes];
  static u8 b[256 * kStepBytes];
  static u8 decoded_from[256 * kStepBytes];
  static i32 decoded_rows = 0;
  static tensor_core::Decoded decoded;
  const i32 n = operation.operands.n;
  if (operation.a.empty())
    read_operand(decode(operation.operands.a, "a", operation.place), kRows, a);
  else
    std::memcpy(a, operation.a.data(), sizeof(a));
  read_operand(decode(operation.operands.b, "b", operation.place), n, b);
  if (decoded_rows != n || std::memcmp(decoded_from, b, static_cast<std::size_t>(n) * kStepBytes)) {
    tensor_core::decode(n, b, decoded);
    std::memcpy(decoded_from, b, static_cast<std::size_t>(n) * kStepBytes);
    decoded_rows = n;
  }
  tensor_core::wgmma_k32_e4m3(kRows, n, a, decoded, operation.values.data());
  operation.executed = true;
  const i64 begin = std::max(operation.ready_time, own_block().tensor_cores_busy);
  operation.done_time = begin + i64{kRows} * n * kStepBytes / cycles::kMacsPerCycle;
  own_block().tensor_cores_busy = operation.done_time;
  trace::work("tensor", format("wgmma m64n%dk32", n), self().warp(), begin, operation.done_time,
              operation.place);
  for (Wgmma& later : group.operations)
    if (later.previous == number) later.values = operation.values;
}

// The 16 rows of a that a warp's lanes hold. Source: PTX ISA 8.7, section 9.7.15.5.1, "register
// fragments".
void take_fragments(const Warp& warp, i32 quarter, Wgmma& operation) {
  operation.a.resize(kRows * kStepBytes);
  for (i32 lane = 0; lane < kWarp; ++lane)
    for (i32 i = 0; i < 4; ++i) {
      const i32 row = 16 * quarter + lane / 4 + i % 2 * 8;
      std::memcpy(operation.a.data() + row * kStepBytes + i / 2 * 16 + lane % 4 * 4,
                  operands_of(warp, lane).fragment + i, 4);
    }
}

}  // namespace

void issue_wgmma(i32 index, Place at) {
  Warp& warp = machine.warps[index];
  Warpgroup& group = machine.warpgroup_of(index);
  const WgmmaOperands& first = operands_of(warp, 0);
  for (i32 lane = 1; lane < kWarp; ++lane) {
    const WgmmaOperands& other = operands_of(warp, lane);
    if (other.a != first.a || other.b != first.b || other.accumulate != first.accumulate)
      fail("divergence",
           format("wgmma: descriptors or accumulate differ between lanes 0 and %d", lane), at);
  }
  if (!warp.fenced)
    fail("accumulator", "wgmma without wgmma.fence since the accumulators were last waited for",
         at);
  const i32 first_warp = machine.warpgroup_begin(index);
  if (machine.warpgroup_end(index) - first_warp < kWarpgroupWarps)
    fail("divergence", "wgmma in a warpgroup of fewer than four warps", at);

  const i32 quarter = index - first_warp;
  const i64 number = warp.issued++;
  // The operation in flight whose accumulators this one continues, if any.
  i64 previous = -1;
  for (i64 i = number - 1; i >= warp.completed && previous < 0; --i)
    if (group.operation(i).d[quarter * kWarp] == first.d) previous = i;
  const i64 source = first.accumulate ? previous : -1;
  if (number == group.end()) {
    group.operations.emplace_back();
    Wgmma& fresh = group.operations.back();
    fresh.operands = first;
    fresh.place = at;
    fresh.previous = source;
    fresh.values.assign(static_cast<std::size_t>(kRows) * first.n, 0.0f);
  }
  Wgmma& operation = group.operation(number);
  require_same(operation, first, source, at);
  ++operation.warps;
  operation.ready_time = std::max(operation.ready_time, identity.time);

  const u32 clock = static_cast<u32>(number) + 1;
  const auto begin = [&](u32 addr) { own_memory().begin_async_read(addr, index, clock, at); };
  if (first.fragment == nullptr) {
    const Layout a = decode(first.a, "a", at);
    check_layout(a, 16 * quarter, 16, "a", at);
    for_each_unit(a, 16 * quarter, 16, begin);
  } else {
    take_fragments(warp, quarter, operation);
  }
  const Layout b = decode(first.b, "b", at);
  check_layout(b, 0, first.n, "b", at);
  for_each_unit(b, 0, first.n, begin);

  for (i32 lane = 0; lane < kWarp; ++lane) {
    float* d = operands_of(warp, lane).d;
    const i32 thread = quarter * kWarp + lane;
    operation.d[thread] = d;
    for (i32 i = 0; i < first.n / 2; ++i) {
      if (first.accumulate && source < 0)
        operation
            .values[static_cast<std::size_t>(row_of(thread, i)) * first.n + column_of(thread, i)] =
            d[i];
      d[i] = std::bit_cast<float>(kPoison);
    }
  }
  // Others of the warpgroup may wait for this warp to follow.
  for (i32 thread = first_warp * kWarp; thread < (first_warp + kWarpgroupWarps) * kWarp; ++thread)
    if (machine.threads[thread].waits == Wait::wgmma) wake(thread);
}

void commit_wgmma(i32 index) {
  Warp& warp = machine.warps[index];
  warp.group_ends.push_back(warp.issued);
}

bool wgmma_may_finish(i32 index, i64 target) {
  const i32 first = machine.warpgroup_begin(index);
  for (i32 w = first; w < first + kWarpgroupWarps; ++w)
    if (machine.warps[w].issued < target) return false;
  return true;
}

void retire_wgmma(i32 index, i64 target, Place at) {
  Warp& warp = machine.warps[index];
  Warpgroup& group = machine.warpgroup_of(index);
  const i32 quarter = index - machine.warpgroup_begin(index);
  for (i64 i = warp.completed; i < target; ++i) {
    Wgmma& operation = group.operation(i);
    if (!operation.executed) execute(group, i);
    const auto end = [&](u32 addr) { own_memory().end_async_read(addr, index); };
    if (operation.a.empty())
      for_each_unit(decode(operation.operands.a, "a", 0), 16 * quarter, 16, end);
    for_each_unit(decode(operation.operands.b, "b", 0), 0, operation.operands.n, end);
    // A later operation in flight on the same accumulators keeps them.
    bool last = true;
    for (i64 later = i + 1; later < warp.issued && last; ++later)
      last = group.operation(later).d[quarter * kWarp] != operation.d[quarter * kWarp];
    if (!last) continue;
    const i32 n = operation.operands.n;
    for (i32 thread = quarter * kWarp; thread < (quarter + 1) * kWarp; ++thread)
      for (i32 r = 0; r < n / 2; ++r)
        operation.d[thread][r] =
            operation
                .values[static_cast<std::size_t>(row_of(thread, r)) * n + column_of(thread, r)];
  }
  if (target > warp.completed) {
    for (i32 lane = 0; lane < kWarp; ++lane)
      machine.clocks_of(index * kWarp + lane)[machine.wgmma_agent(index)] =
          static_cast<u32>(target);
    warp.fenced = false;
  }
  if (target > warp.completed) {
    const i64 done = group.operation(target - 1).done_time;
    trace::wait("wgmma", -1, done, at, /*whole_warp=*/true);
    for (i32 lane = 0; lane < kWarp; ++lane) {
      Thread& thread = machine.threads[index * kWarp + lane];
      thread.time = std::max(thread.time, done);
    }
    wait_until(done);
  }
  warp.completed = std::max(warp.completed, target);
  // What all four warps are done with can go.
  const i32 first = machine.warpgroup_begin(index);
  i64 done = warp.completed;
  for (i32 w = first; w < first + kWarpgroupWarps; ++w)
    done = std::min(done, machine.warps[w].completed);
  while (group.first < done) {
    group.operations.pop_front();
    ++group.first;
  }
}

// --- what ptx/ calls

void wgmma_e4m3(float* d, u64 a, u64 b, i32 n, bool accumulate, At at) {
  WgmmaOperands operands{d, a, b, nullptr, n, accumulate};
  meet(Meeting::wgmma, reinterpret_cast<u64>(&operands), 0, at);
}

void wgmma_e4m3(float* d, const u32* a, u64 b, i32 n, bool accumulate, At at) {
  WgmmaOperands operands{d, 0, b, a, n, accumulate};
  meet(Meeting::wgmma, reinterpret_cast<u64>(&operands), 0, at);
}

void wgmma_wait_group(i32 pending, At at) {
  const Place place = place_of(at);
  const auto target = static_cast<i64>(meet(Meeting::wgmma_wait, 0, pending, at));
  const i32 warp = self().warp();
  while (!wgmma_may_finish(warp, target)) wait_for(Wait::wgmma, place);
  // The first lane to come back does it for all.
  if (machine.warps[warp].completed < target) retire_wgmma(warp, target, place);
}

void wgmma_ready(const float* d, i32 count, At at) {
  for (i32 i = 0; i < count; ++i) check_poison(d[i], at);
}

}  // namespace deep_kernels::emulator
