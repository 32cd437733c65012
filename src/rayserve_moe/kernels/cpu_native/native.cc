// The calls that XLA makes: buffers and attributes checked, then handed to the kernels.
#include <algorithm>
#include <initializer_list>

#include "attention.h"
#include "checks.h"
#include "experts.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;
using Bf16 = ffi::Buffer<ffi::BF16>;
using F32 = ffi::Buffer<ffi::F32>;
using S32 = ffi::Buffer<ffi::S32>;

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

// Layer `layer` of arrays stacked on dimension 0; null where the array is empty.
const native::bf16* of_layer(Bf16& stacked, int64_t layer) {
  if (stacked.element_count() == 0) return nullptr;
  return numbers(stacked) + layer * int64_t(stacked.element_count()) / size_of(stacked, 0);
}

ffi::Error Attention(Bf16 hidden, Bf16 q, Bf16 k, Bf16 v, Bf16 o, Bf16 q_norm, Bf16 k_norm, Bf16 q_bias, Bf16 k_bias,
                     Bf16 v_bias, F32 cos, F32 sin, S32 kv_slots, S32 positions, S32 page_table, S32 layer, Bf16 pool,
                     int64_t num_singles, float eps, ffi::ResultBuffer<ffi::F32> out,
                     ffi::ResultBuffer<ffi::BF16> pool_out) {
  if (!have_dims(2, hidden, page_table) || !have_dims(3, q) || !have_dims(4, pool) || !have_dims(0, layer))
    return wrong("attention takes arrays of other numbers of dimensions");
  native::AttentionShapes s;
  const int64_t at = layer.typed_data()[0], num_layers = size_of(q, 0);
  s.num_tokens = size_of(hidden, 0), s.width = size_of(hidden, 1);
  s.head_width = size_of(pool, 3), s.num_kv_heads = native::times(2, size_of(pool, 2)), s.page_size = size_of(pool, 1);
  s.num_heads = native::times(s.head_width, size_of(q, 2));
  s.pages_per_layer = native::times(num_layers, size_of(pool, 0));
  s.num_singles = num_singles, s.num_blocks = size_of(page_table, 0) - num_singles;
  s.block_tokens = s.num_blocks ? native::times(s.num_blocks, s.num_tokens - num_singles) : 0;
  s.table_width = size_of(page_table, 1), s.eps = eps;
  if (!native::fit(s)) return wrong("attention has no such heads, pages, blocks or widths");
  const int64_t q_width = s.num_heads * s.head_width, kv_width = s.num_kv_heads * s.head_width;
  if (!is(q, {num_layers, s.width, q_width}) || !is(k, {num_layers, s.width, kv_width}) ||
      !is(v, {num_layers, s.width, kv_width}) || !is(o, {num_layers, q_width, s.width}) ||
      !is_absent_or(q_norm, {num_layers, s.head_width}) || !is_absent_or(k_norm, {num_layers, s.head_width}) ||
      !is_absent_or(q_bias, {num_layers, q_width}) || !is_absent_or(k_bias, {num_layers, kv_width}) ||
      !is_absent_or(v_bias, {num_layers, kv_width}))
    return wrong("weights of attention do not fit each other");
  if (!is(cos, {s.num_tokens, s.head_width / 2}) || !is(sin, {s.num_tokens, s.head_width / 2}) ||
      !is(kv_slots, {s.num_tokens}) || !is(positions, {s.num_tokens}) || !is(*out, {s.num_tokens, s.width}))
    return wrong("attention has other numbers of tokens");
  if (at < 0 || at >= num_layers) return wrong("there is no such layer");
  if (pool_out->untyped_data() != pool.untyped_data()) return wrong("the pool must be updated in place");
  native::AttentionArrays a;
  a.hidden = numbers(hidden);
  a.q = of_layer(q, at), a.k = of_layer(k, at), a.v = of_layer(v, at), a.o = of_layer(o, at);
  a.q_norm = of_layer(q_norm, at), a.k_norm = of_layer(k_norm, at);
  a.q_bias = of_layer(q_bias, at), a.k_bias = of_layer(k_bias, at), a.v_bias = of_layer(v_bias, at);
  a.cos = cos.typed_data(), a.sin = sin.typed_data();
  a.kv_slots = kv_slots.typed_data(), a.positions = positions.typed_data(), a.page_table = page_table.typed_data();
  a.pool = reinterpret_cast<native::bf16*>(pool_out->untyped_data()) +
           at * s.pages_per_layer * s.page_size * 2 * s.num_kv_heads * s.head_width;
  a.out = out->typed_data();
  if (!native::are_in_pool(s, a)) return wrong("a token's position, slot or page lies outside the pool");
  native::attention_layer(s, a);
  return ffi::Error::Success();
}

ffi::Error Experts(Bf16 hidden, S32 slots, F32 gates, Bf16 gate, Bf16 up, Bf16 down, S32 first_slot, int64_t num_slots,
                   ffi::ResultBuffer<ffi::F32> out) {
  if (!have_dims(2, hidden, slots) || !have_dims(3, gate) || !have_dims(0, first_slot))
    return wrong("experts take arrays of other numbers of dimensions");
  const native::ExpertShapes shapes{size_of(hidden, 0), size_of(slots, 1), size_of(hidden, 1), size_of(gate, 2),
                                    num_slots};
  const int64_t first = first_slot.typed_data()[0], all = size_of(gate, 0), size = shapes.width * shapes.inner;
  if (!is(slots, {shapes.num_tokens, shapes.top_k}) || !is(gates, {shapes.num_tokens, shapes.top_k}) ||
      !is(gate, {all, shapes.width, shapes.inner}) || !is(up, {all, shapes.width, shapes.inner}) ||
      !is(down, {all, shapes.inner, shapes.width}) || !is(*out, {shapes.num_tokens, shapes.width}))
    return wrong("tokens, picks and weights of experts do not fit each other");
  if (num_slots < 0 || first < 0 || num_slots > all - first) return wrong("there are no such expert slots");
  if (shapes.num_tokens * shapes.top_k > INT32_MAX) return wrong("there are too many picks");
  if (shapes.width % native::kPanel || shapes.inner % native::kPanel) return wrong("widths of experts must divide by 32");
  native::expert_sums(shapes, {numbers(hidden), slots.typed_data(), gates.typed_data(), numbers(gate) + first * size,
                               numbers(up) + first * size, numbers(down) + first * size, out->typed_data()});
  return ffi::Error::Success();
}

