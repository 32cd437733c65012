// One layer of attention beside its definition, over pages of several sequences.
#pragma once

#include <algorithm>

#include "attention.h"
#include "case.h"
#include "checks.h"

constexpr int64_t kWidth = 64, kMost = 75;  // of the model; tokens of a sequence

struct Layer {
  int64_t singles, blocks, block_tokens, heads, kv_heads, head_width, page_size;
  bool has_norms, has_biases;
  int64_t tokens() const { return singles + blocks * block_tokens; }
  int64_t rows() const { return singles + blocks; }
  int64_t table_width() const { return (kMost + page_size - 1) / page_size; }
  int64_t pages() const { return rows() * table_width() + 1; }  // page 0 is nobody's
  int64_t q_width() const { return heads * head_width; }
  int64_t kv_width() const { return kv_heads * head_width; }
};

// Who the tokens are, and what their sequences have in the pool.
struct Batch {
  std::vector<int32_t> table, positions, slots, row_of;
  std::vector<float> cos, sin;
  Numbers pool;

  Batch(Case& c, const Layer& l)
      : table(l.rows() * l.table_width(), INT32_MAX), positions(l.tokens(), -1), slots(l.tokens()), row_of(l.tokens()),
        cos(l.tokens() * l.head_width / 2), sin(cos), pool(l.pages() * l.page_size * 2 * l.kv_width(), kNan) {
    int64_t t = 0;
    for (int64_t row = 0; row < l.rows(); ++row) {
      const int64_t room = row < l.singles ? 1 : l.block_tokens, used = c.below(4) ? 1 + c.below(int(room)) : 0;
      const int64_t first = c.below(int(kMost - room) + 1), end = used ? first + used : 0;
      for (int64_t p = 0; p * l.page_size < end; ++p)
        table[row * l.table_width() + p] = int32_t(1 + p * l.rows() + row);
      for (int64_t place = 0; place < end && place < first; ++place) {
        const Numbers both = c.draw(2 * l.kv_width());
        std::copy(both.begin(), both.end(), pool.begin() + slot(l, row, place) * 2 * l.kv_width());
      }
      for (int64_t i = 0; i < room; ++i, ++t) {
        row_of[t] = int32_t(row);
        if (i < used) positions[t] = int32_t(first + i), slots[t] = int32_t(slot(l, row, first + i));
      }
    }
    for (size_t i = 0, half = l.head_width / 2; i < cos.size(); ++i) {
      const double angle = positions[i / half] * std::pow(1e4, -double(i % half) / double(half));
      cos[i] = float(std::cos(angle)), sin[i] = float(std::sin(angle));
    }
  }

  int64_t slot(const Layer& l, int64_t row, int64_t place) const {
    return int64_t(table[row * l.table_width() + place / l.page_size]) * l.page_size + place % l.page_size;
  }
};

struct Weights {
  Numbers q, k, v, o, q_norm, k_norm, q_bias, k_bias, v_bias;

  Weights(Case& c, const Layer& l)
      : q(c.draw(kWidth * l.q_width(), 0.2)), k(c.draw(kWidth * l.kv_width(), 0.2)),
        v(c.draw(kWidth * l.kv_width(), 0.2)), o(c.draw(l.q_width() * kWidth, 0.2)),
        q_norm(c.draw(l.has_norms ? l.head_width : 0, 0.2, 1)), k_norm(c.draw(l.has_norms ? l.head_width : 0, 0.2, 1)),
        q_bias(c.draw(l.has_biases ? l.q_width() : 0)), k_bias(c.draw(l.has_biases ? l.kv_width() : 0)),
        v_bias(c.draw(l.has_biases ? l.kv_width() : 0)) {}
};

