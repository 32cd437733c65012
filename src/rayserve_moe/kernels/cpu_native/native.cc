// The calls that XLA makes: buffers and attributes checked, then handed to the kernels.
#include <algorithm>
#include <numeric>
#include <string_view>
#include <vector>

#include "attention.h"
#include "buffers.h"
#include "checks.h"
#include "experts.h"
#include "latent_call.h"
#include "noise.h"

namespace {

constexpr int64_t kWordsPiece = 1024;  // words of a row that a thread takes together

// Scales of a norm of each head, or of all `width` elements together; false where they fit neither.
bool is_norm(Bf16& scale, int64_t num_layers, int64_t head_width, int64_t width) {
  return is_absent_or(scale, {num_layers, head_width}) || is(scale, {num_layers, width});
}

native::HeadNorm norm_of(Bf16& scale, int64_t layer) {
  const native::bf16* here = of_layer(scale, layer);
  return {here, here ? size_of(scale, 1) : 0};
}

ffi::Error Attention(Bf16 hidden, Bf16 q, Bf16 k, Bf16 v, Bf16 o, Bf16 q_norm, Bf16 k_norm, Bf16 q_bias, Bf16 k_bias,
                     Bf16 v_bias, Bf16 sinks, F32 mean_squares, F32 cos, F32 sin, S32 kv_slots, S32 positions,
                     S32 page_table, S32 layer, S32 first_page, S32 num_pages, S32 windows, Bf16 pool,
                     ffi::RemainingArgs trees, int64_t num_singles, float eps, float scale, float clip, bool is_interleaved, bool norms_after,
                     ffi::ResultBuffer<ffi::F32> out, ffi::ResultBuffer<ffi::BF16> pool_out) {
  if (!have_dims(2, hidden, page_table, cos) || !have_dims(3, q) || !have_dims(4, pool) ||
      !have_dims(0, layer, first_page, num_pages))
    return wrong("attention takes arrays of other numbers of dimensions");
  native::AttentionShapes s;
  const int64_t at = layer.typed_data()[0], num_layers = size_of(q, 0), begin = first_page.typed_data()[0];
  if (at < 0 || at >= num_layers) return wrong("there is no such layer");
  if (!is_absent_or(windows, {num_layers})) return wrong("each layer has a window");
  const int64_t head_width = size_of(pool, 3);
  s.rules = {head_width, size_of(cos, 1), is_interleaved, norms_after, clip, eps};
  s.num_tokens = size_of(hidden, 0), s.width = size_of(hidden, 1);
  s.num_kv_heads = native::times(2, size_of(pool, 2)), s.page_size = size_of(pool, 1);
  s.num_heads = native::times(head_width, size_of(q, 2)), s.num_pages = num_pages.typed_data()[0];
  s.num_singles = num_singles, s.num_blocks = size_of(page_table, 0) - num_singles;
  s.block_tokens = s.num_blocks ? native::times(s.num_blocks, s.num_tokens - num_singles) : 0;
  s.table_width = size_of(page_table, 1), s.scale = scale;
  s.window = windows.element_count() ? windows.typed_data()[at] : 0;
  if (!native::fit(s)) return wrong("attention has no such heads, pages, blocks or widths");
  if (begin < 0 || s.num_pages > size_of(pool, 0) - begin) return wrong("the pool has no such pages");
  const int64_t q_width = s.q_width(), kv_width = s.kv_width();
  if (!is(q, {num_layers, s.width, q_width}) || !is(k, {num_layers, s.width, kv_width}) ||
      !is(v, {num_layers, s.width, kv_width}) || !is(o, {num_layers, q_width, s.width}) ||
      !is_norm(q_norm, num_layers, head_width, q_width) || !is_norm(k_norm, num_layers, head_width, kv_width) ||
      !is_absent_or(q_bias, {num_layers, q_width}) || !is_absent_or(k_bias, {num_layers, kv_width}) ||
      !is_absent_or(v_bias, {num_layers, kv_width}) || !is_absent_or(sinks, {num_layers, s.num_heads}))
    return wrong("weights of attention do not fit each other");
  if (!is(cos, {s.num_tokens, s.rules.rotated_pairs}) || !is(sin, {s.num_tokens, s.rules.rotated_pairs}) ||
      !is(kv_slots, {s.num_tokens}) || !is(positions, {s.num_tokens}) || !is(*out, {s.num_tokens, s.width}) ||
      !is_absent_or(mean_squares, {s.num_tokens, 2}))
    return wrong("attention has other numbers of tokens");
  if (pool_out->untyped_data() != pool.untyped_data()) return wrong("the pool must be updated in place");
  native::AttentionArrays a;
  a.hidden = numbers(hidden);
  a.q = of_layer(q, at), a.k = of_layer(k, at), a.v = of_layer(v, at), a.o = of_layer(o, at);
  a.q_norm = norm_of(q_norm, at), a.k_norm = norm_of(k_norm, at);
  a.q_bias = of_layer(q_bias, at), a.k_bias = of_layer(k_bias, at), a.v_bias = of_layer(v_bias, at);
  a.sinks = of_layer(sinks, at);
  a.cos = cos.typed_data(), a.sin = sin.typed_data();
  a.mean_squares = mean_squares.element_count() ? mean_squares.typed_data() : nullptr;
  a.kv_slots = kv_slots.typed_data(), a.positions = positions.typed_data(), a.page_table = page_table.typed_data();
  if (!found_ancestors(trees, num_singles, a.ancestors)) return wrong("each single token has ancestors");
  a.pool = reinterpret_cast<native::bf16*>(pool_out->untyped_data()) + begin * s.page_size * 2 * kv_width;
  a.out = out->typed_data();
  if (!native::are_in_pool(s, a)) return wrong("a token's position, slot or page lies outside the pool");
  native::attention_layer(s, a);
  return ffi::Error::Success();
}

// Row `row` of a matrix; null where the array is empty.
template <class Number, class Buffer>
const Number* from_row(Buffer& rows, int64_t row, int64_t width) {
  return rows.element_count() == 0 ? nullptr : static_cast<const Number*>(rows.untyped_data()) + row * width;
}

// How many scales a column of `depth` rows has, of matrices [slots, depth, columns]: 1 or more than its blocks; 0: they fit not.
int64_t blocks_of(F32& scales, int64_t slots, int64_t depth, int64_t columns) {
  if (!have_dims(3, scales) || size_of(scales, 0) != slots || size_of(scales, 2) != columns) return 0;
  const int64_t blocks = size_of(scales, 1), all = (depth + native::kScaleBlock - 1) / native::kScaleBlock;
  return blocks == 1 || blocks >= all ? blocks : 0;
}

// Experts whose matrices are of bfloat16, or of 8 bits with scales.
template <class Weight, class Matrices>
ffi::Error Experts(Bf16 hidden, S32 slots, F32 gates, Matrices gate, Matrices up, Matrices down, Bf16 gate_bias,
                   Bf16 up_bias, Bf16 down_bias, F32 gate_scale, F32 up_scale, F32 down_scale, S32 first_slot,
                   int64_t num_slots, std::string_view activation, ffi::ResultBuffer<ffi::F32> out) {
  if (!have_dims(2, hidden, slots) || !have_dims(3, gate) || !have_dims(0, first_slot))
    return wrong("experts take arrays of other numbers of dimensions");
  if constexpr (std::is_same_v<Weight, native::Fp8>)
    for (auto* matrices : {&gate, &up, &down})
      if (matrices->element_type() != ffi::F8E4M3FN) return wrong("these experts take matrices of e4m3");
  const native::ExpertShapes shapes{size_of(hidden, 0), size_of(slots, 1), size_of(hidden, 1), size_of(gate, 2),
                                    num_slots, native::activation_of(activation)};
  const int64_t first = first_slot.typed_data()[0], all = size_of(gate, 0), size = shapes.width * shapes.inner;
  const int64_t inner = shapes.inner, width = shapes.width;
  const int64_t up_blocks = blocks_of(up_scale, all, width, inner), down_blocks = blocks_of(down_scale, all, inner, width);
  const bool have_scales = up_blocks && down_blocks && blocks_of(gate_scale, all, width, inner) == up_blocks;
  const bool have_none = gate_scale.element_count() + up_scale.element_count() + down_scale.element_count() == 0;
  if (!is(slots, {shapes.num_tokens, shapes.top_k}) || !is(gates, {shapes.num_tokens, shapes.top_k}) ||
      !is(gate, {all, shapes.width, shapes.inner}) || !is(up, {all, shapes.width, shapes.inner}) ||
      !is(down, {all, shapes.inner, shapes.width}) || !is(*out, {shapes.num_tokens, shapes.width}) ||
      !is_absent_or(gate_bias, {all, inner}) || !is_absent_or(up_bias, {all, inner}) ||
      !is_absent_or(down_bias, {all, width}))
    return wrong("tokens, picks and weights of experts do not fit each other");
  if (!(sizeof(Weight) == 1 ? have_scales : have_none)) return wrong("columns of 8 bits have scales, and no others");
  if (num_slots < 0 || first < 0 || num_slots > all - first) return wrong("there are no such expert slots");
  if (shapes.num_tokens * shapes.top_k > INT32_MAX) return wrong("there are too many picks");
  if (shapes.width % 2 || shapes.inner % native::kPanel) return wrong("experts take even rows, and inner ones of whole panels");
  if (shapes.activation == native::Activation::kUnknown) return wrong("experts have no such activation");
  native::ExpertArrays<Weight> arrays{numbers(hidden), slots.typed_data(), gates.typed_data()};
  arrays.gate = from_row<Weight>(gate, first, size), arrays.up = from_row<Weight>(up, first, size);
  arrays.down = from_row<Weight>(down, first, size);
  arrays.gate_bias = from_row<native::bf16>(gate_bias, first, inner);
  arrays.up_bias = from_row<native::bf16>(up_bias, first, inner);
  arrays.down_bias = from_row<native::bf16>(down_bias, first, width);
  arrays.gate_scale = from_row<float>(gate_scale, first, up_blocks * inner);
  arrays.up_scale = from_row<float>(up_scale, first, up_blocks * inner);
  arrays.down_scale = from_row<float>(down_scale, first, down_blocks * width);
  arrays.out = out->typed_data(), arrays.up_blocks = up_blocks, arrays.down_blocks = down_blocks;
  native::expert_sums(shapes, arrays);
  return ffi::Error::Success();
}

ffi::Error Product(Bf16 left, Bf16 right, ffi::ResultBuffer<ffi::F32> out) {
  if (!have_dims(2, left, right)) return wrong("a product takes two matrices");
  const int64_t rows = size_of(left, 0), depth = size_of(left, 1), width = size_of(right, 1);
  if (size_of(right, 0) != depth || !is(*out, {rows, width})) return wrong("no such product of these matrices");
  if (depth % 2) return wrong("the depth of a product must divide by 2");
  native::multiply_all(numbers(left), rows, depth, numbers(right), width, out->typed_data());
  return ffi::Error::Success();
}

ffi::Error Norm(Bf16 rows, Bf16 scale, float eps, ffi::ResultBuffer<ffi::BF16> out) {
  if (!have_dims(2, rows)) return wrong("a norm takes rows");
  const int64_t width = size_of(rows, 1);
  if (!is(scale, {width}) || !is(*out, {size_of(rows, 0), width})) return wrong("a norm has other widths");
  auto* target = reinterpret_cast<native::bf16*>(out->untyped_data());
  native::for_pieces(size_of(rows, 0), 32, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t)
      native::norm_row(numbers(rows) + t * width, numbers(scale), target + t * width, width, eps);
  });
  return ffi::Error::Success();
}

