#include "runtime/store.h"

#include <fmt/format.h>
#include <pthread.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>

#include "runtime/cache.h"
#include "runtime/errors.h"
#include "runtime/files.h"
#include "runtime/nvrtc.h"
#include "runtime/settings.h"

namespace deep_kernels::store {

namespace {

struct HashKey {
  std::size_t operator()(const SpecKey& key) const {
    std::uint64_t hash = 0;
    for (const std::uint64_t word : key.words) {
      hash = (hash ^ word) * 0x9e3779b97f4a7c15ull;
      hash ^= hash >> 29;
    }
    return hash;
  }
};

struct Built {
  cache::Entry entry;
  BuildReport report;
};

// One build in flight: the first thread builds, the others wait for the outcome.
struct Flight {
  std::mutex lock;
  std::condition_variable done;
  bool finished = false;
  std::shared_ptr<const Built> built;
  std::exception_ptr failure;

  void finish(std::shared_ptr<const Built> result, std::exception_ptr error) {
    {
      const std::scoped_lock held(lock);
      finished = true;
      built = std::move(result);
      failure = std::move(error);
    }
    done.notify_all();
  }
  std::shared_ptr<const Built> wait() {
    std::unique_lock held(lock);
    done.wait(held, [&] { return finished; });
    if (failure) std::rethrow_exception(failure);
    return built;
  }
};

struct State {
  std::shared_mutex lock;
  std::unordered_map<SpecKey, std::unique_ptr<Module>, HashKey> modules;
  std::unordered_map<std::string, std::shared_ptr<Flight>> flights;  // by entry
  // What no folder took, by file name.
  std::unordered_map<std::string, std::shared_ptr<const Built>> unsaved;
};

// Never destroyed: at process exit the driver may be gone before the modules. A child of fork must
// not wait for locks that a thread of its parent held: it starts clean, and the parent's kernels,
// useless there, stay where they are.
State* state = new State;
[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, [] { state = new State; });

std::optional<cache::Entry> load_or_warn(const std::filesystem::path& file) {
  cache::Loaded loaded = cache::load(file);
  if (!loaded.fault.empty())
    warn(fmt::format("deep_kernels: ignoring the cache entry {}: {}", file.string(), loaded.fault));
  return std::move(loaded.entry);
}

std::shared_ptr<const Built> make_built(const std::string& entry, const char* origin,
                                        const std::string& file, cache::Entry&& content) {
  BuildReport report{entry, origin, file, content.about, 0};
  return std::make_shared<const Built>(Built{std::move(content), std::move(report)});
}

std::shared_ptr<const Built> load_any_version(const std::filesystem::path& folder,
                                              const std::string& entry, const char* origin) {
  for (const auto& file : cache::files(folder, cache::file_prefix(entry)))
    if (auto found = load_or_warn(file))
      return make_built(entry, origin, file.string(), std::move(*found));
  return nullptr;
}

// Entries of the prebuilt folder serve any NVRTC, or none.
std::shared_ptr<const Built> load_prebuilt(const std::string& entry) {
  const auto folder = settings::prebuilt_dir();
  if (!folder) return nullptr;
  static std::atomic<bool> warned = false;
  if (!is_folder(*folder) && !warned.exchange(true))
    warn(fmt::format("deep_kernels: DEEP_KERNELS_PREBUILT_DIR names {}, where there is no folder",
                     folder->string()));
  return load_any_version(*folder, entry, "prebuilt");
}

// What no folder took before; the folder may have room by now.
std::shared_ptr<const Built> find_unsaved(const std::filesystem::path& file, bool use_disk) {
  std::shared_ptr<const Built> kept;
  {
    const std::shared_lock lock(state->lock);
    const auto found = state->unsaved.find(file.filename().string());
    if (found == state->unsaved.end()) return nullptr;
    kept = found->second;
  }
  if (!use_disk || !cache::save(file, kept->entry)) return kept;
  {
    const std::unique_lock lock(state->lock);
    state->unsaved.erase(file.filename().string());
  }
  auto saved = std::make_shared<Built>(*kept);
  saved->report.file = file.string();
  return saved;
}

// Prebuilt folder, cache folder, compiler, in this order.
std::shared_ptr<const Built> load_or_compile(const BuildRequest& request,
                                             const std::string& entry) {
  if (auto found = load_prebuilt(entry)) return found;

  const settings::CacheDir dir = settings::cache_dir();
  const bool use_disk = !dir.in_public_place || cache::make_private(dir.path);
  const bool no_compile = settings::no_compile();
  const Nvrtc* nvrtc = nullptr;
  try {
    nvrtc = &Nvrtc::get();
  } catch (const CompileError& error) {
    // Without NVRTC any cached version still runs; with it, its own version is asked for.
    if (use_disk)
      if (auto found = load_any_version(dir.path, entry, "cache")) return found;
    if (no_compile) throw compiling_is_forbidden(request);
    throw nvrtc_is_missing(request, error.what());
  }
  const std::string name = cache::file_name(entry, nvrtc->version());
  const std::filesystem::path file = dir.path / name;
  if (use_disk)
    if (auto found = load_or_warn(file))
      return make_built(entry, "cache", file.string(), std::move(*found));
  if (auto found = find_unsaved(file, use_disk)) return found;
  if (no_compile) throw compiling_is_forbidden(request);
  cache::Entry compiled = compile(request, entry, *nvrtc);
  const bool saved = use_disk && cache::save(file, compiled);
  auto built = make_built(entry, "compiled", saved ? file.string() : "", std::move(compiled));
  if (!saved) {
    auto kept = std::make_shared<Built>(*built);
    kept->report.origin = "memory";
    const std::unique_lock lock(state->lock);
    state->unsaved.emplace(name, std::move(kept));
  }
  return built;
}

struct Obtained {
  std::shared_ptr<const Built> built;
  bool by_other_thread;
};

// load_or_compile, once for all threads that ask for one entry at a time.
Obtained obtain(const BuildRequest& request, const std::string& entry) {
  State& current = *state;
  std::shared_ptr<Flight> flight;
  bool mine = false;
  {
    const std::unique_lock lock(current.lock);
    std::shared_ptr<Flight>& slot = current.flights[entry];
    mine = slot == nullptr;
    if (mine) slot = std::make_shared<Flight>();
    flight = slot;
  }
  if (!mine) return {flight->wait(), true};

  const HeldWarnings until_the_others_go_on;
  std::shared_ptr<const Built> built;
  std::exception_ptr failure;
  try {
    built = load_or_compile(request, entry);
  } catch (...) {
    failure = std::current_exception();
  }
  {
    const std::unique_lock lock(current.lock);
    current.flights.erase(entry);  // a failed build may be tried again
  }
  flight->finish(built, failure);
  if (failure) std::rethrow_exception(failure);
  return {std::move(built), false};
}

}  // namespace

Module* find(const SpecKey& key) {
  State& current = *state;
  const std::shared_lock lock(current.lock);
  const auto found = current.modules.find(key);
  return found == current.modules.end() ? nullptr : found->second.get();
}

Module& build(const SpecKey& key, const BuildRequest& request) {
  const std::string entry = entry_name(request);
  const std::shared_ptr<const Built> built = obtain(request, entry).built;
  State& current = *state;
  const std::unique_lock lock(current.lock);
  std::unique_ptr<Module>& slot = current.modules[key];  // another thread may have been faster
  if (slot == nullptr) slot = std::make_unique<Module>(entry, built->entry.cubin);
  return *slot;
}

BuildReport prepare(const BuildRequest& request) {
  const auto begin = std::chrono::steady_clock::now();
  const Obtained obtained = obtain(request, entry_name(request));
  BuildReport report = obtained.built->report;
  if (obtained.by_other_thread) report.origin = "memory";
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begin;
  report.seconds = elapsed.count();
  return report;
}

}  // namespace deep_kernels::store
