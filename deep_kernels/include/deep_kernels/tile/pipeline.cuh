// Ring bookkeeping: which slot, which phase. The only place that counts modulo or flips a phase.
#pragma once

#include "deep_kernels/ptx/base.cuh"

namespace deep_kernels::tile {

// Position in a ring of kSlots. Whoever fills starts on `filler()`: a wait for a slot to be drained
// succeeds at once for the first round, because a fresh mbarrier counts its previous phase (parity
// 1) as complete. Whoever drains starts on `drainer()`. They differ in nothing else.
template <i32 kSlots>
struct Ring {
  i32 slot;
  u32 parity;

  static DK_DEVICE Ring filler() { return {0, 1u}; }
  static DK_DEVICE Ring drainer() { return {0, 0u}; }
  // Of several that take turns, number `turn`.
  static DK_DEVICE Ring filler(i32 turn) { return {turn, 1u}; }
  static DK_DEVICE Ring drainer(i32 turn) { return {turn, 0u}; }
  DK_DEVICE void next() {
    if (++slot == kSlots) {
      slot = 0;
      parity ^= 1u;
    }
  }
  // As many steps at once, at most kSlots.
  DK_DEVICE void advance(i32 steps) {
    slot += steps;
    if (slot >= kSlots) {
      slot -= kSlots;
      parity ^= 1u;
    }
  }
};

}  // namespace deep_kernels::tile
