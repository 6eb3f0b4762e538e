#include "python_errors.h"

#include "python_lock.h"
#include "python_text.h"
#include "runtime/errors.h"

namespace deep_kernels {

namespace {

// The package may be imported anew in one process: its exceptions stay the same types, so that
// whoever holds them from before still catches what is thrown. Never freed: they outlast modules.
struct Types {
  py::handle unsupported;
  py::handle compile;
};

py::handle new_type(const char* name) {
  const std::string full_name = std::string("deep_kernels.") + name;
  PyObject* type = PyErr_NewException(full_name.c_str(), PyExc_RuntimeError, nullptr);
  if (type == nullptr) throw py::error_already_set();
  return type;
}

const Types& types() {
  static const Types made{new_type("UnsupportedError"), new_type("CompileError")};
  return made;
}

void set_error(py::handle type, const std::exception& error) {
  PyErr_SetObject(type.ptr(), to_text(error.what()).ptr());
}

// Sets Python's error; an exception that is not ours goes on.
void translate(std::exception_ptr pointer) {
  try {
    std::rethrow_exception(pointer);
  } catch (const ValueError& error) {
    set_error(PyExc_ValueError, error);
  } catch (const TypeError& error) {
    set_error(PyExc_TypeError, error);
  } catch (const UnsupportedError& error) {
    set_error(types().unsupported, error);
  } catch (const CompileError& error) {
    set_error(types().compile, error);
  } catch (const DriverError& error) {
    set_error(PyExc_RuntimeError, error);
  }
}

}  // namespace

void add_errors(py::module_& m) {
  m.attr("UnsupportedError") = types().unsupported;
  m.attr("CompileError") = types().compile;
  [[maybe_unused]] static const bool once = [] {
    py::register_exception_translator(translate);
    return true;
  }();
}

void throw_in_python(std::exception_ptr error) {
  const PythonLocked locked;
  translate(error);
  throw py::error_already_set();
}

}  // namespace deep_kernels
