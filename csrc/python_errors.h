// What the library's exceptions are in Python.
#pragma once

#include <pybind11/pybind11.h>

#include <exception>

namespace deep_kernels {

// The exception types of the module, and the same types for whatever its functions throw.
void add_errors(pybind11::module_& m);

// Throws again as the Python exception.
[[noreturn]] void throw_in_python(std::exception_ptr error);

// Runs a part of an operator. From 2.15 on, torch's dispatcher makes a RuntimeError of every C++
// exception that is not its own; Python's own pass through it as they are.
template <class Function>
decltype(auto) raising_in_python(Function&& function) {
  try {
    return function();
  } catch (const std::exception&) {
    throw_in_python(std::current_exception());
  }
}

}  // namespace deep_kernels
