// Text and file names between Python and C++.
#pragma once

#include <fmt/format.h>
#include <pybind11/pybind11.h>

#include <filesystem>
#include <string>

#include "runtime/errors.h"

namespace deep_kernels {

namespace py = pybind11;

// Messages and reports may hold file names, which need not be UTF-8: such bytes come out as in
// Python's own file names.
inline py::str to_text(const std::string& bytes) {
  return py::reinterpret_steal<py::str>(
      PyUnicode_DecodeUTF8(bytes.data(), static_cast<Py_ssize_t>(bytes.size()), "surrogateescape"));
}

// A file name as Python's own functions give it, whatever the locale's encoding.
inline py::str to_file_name(const std::filesystem::path& path) {
  const std::string& bytes = path.native();
  return py::reinterpret_steal<py::str>(
      PyUnicode_DecodeFSDefaultAndSize(bytes.data(), static_cast<Py_ssize_t>(bytes.size())));
}

// The inverse of to_file_name, for str, bytes and os.PathLike.
inline std::filesystem::path to_path(py::handle value) {
  PyObject* bytes = nullptr;
  if (PyUnicode_FSConverter(value.ptr(), &bytes) == 0) {
    const bool wrong_type = PyErr_ExceptionMatches(PyExc_TypeError) != 0;
    PyErr_Clear();
    if (wrong_type)
      throw TypeError(fmt::format("a file name must be a str, bytes or os.PathLike, got {}",
                                  Py_TYPE(value.ptr())->tp_name));
    throw ValueError("a file name must be text that the file system can write, without NUL");
  }
  const py::bytes held = py::reinterpret_steal<py::bytes>(bytes);
  return std::filesystem::path(std::string(held));
}

}  // namespace deep_kernels
