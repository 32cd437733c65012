// What is computed row by row between the products: norms and router scores. A row's bits are its own.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "products.h"

namespace native {

inline __mmask16 lanes_of(int64_t begin, int64_t end) {
  return end - begin >= 16 ? __mmask16(0xffff) : __mmask16((1u << (end - begin)) - 1);
}

inline float narrow(bf16 value) { return _mm512_cvtss_f32(_mm512_castsi512_ps(_mm512_set1_epi32(int32_t(value) << 16))); }

// As `wide` and `store` of products.h, of some lanes: the others are zeros, and stay.
inline __m512 wide(const bf16* source, __mmask16 lanes) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, source)), 16));
}

inline void store(bf16* target, __m512 value, __mmask16 lanes) {
  _mm256_mask_storeu_epi16(target, lanes, (__m256i)_mm512_cvtneps_pbh(value));
}

inline float mean_square_of(const bf16* row, int64_t width) {
  __m512 squares = _mm512_setzero_ps();
  for (int64_t i = 0; i < width; i += 16) {
    const __m512 x = wide(row + i, lanes_of(i, width));
    squares = _mm512_fmadd_ps(x, x, squares);
  }
  return _mm512_reduce_add_ps(squares) / width;
}

// Shrinks a row, rounds, then scales.
inline void scale_row(const bf16* row, const bf16* scale, bf16* out, int64_t width, float shrink) {
  for (int64_t i = 0; i < width; i += 16) {
    const __mmask16 lanes = lanes_of(i, width);
    const __m512 shrunk = rounded(_mm512_mul_ps(wide(row + i, lanes), _mm512_set1_ps(shrink)));
    store(out + i, _mm512_mul_ps(shrunk, wide(scale + i, lanes)), lanes);
  }
}

// Divides by the root mean square over `width`, rounds, then scales: `rms_norm` of `model/layers.py`.
inline void norm_row(const bf16* row, const bf16* scale, bf16* out, int64_t width, float eps) {
  scale_row(row, scale, out, width, 1.0f / std::sqrt(mean_square_of(row, width) + eps));
}

// Replaces logits by their softmax.
inline void softmax_row(float* out, int64_t experts) {
  const __m512 nothing = _mm512_set1_ps(-INFINITY);
  __m512 largest = nothing, total = _mm512_setzero_ps();
  for (int64_t e = 0; e < experts; e += 16)
    largest = _mm512_max_ps(largest, _mm512_mask_loadu_ps(nothing, lanes_of(e, experts), out + e));
  const __m512 top = _mm512_set1_ps(_mm512_reduce_max_ps(largest));
  for (int64_t e = 0; e < experts; e += 16) {
    const __mmask16 lanes = lanes_of(e, experts);
    const __m512 weight = exponential(_mm512_sub_ps(_mm512_maskz_loadu_ps(lanes, out + e), top));
    _mm512_mask_storeu_ps(out + e, lanes, weight);
    total = _mm512_mask_add_ps(total, lanes, total, weight);
  }
  const __m512 sum = _mm512_set1_ps(_mm512_reduce_add_ps(total));
  for (int64_t e = 0; e < experts; e += 16) {
    const __mmask16 lanes = lanes_of(e, experts);
    _mm512_mask_storeu_ps(out + e, lanes, _mm512_div_ps(_mm512_maskz_loadu_ps(lanes, out + e), sum));
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
  const __m512i limit = _mm512_set1_epi32(0x7f800000);
  __m512 best = _mm512_set1_ps(-INFINITY);
  __mmask16 is_odd = 0;
  for (int64_t word = begin; word < end; word += 16) {
    const __mmask16 lanes = lanes_of(word, end);
    const __m512 here = _mm512_mask_loadu_ps(_mm512_set1_ps(-INFINITY), lanes, logits + word);
    best = _mm512_max_ps(best, here);
    const __mmask16 words = word < num_words ? lanes_of(word, std::min(end, num_words)) : 0;
    is_odd |= _mm512_mask_cmpge_epi32_mask(words, _mm512_and_si512(_mm512_castps_si512(here), _mm512_set1_epi32(INT32_MAX)), limit);
  }
  Peak peak;
  peak.is_finite = !is_odd;
  const float largest = _mm512_reduce_max_ps(best);
  for (int64_t word = begin; word < end && peak.place == INT32_MAX; word += 16) {
    const __mmask16 here = _mm512_mask_cmp_ps_mask(lanes_of(word, end), _mm512_maskz_loadu_ps(lanes_of(word, end), logits + word), _mm512_set1_ps(largest), _CMP_EQ_OQ);
    if (here) peak.place = int32_t(word) + __builtin_ctz(here);
  }
  peak.best = std::max(peak.best, largest);
  return peak;
}

// The sum of exp((logit - best) / temperature) over the words begin .. end - 1.
inline float mass_of(const float* logits, int64_t begin, int64_t end, float best, float temperature) {
  const __m512 top = _mm512_set1_ps(best), divisor = _mm512_set1_ps(temperature);
  __m512 total = _mm512_setzero_ps();
  for (int64_t word = begin; word < end; word += 16) {
    const __mmask16 lanes = lanes_of(word, end);
    const __m512 below = _mm512_sub_ps(_mm512_maskz_loadu_ps(lanes, logits + word), top);
    total = _mm512_mask_add_ps(total, lanes, total, exponential(_mm512_div_ps(below, divisor)));
  }
  return _mm512_reduce_add_ps(total);
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
  __m512 sums[Rows][Chunks];
  __mmask16 lanes[Chunks];
#pragma GCC unroll 4
  for (int c = 0; c < Chunks; ++c) {
    lanes[c] = lanes_of(begin + 16 * c, experts);
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) sums[r][c] = _mm512_setzero_ps();
  }
  for (int64_t d = 0; d < width; ++d) {
    __m512 column[Chunks];
#pragma GCC unroll 4
    for (int c = 0; c < Chunks; ++c)
      column[c] = _mm512_maskz_loadu_ps(lanes[c], router.matrix + d * experts + begin + 16 * c);
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) {
      const __m512 x = _mm512_castsi512_ps(_mm512_set1_epi32(int32_t(rows[r * width + d]) << 16));
#pragma GCC unroll 4
      for (int c = 0; c < Chunks; ++c) sums[r][c] = _mm512_fmadd_ps(x, column[c], sums[r][c]);
    }
  }
#pragma GCC unroll 4
  for (int c = 0; c < Chunks; ++c)
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) {
      const int64_t e = begin + 16 * c;
      __m512 score = sums[r][c];
      if (router.bias) score = _mm512_add_ps(score, _mm512_maskz_loadu_ps(lanes[c], router.bias + e));
      if (router.is_sigmoid) score = gated_by_sigmoid(_mm512_set1_ps(1.0f), score);
      _mm512_mask_storeu_ps(out + r * experts + e, lanes[c], score);
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
