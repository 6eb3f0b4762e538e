#include "global.h"

#include <algorithm>

#include "report.h"
#include "trace.h"

namespace deep_kernels::emulator {

GlobalMemory global;

void GlobalMemory::begin_launch(const DkLaunch& launch) {
  tensors_.clear();
  last_ = 0;
  for (int i = 0; i < launch.num_tensors; ++i) {
    const DkTensor& given = launch.tensors[i];
    Tensor tensor{.name = given.name,
                  .begin = static_cast<const u8*>(given.data),
                  .span = given.element_bytes,
                  .run = given.element_bytes,
                  .dimensions = {},
                  .shape = "[",
                  .element_bytes = given.element_bytes,
                  .writable = given.writable != 0,
                  .writers = {}};
    bool empty = false;
    for (int d = 0; d < given.rank; ++d) {
      tensor.shape += format("%s%lld", d > 0 ? ", " : "", given.sizes[d]);
      empty = empty || given.sizes[d] == 0;
      if (given.sizes[d] <= 1 || given.strides[d] == 0) continue;
      tensor.dimensions.push_back({given.sizes[d], given.strides[d]});
      tensor.span += (given.sizes[d] - 1) * given.strides[d];
    }
    tensor.shape += "]";
    std::sort(tensor.dimensions.begin(), tensor.dimensions.end(),
              [](const Dimension& a, const Dimension& b) { return a.stride > b.stride; });
    while (!tensor.dimensions.empty() && tensor.dimensions.back().stride == tensor.run) {
      tensor.run *= tensor.dimensions.back().size;
      tensor.dimensions.pop_back();
    }
    if (empty) tensor.span = tensor.run = 0;
    if (tensor.writable) tensor.writers.resize(tensor.span / tensor.element_bytes);
    tensors_.push_back(std::move(tensor));
  }
}

bool GlobalMemory::Tensor::holds(i64 offset, i64 bytes) const {
  for (const Dimension& dimension : dimensions) {
    const i64 index = std::min(offset / dimension.stride, dimension.size - 1);
    offset -= index * dimension.stride;
  }
  return offset + bytes <= run;
}

GlobalMemory::Tensor& GlobalMemory::find(const void* address, u32 bytes, u32 align, const char* use,
                                         Place at, i32 thread) {
  const auto* wanted = static_cast<const u8*>(address);
  if (reinterpret_cast<u64>(wanted) % align != 0)
    fail("alignment", format("%s at %p: the address must be a multiple of %u", use, address, align),
         at, thread);
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    Tensor& tensor = tensors_[(last_ + i) % tensors_.size()];
    const i64 offset = wanted - tensor.begin;
    if (offset < 0 || offset + bytes > tensor.span || !tensor.holds(offset, bytes)) continue;
    last_ = (last_ + i) % tensors_.size();
    return tensor;
  }
  // Name the tensor that was probably meant: the nearest.
  const Tensor* nearest = nullptr;
  i64 distance = 0;
  for (const Tensor& tensor : tensors_) {
    const i64 offset = wanted - tensor.begin;
    const i64 away = offset < 0 ? -offset : std::max<i64>(0, offset + bytes - tensor.span);
    if (nearest != nullptr && away >= distance) continue;
    nearest = &tensor;
    distance = away;
  }
  std::string place = "no tensor is there";
  if (nearest != nullptr) {
    const i64 offset = wanted - nearest->begin;
    place = format("byte %+lld of %s %s, %s", offset, nearest->name, nearest->shape.c_str(),
                   offset < 0                       ? "before its first element"
                   : offset + bytes > nearest->span ? "past its last element"
                                                    : "between its rows");
  }
  fail("bounds", format("%s of %u bytes at %p: %s", use, bytes, address, place.c_str()), at,
       thread);
}

void GlobalMemory::check_read(const void* address, u32 bytes, u32 align, const char* use, Place at,
                              i32 thread) {
  find(address, bytes, align, use, at, thread);
}

void GlobalMemory::read_only(const void* address, u32 bytes, Place at) {
  const Tensor& tensor = find(address, bytes, bytes, "load", at, -1);
  if (tensor.writable)
    fail("read-only",
         format("loads from %s through the read-only path, but the kernel writes it", tensor.name),
         at);
}

void GlobalMemory::read_written(const void* address, u32 bytes, Place at) {
  const Tensor& tensor = find(address, bytes, bytes, "load", at, -1);
  const i64 offset = static_cast<const u8*>(address) - tensor.begin;
  const u32* clocks = machine.clocks_of(self().index);
  for (i64 i = offset / tensor.element_bytes; i * tensor.element_bytes < offset + bytes; ++i) {
    const Writer* writer = tensor.writable ? &tensor.writers[i] : nullptr;
    if (writer == nullptr || writer->block < 0)
      fail("uninitialized",
           format("loads element %lld of %s %s, which this kernel has not written", i, tensor.name,
                  tensor.shape.c_str()),
           at);
    if (writer->block != identity.block || clocks[writer->thread] < writer->clock)
      fail("race",
           format("loads element %lld of %s %s that another thread wrote: nothing orders the two",
                  i, tensor.name, tensor.shape.c_str()) +
               cite("the other is at", writer->place),
           at);
  }
}

void GlobalMemory::write(void* address, const void* from, u32 bytes, Place at) {
  Tensor& tensor = find(address, bytes, bytes, "store", at, -1);
  if (!tensor.writable)
    fail("read-only", format("stores to %s, which is an input", tensor.name), at);
  const i64 offset = static_cast<u8*>(address) - tensor.begin;
  const i32 thread = self().index;
  const u32* clocks = machine.clocks_of(thread);
  for (i64 i = offset / tensor.element_bytes; i * tensor.element_bytes < offset + bytes; ++i) {
    Writer& writer = tensor.writers[i];
    const bool ordered = writer.block < 0 ||
                         (writer.block == identity.block && clocks[writer.thread] >= writer.clock);
    if (!ordered)
      fail("race",
           format("stores to element %lld of %s %s, which %s wrote too: nothing orders the two", i,
                  tensor.name, tensor.shape.c_str(),
                  writer.block == identity.block ? thread_name(writer.thread).c_str()
                                                 : format("block %d", writer.block).c_str()) +
               cite("the other is at", writer.place),
           at);
    writer = {identity.block, static_cast<u16>(thread), at, machine.clock_of(thread)};
  }
  std::memcpy(address, from, bytes);
}

// --- what ptx/ calls

void load_global(void* to, const void* address, u32 bytes, At at) {
  self().touched_global = true;
  spend(cycles::kGlobalLoad);
  global.read_only(address, bytes, place_of(at));
  std::memcpy(to, address, bytes);
}

void load_global_written(void* to, const void* address, u32 bytes, At at) {
  self().touched_global = true;
  spend(cycles::kGlobalLoad);
  global.read_written(address, bytes, place_of(at));
  std::memcpy(to, address, bytes);
}

void store_global(void* address, const void* from, u32 bytes, At at) {
  self().touched_global = true;
  spend(cycles::kGlobalStore);
  for (u32 i = 0; i + 4 <= bytes; i += 4) {
    u32 word;
    std::memcpy(&word, static_cast<const u8*>(from) + i, 4);
    if (word == kPoison) meet_poison(at);
  }
  maybe_yield();
  global.write(address, from, bytes, place_of(at));
}

void grid_dependency_wait(At at) {
  Thread& thread = self();
  if (thread.touched_global)
    fail("grid-dependency", "touches global memory before griddepcontrol.wait", place_of(at));
  thread.waited_dependency = true;
}

}  // namespace deep_kernels::emulator
