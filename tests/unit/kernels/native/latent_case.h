// One layer of multi-head latent attention beside its definition, over pages of several sequences.
#pragma once

#include <algorithm>

#include "case.h"
#include "checks.h"
#include "latent.h"

struct LatentLayer {
  int64_t singles, blocks, block_tokens, width, heads, nope, rope, value, latent, query_latent, page_size;
  bool has_biases, is_interleaved, has_gate = false;
  static constexpr int64_t kLongest = 150;  // tokens of a sequence
  int64_t tokens() const { return singles + blocks * block_tokens; }
  int64_t rows() const { return singles + blocks; }
  int64_t table_width() const { return (kLongest + page_size - 1) / page_size; }
  int64_t pages() const { return rows() * table_width() + 1; }  // page 0 is for padding
  int64_t cached() const { return latent + rope; }
  int64_t query_width() const { return heads * (nope + rope); }
};

struct LatentBatch {
  std::vector<int32_t> table, positions, slots, row_of;
  std::vector<float> cos, sin, query_scale;  // the last may be empty
  Numbers pool;

  LatentBatch(Case& c, const LatentLayer& l)
      : table(l.rows() * l.table_width(), INT32_MAX), positions(l.tokens(), -1), slots(l.tokens()), row_of(l.tokens()),
        cos(l.tokens() * l.rope / 2), sin(cos), pool(l.pages() * l.page_size * l.cached(), kNan) {
    int64_t t = 0;
    for (int64_t row = 0; row < l.rows(); ++row) {
      const int64_t most = row < l.singles ? 1 : l.block_tokens, used = c.below(4) ? 1 + c.below(int(most)) : 0;
      const int64_t first = c.below(int(l.kLongest - most) + 1), end = used ? first + used : 0;
      for (int64_t p = 0; p * l.page_size < end; ++p)
        table[row * l.table_width() + p] = int32_t(1 + p * l.rows() + row);
      for (int64_t place = 0; place < end && place < first; ++place) {
        const Numbers drawn = c.draw(l.cached());
        std::copy(drawn.begin(), drawn.end(), pool.begin() + slot(l, row, place) * l.cached());
      }
      for (int64_t i = 0; i < most; ++i, ++t) {
        row_of[t] = int32_t(row);
        if (i < used) positions[t] = int32_t(first + i), slots[t] = int32_t(slot(l, row, first + i));
      }
    }
    for (size_t i = 0, half = l.rope / 2; i < cos.size(); ++i) {
      const double angle = positions[i / half] * std::pow(1e4, -double(i % half) / double(half));
      cos[i] = float(std::cos(angle)), sin[i] = float(std::sin(angle));
    }
    for (int64_t i = 0; i < l.tokens() && c.number % 2; ++i) query_scale.push_back(1 + 0.1f * float(i % 7));
  }

  int64_t slot(const LatentLayer& l, int64_t row, int64_t place) const {
    return int64_t(table[row * l.table_width() + place / l.page_size]) * l.page_size + place % l.page_size;
  }
};

// A matrix [depth, width], and how it lies for the kernel.
struct Matrix {
  int64_t depth, width;
  Numbers plain, lying;

  Matrix(Case& c, int64_t depth, int64_t width)
      : depth(depth), width(width), plain(c.draw(depth * width, 0.3)), lying(packed(plain, depth, width)) {}

  Numbers times(const bf16* row, const Numbers& bias = {}) const {
    Numbers out(width);
    for (int64_t n = 0; n < width; ++n) {
      out[n] = rounded(dot(row, plain, n, depth, width));
      if (!bias.empty()) out[n] = rounded(value_of(out[n]) + value_of(bias[n]));
    }
    return out;
  }
};

struct LatentWeights {
  Matrix q_a, q_b, kv_a, k_b, v_b, o, gate;  // k_b is [heads * nope, latent], v_b [latent, heads * value]
  Numbers q_a_norm, kv_a_norm, q_a_bias, kv_a_bias;

