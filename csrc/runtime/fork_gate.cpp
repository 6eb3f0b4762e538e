#include "runtime/fork_gate.h"

#include <pthread.h>

#include <condition_variable>
#include <mutex>
#include <new>

namespace deep_kernels {

namespace {

struct Gate {
  std::mutex lock;
  std::condition_variable changed;
  int num_inside = 0;
  bool forking = false;  // who comes now waits, so that a fork is not put off for ever
};

thread_local int depth = 0;

// In place and never destroyed: threads may outlive static objects at process exit.
alignas(Gate) unsigned char storage[sizeof(Gate)];
Gate* gate = new (storage) Gate;

void before_fork() {
  std::unique_lock lock(gate->lock);
  gate->forking = true;
  gate->changed.wait(lock, [] { return gate->num_inside == 0; });
  lock.release();  // held until the fork is done
}

void after_fork_in_parent() {
  gate->forking = false;
  gate->lock.unlock();
  gate->changed.notify_all();
}

void after_fork_in_child() { gate = new (storage) Gate; }

// When the library is loaded: no thread can be inside yet.
[[maybe_unused]] const int registered =
    pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);

}  // namespace

ForkGate::ForkGate() {
  if (depth++ > 0) return;
  std::unique_lock lock(gate->lock);
  gate->changed.wait(lock, [] { return !gate->forking; });
  ++gate->num_inside;
}

ForkGate::~ForkGate() {
  if (--depth > 0) return;
  {
    const std::scoped_lock lock(gate->lock);
    --gate->num_inside;
  }
  gate->changed.notify_all();
}

}  // namespace deep_kernels
