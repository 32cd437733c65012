// Gumbel noise of samples, the same as jax.random's: counters through Threefry-2x32 (Salmon et al., SC 2011), 16 at once.
#pragma once

#include <cstdint>

#include "logarithm.h"
#include "rows.h"

namespace native {

struct Words {
  I16 first, second;
};

// 20 rounds: 16 counters under one key.
inline Words threefry(const uint32_t (&key)[2], Words counters) {
  const uint32_t all[3] = {key[0], key[1], key[0] ^ key[1] ^ 0x1bd11bdau};
  const auto add = [](I16 words, uint32_t number) { return words + all_i(int32_t(number)); };
  I16 x = add(counters.first, all[0]), y = add(counters.second, all[1]);
#pragma GCC unroll 5
  for (uint32_t i = 1; i <= 5; ++i) {
    constexpr int kTurns[2][4] = {{17, 29, 16, 24}, {13, 15, 26, 6}};
#pragma GCC unroll 4
    for (int turn : kTurns[i % 2]) {
      x = x + y;
      y = x ^ turned_left(y, turn);
    }
    x = add(x, all[i % 3]), y = add(y, all[(i + 1) % 3] + i);
  }
  return {x, y};
}

// Makes a key that of its `number`: jax.random.fold_in.
inline void fold_in(uint32_t (&key)[2], uint32_t number) {
  const Words words = threefry(key, {zeros_i(), all_i(int32_t(number))});
  key[0] = uint32_t(first_lane(words.first)), key[1] = uint32_t(first_lane(words.second));
}

inline I16 sixteen_from(int32_t first) {
  constexpr int32_t kPlaces[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const I16 places = load_i(kPlaces);
  return places + all_i(first);
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
inline F16 gumbel(const NoiseKey& row, I16 ids) {
  const F16 one = all(1.0f), lowest = all(1.17549435e-38f), zero = zeros();
  const Words words = threefry(row.key, {zeros_i(), ids});
  const I16 bits = shifted_right((words.first ^ words.second), 9);
  const F16 above_one = from_bits((bits | all_i(0x3f800000)));
  const F16 uniform = most(lowest, (above_one - one) + lowest);
  return zero - logarithm((zero - logarithm(uniform)));
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

  Mask of(F16 logprobs, I16 ids) const {
    const I16 word_bits = bits(logprobs), limit = all_i(key);
    const I16 keys = word_bits ^ (either(is_more(zeros_i(), word_bits), all_i(INT32_MAX), zeros_i()));
    const I16 places = all_i(last_place) - ids;
    const Mask is_tied = is_same(keys, limit);
    return is_more(keys, limit) | (is_tied & is_no_less(places, all_i(place)));
  }
};

// The best of log-probabilities begin .. end - 1 with their noise. A word that scores less than `largest` with the least
// noise, whatever its own, cannot be the best of its row: its noise is not computed.
inline Chosen chosen(const float* logprobs, const NoiseKey& row, Kept kept, float largest, int32_t first, int64_t begin, int64_t end) {
  F16 best = all(largest + kLeastNoise), own = zeros();
  I16 best_ids = all_i(INT32_MAX);
  for (int64_t word = begin; word < end; word += 16) {
    const F16 here = load(lanes_of(word, end), logprobs + word);
    const F16 upper = here + all(kMostNoise);
    const Mask may = lanes_of(word, end) & is_more(upper, best);
    if (!may) continue;
    const I16 ids = sixteen_from(first + int32_t(word));
    const F16 scores = here + gumbel(row, ids);
    const Mask wins = may & kept.of(here, ids) & is_more(scores, best);
    best = either(wins, scores, best), own = either(wins, here, own);
    best_ids = either(wins, ids, best_ids);
  }
  const Mask found = Mask(~is_same(best_ids, all_i(INT32_MAX)));
  if (!found) return {};
  const float score = largest_of(either(found, best, all(-INFINITY)));
  const Mask ties = found & is_same(best, all(score));
  const int32_t id = least_of(ties, best_ids);
  const Mask it = ties & is_same(best_ids, all_i(id));
  return {score, id, total(either(it, own, zeros()))};
}

}  // namespace native
