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
  bool norms_values = false;          // values are normed, head by head, without scales
};

struct HeadNorm {
  NormScale scale;
  int64_t width;      // elements that are normed together: those of a head, or of all heads
};

inline void clip_row(bf16* row, int64_t width, float bound) {
  const F16 highest = rounded(all(bound)), lowest = zeros() - highest;
  for (int64_t i = 0; i < width; i += 16) {
    const Mask lanes = lanes_of(i, width);
    store(row + i, most(lowest, least(highest, wide(row + i, lanes))), lanes);  // NaN stays
  }
}

inline void multiply_row(bf16* row, int64_t width, float factor) {
  for (int64_t i = 0; i < width; i += 16) {
    const Mask lanes = lanes_of(i, width);
    store(row + i, wide(row + i, lanes) * all(factor), lanes);
  }
}

inline void rotate_halves(bf16* head, const float* cos, const float* sin, int64_t pairs) {
  for (int64_t i = 0; i < pairs; i += 16) {
    const Mask lanes = lanes_of(i, pairs);
    const F16 first = wide(head + i, lanes), second = wide(head + pairs + i, lanes);
    const F16 c = load(lanes, cos + i), s = load(lanes, sin + i);
    store(head + i, fms(first, c, (second * s)), lanes);
    store(head + pairs + i, fma(second, c, (first * s)), lanes);
  }
}

inline void rotate_neighbours(bf16* head, const float* cos, const float* sin, int64_t pairs) {
  const I16 upper = all_i(int32_t(0xffff0000));
  for (int64_t i = 0; i < pairs; i += 16) {
    const Mask lanes = lanes_of(i, pairs);
    const I16 words = load_i(lanes, head + 2 * i);
    const F16 first = from_bits(shifted_left(words, 16));
    const F16 second = from_bits((words & upper));
    const F16 c = load(lanes, cos + i), s = load(lanes, sin + i);
    const F16 x = rounded(fms(first, c, (second * s)));
    const F16 y = rounded(fma(second, c, (first * s)));
    const I16 turned = shifted_right(bits(x), 16) | bits(y);
    put_i(head + 2 * i, lanes, turned);
  }
}

// `mean_square`: that of the heads of all devices, where the norm is over those; null: that of these.
inline void norm_heads(bf16* heads, int64_t width, const HeadNorm& norm, const float* mean_square, float eps) {
  for (int64_t i = 0; i < width && norm.scale; i += norm.width) {
    const float mean = mean_square ? *mean_square : mean_square_of(heads + i, norm.width);
    scale_row(heads + i, norm.scale, heads + i, norm.width, 1.0f / std::sqrt(mean + eps));
  }
}

// Divides each of the heads of one token by its root mean square.
inline void norm_plain(bf16* heads, int64_t width, int64_t head_width, float eps) {
  for (int64_t begin = 0; begin < width; begin += head_width) {
    bf16* head = heads + begin;
    const F16 shrink = all(1.0f / std::sqrt(mean_square_of(head, head_width) + eps));
    for (int64_t i = 0; i < head_width; i += 16) {
      const Mask lanes = lanes_of(i, head_width);
      store(head + i, wide(head + i, lanes) * shrink, lanes);
    }
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
