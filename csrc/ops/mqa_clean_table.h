// Where the -inf fill of MQA logits happens, a row per backend, format and way of scheduling.
// Written by `python -m deep_kernels tune mqa_logits` on a card, not by hand.
#pragma once

#include "ops/mqa_clean.h"

namespace deep_kernels {

// clang-format off
inline constexpr CleanRow kCleanTable[] = {
    {Backend::sm89, Format::fp8, Schedule::derived, Clean::deferred, "", "", 0.0000,
     "its warps have no roles: nobody is free to fill meanwhile"},
    {Backend::sm89, Format::fp8, Schedule::metadata, Clean::deferred, "", "", 0.0000,
     "its warps have no roles: nobody is free to fill meanwhile"},
    {Backend::sm89, Format::mxfp8, Schedule::derived, Clean::deferred, "", "", 0.0000,
     "its warps have no roles: nobody is free to fill meanwhile"},
    {Backend::sm89, Format::mxfp8, Schedule::metadata, Clean::deferred, "", "", 0.0000,
     "its warps have no roles: nobody is free to fill meanwhile"},
    {Backend::sm89, Format::mxfp4, Schedule::derived, Clean::deferred, "", "", 0.0000,
     "its warps have no roles: nobody is free to fill meanwhile"},
    {Backend::sm89, Format::mxfp4, Schedule::metadata, Clean::deferred, "", "", 0.0000,
     "its warps have no roles: nobody is free to fill meanwhile"},
    {Backend::sm90, Format::fp8, Schedule::derived, Clean::concurrent, "NVIDIA H200", "2026-11-30", 0.0134,
     "deferred takes 1.34% +- 0.25% longer; deferred over concurrent: 2048/32768 H64 -0.7%, 8192/8192 H64 +2.9%, 2048/32768 H32 +1.9%"},
    {Backend::sm90, Format::fp8, Schedule::metadata, Clean::concurrent, "NVIDIA H200", "2026-11-30", 0.0285,
     "deferred takes 2.85% +- 0.21% longer; deferred over concurrent: 2048/32768 H64 +2.0%, 8192/8192 H64 +4.5%, 2048/32768 H32 +2.1%"},
    {Backend::sm90, Format::mxfp8, Schedule::derived, Clean::concurrent, "NVIDIA H200", "2026-11-30", 0.0107,
     "deferred takes 1.07% +- 0.10% longer; deferred over concurrent: 2048/32768 H64 +0.2%, 8192/8192 H64 +3.1%, 2048/32768 H32 +0.0%"},
    {Backend::sm90, Format::mxfp8, Schedule::metadata, Clean::concurrent, "NVIDIA H200", "2026-11-30", 0.0101,
     "deferred takes 1.01% +- 0.11% longer; deferred over concurrent: 2048/32768 H64 +0.1%, 8192/8192 H64 +3.1%, 2048/32768 H32 -0.1%"},
    {Backend::sm90, Format::mxfp4, Schedule::derived, Clean::concurrent, "NVIDIA H200", "2026-11-30", 0.0122,
     "deferred takes 1.22% +- 0.08% longer; deferred over concurrent: 2048/32768 H64 +0.1%, 8192/8192 H64 +3.4%, 2048/32768 H32 +0.2%"},
    {Backend::sm90, Format::mxfp4, Schedule::metadata, Clean::concurrent, "NVIDIA H200", "2026-11-30", 0.0116,
     "deferred takes 1.16% +- 0.11% longer; deferred over concurrent: 2048/32768 H64 +0.1%, 8192/8192 H64 +3.5%, 2048/32768 H32 -0.0%"},
};
// clang-format on

}  // namespace deep_kernels
