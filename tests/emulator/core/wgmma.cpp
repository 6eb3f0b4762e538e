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
constexpr i32 kStepHalves = 16;
constexpr i32 kPanelChunks = 8;  // 16-byte chunks in a row of the 128-byte swizzle

// A matrix in shared memory as its descriptor says. A row is one of the matrix where that is
// K-major, and all of the matrix at one k where it is MN-major. Source: PTX ISA 8.7, section
// 9.7.15.5.1.
struct Layout {
  u32 start;
  u32 leading;  // bytes between 16-byte columns without swizzle, between panels of an MN-major one
  u32 stride;   // bytes between groups of 8 rows
  u32 span;     // bytes of the swizzle, 0: none
  Swizzle swizzle;

  // Address of 16-byte chunk `chunk` of a row: 0 or 1 of a K-major matrix, up to 31 of the other.
  u32 address(i32 row, i32 chunk) const {
    const u32 group = start + static_cast<u32>(row / 8) * stride;
    if (span == 0)
      return group + static_cast<u32>(chunk) * leading + static_cast<u32>(row % 8) * 16;
    const u32 linear = group + static_cast<u32>(chunk / kPanelChunks) * leading +
                       static_cast<u32>(row % 8) * span +
                       static_cast<u32>(chunk % kPanelChunks) * 16;
    return linear ^ ((linear >> 7 & (span / 16 - 1)) << 4);
  }
};

// What of a matrix is read.
struct Part {
  i32 first_row;
  i32 num_rows;
  i32 num_chunks;
};
constexpr Part quarter_of_a(i32 quarter) { return {16 * quarter, 16, 2}; }
Part part_of_b(const WgmmaOperands& operands) {
  return operands.b_mn_major ? Part{0, kStepHalves, operands.n / 8} : Part{0, operands.n, 2};
}

Layout decode(u64 descriptor, const char* operand, bool mn_major, Place at) {
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
  if (mn_major && layout.span != 128)
    refuse("MN-major: the emulator knows the 128-byte swizzle alone");
  if (layout.span == 0) return layout;
  if (!mn_major && layout.leading > 16)
    refuse(
        format("a leading offset of %u bytes: with a swizzle it is not used and 0 or 1 unit; was "
               "the rank in the address not masked?",
               layout.leading));
  const u32 repeat = 8 * layout.span;
  const u32 column = layout.start % layout.span;
  if (layout.start % repeat >= layout.span)
    refuse(format("start %s does not lie in the first row of a %u-byte pattern",
                  smem_name(layout.start).c_str(), repeat));
  const u32 width = mn_major ? layout.span : kStepBytes;
  if (column + width > layout.span)
    refuse(
        format("column %u of rows of %u bytes leaves no room for %u", column, layout.span, width));
  if (layout.stride % repeat != 0)
    refuse(format("stride %u between groups of 8 rows is no multiple of the pattern's %u",
                  layout.stride, repeat));
  return layout;
}
Layout layout_of_b(const WgmmaOperands& operands, Place at) {
  const Layout layout = decode(operands.b, "b", operands.b_mn_major, at);
  if (operands.b_mn_major && operands.n / 8 > kPanelChunks && layout.leading % 1024 != 0)
    fail("descriptor",
         format("operand b is MN-major: a leading offset of %u bytes between its panels is no "
                "multiple of the pattern's 1024; is the descriptor a K-major one, or was the rank "
                "in the address not masked?",
                layout.leading),
         at);
  return layout;
}

// Both chunks of a pair lie in one unit of 32 bytes when swizzled; without swizzle each stands
// alone.
template <class Visit>
void for_each_unit(const Layout& layout, const Part& part, Visit&& visit) {
  for (i32 row = part.first_row; row < part.first_row + part.num_rows; ++row) {
    for (i32 chunk = 0; chunk < part.num_chunks; chunk += 2) {
      const u32 low = layout.address(row, chunk) & ~31u;
      const u32 high = layout.address(row, chunk + 1) & ~31u;
      visit(low);
      if (high != low) visit(high);
    }
  }
}

