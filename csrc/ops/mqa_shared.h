// What the dense and the paged MQA logits share on the host: their formats, the logits they write,
// and the words in which both refuse.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

#include "deep_kernels/contract/types.h"
#include "ops/case.h"
#include "ops/checks.h"

namespace deep_kernels::mqa {

// e2m1 pairs, two to a byte.
inline constexpr bool is_packed(Format format) { return format == Format::mxfp4; }
// Dtypes of the values of a format.
void require_values(const char* op, const char* argument, const at::Tensor& values, Format format,
                    checks::Shape shape);

// The format that q's dtype and scale mean. `q_shape` names all dimensions but the last.
Format format_of(const char* op, const at::Tensor& q, const std::optional<at::Tensor>& q_scale,
                 const char* q_shape);

// int32 [..] or float8_e8m0fnu [.., head_dim / 32].
void check_mx_scale(const char* op, const char* argument, const at::Tensor& scale,
                    checks::Shape packed, checks::Shape unpacked);
void check_weights(const char* op, const at::Tensor& weights, int64_t num_q, int64_t num_heads);
void check_logits_dtype(const char* op, at::ScalarType dtype);
// Shape, dtype, device and strides of the caller's logits; not whether they overlap with inputs.
void check_out(const char* op, const at::Tensor& out, at::ScalarType dtype, int64_t num_q,
               int64_t width, at::Device device);

DType contract_dtype(at::ScalarType type);

at::Tensor new_logits(int64_t num_q, int64_t width, at::ScalarType dtype, at::Device device);
// `out` after check_out, as memory to write.
at::Tensor writable_out(const char* op, const at::Tensor& out);

// What a case of either op says: fields that supported() and prepare() take.
struct CaseBase {
  Format format = Format::fp8;
  int64_t num_heads = 64;
  int64_t head_dim = 128;
  DType weights_dtype = DType::float32;
  DType logits_dtype = DType::float32;
  bool clean = true;
  bool metadata = false;
};
void read_case(CaseReader& reader, CaseBase& wanted);
// Why the backend cannot run the case, or nothing. The sentence without the op's name.
std::optional<std::string> refusal(const CaseBase& wanted, Backend backend);

// An argument of both metadata ops.
i32 checked_num_sms(const char* op, int64_t num_sms);

}  // namespace deep_kernels::mqa
