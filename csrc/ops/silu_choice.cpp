// Which Specs serve the FP8 prefill MLP, and the words of a case.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <span>

#include "ops/checks.h"
#include "ops/silu_check.h"
#include "ops/silu_fold.h"
#include "ops/silu_table.h"
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
constexpr const char* kTileVariable = "DEEP_KERNELS_SILU_TILE";            // see word_of
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

// All tiles that there are, and one as the tables know it.
std::vector<FoldTile> all_tiles(const Arch& arch) {
  std::vector<FoldTile> tiles;
  for_each_fold_tile(arch.backend, [&](const FoldTile& tile) { tiles.push_back(tile); });
  return tiles;
}
TileShape shape_of(const FoldTile& tile) { return {tile.tokens(), tile.cluster}; }

// For people. "128": tokens; "128x2": of a cluster of two.
std::string word_of(TileShape tile) {
  return tile.sms == 1 ? fmt::format("{}", tile.tokens)
                       : fmt::format("{}x{}", tile.tokens, tile.sms);
}

std::optional<FoldTile> forced_tile(const Arch& arch) {
  if (!settings::of_op(kTileVariable)) return std::nullopt;
  return forced(kTileVariable, all_tiles(arch),
                [](const FoldTile& tile) { return word_of(shape_of(tile)); });
}
// Those that calls may get.
std::vector<FoldTile> possible_tiles(const Arch& arch) {
  if (const auto tile = forced_tile(arch)) return {*tile};
  return all_tiles(arch);
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

// The measured tile of these sizes, if any; else the one whose rounds over the card take least, of
// equals the last. A tile that was not measured is never chosen.
FoldTile choose_tile(const Arch& arch, const GemmSizes& sizes, i64 num_blocks, TileShape measured) {
  if (const auto forced = forced_tile(arch)) return *forced;
  std::optional<FoldTile> best;
  i64 least = 0;
  for_each_fold_tile(arch.backend, [&](const FoldTile& tile) {
    const TileShape shape = shape_of(tile);
    const i64 time = tile_time(kTileRows, arch.backend, shape);
    if (time == 0 || tile.cluster > sizes.num_sms) return;
    const i64 total = shape == measured
                          ? 0
                          : time * fold_rounds(shape, sizes.num_tokens, num_blocks, sizes.num_sms);
    if (!best || total <= least) {
      best = tile;
      least = total;
    }
  });
  return *best;
}

i64 num_fold_blocks(const GemmSizes& sizes) {
  return ceil_div<i64>(sizes.num_columns, kScaleBlock);
}
FoldTile choose_fold_tile(const Arch& arch, const GemmSizes& sizes) {
  const FoldRow* row = find_fold_row(kFoldRows, arch.backend, sizes.num_columns, sizes.num_tokens);
  const TileShape measured =
      row ? row->tile_for(sizes.num_columns, sizes.num_tokens, sizes.num_sms) : kByRounds;
  return choose_tile(arch, sizes, num_fold_blocks(sizes), measured);
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

bool choose_fused(const Arch& arch, const GemmSizes& sizes) {
  return fold_is_chosen(kFoldRows, arch.backend, sizes.num_columns, sizes.num_tokens);
}

SiluFoldSpec choose_silu_fold_spec(const SiluCase& wanted, const Arch& arch,
                                   const GemmSizes& sizes) {
  return fold_spec(wanted, arch, choose_fold_tile(arch, sizes));
}
BlockGemmSpec choose_block_gemm_spec(const SiluCase& wanted, const Arch& arch,
                                     const GemmSizes& sizes) {
  const i64 blocks = ceil_div<i64>(sizes.num_columns, kFoldTileRows);
  return gemm_spec(wanted, arch, choose_tile(arch, sizes, blocks, kByRounds));
}
SiluMulSpec choose_silu_mul_spec(const SiluCase& wanted) {
  return {.backend = Backend::sm89,
          .activation = wanted.activation,
          .scale_format = wanted.scale_format};
}

FoldChoice describe_fold_choice(const Arch& arch, const GemmSizes& sizes) {
  FoldChoice choice{.rounds = {},
                    .tile = word_of(shape_of(choose_fold_tile(arch, sizes))),
                    .fused = choose_fused(arch, sizes)};
  for_each_fold_tile(arch.backend, [&](const FoldTile& tile) {
    const TileShape shape = shape_of(tile);
    choice.rounds.emplace_back(word_of(shape), fold_rounds(shape, sizes.num_tokens,
                                                           num_fold_blocks(sizes), sizes.num_sms));
  });
  return choice;
}

std::vector<TuningRow> silu_tuning() {
  std::vector<TuningRow> rows;
  for (const TileRow& row : kTileRows)
    rows.push_back({.op = kSiluFoldOp,
                    .backend = row.backend,
                    .gpu = row.gpu,
                    .choice = "the tile whose rounds over the card take least",
                    .cases = fmt::format("tile {}: a round counts {}", word_of(row.tile), row.time),
                    .date = row.date,
                    .gain = 0.0,
                    .reason = row.reason});
  for (const FoldRow& row : kFoldRows) {
    const char* way = row.fused ? "fold" : "two launches";
    const bool by_rounds = row.tile == kByRounds;
    rows.push_back(
        {.op = kSiluFoldOp,
         .backend = row.backend,
         .gpu = row.gpu,
         .choice = by_rounds ? way : fmt::format("{}, its tile {}", way, word_of(row.tile)),
         .cases = fmt::format("I {}, up to {} tokens", row.num_columns, row.max_tokens),
         .date = row.date,
         .gain = row.gain,
         .reason = row.reason});
  }
  return rows;
}

std::vector<SiluFoldSpec> silu_fold_specs(const SiluCase& wanted, const Arch& arch) {
  std::vector<SiluFoldSpec> specs;
  for (const FoldTile& tile : possible_tiles(arch)) specs.push_back(fold_spec(wanted, arch, tile));
  return specs;
}
std::vector<BlockGemmSpec> block_gemm_specs(const SiluCase& wanted, const Arch& arch) {
  std::vector<BlockGemmSpec> specs;
  for (const FoldTile& tile : possible_tiles(arch)) specs.push_back(gemm_spec(wanted, arch, tile));
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
