#include "trace.h"

#include <cstdio>

#include "report.h"

namespace deep_kernels::emulator::trace {

namespace {

std::FILE* file = nullptr;

std::string quoted(const std::string& text) {
  std::string result = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') result += '\\';
    result += c;
  }
  return result + '"';
}

// `warp` is one of the block of identity.
void write(const char* kind, i32 warp, const std::string& what, i64 phase, i64 begin, i64 end,
           Place at) {
  std::fprintf(file,
               "{\"kind\": \"%s\", \"block\": %d, \"warp\": %d, \"what\": %s, \"phase\": %lld, "
               "\"begin\": %lld, \"end\": %lld, \"at\": %s}\n",
               kind, identity.block, warp, quoted(what).c_str(), phase, begin, end,
               quoted(place_name(at)).c_str());
}

i32 block_warp(i32 warp) { return warp % machine.block_warps; }

// One thread speaks for its warp: lane 0, or whoever acts alone.
bool speaks() { return self().lane() == 0; }

}  // namespace

void open(const char* name) { file = std::fopen(name, "w"); }
void close() {
  if (file != nullptr) std::fclose(file);
  file = nullptr;
}
bool on() { return file != nullptr; }

void begin_cluster() {
  if (!on()) return;
  for (i32 rank = 0; rank < machine.cluster; ++rank) {
    identity.block = machine.first_block + rank;
    write("block", -1, "", -1, 0, 0, 0);
  }
}
void role(const Thread& thread) {
  if (on() && speaks())
    write("role", block_warp(thread.warp()), thread.role, -1, identity.time, identity.time, 0);
}
void exit(const Thread& thread) {
  if (on() && speaks())
    write("exit", block_warp(thread.warp()), "", -1, identity.time, identity.time, 0);
}
void wait(const std::string& what, i64 phase, i64 end, Place at, bool whole_warp) {
  if (on() && (whole_warp || speaks()))
    write("wait", block_warp(self().warp()), what, phase, identity.time, max_of(identity.time, end),
          at);
}
void mark(const std::string& what, i64 phase, Place at) {
  if (on() && speaks())
    write("mark", block_warp(self().warp()), what, phase, identity.time, identity.time, at);
}
void work(const char* unit, const std::string& what, i32 warp, i64 begin, i64 end, Place at) {
  if (on()) write(unit, block_warp(warp), what, -1, begin, end, at);
}

}  // namespace deep_kernels::emulator::trace
