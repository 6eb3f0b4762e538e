// CPU backend of the paged MQA logits op: as the dense one, with kv tokens looked up page by page.
#pragma once

#include "deep_kernels/contract/paged_mqa_logits.h"

namespace deep_kernels::cpu {

// Writes args.logits, of logits_dtype; columns beyond the lengths only where args.clean. The caller
// has checked every shape, dtype and stride, and that there are pages.
void paged_mqa_logits(Format format, i32 head_dim, DType logits_dtype,
                      const PagedMqaLogitsArgs& args);

// Writes the contract's cuts of args.num_sms equal runs into args.schedule.
void paged_mqa_schedule(const PagedMqaScheduleArgs& args);

}  // namespace deep_kernels::cpu
