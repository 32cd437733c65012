// Mamba-2 layers: projections, a convolution with a bias, the recurrence of `gated_delta.h` without the delta rule, the
// gated norm of each group, and the output product. Queries are C, keys B, values x, and beta is the step.
#pragma once

#include "gated_delta.h"

namespace native {

struct Mamba2Weights {
  DeltaWeights rule;  // a: matrix of steps, b: null, norm: [H * v]
  ConvBiases biases;
  const float* skip;  // [H], factor of x in the output
  float min_step;
};

// Steps and decays of a token. If its projections are not finite, it is computed as zeros.
inline void shape_step(const DeltaShapes& s, const Mamba2Weights& w, const DeltaRows& rows, int64_t t) {
  const int64_t heads = s.num_heads;
  bf16 *q = rows.q + t * s.q_width(), *k = rows.k + t * s.q_width(), *v = rows.v + t * s.v_width();
  const bf16* a = rows.a + t * heads;
  float *decay = rows.decay + t * heads, *step = rows.beta + t * heads;
  bool is_finite = are_finite(q, s.q_width()) && are_finite(k, s.q_width()) && are_finite(v, s.v_width()) &&
                   are_finite(a, heads);
  for (int64_t h = 0; h < heads; ++h) {
    step[h] = std::max(softplus(narrow(a[h]) + w.rule.decay_bias[h]), w.min_step);
    decay[h] = -std::exp(w.rule.log_decay[h]) * step[h];
    is_finite = is_finite && std::isfinite(decay[h]);
  }
  rows.is_finite[t] = is_finite;
  if (is_finite) return;
  std::fill_n(q, s.q_width(), bf16{}), std::fill_n(k, s.q_width(), bf16{}), std::fill_n(v, s.v_width(), bf16{});
  std::fill_n(decay, heads, 0.0f), std::fill_n(step, heads, 0.0f);
}

// The pieces of one row in a step, for the heads of a group.
class Mamba2Group : private DeltaHead {
 public:
  Mamba2Group(const DeltaShapes& s, const Mamba2Weights& w, const DeltaPools& pools, const DeltaRows& rows, int64_t group)
      : DeltaHead(s, w.rule, pools, rows, group), more_(w) {
    thread_local Scratch<float> scratch;
    outputs_ = scratch.sized(kPiece * width() + 16);
  }

  void compute(const DeltaPiece& p) const {
    const int64_t entry = folded_entry(p);
    mix(p, more_.biases);
    shape_rows(p);
    for (int64_t h = 0; h < s_.per_key(); ++h) advance(p, h, entry);
    for (int64_t i = 0; i < p.count; ++i) norm(p.token + i, outputs_ + i * width());
  }

 private:
  int64_t width() const { return s_.per_key() * s_.value_width; }

  // Adds the keys to the ring, and multiplies keys and queries by all keys up to the newest.
  void shape_rows(const DeltaPiece& p) const {
    const int64_t d = s_.key_width;
    for (int64_t i = 0; i < p.count; ++i) {
      const float* const mixed = buffers_.mixed + i * s_.channels();
      std::copy_n(mixed + d, d, buffers_.rows + i * d);
      std::copy_n(mixed, d, buffers_.rows + (p.count + i) * d);
    }
    add_keys(p);
    multiply_by_keys(p);
  }

