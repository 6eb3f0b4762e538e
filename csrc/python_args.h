// Python objects to C++ values for the eager path, refusing wrong types in one sentence. pybind11's
// own casters would answer with a dump of signatures.
#pragma once

#include <ATen/PythonTorchFunctionTLS.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <fmt/format.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/autograd/python_variable.h>

#include <optional>
#include <string>

#include "ops/checks.h"
#include "runtime/errors.h"

namespace deep_kernels {

namespace py = pybind11;

// Reads the arguments of one call and watches whether it may skip the dispatcher.
class PythonArgs {
 public:
  explicit PythonArgs(const char* op) : op_(op) {}

  const at::Tensor& tensor(const char* name, py::handle value) {
    if (!THPVariable_Check(value.ptr())) refuse(name, "a torch.Tensor", value);
    const at::Tensor& result = THPVariable_Unpack(value.ptr());
    checks::require_dense(op_, name, result);  // here, where its name is the public one
    keys_ = keys_ | result.key_set();
    exact_ = exact_ && is_exact(value);
    return result;
  }
  std::optional<at::Tensor> optional_tensor(const char* name, py::handle value) {
    if (value.is_none()) return std::nullopt;
    if (!THPVariable_Check(value.ptr())) refuse(name, "a torch.Tensor or None", value);
    return tensor(name, value);
  }
  bool boolean(const char* name, py::handle value) const {
    if (!PyBool_Check(value.ptr())) refuse(name, "a bool", value);
    return value.ptr() == Py_True;
  }
  int64_t integer(const char* name, py::handle value) const {
    if (!PyLong_Check(value.ptr()) || PyBool_Check(value.ptr())) refuse(name, "an int", value);
    int overflow = 0;
    const long long result = PyLong_AsLongLongAndOverflow(value.ptr(), &overflow);
    if (overflow != 0)
      throw ValueError(
          fmt::format("{}: {} must fit into 64 bits, got {}", op_, name, in_words(value)));
    return result;
  }
  std::optional<int64_t> optional_integer(const char* name, py::handle value) const {
    if (value.is_none()) return std::nullopt;
    if (!PyLong_Check(value.ptr()) || PyBool_Check(value.ptr()))
      refuse(name, "an int or None", value);
    return integer(name, value);
  }
  // An int; nothing for one that is being traced and may vary.
  std::optional<int64_t> count(const char* name, py::handle value) {
    const bool traced = std::string_view(Py_TYPE(value.ptr())->tp_name).ends_with("SymInt");
    if (PyLong_Check(value.ptr()) || !traced) return integer(name, value);
    exact_ = false;
    const py::object known = value.attr("node").attr("maybe_as_int")();
    return known.is_none() ? std::nullopt : std::optional<int64_t>(integer(name, known));
  }
  // Memory that an op may write: a conjugated or negated view would have to be resolved first.
  std::optional<at::Tensor> out(const char* name, py::handle value) {
    const std::optional<at::Tensor> result = optional_tensor(name, value);
    if (result && (result->is_neg() || result->is_conj())) checks::refuse_lazy_view(op_, name);
    return result;
  }
  at::ScalarType dtype(const char* name, py::handle value) const {
    if (!THPDtype_Check(value.ptr())) refuse(name, "a torch.dtype", value);
    return reinterpret_cast<THPDtype*>(value.ptr())->scalar_type;
  }
  std::string text(const char* name, py::handle value) const {
    if (!PyUnicode_Check(value.ptr())) refuse(name, "a str", value);
    return utf8(name, value);
  }
  std::optional<std::string> optional_text(const char* name, py::handle value) const {
    if (value.is_none()) return std::nullopt;
    if (!PyUnicode_Check(value.ptr())) refuse(name, "a str or None", value);
    return utf8(name, value);
  }
  // An int or a float.
  double number(const char* name, py::handle value) const {
    if (!is_number(value)) refuse(name, "a float", value);
    return as_double(name, value);
  }
  std::optional<double> optional_number(const char* name, py::handle value) const {
    if (value.is_none()) return std::nullopt;
    if (!is_number(value)) refuse(name, "a float or None", value);
    return as_double(name, value);
  }
  std::optional<bool> optional_boolean(const char* name, py::handle value) const {
    if (value.is_none()) return std::nullopt;
    if (!PyBool_Check(value.ptr())) refuse(name, "a bool or None", value);
    return value.ptr() == Py_True;
  }
  // A pair of tensors that an op may write.
  std::optional<std::pair<at::Tensor, at::Tensor>> out_pair(const char* name, py::handle value) {
    if (value.is_none()) return std::nullopt;
    const auto [first, second] = pair(name, value);
    at::Tensor values = *out(name, tensor_object(name, first));  // refused before the second one
    return std::pair(std::move(values), *out("out scale", tensor_object("out scale", second)));
  }
  // The two items of a (values, scale) pair.
  std::pair<py::object, py::object> pair(const char* name, py::handle value) const {
    if (!PyTuple_Check(value.ptr()) && !PyList_Check(value.ptr()))
      refuse(name, "a pair (values, scale)", value);
    if (const Py_ssize_t size = PySequence_Size(value.ptr()); size != 2)
      throw TypeError(fmt::format("{}: {} must be a pair (values, scale), got a {} of {}", op_,
                                  name, Py_TYPE(value.ptr())->tp_name, size));
    return {value[py::int_(0)], value[py::int_(1)]};
  }

