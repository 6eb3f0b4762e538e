// The ops as functions of the module.
#pragma once

#include <pybind11/pybind11.h>

namespace deep_kernels {

void add_ops(pybind11::module_& m);

}  // namespace deep_kernels
