// The other calls that XLA makes: buffers and attributes checked, then handed to the kernels.
#include <algorithm>
#include <numeric>
#include <string_view>
#include <vector>

#include "attention_heads.h"
#include "buffers.h"
#include "checks.h"
#include "noise.h"
#include "panels.h"
#include "truncation.h"

namespace {

constexpr int64_t kWordsPiece = 1024;  // words of a row that a thread takes together

ffi::Error Product(Bf16 left, Bf16 right, ffi::ResultBuffer<ffi::F32> out) {
  if (!have_dims(2, left, right)) return wrong("a product takes two matrices");
  const int64_t rows = size_of(left, 0), depth = size_of(left, 1), width = size_of(right, 1);
  if (size_of(right, 0) != depth || !is(*out, {rows, width})) return wrong("no such product of these matrices");
  if (depth % 2) return wrong("the depth of a product must divide by 2");
  native::multiply_all(numbers(left), rows, depth, numbers(right), width, out->typed_data());
  return ffi::Error::Success();
}

ffi::Error Norm(Bf16 rows, Scales scale, float eps, ffi::ResultBuffer<ffi::BF16> out) {
  if (!have_dims(2, rows)) return wrong("a norm takes rows");
  const int64_t width = size_of(rows, 1);
  if (!are_scales(scale) || !is(scale, {width}) || !is(*out, {size_of(rows, 0), width}))
    return wrong("a norm has other widths");
  const native::NormScale of_norm = scale_from(scale, 0);
  auto* target = reinterpret_cast<native::bf16*>(out->untyped_data());
  native::for_pieces(size_of(rows, 0), 32, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t)
      native::norm_row(numbers(rows) + t * width, of_norm, target + t * width, width, eps);
  });
  return ffi::Error::Success();
}