ffi::Error Scores(Bf16 rows, F32 router, F32 bias, std::string_view score, ffi::ResultBuffer<ffi::F32> out) {
  if (!have_dims(2, rows, router)) return wrong("scores take rows and a matrix");
  const int64_t width = size_of(rows, 1), experts = size_of(router, 1);
  if (!is(router, {width, experts}) || !is(*out, {size_of(rows, 0), experts}) || !is_absent_or(bias, {experts}))
    return wrong("scores have other widths");
  if (score != "softmax" && score != "sigmoid") return wrong("there is no such score");
  const float* added = bias.element_count() == 0 ? nullptr : bias.typed_data();
  const native::Router of_layer{router.typed_data(), added, score == "sigmoid", width, experts};
  native::for_pieces(size_of(rows, 0), native::kScoredRows, [&](int64_t begin, int64_t end) {
    native::score_rows(numbers(rows) + begin * width, end - begin, of_layer, out->typed_data() + begin * experts);
  });
  return ffi::Error::Success();
}

// Cosine and sine of position * frequency, times `factor`, as `rotation_of` of `kernels/layers.py`.
ffi::Error Rotation(S32 positions, F32 frequencies, float factor, ffi::ResultBuffer<ffi::F32> cos, ffi::ResultBuffer<ffi::F32> sin) {
  if (!have_dims(1, positions, frequencies)) return wrong("angles take two vectors");
  const int64_t half = size_of(frequencies, 0);
  if (!is(*cos, {size_of(positions, 0), half}) || !is(*sin, {size_of(positions, 0), half}))
    return wrong("angles have other sizes");
  native::for_pieces(size_of(positions, 0), 16, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * half; i < end * half; ++i) {
      const float angle = float(positions.typed_data()[i / half]) * frequencies.typed_data()[i % half];
      cos->typed_data()[i] = std::cos(angle) * factor, sin->typed_data()[i] = std::sin(angle) * factor;
    }
  });
  return ffi::Error::Success();
}

