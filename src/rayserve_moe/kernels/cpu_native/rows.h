// What is computed row by row between the products: norms and router scores. A row's bits are its own.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "products.h"

namespace native {

inline Mask lanes_of(int64_t begin, int64_t end) {
  return end - begin >= 16 ? Mask(0xffff) : Mask((1u << (end - begin)) - 1);
}

inline float narrow(bf16 value) { return bits_of<float>(uint32_t(value) << 16); }

// As `wide` and `store` of products.h, of some lanes: the others are zeros, and stay.
inline F16 wide(const bf16* source, Mask lanes) {
  if (__builtin_expect(lanes == kAllLanes, 1)) return wide(source);
  bf16 numbers[16] = {};
  copy_lanes(numbers, source, lanes);
  return wide(numbers);
}

inline void store(bf16* target, F16 value, Mask lanes) {
  if (__builtin_expect(lanes == kAllLanes, 1)) return store(target, value);
  bf16 numbers[16];
  store(numbers, value);
  copy_lanes(target, numbers, lanes);
}

inline float mean_square_of(const bf16* row, int64_t width) {
  F16 squares = zeros();
  for (int64_t i = 0; i < width; i += 16) {
    const F16 x = wide(row + i, lanes_of(i, width));
    squares = fma(x, x, squares);
  }
  return total(squares) / width;
}

inline void add_row(const bf16* row, const bf16* added, bf16* out, int64_t width) {
  for (int64_t i = 0; i < width; i += 16) {
    const Mask lanes = lanes_of(i, width);
    store(out + i, wide(row + i, lanes) + wide(added + i, lanes), lanes);
  }
}

// Scales of a norm: float32 if `wide` is set, which rounding would change, otherwise bfloat16. Both null: no norm.
struct NormScale {
  const bf16* narrow = nullptr;
  const float* wide = nullptr;
  explicit operator bool() const { return narrow || wide; }
};

// Shrinks a row and scales it. Ahead of bfloat16 scales it is rounded.
inline void scale_row(const bf16* row, NormScale scale, bf16* out, int64_t width, float shrink) {
  for (int64_t i = 0; i < width; i += 16) {
    const Mask lanes = lanes_of(i, width);
    const F16 shrunk = wide(row + i, lanes) * all(shrink);
    store(out + i, scale.wide ? shrunk * load(lanes, scale.wide + i) : rounded(shrunk) * wide(scale.narrow + i, lanes), lanes);
  }
}

// Divides by the root mean square over `width`, then scales: `rms_norm` of `kernels/reference/layers.py`.
inline void norm_row(const bf16* row, NormScale scale, bf16* out, int64_t width, float eps) {
  scale_row(row, scale, out, width, 1.0f / std::sqrt(mean_square_of(row, width) + eps));
}

// Replaces logits by their softmax.
inline void softmax_row(float* out, int64_t experts) {
  const F16 nothing = all(-INFINITY);
  F16 largest = nothing, sums = zeros();
  for (int64_t e = 0; e < experts; e += 16)
    largest = most(largest, load(lanes_of(e, experts), out + e, -INFINITY));
  const F16 top = all(largest_of(largest));
  for (int64_t e = 0; e < experts; e += 16) {
    const Mask lanes = lanes_of(e, experts);
    const F16 weight = exponential((load(lanes, out + e) - top));
    put(out + e, lanes, weight);
    sums = either(lanes, sums + weight, sums);
  }
  const F16 sum = all(total(sums));
  for (int64_t e = 0; e < experts; e += 16) {
    const Mask lanes = lanes_of(e, experts);
    put(out + e, lanes, (load(lanes, out + e) / sum));
  }
}

struct Peak {
  float best = std::numeric_limits<float>::lowest();
  int32_t place = INT32_MAX;
  bool is_finite = true;
};

// The largest of logits begin .. end - 1, no less than the lowest finite number, the first place that has it, and
// whether those before `num_words` are finite.
inline Peak peak_of(const float* logits, int64_t begin, int64_t end, int64_t num_words) {
  const I16 limit = all_i(0x7f800000);
  F16 best = all(-INFINITY);
  Mask is_odd = 0;
  for (int64_t word = begin; word < end; word += 16) {
    const Mask lanes = lanes_of(word, end);
    const F16 here = load(lanes, logits + word, -INFINITY);
    best = most(best, here);
    const Mask words = word < num_words ? lanes_of(word, std::min(end, num_words)) : 0;
    is_odd |= words & is_no_less(bits(here) & all_i(INT32_MAX), limit);
  }
  Peak peak;
  peak.is_finite = !is_odd;
  const float largest = largest_of(best);
  for (int64_t word = begin; word < end && peak.place == INT32_MAX; word += 16) {
    const Mask here = lanes_of(word, end) & is_same(load(lanes_of(word, end), logits + word), all(largest));
    if (here) peak.place = int32_t(word) + __builtin_ctz(here);
  }
  peak.best = std::max(peak.best, largest);
  return peak;
}

// The sum of exp((logit - best) / temperature) over the words begin .. end - 1.
inline float mass_of(const float* logits, int64_t begin, int64_t end, float best, float temperature) {
  const F16 top = all(best), divisor = all(temperature);
  F16 sums = zeros();
  for (int64_t word = begin; word < end; word += 16) {
    const Mask lanes = lanes_of(word, end);
    const F16 below = load(lanes, logits + word) - top;
    sums = either(lanes, sums + exponential(below / divisor), sums);
  }
  return total(sums);
}

struct Router {
  const float* matrix;  // [width, experts]
  const float* bias;    // [experts]; null: none
  bool is_sigmoid;
  int64_t width, experts;
};

// Logits, or sigmoids, of `Rows` rows for the experts from `begin` on, `Chunks` registers of them.
template <int Rows, int Chunks>
inline void score_chunks(const bf16* rows, const Router& router, int64_t begin, float* out) {
  const int64_t width = router.width, experts = router.experts;
  F16 sums[Rows][Chunks];
  Mask lanes[Chunks];
#pragma GCC unroll 4
  for (int c = 0; c < Chunks; ++c) {
    lanes[c] = lanes_of(begin + 16 * c, experts);
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) sums[r][c] = zeros();
  }
  for (int64_t d = 0; d < width; ++d) {
    F16 column[Chunks];
#pragma GCC unroll 4
    for (int c = 0; c < Chunks; ++c)
      column[c] = load(lanes[c], router.matrix + d * experts + begin + 16 * c);
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) {
      const F16 x = from_bits(all_i(int32_t(rows[r * width + d]) << 16));
#pragma GCC unroll 4
      for (int c = 0; c < Chunks; ++c) sums[r][c] = fma(x, column[c], sums[r][c]);
    }
  }
