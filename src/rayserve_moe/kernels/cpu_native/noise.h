// Gumbel noise of samples, the same as jax.random's: counters through Threefry-2x32 (Salmon et al., SC 2011), 16 at once.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "rows.h"

namespace native {

struct Words {
  __m512i first, second;
};

// 20 rounds: 16 counters under one key.
inline Words threefry(const uint32_t (&key)[2], Words counters) {
  const uint32_t all[3] = {key[0], key[1], key[0] ^ key[1] ^ 0x1bd11bdau};
  const auto add = [](__m512i words, uint32_t number) { return _mm512_add_epi32(words, _mm512_set1_epi32(int32_t(number))); };
  __m512i x = add(counters.first, all[0]), y = add(counters.second, all[1]);
#pragma GCC unroll 5
  for (uint32_t i = 1; i <= 5; ++i) {
    constexpr int kTurns[2][4] = {{17, 29, 16, 24}, {13, 15, 26, 6}};
#pragma GCC unroll 4
    for (int turn : kTurns[i % 2]) {
      x = _mm512_add_epi32(x, y);
      y = _mm512_xor_si512(x, _mm512_rolv_epi32(y, _mm512_set1_epi32(turn)));
    }
    x = add(x, all[i % 3]), y = add(y, all[(i + 1) % 3] + i);
  }
  return {x, y};
}

// Makes a key that of its `number`: jax.random.fold_in.
inline void fold_in(uint32_t (&key)[2], uint32_t number) {
  const Words words = threefry(key, {_mm512_setzero_si512(), _mm512_set1_epi32(int32_t(number))});
  key[0] = uint32_t(_mm512_cvtsi512_si32(words.first)), key[1] = uint32_t(_mm512_cvtsi512_si32(words.second));
}

// Natural logarithm of positive normal numbers, to about one unit in the last place: Cephes' polynomial.
inline __m512 logarithm(__m512 x) {
  __m512 exponent = _mm512_getexp_ps(x), m = _mm512_getmant_ps(x, _MM_MANT_NORM_1_2, _MM_MANT_SIGN_zero);
  const __m512 one = _mm512_set1_ps(1.0f);
  const __mmask16 is_large = _mm512_cmp_ps_mask(m, _mm512_set1_ps(1.41421356f), _CMP_GT_OQ);
  m = _mm512_mask_mul_ps(m, is_large, m, _mm512_set1_ps(0.5f));
  exponent = _mm512_mask_add_ps(exponent, is_large, exponent, one);
  const __m512 r = _mm512_sub_ps(m, one), square = _mm512_mul_ps(r, r);
  __m512 p = _mm512_set1_ps(7.0376836292e-2f);
  for (float c : {-1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f, -1.6668057665e-1f,
                  2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f})
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
  __m512 rest = _mm512_fmadd_ps(exponent, _mm512_set1_ps(-2.12194440e-4f), _mm512_mul_ps(_mm512_mul_ps(p, r), square));
  rest = _mm512_fnmadd_ps(_mm512_set1_ps(0.5f), square, rest);
  return _mm512_fmadd_ps(exponent, _mm512_set1_ps(0.693359375f), _mm512_add_ps(r, rest));
}

inline __m512i sixteen_from(int32_t first) {
  const __m512i places = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  return _mm512_add_epi32(places, _mm512_set1_epi32(first));
}

// What one row draws with: jax.random.fold_in of its seed, choice and position.
struct NoiseKey {
  uint32_t key[2];

