// Products of bfloat16 rows with packed bfloat16 matrices, accumulated in float32.
//
// A packed [K, N] matrix is N / 32 panels of 32 columns, each [K / 2][32][2]: the pair of weights that one lane of
// VDPBF16PS takes lies together, and a panel is read from front to back. Every element of a result is one chain of such
// steps over k = 0, 2, 4, ..., so it has the same bits however many rows are multiplied together. Arm's BFDOT takes the
// same pairs. Without either, rows are widened to float32 and each pair is two fused steps of the chain. Where the processor
// has tiles (amx.h), all that `multiply_rows` computes is computed by them, one row too: they round sums otherwise.
//
// Matrices of int8 or e4m3 are multiplied as the bfloat16 numbers that their own are, and have the same bits. Their pairs
// of 32 columns lie as [2][2][16]: of each half of the columns the first numbers, then the second ones; those of a
// narrower panel lie as in bfloat16. What has a scale for each block of rows is scaled and rounded to bfloat16 once, and
// has the bits of a matrix that was held as such.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <optional>
#include <type_traits>

#include "amx.h"
#include "lanes.h"
#include "scratch.h"

namespace native {

using bf16 = uint16_t;
constexpr int64_t kPanel = NATIVE_PANEL;
static_assert(kPanel == 32, "a panel is two registers of float32");

struct Pair {  // 32 neighbouring columns
  F16 low, high;
};

inline F16 wide(const bf16* source) { return widened(source); }

inline F16 rounded(F16 value) { return from_bits(rounded_bits(value)); }

inline void store(bf16* target, F16 value) { narrow_to(target, value); }

struct Lanes {  // pairs of 32 neighbouring columns
  I16 low, high;
};

inline Lanes lanes(const bf16* pairs) { return {load_i(pairs), load_i(pairs + 32)}; }

struct Fp8 {  // e4m3: 1 bit of sign, 4 of exponent, 3 of mantissa
  int8_t bits;
};

// What the numbers of 8 bits are that `wide` gives, in parts of it: a power of two, that scales are multiplied by.
template <class Weight>
constexpr float kUnit = 1.0f;
template <>
constexpr float kUnit<Fp8> = 256.0f;

// Float32 of 16 numbers of 8 bits: their upper halves are all that they have, and are bfloat16.
inline F16 wide(const int8_t* source) { return widened(source); }

// Their bits are those of float16 of a 256th, whose exponent has one more: subnormal numbers are such as well.
inline F16 wide(const Fp8* source) { return widened_e4m3(reinterpret_cast<const int8_t*>(source)); }

template <class Weight>
inline I16 joined(const Weight* pairs) {
  const I16 first = bits(wide(pairs)), second = bits(wide(pairs + 16));
  return (shifted_right(first, 16) | second);
}

template <class Weight>
inline Lanes lanes(const Weight* pairs) {
  return {joined(pairs), joined(pairs + 32)};
}

// The same, each column times its scale.
template <class Weight>
inline I16 joined(const Weight* pairs, const float* scale) {
  const F16 by = load(scale) * all(kUnit<Weight>);
  const F16 first = rounded((wide(pairs) * by)), second = rounded((wide(pairs + 16) * by));
  return (shifted_right(bits(first), 16) | bits(second));
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
inline F16 exponential(F16 x) {
  x = least(all(88.0f), most(all(-87.0f), x));
  const F16 n = nearest(x * all(1.44269504f));
  F16 r = fnma(n, all(0.693359375f), x);
  r = fnma(n, all(-2.12194440e-4f), r);
  F16 p = all(1.9875691500e-4f);
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    p = fma(p, r, all(c));
  p = fma(p, (r * r), r) + all(1.0f);
  return scaled(p, n);
}

// x / (1 + e^-y): `x` times the sigmoid of `y`.
inline F16 gated_by_sigmoid(F16 x, F16 y) {
  const F16 one = all(1.0f);
  return x / ((one + exponential((zeros() - y))));
}

#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
template <int Panels>
constexpr int kTileOf = (kPartLanes == 16 ? 12 : 3) / Panels;  // rows that are multiplied together

// To each lane of `sum` the products of the lane's pairs of bfloat16.
inline __attribute__((always_inline)) PartF plus_dots(PartF sum, PartI left, PartI right) {
#if defined(__AVX512BF16__)
  return (PartF)_mm512_dpbf16_ps((__m512)sum, (__m512bh)left, (__m512bh)right);
#else
  return (PartF)vbfdotq_f32((float32x4_t)sum, (bfloat16x8_t)left, (bfloat16x8_t)right);
#endif
}
template <class F, class I>
inline __attribute__((always_inline)) Two<F> plus_dots(Two<F> sum, Two<I> left, Two<I> right) {
  return {plus_dots(sum.low, left.low, right.low), plus_dots(sum.high, left.high, right.high)};
}

// `Rows` rows times one panel of each of `Panels` matrices; `row(i)` is where row i of the left side begins.
template <int Rows, int Panels, class Weight, class Row, class Done>
inline void tile(int64_t first, int64_t depth, const Weight* const (&panels)[Panels], Row&& row, Done&& done) {
  const bf16* left[Rows];
  F16 low[Rows][Panels], high[Rows][Panels];
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r) {
    left[r] = row(first + r);
#pragma GCC unroll 2
    for (int p = 0; p < Panels; ++p) low[r][p] = high[r][p] = zeros();
  }
  for (int64_t k = 0; k < depth; k += 2) {
    Lanes weights[Panels];
#pragma GCC unroll 2
    for (int p = 0; p < Panels; ++p) weights[p] = lanes(panels[p] + k * kPanel);
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
      int32_t both;  // the same two numbers in every lane
      std::memcpy(&both, left[r] + k, sizeof both);
      const I16 value = all_i(both);
#pragma GCC unroll 2
      for (int p = 0; p < Panels; ++p) {
        low[r][p] = plus_dots(low[r][p], value, weights[p].low);
        high[r][p] = plus_dots(high[r][p], value, weights[p].high);
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
  constexpr int kRows = kTileOf<Panels>;
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

#else
#if defined(__AVX512F__)
constexpr int kTileRegisters = 24;  // sums of whole panels that registers hold, beside weights and a number of a row
#elif defined(__AVX2__)
constexpr int kTileRegisters = 8;
#else
constexpr int kTileRegisters = 24;
#endif
constexpr int kPanelParts = kPanel / kPartLanes;  // registers of a panel: 2, 4 or 8
template <int Panels>
constexpr int kTileOf = kPartLanes == 16 ? 12 : 6;

// No constant: a register that held it would be one less for sums.
inline uint32_t upper_halves[16] = {0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000,
                                    0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000};

// The first or second weights of pairs of rows, of the columns from part * kPartLanes on.
template <int Which>
inline __attribute__((always_inline)) PartF weights_of(const bf16* pairs, int part) {
  PartU both;
  std::memcpy(&both, pairs + 2 * kPartLanes * part, sizeof both);
  if (!Which) return (PartF)(both << 16);
  PartU upper;
  std::memcpy(&upper, upper_halves, sizeof upper);
  return (PartF)(both & upper);
}
inline __attribute__((always_inline)) PartF part_of(const Fp8* from) {
  return part_of_e4m3(reinterpret_cast<const int8_t*>(from));
}
template <int Which, class Weight>
inline __attribute__((always_inline)) PartF weights_of(const Weight* pairs, int part) {
  return part_of(pairs + part * kPartLanes / 16 * 32 + part * kPartLanes % 16 + 16 * Which);
}

// Sums of `Rows` rows over `Parts` registers of a panel from `begin` on: one chain each, pair by pair.
template <int Rows, int Parts, class Weight>
inline void sum_parts(const float* left, int64_t depth, const Weight* panel, int begin, float* out) {
  PartF sums[Rows][Parts];
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < Parts; ++c) sums[r][c] = PartF{};
  const auto add = [&](auto which, int64_t k) __attribute__((always_inline)) {
    PartF weights[Parts];
#pragma GCC unroll 8
    for (int c = 0; c < Parts; ++c) weights[c] = weights_of<which>(panel + k * kPanel, begin + c);
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
      const PartF x = left[r * depth + k + which] - PartF{};
#pragma GCC unroll 8
      for (int c = 0; c < Parts; ++c) add_product(sums[r][c], x, weights[c]);
    }
  };
  for (int64_t k = 0; k < depth; k += 2) {
    add(std::integral_constant<int, 0>{}, k);
    asm volatile("" ::: "memory");  // the weights are loaded again: registers hold sums
    add(std::integral_constant<int, 1>{}, k);
  }
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < Parts; ++c) std::memcpy(out + r * kPanel + (begin + c) * kPartLanes, &sums[r][c], sizeof(PartF));
}

// `rows` rows, as many as a tile has at most, over all of a panel: [rows][kPanel].
template <int Rows, class Weight>
__attribute__((noinline)) inline void sum_panel(const float* left, int64_t depth, const Weight* panel, float* out) {
  constexpr int kParts = Rows * kPanelParts <= kTileRegisters ? kPanelParts : kPanelParts / 2;
  for (int begin = 0; begin < kPanelParts; begin += kParts) sum_parts<Rows, kParts>(left, depth, panel, begin, out);
}

inline void widen_row(const bf16* from, int64_t depth, float* to) {
  int64_t k = 0;
  for (; k + 16 <= depth; k += 16) put(to + k, widened(from + k));
  for (; k < depth; ++k) to[k] = bits_of<float>(uint32_t(from[k]) << 16);
}

template <class Weight>
constexpr auto kSums = [] {
  std::array<void (*)(const float*, int64_t, const Weight*, float*), 13> of{
      nullptr,          sum_panel<1, Weight>, sum_panel<2, Weight>, sum_panel<3, Weight>,
      sum_panel<4, Weight>, sum_panel<5, Weight>, sum_panel<6, Weight>};
  if constexpr (kTileOf<1> == 12)
    of[7] = sum_panel<7, Weight>, of[8] = sum_panel<8, Weight>, of[9] = sum_panel<9, Weight>, of[10] = sum_panel<10, Weight>,
    of[11] = sum_panel<11, Weight>, of[12] = sum_panel<12, Weight>;
  return of;
}();

// Rows `begin` to `end` times one panel of each matrix, `depth` long: `done(row, results)` gets 32 columns of each.
template <int Panels, class Weight, class Row, class Done>
inline void multiply(int64_t begin, int64_t end, int64_t depth, const Weight* const (&panels)[Panels], Row&& row,
                     Done&& done) {
  static thread_local Scratch<float> scratch;
  alignas(64) float sums[Panels][kTileOf<Panels>][kPanel];
  for (; begin < end; begin += kTileOf<Panels>) {
    const int64_t count = std::min<int64_t>(end - begin, kTileOf<Panels>);
    float* const left = scratch.sized((count * depth + 15) / 16 * 16);
    for (int64_t r = 0; r < count; ++r) widen_row(row(begin + r), depth, left + r * depth);
    for (int p = 0; p < Panels; ++p) kSums<Weight>[count](left, depth, panels[p], sums[p][0]);
    for (int64_t r = 0; r < count; ++r) {
      Pair results[Panels];
      for (int p = 0; p < Panels; ++p) results[p] = {load(sums[p][r]), load(sums[p][r] + 16)};
      done(begin + r, results);
    }
  }
}
#endif

// How many rows of such a depth to multiply with one panel after the other, so that a core's cache keeps them.
inline int64_t rows_together(int64_t depth) {
  constexpr int64_t kCached = 1 << 19;  // numbers: a part of a core's second cache
  return std::max<int64_t>(kCached / std::max<int64_t>(depth, 1) / (2 * kTileRows), 1) * 2 * kTileRows;
}

// Rows of `left`, `stride` numbers from one to the next, times one panel of each matrix: `done(row, results)`. Null
// `tiles`: by `multiply`.
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
      for (int p = 0; p < Panels; ++p) results[p] = {load(sums[p][r]), load(sums[p][r] + 16)};
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
    put_i(copy + k * kPanel, pairs.low);
    put_i(copy + (k + 1) * kPanel, pairs.high);
  }
}

// Numbers of 8 bits are widened once where several rows, or tiles, take them, and where their blocks have scales;
// otherwise between reading and multiplying them.
template <int Panels, class Weight, class Done>
inline void multiply_rows(const bf16* left, int64_t stride, int64_t num_rows, int64_t depth,
                          const Weight* const (&panels)[Panels], const BlockScales (&scales)[Panels], Done&& done,
                          TileScope* tiles) {
  if (!tiles && !scales[0].first && num_rows <= kTileOf<Panels>) {
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
