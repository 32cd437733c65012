// Gated delta layers beside the rule token by token, in float64: prompts of several rows, then single tokens.
#pragma once

#include "case.h"
#include "gated_delta.h"

struct DeltaLayer {
  int64_t key_heads, per_key, key_width, value_width, taps, width;
  int64_t decays = 1, rank = 0;  // of a head; between two products of decays and gates, 0: one product
  float floor = 0;
  bool rounds = false, has_sigmoid = false;
  int64_t heads() const { return key_heads * per_key; }
  int64_t q_width() const { return key_heads * key_width; }
  int64_t v_width() const { return heads() * value_width; }
  int64_t channels() const { return 2 * key_width + per_key * value_width; }
};

struct DeltaNumbers {
  Numbers q, k, v, z, b, a, o, q_taps, k_taps, v_taps, a_in, z_in;
  std::vector<float> log_decay, decay_bias, norm;

  DeltaNumbers(Case& c, const DeltaLayer& l)
      : q(c.draw(l.width * l.q_width(), 0.2)), k(c.draw(l.width * l.q_width(), 0.2)),
        v(c.draw(l.width * l.v_width(), 0.2)), z(c.draw((l.rank ? l.rank : l.width) * l.v_width(), 0.2)),
        b(c.draw(l.width * l.heads(), 0.2)), a(c.draw((l.rank ? l.rank : l.width) * l.heads() * l.decays, 0.2)),
        o(c.draw(l.v_width() * l.width, 0.2)), q_taps(c.draw(l.taps * l.q_width(), 0.5)),
        k_taps(c.draw(l.taps * l.q_width(), 0.5)), v_taps(c.draw(l.taps * l.v_width(), 0.5)),
        a_in(c.draw(l.width * l.rank, 0.2)), z_in(c.draw(l.width * l.rank, 0.2)),
        log_decay(as_floats(c, l.heads(), -2)), decay_bias(as_floats(c, l.heads() * l.decays, 0)),
        norm(as_floats(c, l.value_width, 1)) {}

  static std::vector<float> as_floats(Case& c, int64_t size, double mean) {
    std::vector<float> out;
    for (bf16 each : c.draw(size, 0.3, mean)) out.push_back(float(value_of(each)));
    return out;
  }
};

// Projections of one row of the stream, rounded.
inline Exact delta_product(const DeltaLayer& l, const bf16* row, const Numbers& matrix, int64_t width) {
  Exact out;
  for (int64_t i = 0; i < width; ++i) out.push_back(value_of(rounded(dot(row, matrix, i, l.width, width))));
  return out;
}

// Decays or gates of one row: one product, or two.
inline Exact delta_gates(const DeltaLayer& l, const bf16* row, const Numbers& first, const Numbers& last, int64_t width) {
  if (!l.rank) return delta_product(l, row, last, width);
  Numbers between;
  for (double each : delta_product(l, row, first, l.rank)) between.push_back(rounded(each));
  Exact out;
  for (int64_t i = 0; i < width; ++i) out.push_back(value_of(rounded(dot(between.data(), last, i, l.rank, width))));
  return out;
}

inline double delta_decay(const DeltaLayer& l, double x, double rate) {
  const double found = l.floor < 0 ? l.floor / (1 + std::exp(-rate * x)) : -rate * std::log1p(std::exp(x));
  return std::exp(l.rounds ? value_of(rounded(found)) : found);
}

inline double silu(double x) { return x / (1 + std::exp(-x)); }

// Convolved channels of token `t` of a sequence of projections, rounded.
inline Exact delta_mixed(const DeltaLayer& l, const std::vector<Exact>& rows, int64_t t, const Numbers& taps,
                         const Numbers& bias = {}) {
  Exact out(rows[t].size());
  for (size_t i = 0; i < out.size(); ++i) {
    if (!bias.empty()) out[i] = value_of(bias[i]);
    for (int64_t tap = 0; tap < l.taps; ++tap)
      if (const int64_t at = t - (l.taps - 1) + tap; at >= 0) out[i] += rows[at][i] * value_of(taps[tap * out.size() + i]);
    out[i] = value_of(rounded(silu(out[i])));
  }
  return out;
}

