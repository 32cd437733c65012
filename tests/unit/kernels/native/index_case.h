// The choice of an index beside a sort: the best scores, of equal ones those at lower positions.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>

#include "case.h"
#include "index.h"

// `kind`: any scores, many equal ones, zeros of either sign, tiny and infinite ones, and NaN, which ranks as infinite.
inline void index_choice(Case c, int64_t count, int64_t top_k, int kind) {
  std::vector<float> scores(count);
  std::normal_distribution<float> normal;
  for (float& score : scores) {
    const float drawn = normal(c.random);
    const bool is_rare = c.below(9) == 0;
    score = std::array{drawn, float(c.below(3) - 1), is_rare ? -0.0f : 0.0f, is_rare ? INFINITY : drawn * 1e-30f,
                       is_rare ? NAN : drawn}[kind];
  }
  std::vector<int32_t> found(top_k), places(count);
  for (int64_t i = 0; i < count; ++i) places[i] = int32_t(i);
  const auto key = [&](int32_t place) { return std::isnan(scores[place]) ? INFINITY : scores[place]; };
  std::stable_sort(places.begin(), places.end(), [&](int32_t a, int32_t b) { return key(a) > key(b); });
  places.resize(top_k);
  std::sort(places.begin(), places.end());
  native::take_best(scores.data(), count, top_k, found.data());
  if (found == places) return;
  ++num_wrong;
  std::printf("%s %d: other positions are chosen\n", c.name, c.number);
}