// Sums of exp((logit - best) / temperature) over the words of each row: of pieces of fixed size, in their order.
ffi::Error Masses(F32 logits, F32 temperatures, S32 num_words, ffi::ResultBuffer<ffi::F32> best,
                  ffi::ResultBuffer<ffi::S32> places, ffi::ResultBuffer<ffi::F32> out, ffi::ResultBuffer<ffi::S32> finite,
                  ffi::ResultBuffer<ffi::F32> logs) {
  if (!have_dims(2, logits) || !have_dims(0, num_words)) return wrong("masses are of rows of words");
  const int64_t rows = size_of(logits, 0), words = size_of(logits, 1), pieces = (words + kWordsPiece - 1) / kWordsPiece;
  if (!is(temperatures, {rows}) || !is(*best, {rows}) || !is(*places, {rows}) || !is(*out, {rows}) || !is(*finite, {rows}) || !is(*logs, {rows}))
    return wrong("masses have other numbers of rows");
  std::vector<native::Peak> peaks(rows);
  native::for_each(rows, [&](int64_t row) {
    peaks[row] = native::peak_of(logits.typed_data() + row * words, 0, words, *num_words.typed_data());
  });
  std::vector<float> sums(rows * pieces);
  native::for_each(rows * pieces, [&](int64_t item) {
    const int64_t row = item / pieces, begin = item % pieces * kWordsPiece, end = std::min(begin + kWordsPiece, words);
    sums[item] = native::mass_of(logits.typed_data() + row * words, begin, end, peaks[row].best, temperatures.typed_data()[row]);
  });
  for (int64_t row = 0; row < rows; ++row) {
    best->typed_data()[row] = peaks[row].best, places->typed_data()[row] = peaks[row].place;
    finite->typed_data()[row] = peaks[row].is_finite;
    out->typed_data()[row] = float(std::accumulate(&sums[row * pieces], &sums[row * pieces] + pieces, 0.0));
    logs->typed_data()[row] = std::log(out->typed_data()[row]);
  }
  return ffi::Error::Success();
}

