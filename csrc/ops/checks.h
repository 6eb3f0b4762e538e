// Tensor checks that name the argument, the expectation and what came. The text is only made when a
// check fails. They hold for tensors that are being traced too, as far as sizes are known there: no
// check looks at a size that may vary, since looking would fix it.
#pragma once

#include <ATen/core/Tensor.h>

#include <initializer_list>
#include <string>

#include "deep_kernels/contract/types.h"

namespace deep_kernels::checks {

// Stands for a size or stride that is being traced and may vary.
inline constexpr int64_t kUnknown = -1;
int64_t size_of(const at::Tensor& tensor, int64_t dim);  // or kUnknown

// One dimension of an expected shape; kUnknown means any. A size that always is the same needs no
// name.
struct Dim {
  const char* name;
  int64_t size;
};
using Dtypes = std::initializer_list<at::ScalarType>;
using Shape = std::initializer_list<Dim>;

const char* dtype_name(at::ScalarType dtype);    // "float8_e4m3fn"
std::string describe(const at::Tensor& tensor);  // "float16 [4095]"

// Strided, and neither nested nor quantized: what no kernel could read otherwise.
void require_dense(const char* op, const char* argument, const at::Tensor& tensor);
// Throws the refusal of a conjugated or negated view where memory is to be written.
[[noreturn]] void refuse_lazy_view(const char* op, const char* argument);
// A dense tensor of one of the dtypes and of the shape, with memory enough for it.
void require(const char* op, const char* argument, const at::Tensor& tensor, Dtypes dtypes,
             Shape shape);
void require_device(const char* op, const char* argument, const at::Tensor& tensor,
                    at::Device device, const char* reference);
// Unit stride in the last dimension.
void require_rows(const char* op, const char* argument, const at::Tensor& tensor);
bool is_aligned_16(const at::Tensor& tensor);
// Base and the strides of the first `num_dims` dimensions multiples of 16 bytes, as 16-byte copies
// and TMA need.
void require_16_bytes(const char* op, const char* argument, const at::Tensor& tensor,
                      int64_t num_dims);
// No gaps from dimension `first` on.
void require_packed(const char* op, const char* argument, const at::Tensor& tensor, int64_t first);
// Forward only: no gradient may be asked for.
void require_no_grad(const char* op, const char* argument, const at::Tensor& tensor);
// Rows of what is to be written apart from each other, and its extent, first to last byte, from
// that of `input`.
void require_separate_rows(const char* op, const char* argument, const at::Tensor& out);
// No element of what is to be written shares memory with another one of it.
void require_no_self_overlap(const char* op, const char* argument, const at::Tensor& out);
void require_no_overlap(const char* op, const char* name, const at::Tensor& out,
                        const char* argument, const at::Tensor& input);

// Stride in bytes; of a dimension of size 0 or 1, whose stride means nothing, that of packed rows.
int64_t stride_bytes(const at::Tensor& tensor, int64_t dim);
// int32 argument from a 64-bit size.
i32 to_i32(const char* op, const char* what, int64_t value);
// The same of a tensor's size, or kUnknown.
i32 size_i32(const char* op, const char* what, const at::Tensor& tensor, int64_t dim);

}  // namespace deep_kernels::checks
