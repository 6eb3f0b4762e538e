// Of the FP8 prefill MLP: what a tile's round over the card takes, and where the fold or the two
// launches are faster. Written by `python -m deep_kernels tune silu_fold` on a card, not by hand.
#pragma once

#include "ops/silu_rows.h"

namespace deep_kernels {

// clang-format off
inline constexpr TileRow kTileRows[] = {
    {Backend::sm89, {32, 1}, 337, "NVIDIA H200", "2026-11-30",
     "16.6 us a round at K 2048, 31.0 us a round at K 4096; the fit's times are off by 0.4% in the median, 9.0% at most"},
    {Backend::sm89, {64, 1}, 519, "NVIDIA H200", "2026-11-30",
     "25.1 us a round at K 2048, 48.2 us a round at K 4096; the fit's times are off by 0.4% in the median, 9.0% at most"},
    {Backend::sm89, {128, 1}, 1000, "NVIDIA H200", "2026-11-30",
     "48.4 us a round at K 2048, 93.2 us a round at K 4096; the fit's times are off by 0.4% in the median, 9.0% at most"},
    {Backend::sm90, {64, 1}, 836, "NVIDIA H200", "2026-11-30",
     "8.5 us a round at K 2048, 17.8 us a round at K 4096; the fit's times are off by 5.0% in the median, 29.3% at most"},
    {Backend::sm90, {128, 1}, 1214, "NVIDIA H200", "2026-11-30",
     "12.5 us a round at K 2048, 25.4 us a round at K 4096; the fit's times are off by 5.0% in the median, 29.3% at most"},
    {Backend::sm90, {64, 2}, 488, "NVIDIA H200", "2026-11-30",
     "5.1 us a round at K 2048, 10.2 us a round at K 4096; the fit's times are off by 5.0% in the median, 29.3% at most"},
    {Backend::sm90, {128, 2}, 719, "NVIDIA H200", "2026-11-30",
     "7.7 us a round at K 2048, 14.5 us a round at K 4096; the fit's times are off by 5.0% in the median, 29.3% at most"},
    {Backend::sm90, {192, 2}, 1000, "NVIDIA H200", "2026-11-30",
     "10.7 us a round at K 2048, 20.2 us a round at K 4096; the fit's times are off by 5.0% in the median, 29.3% at most"},
};
inline constexpr FoldRow kFoldRows[] = {
    {Backend::sm89, 6144, 2048, 8192, true, kByRounds, 132, "NVIDIA H200", "2026-11-30", 0.0394,
     "two launches over fold at 16, 32, 64, 96, 128, 160, 192, 256, 384, 512, 768, 1024, 2048, 4096, 8192 tokens: +3.9% to +13.7%, spread 0.45%; the tile by rounds is up to 0.0% slower than the fastest"},
    {Backend::sm89, 12288, 4096, 8192, true, kByRounds, 132, "NVIDIA H200", "2026-11-30", 0.0189,
     "two launches over fold at 16, 32, 64, 96, 128, 160, 192, 256, 384, 512, 768, 1024, 2048, 4096, 8192 tokens: +1.9% to +9.2%, spread 0.07%; the tile by rounds is up to 0.0% slower than the fastest"},
    {Backend::sm90, 6144, 2048, 8192, true, kByRounds, 132, "NVIDIA H200", "2026-11-30", 0.1703,
     "two launches over fold at 16, 32, 64, 96, 128, 160, 192, 256, 384, 512, 768, 1024, 2048, 4096, 8192 tokens: +17.0% to +40.9%, spread 0.61%; the tile by rounds is up to 0.0% slower than the fastest"},
    {Backend::sm90, 12288, 4096, 32, true, kByRounds, 132, "NVIDIA H200", "2026-11-30", 0.0926,
     "two launches over fold at 16, 32 tokens: +9.3% to +10.1%, spread 0.12%; the tile by rounds is up to 1.6% slower than the fastest"},
    {Backend::sm90, 12288, 4096, 64, true, {64, 2}, 132, "NVIDIA H200", "2026-11-30", 0.1600,
     "two launches over fold at 64 tokens: +16.0% to +16.0%, spread 0.08%; the tile by rounds is up to 4.1% slower than this"},
    {Backend::sm90, 12288, 4096, 8192, true, kByRounds, 132, "NVIDIA H200", "2026-11-30", 0.0967,
     "two launches over fold at 96, 128, 160, 192, 256, 384, 512, 768, 1024, 2048, 4096, 8192 tokens: +9.7% to +24.7%, spread 0.28%; the tile by rounds is up to 0.8% slower than the fastest"},
};
// clang-format on

}  // namespace deep_kernels