// Noise [rows, words] of samples, words from `first` on: as `gumbel_noise` of `kernels/layers.py`.
ffi::Error Noise(U32 seeds, U32 choices, U32 positions, S32 first, ffi::ResultBuffer<ffi::F32> out) {
  if (!have_dims(1, seeds) || !have_dims(0, first) || !have_dims(2, *out)) return wrong("noise has rows of words");
  const int64_t rows = size_of(seeds, 0), words = size_of(*out, 1), pieces = (words + kWordsPiece - 1) / kWordsPiece;
  if (!is(choices, {rows}) || !is(positions, {rows}) || size_of(*out, 0) != rows)
    return wrong("noise has other numbers of rows");
  native::for_each(rows * pieces, [&](int64_t item) {
    const int64_t row = item / pieces, begin = item % pieces * kWordsPiece, end = std::min(begin + kWordsPiece, words);
    const native::NoiseKey key(seeds.typed_data()[row], choices.typed_data()[row], positions.typed_data()[row]);
    for (int64_t word = begin; word < end; word += 16)
      _mm512_mask_storeu_ps(out->typed_data() + row * words + word, native::lanes_of(word, end),
                            native::gumbel(key, native::sixteen_from(*first.typed_data() + int32_t(word))));
  });
  return ffi::Error::Success();
}

