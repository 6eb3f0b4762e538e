// Tasks that threads take as they come to them: cores differ and are shared with others.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>

#include "deep_kernels/contract/types.h"

namespace deep_kernels::cpu {

// work(state, task) for every task; each thread makes a state of its own by make_state().
template <class MakeState, class Work>
void for_each_task(i64 num_tasks, const MakeState& make_state, const Work& work) {
  const i64 num_workers = std::min<i64>(at::get_num_threads(), num_tasks);
  std::atomic<i64> next_task{0};
  at::parallel_for(0, num_workers, 1, [&](i64, i64) {
    auto state = make_state();
    for (;;) {
      const i64 task = next_task.fetch_add(1, std::memory_order_relaxed);
      if (task >= num_tasks) return;
      work(state, task);
    }
  });
}

}  // namespace deep_kernels::cpu
