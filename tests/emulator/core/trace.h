// Events of a launch for the timeline: what each warp waited for and when.
#pragma once

#include "machine.h"

namespace deep_kernels::emulator::trace {

void open(const char* file);
void close();
void begin_block(i32 block);
void role(const Thread& thread);
void exit(const Thread& thread);

}  // namespace deep_kernels::emulator::trace
