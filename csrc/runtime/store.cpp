#include "runtime/store.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <pthread.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>

#include "runtime/cache.h"
#include "runtime/digest.h"
#include "runtime/errors.h"
#include "runtime/include_tree.h"
#include "runtime/nvrtc.h"
#include "runtime/ptxas_log.h"
#include "runtime/settings.h"

namespace deep_kernels::store {

namespace {

// Goes up when the generated text or the meaning of a key changes.
constexpr int kSchema = 1;

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

// One build in flight: the first thread builds, the others wait for the outcome.
struct Build {
  std::mutex lock;
  std::condition_variable done;
  bool finished = false;
  Module* module = nullptr;
  std::exception_ptr failure;
};

struct State {
  std::shared_mutex lock;
  std::unordered_map<SpecKey, std::unique_ptr<Module>, HashKey> modules;
  std::unordered_map<SpecKey, std::shared_ptr<Build>, HashKey> builds;
};

// Never destroyed: at process exit the driver may be gone before the modules.
State*& state() {
  static State* current = [] {
    // A child of fork must not wait for locks that a thread of its parent held: it starts clean,
    // and the parent's kernels, useless there, stay where they are.
    pthread_atfork(nullptr, nullptr, [] { state() = new State; });
    return new State;
  }();
  return current;
}

std::string key_text(const BuildRequest& request) {
  KeyText key;
  key.add(fmt::format("schema {}", kSchema)).add(request.op).add(request.spec_json);
  key.add(request.target.name());
  for (const std::string& option : compile_options(request.target)) key.add(option);
  key.add(include_digest());
  return key.text();
}

std::string about_json(const BuildRequest& request, const std::string& entry, const Nvrtc& nvrtc,
                       const CompileResult& result) {
  const PtxasNotes notes = parse_ptxas_log(result.log);
  std::vector<std::string> options;
  for (const std::string& option : compile_options(request.target))
    options.push_back(fmt::format("\"{}\"", option));
  return fmt::format(
      "{{\"entry\": \"{}\", \"op\": \"{}\", \"target\": \"{}\", \"spec\": {}, \"options\": [{}], "
      "\"nvrtc\": \"{}\", \"include_digest\": \"{}\", \"registers\": {}, \"spill_store_bytes\": "
      "{}, "
      "\"spill_load_bytes\": {}, \"spill_limit_bytes\": {}, \"wgmma_serialized\": {}, "
      "\"num_wgmma\": {}, \"compile_seconds\": {:.3f}}}",
      entry, request.op, request.target.name(), request.spec_json, fmt::join(options, ", "),
      nvrtc.version(), include_digest(), notes.registers, notes.spill_store_bytes,
      notes.spill_load_bytes, request.spill_limit_bytes, notes.wgmma_serialized, request.num_wgmma,
      result.seconds);
}

std::string numbered(const std::string& text) {
  std::string lines;
  int number = 1;
  for (std::size_t begin = 0; begin < text.size(); ++number) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    lines += fmt::format("{:4} | {}\n", number, text.substr(begin, end - begin));
    begin = end + 1;
  }
  return lines;
}

[[noreturn]] void refuse_compile(const BuildRequest& request) {
  throw CompileError(fmt::format(
      "{} for {} is neither in memory nor in {} and DEEP_KERNELS_NO_COMPILE=1 forbids compiling "
      "it: {}",
      request.op, request.target.name(), settings::cache_dir().string(), request.spec_text));
}

cache::Entry compile(const BuildRequest& request, const std::string& entry, const Nvrtc& nvrtc) {
  cache::Entry built;
  built.source = request.source(request.spec, request.text, entry);
  const std::vector<std::string> options = compile_options(request.target);
  const CompileResult result =
      nvrtc.compile(entry + ".cu", built.source, include_tree().headers, options);
  if (!result.ok)
    throw CompileError(fmt::format(
        "compiling {} for {} failed\nspec: {}\noptions: {}\nNVRTC {} at {}\n{}\nsource:\n{}",
        request.op, request.target.name(), request.spec_text, fmt::join(options, " "),
        nvrtc.version(), nvrtc.path(), result.log, numbered(built.source)));
  built.about = about_json(request, entry, nvrtc, result);
  built.cubin = result.cubin;
  return built;
}

struct Built {
  cache::Entry entry;
  BuildReport report;
};

std::optional<cache::Entry> load_or_warn(const std::filesystem::path& file) {
  cache::Loaded loaded = cache::load(file);
  if (!loaded.fault.empty())
    warn(fmt::format("deep_kernels: ignoring the cache entry {}: {}", file.string(), loaded.fault));
  return std::move(loaded.entry);
}

// Prebuilt folder, cache folder, compiler, in this order.
Built load_or_compile(const BuildRequest& request) {
  const auto begin = std::chrono::steady_clock::now();
  const std::string key = hex_digest(key_text(request), 16);
  const std::string entry = fmt::format("dk_{}_{}_{}", request.op, request.target.name(), key);
  const auto report = [&](const char* origin, const std::string& file, const std::string& about) {
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begin;
    return BuildReport{entry, origin, file, about, elapsed.count()};
  };

  // Prebuilt entries serve any NVRTC, or none: only the name up to the version must fit.
  if (const auto folder = settings::prebuilt_dir()) {
    for (const auto& file : cache::files(*folder, entry + "-nvrtc")) {
      if (auto found = load_or_warn(file)) {
        BuildReport origin = report("prebuilt", file.string(), found->about);
        return {std::move(*found), std::move(origin)};
      }
    }
  }
  // Without NVRTC any cached version still runs; with it, its own version is asked for.
  const bool no_compile = settings::no_compile();
  const Nvrtc* nvrtc = nullptr;
  try {
    nvrtc = &Nvrtc::get();
  } catch (const CompileError&) {
    if (!no_compile) throw;
    refuse_compile(request);
  }
  const std::filesystem::path file =
      settings::cache_dir() / fmt::format("{}-nvrtc{}{}", entry, nvrtc->version(), cache::kSuffix);
  if (auto found = load_or_warn(file)) {
    BuildReport origin = report("cache", file.string(), found->about);
    return {std::move(*found), std::move(origin)};
  }
  if (no_compile) refuse_compile(request);
  cache::Entry compiled = compile(request, entry, *nvrtc);
  const bool saved = cache::save(file, compiled);
  BuildReport origin = report("compiled", saved ? file.string() : "", compiled.about);
  return {std::move(compiled), std::move(origin)};
}

}  // namespace

