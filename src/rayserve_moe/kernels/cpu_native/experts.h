// Gated expert products of a step: every expert that is used is read once.
#pragma once

#include <vector>

#include "products.h"
#include "threads.h"

namespace native {

struct ExpertShapes {
  int64_t num_tokens, top_k, width, inner, num_slots;
};

struct ExpertArrays {
  const bf16* hidden;    // [T, D]
  const int32_t* slots;  // [T, K]; num_slots or beyond: no product
  const float* gates;    // [T, K]
  const bf16 *gate, *up, *down;  // packed, [slots, D, F], [slots, D, F], [slots, F, D], from this layer's first slot on
  float* out;            // [T, D]
};

// Picks in the order of their slots.
struct Grouped {
  std::vector<int32_t> picks, slots, begins;  // group i has slot slots[i] and picks begins[i] .. begins[i + 1]
};

inline void group_by_slot(const ExpertShapes& shapes, const int32_t* slots, Grouped& grouped) {
  const int64_t num_picks = shapes.num_tokens * shapes.top_k;
  std::vector<int32_t> counts(shapes.num_slots, 0);
  for (int64_t p = 0; p < num_picks; ++p)
    if (slots[p] >= 0 && slots[p] < shapes.num_slots) ++counts[slots[p]];
  grouped.slots.clear();
  grouped.begins.assign(1, 0);
  for (int32_t s = 0; s < shapes.num_slots; ++s) {
    if (counts[s] == 0) continue;
    const int32_t begin = grouped.begins.back();
    grouped.slots.push_back(s);
    grouped.begins.push_back(begin + counts[s]);
    counts[s] = begin;
  }
  grouped.picks.resize(grouped.begins.back());
  for (int64_t p = 0; p < num_picks; ++p)
    if (slots[p] >= 0 && slots[p] < shapes.num_slots) grouped.picks[counts[slots[p]]++] = p;
}

// out[t] = sum over k, in that order, of gates[t, k] * down(silu(gate(hidden[t])) * up(hidden[t])), float32.
inline void expert_sums(const ExpertShapes& shapes, const ExpertArrays& arrays) {
  thread_local Grouped grouped_here;
  thread_local std::vector<bf16> inner_here, results_here;
  Grouped& grouped = grouped_here;
  group_by_slot(shapes, arrays.slots, grouped);
  const int64_t num_groups = grouped.slots.size(), num_picks = shapes.num_tokens * shapes.top_k;
  if (inner_here.size() < size_t(num_picks * shapes.inner)) inner_here.resize(num_picks * shapes.inner);
  if (results_here.size() < size_t(num_picks * shapes.width)) results_here.resize(num_picks * shapes.width);
  bf16 *inner = inner_here.data(), *results = results_here.data();
  const int64_t size = shapes.width * shapes.inner;
  const int64_t inner_panels = shapes.inner / kPanel, width_panels = shapes.width / kPanel;

  for_each(num_groups * inner_panels, [&](int64_t item) {
    const int64_t group = item / inner_panels, panel = item % inner_panels;
    const int64_t offset = grouped.slots[group] * size + panel * kPanel * shapes.width;
    const bf16* panels[2] = {arrays.gate + offset, arrays.up + offset};
    multiply<2>(
        grouped.begins[group], grouped.begins[group + 1], shapes.width, panels,
        [&](int64_t r) { return arrays.hidden + grouped.picks[r] / shapes.top_k * shapes.width; },
        [&](int64_t r, const Pair(&both)[2]) {
          bf16* target = inner + r * shapes.inner + panel * kPanel;
          store(target, _mm512_mul_ps(silu(both[0].low), both[1].low));
          store(target + 16, _mm512_mul_ps(silu(both[0].high), both[1].high));
        });
  });
  for_each(num_groups * width_panels, [&](int64_t item) {
    const int64_t group = item / width_panels, panel = item % width_panels;
    const bf16* panels[1] = {arrays.down + grouped.slots[group] * size + panel * kPanel * shapes.inner};
    multiply<1>(
        grouped.begins[group], grouped.begins[group + 1], shapes.inner, panels,
        [&](int64_t r) { return inner + r * shapes.inner; },
        [&](int64_t r, const Pair(&result)[1]) {
          bf16* target = results + grouped.picks[r] * shapes.width + panel * kPanel;
          store(target, result[0].low);
          store(target + 16, result[0].high);
        });
  });
  for_pieces(shapes.num_tokens, 8, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t d = 0; d < shapes.width; d += 16) {
        __m512 sum = _mm512_setzero_ps();
        for (int64_t pick = t * shapes.top_k; pick < (t + 1) * shapes.top_k; ++pick) {
          if (arrays.slots[pick] < 0 || arrays.slots[pick] >= shapes.num_slots) continue;
          sum = _mm512_fmadd_ps(_mm512_set1_ps(arrays.gates[pick]), wide(results + pick * shapes.width + d), sum);
        }
        _mm512_storeu_ps(arrays.out + t * shapes.width + d, sum);
      }
    }
  });
}

}  // namespace native
