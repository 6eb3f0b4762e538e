#include "runtime/compile.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "runtime/digest.h"
#include "runtime/errors.h"
#include "runtime/include_tree.h"
#include "runtime/ptxas_log.h"
#include "runtime/settings.h"

namespace deep_kernels {

namespace {

std::string key_text(const BuildRequest& request) {
  KeyText key;
  key.add(fmt::format("schema {}", cache::kSchema)).add(request.op).add(request.spec_json);
  key.add(request.target.name());
  for (const std::string& option : compile_options(request.target)) key.add(option);
  key.add(include_tree().digest);
  // The ten lines themselves, so that a version that writes them differently never meets the other.
  key.add(request.source(request.spec, request.text, "entry"));
  return key.text();
}

// Spilled bytes that are tolerated. A Spec's limit is that of the NVRTC its kernel was measured
// with; other versions allot registers otherwise, and spill some words where edges of windows are
// tested (NVRTC 13.2: up to 28 bytes).
int spill_limit(const BuildRequest& request, const Nvrtc& nvrtc) {
  constexpr std::string_view kMeasured = "13.0";
  constexpr int kElsewhere = 32;
  return request.spill_limit_bytes + (nvrtc.version() == kMeasured ? 0 : kElsewhere);
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
      nvrtc.version(), include_tree().digest, notes.registers, notes.spill_store_bytes,
      notes.spill_load_bytes, spill_limit(request, nvrtc), notes.wgmma_serialized,
      request.num_wgmma, result.seconds);
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

// The end of a sentence that begins with the kernel.
std::string searched_places() {
  std::string places = settings::cache_dir().path.string();
  if (const auto prebuilt = settings::prebuilt_dir())
    places = fmt::format("{} and {}", prebuilt->string(), places);
  return places;
}

}  // namespace

std::string entry_name(const BuildRequest& request) {
  return fmt::format("dk_{}_{}_{}", request.op, request.target.name(),
                     hex_digest(key_text(request), 16));
}

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

CompileError compiling_is_forbidden(const BuildRequest& request) {
  return CompileError(fmt::format(
      "{} for {} is neither in memory nor in {}, and DEEP_KERNELS_NO_COMPILE=1 forbids compiling "
      "it; spec: {}",
      request.op, request.target.name(), searched_places(), request.spec_text));
}

CompileError nvrtc_is_missing(const BuildRequest& request, const std::string& reason) {
  return CompileError(
      fmt::format("{} for {} is neither in memory nor in {} and cannot be compiled; spec: {}; {}",
                  request.op, request.target.name(), searched_places(), request.spec_text, reason));
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
  built.cubin = result.code;
  return built;
}

}  // namespace deep_kernels
