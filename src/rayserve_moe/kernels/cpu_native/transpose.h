// Rows of a cache laid out as panels of products: blocks of words turned, and numbers of two rows put side by side.
#pragma once

#include "lanes.h"

namespace native {

// Writes column c of a block of 16 rows of 16 words to `target + c * stride`. A row that is null counts as zeros; of the
// others the `lanes` are read.
inline void transpose(const int32_t* const (&rows)[16], Mask lanes, int32_t* target, int64_t stride) {
#if defined(__AVX512F__)
  __m512i a[16], b[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) b[i] = rows[i] ? (__m512i)load_i(lanes, rows[i]) : _mm512_setzero_si512();
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_epi32(b[i], b[i + 1]);
    a[i + 1] = _mm512_unpackhi_epi32(b[i], b[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
    b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
    b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
    b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512i even_low = _mm512_shuffle_i32x4(b[i], b[i + 4], 0x88);
    const __m512i odd_low = _mm512_shuffle_i32x4(b[i], b[i + 4], 0xdd);
    const __m512i even_high = _mm512_shuffle_i32x4(b[i + 8], b[i + 12], 0x88);
    const __m512i odd_high = _mm512_shuffle_i32x4(b[i + 8], b[i + 12], 0xdd);
    put_i(target + i * stride, (I16)_mm512_shuffle_i32x4(even_low, even_high, 0x88));
    put_i(target + (i + 4) * stride, (I16)_mm512_shuffle_i32x4(odd_low, odd_high, 0x88));
    put_i(target + (i + 8) * stride, (I16)_mm512_shuffle_i32x4(even_low, even_high, 0xdd));
    put_i(target + (i + 12) * stride, (I16)_mm512_shuffle_i32x4(odd_low, odd_high, 0xdd));
  }
#else
  int32_t words[16][16];
  for (int i = 0; i < 16; ++i) put_i(words[i], rows[i] ? load_i(lanes, rows[i]) : zeros_i());
  for (int r = 0; r < 16; r += 4)
    for (int c = 0; c < 16; c += 4) {
      const Four w = read<Four>(&words[r][c]), x = read<Four>(&words[r + 1][c]);
      const Four y = read<Four>(&words[r + 2][c]), z = read<Four>(&words[r + 3][c]);
      const Four wx_low = __builtin_shufflevector(w, x, 0, 4, 1, 5), wx_high = __builtin_shufflevector(w, x, 2, 6, 3, 7);
      const Four yz_low = __builtin_shufflevector(y, z, 0, 4, 1, 5), yz_high = __builtin_shufflevector(y, z, 2, 6, 3, 7);
      write(target + c * stride + r, __builtin_shufflevector(wx_low, yz_low, 0, 1, 4, 5));
      write(target + (c + 1) * stride + r, __builtin_shufflevector(wx_low, yz_low, 2, 3, 6, 7));
      write(target + (c + 2) * stride + r, __builtin_shufflevector(wx_high, yz_high, 0, 1, 4, 5));
      write(target + (c + 3) * stride + r, __builtin_shufflevector(wx_high, yz_high, 2, 3, 6, 7));
    }
#endif
}

#if defined(__AVX512BW__)
constexpr int kPairedNumbers = 32;
typedef __m512i PairedRow;
#else
constexpr int kPairedNumbers = 8;
typedef Eight PairedRow;
#endif

// `kPairedNumbers` numbers of 16 bits, as far as `count` reaches; the others, and those of a null row, are zeros.
inline PairedRow paired_row(const uint16_t* from, int64_t count) {
#if defined(__AVX512BW__)
  if (!from) return _mm512_setzero_si512();
  return _mm512_maskz_loadu_epi16(count >= 32 ? ~__mmask32(0) : (__mmask32(1) << count) - 1, from);
#else
  PairedRow row = {};
  if (from && count >= 8) return read<PairedRow>(from);
  if (from) std::memcpy(&row, from, 2 * count);
  return row;
#endif
}

// Whether any number of a row of bfloat16 is infinite or NaN.
inline bool has_infinite(PairedRow row) {
#if defined(__AVX512BW__)
  const __m512i exponent = _mm512_set1_epi16(0x7f80);
  return _mm512_cmpeq_epi16_mask(_mm512_and_si512(row, exponent), exponent) != 0;
#else
  const Eight exponent = uint16_t(0x7f80) - Eight{};
  typedef uint64_t Words __attribute__((vector_size(16)));
  const Words found = (Words)((row & exponent) == exponent);
  return (found[0] | found[1]) != 0;
#endif
}

// Number i of both rows at target + 2 * i, side by side.
inline void put_pairs(uint16_t* target, PairedRow first, PairedRow second) {
#if defined(__AVX512BW__)
  alignas(64) static constexpr uint16_t kPlaces[2][32] = {
      {0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39, 8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47},
      {16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55, 24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63}};
  write(target, _mm512_permutex2var_epi16(first, _mm512_load_si512(kPlaces[0]), second));
  write(target + 32, _mm512_permutex2var_epi16(first, _mm512_load_si512(kPlaces[1]), second));
#else
  write(target, __builtin_shufflevector(first, second, 0, 8, 1, 9, 2, 10, 3, 11));
  write(target + 8, __builtin_shufflevector(first, second, 4, 12, 5, 13, 6, 14, 7, 15));
#endif
}

}  // namespace native
