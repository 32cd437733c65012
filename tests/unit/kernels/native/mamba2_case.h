// Mamba-2 layers beside the recurrence token by token, in float64.
#pragma once

#include "delta_case.h"
#include "mamba2.h"

struct Mamba2Numbers : DeltaNumbers {
  static constexpr float kMinStep = 0.4f;
  Numbers q_bias, k_bias, v_bias;  // empty: none
  std::vector<float> skip, wide_norm;

  Mamba2Numbers(Case& c, const DeltaLayer& l)
      : DeltaNumbers(c, l), skip(as_floats(c, l.heads(), 1)), wide_norm(as_floats(c, l.v_width(), 1)) {
    if (c.number % 2) q_bias = c.draw(l.q_width(), 0.3), k_bias = c.draw(l.q_width(), 0.3), v_bias = c.draw(l.v_width(), 0.3);
  }
};

// Outputs [tokens, width] of one sequence, and its states [heads, state width, head width] after each multiple of 64.
inline Exact mamba2_rule(const DeltaLayer& l, const Mamba2Numbers& w, const bf16* hidden, int64_t tokens,
                         std::vector<Exact>& states) {
  const int64_t d = l.key_width, v = l.value_width, of_group = l.per_key * v;
  std::vector<Exact> q, k, values;
  Exact state(l.heads() * d * v), out;
  for (int64_t t = 0; t < tokens; ++t) {
    if (t % 64 == 0) states.push_back(state);
    const bf16* const row = hidden + t * l.width;
    q.push_back(delta_product(l, row, w.q, l.q_width())), k.push_back(delta_product(l, row, w.k, l.q_width()));
    values.push_back(delta_product(l, row, w.v, l.v_width()));
    const Exact query = delta_mixed(l, q, t, w.q_taps, w.q_bias), key = delta_mixed(l, k, t, w.k_taps, w.k_bias);
    const Exact x = delta_mixed(l, values, t, w.v_taps, w.v_bias), z = delta_product(l, row, w.z, l.v_width());
    const Exact a = delta_product(l, row, w.a, l.heads());
    Exact result(l.v_width());
    for (int64_t h = 0; h < l.heads(); ++h) {
      const double step = std::max(std::log1p(std::exp(a[h] + w.decay_bias[h])), double(w.kMinStep));
      const double decay = std::exp(-std::exp(double(w.log_decay[h])) * step);
      const double *const key_here = &key[h / l.per_key * d], *const query_here = &query[h / l.per_key * d];
      double *const here = &state[h * d * v], *const to = &result[h * v];
      for (int64_t e = 0; e < d * v; ++e) here[e] = here[e] * decay + key_here[e / v] * step * x[h * v + e % v];
      for (int64_t e = 0; e < d * v; ++e) to[e % v] += query_here[e / v] * here[e];
      for (int64_t e = 0; e < v; ++e) to[e] = (to[e] + w.skip[h] * x[h * v + e]) * silu(z[h * v + e]);
    }
    Numbers gated;
    for (int64_t i = 0; i < l.v_width(); ++i) {
      double squares = 0;
      for (int64_t e = i / of_group * of_group; e < (i / of_group + 1) * of_group; ++e) squares += result[e] * result[e];
      gated.push_back(rounded(result[i] / std::sqrt(squares / double(of_group) + 1e-6) * w.wide_norm[i]));
    }
    for (int64_t i = 0; i < l.width; ++i) out.push_back(dot(gated.data(), w.o, i, l.v_width(), l.width));
  }
  return out;
}

inline void mamba2(Case c, const DeltaLayer& l, const std::vector<int32_t>& lengths, int32_t num_single) {
  const Mamba2Numbers w(c, l);
  const Numbers q = packed(w.q, l.width, l.q_width()), k = packed(w.k, l.width, l.q_width()),
                values = packed(w.v, l.width, l.v_width()), z = packed(w.z, l.width, l.v_width()),
                a = packed(w.a, l.width, l.heads()), o = packed(w.o, l.v_width(), l.width);
  const auto bias_of = [](const Numbers& bias) { return bias.empty() ? nullptr : bias.data(); };
  const native::Mamba2Weights weights{
      {q.data(), k.data(), values.data(), z.data(), nullptr, a.data(), o.data(), w.q_taps.data(), w.k_taps.data(),
       w.v_taps.data(), w.log_decay.data(), w.decay_bias.data(), w.wide_norm.data()},
      {bias_of(w.q_bias), bias_of(w.k_bias), bias_of(w.v_bias)}, w.skip.data(), w.kMinStep};
  check_rows(
      c, l, lengths, num_single,
      [&](const native::DeltaShapes& shapes, const native::DeltaPools& pools, const bf16* stream,
          const native::DeltaPiece* pieces, float* out) { native::mamba2_layer(shapes, weights, pools, stream, pieces, out); },
      [&](const bf16* hidden, int64_t tokens, std::vector<Exact>& states) { return mamba2_rule(l, w, hidden, tokens, states); });
}
