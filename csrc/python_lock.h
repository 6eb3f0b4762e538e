// Python's lock, given away for work that needs no Python and taken to show a warning. While the
// interpreter shuts down, taking it ends the thread by unwinding its stack, which no noexcept
// destructor survives: a daemon thread inside a call aborted the process at its very end. Such a
// thread sleeps here instead, as it does from Python 3.14 on.
#pragma once

#include <cxxabi.h>
#include <pybind11/pybind11.h>

#include <chrono>
#include <thread>

namespace deep_kernels {

template <class Take>
void take_python_lock(Take&& take) {
  try {
    take();
  } catch (abi::__forced_unwind&) {
    for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
  }
}

// The calling thread holds the lock, and holds it again afterwards.
class PythonUnlocked {
 public:
  PythonUnlocked() : state_(PyEval_SaveThread()) {}
  ~PythonUnlocked() {
    take_python_lock([&] { PyEval_RestoreThread(state_); });
  }
  PythonUnlocked(const PythonUnlocked&) = delete;
  PythonUnlocked& operator=(const PythonUnlocked&) = delete;

 private:
  PyThreadState* state_;
};

// Any thread, with or without the lock.
class PythonLocked {
 public:
  PythonLocked() {
    take_python_lock([&] { state_ = PyGILState_Ensure(); });
  }
  ~PythonLocked() { PyGILState_Release(state_); }
  PythonLocked(const PythonLocked&) = delete;
  PythonLocked& operator=(const PythonLocked&) = delete;

 private:
  PyGILState_STATE state_;
};

}  // namespace deep_kernels
