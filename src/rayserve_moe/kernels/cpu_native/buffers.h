// What the calls that XLA makes ask of their buffers.
#pragma once

#include <algorithm>
#include <initializer_list>

#include "rows.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;
using Bf16 = ffi::Buffer<ffi::BF16>;
using F32 = ffi::Buffer<ffi::F32>;
using S32 = ffi::Buffer<ffi::S32>;
using S8 = ffi::Buffer<ffi::S8>;
using F8 = ffi::AnyBuffer;  // XLA has no type of C++ for buffers of e4m3
using U32 = ffi::Buffer<ffi::U32>;

namespace {

template <class Buffer>
const native::bf16* numbers(Buffer& buffer) {
  return reinterpret_cast<const native::bf16*>(buffer.untyped_data());
}

template <class Buffer>
int64_t size_of(Buffer& buffer, int dim) {
  return buffer.dimensions()[dim];
}

// Whether a buffer has these dimensions.
template <class Buffer>
bool is(Buffer& buffer, std::initializer_list<int64_t> sizes) {
  const auto found = buffer.dimensions();
  return std::equal(found.begin(), found.end(), sizes.begin(), sizes.end());
}

template <class Buffer>
bool is_absent_or(Buffer& buffer, std::initializer_list<int64_t> sizes) {
  return buffer.element_count() == 0 || is(buffer, sizes);
}

template <class... Buffers>
bool have_dims(size_t num_dims, Buffers&... buffers) {
  return ((buffers.dimensions().size() == num_dims) && ...);
}

ffi::Error wrong(const char* what) { return ffi::Error::InvalidArgument(what); }

using Scales = ffi::AnyBuffer;  // of a norm: bfloat16 or float32

bool are_scales(Scales& buffer) {
  return buffer.element_type() == ffi::BF16 || buffer.element_type() == ffi::F32;
}

// The scales of a norm from element `first` on; none if the array is empty.
native::NormScale scale_from(Scales& scales, int64_t first) {
  if (scales.element_count() == 0) return {};
  if (scales.element_type() == ffi::F32) return {nullptr, static_cast<const float*>(scales.untyped_data()) + first};
  return {numbers(scales) + first, nullptr};
}

// Layer `layer` of arrays stacked on dimension 0; null where the array is empty.
const native::bf16* of_layer(Bf16& stacked, int64_t layer) {
  if (stacked.element_count() == 0) return nullptr;
  return numbers(stacked) + layer * int64_t(stacked.element_count()) / size_of(stacked, 0);
}

}  // namespace
