// The module deep_kernels._C and the operators of torch.ops.deep_kernels: schemas and addresses.
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>
#include <torch/library.h>

#include "ops/knobs.h"
#include "ops/mqa_logits.h"
#include "ops/registry.h"
#include "python_args.h"
#include "python_emulator.h"
#include "python_lock.h"
#include "runtime/cache.h"
#include "runtime/driver.h"
#include "runtime/errors.h"
#include "runtime/include_tree.h"
#include "runtime/nvrtc.h"
#include "runtime/settings.h"
#include "runtime/store.h"

namespace deep_kernels {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

std::optional<std::string> owned(std::optional<std::string_view> text) {
  return text ? std::optional<std::string>(*text) : std::nullopt;
}

// --- torch.ops.deep_kernels ---------------------------------------------------------------------

Tensor mqa_logits_op(const Tensor& q, const OptionalTensor& q_scale, const Tensor& kv,
                     const Tensor& kv_scale, const Tensor& weights, const Tensor& kv_start,
                     const Tensor& kv_end, bool clean, int64_t max_seqlen_k,
                     at::ScalarType logits_dtype, const OptionalTensor& schedule,
                     std::string_view reduction, std::optional<std::string_view> arch) {
  return mqa_logits({q, q_scale, kv, kv_scale, weights, kv_start, kv_end, clean, max_seqlen_k,
                     logits_dtype, schedule, reduction, owned(arch)},
                    std::nullopt);
}

void mqa_logits_out_op(const Tensor& q, const OptionalTensor& q_scale, const Tensor& kv,
                       const Tensor& kv_scale, const Tensor& weights, const Tensor& kv_start,
                       const Tensor& kv_end, bool clean, int64_t max_seqlen_k,
                       at::ScalarType logits_dtype, const OptionalTensor& schedule,
                       std::string_view reduction, std::optional<std::string_view> arch,
                       Tensor& out) {
  mqa_logits({q, q_scale, kv, kv_scale, weights, kv_start, kv_end, clean, max_seqlen_k,
              logits_dtype, schedule, reduction, owned(arch)},
             out);
}

Tensor mqa_metadata_op(const Tensor& kv_start, const Tensor& kv_end, int64_t num_kv,
                       int64_t num_heads, std::optional<std::string_view> arch) {
  return mqa_logits_metadata(kv_start, kv_end, num_kv, num_heads, owned(arch));
}

TORCH_LIBRARY(deep_kernels, m) {
  m.def(
      "fp8_fp4_mqa_logits(Tensor q, Tensor? q_scale, Tensor kv, Tensor kv_scale, Tensor weights, "
      "Tensor cu_seq_len_k_start, Tensor cu_seq_len_k_end, bool clean_logits=True, "
      "SymInt max_seqlen_k=0, ScalarType logits_dtype=float, Tensor? schedule_meta=None, "
      "str reduction=\"exact\", str? arch=None) -> Tensor");
  m.def(
      "fp8_fp4_mqa_logits_out(Tensor q, Tensor? q_scale, Tensor kv, Tensor kv_scale, "
      "Tensor weights, Tensor cu_seq_len_k_start, Tensor cu_seq_len_k_end, bool clean_logits, "
      "SymInt max_seqlen_k, ScalarType logits_dtype, Tensor? schedule_meta, str reduction, "
      "str? arch, Tensor(a!) out) -> ()");
  m.def(
      "get_mqa_logits_metadata(Tensor cu_seq_len_k_start, Tensor cu_seq_len_k_end, "
      "SymInt num_kv_tokens, SymInt num_heads, str? arch=None) -> Tensor");
}

void register_kernels(torch::Library& m) {
  m.impl("fp8_fp4_mqa_logits", mqa_logits_op);
  m.impl("fp8_fp4_mqa_logits_out", mqa_logits_out_op);
  m.impl("get_mqa_logits_metadata", mqa_metadata_op);
}
TORCH_LIBRARY_IMPL(deep_kernels, CPU, m) { register_kernels(m); }
TORCH_LIBRARY_IMPL(deep_kernels, CUDA, m) { register_kernels(m); }

// --- the eager path: NotImplemented sends the caller to torch.ops
// -----------------------------------

py::object not_plain() { return py::reinterpret_borrow<py::object>(Py_NotImplemented); }

py::object mqa_logits_eager(py::handle q_pair, py::handle kv_pair, py::handle weights_arg,
                            py::handle start_arg, py::handle end_arg, py::handle clean_arg,
                            py::handle max_seqlen_arg, py::handle dtype_arg,
                            py::handle schedule_arg, py::handle reduction_arg, py::handle arch_arg,
                            py::handle out_arg) {
  PythonArgs args("fp8_fp4_mqa_logits");
  const auto [q_object, q_scale_object] = args.pair("q", q_pair);
  const auto [kv_object, kv_scale_object] = args.pair("kv", kv_pair);
  const Tensor& q = args.tensor("q", q_object);
  const OptionalTensor q_scale = args.optional_tensor("q scale", q_scale_object);
  const Tensor& kv = args.tensor("kv", kv_object);
  const Tensor& kv_scale = args.tensor("kv scale", kv_scale_object);
  const Tensor& weights = args.tensor("weights", weights_arg);
  const Tensor& start = args.tensor("cu_seq_len_k_start", start_arg);
  const Tensor& end = args.tensor("cu_seq_len_k_end", end_arg);
  const OptionalTensor schedule = args.optional_tensor("schedule_meta", schedule_arg);
  const OptionalTensor out = args.out("out", out_arg);
  const bool clean = args.boolean("clean_logits", clean_arg);
  const std::string reduction = args.text("reduction", reduction_arg);
  const at::ScalarType dtype = args.dtype("logits_dtype", dtype_arg);
  const std::optional<std::string> arch = args.optional_text("arch", arch_arg);
  args.require_integer("max_seqlen_k", max_seqlen_arg);
  if (!args.is_plain()) return not_plain();
  const int64_t max_seqlen_k = args.integer("max_seqlen_k", max_seqlen_arg);
  Tensor result;
  {
    const PythonUnlocked unlocked;
    result = mqa_logits({q, q_scale, kv, kv_scale, weights, start, end, clean, max_seqlen_k, dtype,
                         schedule, reduction, arch},
                        out);
  }
  if (out) return py::reinterpret_borrow<py::object>(out_arg);
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(std::move(result)));
}

