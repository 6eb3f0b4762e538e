#include "report.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <fstream>
#include <map>
#include <sstream>
#include <unordered_map>

#include "shared.h"

namespace deep_kernels::emulator {

namespace {

bool have_fault = false;
Fault fault;
std::vector<At> places;
std::unordered_map<const void*, Place> known_places;
// In front of it, since every call of ptx/ asks.
constexpr std::size_t kRecent = 1024;
struct Recent {
  const void* key;
  Place place;
};
Recent recent_places[kRecent];
std::map<std::string, std::vector<std::string>> texts;

const std::vector<std::string>& lines_of(const std::string& file) {
  auto [entry, fresh] = texts.try_emplace(file);
  if (!fresh) return entry->second;
  std::istringstream roots(machine.launch->source_roots);
  for (std::string root; entry->second.empty() && std::getline(roots, root, ':');) {
    std::ifstream stream(root + "/" + file);
    for (std::string line; std::getline(stream, line);) entry->second.push_back(line);
  }
  return entry->second;
}

// Return addresses inside the kernel's library, up the chain of frame pointers.
std::vector<u64> calls_from(const void* frame, const void* instruction) {
  std::vector<u64> calls;
  Dl_info kernel, other;
  if (dladdr(reinterpret_cast<const void*>(machine.launch->entry), &kernel) == 0) return calls;
  const auto add = [&](const void* address, i64 back) {
    if (address == nullptr || dladdr(address, &other) == 0 || other.dli_fbase != kernel.dli_fbase)
      return;
    calls.push_back(static_cast<u64>(static_cast<const u8*>(address) -
                                     static_cast<const u8*>(kernel.dli_fbase) - back));
  };
  add(instruction, 0);
  const auto* link = static_cast<const void* const*>(frame);
  for (i32 depth = 0; link != nullptr && depth < 64; ++depth) {
    add(link[1], 1);  // the call itself, not what follows it
    const auto* next = static_cast<const void* const*>(link[0]);
    if (next <= link || next > link + kStackBytes / sizeof(void*)) break;
    link = next;
  }
  return calls;
}

const void* signal_instruction = nullptr;
const void* signal_frame = nullptr;

}  // namespace

std::string format(const char* pattern, ...) {
  va_list arguments, again;
  va_start(arguments, pattern);
  va_copy(again, arguments);
  std::string text(static_cast<std::size_t>(std::vsnprintf(nullptr, 0, pattern, arguments)), ' ');
  va_end(arguments);
  std::vsnprintf(text.data(), text.size() + 1, pattern, again);
  va_end(again);
  return text;
}

Place place_of(At at) {
  // One object per place in the text: its address is the key.
  static_assert(sizeof(At) == sizeof(void*));
  const void* key = std::bit_cast<const void*>(at);
  Recent& recent = recent_places[std::bit_cast<u64>(key) / 8 % kRecent];
  if (recent.key == key) return recent.place;
  const auto [found, fresh] = known_places.try_emplace(key, 0);
  if (fresh) {
    places.push_back(at);
    found->second = static_cast<Place>(places.size());
  }
  recent = {key, found->second};
  return found->second;
}

std::string place_name(Place place) {
  if (place == 0) return "nowhere";
  const At& at = places[place - 1];
  return format("%s:%u", at.file_name(), at.line());
}

std::string place_line(Place place) {
  if (place == 0) return "";
  const At& at = places[place - 1];
  const auto& lines = lines_of(at.file_name());
  if (at.line() == 0 || at.line() > lines.size()) return "";
  const std::string& line = lines[at.line() - 1];
  const std::size_t begin = line.find_first_not_of(' ');
  return begin == std::string::npos ? "" : line.substr(begin);
}

void forget_places() {
  places.clear();
  known_places.clear();
  std::fill(std::begin(recent_places), std::end(recent_places), Recent{});
  texts.clear();
  have_fault = false;
}

std::string block_name(i32 rank) {
  const i32 block = machine.first_block + rank;
  return machine.cluster == 1 ? format("block %d", block)
                              : format("block %d (rank %d)", block, rank);
}

std::string thread_name(i32 thread) {
  const char* role = machine.threads[thread].role;
  return format("%s, warp %d%s%s%s, lane %d", block_name(machine.threads[thread].rank).c_str(),
                thread / kWarp % machine.block_warps, *role != '\0' ? " (" : "", role,
                *role != '\0' ? ")" : "", thread % kWarp);
}

std::string agent_name(Agent agent) {
  if (agent < machine.num_threads) return thread_name(agent);
  if (agent < machine.num_threads + machine.num_warps) {
    const i32 warp = agent - machine.num_threads;
    const char* role = machine.threads[warp * kWarp].role;
    const std::string name = format("the wgmma of warp %d%s%s%s", warp % machine.block_warps,
                                    *role != '\0' ? " (" : "", role, *role != '\0' ? ")" : "");
    return machine.cluster == 1 ? name : name + " of " + block_name(machine.rank_of(warp));
  }
  const Mbarrier& barrier = machine.mbarriers[agent - machine.num_threads - machine.num_warps];
  return format("a copy counted by mbarrier %s", barrier.name.c_str());
}

std::string smem_name(u32 addr) {
  const auto rank = static_cast<i32>(addr >> kRankShift);
  const std::string name = format("smem+0x%x", addr - smem_base(rank));
  return machine.cluster == 1 ? name : name + format(" of rank %d", rank);
}

std::string cite(const char* what, Place place) {
  if (place == 0) return "";
  return format("\n  %s %s\n      %s", what, place_name(place).c_str(), place_line(place).c_str());
}

void fail(const char* kind, const std::string& what, Place at, i32 thread) {
  if (thread < 0 && machine.current != nullptr) thread = machine.current->index;
  fault.kind = kind;
  fault.text = format("%s: %s", machine.launch->kernel, what.c_str());
  if (thread >= 0) fault.text += "\n  by " + thread_name(thread);
  fault.text += cite("at", at);
  fault.calls.clear();
  if (machine.current != nullptr)
    fault.calls = calls_from(__builtin_frame_address(0), nullptr);
  else if (signal_instruction != nullptr)
    fault.calls = calls_from(signal_frame, signal_instruction);
  signal_instruction = signal_frame = nullptr;
  have_fault = true;
  if (machine.current == nullptr) throw Stop{};
  Stopped never;
  switch_fiber(&never, machine.scheduler);
  __builtin_unreachable();
}

void note_signal(const void* instruction, const void* frame) {
  signal_instruction = instruction;
  signal_frame = frame;
}

bool failed() { return have_fault; }
Fault take_fault() {
  have_fault = false;
  return std::move(fault);
}

}  // namespace deep_kernels::emulator