inline void make_unit(double* part, int64_t width, double scale) {
  double squares = 1e-6;
  for (int64_t i = 0; i < width; ++i) squares += part[i] * part[i];
  for (int64_t i = 0; i < width; ++i) part[i] = value_of(rounded(part[i] / std::sqrt(squares) * scale));
}

// Outputs [tokens, width] of one sequence, and its states [heads, key width, value width] after each multiple of 64.
inline Exact delta_rule(const DeltaLayer& l, const DeltaNumbers& w, const bf16* hidden, int64_t tokens,
                        std::vector<Exact>& states) {
  const int64_t d = l.key_width, v = l.value_width;
  std::vector<Exact> q, k, values;
  Exact state(l.heads() * d * v), out;
  for (int64_t t = 0; t < tokens; ++t) {
    if (t % 64 == 0) states.push_back(state);
    const bf16* const row = hidden + t * l.width;
    q.push_back(delta_product(l, row, w.q, l.q_width())), k.push_back(delta_product(l, row, w.k, l.q_width()));
    values.push_back(delta_product(l, row, w.v, l.v_width()));
    Exact query = delta_mixed(l, q, t, w.q_taps), key = delta_mixed(l, k, t, w.k_taps);
    const Exact value = delta_mixed(l, values, t, w.v_taps), z = delta_gates(l, row, w.z_in, w.z, l.v_width());
    const Exact b = delta_product(l, row, w.b, l.heads()), a = delta_gates(l, row, w.a_in, w.a, l.heads() * l.decays);
    for (int64_t i = 0; i < l.key_heads; ++i)
      make_unit(&query[i * d], d, 1 / std::sqrt(double(d))), make_unit(&key[i * d], d, 1);
    Numbers gated(l.v_width());
    for (int64_t h = 0; h < l.heads(); ++h) {
      Exact decay(d);
      for (int64_t e = 0; e < d; ++e) {
        const int64_t at = l.decays > 1 ? h * d + e : h;
        decay[e] = delta_decay(l, a[at] + w.decay_bias[at], std::exp(double(w.log_decay[h])));
      }
      const double beta = 1 / (1 + std::exp(-b[h])), *key_here = &key[h / l.per_key * d], *query_here = &query[h / l.per_key * d];
      Exact said(v), result(v);
      double* const here = &state[h * d * v];
      for (int64_t e = 0; e < d * v; ++e) said[e % v] += key_here[e / v] * (here[e] *= decay[e / v]);
      for (int64_t e = 0; e < d * v; ++e) here[e] += key_here[e / v] * beta * (value[h * v + e % v] - said[e % v]);
      for (int64_t e = 0; e < d * v; ++e) result[e % v] += query_here[e / v] * here[e];
      double squares = 0;
      for (double each : result) squares += each * each;
      for (int64_t e = 0; e < v; ++e) {
        const double x = z[h * v + e], gate = l.has_sigmoid ? 1 / (1 + std::exp(-x)) : silu(x);
        gated[h * v + e] = rounded(result[e] / std::sqrt(squares / double(v) + 1e-6) * w.norm[e] * gate);
      }
    }
    for (int64_t i = 0; i < l.width; ++i) out.push_back(dot(gated.data(), w.o, i, l.v_width(), l.width));
  }
  return out;
}

// Pieces of the tokens first .. end - 1 of a row, that lie from `token` on in the step.
inline void cut(std::vector<native::DeltaPiece>& pieces, int32_t row, int32_t first, int32_t end, int32_t token) {
  for (int32_t at = first; at < end;) {
    const int32_t start = at / 8 * 8, count = std::min(end, start + 8) - at;
    pieces.push_back({row, start, at - start, count, token + at - first, 1 + row, 0, 0});
    at += count;
  }
}

