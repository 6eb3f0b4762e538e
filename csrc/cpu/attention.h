// Flash attention forward on the CPU: tiles of 64 rows (query tokens times the query heads of one
// kv head) against tiles of 128 keys. Shapes, strides and dtypes are the contract's; nothing is
// checked here.
#pragma once

#include "deep_kernels/contract/attention.h"

namespace deep_kernels::cpu {

void attention(const AttentionArgs& args, DType dtype, i32 head_dim, bool causal, Ex2Emulation ex2);

// Tiles of rows that threads may share, for the choice of num_splits.
i64 attention_num_tiles(const AttentionArgs& args);

}  // namespace deep_kernels::cpu
