// Which Specs serve the FP8 prefill MLP, and the words of a case.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <span>

#include "ops/checks.h"
#include "ops/silu_check.h"
#include "ops/silu_fold.h"
#include "runtime/errors.h"
#include "runtime/settings.h"
#include "runtime/source.h"

namespace deep_kernels {

namespace {

std::optional<double> take_number(CaseReader& reader, const std::string& name) {
  const auto text = reader.take(name);
  if (!text || *text == "None") return std::nullopt;
  char* end = nullptr;
  const double value = std::strtod(text->c_str(), &end);
  if (text->empty() || *end != '\0')
    throw ValueError(fmt::format("{}: {} must be a number, got '{}'", reader.op(), name, *text));
  return value;
}

SiluCase read_activation(CaseReader& reader) {
  const std::string activation = reader.take("activation").value_or("silu");
  const std::string scale_fmt = reader.take("scale_fmt").value_or("fp32");
  const std::optional<double> clamp = take_number(reader, "clamp");
  const std::optional<double> alpha = take_number(reader, "alpha");
  const double up_offset = take_number(reader, "up_offset").value_or(0.0);
  return activation_case(reader.op().c_str(), {activation, clamp, alpha, up_offset, scale_fmt});
}

// What these variables name overrules the choice.
constexpr const char* kTileVariable = "DEEP_KERNELS_SILU_TILE";            // see name_of(tile)
constexpr const char* kAlgorithmVariable = "DEEP_KERNELS_SILU_ALGORITHM";  // of the fold
constexpr const char* kStagesVariable = "DEEP_KERNELS_SILU_STAGES";

// Which of the choices a variable names, each by its word(choice). A call whose variables are not
// set, which is every ordinary one, makes no text.
template <class Choices, class Word>
auto forced(const char* variable, const Choices& choices, Word&& word)
    -> std::optional<std::decay_t<decltype(choices[0])>> {
  const auto text = settings::of_op(variable);
  if (!text) return std::nullopt;
  std::vector<std::string> words;
  for (const auto& choice : choices) {
    words.push_back(word(choice));
    if (*text == words.back()) return choice;
  }
  throw ValueError(
      fmt::format("{} must be one of {}, got '{}'", variable, fmt::join(words, ", "), *text));
}

// "128": tokens; "128x2": of a cluster of two blocks of threads.
std::string name_of(const FoldTile& tile) {
  return tile.cluster == 1 ? fmt::format("{}", tile.tokens())
                           : fmt::format("{}x{}", tile.tokens(), tile.cluster);
}

FoldAlgorithm choose_algorithm(const Arch& arch) {
  if (arch.backend == Backend::sm90) return FoldAlgorithm::one_pass;
  static constexpr FoldAlgorithm kAll[] = {FoldAlgorithm::interleaved, FoldAlgorithm::two_pass};
  const auto word = [](FoldAlgorithm one) { return std::string(name_of(one)); };
  return forced(kAlgorithmVariable, std::span(kAll), word).value_or(kAll[0]);
}

u8 choose_stages(const FoldTile& tile) {
  const auto most = static_cast<u8>(fold_stages(tile));
  const u8 all[] = {1, most};
  const bool has_one = most > 1 && fold_has_stages(tile, 1);
  const auto word = [](u8 stages) { return fmt::format("{}", stages); };
  return forced(kStagesVariable, std::span(all).last(has_one ? 2 : 1), word).value_or(most);
}

// What a tile takes: time of a round over the card, the largest tile's 100. sm90: H200, 2026-11-30,
// 2B and 8B from 64 to 512 tokens. sm89: on the same card at 128 and 8192 tokens of 2B; the largest
// tile never won there, so that it is listed with what it took.
struct TileCost {
  FoldTile tile;
  i64 time;
};
std::span<const TileCost> tile_costs(Backend backend) {
  constexpr Backend kOld = Backend::sm89, kNew = Backend::sm90;
  static constexpr TileCost kSm89[] = {{{kOld, 1, 1}, 36}, {{kOld, 2, 1}, 51}, {{kOld, 4, 1}, 100}};
  static constexpr TileCost kSm90[] = {{{kNew, 1, 2}, 40},
                                       {{kNew, 2, 2}, 55},
                                       {{kNew, 3, 2}, 75},
                                       {{kNew, 1, 1}, 63},
                                       {{kNew, 2, 1}, 100}};
  if (backend == Backend::sm90) return kSm90;
  return kSm89;
}

std::optional<FoldTile> forced_tile(const Arch& arch) {
  const auto forced_cost =
      forced(kTileVariable, tile_costs(arch.backend),
             [](const TileCost& cost) { return name_of(cost.tile); });
  if (!forced_cost) return std::nullopt;
  return forced_cost->tile;
}

// The tile whose rounds over the card take least; of equals the last, which reads w least often.
FoldTile choose_tile(const Arch& arch, const GemmSizes& sizes, i64 num_blocks) {
  if (const auto forced = forced_tile(arch)) return *forced;
  std::optional<FoldTile> best;
  i64 least = 0;
  for (const auto& [tile, time] : tile_costs(arch.backend)) {
    if (tile.cluster > sizes.num_sms) continue;
    const i64 tiles = ceil_div<i64>(sizes.num_tokens, tile.tokens()) * num_blocks;
    const i64 total = ceil_div<i64>(tiles, sizes.num_sms / tile.cluster) * time;
    if (!best || total <= least) {
      best = tile;
      least = total;
    }
  }
  return *best;
}

SiluFoldSpec fold_spec(const SiluCase& wanted, const Arch& arch, const FoldTile& tile) {
  const SiluFoldSpec spec{.backend = arch.backend,
                          .algorithm = choose_algorithm(arch),
                          .activation = wanted.activation,
                          .rounding = wanted.rounding,
                          .scale_format = wanted.scale_format,
                          .token_groups = static_cast<u8>(tile.token_groups),
                          .cluster = static_cast<u8>(tile.cluster),
                          .stages = choose_stages(tile)};
  // Nothing that is chosen: what the variables name may not go together.
  if (const char* reason = spec.invalid())
    throw ValueError(fmt::format("{}: {} for {}", kSiluFoldOp, reason, describe_spec(spec)));
  return spec;
}

BlockGemmSpec gemm_spec(const SiluCase& wanted, const Arch& arch, const FoldTile& tile) {
  return {.backend = arch.backend,
          .out_dtype = wanted.out_dtype,
          .token_groups = static_cast<u8>(tile.token_groups),
          .cluster = static_cast<u8>(tile.cluster),
          .stages = static_cast<u8>(fold_stages(tile))};
}

}  // namespace

SiluCase read_silu_fold_case(CaseReader& reader) {
  SiluCase wanted = read_activation(reader);
  wanted.rounding = reader.take_bool("round_bf16", true) ? Rounding::bfloat16 : Rounding::float32;
  const auto fused = reader.take("fused");
  if (fused && *fused != "None") {
    if (*fused != "True" && *fused != "False")
      throw ValueError(
          fmt::format("{}: fused must be True, False or None, got '{}'", reader.op(), *fused));
    wanted.fused = *fused == "True";
  }
  return wanted;
}
SiluCase read_block_gemm_case(CaseReader& reader) {
  SiluCase wanted;
  wanted.out_dtype = reader.take_dtype("out_dtype", DType::bfloat16);
  reader.take_bool("residual", false);  // both run in one kernel
  return wanted;
}
SiluCase read_silu_mul_case(CaseReader& reader) { return read_activation(reader); }

std::optional<std::string> silu_refusal(const SiluCase& wanted, Backend backend) {
  if (wanted.fused == false && wanted.rounding == Rounding::float32)
    return std::string(kUnroundedSplit);
  if (wanted.out_dtype == DType::float16) return fmt::format("{}, got float16", kGemmDtypes);
  if (backend == Backend::sm100) return std::string("there are no sm100 kernels for it yet");
  return std::nullopt;
}

bool choose_fused(const Arch&, const GemmSizes&) { return true; }

SiluFoldSpec choose_silu_fold_spec(const SiluCase& wanted, const Arch& arch,
                                   const GemmSizes& sizes) {
  const i64 blocks = ceil_div<i64>(sizes.num_columns, kScaleBlock);
  return fold_spec(wanted, arch, choose_tile(arch, sizes, blocks));
}
BlockGemmSpec choose_block_gemm_spec(const SiluCase& wanted, const Arch& arch,
                                     const GemmSizes& sizes) {
  const i64 blocks = ceil_div<i64>(sizes.num_columns, kFoldTileRows);
  return gemm_spec(wanted, arch, choose_tile(arch, sizes, blocks));
}
SiluMulSpec choose_silu_mul_spec(const SiluCase& wanted) {
  return {.backend = Backend::sm89,
          .activation = wanted.activation,
          .scale_format = wanted.scale_format};
}

std::vector<TuningRow> silu_tuning() {
  std::vector<TuningRow> rows;
  for (const Backend backend : {Backend::sm89, Backend::sm90}) {
    std::string times;
    for (const auto& [tile, time] : tile_costs(backend))
      times += fmt::format("{}{} {}", times.empty() ? "" : ", ", name_of(tile), time);
    rows.push_back({.op = kSiluFoldOp,
                    .backend = backend,
                    .gpu = "NVIDIA H200",
                    .choice = "the tile whose rounds over the card take least",
                    .cases = "",
                    .date = "2026-11-30",
                    .gain = 0.0,
                    .reason = fmt::format("time of a round by tokens of a tile (x2: of a cluster), "
                                          "the largest tile's 100: {}",
                                          times)});
  }
  return rows;
}

std::vector<SiluFoldSpec> silu_fold_specs(const SiluCase& wanted, const Arch& arch) {
  std::vector<SiluFoldSpec> specs;
  for (const TileCost& cost : tile_costs(arch.backend))
    specs.push_back(fold_spec(wanted, arch, cost.tile));
  return specs;
}
std::vector<BlockGemmSpec> block_gemm_specs(const SiluCase& wanted, const Arch& arch) {
  std::vector<BlockGemmSpec> specs;
  for (const TileCost& cost : tile_costs(arch.backend))
    specs.push_back(gemm_spec(wanted, arch, cost.tile));
  return specs;
}

KernelText kernel_text(const SiluFoldSpec& spec) {
  const bool uses_maps = spec.backend == Backend::sm90;
  return {.header = uses_maps ? "deep_kernels/kernels/silu_fold_sm90.cuh"
                              : "deep_kernels/kernels/silu_fold_sm89.cuh",
          .spec_type = "SiluFoldSpec",
          .function = uses_maps ? "silu_fold_sm90" : "silu_fold_sm89",
          .params = uses_maps ? "DK_GRID_CONSTANT dk::SiluFoldArgs args,\n"
                                "DK_GRID_CONSTANT dk::BlockGemmMaps<dk::ptx::TensorMap> maps"
                              : "DK_GRID_CONSTANT dk::SiluFoldArgs args",
          .arguments = uses_maps ? "args, maps" : "args",
          .args_type = "SiluFoldArgs",
          .args_bytes = sizeof(SiluFoldArgs)};
}
KernelText kernel_text(const BlockGemmSpec& spec) {
  const bool uses_maps = spec.backend == Backend::sm90;
  return {.header = uses_maps ? "deep_kernels/kernels/block_gemm_sm90.cuh"
                              : "deep_kernels/kernels/block_gemm_sm89.cuh",
          .spec_type = "BlockGemmSpec",
          .function = uses_maps ? "block_gemm_sm90" : "block_gemm_sm89",
          .params = uses_maps ? "DK_GRID_CONSTANT dk::BlockGemmArgs args,\n"
                                "DK_GRID_CONSTANT dk::BlockGemmMaps<dk::ptx::TensorMap> maps"
                              : "DK_GRID_CONSTANT dk::BlockGemmArgs args",
          .arguments = uses_maps ? "args, maps" : "args",
          .args_type = "BlockGemmArgs",
          .args_bytes = sizeof(BlockGemmArgs)};
}
KernelText kernel_text(const SiluMulSpec&) {
  return {.header = "deep_kernels/kernels/silu_mul.cuh",
          .spec_type = "SiluMulSpec",
          .function = "silu_mul",
          .params = "DK_GRID_CONSTANT dk::SiluMulArgs args",
          .arguments = "args",
          .args_type = "SiluMulArgs",
          .args_bytes = sizeof(SiluMulArgs)};
}

}  // namespace deep_kernels
