// Of the FP8 prefill MLP: what a tile's round over the card takes, and where the fold or the two
// launches are faster. Written by `python -m deep_kernels tune silu_fold` on a card, not by hand.
#pragma once

#include "ops/silu_rows.h"

namespace deep_kernels {

// clang-format off
inline constexpr TileRow kTileRows[] = {
    {Backend::sm89, {32, 1}, 360, "NVIDIA H200", "2026-11-30",
     "I 6144 at 128 and 8192 tokens, benchmarks/notes_silu.md"},
    {Backend::sm89, {64, 1}, 510, "NVIDIA H200", "2026-11-30",
     "I 6144 at 128 and 8192 tokens, benchmarks/notes_silu.md"},
    {Backend::sm89, {128, 1}, 1000, "NVIDIA H200", "2026-11-30",
     "I 6144 at 128 and 8192 tokens, benchmarks/notes_silu.md"},
    {Backend::sm90, {64, 1}, 660, "NVIDIA H200", "2026-11-30",
     "I 6144 and 12288 at 64 to 512 tokens, benchmarks/notes_silu.md"},
    {Backend::sm90, {64, 2}, 400, "NVIDIA H200", "2026-11-30",
     "I 6144 and 12288 at 64 to 512 tokens, benchmarks/notes_silu.md"},
    {Backend::sm90, {128, 2}, 600, "NVIDIA H200", "2026-11-30",
     "I 6144 and 12288 at 64 to 512 tokens, benchmarks/notes_silu.md"},
    {Backend::sm90, {192, 2}, 800, "NVIDIA H200", "2026-11-30",
     "I 6144 and 12288 at 64 to 512 tokens, benchmarks/notes_silu.md"},
    {Backend::sm90, {128, 1}, 1000, "NVIDIA H200", "2026-11-30",
     "I 6144 and 12288 at 64 to 512 tokens, benchmarks/notes_silu.md"},
};
inline constexpr FoldRow kFoldRows[] = {
    {Backend::sm89, 6144, 2048, 8192, true, kByRounds, 0, "", "", 0.0000,
     "on 2026-11-30 the two launches were not measured here: the fold needs no memory between them"},
    {Backend::sm89, 12288, 4096, 8192, true, kByRounds, 0, "", "", 0.0000,
     "on 2026-11-30 the two launches were not measured here: the fold needs no memory between them"},
    {Backend::sm90, 6144, 2048, 8192, true, kByRounds, 132, "NVIDIA H200", "2026-11-30", 0.1929,
     "two launches over fold at 16, 32, 64, 128, 192, 256, 512, 1024, 2048, 8192 tokens: +19.3% to +36.4%; from benchmarks/results/silu_fold.json"},
    {Backend::sm90, 12288, 4096, 8192, true, kByRounds, 132, "NVIDIA H200", "2026-11-30", 0.0836,
     "two launches over fold at 16, 32, 64, 128, 192, 256, 512, 1024, 2048, 8192 tokens: +8.4% to +16.6%; from benchmarks/results/silu_fold.json"},
};
// clang-format on

}  // namespace deep_kernels