const std::string& include_digest() { return include_tree().digest; }

std::vector<std::string> compile_options(const Target& target) {
  std::vector<std::string> options = {
      fmt::format("--gpu-architecture={}", target.name()),
      "--std=c++20",
      "-default-device",  // the contract's functions carry no __device__
      "--fmad=false",     // a fused multiply-add is written as such
      "--ptxas-options=-v",
      "--ptxas-options=-warn-spills",
  };
  if (settings::line_info()) options.push_back("--generate-line-info");
  return options;
}

Module* find(const SpecKey& key) {
  State& current = *state();
  const std::shared_lock lock(current.lock);
  const auto found = current.modules.find(key);
  return found == current.modules.end() ? nullptr : found->second.get();
}

Module& build(const SpecKey& key, const BuildRequest& request) {
  State& current = *state();
  std::shared_ptr<Build> flight;
  bool mine = false;
  {
    const std::unique_lock lock(current.lock);
    const auto found = current.modules.find(key);
    if (found != current.modules.end()) return *found->second;
    std::shared_ptr<Build>& slot = current.builds[key];
    mine = slot == nullptr;
    if (mine) slot = std::make_shared<Build>();
    flight = slot;
  }
  if (!mine) {
    std::unique_lock lock(flight->lock);
    flight->done.wait(lock, [&] { return flight->finished; });
    if (flight->failure) std::rethrow_exception(flight->failure);
    return *flight->module;
  }

  std::unique_ptr<Module> module;
  std::exception_ptr failure;
  try {
    Built built = load_or_compile(request);
    module = std::make_unique<Module>(built.report.entry, std::move(built.entry.cubin));
  } catch (...) {
    failure = std::current_exception();
  }
  Module* result = module.get();
  {
    const std::unique_lock lock(current.lock);
    if (module) current.modules.emplace(key, std::move(module));
    current.builds.erase(key);  // a failed build may be tried again
  }
  {
    const std::scoped_lock lock(flight->lock);
    flight->finished = true;
    flight->module = result;
    flight->failure = failure;
  }
  flight->done.notify_all();
  if (failure) std::rethrow_exception(failure);
  return *result;
}

BuildReport prepare(const BuildRequest& request) { return load_or_compile(request).report; }

}  // namespace deep_kernels::store
