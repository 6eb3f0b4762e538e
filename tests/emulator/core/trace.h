// Events of a launch for the timeline: what each warp waited for, and when.
//
// Time is counted per thread in cycles of a simple model: every operation costs what it roughly
// takes on an H200, whoever waits goes on when what it waits for is done, copies and tensor cores
// are busy one job at a time. Good for seeing how a kernel moves, not for predicting its speed.
#pragma once

#include "machine.h"

namespace deep_kernels::emulator {

// Cycles. Source: orders of magnitude as known of Hopper; nothing depends on them but pictures.
namespace cycles {
inline constexpr i64 kShared = 8;
inline constexpr i64 kGlobalLoad = 60;  // loads overlap: a share of the latency
inline constexpr i64 kGlobalStore = 8;
inline constexpr i64 kMeeting = 8;
inline constexpr i64 kMma = 32;
inline constexpr i64 kBarrier = 20;
inline constexpr i64 kCopyLatency = 700;
inline constexpr i64 kPeerLatency = 200;  // to the shared memory of another block
inline constexpr i64 kCopyBytesPerCycle = 64;
inline constexpr i64 kMacsPerCycle = 4096;  // e4m3, all four tensor cores of an SM
}  // namespace cycles

inline void spend(i64 amount) { identity.time += amount; }
inline void wait_until(i64 time) { identity.time = max_of(identity.time, time); }

namespace trace {

void open(const char* file);
void close();
bool on();

void begin_cluster();
void role(const Thread& thread);
void exit(const Thread& thread);
// The current thread waits from now until `end`; `phase` is -1 where there is none. With
// `whole_warp` it speaks for its warp, else lane 0 does.
void wait(const std::string& what, i64 phase, i64 end, Place at, bool whole_warp = false);
// The current thread does something at once, such as an arrival.
void mark(const std::string& what, i64 phase, Place at);
// Work of a unit that is no warp: "tensor cores", "copies".
void work(const char* unit, const std::string& what, i32 warp, i64 begin, i64 end, Place at);

}  // namespace trace

}  // namespace deep_kernels::emulator
