#include "trace.h"

namespace deep_kernels::emulator::trace {

void open(const char*) {}
void close() {}
void begin_block(i32) {}
void role(const Thread&) {}
void exit(const Thread&) {}

}  // namespace deep_kernels::emulator::trace
