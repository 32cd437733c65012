// Products of bfloat16 rows with packed bfloat16 matrices, accumulated in float32.
//
// A packed [K, N] matrix is N / 32 panels of 32 columns, each [K / 2][32][2]: the pair of weights that one lane of
// VDPBF16PS takes lies together, and a panel is read from front to back. Every element of a result is one chain of such
// steps over k = 0, 2, 4, ..., so it has the same bits however many rows are multiplied together. Where the processor
// has tiles (amx.h), all that `multiply_rows` computes is computed by them, one row too: they round sums otherwise.
//
// Matrices of int8 or e4m3 are multiplied as the bfloat16 numbers that their own are, and have the same bits. Their pairs
// of 32 columns lie as [2][2][16]: of each half of the columns the first numbers, then the second ones; those of a
// narrower panel lie as in bfloat16. What has a scale for each block of rows is scaled and rounded to bfloat16 once, and
// has the bits of a matrix that was held as such.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <optional>

#include "amx.h"
#include "scratch.h"

namespace native {

using bf16 = uint16_t;
constexpr int64_t kPanel = NATIVE_PANEL;
static_assert(kPanel == 32, "a panel is two registers of float32");
constexpr int kMostRows = 12;

struct Pair {  // 32 neighbouring columns
  __m512 low, high;
};

inline __m512 wide(const bf16* source) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

inline __m512 rounded(__m512 value) {
  const __m256i bits = (__m256i)_mm512_cvtneps_pbh(value);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

inline void store(bf16* target, __m512 value) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), (__m256i)_mm512_cvtneps_pbh(value));
}

inline __m512bh both(const bf16* pair) {  // the same two numbers in every lane
  int32_t bits;
  std::memcpy(&bits, pair, sizeof bits);
  return (__m512bh)_mm512_set1_epi32(bits);
}

struct Lanes {  // pairs of 32 neighbouring columns
  __m512bh low, high;
};

inline Lanes lanes(const bf16* pairs) {
  return {(__m512bh)_mm512_loadu_si512(pairs), (__m512bh)_mm512_loadu_si512(pairs + 32)};
}

struct Fp8 {  // e4m3: 1 bit of sign, 4 of exponent, 3 of mantissa
  int8_t bits;
};

// What the numbers of 8 bits are that `wide` gives, in parts of it: a power of two, that scales are multiplied by.
template <class Weight>
constexpr float kUnit = 1.0f;
template <>
constexpr float kUnit<Fp8> = 256.0f;

// Float32 of 16 numbers of 8 bits: their upper halves are all that they have, and are bfloat16.
inline __m512 wide(const int8_t* source) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source));
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
}

// Their bits are those of float16 of a 256th, whose exponent has one more: subnormal numbers are such as well.
inline __m512 wide(const Fp8* source) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source));
  const __m256i halves = _mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7);
  return _mm512_cvtph_ps(_mm256_and_si256(halves, _mm256_set1_epi16(int16_t(0xBFFF))));
}

template <class Weight>
inline __m512bh joined(const Weight* pairs) {
  const __m512i first = _mm512_castps_si512(wide(pairs)), second = _mm512_castps_si512(wide(pairs + 16));
  return (__m512bh)_mm512_or_si512(_mm512_srli_epi32(first, 16), second);
}

template <class Weight>
inline Lanes lanes(const Weight* pairs) {
  return {joined(pairs), joined(pairs + 32)};
}

// The same, each column times its scale.
template <class Weight>
inline __m512bh joined(const Weight* pairs, const float* scale) {
  const __m512 by = _mm512_mul_ps(_mm512_loadu_ps(scale), _mm512_set1_ps(kUnit<Weight>));
  const __m512 first = rounded(_mm512_mul_ps(wide(pairs), by)), second = rounded(_mm512_mul_ps(wide(pairs + 16), by));
  return (__m512bh)_mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(first), 16), _mm512_castps_si512(second));
}

template <class Weight>
inline Lanes lanes(const Weight* pairs, const float* scales) {
  return {joined(pairs, scales), joined(pairs + 32, scales + 16)};
}