  // Plain dense tensors outside of any mode, tracing or transform: only then may a call go past the
  // dispatcher. Autograd and autocast have nothing to do for these ops.
  bool is_plain() const {
    using c10::DispatchKey;
    static const c10::DispatchKeySet harmless = c10::DispatchKeySet(
        {DispatchKey::CPU, DispatchKey::CUDA, DispatchKey::ADInplaceOrView,
         DispatchKey::AutogradCPU, DispatchKey::AutogradCUDA, DispatchKey::AutocastCPU,
         DispatchKey::AutocastCUDA, DispatchKey::BackendSelect});
    const auto local = c10::impl::tls_local_dispatch_key_set();
    const c10::DispatchKeySet active = (keys_ | local.included_) - local.excluded_;
    // Bits, because operator- of key sets keeps the backends.
    return exact_ && !at::impl::torch_function_mode_enabled() &&
           (active.raw_repr() & ~harmless.raw_repr()) == 0;
  }

 private:
  static bool is_number(py::handle value) {
    return (PyLong_Check(value.ptr()) && !PyBool_Check(value.ptr())) || PyFloat_Check(value.ptr());
  }
  double as_double(const char* name, py::handle value) const {
    const double result = PyFloat_AsDouble(value.ptr());
    if (PyErr_Occurred() == nullptr) return result;
    PyErr_Clear();  // an int that no float can hold
    throw ValueError(
        fmt::format("{}: {} must fit into a float, got {}", op_, name, in_words(value)));
  }
  const py::object& tensor_object(const char* name, const py::object& value) const {
    if (!THPVariable_Check(value.ptr())) refuse(name, "a torch.Tensor", value);
    return value;
  }
  std::string utf8(const char* name, py::handle value) const {
    Py_ssize_t size = 0;
    const char* text = PyUnicode_AsUTF8AndSize(value.ptr(), &size);
    if (text != nullptr && std::string_view(text).size() == static_cast<std::size_t>(size))
      return text;
    PyErr_Clear();  // a lone surrogate
    throw ValueError(
        fmt::format("{}: {} must be text that UTF-8 can write, without NUL", op_, name));
  }
  // Python itself refuses to write very long numbers.
  static std::string in_words(py::handle number) {
    constexpr int kMaxBits = 1024;
    const int bits = number.attr("bit_length")().cast<int>();
    return bits > kMaxBits ? fmt::format("one of {} bits", bits) : std::string(py::str(number));
  }
  static bool is_exact(py::handle value) {
    return reinterpret_cast<PyObject*>(Py_TYPE(value.ptr())) == THPVariableClass ||
           reinterpret_cast<PyObject*>(Py_TYPE(value.ptr())) == ParameterClass;
  }
  [[noreturn]] void refuse(const char* name, const char* expected, py::handle got) const {
    throw TypeError(
        fmt::format("{}: {} must be {}, got {}", op_, name, expected, Py_TYPE(got.ptr())->tp_name));
  }

  const char* op_;
  c10::DispatchKeySet keys_;
  bool exact_ = true;
};

}  // namespace deep_kernels
