// Expert products of a step, with or without a gate: every expert that is used is read once.
#pragma once

#include <algorithm>
#include <string_view>
#include <vector>

#include "panels.h"
#include "products.h"
#include "scratch.h"
#include "threads.h"

namespace native {

enum class Activation { kSilu, kGelu, kClampedSwiglu, kClippedSilu, kRelu2, kUnknown };

inline Activation activation_of(std::string_view name) {
  return name == "silu"             ? Activation::kSilu
         : name == "gelu_tanh"      ? Activation::kGelu
         : name == "clamped_swiglu" ? Activation::kClampedSwiglu
         : name == "clipped_silu"   ? Activation::kClippedSilu
         : name == "relu2"          ? Activation::kRelu2
                                    : Activation::kUnknown;
}

struct ActivationConfig {
  Activation kind;
  float slope, limit;  // of kClampedSwiglu; the limit also of kClippedSilu
};

// What down is multiplied with: `ACTIVATIONS` of `kernels/reference/activations.py`. NaN stays NaN. kRelu2 has no gate.
inline F16 activate(const ActivationConfig& activation, F16 gate, F16 up) {
  if (activation.kind == Activation::kSilu) return gated_by_sigmoid(gate, gate) * up;
  if (activation.kind == Activation::kGelu) {  // x (1 + tanh(y)) / 2 is x times the sigmoid of 2 y
    const F16 cubic = fma((gate * gate), all(0.044715f), all(1.0f));
    const F16 twice = ((gate * cubic)) * all(1.5957691216f);
    return gated_by_sigmoid(gate, twice) * up;
  }
  if (activation.kind == Activation::kRelu2) {
    const F16 positive = most(zeros(), up);
    return positive * positive;
  }
  const F16 limit = all(activation.limit);
  up = most(all(-activation.limit), least(limit, up));
  if (activation.kind == Activation::kClippedSilu) return least(limit, gated_by_sigmoid(gate, gate)) * up;
  gate = least(limit, gate);
  const F16 gated = gated_by_sigmoid(gate, gate * all(activation.slope));
  return gated * ((up + all(1.0f)));
}

struct ExpertShapes {
  int64_t num_tokens, top_k, width, inner, num_slots;
  ActivationConfig activation;
};

template <class Weight>
struct ExpertArrays {
  const bf16* hidden;    // [T, D]
  const int32_t* slots;  // [T, K]; num_slots or beyond: no product
  const float* gates;    // [T, K]
  const Weight *gate, *up, *down;  // packed, [slots, D, F], [slots, D, F], [slots, F, D], from this layer's first slot
                                   // on; the gate is null for an activation without one
  const bf16 *gate_bias, *up_bias, *down_bias;  // [slots, F], [slots, F], [slots, D]; null: none
  const float *gate_scale, *up_scale, *down_scale;  // [slots, blocks, F], ..., of numbers of 8 bits; null: none
  float* out;            // [T, D]
  int64_t up_blocks = 1, down_blocks = 1;  // scales of a column: one, or more than its blocks of rows
  Adapters gate_adapters, up_adapters, down_adapters;  // of experts from this layer's first slot on
};

// Scales of a matrix of `blocks` per column: one is for sums, several are for the weights.
struct ColumnScales {
  const float* of_slot;
  int64_t blocks, columns;

  ColumnScales(const float* scales, int64_t slot, int64_t blocks, int64_t columns)
      : of_slot(scales ? scales + slot * blocks * columns : nullptr), blocks(blocks), columns(columns) {}
  const float* of_sums(int64_t column) const { return of_slot && blocks == 1 ? of_slot + column : nullptr; }
  BlockScales of_weights(int64_t column) const {
    if (!of_slot || blocks <= 1) return {};
    if (columns - column >= kPanel) return {of_slot + column, columns};
    thread_local std::vector<float> copy;  // of a narrower panel, with zeros beside it
    copy.assign(blocks * kPanel, 0);
    for (int64_t b = 0; b < blocks; ++b)
      std::copy_n(of_slot + b * columns + column, columns - column, copy.data() + b * kPanel);
    return {copy.data(), kPanel};
  }
};

// Rows times panels of weights of any kind.
template <int Panels, class Weight, class Done>
inline void multiply_panels(const bf16* left, int64_t stride, int64_t num_rows, int64_t depth,
                            const Weight* const (&panels)[Panels], const BlockScales (&scales)[Panels], Done&& done) {
  if constexpr (sizeof(Weight) == 1) multiply_by_any(left, stride, num_rows, depth, panels, done, scales);
  else multiply_by_any(left, stride, num_rows, depth, panels, done);
}

// What a panel of sums is multiplied by, and what is added to it then; null: nothing. `columns` of it are there.
struct Affine {
  const float* scale;
  const bf16* bias;
  float unit;  // of the scale
  Mask low, high;