// Compares a kernel of a layer with its rule, over prompts of these lengths and single tokens behind them.
template <class Advance, class Rule>
inline void check_rows(Case& c, const DeltaLayer& l, const std::vector<int32_t>& lengths, int32_t num_single,
                       Advance&& advance, Rule&& rule) {
  const int64_t rows = int64_t(lengths.size()), d = l.key_width, v = l.value_width;
  const float nan = std::nanf("");
  std::vector<float> state((1 + rows) * l.heads() * d * v, nan), window((1 + rows) * (l.taps - 1) * l.key_heads * l.channels(), nan);
  std::fill_n(state.begin(), l.heads() * d * v, 0.0f);
  std::vector<float> keys(rows * l.key_heads * d * 64, nan), fresh(rows * l.heads() * 64 * v, nan), decay(rows * l.heads() * l.decays * 64, nan),
      inputs(rows * 16 * l.key_heads * l.channels(), nan);
  const native::DeltaPools pools{state.data(), window.data(), keys.data(), fresh.data(), decay.data(), inputs.data()};
  std::vector<Numbers> hidden;
  std::vector<std::vector<float>> found(rows);
  for (int32_t length : lengths) hidden.push_back(c.draw((length + num_single) * l.width));
  const auto step = [&](const std::vector<native::DeltaPiece>& pieces, int64_t tokens) {
    Numbers stream(tokens * l.width, kNan);
    for (const auto& p : pieces)
      std::copy_n(hidden[p.row].begin() + (p.start + p.known) * l.width, p.count * l.width, stream.begin() + p.token * l.width);
    std::vector<float> out(tokens * l.width);
    const native::DeltaShapes shapes{tokens, l.width, l.heads(), l.key_heads, d, v, l.taps, 1 + rows, rows, int64_t(pieces.size()), 1e-6f,
                                     l.decays, l.rank, l.floor, l.rounds, l.has_sigmoid};
    if (!native::are_in_pools(shapes, pieces.data())) ++num_wrong, std::printf("%s %d: pieces are refused\n", c.name, c.number);
    advance(shapes, pools, stream.data(), pieces.data(), out.data());
    for (const auto& p : pieces)
      found[p.row].insert(found[p.row].end(), out.begin() + p.token * l.width, out.begin() + (p.token + p.count) * l.width);
  };
  std::vector<native::DeltaPiece> pieces;
  int32_t token = 1;  // the first token is padding
  for (int32_t row = 0; row < rows; token += lengths[row++]) cut(pieces, row, 0, lengths[row], token);
  step(pieces, token);
  for (int32_t i = 0; i < num_single; ++i) {
    pieces.clear();
    for (int32_t row = 0; row < rows; ++row) cut(pieces, row, lengths[row] + i, lengths[row] + i + 1, row);
    step(pieces, rows);
  }
  for (int64_t row = 0; row < rows; ++row) {
    std::vector<Exact> states;
    const Exact expected = rule(hidden[row].data(), lengths[row] + num_single, states);
    c.compare("outputs of a recurrent layer", found[row], expected, 1e-2);
    if (states.size() > 1) c.compare("state of a recurrent layer", state.data() + (1 + row) * l.heads() * d * v, states.back(), 1e-2);
  }
}

inline void gated_delta(Case c, const DeltaLayer& l, const std::vector<int32_t>& lengths, int32_t num_single) {
  const DeltaNumbers w(c, l);
  const Numbers q = packed(w.q, l.width, l.q_width()), k = packed(w.k, l.width, l.q_width()),
                values = packed(w.v, l.width, l.v_width()), z = packed(w.z, l.rank ? l.rank : l.width, l.v_width()),
                b = packed(w.b, l.width, l.heads()), a = packed(w.a, l.rank ? l.rank : l.width, l.heads() * l.decays),
                a_in = packed(w.a_in, l.width, l.rank), z_in = packed(w.z_in, l.width, l.rank),
                o = packed(w.o, l.v_width(), l.width);
  const native::DeltaWeights weights{q.data(), k.data(), values.data(), z.data(), b.data(), a.data(), o.data(),
                                     w.q_taps.data(), w.k_taps.data(), w.v_taps.data(), w.log_decay.data(),
                                     w.decay_bias.data(), w.norm.data(), a_in.data(), z_in.data()};
  check_rows(
      c, l, lengths, num_single,
      [&](const native::DeltaShapes& shapes, const native::DeltaPools& pools, const bf16* stream,
          const native::DeltaPiece* pieces, float* out) { native::delta_layer(shapes, weights, pools, stream, pieces, out); },
      [&](const bf16* hidden, int64_t tokens, std::vector<Exact>& states) { return delta_rule(l, w, hidden, tokens, states); });
}