// A residual stream with what is added to it, and the norm of the sum by the scales of one layer.
ffi::Error AddNorm(Bf16 rows, Bf16 added, Scales scales, S32 layer, float eps, ffi::ResultBuffer<ffi::BF16> sums,
                   ffi::ResultBuffer<ffi::BF16> out) {
  if (!have_dims(2, rows, scales) || layer.element_count() != 1) return wrong("a sum and its norm take rows, scales and a layer");
  const int64_t num_rows = size_of(rows, 0), width = size_of(rows, 1), at = *layer.typed_data();
  if (!are_scales(scales) || !is(added, {num_rows, width}) || !is(scales, {size_of(scales, 0), width}) || !is(*sums, {num_rows, width}) ||
      !is(*out, {num_rows, width}))
    return wrong("a sum and its norm have other widths");
  if (at < 0 || at >= size_of(scales, 0)) return wrong("a norm has no scales of this layer");
  const native::NormScale scale = scale_from(scales, at * width);
  auto* sum = reinterpret_cast<native::bf16*>(sums->untyped_data());
  auto* normed = reinterpret_cast<native::bf16*>(out->untyped_data());
  native::for_pieces(num_rows, 32, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * width; i < end * width; i += width) {
      native::add_row(numbers(rows) + i, numbers(added) + i, sum + i, width);
      native::norm_row(sum + i, scale, normed + i, width, eps);
    }
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

// Cosine and sine of position * frequency, times `factor`, as `rotation_of` of `kernels/reference/layers.py`.
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

// Noise [rows, words] of samples, words from `first` on: as `gumbel_noise` of `kernels/reference/layers.py`.
ffi::Error Noise(U32 seeds, U32 choices, U32 positions, S32 first, ffi::ResultBuffer<ffi::F32> out) {
  if (!have_dims(1, seeds) || !have_dims(0, first) || !have_dims(2, *out)) return wrong("noise has rows of words");
  const int64_t rows = size_of(seeds, 0), words = size_of(*out, 1), pieces = (words + kWordsPiece - 1) / kWordsPiece;
  if (!is(choices, {rows}) || !is(positions, {rows}) || size_of(*out, 0) != rows)
    return wrong("noise has other numbers of rows");
  native::for_each(rows * pieces, [&](int64_t item) {
    const int64_t row = item / pieces, begin = item % pieces * kWordsPiece, end = std::min(begin + kWordsPiece, words);
    const native::NoiseKey key(seeds.typed_data()[row], choices.typed_data()[row], positions.typed_data()[row]);
    for (int64_t word = begin; word < end; word += 16)
      native::put(out->typed_data() + row * words + word, native::lanes_of(word, end),
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

// The last word of each row that all limits keep: as `last_kept` of `calls.py`.
ffi::Error Truncate(F32 logprobs, F32 probs, U32 top_k, F32 top_p, F32 min_p, ffi::ResultBuffer<ffi::S32> keys,
                    ffi::ResultBuffer<ffi::S32> places) {
  if (!have_dims(2, logprobs)) return wrong("rows of words are truncated");
  const int64_t rows = size_of(logprobs, 0), words = size_of(logprobs, 1);
  if (!is(probs, {rows, words}) || !is(top_k, {rows}) || !is(top_p, {rows}) || !is(min_p, {rows}) || !is(*keys, {rows}) || !is(*places, {rows}))
    return wrong("limits are of other numbers of rows");
  native::for_each(rows, [&](int64_t row) {
    const native::RowWords own{logprobs.typed_data() + row * words, probs.typed_data() + row * words, words};
    const native::RowLimits limits{top_k.typed_data()[row], top_p.typed_data()[row], min_p.typed_data()[row]};
    const native::Ranked last = native::last_kept(own, limits);
    keys->typed_data()[row] = int32_t(uint32_t(last >> 32) ^ 0x80000000u), places->typed_data()[row] = int32_t(last);
  });
  return ffi::Error::Success();
}

// The kept words of each row as bits, and the log-probabilities of the samples among them: as `kept_words` of `calls.py`.
ffi::Error KeptWords(F32 logprobs, F32 probs, S32 keys, S32 places, S32 ids, F32 temperatures, S32 num_words,
                     ffi::ResultBuffer<ffi::S32> bits, ffi::ResultBuffer<ffi::F32> own) {
  if (!have_dims(2, logprobs, *bits) || !have_dims(0, num_words)) return wrong("words are kept of rows");
  const int64_t rows = size_of(logprobs, 0), words = size_of(logprobs, 1), numbers = size_of(*bits, 1);
  const int64_t count = std::min<int64_t>(*num_words.typed_data(), words);
  if (!is(probs, {rows, words}) || !is(keys, {rows}) || !is(places, {rows}) || !is(ids, {rows}) || !is(temperatures, {rows}) || !is(*own, {rows}) ||
      size_of(*bits, 0) != rows || 32 * numbers < words)
    return wrong("words are kept of other numbers of rows");
  native::for_each(rows, [&](int64_t row) {
    uint32_t* const here = reinterpret_cast<uint32_t*>(bits->typed_data()) + row * numbers;
    std::fill_n(here, numbers, 0u);
    own->typed_data()[row] = 0;
    const int64_t id = ids.typed_data()[row];
    if (id < 0 || id >= count) return;  // the row's logits are not finite
    if (temperatures.typed_data()[row] <= 0) {
      here[id / 32] = 1u << (id % 32);
      return;
    }
    const native::RowWords of_row{logprobs.typed_data() + row * words, probs.typed_data() + row * words, words};
    const native::Ranked last = native::Ranked(uint32_t(keys.typed_data()[row]) ^ 0x80000000u) << 32 | uint32_t(places.typed_data()[row]);
    const double mass = native::keep_words(of_row, last, count, here);
    own->typed_data()[row] = float(double(of_row.logprobs[id]) - std::log(mass));
  });
  return ffi::Error::Success();
}

// Copies page `sources[i]` of the pool to page `targets[i]`, one after the other.
ffi::Error Pages(ffi::AnyBuffer pool, S32 sources, S32 targets, ffi::Result<ffi::AnyBuffer> out) {
  if (!have_dims(1, sources, targets) || !have_dims(4, pool)) return wrong("pages of a pool are copied by two lists");
  const int64_t count = size_of(sources, 0), pages = size_of(pool, 0);
  if (!is(targets, {count}) || pages == 0) return wrong("each page that is copied has a place");
  if (out->untyped_data() != pool.untyped_data()) return wrong("the pool must be updated in place");
  const int64_t size = pool.size_bytes() / pages;
  char* const data = static_cast<char*>(out->untyped_data());
  for (int64_t i = 0; i < count; ++i) {
    const int64_t source = sources.typed_data()[i], target = targets.typed_data()[i];
    if (std::min(source, target) < 0 || std::max(source, target) >= pages) return wrong("the pool has no such pages");
    if (source != target) std::copy_n(data + source * size, size, data + target * size);
  }
  return ffi::Error::Success();
}

// Puts row i of `rows` at row `targets[i]` of the pool, without those beyond it.
ffi::Error Put(ffi::AnyBuffer pool, ffi::AnyBuffer rows, S32 targets, ffi::Result<ffi::AnyBuffer> out) {
  if (!have_dims(1, targets) || pool.dimensions().size() == 0 || rows.dimensions().size() == 0) {
    return wrong("a pool has rows");
  }
  const int64_t count = size_of(targets, 0), held = size_of(pool, 0);
  if (size_of(rows, 0) != count || held == 0) return wrong("each row that is put has a place");
  const int64_t size = pool.size_bytes() / held;
  if (int64_t(rows.size_bytes()) != count * size) return wrong("rows are as long as those of the pool");
  if (out->untyped_data() != pool.untyped_data()) return wrong("the pool must be updated in place");
  char* const data = static_cast<char*>(out->untyped_data());
  const char* const given = static_cast<const char*>(rows.untyped_data());
  for (int64_t i = 0; i < count; ++i) {
    const int64_t target = targets.typed_data()[i];
    if (target >= 0 && target < held) std::copy_n(given + i * size, size, data + target * size);
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(RayserveMoePut, Put,
                              ffi::Ffi::Bind().Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>().Arg<S32>().Ret<ffi::AnyBuffer>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(RayserveMoePages, Pages,
                              ffi::Ffi::Bind().Arg<ffi::AnyBuffer>().Arg<S32>().Arg<S32>().Ret<ffi::AnyBuffer>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(RayserveMoeMasses, Masses,
                              ffi::Ffi::Bind().Arg<F32>().Arg<F32>().Arg<S32>().Ret<F32>().Ret<S32>().Ret<F32>().Ret<S32>()
                                  .Ret<F32>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(RayserveMoeChoose, Choose,
                              ffi::Ffi::Bind().Arg<F32>().Arg<F32>().Arg<U32>().Arg<U32>().Arg<U32>().Arg<S32>().Arg<S32>()
                                  .Arg<S32>().Attr<int64_t>("last_place").Ret<F32>().Ret<S32>().Ret<F32>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(RayserveMoeTruncate, Truncate,
                              ffi::Ffi::Bind().Arg<F32>().Arg<F32>().Arg<U32>().Arg<F32>().Arg<F32>().Ret<S32>().Ret<S32>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(RayserveMoeKeptWords, KeptWords,
                              ffi::Ffi::Bind().Arg<F32>().Arg<F32>().Arg<S32>().Arg<S32>().Arg<S32>().Arg<F32>().Arg<S32>()
                                  .Ret<S32>().Ret<F32>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(RayserveMoeNoise, Noise,
                              ffi::Ffi::Bind().Arg<U32>().Arg<U32>().Arg<U32>().Arg<S32>().Ret<F32>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(RayserveMoeNorm, Norm,
                              ffi::Ffi::Bind().Arg<Bf16>().Arg<Scales>().Attr<float>("eps").Ret<Bf16>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(RayserveMoeAddNorm, AddNorm,
                              ffi::Ffi::Bind().Arg<Bf16>().Arg<Bf16>().Arg<Scales>().Arg<S32>().Attr<float>("eps").Ret<Bf16>()
                                  .Ret<Bf16>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(RayserveMoeScores, Scores,
                              ffi::Ffi::Bind().Arg<Bf16>().Arg<F32>().Arg<F32>().Attr<std::string_view>("score")
                                  .Ret<F32>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(RayserveMoeRotation, Rotation,
                              ffi::Ffi::Bind().Arg<S32>().Arg<F32>().Attr<float>("factor").Ret<F32>().Ret<F32>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(RayserveMoeProduct, Product, ffi::Ffi::Bind().Arg<Bf16>().Arg<Bf16>().Ret<F32>());
