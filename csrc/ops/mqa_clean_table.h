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
    {Backend::sm90, Format::fp8, Schedule::derived, Clean::concurrent, "NVIDIA H200", "2026-11-30", 0.0000,
     "costs -0.3% to 2.6% over no cleaning; not compared with deferred"},
    {Backend::sm90, Format::fp8, Schedule::metadata, Clean::concurrent, "NVIDIA H200", "2026-11-30", 0.0000,
     "costs -0.3% to 2.6% over no cleaning; not compared with deferred"},
    {Backend::sm90, Format::mxfp8, Schedule::derived, Clean::concurrent, "", "", 0.0000,
     "as fp8, until it is measured"},
    {Backend::sm90, Format::mxfp8, Schedule::metadata, Clean::concurrent, "", "", 0.0000,
     "as fp8, until it is measured"},
    {Backend::sm90, Format::mxfp4, Schedule::derived, Clean::concurrent, "", "", 0.0000,
     "as fp8, until it is measured"},
    {Backend::sm90, Format::mxfp4, Schedule::metadata, Clean::concurrent, "", "", 0.0000,
     "as fp8, until it is measured"},
};
// clang-format on

}  // namespace deep_kernels