py::object mqa_metadata_eager(py::handle start_arg, py::handle end_arg, py::handle num_kv_arg,
                              py::handle num_heads_arg, py::handle arch_arg) {
  PythonArgs args("get_mqa_logits_metadata");
  const Tensor& start = args.tensor("cu_seq_len_k_start", start_arg);
  const Tensor& end = args.tensor("cu_seq_len_k_end", end_arg);
  const std::optional<std::string> arch = args.optional_text("arch", arch_arg);
  args.require_integer("num_kv_tokens", num_kv_arg);
  args.require_integer("num_heads", num_heads_arg);
  if (!args.is_plain()) return not_plain();
  const int64_t num_kv = args.integer("num_kv_tokens", num_kv_arg);
  const int64_t num_heads = args.integer("num_heads", num_heads_arg);
  Tensor result;
  {
    const PythonUnlocked unlocked;
    result = mqa_logits_metadata(start, end, num_kv, num_heads, arch);
  }
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(std::move(result)));
}

// --- the runtime
// --------------------------------------------------------------------------------------

py::dict to_python(const BuildReport& report) {
  py::dict result;
  result["entry"] = report.entry;
  result["origin"] = report.origin;
  result["file"] = to_text(report.file);
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

py::object read_entry(const std::filesystem::path& path) {
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
  for (const std::filesystem::path& file : files) names.append(to_text(file.string()));
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

template <class Error>
void add_translator(py::handle type) {
  static py::handle raised;
  raised = type;
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const Error& error) {
      PyErr_SetObject(raised.ptr(), to_text(error.what()).ptr());
    }
  });
}

template <class Error>
void add_error(py::module_& m, const char* name) {
  // Lives as long as the interpreter: translators outlast the module.
  const py::handle type = py::exception<Error>(m, name, PyExc_RuntimeError).release();
  type.attr("__module__") = "deep_kernels";
  add_translator<Error>(type);
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  add_error<UnsupportedError>(m, "UnsupportedError");
  add_error<CompileError>(m, "CompileError");
  add_translator<ValueError>(PyExc_ValueError);
  add_translator<TypeError>(PyExc_TypeError);
  add_translator<DriverError>(PyExc_RuntimeError);
  set_warning_sink(warn_in_python);

  m.def("fp8_fp4_mqa_logits", mqa_logits_eager);
  m.def("get_mqa_logits_metadata", mqa_metadata_eager);

  m.def("ops", registry::ops);
  m.def("supported", registry::supported, py::call_guard<PythonUnlocked>());
  m.def("prepare", prepare);
  m.def("legal_specs", legal_specs);
  m.def("known_targets", known_targets);
  m.def("tuning_rows", [] {
    py::list rows;
    for (const TuningRow& row : registry::tuning_rows())
      rows.append(py::make_tuple(row.op, name_of(row.backend), row.gpu, row.choice));
    return rows;
  });
  m.def("arch_of_card", [](int capability) {
    const Arch arch = resolve_arch("arch_of_card", std::nullopt, capability);
    return std::pair(std::string(name_of(arch.backend)), arch.target.name());
  });
  m.def("mqa_schedule_length", [](int num_q, int num_heads, int num_sms) {
    return mqa_schedule_length(num_q, num_heads, num_sms);
  });

  m.def("num_sms", knobs::num_sms);
  m.def("set_num_sms", [](py::handle num_sms) {
    knobs::set_num_sms(PythonArgs("set_num_sms").integer("num_sms", num_sms));
  });
  m.def("pdl", knobs::pdl);
  m.def("set_pdl",
        [](py::handle enable) { knobs::set_pdl(PythonArgs("set_pdl").boolean("enable", enable)); });
  m.def("set_emulator", set_emulator);

  m.def("set_package_folders", settings::set_package_folders);
  m.def("cache_dir", [] { return to_text(settings::cache_dir().path.string()); });
  m.def("prebuilt_dir", []() -> py::object {
    const auto folder = settings::prebuilt_dir();
    return folder ? py::object(to_text(folder->string())) : py::none();
  });
  m.def("cache_files",
        [](const std::filesystem::path& folder) { return names_of(cache::files(folder)); });
  m.def("removable_files",
        [](const std::filesystem::path& folder) { return names_of(cache::removable(folder)); });
  m.def("read_entry", read_entry);
  m.def("clear_cache", [](const std::filesystem::path& folder) { return cache::clear(folder); });
  m.def("compile_options", [](const std::string& target) {
    return compile_options(resolve_arch("compile", target, std::nullopt).target);
  });
  m.def("compile_text", compile_text);
  m.def("compile_to_ptx", compile_to_ptx);
  m.def("include_digest", [] { return include_tree().digest; });
  m.def("nvrtc", [] {
    const Nvrtc& nvrtc = Nvrtc::get();
    return py::make_tuple(to_text(nvrtc.path()), nvrtc.version());
  });
  m.def("driver_version", driver::version);
  m.def("device_facts", [](int device) {
    const driver::DeviceFacts facts = driver::device_facts(device);
    return std::tuple(driver::device_name(device), facts.capability, facts.num_sms);
  });
}

}  // namespace deep_kernels