  LatentWeights(Case& c, const LatentLayer& l)
      : q_a(c, l.width, l.query_latent), q_b(c, l.query_latent ? l.query_latent : l.width, l.query_width()),
        kv_a(c, l.width, l.cached()), k_b(c, l.heads * l.nope, l.latent), v_b(c, l.latent, l.heads * l.value),
        o(c, l.heads * l.value, l.width), gate(c, l.width, l.has_gate ? l.heads : 0), q_a_norm(c.draw(l.query_latent, 0.2, 1)),
        kv_a_norm(c.draw(l.latent, 0.2, 1)), q_a_bias(c.draw(l.has_biases ? l.query_latent : 0)),
        kv_a_bias(c.draw(l.has_biases ? l.cached() : 0)) {}
};

inline void norm_in_place(bf16* row, const Numbers& scale) {
  double squares = 0;
  for (size_t i = 0; i < scale.size(); ++i) squares += value_of(row[i]) * value_of(row[i]);
  for (size_t i = 0; i < scale.size(); ++i) {
    const bf16 shrunk = rounded(value_of(row[i]) / std::sqrt(squares / double(scale.size()) + 1e-6));
    row[i] = rounded(value_of(shrunk) * value_of(scale[i]));
  }
}

inline void rotate_in_place(bf16* row, const LatentLayer& l, const LatentBatch& b, int64_t t) {
  for (int64_t i = 0, half = l.rope / 2; i < half; ++i) {
    bf16 &x = row[l.is_interleaved ? 2 * i : i], &y = row[l.is_interleaved ? 2 * i + 1 : half + i];
    const double first = value_of(x), second = value_of(y), cos = b.cos[t * half + i], sin = b.sin[t * half + i];
    x = rounded(first * cos - second * sin), y = rounded(second * cos + first * sin);
  }
}

// What one head of a token gathers of the latents of its sequence, multiplied out.
inline Numbers head_values(const LatentLayer& l, const LatentWeights& w, const LatentBatch& b, const Numbers& pool,
                           const bf16* query, int64_t t, int64_t head) {
  Numbers absorbed(l.cached()), values(l.value);
  const double factor = b.query_scale.empty() ? 1 : b.query_scale[t];
  for (int64_t i = 0; i < l.latent; ++i)
    absorbed[i] = rounded(factor * dot(query, w.k_b.plain, head * l.nope * l.latent + i, l.nope, l.latent));
  for (int64_t i = 0; i < l.rope; ++i) absorbed[l.latent + i] = rounded(factor * value_of(query[l.nope + i]));
  Exact totals(l.latent), weights;
  double sum = 0;
  for (int64_t place = 0; place <= b.positions[t]; ++place) {
    const bf16* row = pool.data() + b.slot(l, b.row_of[t], place) * l.cached();
    double score = 0;
    for (int64_t i = 0; i < l.cached(); ++i) score += value_of(absorbed[i]) * value_of(row[i]);
    sum += weights.emplace_back(std::exp(score * 0.1));
  }
  for (size_t place = 0; place < weights.size(); ++place) {
    const bf16* row = pool.data() + b.slot(l, b.row_of[t], int64_t(place)) * l.cached();
    for (int64_t i = 0; i < l.latent; ++i) totals[i] += weights[place] / sum * value_of(row[i]);
  }
  Numbers attended(l.latent);
  std::transform(totals.begin(), totals.end(), attended.begin(), rounded);
  for (int64_t i = 0; i < l.value; ++i)
    values[i] = rounded(dot(attended.data(), w.v_b.plain, head * l.value + i, l.latent, l.heads * l.value));
  return values;
}