// Heads of one token as the definition has them: projected, with a bias, normed, rotated; rounded after each.
inline Numbers heads_of(const bf16* row, const Numbers& weights, const Numbers& bias, const Numbers& norm,
                        const float* cos, const float* sin, int64_t depth, int64_t width, int64_t head_width) {
  Numbers out(width);
  for (int64_t i = 0; i < width; ++i) {
    out[i] = rounded(dot(row, weights, i, depth, width));
    if (!bias.empty()) out[i] = rounded(value_of(out[i]) + value_of(bias[i]));
  }
  for (int64_t first = 0; first < width && cos; first += head_width) {
    double squares = 0;
    for (int64_t i = 0; i < head_width; ++i) squares += value_of(out[first + i]) * value_of(out[first + i]);
    for (int64_t i = 0; i < head_width && !norm.empty(); ++i) {
      const bf16 shrunk = rounded(value_of(out[first + i]) / std::sqrt(squares / double(head_width) + 1e-6));
      out[first + i] = rounded(value_of(shrunk) * value_of(norm[i]));
    }
    for (int64_t i = 0, half = head_width / 2; i < half; ++i) {
      const double a = value_of(out[first + i]), b = value_of(out[first + half + i]);
      out[first + i] = rounded(a * cos[i] - b * sin[i]), out[first + half + i] = rounded(b * cos[i] + a * sin[i]);
    }
  }
  return out;
}

// Queries of every token; their keys and values are written to `pool`.
inline std::vector<Numbers> project(const Layer& l, const Weights& w, const Batch& b, const Numbers& hidden,
                                    Numbers& pool) {
  std::vector<Numbers> queries;
  const int64_t h = l.head_width, kv_width = l.kv_width();
  for (int64_t t = 0; t < l.tokens(); ++t) {
    const bf16* row = hidden.data() + t * kWidth;
    const float *cos = b.cos.data() + t * h / 2, *sin = b.sin.data() + t * h / 2;
    queries.push_back(heads_of(row, w.q, w.q_bias, w.q_norm, cos, sin, kWidth, l.q_width(), h));
    const Numbers key = heads_of(row, w.k, w.k_bias, w.k_norm, cos, sin, kWidth, kv_width, h);
    const Numbers value = heads_of(row, w.v, w.v_bias, {}, nullptr, nullptr, kWidth, kv_width, h);
    for (int64_t i = 0; i < kv_width && b.positions[t] >= 0; ++i) {
      bf16* target = pool.data() + b.slots[t] * 2 * kv_width + i / h * 2 * h + i % h;
      target[0] = key[i], target[h] = value[i];
    }
  }
  return queries;
}

// What one head of a token sees of its sequence.
inline Numbers attend(const Layer& l, const Batch& b, const Numbers& pool, const bf16* query, int64_t t, int64_t head) {
  const int64_t h = l.head_width, group = head / (l.heads / l.kv_heads);
  std::vector<const bf16*> keys;
  Exact totals(h), scores;
  double sum = 0, largest = -1e30;
  for (int64_t place = 0; place <= b.positions[t]; ++place) {
    keys.push_back(pool.data() + (b.slot(l, b.row_of[t], place) * l.kv_heads + group) * 2 * h);
    double score = 0;
    for (int64_t i = 0; i < h; ++i) score += value_of(query[i]) * value_of(keys.back()[i]);
    scores.push_back(score / std::sqrt(double(h)));
    largest = std::max(largest, scores.back());
  }
  for (size_t i = 0; i < keys.size(); ++i) {
    const double weight = std::exp(scores[i] - largest);
    sum += weight;
    for (int64_t d = 0; d < h; ++d) totals[d] += weight * value_of(keys[i][h + d]);
  }
  Numbers out(h);
  for (int64_t d = 0; d < h && !keys.empty(); ++d) out[d] = rounded(totals[d] / sum);
  return out;
}