void check_layout(const Layout& layout, const Part& part, const char* operand, Place at) {
  for (i32 row = part.first_row; row < part.first_row + part.num_rows; ++row) {
    for (i32 chunk = 0; chunk < part.num_chunks; ++chunk) {
      const u32 addr = layout.address(row, chunk);
      own_memory().check_range(addr, 16, 16, "wgmma", at);
      const Tag tag = own_memory().tag(addr);
      if (!tag.present) continue;
      const u32 wanted =
          layout.span == 0 ? 0 : layout.start % layout.span / 16 + chunk % kPanelChunks;
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

// The panels of an MN-major matrix: each must hold the rows that the first one holds, and where one
// copy wrote them, be the next of the box.
void check_panels(const Layout& layout, const Part& part, Place at) {
  const Tag first = own_memory().tag(layout.address(0, 0));
  for (i32 row = 0; row < part.num_rows; ++row) {
    const Tag here = own_memory().tag(layout.address(row, 0));
    for (i32 chunk = 0; chunk < part.num_chunks; chunk += kPanelChunks) {
      const i32 panel = chunk / kPanelChunks;
      const u32 addr = layout.address(row, chunk);
      const Tag tag = own_memory().tag(addr);
      if (!tag.present || !here.present || !first.present) continue;
      const bool same_copy = tag.start == first.start;
      const i32 wanted_row = same_copy ? first.row + row : here.row;
      const i32 wanted_panel = same_copy ? first.panel + panel : tag.panel;
      if (tag.row == wanted_row && tag.panel == wanted_panel) continue;
      fail("descriptor",
           format(
               "operand b, k %d, panel %d: at %s the descriptor expects row %d of panel %d of the "
               "box, the copy put row %d of panel %d there",
               row, panel, smem_name(addr).c_str(), wanted_row, wanted_panel, tag.row, tag.panel) +
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
      mine.n == theirs.n && mine.type == theirs.type && mine.sign == theirs.sign &&
      mine.accumulate == theirs.accumulate && previous == operation.previous)
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

void read_transposed(const Layout& layout, i32 n, u8* to) {
  for (i32 k = 0; k < kStepHalves; ++k)
    for (i32 i = 0; i < n; ++i)
      std::memcpy(to + i * kStepBytes + k * 2,
                  memory_of(layout.start).data(layout.address(k, i / 8)) + i % 8 * 2, 2);
}

// Calls that follow each other often have one b.
void multiply_e4m3(i32 n, const u8* a, const u8* b, float* d) {
  static u8 decoded_from[256 * kStepBytes];
  static i32 decoded_rows = 0;
  static tensor_core::Decoded decoded;
  if (decoded_rows != n || std::memcmp(decoded_from, b, static_cast<std::size_t>(n) * kStepBytes)) {
    tensor_core::decode(n, b, decoded);
    std::memcpy(decoded_from, b, static_cast<std::size_t>(n) * kStepBytes);
    decoded_rows = n;
  }
  tensor_core::wgmma_k32_e4m3(kRows, n, a, decoded, d);
}

void multiply_k16(WgmmaType type, i32 n, const u8* a, const u8* b, float* d) {
  u16 left[kRows * kStepHalves];
  u16 right[256 * kStepHalves];
  std::memcpy(left, a, sizeof(left));
  std::memcpy(right, b, static_cast<std::size_t>(n) * kStepBytes);
  const auto half = type == WgmmaType::bf16 ? tensor_core::Half::bf16 : tensor_core::Half::f16;
  tensor_core::step_k16(half, kRows, n, left, right, d);
}

void execute(Warpgroup& group, i64 number) {
  Wgmma& operation = group.operation(number);
  static u8 a[kRows * kStepBytes];
  static u8 b[256 * kStepBytes];
  const WgmmaOperands& operands = operation.operands;
  const i32 n = operands.n;
  if (operation.a.empty())
    read_operand(decode(operands.a, "a", /*mn_major=*/false, operation.place), kRows, a);
  else
    std::memcpy(a, operation.a.data(), sizeof(a));
  if (operands.sign < 0)
    for (u8& code : a) code ^= 0x80;
  const Layout b_layout = layout_of_b(operands, operation.place);
  if (operands.b_mn_major)
    read_transposed(b_layout, n, b);
  else
    read_operand(b_layout, n, b);
  if (operands.type == WgmmaType::e4m3)
    multiply_e4m3(n, a, b, operation.values.data());
  else
    multiply_k16(operands.type, n, a, b, operation.values.data());
  operation.executed = true;
  const i64 begin = std::max(operation.ready_time, own_block().tensor_cores_busy);
  operation.done_time = begin + i64{kRows} * n * kStepBytes / cycles::kMacsPerCycle;
  own_block().tensor_cores_busy = operation.done_time;
  trace::work("tensor", format("wgmma m64n%dk%d", n, operands.type == WgmmaType::e4m3 ? 32 : 16),
              self().warp(), begin, operation.done_time, operation.place);
  for (Wgmma& later : group.operations)
    if (later.previous == number) later.values = operation.values;
}

// The 16 rows of a that a warp's lanes hold. visit(lane, i, bytes): register i of a lane, and where
// it stands in operation.a. Source: PTX ISA 8.7, section 9.7.15.5.1, "register fragments".
template <class Visit>
void for_each_register_of_a(i32 quarter, Wgmma& operation, Visit&& visit) {
  for (i32 lane = 0; lane < kWarp; ++lane)
    for (i32 i = 0; i < 4; ++i) {
      const i32 row = 16 * quarter + lane / 4 + i % 2 * 8;
      visit(lane, i, operation.a.data() + row * kStepBytes + i / 2 * 16 + lane % 4 * 4);
    }
}

void take_fragments(const Warp& warp, i32 quarter, Wgmma& operation) {
  operation.a.resize(kRows * kStepBytes);
  for_each_register_of_a(quarter, operation, [&](i32 lane, i32 i, u8* bytes) {
    const u32* fragment = operands_of(warp, lane).fragment;
    operation.fragment[quarter * kWarp + lane] = fragment;
    std::memcpy(bytes, fragment + i, 4);
  });
}

// They belong to the operation until somebody has waited for it.
void check_fragments(i32 quarter, Wgmma& operation, Place at) {
  for_each_register_of_a(quarter, operation, [&](i32 lane, i32 i, const u8* bytes) {
    if (std::memcmp(bytes, operation.fragment[quarter * kWarp + lane] + i, 4) == 0) return;
    fail("accumulator",
         format("register %d of operand a in lane %d was overwritten while the wgmma that reads it "
                "was in flight",
                i, lane) +
             cite("the wgmma is at", operation.place),
         at);
  });
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
    const Layout a = decode(first.a, "a", /*mn_major=*/false, at);
    check_layout(a, quarter_of_a(quarter), "a", at);
    for_each_unit(a, quarter_of_a(quarter), begin);
  } else {
    take_fragments(warp, quarter, operation);
  }
  const Layout b = layout_of_b(first, at);
  check_layout(b, part_of_b(first), "b", at);
  if (first.b_mn_major) check_panels(b, part_of_b(first), at);
  for_each_unit(b, part_of_b(first), begin);

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
      for_each_unit(decode(operation.operands.a, "a", /*mn_major=*/false, 0), quarter_of_a(quarter),
                    end);
    else
      check_fragments(quarter, operation, at);
    for_each_unit(layout_of_b(operation.operands, 0), part_of_b(operation.operands), end);
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

void wgmma_e4m3(float* d, const u32* a, i32 sign, u64 b, i32 n, bool accumulate, At at) {
  WgmmaOperands operands{
      .d = d, .a = 0, .b = b, .fragment = a, .n = n, .accumulate = accumulate, .sign = sign};
  meet(Meeting::wgmma, reinterpret_cast<u64>(&operands), 0, at);
}

void wgmma_k16(WgmmaType type, float* d, u64 a, u64 b, i32 n, bool accumulate, At at) {
  WgmmaOperands operands{d, a, b, nullptr, n, accumulate, type};
  meet(Meeting::wgmma, reinterpret_cast<u64>(&operands), 0, at);
}

void wgmma_k16(WgmmaType type, float* d, const u32* a, u64 b, i32 n, bool accumulate, At at) {
  WgmmaOperands operands{d, 0, b, a, n, accumulate, type, /*b_mn_major=*/true};
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
