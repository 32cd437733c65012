// What the calls that XLA makes ask of their buffers.
#pragma once

#include <algorithm>
#include <initializer_list>

#include "adapters.h"
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

// Trailing arguments of a call with adapters: the slot of each token, then for each matrix A and B,
// [layers, slots, rank, inputs] and [layers, slots, rank, outputs], empty for a matrix that adapters never change.
// Adapters of experts are stacked over expert slots, not layers; the call reads `num_layers` of these from `layer` on.
class AdapterArguments {
 public:
  AdapterArguments(const ffi::RemainingArgs& given, int64_t layer, int64_t num_tokens, int64_t num_layers = 1)
      : given_(given), layer_(layer), end_(layer + num_layers) {
    if (given.empty()) return;
    auto slots = given.get<S32>(0);
    is_wrong_ = !slots.has_value() || !is(*slots, {num_tokens});
    if (is_wrong_) return;
    slots_ = slots->typed_data(), next_ = 1;
    for (int64_t t = 0; t < num_tokens; ++t) largest_ = std::max<int64_t>(largest_, slots_[t]);
  }

  // Sets the adapters of the next matrix; without trailing arguments it has none.
  void read(native::Adapters& adapters, int64_t inputs, int64_t outputs) {
    if (is_wrong_ || !slots_) return;
    if (next_ + 2 > given_.size()) return void(is_wrong_ = true);
    auto a = given_.get<Bf16>(next_), b = given_.get<Bf16>(next_ + 1);
    next_ += 2;
    if (!a.has_value() || !b.has_value()) return void(is_wrong_ = true);
    if (a->element_count() == 0) return;
    if (!have_dims(4, *a, *b)) return void(is_wrong_ = true);
    const int64_t of_a = size_of(*a, 0), of_b = size_of(*b, 0), layers = std::max(of_a, of_b);
    const int64_t slots = size_of(*a, 1), rank = size_of(*a, 2);
    is_wrong_ = !is(*a, {of_a, slots, rank, inputs}) || !is(*b, {of_b, slots, rank, outputs}) || end_ > layers ||
                largest_ >= slots || !is_whole(of_a, layers) || !is_whole(of_b, layers);
    if (is_wrong_) return;
    adapters = {of_layer(*a, first_of(of_a, layers)), of_layer(*b, first_of(of_b, layers)), slots_, slots, rank, inputs,
                outputs, of_a < layers, of_b < layers};
  }

  // Returns true if an argument was missing, did not fit, or was left over.
  bool are_wrong() const { return is_wrong_ || (slots_ && next_ != given_.size()); }

 private:
  // A stack has a matrix for each expert, or one for all experts of a layer.
  bool is_whole(int64_t size, int64_t layers) const { return size == layers || size * (end_ - layer_) == layers; }
  int64_t first_of(int64_t size, int64_t layers) const { return size == layers ? layer_ : layer_ / (end_ - layer_); }

  const ffi::RemainingArgs& given_;
  int64_t layer_, end_, largest_ = -1;
  const int32_t* slots_ = nullptr;
  size_t next_ = 0;
  bool is_wrong_ = false;
};

}  // namespace
