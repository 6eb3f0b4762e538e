// The module deep_kernels._C: the runtime's functions, and those of python_ops.cpp.
#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include "ops/emulator.h"
#include "ops/knobs.h"
#include "ops/registry.h"
#include "python_args.h"
#include "python_emulator.h"
#include "python_errors.h"
#include "python_lock.h"
#include "python_ops.h"
#include "python_text.h"
#include "runtime/cache.h"
#include "runtime/driver.h"
#include "runtime/errors.h"
#include "runtime/include_tree.h"
#include "runtime/nvrtc.h"
#include "runtime/settings.h"
#include "runtime/store.h"

namespace deep_kernels {
namespace {

py::dict to_python(const BuildReport& report) {
  py::dict result;
  result["entry"] = report.entry;
  result["origin"] = report.origin;
  result["file"] = to_file_name(report.file);
  result["about"] = report.about;
  result["seconds"] = report.seconds;
  return result;
}

py::list to_python(const std::vector<BuildReport>& reports) {
  py::list result;
  for (const BuildReport& report : reports) result.append(to_python(report));
  return result;
}

py::list prepare(const std::string& op, const std::optional<std::string>& arch, const Case& fields,
                 std::optional<int> capability) {
  std::vector<BuildReport> reports;
  {
    const PythonUnlocked unlocked;
    reports = registry::prepare(op, arch, fields, capability);
  }
  return to_python(reports);
}

py::list legal_specs(const std::string& arch) {
  py::list result;
  for (auto& spec : registry::legal_specs(arch)) {
    auto build = [make = std::move(spec.build)] {
      BuildReport report;
      {
        const PythonUnlocked unlocked;
        report = make();
      }
      return to_python(report);
    };
    result.append(py::make_tuple(spec.kernel, spec.json, py::cpp_function(std::move(build))));
  }
  return result;
}

py::object read_entry(py::handle file) {
  const std::filesystem::path path = to_path(file);
  const cache::Loaded loaded = cache::load(path);
  if (!loaded.entry)
    throw ValueError(
        fmt::format("{}: {}", path.string(), loaded.fault.empty() ? "no such file" : loaded.fault));
  py::dict result;
  result["about"] = loaded.entry->about;
  result["source"] = loaded.entry->source;
  result["cubin"] = py::bytes(loaded.entry->cubin);
  return result;
}

py::list names_of(const std::vector<std::filesystem::path>& files) {
  py::list names;
  for (const std::filesystem::path& file : files) names.append(to_file_name(file));
  return names;
}

CompileResult compile(const std::string& source, const std::vector<std::string>& options,
                      Output output) {
  const PythonUnlocked unlocked;
  return Nvrtc::get().compile("source.cu", source, include_tree().headers, options, output);
}

py::tuple compile_text(const std::string& source, const std::vector<std::string>& options) {
  const CompileResult result = compile(source, options, Output::cubin);
  return py::make_tuple(result.ok, py::bytes(result.code), to_text(result.log));
}

py::dict to_python(const TuningRow& row) {
  py::dict result;
  result["op"] = row.op;
  result["backend"] = name_of(row.backend);
  result["cases"] = row.cases;
  result["choice"] = row.choice;
  result["gpu"] = row.gpu;
  result["date"] = row.date;
  result["gain"] = row.gain;
  result["reason"] = row.reason;
  return result;
}

py::tuple compile_to_ptx(const std::string& source, const std::vector<std::string>& options) {
  const CompileResult result = compile(source, options, Output::ptx);
  return py::make_tuple(result.ok, to_text(result.code), to_text(result.log));
}

void warn_in_python(const std::string& text) {
  const PythonLocked locked;
  // A warning turned into an error has no caller to go to here: it is printed.
  if (PyErr_WarnFormat(PyExc_RuntimeWarning, 2, "%s", text.c_str()) < 0)
    PyErr_WriteUnraisable(nullptr);
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  add_errors(m);
  set_warning_sink(warn_in_python);

  add_ops(m);

  m.def("ops", registry::ops);
  m.def("supported", registry::supported, py::call_guard<PythonUnlocked>());
  m.def("prepare", prepare);
  m.def("legal_specs", legal_specs);
  m.def("known_targets", known_targets);
  m.def("tuning_rows", [] {
    py::list rows;
    for (const TuningRow& row : registry::tuning_rows()) rows.append(to_python(row));
    return rows;
  });
  m.def("arch_of_card", [](int capability) {
    const Arch arch = resolve_arch("arch_of_card", std::nullopt, capability);
    return std::pair(std::string(name_of(arch.backend)), arch.target.name());
  });

  m.def("num_sms", knobs::num_sms);
  m.def("set_num_sms", [](py::handle num_sms) {
    knobs::set_num_sms(PythonArgs("set_num_sms").integer("num_sms", num_sms));
  });
  m.def("pdl", knobs::pdl);
  m.def("set_pdl",
        [](py::handle enable) { knobs::set_pdl(PythonArgs("set_pdl").boolean("enable", enable)); });
  m.def("set_emulator", set_emulator);
  m.def("emulator_sms", emulator::num_sms);

  m.def("set_package_folders", [](const std::vector<py::object>& folders) {
    std::vector<std::filesystem::path> paths;
    for (const py::object& folder : folders) paths.push_back(to_path(folder));
    settings::set_package_folders(std::move(paths));
  });
  m.def("cache_dir", [] { return to_file_name(settings::cache_dir().path); });
  m.def("prebuilt_dir", []() -> py::object {
    const auto folder = settings::prebuilt_dir();
    return folder ? py::object(to_file_name(*folder)) : py::none();
  });
  m.def("cache_files", [](py::handle folder) { return names_of(cache::files(to_path(folder))); });
  m.def("removable_files",
        [](py::handle folder) { return names_of(cache::removable(to_path(folder))); });
  m.def("read_entry", read_entry);
  m.def("clear_cache", [](py::handle folder) { return cache::clear(to_path(folder)); });
  m.def("compile_options", [](py::handle target) {
    const std::string arch = PythonArgs("compile").text("arch", target);
    return compile_options(resolve_arch("compile", arch, std::nullopt).target);
  });
  m.def("compile_text", compile_text);
  m.def("compile_to_ptx", compile_to_ptx);
  m.def("include_digest", [] { return include_tree().digest; });
  m.def("nvrtc", [] {
    const Nvrtc& nvrtc = Nvrtc::get();
    return py::make_tuple(to_file_name(nvrtc.path()), nvrtc.version());
  });
  m.def("driver_version", driver::version);
  m.def("device_facts", [](int device) {
    const driver::DeviceFacts facts = driver::device_facts(device);
    return std::tuple(driver::device_name(device), facts.capability, facts.num_sms);
  });
}

}  // namespace deep_kernels