#pragma GCC unroll 4
  for (int c = 0; c < Chunks; ++c)
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) {
      const int64_t e = begin + 16 * c;
      F16 score = sums[r][c];
      if (router.bias) score = score + load(lanes[c], router.bias + e);
      if (router.is_sigmoid) score = gated_by_sigmoid(all(1.0f), score);
      put(out + r * experts + e, lanes[c], score);
    }
}

template <int Rows>
inline void score_block(const bf16* rows, const Router& router, float* out) {
  for (int64_t begin = 0; begin < router.experts; begin += 64) {
    switch (std::min<int64_t>((router.experts - begin + 15) / 16, 4)) {
      case 1: score_chunks<Rows, 1>(rows, router, begin, out); break;
      case 2: score_chunks<Rows, 2>(rows, router, begin, out); break;
      case 3: score_chunks<Rows, 3>(rows, router, begin, out); break;
      default: score_chunks<Rows, 4>(rows, router, begin, out);
    }
  }
  for (int r = 0; r < Rows && !router.is_sigmoid; ++r) softmax_row(out + r * router.experts, router.experts);
}

constexpr int kScoredRows = 4;  // that share a reading of the matrix

// Softmax, or sigmoids, of rows times the router's float32 matrix plus its bias: [rows, experts].
inline void score_rows(const bf16* rows, int64_t num_rows, const Router& router, float* out) {
  int64_t r = 0;
  for (; r + kScoredRows <= num_rows; r += kScoredRows)
    score_block<kScoredRows>(rows + r * router.width, router, out + r * router.experts);
  for (; r < num_rows; ++r) score_block<1>(rows + r * router.width, router, out + r * router.experts);
}

}  // namespace native