// Output of every token; what they cache is written to `pool`.
inline Exact latent_definition(const LatentLayer& l, const LatentWeights& w, const LatentBatch& b, const Numbers& hidden,
                               Numbers& pool) {
  std::vector<Numbers> queries;
  for (int64_t t = 0; t < l.tokens(); ++t) {
    const bf16* row = hidden.data() + t * l.width;
    Numbers latent = w.kv_a.times(row, w.kv_a_bias), of_query = w.q_a.times(row, w.q_a_bias);
    norm_in_place(latent.data(), w.kv_a_norm), norm_in_place(of_query.data(), w.q_a_norm);
    rotate_in_place(latent.data() + l.latent, l, b, t);
    queries.push_back(w.q_b.times(l.query_latent ? of_query.data() : row));
    for (int64_t head = 0; head < l.heads; ++head)
      rotate_in_place(queries.back().data() + head * (l.nope + l.rope) + l.nope, l, b, t);
    if (b.positions[t] >= 0) std::copy(latent.begin(), latent.end(), pool.begin() + b.slots[t] * l.cached());
  }
  Exact out;
  for (int64_t t = 0; t < l.tokens(); ++t) {
    Numbers values;
    const Numbers gates = w.gate.times(hidden.data() + t * l.width);
    for (int64_t head = 0; head < l.heads; ++head) {
      Numbers one = head_values(l, w, b, pool, queries[t].data() + head * (l.nope + l.rope), t, head);
      for (bf16& each : one)
        if (l.has_gate) each = rounded(value_of(each) / (1 + std::exp(-value_of(gates[head]))));
      values.insert(values.end(), one.begin(), one.end());
    }
    for (int64_t d = 0; d < l.width; ++d) out.push_back(dot(values.data(), w.o.plain, d, w.o.depth, l.width));
  }
  return out;
}

inline void latent_attention(Case c, const LatentLayer& l) {
  const LatentWeights w(c, l);
  LatentBatch b(c, l);
  const Numbers hidden = c.draw(l.tokens() * l.width);
  Numbers expected_pool = b.pool;
  std::vector<float> found(l.tokens() * l.width);
  native::LatentShapes s{};
  s.nope = l.nope, s.rope = l.rope, s.value = l.value, s.latent = l.latent, s.query_latent = l.query_latent;
  s.norm_eps = 1e-6f, s.is_interleaved = l.is_interleaved;
  s.batch.num_tokens = l.tokens(), s.batch.width = l.width, s.batch.num_heads = l.heads, s.batch.scale = 0.1f;
  s.batch.page_size = l.page_size, s.batch.num_pages = l.pages(), s.batch.table_width = l.table_width();
  s.batch.num_singles = l.singles, s.batch.num_blocks = l.blocks, s.batch.block_tokens = l.block_tokens;
  const auto or_none = [](const Numbers& numbers) { return numbers.empty() ? nullptr : numbers.data(); };
  native::LatentShapes odd = s;
  odd.latent += 1;
  if (!native::fit(s) || native::fit(odd)) ++num_wrong, std::printf("%s %d: shapes are judged wrong\n", c.name, c.number);
  native::latent_attention_layer(
      s, {hidden.data(), w.q_a.lying.data(), w.q_b.lying.data(), w.kv_a.lying.data(), w.k_b.lying.data(),
          w.v_b.lying.data(), w.o.lying.data(), w.q_a_norm.data(), w.kv_a_norm.data(), or_none(w.q_a_bias),
          or_none(w.kv_a_bias), b.cos.data(), b.sin.data(), b.slots.data(), b.positions.data(), b.table.data(),
          b.query_scale.empty() ? nullptr : b.query_scale.data(), nullptr, 0, b.pool.data(), found.data(),
          l.has_gate ? w.gate.lying.data() : nullptr});
  c.compare("latent attention", found, latent_definition(l, w, b, hidden, expected_pool), 0x1p-6);
  Exact here, there;
  for (size_t i = 0; i < b.pool.size(); ++i) {
    if (expected_pool[i] == kNan && b.pool[i] == kNan) continue;
    here.push_back(value_of(b.pool[i])), there.push_back(value_of(expected_pool[i]));
  }
  c.compare("pool of latents", here, there, 0x1p-8);
}
