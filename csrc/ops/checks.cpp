#include "ops/checks.h"

#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "runtime/errors.h"

namespace deep_kernels::checks {

namespace {

std::string expectation(Dtypes dtypes, Shape shape) {
  std::vector<std::string> names, dims;
  for (const auto dtype : dtypes) names.push_back(dtype_name(dtype));
  for (const Dim& dim : shape) {
    const std::string size = dim.size == kUnknown ? "" : fmt::format("{}", dim.size);
    const bool both = dim.name != nullptr && dim.size != kUnknown;
    dims.push_back((dim.name != nullptr ? dim.name : "") + std::string(both ? "=" : "") + size);
  }
  return fmt::format("{} [{}]", fmt::join(names, " or "), fmt::join(dims, ", "));
}

bool shape_fits(const at::Tensor& tensor, Shape shape) {
  if (tensor.dim() != static_cast<int64_t>(shape.size())) return false;
  int64_t i = 0;
  for (const Dim& dim : shape) {
    const int64_t size = size_of(tensor, i++);
    if (dim.size != kUnknown && size != kUnknown && size != dim.size) return false;
  }
  return true;
}

int64_t stride_of(const at::Tensor& tensor, int64_t dim) {
  return tensor.sym_stride(dim).maybe_as_int().value_or(kUnknown);
}

std::string numbers(c10::SymIntArrayRef values) {
  std::vector<std::string> words;
  for (const c10::SymInt& value : values) {
    const std::optional<int64_t> known = value.maybe_as_int();
    words.push_back(known ? fmt::format("{}", *known) : value.toSymNode()->str());
  }
  return fmt::format("{}", fmt::join(words, ", "));
}

// Tensors of the meta device and those that are being traced have none.
bool has_memory(const at::Tensor& tensor) {
  return tensor.has_storage() && tensor.storage().device_type() != at::kMeta;
}

// Known to hold nothing.
bool is_empty(const at::Tensor& tensor) {
  for (int64_t i = 0; i < tensor.dim(); ++i)
    if (size_of(tensor, i) == 0) return true;
  return false;
}

// What the tensor is instead of dense, or null.
const char* kind_of(const at::Tensor& tensor) {
  if (tensor.is_nested() || tensor.layout() == at::kJagged) return "nested";
  if (tensor.layout() == at::kMkldnn) return "of mkldnn's layout";
  if (tensor.layout() != at::kStrided) return "sparse";
  return tensor.is_quantized() ? "quantized" : nullptr;
}

// First and one past the last byte that the tensor's elements touch.
std::pair<const char*, const char*> extent(const at::Tensor& tensor) {
  const char* begin = static_cast<const char*>(tensor.const_data_ptr());
  if (tensor.numel() == 0) return {begin, begin};
  int64_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  return {begin, begin + (last + 1) * static_cast<int64_t>(tensor.element_size())};
}

// Whether the memory behind the tensor reaches as far as its shape says: a storage may be shrunk.
bool storage_holds(const at::Tensor& tensor) {
  if (!has_memory(tensor) || tensor.numel() == 0) return true;
  int64_t last = tensor.storage_offset();
  for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  return static_cast<std::size_t>(last + 1) * tensor.element_size() <= tensor.storage().nbytes();
}

}  // namespace

const char* dtype_name(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return "float32";
    case at::kDouble:
      return "float64";
    case at::kHalf:
      return "float16";
    case at::kBFloat16:
      return "bfloat16";
    case at::kFloat8_e4m3fn:
      return "float8_e4m3fn";
    case at::kFloat8_e5m2:
      return "float8_e5m2";
    case at::kFloat8_e4m3fnuz:
      return "float8_e4m3fnuz";
    case at::kFloat8_e8m0fnu:
      return "float8_e8m0fnu";
    case at::kFloat4_e2m1fn_x2:
      return "float4_e2m1fn_x2";
    case at::kInt:
      return "int32";
    case at::kLong:
      return "int64";
    case at::kShort:
      return "int16";
    case at::kChar:
      return "int8";
    case at::kByte:
      return "uint8";
    case at::kBool:
      return "bool";
    case at::kComplexHalf:
      return "complex32";
    case at::kComplexFloat:
      return "complex64";
    case at::kComplexDouble:
      return "complex128";
    default:
      return c10::toString(dtype);
  }
}

