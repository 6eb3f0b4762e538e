// Which exponentials flash attention emulates where a call does not say: the first row that fits.
// Written by `python -m deep_kernels tune attention` on a card, not by hand. "Off" is an answer.
#pragma once

#include "ops/attention_rows.h"

namespace deep_kernels {

// clang-format off
inline constexpr Ex2Row kEx2Table[] = {
    {Backend::cpu, {}, 0, {}, 0, 0, {}, "", "", 0.0000,
     "a polynomial of eight instructions either way; emulation is there to compare bits with"},
    {Backend::sm89, {}, 0, {}, 0, 0, {}, "", "", 0.0000,
     "not measured"},
    {Backend::sm90, {}, 0, {}, 0, 0, {}, "", "", 0.0000,
     "not measured; wgmma of head_dim 256 takes four times as long as MUFU, and at 64 the kernel is bound by how many instructions it issues, of which emulation adds eight for one"},
};
// clang-format on

}  // namespace deep_kernels