// Accepts the places as they are, and none that lies outside the pool.
inline void check_places(Case& c, const native::AttentionShapes& s, native::AttentionArrays a) {
  bool is_right = native::fit(s) && native::are_in_pool(s, a);
  const int64_t t = std::max_element(a.positions, a.positions + s.num_tokens) - a.positions, last = a.positions[t];
  const int64_t block = t < s.num_singles ? t : s.num_singles + (t - s.num_singles) / s.block_tokens;
  const int32_t num_slots = int32_t(s.pages_per_layer * s.page_size), num_pages = int32_t(s.pages_per_layer);
  const auto is_taken = [&](const int32_t*& array, int64_t size, int64_t place, int32_t value) {
    std::vector<int32_t> other(array, array + size);
    other[place] = value;
    const int32_t* const whole = array;
    array = other.data();
    const bool taken = native::are_in_pool(s, a);
    array = whole;
    return taken;
  };
  for (int32_t slot : {-1, num_slots, INT32_MAX})
    is_right &= last < 0 || !is_taken(a.kv_slots, s.num_tokens, t, slot);
  for (int32_t position : {int32_t(s.table_width * s.page_size), INT32_MAX})
    is_right &= !is_taken(a.positions, s.num_tokens, t, position);
  const int64_t rows = s.num_singles + s.num_blocks, table_size = rows * s.table_width;
  for (int32_t page : {-1, num_pages, INT32_MAX})
    is_right &= last < 0 || !is_taken(a.page_table, table_size, block * s.table_width + last / s.page_size, page);
  native::AttentionShapes wide = s;
  wide.head_width += 16;
  if (is_right && !native::fit(wide)) return;
  ++num_wrong;
  std::printf("%s %d: places that are there are refused, or others are not\n", c.name, c.number);
}

inline const bf16* or_null(const Numbers& numbers) { return numbers.empty() ? nullptr : numbers.data(); }

inline void attention(Case c, const Layer& l) {
  const Weights w(c, l);
  Batch b(c, l);
  const Numbers hidden = c.draw(l.tokens() * kWidth), q = packed(w.q, kWidth, l.q_width()),
                k = packed(w.k, kWidth, l.kv_width()), v = packed(w.v, kWidth, l.kv_width()),
                o = packed(w.o, l.q_width(), kWidth);
  Numbers expected_pool = b.pool;
  std::vector<float> found(l.tokens() * kWidth);
  const native::AttentionShapes shapes{
      l.tokens(), kWidth,    l.heads,  l.kv_heads,     l.head_width,    l.page_size,
      l.pages(),  l.singles, l.blocks, l.block_tokens, l.table_width(), 1e-6f};
  const native::AttentionArrays arrays{
      hidden.data(),      q.data(),            k.data(),          v.data(),      o.data(),       or_null(w.q_norm),
      or_null(w.k_norm),  or_null(w.q_bias),   or_null(w.k_bias), or_null(w.v_bias), b.cos.data(), b.sin.data(),
      b.slots.data(),     b.positions.data(),  b.table.data(),    b.pool.data(), found.data()};
  check_places(c, shapes, arrays);
  native::attention_layer(shapes, arrays);
  const std::vector<Numbers> queries = project(l, w, b, hidden, expected_pool);
  Exact expected;
  for (int64_t t = 0; t < l.tokens(); ++t) {
    Numbers attended;
    for (int64_t head = 0; head < l.heads; ++head) {
      const Numbers one = attend(l, b, expected_pool, queries[t].data() + head * l.head_width, t, head);
      attended.insert(attended.end(), one.begin(), one.end());
    }
    for (int64_t d = 0; d < kWidth; ++d) expected.push_back(dot(attended.data(), w.o, d, l.q_width(), kWidth));
  }
  c.compare("attention", found, expected, 0x1p-6);
  Exact here, there;
  for (size_t i = 0; i < b.pool.size(); ++i) {
    if (expected_pool[i] == kNan && b.pool[i] == kNan) continue;
    here.push_back(value_of(b.pool[i])), there.push_back(value_of(expected_pool[i]));
  }
  c.compare("pool", here, there, 0x1p-8);
}