int64_t size_of(const at::Tensor& tensor, int64_t dim) {
  return tensor.sym_size(dim).maybe_as_int().value_or(kUnknown);
}

std::string describe(const at::Tensor& tensor) {
  return fmt::format("{} [{}]", dtype_name(tensor.scalar_type()), numbers(tensor.sym_sizes()));
}

void refuse_lazy_view(const char* op, const char* argument) {
  throw ValueError(fmt::format(
      "{}: {} must be plain memory, got a view that is conjugated or negated", op, argument));
}

void require_dense(const char* op, const char* argument, const at::Tensor& tensor) {
  if (const char* kind = kind_of(tensor))
    throw ValueError(
        fmt::format("{}: {} must be a dense tensor, got one that is {}", op, argument, kind));
}

void require(const char* op, const char* argument, const at::Tensor& tensor, Dtypes dtypes,
             Shape shape) {
  require_dense(op, argument, tensor);
  const bool dtype_fits =
      std::find(dtypes.begin(), dtypes.end(), tensor.scalar_type()) != dtypes.end();
  if (dtype_fits && shape_fits(tensor, shape)) {
    if (storage_holds(tensor)) return;
    throw ValueError(fmt::format("{}: {} must have memory for its {}, got a storage of {} bytes",
                                 op, argument, describe(tensor), tensor.storage().nbytes()));
  }
  throw ValueError(fmt::format("{}: {} must be {}, got {}", op, argument,
                               expectation(dtypes, shape), describe(tensor)));
}

void require_device(const char* op, const char* argument, const at::Tensor& tensor,
                    at::Device device, const char* reference) {
  if (tensor.device() == device) return;
  throw ValueError(fmt::format("{}: {} must be on {} like {}, got {}", op, argument, device.str(),
                               reference, tensor.device().str()));
}

void require_rows(const char* op, const char* argument, const at::Tensor& tensor) {
  const int64_t last = tensor.dim() - 1;
  const int64_t stride = stride_of(tensor, last);
  if (stride == 1 || stride == kUnknown || size_of(tensor, last) <= 1) return;
  throw ValueError(fmt::format("{}: {} must have stride 1 in its last dimension, got strides [{}]",
                               op, argument, numbers(tensor.sym_strides())));
}

bool is_aligned_16(const at::Tensor& tensor) {
  return reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr()) % 16 == 0;
}

void require_packed(const char* op, const char* argument, const at::Tensor& tensor, int64_t first) {
  if (is_empty(tensor)) return;
  int64_t expected = 1;
  for (int64_t i = tensor.dim() - 1; i >= first; --i) {
    const int64_t size = size_of(tensor, i), stride = stride_of(tensor, i);
    if (size == kUnknown || stride == kUnknown) return;
    if (size != 1 && stride != expected)
      throw ValueError(fmt::format("{}: {} must be contiguous{}, got strides [{}]", op, argument,
                                   first == 0 ? "" : fmt::format(" from dimension {} on", first),
                                   numbers(tensor.sym_strides())));
    expected *= size;
  }
}