  // Advances a head, the `in_group`-th of the group: products of queries with the state and the ring, fresh values,
  // then outputs with their share of x, times the SiLU of their gates.
  void advance(const DeltaPiece& p, int64_t in_group, int64_t entry) const {
    const int64_t d = s_.key_width, v = s_.value_width, past = p.start % kChunk, first = past + p.known;
    const int64_t h = head_ * s_.per_key() + in_group;
    weigh(p, h);
    float *const ring = fresh(p.row, h), *const sums = buffers_.sums;
    const float *const scaled = buffers_.scaled + p.count * d, *const weights = buffers_.weights + p.count * kChunk;
    std::fill_n(sums, p.count * v, 0.0f);
    add_chains(p.count, {scaled, d, 1}, d, state(entry, h), v, sums, v, v);
    add_chains(p.count, {weights, kChunk, 1}, past, ring, v, sums, v, v);
    for (int64_t i = 0; i < p.count; ++i) {
      const int64_t t = p.token + i;
      const F16 step = all(rows_.beta[t * s_.num_heads + h]), skip = all(more_.skip[h]);
      const float* const x = buffers_.mixed + i * s_.channels() + 2 * d + in_group * v;
      for (int64_t c = 0; c < v; c += 16) {
        const Mask lanes = lanes_of(c, v);
        put(ring + (first + i) * v + c, lanes, step * load(lanes, x + c));
      }
      const Factors own{weights + i * kChunk + past, 0, 1};
      add_chains(1, own, p.known + i + 1, ring + past * v, v, sums + i * v, v, v);
      const bf16* const z = rows_.z + t * s_.v_width() + h * v;
      for (int64_t c = 0; c < v; c += 16) {
        const Mask lanes = lanes_of(c, v);
        const F16 gate = wide(z + c, lanes), out = fma(skip, load(lanes, x + c), load(lanes, sums + i * v + c));
        put(outputs_ + i * width() + in_group * v + c, lanes, out * gated_by_sigmoid(gate, gate));
      }
    }
  }

  // Norms the gated outputs of a token over the group.
  void norm(int64_t t, const float* gated) const {
    bf16* const to = rows_.gated + t * s_.v_width() + head_ * width();
    if (!rows_.is_finite[t]) {
      std::fill_n(to, width(), bf16{0x7fc0});  // NaN
      return;
    }
    F16 squares = zeros();
    for (int64_t c = 0; c < width(); c += 16) {
      const F16 y = load(lanes_of(c, width()), gated + c);
      squares = fma(y, y, squares);
    }
    const F16 shrink = all(1.0f / std::sqrt(total(squares) / width() + s_.eps));
    for (int64_t c = 0; c < width(); c += 16) {
      const Mask lanes = lanes_of(c, width());
      store(to + c, load(lanes, gated + c) * shrink * load(lanes, w_.norm + head_ * width() + c), lanes);
    }
  }

  const Mamba2Weights& more_;
  float* outputs_;  // [piece, width of the group], times their gates
};

inline void mamba2_layer(const DeltaShapes& s, const Mamba2Weights& w, const DeltaPools& pools, const bf16* hidden,
                         const DeltaPiece* pieces, float* out) {
  thread_local Scratch<bf16> narrow_rows;
  thread_local Scratch<float> wide_rows;
  const int64_t T = s.num_tokens, q = s.q_width(), v = s.v_width(), heads = s.num_heads;
  bf16* at = narrow_rows.sized(T * (2 * q + 3 * v + heads));
  const auto take = [&](int64_t width) { return std::exchange(at, at + T * width); };
  DeltaRows rows{take(q), take(q), take(v), take(v), nullptr, take(heads), take(v), nullptr, nullptr, nullptr};
  rows.decay = wide_rows.sized(T * (2 * heads + 1));
  rows.beta = rows.decay + T * heads, rows.is_finite = rows.beta + T * heads;
  project(hidden, T, s.width, {{w.rule.q, nullptr, rows.q, q}, {w.rule.k, nullptr, rows.k, q},
                               {w.rule.v, nullptr, rows.v, v}, {w.rule.z, nullptr, rows.z, v},
                               {w.rule.a, nullptr, rows.a, heads}});
  advance_rows(
      s, rows, pieces, [&](int64_t t) { shape_step(s, w, rows, t); },
      [&](int64_t group) { return Mamba2Group(s, w, pools, rows, group); });
  multiply_all(rows.gated, T, v, w.rule.o, s.width, out);
}

}  // namespace native