// Scales of blocks of `kScaleBlock` rows of a panel, the first ones of block i at first + i * stride; null: there are none.
struct BlockScales {
  const float* first = nullptr;
  int64_t stride = 0;
};
constexpr int64_t kScaleBlock = NATIVE_SCALE_BLOCK;

// e to the `x`, to about one unit in the last place; NaN stays NaN. Cody and Waite's reduction, Cephes' polynomial.
inline __m512 exponential(__m512 x) {
  x = _mm512_min_ps(_mm512_set1_ps(88.0f), _mm512_max_ps(_mm512_set1_ps(-87.0f), x));
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
  p = _mm512_add_ps(_mm512_fmadd_ps(p, _mm512_mul_ps(r, r), r), _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(p, n);
}

// x / (1 + e^-y): `x` times the sigmoid of `y`.
inline __m512 gated_by_sigmoid(__m512 x, __m512 y) {
  const __m512 one = _mm512_set1_ps(1.0f);
  return _mm512_div_ps(x, _mm512_add_ps(one, exponential(_mm512_sub_ps(_mm512_setzero_ps(), y))));
}

// `Rows` rows times one panel of each of `Panels` matrices; `row(i)` is where row i of the left side begins.
template <int Rows, int Panels, class Weight, class Row, class Done>
inline void tile(int64_t first, int64_t depth, const Weight* const (&panels)[Panels], Row&& row, Done&& done) {
  const bf16* left[Rows];
  __m512 low[Rows][Panels], high[Rows][Panels];
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r) {
    left[r] = row(first + r);
#pragma GCC unroll 2
    for (int p = 0; p < Panels; ++p) low[r][p] = high[r][p] = _mm512_setzero_ps();
  }
  for (int64_t k = 0; k < depth; k += 2) {
    Lanes weights[Panels];
#pragma GCC unroll 2
    for (int p = 0; p < Panels; ++p) weights[p] = lanes(panels[p] + k * kPanel);
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
      const __m512bh value = both(left[r] + k);
#pragma GCC unroll 2
      for (int p = 0; p < Panels; ++p) {
        low[r][p] = _mm512_dpbf16_ps(low[r][p], value, weights[p].low);
        high[r][p] = _mm512_dpbf16_ps(high[r][p], value, weights[p].high);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r) {
    Pair results[Panels];
#pragma GCC unroll 2
    for (int p = 0; p < Panels; ++p) results[p] = {low[r][p], high[r][p]};
    done(first + r, results);
  }
}

// Rows `begin` to `end` times one panel of each matrix, `depth` long: `done(row, results)` gets 32 columns of each.
template <int Panels, class Weight, class Row, class Done>
inline void multiply(int64_t begin, int64_t end, int64_t depth, const Weight* const (&panels)[Panels], Row&& row,
                     Done&& done) {
  constexpr int kRows = kMostRows / Panels;
  for (; end - begin >= kRows; begin += kRows) tile<kRows>(begin, depth, panels, row, done);
  switch (end - begin) {
#define NATIVE_TILE(n) \
  case n:              \
    if constexpr (n < kRows) tile<n>(begin, depth, panels, row, done); \
    break;
    NATIVE_TILE(1) NATIVE_TILE(2) NATIVE_TILE(3) NATIVE_TILE(4) NATIVE_TILE(5) NATIVE_TILE(6)
    NATIVE_TILE(7) NATIVE_TILE(8) NATIVE_TILE(9) NATIVE_TILE(10) NATIVE_TILE(11)
#undef NATIVE_TILE
    default:
      break;
  }
}

// How many rows of such a depth to multiply with one panel after the other, so that a core's cache keeps them.
inline int64_t rows_together(int64_t depth) {
  constexpr int64_t kCached = 1 << 19;  // numbers: a part of a core's second cache
  return std::max<int64_t>(kCached / std::max<int64_t>(depth, 1) / (2 * kTileRows), 1) * 2 * kTileRows;
}

// Rows of `left`, `stride` numbers from one to the next, times one panel of each matrix: `done(row, results)`. Null
// `tiles`: by VDPBF16PS.
template <int Panels, class Done>
inline void multiply_rows(const bf16* left, int64_t stride, int64_t num_rows, int64_t depth,
                          const bf16* const (&panels)[Panels], Done&& done, TileScope* tiles) {
  if (!tiles) {
    multiply<Panels>(0, num_rows, depth, panels, [&](int64_t r) { return left + r * stride; }, done);
    return;
  }
  alignas(64) float sums[Panels][2 * kTileRows][kPanel];
  for (int64_t first = 0; first < num_rows; first += 2 * kTileRows) {
    const int64_t count = std::min(num_rows - first, 2 * kTileRows);
    for (int p = 0; p < Panels; ++p)
      tiles->multiply(left + first * stride, stride, count, depth, panels[p], sums[p][0]);
    for (int64_t r = 0; r < count; ++r) {
      Pair results[Panels];
      for (int p = 0; p < Panels; ++p) results[p] = {_mm512_load_ps(sums[p][r]), _mm512_load_ps(sums[p][r] + 16)};
      done(first + r, results);
    }
  }
}

// A panel of numbers of 8 bits as one of bfloat16.
template <class Weight>
inline void widen(const Weight* panel, int64_t depth, const BlockScales& scales, bf16* copy) {
  for (int64_t k = 0; k < depth; k += 2) {
    const Weight* from = panel + k * kPanel;
    const Lanes pairs = scales.first ? lanes(from, scales.first + k / kScaleBlock * scales.stride) : lanes(from);
    _mm512_store_si512(copy + k * kPanel, (__m512i)pairs.low);
    _mm512_store_si512(copy + (k + 1) * kPanel, (__m512i)pairs.high);
  }
}

// Numbers of 8 bits are widened once where several rows, or tiles, take them, and where their blocks have scales;
// otherwise between reading and multiplying them.
template <int Panels, class Weight, class Done>
inline void multiply_rows(const bf16* left, int64_t stride, int64_t num_rows, int64_t depth,
                          const Weight* const (&panels)[Panels], const BlockScales (&scales)[Panels], Done&& done,
                          TileScope* tiles) {
  if (!tiles && !scales[0].first && num_rows <= kMostRows / Panels) {
    multiply<Panels>(0, num_rows, depth, panels, [&](int64_t r) { return left + r * stride; }, done);
    return;
  }
  thread_local Scratch<bf16> copies;
  bf16* copy = copies.sized(Panels * depth * kPanel);
  const bf16* wide[Panels];
  for (int p = 0; p < Panels; ++p) {
    widen(panels[p], depth, scales[p], copy + p * depth * kPanel);
    wide[p] = copy + p * depth * kPanel;
  }
  multiply_rows<Panels>(left, stride, num_rows, depth, wide, done, tiles);
}

// By the tiles that the processor has; `scales` are of numbers of 8 bits alone.
template <int Panels, class Weight, class... Scales, class Done>
inline void multiply_by_any(const bf16* left, int64_t stride, int64_t num_rows, int64_t depth,
                            const Weight* const (&panels)[Panels], Done&& done, const Scales&... scales) {
  std::optional<TileScope> tiles;
  if (has_tiles) tiles.emplace();
  multiply_rows<Panels>(left, stride, num_rows, depth, panels, scales..., done, tiles ? &*tiles : nullptr);
}

template <int Panels, class Done>
inline void multiply_rows(const bf16* left, int64_t stride, int64_t num_rows, int64_t depth,
                          const bf16* const (&panels)[Panels], Done&& done) {
  multiply_by_any(left, stride, num_rows, depth, panels, done);
}

// One panel of a plain product: rows of `left` [rows, depth] times a panel.
template <class Store>
inline void multiply_panel(const bf16* left, int64_t num_rows, int64_t depth, const bf16* panel, Store&& put) {
  const bf16* panels[1] = {panel};
  multiply_rows(left, depth, num_rows, depth, panels, [&](int64_t r, const Pair(&result)[1]) { put(r, result[0]); });
}

}  // namespace native