  NoiseKey(uint32_t seed, uint32_t choice, uint32_t position) : key{0, seed} {
    fold_in(key, choice);
    fold_in(key, position);
  }
};

// Noise of 16 words: minus the logarithm of minus that of a number above 0 and below 1.
inline __m512 gumbel(const NoiseKey& row, __m512i ids) {
  const __m512 one = _mm512_set1_ps(1.0f), least = _mm512_set1_ps(1.17549435e-38f), zero = _mm512_setzero_ps();
  const Words words = threefry(row.key, {_mm512_setzero_si512(), ids});
  const __m512i bits = _mm512_srli_epi32(_mm512_xor_si512(words.first, words.second), 9);
  const __m512 above_one = _mm512_castsi512_ps(_mm512_or_si512(bits, _mm512_set1_epi32(0x3f800000)));
  const __m512 uniform = _mm512_max_ps(least, _mm512_add_ps(_mm512_sub_ps(above_one, one), least));
  return _mm512_sub_ps(zero, logarithm(_mm512_sub_ps(zero, logarithm(uniform))));
}

// All noise lies between: -log(87.4), of the least number, and -log(2**-23), of the largest below 1, rounded outwards.
constexpr float kLeastNoise = -4.48f, kMostNoise = 15.95f;

struct Chosen {
  float score = -INFINITY;
  int32_t id = INT32_MAX;
  float own = 0;
};

// Which words are kept: those whose key is larger than `key`, or as large and their place, falling with the id, no less.
struct Kept {
  int32_t key, place, last_place;

  __mmask16 of(__m512 logprobs, __m512i ids) const {
    const __m512i bits = _mm512_castps_si512(logprobs), limit = _mm512_set1_epi32(key);
    const __m512i keys = _mm512_mask_xor_epi32(bits, _mm512_movepi32_mask(bits), bits, _mm512_set1_epi32(INT32_MAX));
    const __m512i places = _mm512_sub_epi32(_mm512_set1_epi32(last_place), ids);
    const __mmask16 is_tied = _mm512_cmpeq_epi32_mask(keys, limit);
    return _mm512_cmpgt_epi32_mask(keys, limit) |
           _mm512_mask_cmpge_epi32_mask(is_tied, places, _mm512_set1_epi32(place));
  }
};

// The best of log-probabilities begin .. end - 1 with their noise. A word that scores less than `largest` with the least
// noise, whatever its own, cannot be the best of its row: its noise is not computed.
inline Chosen chosen(const float* logprobs, const NoiseKey& row, Kept kept, float largest, int32_t first, int64_t begin, int64_t end) {
  __m512 best = _mm512_set1_ps(largest + kLeastNoise), own = _mm512_setzero_ps();
  __m512i best_ids = _mm512_set1_epi32(INT32_MAX);
  for (int64_t word = begin; word < end; word += 16) {
    const __m512 here = _mm512_maskz_loadu_ps(lanes_of(word, end), logprobs + word);
    const __m512 most = _mm512_add_ps(here, _mm512_set1_ps(kMostNoise));
    const __mmask16 may = _mm512_mask_cmp_ps_mask(lanes_of(word, end), most, best, _CMP_GT_OQ);
    if (!may) continue;
    const __m512i ids = sixteen_from(first + int32_t(word));
    const __m512 scores = _mm512_add_ps(here, gumbel(row, ids));
    const __mmask16 wins = _mm512_mask_cmp_ps_mask(may & kept.of(here, ids), scores, best, _CMP_GT_OQ);
    best = _mm512_mask_mov_ps(best, wins, scores), own = _mm512_mask_mov_ps(own, wins, here);
    best_ids = _mm512_mask_mov_epi32(best_ids, wins, ids);
  }
  const __mmask16 found = _mm512_cmpneq_epi32_mask(best_ids, _mm512_set1_epi32(INT32_MAX));
  if (!found) return {};
  const float score = _mm512_mask_reduce_max_ps(found, best);
  const __mmask16 ties = _mm512_mask_cmp_ps_mask(found, best, _mm512_set1_ps(score), _CMP_EQ_OQ);
  const int32_t id = _mm512_mask_reduce_min_epi32(ties, best_ids);
  const __mmask16 it = _mm512_mask_cmpeq_epi32_mask(ties, best_ids, _mm512_set1_epi32(id));
  return {score, id, _mm512_mask_reduce_add_ps(it, own)};
}

}  // namespace native
