// Grouped-query attention of one layer over the paged pool: projections, rotation, writing keys and values, attending,
// and the output product, each step on all threads.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "products.h"
#include "rows.h"
#include "threads.h"

namespace native {

constexpr int64_t kSpan = 32;  // keys that are visited together, from positions that it divides

struct AttentionShapes {
  int64_t num_tokens, width, num_heads, num_kv_heads, head_width, page_size, pages_per_layer;
  int64_t num_singles, num_blocks, block_tokens, table_width;
  float eps;
};

struct AttentionArrays {
  const bf16* hidden;                  // [T, D], normed
  const bf16 *q, *k, *v, *o;           // this layer's, packed
  const bf16 *q_norm, *k_norm;         // [h]; null: none
  const bf16 *q_bias, *k_bias, *v_bias;  // null: none
  const float *cos, *sin;              // [T, h / 2]
  const int32_t *kv_slots, *positions;  // [T]
  const int32_t* page_table;           // [singles + blocks, P]
  bf16* pool;                          // this layer's pages, [pages, page, 2 * G, h]
  float* out;                          // [T, D]
};

inline void add_bias(__m512& value, const bf16* bias) {
  if (bias) value = _mm512_add_ps(rounded(value), wide(bias));
}

// Normalises (where there is a scale) and rotates one head in place, rounding where the definition rounds.
inline void norm_and_rotate(bf16* head, const bf16* scale, const float* cos, const float* sin, int64_t width,
                            float eps) {
  if (scale) norm_row(head, scale, head, width, eps);
  const int64_t half = width / 2;
  for (int64_t i = 0; i < half; i += 16) {
    const __m512 first = wide(head + i), second = wide(head + half + i);
    const __m512 c = _mm512_loadu_ps(cos + i), s = _mm512_loadu_ps(sin + i);
    store(head + i, _mm512_fmsub_ps(first, c, _mm512_mul_ps(second, s)));
    store(head + half + i, _mm512_fmadd_ps(second, c, _mm512_mul_ps(first, s)));
  }
}

// Turns 16 rows of 16 words into 16 rows that hold one word of each.
inline void transpose(const __m512i (&rows)[16], int32_t* target, int64_t stride) {
  __m512i a[16], b[16];
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    a[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
    b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
    b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
    b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    a[i] = _mm512_shuffle_i32x4(b[i], b[i + 4], 0x88);
    a[i + 4] = _mm512_shuffle_i32x4(b[i], b[i + 4], 0xdd);
    a[i + 8] = _mm512_shuffle_i32x4(b[i + 8], b[i + 12], 0x88);
    a[i + 12] = _mm512_shuffle_i32x4(b[i + 8], b[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    _mm512_storeu_si512(target + i * stride, _mm512_shuffle_i32x4(a[i], a[i + 8], 0x88));
    _mm512_storeu_si512(target + (i + 4) * stride, _mm512_shuffle_i32x4(a[i + 4], a[i + 12], 0x88));
    _mm512_storeu_si512(target + (i + 8) * stride, _mm512_shuffle_i32x4(a[i], a[i + 8], 0xdd));
    _mm512_storeu_si512(target + (i + 12) * stride, _mm512_shuffle_i32x4(a[i + 4], a[i + 12], 0xdd));
  }
}

struct BlockTokens {
  int64_t first, count;
};

// Tokens of a block: the single ones come first, each a block of its own.
inline BlockTokens tokens_of(int64_t block, const AttentionShapes& s) {
  if (block < s.num_singles) return {block, 1};
  return {s.num_singles + (block - s.num_singles) * s.block_tokens, s.block_tokens};
}

// -1: none of them is anybody's.
inline int64_t last_position(const BlockTokens& tokens, const int32_t* positions) {
  int64_t last = -1;
  for (int64_t i = 0; i < tokens.count; ++i) last = std::max<int64_t>(last, positions[tokens.first + i]);
  return last;
}

// The queries of one block that share a KV head: row r is query r / group, head r % group.
struct QueryRows {
  const bf16* queries;  // [T, H, h]
  BlockTokens tokens;
  int64_t first_head, group;
  const int32_t* positions;
  const bf16* at(int64_t row, const AttentionShapes& s) const {
    return queries + ((tokens.first + row / group) * s.num_heads + first_head + row % group) * s.head_width;
  }
  int64_t position(int64_t row) const { return positions[tokens.first + row / group]; }
};

struct SpanBuffers {
  std::vector<int32_t> keys;          // [h / 2][span] pairs of a key's numbers
  std::vector<float> values, totals;  // [span][h], [rows][h]
  std::vector<float> largest, weights, sums;  // [rows], [span], [rows][16]
};

inline void load_span(const bf16* const* rows, int64_t num_keys, const AttentionShapes& s, SpanBuffers& b) {
  for (int64_t first = 0; first < kSpan; first += 16)
    for (int64_t word = 0; word < s.head_width / 2; word += 16) {
      __m512i words[16];
      for (int64_t i = 0; i < 16; ++i)
        words[i] = first + i < num_keys ? _mm512_loadu_si512(rows[first + i] + 2 * word) : _mm512_setzero_si512();
      transpose(words, b.keys.data() + word * kSpan + first, kSpan);
    }
  for (int64_t i = 0; i < num_keys; ++i)
    for (int64_t d = 0; d < s.head_width; d += 16)
      _mm512_storeu_ps(b.values.data() + i * s.head_width + d, wide(rows[i] + s.head_width + d));
}

// Adds `count` weighted values to one row's total, after shrinking it.
template <int Width>
inline void add_values(float* total, const float* weights, const float* values, int64_t count, float shrink) {
  constexpr int kVectors = Width / 16;
  __m512 sum[kVectors];
#pragma GCC unroll 16
  for (int i = 0; i < kVectors; ++i)
    sum[i] = _mm512_mul_ps(_mm512_loadu_ps(total + 16 * i), _mm512_set1_ps(shrink));
  for (int64_t key = 0; key < count; ++key) {
    const __m512 weight = _mm512_set1_ps(weights[key]);
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i)
      sum[i] = _mm512_fmadd_ps(weight, _mm512_loadu_ps(values + key * Width + 16 * i), sum[i]);
  }
#pragma GCC unroll 16
  for (int i = 0; i < kVectors; ++i) _mm512_storeu_ps(total + 16 * i, sum[i]);
}

// The widths of a head that there are, and nothing else.
template <int... Widths>
struct HeadWidths {
  static_assert(((Widths > 0 && Widths % kPanel == 0) && ...));
  static constexpr bool have(int64_t width) { return ((width == Widths) || ...); }
  static void add(int64_t width, float* total, const float* weights, const float* values, int64_t count, float shrink) {
    ((width == Widths ? add_values<Widths>(total, weights, values, count, shrink) : void()), ...);
  }
};
using Heads = HeadWidths<NATIVE_HEAD_WIDTHS>;

// One row's running softmax over the first `count` keys of a span. What lies behind them has no effect.
inline void visit(int64_t row, const Pair& products, int64_t count, const AttentionShapes& s, SpanBuffers& b) {
  const __m512 scale = _mm512_set1_ps(1.0f / std::sqrt(float(s.head_width)));
  const uint32_t seen = count >= kSpan ? 0xffffffffu : (1u << count) - 1;
  const __m512 nothing = _mm512_set1_ps(-1e30f);
  const __m512 low = _mm512_mask_mul_ps(nothing, __mmask16(seen), products.low, scale);
  const __m512 high = _mm512_mask_mul_ps(nothing, __mmask16(seen >> 16), products.high, scale);
  const float before = b.largest[row];
  const float largest = std::max(before, _mm512_reduce_max_ps(_mm512_max_ps(low, high)));
  const __m512 top = _mm512_set1_ps(largest);
  const __m512 p = _mm512_maskz_mov_ps(__mmask16(seen), exponential(_mm512_sub_ps(low, top)));
  const __m512 q = _mm512_maskz_mov_ps(__mmask16(seen >> 16), exponential(_mm512_sub_ps(high, top)));
  _mm512_storeu_ps(b.weights.data(), p);
  _mm512_storeu_ps(b.weights.data() + 16, q);
  const float shrink = _mm512_cvtss_f32(exponential(_mm512_set1_ps(before - largest)));
  float* sums = b.sums.data() + row * 16;
  _mm512_storeu_ps(sums, _mm512_fmadd_ps(_mm512_loadu_ps(sums), _mm512_set1_ps(shrink), _mm512_add_ps(p, q)));
  Heads::add(s.head_width, b.totals.data() + row * s.head_width, b.weights.data(), b.values.data(),
             std::min(count, kSpan), shrink);
  b.largest[row] = largest;
}

// Attends the rows of one block and KV head; a row sees the keys up to its own position.
inline void attend(const QueryRows& rows, const int32_t* pages, int64_t kv_head, const AttentionShapes& s,
                   const bf16* pool, bf16* out) {
  thread_local SpanBuffers buffers;
  SpanBuffers& b = buffers;
  const int64_t num_rows = rows.tokens.count * rows.group, last = last_position(rows.tokens, rows.positions);
  b.keys.resize(s.head_width / 2 * kSpan);
  b.values.resize(kSpan * s.head_width);
  b.weights.resize(kSpan);
  b.totals.assign(num_rows * s.head_width, 0.0f);
  b.sums.assign(num_rows * 16, 0.0f);
  b.largest.assign(num_rows, -1e30f);
  const bf16* keys[kSpan];
  int64_t first_row = 0;  // rows before it end ahead of the span
  for (int64_t start = 0; start <= last; start += kSpan) {
    const int64_t num_keys = std::min(kSpan, last + 1 - start);
    for (int64_t i = 0; i < num_keys; ++i) {
      const int64_t place = start + i, slot = int64_t(pages[place / s.page_size]) * s.page_size + place % s.page_size;
      keys[i] = pool + (slot * s.num_kv_heads + kv_head) * 2 * s.head_width;
    }
    load_span(keys, num_keys, s, b);
    while (first_row < num_rows && rows.position(first_row) < start) ++first_row;
    const bf16* panels[1] = {reinterpret_cast<const bf16*>(b.keys.data())};
    multiply<1>(
        first_row, num_rows, s.head_width, panels, [&](int64_t r) { return rows.at(r, s); },
        [&](int64_t r, const Pair(&products)[1]) {
          const int64_t count = rows.position(r) + 1 - start;
          if (count > 0) visit(r, products[0], count, s, b);
        });
  }
  for (int64_t r = 0; r < num_rows; ++r) {
    const float sum = _mm512_reduce_add_ps(_mm512_loadu_ps(b.sums.data() + r * 16));
    const __m512 weight = _mm512_set1_ps(1.0f / std::max(sum, 1.0f));
    bf16* target = out + (rows.at(r, s) - rows.queries);
    for (int64_t d = 0; d < s.head_width; d += 16)
      store(target + d, _mm512_mul_ps(_mm512_loadu_ps(b.totals.data() + r * s.head_width + d), weight));
  }
}

// Projects to queries (into `queries`), keys and values (into `keys`, `values`), all [T, heads * h].
inline void project(const AttentionShapes& s, const AttentionArrays& a, bf16* queries, bf16* keys, bf16* values) {
  const int64_t q_width = s.num_heads * s.head_width, kv_width = s.num_kv_heads * s.head_width;
  for_each((q_width + 2 * kv_width) / kPanel, [&](int64_t item) {
    int64_t column = item * kPanel, width = q_width;
    const bf16 *weights = a.q, *bias = a.q_bias;
    bf16* target = queries;
    if (column >= q_width) {
      column -= q_width, width = kv_width, weights = a.k, bias = a.k_bias, target = keys;
      if (column >= kv_width) column -= kv_width, weights = a.v, bias = a.v_bias, target = values;
    }
    multiply_panel(a.hidden, s.num_tokens, s.width, weights + column * s.width, [&](int64_t r, Pair result) {
      add_bias(result.low, bias ? bias + column : nullptr);
      add_bias(result.high, bias ? bias + column + 16 : nullptr);
      store(target + r * width + column, result.low);
      store(target + r * width + column + 16, result.high);
    });
  });
}

inline void attention_layer(const AttentionShapes& s, const AttentionArrays& a) {
  const int64_t q_width = s.num_heads * s.head_width, kv_width = s.num_kv_heads * s.head_width;
  thread_local std::vector<bf16> scratch;
  scratch.resize(s.num_tokens * 2 * (q_width + kv_width));
  bf16* queries = scratch.data();
  bf16* attended = queries + s.num_tokens * q_width;
  bf16* keys = attended + s.num_tokens * q_width;
  bf16* values = keys + s.num_tokens * kv_width;
  project(s, a, queries, keys, values);
  for_pieces(s.num_tokens, 8, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const float *cos = a.cos + t * s.head_width / 2, *sin = a.sin + t * s.head_width / 2;
      for (int64_t h = 0; h < s.num_heads; ++h)
        norm_and_rotate(queries + t * q_width + h * s.head_width, a.q_norm, cos, sin, s.head_width, s.eps);
      for (int64_t g = 0; g < s.num_kv_heads; ++g) {
        bf16 *key = keys + t * kv_width + g * s.head_width, *value = values + t * kv_width + g * s.head_width;
        norm_and_rotate(key, a.k_norm, cos, sin, s.head_width, s.eps);
        if (a.positions[t] < 0) continue;  // nobody's: all of those have the same slot
        bf16* target = a.pool + (int64_t(a.kv_slots[t]) * s.num_kv_heads + g) * 2 * s.head_width;
        std::memcpy(target, key, s.head_width * sizeof(bf16));
        std::memcpy(target + s.head_width, value, s.head_width * sizeof(bf16));
      }
    }
  });
  const int64_t group = s.num_heads / s.num_kv_heads;
  for_each((s.num_singles + s.num_blocks) * s.num_kv_heads, [&](int64_t item) {
    const int64_t block = item / s.num_kv_heads, g = item % s.num_kv_heads;
    const QueryRows rows{queries, tokens_of(block, s), g * group, group, a.positions};
    attend(rows, a.page_table + block * s.table_width, g, s, a.pool, attended);
  });
  for_each(s.width / kPanel, [&](int64_t panel) {
    multiply_panel(attended, s.num_tokens, q_width, a.o + panel * kPanel * q_width, [&](int64_t r, const Pair& result) {
      float* target = a.out + r * s.width + panel * kPanel;
      _mm512_storeu_ps(target, result.low);
      _mm512_storeu_ps(target + 16, result.high);
    });
  });
}

}  // namespace native
