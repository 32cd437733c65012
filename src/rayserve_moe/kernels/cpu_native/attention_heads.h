// What happens to the heads of one token between their projection and attention: norms, bounds and rotation, in place.
#pragma once

#include <cmath>

#include "rows.h"

namespace native {

// The same for all tokens of a layer.
struct HeadRules {
  int64_t head_width, rotated_pairs;  // 2 * rotated_pairs elements of a head turn, the others stay
  bool is_interleaved;                // pairs are (2 i, 2 i + 1), not (i, i + rotated_pairs)
  bool norms_after;                   // queries and keys are normed after they are rotated
  float clip;                         // bounds queries, keys and values ahead of the rotation; 0: none
  float eps;
};

struct HeadNorm {
  const bf16* scale;  // null: none
  int64_t width;      // elements that are normed together: those of a head, or of all heads
};

inline void clip_row(bf16* row, int64_t width, float bound) {
  const __m512 most = rounded(_mm512_set1_ps(bound)), least = _mm512_sub_ps(_mm512_setzero_ps(), most);
  for (int64_t i = 0; i < width; i += 16) {
    const __mmask16 lanes = lanes_of(i, width);
    store(row + i, _mm512_max_ps(least, _mm512_min_ps(most, wide(row + i, lanes))), lanes);  // NaN stays
  }
}

inline void rotate_halves(bf16* head, const float* cos, const float* sin, int64_t pairs) {
  for (int64_t i = 0; i < pairs; i += 16) {
    const __mmask16 lanes = lanes_of(i, pairs);
    const __m512 first = wide(head + i, lanes), second = wide(head + pairs + i, lanes);
    const __m512 c = _mm512_maskz_loadu_ps(lanes, cos + i), s = _mm512_maskz_loadu_ps(lanes, sin + i);
    store(head + i, _mm512_fmsub_ps(first, c, _mm512_mul_ps(second, s)), lanes);
    store(head + pairs + i, _mm512_fmadd_ps(second, c, _mm512_mul_ps(first, s)), lanes);
  }
}

inline void rotate_neighbours(bf16* head, const float* cos, const float* sin, int64_t pairs) {
  const __m512i upper = _mm512_set1_epi32(int32_t(0xffff0000));
  for (int64_t i = 0; i < pairs; i += 16) {
    const __mmask16 lanes = lanes_of(i, pairs);
    const __m512i words = _mm512_maskz_loadu_epi32(lanes, head + 2 * i);
    const __m512 first = _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
    const __m512 second = _mm512_castsi512_ps(_mm512_and_si512(words, upper));
    const __m512 c = _mm512_maskz_loadu_ps(lanes, cos + i), s = _mm512_maskz_loadu_ps(lanes, sin + i);
    const __m512 x = rounded(_mm512_fmsub_ps(first, c, _mm512_mul_ps(second, s)));
    const __m512 y = rounded(_mm512_fmadd_ps(second, c, _mm512_mul_ps(first, s)));
    const __m512i turned = _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(x), 16), _mm512_castps_si512(y));
    _mm512_mask_storeu_epi32(head + 2 * i, lanes, turned);
  }
}

// `mean_square`: that of the heads of all devices, where the norm is over those; null: that of these.
inline void norm_heads(bf16* heads, int64_t width, const HeadNorm& norm, const float* mean_square, float eps) {
  for (int64_t i = 0; i < width && norm.scale; i += norm.width) {
    const float mean = mean_square ? *mean_square : mean_square_of(heads + i, norm.width);
    scale_row(heads + i, norm.scale, heads + i, norm.width, 1.0f / std::sqrt(mean + eps));
  }
}

// Queries or keys of one token, `width` elements: normed, bounded, rotated, each rounded as the definition rounds.
inline void shape_heads(bf16* heads, int64_t width, const HeadNorm& norm, const float* mean_square, const float* cos,
                        const float* sin, const HeadRules& rules) {
  if (!rules.norms_after) norm_heads(heads, width, norm, mean_square, rules.eps);
  if (rules.clip > 0) clip_row(heads, width, rules.clip);
  for (int64_t i = 0; i < width; i += rules.head_width)
    (rules.is_interleaved ? rotate_neighbours : rotate_halves)(heads + i, cos, sin, rules.rotated_pairs);
  if (rules.norms_after) norm_heads(heads, width, norm, mean_square, rules.eps);
}

}  // namespace native