// The best word of each row with its noise: as `choose` of `calls.py`.
ffi::Error Choose(F32 logprobs, F32 largest, U32 seeds, U32 choices, U32 positions, S32 keys, S32 places, S32 first,
                  int64_t last_place, ffi::ResultBuffer<ffi::F32> scores, ffi::ResultBuffer<ffi::S32> ids,
                  ffi::ResultBuffer<ffi::F32> own) {
  if (!have_dims(2, logprobs) || !have_dims(0, first)) return wrong("words are chosen of rows");
  const int64_t rows = size_of(logprobs, 0), words = size_of(logprobs, 1), size = 8 * kWordsPiece;
  const int64_t pieces = (words + size - 1) / size;
  if (!is(largest, {rows}) || !is(seeds, {rows}) || !is(choices, {rows}) || !is(positions, {rows}) || !is(keys, {rows}) ||
      !is(places, {rows}) || !is(*scores, {rows}) || !is(*ids, {rows}) || !is(*own, {rows}))
    return wrong("words are chosen of other numbers of rows");
  std::vector<native::Chosen> found(rows * pieces);
  native::for_each(rows * pieces, [&](int64_t item) {
    const int64_t row = item / pieces, begin = item % pieces * size, end = std::min(begin + size, words);
    const native::NoiseKey key(seeds.typed_data()[row], choices.typed_data()[row], positions.typed_data()[row]);
    const native::Kept kept{keys.typed_data()[row], places.typed_data()[row], int32_t(last_place)};
    const float* const here = logprobs.typed_data() + row * words;
    found[item] = native::chosen(here, key, kept, largest.typed_data()[row], *first.typed_data(), begin, end);
  });
  for (int64_t row = 0; row < rows; ++row) {
    native::Chosen best;
    for (int64_t item = row * pieces; item < (row + 1) * pieces; ++item)
      if (found[item].score > best.score) best = found[item];
    scores->typed_data()[row] = best.score, ids->typed_data()[row] = best.id, own->typed_data()[row] = best.own;
  }
  return ffi::Error::Success();
}

// Copies page `sources[i]` of the pool to page `targets[i]`, one after the other.
ffi::Error Pages(Bf16 pool, S32 sources, S32 targets, ffi::ResultBuffer<ffi::BF16> out) {
  if (!have_dims(1, sources, targets) || !have_dims(4, pool)) return wrong("pages of a pool are copied by two lists");
  const int64_t count = size_of(sources, 0), pages = size_of(pool, 0);
  if (!is(targets, {count}) || pages == 0) return wrong("each page that is copied has a place");
  if (out->untyped_data() != pool.untyped_data()) return wrong("the pool must be updated in place");
  const int64_t size = pool.element_count() / pages;
  native::bf16* const data = reinterpret_cast<native::bf16*>(out->untyped_data());
  for (int64_t i = 0; i < count; ++i) {
    const int64_t source = sources.typed_data()[i], target = targets.typed_data()[i];
    if (std::min(source, target) < 0 || std::max(source, target) >= pages) return wrong("the pool has no such pages");
    if (source != target) std::copy_n(data + source * size, size, data + target * size);
  }
  return ffi::Error::Success();
}

