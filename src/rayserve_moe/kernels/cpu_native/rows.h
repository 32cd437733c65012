// What is computed row by row between the products: norms and router scores. A row's bits are its own.
#pragma once

#include <algorithm>
#include <cmath>

#include "products.h"

namespace native {

// Divides by the root mean square over `width`, rounds, then scales: `rms_norm` of `model/layers.py`.
inline void norm_row(const bf16* row, const bf16* scale, bf16* out, int64_t width, float eps) {
  __m512 squares = _mm512_setzero_ps();
  for (int64_t i = 0; i < width; i += 16) {
    const __m512 x = wide(row + i);
    squares = _mm512_fmadd_ps(x, x, squares);
  }
  const __m512 shrink = _mm512_set1_ps(1.0f / std::sqrt(_mm512_reduce_add_ps(squares) / width + eps));
  for (int64_t i = 0; i < width; i += 16)
    store(out + i, _mm512_mul_ps(rounded(_mm512_mul_ps(wide(row + i), shrink)), wide(scale + i)));
}

inline __mmask16 lanes_of(int64_t begin, int64_t end) {
  return end - begin >= 16 ? __mmask16(0xffff) : __mmask16((1u << (end - begin)) - 1);
}

// Softmax of a row times a float32 matrix [width, experts].
inline void score_row(const bf16* row, const float* router, float* out, int64_t width, int64_t experts) {
  constexpr int kChunks = 8;
  for (int64_t begin = 0; begin < experts; begin += 16 * kChunks) {
    const int chunks = int((std::min<int64_t>(experts - begin, 16 * kChunks) + 15) / 16);
    __m512 sums[kChunks];
    for (int c = 0; c < chunks; ++c) sums[c] = _mm512_setzero_ps();
    for (int64_t d = 0; d < width; ++d) {
      const __m512 x = _mm512_castsi512_ps(_mm512_set1_epi32(int32_t(row[d]) << 16));
      for (int c = 0; c < chunks; ++c) {
        const int64_t e = begin + 16 * c;
        sums[c] = _mm512_fmadd_ps(x, _mm512_maskz_loadu_ps(lanes_of(e, experts), router + d * experts + e), sums[c]);
      }
    }
    for (int c = 0; c < chunks; ++c)
      _mm512_mask_storeu_ps(out + begin + 16 * c, lanes_of(begin + 16 * c, experts), sums[c]);
  }
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

}  // namespace native