ffi::Error Product(Bf16 left, Bf16 right, ffi::ResultBuffer<ffi::F32> out) {
  if (!have_dims(2, left, right)) return wrong("a product takes two matrices");
  const int64_t rows = size_of(left, 0), depth = size_of(left, 1), width = size_of(right, 1);
  if (size_of(right, 0) != depth || !is(*out, {rows, width})) return wrong("no such product of these matrices");
  if (width % native::kPanel || depth % 2) return wrong("the width of a product must divide by 32, its depth by 2");
  native::for_each(width / native::kPanel, [&](int64_t panel) {
    native::multiply_panel(numbers(left), rows, depth, numbers(right) + panel * native::kPanel * depth,
                           [&](int64_t r, const native::Pair& result) {
                             float* target = out->typed_data() + r * width + panel * native::kPanel;
                             _mm512_storeu_ps(target, result.low);
                             _mm512_storeu_ps(target + 16, result.high);
                           });
  });
  return ffi::Error::Success();
}

ffi::Error Norm(Bf16 rows, Bf16 scale, float eps, ffi::ResultBuffer<ffi::BF16> out) {
  if (!have_dims(2, rows)) return wrong("a norm takes rows");
  const int64_t width = size_of(rows, 1);
  if (!is(scale, {width}) || !is(*out, {size_of(rows, 0), width})) return wrong("a norm has other widths");
  if (width % native::kPanel) return wrong("the width of a norm must divide by 32");
  auto* target = reinterpret_cast<native::bf16*>(out->untyped_data());
  native::for_pieces(size_of(rows, 0), 32, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t)
      native::norm_row(numbers(rows) + t * width, numbers(scale), target + t * width, width, eps);
  });
  return ffi::Error::Success();
}

ffi::Error Scores(Bf16 rows, F32 router, ffi::ResultBuffer<ffi::F32> out) {
  if (!have_dims(2, rows, router)) return wrong("scores take rows and a matrix");
  const int64_t width = size_of(rows, 1), experts = size_of(router, 1);
  if (!is(router, {width, experts}) || !is(*out, {size_of(rows, 0), experts})) return wrong("scores have other widths");
  native::for_pieces(size_of(rows, 0), 4, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      float* target = out->typed_data() + t * experts;
      native::score_row(numbers(rows) + t * width, router.typed_data(), target, width, experts);
    }
  });
  return ffi::Error::Success();
}

// Cosine and sine of position * frequency, as `rotation_of` of `model/layers.py`.
ffi::Error Rotation(S32 positions, F32 frequencies, ffi::ResultBuffer<ffi::F32> cos, ffi::ResultBuffer<ffi::F32> sin) {
  if (!have_dims(1, positions, frequencies)) return wrong("angles take two vectors");
  const int64_t half = size_of(frequencies, 0);
  if (!is(*cos, {size_of(positions, 0), half}) || !is(*sin, {size_of(positions, 0), half}))
    return wrong("angles have other sizes");
  native::for_pieces(size_of(positions, 0), 16, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * half; i < end * half; ++i) {
      const float angle = float(positions.typed_data()[i / half]) * frequencies.typed_data()[i % half];
      cos->typed_data()[i] = std::cos(angle), sin->typed_data()[i] = std::sin(angle);
    }
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(RayserveMoeNorm, Norm,
                              ffi::Ffi::Bind().Arg<Bf16>().Arg<Bf16>().Attr<float>("eps").Ret<Bf16>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(RayserveMoeScores, Scores, ffi::Ffi::Bind().Arg<Bf16>().Arg<F32>().Ret<F32>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(RayserveMoeRotation, Rotation,
                              ffi::Ffi::Bind().Arg<S32>().Arg<F32>().Ret<F32>().Ret<F32>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(RayserveMoeAttention, Attention,
                              ffi::Ffi::Bind()
                                  .Arg<Bf16>().Arg<Bf16>().Arg<Bf16>().Arg<Bf16>().Arg<Bf16>()
                                  .Arg<Bf16>().Arg<Bf16>().Arg<Bf16>().Arg<Bf16>().Arg<Bf16>()
                                  .Arg<F32>().Arg<F32>().Arg<S32>().Arg<S32>().Arg<S32>().Arg<S32>().Arg<Bf16>()
                                  .Attr<int64_t>("num_singles").Attr<float>("eps").Ret<F32>().Ret<Bf16>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(RayserveMoeExperts, Experts,
                              ffi::Ffi::Bind().Arg<Bf16>().Arg<S32>().Arg<F32>().Arg<Bf16>().Arg<Bf16>().Arg<Bf16>()
                                  .Arg<S32>().Attr<int64_t>("num_slots").Ret<F32>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(RayserveMoeProduct, Product, ffi::Ffi::Bind().Arg<Bf16>().Arg<Bf16>().Ret<F32>());
