// Which Spec serves flash attention, and the words of a case.
#include <fmt/format.h>

#include <algorithm>

#include "ops/attention.h"
#include "ops/attention_table.h"
#include "ops/checks.h"
#include "runtime/errors.h"
#include "runtime/source.h"

namespace deep_kernels {

namespace {

std::optional<int64_t> take_count(CaseReader& reader, const std::string& name) {
  const auto text = reader.take(name);
  if (!text || *text == "None") return std::nullopt;
  CaseReader alone(reader.op(), {{name, *text}});
  return alone.take_int(name, 0);
}

// The elements of a row as ex2_emulated_share and choose_ex2 count them.
Ex2Emulation canonical(const Ex2Words& words, RowFragments fragments) {
  return ex2_canonical(*words.freq, *words.res, words.start_frg.value_or(0), fragments);
}

i64 heads_per_kv(const AttentionCase& wanted) { return wanted.num_q_heads / wanted.num_kv_heads; }

const Ex2Row& row_of(const AttentionCase& wanted, Backend backend) {
  const Ex2Row* row = find_ex2_row(kEx2Table, backend, wanted.dtype, wanted.head_dim, wanted.causal,
                                   heads_per_kv(wanted), wanted.num_kv);
  if (row != nullptr) return *row;
  throw UnsupportedError(
      fmt::format("{}: there are no {} kernels for it yet", kAttentionOp, name_of(backend)));
}

AttentionTile tile_of(const AttentionCase& wanted, Backend backend, bool packs_heads) {
  i64 num_rows = wanted.num_q;
  if (packs_heads) num_rows = min_of(num_rows * heads_per_kv(wanted), kFewRows);
  return attention_tile(backend, static_cast<i32>(wanted.head_dim), wanted.causal, num_rows);
}

// Of the longest member and one kv head.
i64 num_units(const AttentionCase& wanted, const AttentionTile& tile, bool packs_heads) {
  AttentionArgs args{};
  args.batch = args.num_kv_heads = args.num_splits = 1;
  args.num_q = static_cast<i32>(wanted.num_q);
  args.num_q_heads = static_cast<i32>(heads_per_kv(wanted));
  AttentionSpec spec{};
  spec.packs_heads = packs_heads;
  return with_tile(spec, tile).num_units(args);
}

// Whether rows of all heads of a kv head, which read its keys together, make at most half as many
// units. Where the queries of a head fill tiles of their own they do not.
bool packing_pays(const AttentionCase& wanted, Backend backend) {
  if (backend != Backend::sm90 || wanted.num_q == 0 || wanted.num_q > kFewRows) return false;
  if (heads_per_kv(wanted) == 1 || heads_per_kv(wanted) > kAttentionGroupRows) return false;
  const auto units = [&](bool packs_heads) {
    return num_units(wanted, tile_of(wanted, backend, packs_heads), packs_heads);
  };
  return 2 * units(true) <= units(false);
}

std::string describe(Ex2Emulation ex2) {
  if (ex2 == Ex2Emulation{}) return "off";
  return fmt::format("freq {} res {} start_frg {}", ex2.freq, ex2.res, ex2.start_fragment);
}

std::string cases_of(const Ex2Row& row) {
  std::string text;
  const auto add = [&](const std::string& word) { text += (text.empty() ? "" : ", ") + word; };
  if (row.dtype) add(name_of(*row.dtype));
  if (row.head_dim != 0) add(fmt::format("head_dim {}", row.head_dim));
  if (row.causal) add(*row.causal ? "causal" : "full");
  if (row.min_heads_per_kv > 0)
    add(fmt::format("{} or more heads per kv head", row.min_heads_per_kv));
  if (row.min_num_kv > 0) add(fmt::format("{} or more keys", row.min_num_kv));
  return text;
}

}  // namespace

AttentionCase read_attention_case(CaseReader& reader) {
  AttentionCase wanted;
  wanted.dtype = reader.take_dtype("dtype", wanted.dtype);
  wanted.head_dim = reader.take_int("head_dim", wanted.head_dim);
  wanted.num_q_heads = reader.take_int("num_q_heads", wanted.num_q_heads);
  wanted.num_kv_heads = reader.take_int("num_kv_heads", wanted.num_kv_heads);
  wanted.num_q = reader.take_int("num_q", wanted.num_q);
  wanted.num_kv = reader.take_int("num_kv", wanted.num_kv);
  wanted.causal = reader.take_bool("causal", wanted.causal);
  wanted.varlen = reader.op() == kVarlenAttentionOp;
  wanted.ex2 = {take_count(reader, "ex2_emu_freq"), take_count(reader, "ex2_emu_res"),
                take_count(reader, "ex2_emu_start_frg")};
  wanted.num_splits = take_count(reader, "num_splits");
  reader.take_bool("return_lse", false);  // it is always computed
  check_ex2(reader.op().c_str(), wanted.ex2);
  check_num_splits(reader.op().c_str(), wanted.num_splits);
  return wanted;
}

std::optional<std::string> attention_refusal(const AttentionCase& wanted, Backend backend) {
  if (wanted.dtype == DType::float32)
    return std::string("dtype must be bfloat16 or float16, got float32");
  if (wanted.head_dim != 64 && wanted.head_dim != 128 && wanted.head_dim != 256)
    return fmt::format("head_dim must be 64, 128 or 256, got {}", wanted.head_dim);
  if (wanted.num_kv_heads < 1)
    return fmt::format("num_kv_heads must be at least 1, got {}", wanted.num_kv_heads);
  if (wanted.num_q_heads < 1 || wanted.num_q_heads % wanted.num_kv_heads != 0)
    return fmt::format("num_q_heads must be a positive multiple of num_kv_heads={}, got {}",
                       wanted.num_kv_heads, wanted.num_q_heads);
  using Tokens = std::pair<const char*, int64_t>;
  for (const auto& [name, tokens] :
       {Tokens("num_q", wanted.num_q), Tokens("num_kv", wanted.num_kv)})
    if (tokens < 0) return fmt::format("{} must be at least 0, got {}", name, tokens);
  if (backend == Backend::sm100)
    return fmt::format("there are no {} kernels for it yet", name_of(backend));
  return std::nullopt;
}

double ex2_emulated_share(const Ex2Words& words, int64_t fragment, int64_t num_fragments) {
  constexpr const char* op = "ex2_emulated_share";
  constexpr int64_t kMost = 1 << 20;
  check_ex2(op, words, "");
  if (fragment < 2 || fragment > kMost || fragment % 2 != 0)
    throw ValueError(fmt::format("{}: fragment must be an even number from 2 to {}, got {}", op,
                                 kMost, fragment));
  if (num_fragments < 1 || num_fragments > kMost)
    throw ValueError(
        fmt::format("{}: num_fragments must be from 1 to {}, got {}", op, kMost, num_fragments));
  const RowFragments fragments{static_cast<i32>(fragment), static_cast<i32>(num_fragments)};
  const i64 emulated =
      ex2_num_emulated(*words.freq, *words.res, words.start_frg.value_or(0), fragments);
  return static_cast<double>(emulated) / static_cast<double>(fragment * num_fragments);
}

Ex2Emulation choose_ex2(const AttentionCase& wanted, Backend backend, i32 tile_keys) {
  if (!wanted.ex2.freq) return row_of(wanted, backend).ex2;
  return canonical(wanted.ex2, attention_fragments(backend, tile_keys));
}

i32 choose_num_splits(const AttentionCase& wanted, i64 num_units, i64 num_workers,
                      i64 num_key_tiles) {
  if (wanted.num_splits) return static_cast<i32>(*wanted.num_splits);
  return attention_num_splits(num_units, num_workers, num_key_tiles, wanted.num_q);
}

AttentionSpec choose_attention_spec(const AttentionCase& wanted, const Arch& arch, bool split) {
  const bool packs_heads = packing_pays(wanted, arch.backend);
  const AttentionTile tile = tile_of(wanted, arch.backend, packs_heads);
  const Ex2Emulation ex2 = choose_ex2(wanted, arch.backend, tile.keys);
  return with_tile({.backend = arch.backend,
                    .dtype = wanted.dtype,
                    .head_panels = static_cast<u8>(wanted.head_dim / kHeadPanel),
                    .causal = wanted.causal,
                    .varlen = wanted.varlen,
                    .split = split,
                    .packs_heads = packs_heads,
                    .ex2_freq = ex2.freq,
                    .ex2_res = ex2.res,
                    .ex2_start_fragment = ex2.start_fragment},
                   tile);
}

std::vector<AttentionSpec> attention_specs_of(const AttentionCase& wanted, const Arch& arch,
                                              bool split) {
  std::vector<AttentionSpec> specs = {choose_attention_spec(wanted, arch, split)};
  if (wanted.num_q > 0) return specs;
  AttentionCase few = wanted;
  for (few.num_q = 1; few.num_q <= kFewRows; ++few.num_q)
    if (const AttentionSpec spec = choose_attention_spec(few, arch, split);
        std::find(specs.begin(), specs.end(), spec) == specs.end())
      specs.push_back(spec);
  return specs;
}

Ex2Choice describe_ex2_choice(const AttentionCase& wanted, const std::optional<Arch>& arch) {
  Ex2Choice choice;
  if (arch) {
    const AttentionSpec spec = choose_attention_spec(wanted, *arch, /*split=*/false);
    choice = {spec.ex2(), spec.fragments(), {}};
  } else {
    choice = {choose_ex2(wanted, Backend::cpu, kCpuTileKeys),
              attention_fragments(Backend::cpu, kCpuTileKeys),
              {}};
  }
  const auto [length, count] = choice.fragments;
  for (i32 k = 0; k < length * count; ++k)
    if (ex2_is_emulated(choice.ex2, k % length, k / length, count)) choice.emulated.push_back(k);
  return choice;
}

AttentionJoinSpec choose_attention_join_spec(const AttentionCase& wanted, const Arch& arch) {
  return {.backend = arch.backend,
          .dtype = wanted.dtype,
          .head_panels = static_cast<u8>(wanted.head_dim / kHeadPanel)};
}

std::vector<TuningRow> attention_tuning() {
  std::vector<TuningRow> rows;
  for (const Ex2Row& row : kEx2Table)
    rows.push_back({.op = kAttentionOp,
                    .backend = row.backend,
                    .gpu = row.gpu,
                    .choice = fmt::format("exp2 emulation {}", describe(row.ex2)),
                    .cases = cases_of(row),
                    .date = row.date,
                    .gain = row.gain,
                    .reason = row.reason});
  return rows;
}

KernelText kernel_text(const AttentionSpec& spec) {
  const bool uses_maps = spec.backend == Backend::sm90;
  return {.header = uses_maps ? "deep_kernels/kernels/attention_sm90.cuh"
                              : "deep_kernels/kernels/attention_sm89.cuh",
          .spec_type = "AttentionSpec",
          .function = uses_maps ? "attention_sm90" : "attention_sm89",
          .params = uses_maps ? "DK_GRID_CONSTANT dk::AttentionArgs args,\n"
                                "DK_GRID_CONSTANT dk::AttentionMaps<dk::ptx::TensorMap> maps"
                              : "DK_GRID_CONSTANT dk::AttentionArgs args",
          .arguments = uses_maps ? "args, maps" : "args",
          .args_type = "AttentionArgs",
          .args_bytes = sizeof(AttentionArgs)};
}
KernelText kernel_text(const AttentionJoinSpec&) {
  return {.header = "deep_kernels/kernels/attention_join.cuh",
          .spec_type = "AttentionJoinSpec",
          .function = "attention_join",
          .params = "DK_GRID_CONSTANT dk::AttentionArgs args",
          .arguments = "args",
          .args_type = "AttentionArgs",
          .args_bytes = sizeof(AttentionArgs)};
}

}  // namespace deep_kernels
