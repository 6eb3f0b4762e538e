#include <algorithm>
#include <vector>

#include "cpu/mqa_logits.h"

namespace deep_kernels::cpu {

void mqa_schedule(const at::Tensor& kv_start, const at::Tensor& kv_end, i64 num_kv, i64 num_heads,
                  i32 num_sms, at::Tensor& schedule) {
  const i32* starts = kv_start.const_data_ptr<i32>();
  const i32* ends = kv_end.const_data_ptr<i32>();
  const i64 start_stride = kv_start.stride(0);
  const i64 end_stride = kv_end.stride(0);
  const i32 limit = static_cast<i32>(num_kv);
  const i32 num_q = static_cast<i32>(kv_start.size(0));
  const i32 padded_heads = mqa_padded_heads(static_cast<i32>(num_heads));
  const i32 num_tokens = mqa_tokens_per_block(padded_heads);
  const i32 num_blocks = mqa_num_blocks(num_q, padded_heads);

  constexpr i32 kOpenCost = kMqaScheduleOpenCost;
  std::vector<i32> num_chunks(num_blocks);
  i64 total = 0;
  for (i32 block = 0; block < num_blocks; ++block) {
    i32 begin = limit;
    i32 end = 0;
    const i64 first = i64{block} * num_tokens;
    for (i64 token = first; token < std::min<i64>(first + num_tokens, num_q); ++token) {
      const MqaWindow window =
          mqa_window(starts[token * start_stride], ends[token * end_stride], limit, limit);
      if (window.begin >= window.end) continue;
      begin = std::min(begin, window.begin);
      end = std::max(end, window.end);
    }
    num_chunks[block] = mqa_span(begin, end).num_chunks;
    total += mqa_block_cost(num_chunks[block], kOpenCost);
  }

  const MqaCutPositions positions(total, num_sms);
  i32* cuts = schedule.mutable_data_ptr<i32>();  // [num_sms + 1, 2]
  i32 block = 0;
  i64 position = 0;  // cost of all blocks before `block`
  for (i32 i = 0; i <= num_sms; ++i) {
    const i64 target = positions(i);
    while (block < num_blocks && position + mqa_block_cost(num_chunks[block], kOpenCost) <= target)
      position += mqa_block_cost(num_chunks[block++], kOpenCost);
    const MqaCut cut = block < num_blocks ? mqa_cut_in_block(block, target - position,
                                                             num_chunks[block], kOpenCost)
                                          : MqaCut{num_blocks, 0};
    cuts[2 * i] = cut.block;
    cuts[2 * i + 1] = cut.chunk;
  }
}

}  // namespace deep_kernels::cpu
