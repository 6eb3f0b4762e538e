// Global memory: the tensors of the launch, to the byte, and who wrote which element.
#pragma once

#include "machine.h"

namespace deep_kernels::emulator {

class GlobalMemory {
 public:
  void begin_launch(const DkLaunch& launch);
  // Refuses bytes that are not wholly inside elements of one tensor, and misaligned addresses.
  void check_read(const void* address, u32 bytes, u32 align, const char* use, Place at,
                  i32 thread = -1);
  void read_only(const void* address, u32 bytes, Place at);
  // Of what this launch has written.
  void read_written(const void* address, u32 bytes, Place at);
  void write(void* address, const void* from, u32 bytes, Place at);

 private:
  struct Dimension {
    i64 size, stride;
  };
  struct Writer {
    i32 block = -1;
    u16 thread = 0;
    Place place = 0;
    u32 clock = 0;
  };
  struct Tensor {
    const char* name;
    const u8* begin;
    i64 span;                           // bytes from the first to behind the last element
    i64 run;                            // contiguous bytes at each place of the outer dimensions
    std::vector<Dimension> dimensions;  // outer ones, largest stride first
    std::string shape;
    i64 element_bytes;
    bool writable;
    std::vector<Writer> writers;  // per element_bytes of the span

    // Whether the bytes at this offset all belong to elements.
    bool holds(i64 offset, i64 bytes) const;
  };

  Tensor& find(const void* address, u32 bytes, u32 align, const char* use, Place at, i32 thread);

  std::vector<Tensor> tensors_;
  std::size_t last_ = 0;
};
extern GlobalMemory global;

}  // namespace deep_kernels::emulator