  Affine(const float* scales, const bf16* biases, int64_t column, float unit, int64_t columns = kPanel)
      : scale(scales),
        bias(biases ? biases + column : nullptr),
        unit(unit),
        low(lanes_of(0, columns)),
        high(columns > 16 ? lanes_of(16, columns) : Mask(0)) {}

  Pair operator()(Pair value) const {
    if (scale) {
      const F16 of_unit = all(unit);
      value.low = value.low * ((load(low, scale) * of_unit));
      value.high = value.high * ((load(high, scale + 16) * of_unit));
    }
    if (!bias) return value;
    return {(value.low + wide(bias, low)), (value.high + wide(bias + 16, high))};
  }
};

// Picks in the order of their slots. Those of a slot are one group, or several of as many rows as a cache holds.
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
  const int32_t most = int32_t(rows_together(shapes.width));
  for (int32_t s = 0; s < shapes.num_slots; ++s) {
    const int32_t begin = grouped.begins.back(), end = begin + counts[s];
    for (int32_t first = begin; first < end; first += most) {
      grouped.slots.push_back(s);
      grouped.begins.push_back(std::min(first + most, end));
    }
    counts[s] = begin;
  }
  grouped.picks.resize(grouped.begins.back());
  for (int64_t p = 0; p < num_picks; ++p)
    if (slots[p] >= 0 && slots[p] < shapes.num_slots) grouped.picks[counts[slots[p]]++] = p;
}

// The rows of `hidden` that picks multiply with, in their order: [picks, D]. Of one token it is the same for all.
struct PickedRows {
  const bf16* first;
  int64_t stride;
};

inline PickedRows rows_of(const Grouped& grouped, const ExpertShapes& shapes, const bf16* hidden,
                          Scratch<bf16>& copies) {
  if (shapes.num_tokens <= 1) return {hidden, 0};
  const int64_t num_picks = grouped.picks.size(), width = shapes.width;
  bf16* to = copies.sized(num_picks * width);
  for_pieces(num_picks, 16, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      std::memcpy(to + r * width, hidden + grouped.picks[r] / shapes.top_k * width, width * sizeof(bf16));
  });
  return {to, width};
}

// inner[r] = activate(gate(row r), up(row r)), of all picks in their order.
template <bool HasGate, class Weight>
inline void multiply_gate_and_up(const Grouped& grouped, const ExpertShapes& shapes, const ExpertArrays<Weight>& arrays,
                                 const PickedRows& rows, bf16* inner) {
  const int64_t num_panels = shapes.inner / kPanel;
  thread_local AdaptedRows gate_here, up_here;
  AdaptedRows &gate_adapted = gate_here, &up_adapted = up_here;
  const auto token_of = [&](int64_t r) { return grouped.picks[r] / shapes.top_k; };
  const auto expert_of = [&](int64_t r) { return arrays.slots[grouped.picks[r]]; };
  const bool is_adapted = arrays.gate_adapters.a || arrays.up_adapters.a;
  gate_adapted.find(arrays.gate_adapters, rows.first, rows.stride, grouped.picks.size(), token_of, expert_of);
  up_adapted.find(arrays.up_adapters, rows.first, rows.stride, grouped.picks.size(), token_of, expert_of);
  for_each(grouped.slots.size() * num_panels, [&](int64_t item) {
    const int64_t group = item / num_panels, column = item % num_panels * kPanel, begin = grouped.begins[group];
    const int64_t slot = grouped.slots[group], of_column = slot * shapes.inner + column;
    constexpr int kUp = HasGate ? 1 : 0;  // place of up among the panels
    const Weight* panels[kUp + 1];
    panels[kUp] = arrays.up + of_column * shapes.width;
    if constexpr (HasGate) panels[0] = arrays.gate + of_column * shapes.width;
    const ColumnScales gate_scales(arrays.gate_scale, slot, arrays.up_blocks, shapes.inner);
    const ColumnScales up_scales(arrays.up_scale, slot, arrays.up_blocks, shapes.inner);
    const Affine of_gate(gate_scales.of_sums(column), arrays.gate_bias, of_column, kUnit<Weight>);
    const Affine of_up(up_scales.of_sums(column), arrays.up_bias, of_column, kUnit<Weight>);
    BlockScales scales[kUp + 1];
    scales[kUp] = up_scales.of_weights(column);
    if constexpr (HasGate) scales[0] = gate_scales.of_weights(column);
    multiply_panels(rows.first + begin * rows.stride, rows.stride, grouped.begins[group + 1] - begin, shapes.width,
                    panels, scales, [&](int64_t r, const Pair(&sums)[kUp + 1]) {
                      bf16* target = inner + (begin + r) * shapes.inner + column;
                      Pair up = of_up(sums[kUp]), gate = HasGate ? of_gate(sums[0]) : up;
                      if (is_adapted) {
                        if constexpr (HasGate) gate_adapted.add(gate, begin + r, token_of(begin + r), column, slot);
                        up_adapted.add(up, begin + r, token_of(begin + r), column, slot);
                      }
                      store(target, activate(shapes.activation, gate.low, up.low));
                      store(target + 16, activate(shapes.activation, gate.high, up.high));
                    });
  });
}