// Copies rows of all layers within a pool, one after the other: `move_rows` of `kernels/kv_pool.py`.
ffi::Error Moves(Bf16 pool, S32 sources, S32 targets, S32 num, int64_t num_layers, ffi::ResultBuffer<ffi::BF16> pool_out) {
  if (pool.dimensions().size() < 3 || !have_dims(1, sources, targets) || !have_dims(0, num))
    return wrong("moves are of rows of a pool");
  const int64_t pages = native::times(num_layers, size_of(pool, 0)), slots = pages * size_of(pool, 1);
  const int64_t count = num.typed_data()[0];
  if (pages <= 0 || count < 0 || count > size_of(sources, 0) || !is(targets, {size_of(sources, 0)}))
    return wrong("there are no such moves, or layers");
  if (pool_out->untyped_data() != pool.untyped_data()) return wrong("the pool must be updated in place");
  const auto is_outside = [slots](int32_t slot) { return slot < 0 || slot >= slots; };
  if (std::any_of(sources.typed_data(), sources.typed_data() + count, is_outside) ||
      std::any_of(targets.typed_data(), targets.typed_data() + count, is_outside))
    return wrong("a row is moved outside the pool");
  const int64_t width = int64_t(pool.element_count()) / (num_layers * slots);
  auto* rows = reinterpret_cast<native::bf16*>(pool_out->untyped_data());
  for (int64_t layer = 0; layer < num_layers; ++layer, rows += slots * width)
    for (int64_t i = 0; i < count; ++i)
      std::copy_n(rows + sources.typed_data()[i] * width, width, rows + targets.typed_data()[i] * width);
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(RayserveMoePages, Pages,
                              ffi::Ffi::Bind().Arg<Bf16>().Arg<S32>().Arg<S32>().Ret<Bf16>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(RayserveMoeMoves, Moves,
                              ffi::Ffi::Bind().Arg<Bf16>().Arg<S32>().Arg<S32>().Arg<S32>().Attr<int64_t>("num_layers")
                                  .Ret<Bf16>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(RayserveMoeMasses, Masses,
                              ffi::Ffi::Bind().Arg<F32>().Arg<F32>().Arg<S32>().Ret<F32>().Ret<S32>().Ret<F32>().Ret<S32>()
                                  .Ret<F32>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(RayserveMoeChoose, Choose,
                              ffi::Ffi::Bind().Arg<F32>().Arg<F32>().Arg<U32>().Arg<U32>().Arg<U32>().Arg<S32>().Arg<S32>()
                                  .Arg<S32>().Attr<int64_t>("last_place").Ret<F32>().Ret<S32>().Ret<F32>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(RayserveMoeNoise, Noise,
                              ffi::Ffi::Bind().Arg<U32>().Arg<U32>().Arg<U32>().Arg<S32>().Ret<F32>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(RayserveMoeNorm, Norm,
                              ffi::Ffi::Bind().Arg<Bf16>().Arg<Bf16>().Attr<float>("eps").Ret<Bf16>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(RayserveMoeScores, Scores,
                              ffi::Ffi::Bind().Arg<Bf16>().Arg<F32>().Arg<F32>().Attr<std::string_view>("score")
                                  .Ret<F32>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(RayserveMoeRotation, Rotation,
                              ffi::Ffi::Bind().Arg<S32>().Arg<F32>().Attr<float>("factor").Ret<F32>().Ret<F32>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(RayserveMoeAttention, Attention,
                              ffi::Ffi::Bind()
                                  .Arg<Bf16>().Arg<Bf16>().Arg<Bf16>().Arg<Bf16>().Arg<Bf16>()
                                  .Arg<Bf16>().Arg<Bf16>().Arg<Bf16>().Arg<Bf16>().Arg<Bf16>()
                                  .Arg<Bf16>().Arg<F32>().Arg<F32>().Arg<F32>().Arg<S32>().Arg<S32>()
                                  .Arg<S32>().Arg<S32>().Arg<S32>().Arg<S32>().Arg<S32>().Arg<Bf16>().RemainingArgs()
                                  .Attr<int64_t>("num_singles").Attr<float>("eps").Attr<float>("scale")
                                  .Attr<float>("clip").Attr<bool>("is_interleaved").Attr<bool>("norms_after")
                                  .Ret<F32>().Ret<Bf16>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(RayserveMoeExperts, (Experts<native::bf16, Bf16>),
                              ffi::Ffi::Bind().Arg<Bf16>().Arg<S32>().Arg<F32>().Arg<Bf16>().Arg<Bf16>().Arg<Bf16>()
                                  .Arg<Bf16>().Arg<Bf16>().Arg<Bf16>().Arg<F32>().Arg<F32>().Arg<F32>().Arg<S32>()
                                  .Attr<int64_t>("num_slots").Attr<std::string_view>("activation").Ret<F32>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(RayserveMoeInt8Experts, (Experts<int8_t, S8>),
                              ffi::Ffi::Bind().Arg<Bf16>().Arg<S32>().Arg<F32>().Arg<S8>().Arg<S8>().Arg<S8>()
                                  .Arg<Bf16>().Arg<Bf16>().Arg<Bf16>().Arg<F32>().Arg<F32>().Arg<F32>().Arg<S32>()
                                  .Attr<int64_t>("num_slots").Attr<std::string_view>("activation").Ret<F32>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(RayserveMoeFp8Experts, (Experts<native::Fp8, F8>),
                              ffi::Ffi::Bind().Arg<Bf16>().Arg<S32>().Arg<F32>().Arg<F8>().Arg<F8>().Arg<F8>()
                                  .Arg<Bf16>().Arg<Bf16>().Arg<Bf16>().Arg<F32>().Arg<F32>().Arg<F32>().Arg<S32>()
                                  .Attr<int64_t>("num_slots").Attr<std::string_view>("activation").Ret<F32>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(RayserveMoeProduct, Product, ffi::Ffi::Bind().Arg<Bf16>().Arg<Bf16>().Ret<F32>());