void require_16_bytes(const char* op, const char* argument, const at::Tensor& tensor,
                      int64_t num_dims) {
  if (is_empty(tensor)) return;
  for (int64_t i = 0; i < num_dims; ++i) {
    const int64_t stride = stride_of(tensor, i);
    if (stride == kUnknown || size_of(tensor, i) <= 1) continue;  // that of one row means nothing
    const int64_t bytes = stride * static_cast<int64_t>(tensor.element_size());
    if (bytes % 16 == 0 && bytes > 0) continue;
    throw ValueError(fmt::format(
        "{}: {} must have strides that are positive multiples of 16 bytes, got {} bytes in "
        "dimension {}",
        op, argument, bytes, i));
  }
  if (!has_memory(tensor)) return;
  const auto address = reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr());
  if (address % 16 != 0)
    throw ValueError(
        fmt::format("{}: {} must start at a multiple of 16 bytes, got an address {} bytes past one",
                    op, argument, address % 16));
}

void require_no_grad(const char* op, const char* argument, const at::Tensor& tensor) {
  const bool forward = tensor._fw_grad(/*level=*/0).defined();
  if (!forward && (!tensor.requires_grad() || !at::GradMode::is_enabled())) return;
  throw ValueError(fmt::format(
      "{}: {} requires grad, but the op is forward only: call it under torch.no_grad() or detach "
      "the input",
      op, argument));
}

void require_separate_rows(const char* op, const char* argument, const at::Tensor& out) {
  const int64_t stride = stride_of(out, 0), columns = size_of(out, 1);
  if (size_of(out, 0) <= 1 || stride == kUnknown || stride >= columns) return;
  throw ValueError(
      fmt::format("{}: {} must have rows that do not overlap, got row stride {} for {} columns", op,
                  argument, stride, columns));
}

// Sufficient, and what views of a larger tensor are: each stride steps over all that smaller ones
// reach.
void require_no_self_overlap(const char* op, const char* argument, const at::Tensor& out) {
  if (is_empty(out)) return;
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride, size
  for (int64_t i = 0; i < out.dim(); ++i) {
    const int64_t size = size_of(out, i), stride = stride_of(out, i);
    if (size == kUnknown || stride == kUnknown) return;
    if (size > 1) dims.push_back({stride, size});
  }
  std::sort(dims.begin(), dims.end());
  int64_t reach = 0;
  for (const auto& [stride, size] : dims) {
    if (stride <= reach)
      throw ValueError(
          fmt::format("{}: {} must have elements that do not overlap, got strides [{}]", op,
                      argument, numbers(out.sym_strides())));
    reach += (size - 1) * stride;
  }
}

void require_no_overlap(const char* op, const char* name, const at::Tensor& out,
                        const char* argument, const at::Tensor& input) {
  if (!has_memory(out) || !has_memory(input)) return;
  const auto [out_begin, out_end] = extent(out);
  const auto [in_begin, in_end] = extent(input);
  if (out_begin == out_end || in_begin == in_end) return;
  if (out_end <= in_begin || in_end <= out_begin) return;
  throw ValueError(
      fmt::format("{}: {} must not share memory with another argument, got one that overlaps {}",
                  op, name, argument));
}

int64_t stride_bytes(const at::Tensor& tensor, int64_t dim) {
  const int64_t element = static_cast<int64_t>(tensor.element_size());
  if (tensor.size(dim) > 1) return tensor.stride(dim) * element;
  int64_t packed = element;
  for (int64_t i = dim + 1; i < tensor.dim(); ++i) packed *= tensor.size(i);
  return align_up<int64_t>(packed, 16);
}

i32 to_i32(const char* op, const char* what, int64_t value) {
  if (value >= 0 && value <= std::numeric_limits<i32>::max() - 1024) return static_cast<i32>(value);
  throw ValueError(fmt::format("{}: {} must be from 0 to {}, got {}", op, what,
                               std::numeric_limits<i32>::max() - 1024, value));
}

i32 size_i32(const char* op, const char* what, const at::Tensor& tensor, int64_t dim) {
  const int64_t size = size_of(tensor, dim);
  return size == kUnknown ? static_cast<i32>(kUnknown) : to_i32(op, what, size);
}

}  // namespace deep_kernels::checks