// results[pick] = down(inner[r]), where row r is that pick's.
template <class Weight>
inline void multiply_down(const Grouped& grouped, const ExpertShapes& shapes, const ExpertArrays<Weight>& arrays,
                          const bf16* inner, bf16* results) {
  const int64_t width = shapes.width, num_panels = native::num_panels(width);
  thread_local AdaptedRows adapted_here;
  AdaptedRows& adapted = adapted_here;
  const auto token_of = [&](int64_t r) { return grouped.picks[r] / shapes.top_k; };
  const bool is_adapted = arrays.down_adapters.a;
  const auto expert_of = [&](int64_t r) { return arrays.slots[grouped.picks[r]]; };
  adapted.find(arrays.down_adapters, inner, shapes.inner, grouped.picks.size(), token_of, expert_of);
  for_each(grouped.slots.size() * num_panels, [&](int64_t item) {
    const int64_t group = item / num_panels, panel = item % num_panels, begin = grouped.begins[group];
    const int64_t of_slot = grouped.slots[group] * width, column = panel * kPanel;
    const ColumnScales of_matrix(arrays.down_scale, grouped.slots[group], arrays.down_blocks, width);
    const Affine of_down(of_matrix.of_sums(column), arrays.down_bias, of_slot + column, kUnit<Weight>, width - column);
    const Weight* panels[1] = {panel_of(arrays.down + of_slot * shapes.inner, shapes.inner, width, panel)};
    const BlockScales scales[1] = {of_matrix.of_weights(column)};
    multiply_panels(inner + begin * shapes.inner, shapes.inner, grouped.begins[group + 1] - begin, shapes.inner, panels,
                    scales, [&](int64_t r, const Pair(&result)[1]) {
                      Pair down = of_down(result[0]);
                      if (is_adapted) adapted.add(down, begin + r, token_of(begin + r), column, grouped.slots[group]);
                      store_columns(results + grouped.picks[begin + r] * width, down, column, width);
                    });
  });
}

// out[t] = sum over k, in that order, of gates[t, k] * down(activate(gate(hidden[t]), up(hidden[t]))), float32.
template <class Weight>
inline void expert_sums(const ExpertShapes& shapes, const ExpertArrays<Weight>& arrays) {
  thread_local Grouped grouped_here;
  thread_local Scratch<bf16> rows_here, inner_here, results_here;
  Grouped& grouped = grouped_here;
  group_by_slot(shapes, arrays.slots, grouped);
  bf16* inner = inner_here.sized(grouped.picks.size() * shapes.inner);
  bf16* results = results_here.sized(shapes.num_tokens * shapes.top_k * shapes.width);
  const PickedRows rows = rows_of(grouped, shapes, arrays.hidden, rows_here);
  if (arrays.gate) multiply_gate_and_up<true>(grouped, shapes, arrays, rows, inner);
  else multiply_gate_and_up<false>(grouped, shapes, arrays, rows, inner);
  multiply_down(grouped, shapes, arrays, inner, results);
  for_pieces(shapes.num_tokens, 8, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t d = 0; d < shapes.width; d += 16) {
        const Mask lanes = lanes_of(d, shapes.width);
        F16 sum = zeros();
        for (int64_t pick = t * shapes.top_k; pick < (t + 1) * shapes.top_k; ++pick) {
          if (arrays.slots[pick] < 0 || arrays.slots[pick] >= shapes.num_slots) continue;
          sum = fma(all(arrays.gates[pick]), wide(results + pick * shapes.width + d, lanes), sum);
        }
        put(arrays.out + t * shapes.width + d, lanes, sum);
      }
    }
  });
}

}  // namespace native
