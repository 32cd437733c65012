// One layer of attention beside its definition, over pages of several sequences.
#pragma once

#include <algorithm>
#include <array>

#include "attention.h"
#include "case.h"
#include "checks.h"

constexpr int64_t kWidth = 80, kMost = 75;  // of the model; tokens of a sequence

struct Layer {
  int64_t singles, blocks, block_tokens, heads, kv_heads, head_width, page_size;
  bool has_norms, has_biases, has_sinks, is_norm_of_all, norms_after, is_interleaved;
  int64_t rotated_pairs, window;
  float clip;
  int64_t gate_width;  // of all heads, or one for each; 0: no gates
  bool has_softplus;
  int64_t value_width;  // of a head; 0: as its key
  float value_scale = 1;
  bool norms_values = false;
  int64_t chosen_size = 0;  // keys of a block of chosen keys; 0: a token sees all
  int64_t num_chosen() const { return chosen_size ? (kMost + chosen_size - 1) / chosen_size : 0; }
  int64_t q_norm_width() const { return !has_norms ? 0 : is_norm_of_all ? q_width() : head_width; }
  int64_t k_norm_width() const { return !has_norms ? 0 : is_norm_of_all ? k_width() : head_width; }
  int64_t tokens() const { return singles + blocks * block_tokens; }
  int64_t rows() const { return singles + blocks; }
  int64_t table_width() const { return (kMost + page_size - 1) / page_size; }
  int64_t pages() const { return rows() * table_width() + 1; }  // page 0 is nobody's
  int64_t q_width() const { return heads * head_width; }
  int64_t k_width() const { return kv_heads * head_width; }
  int64_t value() const { return value_width ? value_width : head_width; }
  int64_t v_width() const { return kv_heads * value(); }
  int64_t row_width() const { return k_width() + v_width(); }
  int64_t out_width() const { return heads * value(); }
};

// With knobs of any values.
inline Layer layer_of(Case& c, Layer l) {
  for (bool* knob : {&l.has_norms, &l.has_biases, &l.has_sinks, &l.is_norm_of_all, &l.norms_after, &l.is_interleaved})
    *knob = c.below(2);
  l.rotated_pairs = c.below(2) ? l.head_width / 2 : c.below(int(l.head_width / 2) + 1);
  l.window = c.below(2) ? 0 : 1 + c.below(50);
  l.clip = c.below(3) ? 0.0f : 0.7f;
  l.value_width = c.below(2) ? 0 : 2 * (1 + c.below(int(l.head_width))), l.value_scale = c.below(3) ? 1.0f : 0.707f;
  l.norms_values = c.below(2), l.chosen_size = c.below(2) ? 0 : 1 + c.below(70);
  l.gate_width = std::array{int64_t(0), l.heads, l.out_width()}[c.below(3)], l.has_softplus = c.below(2);
  return l;
}

// Who the tokens are, and what their sequences have in the pool.
struct Batch {
  std::vector<int32_t> table, positions, slots, row_of;
  std::vector<int32_t> chosen;  // [T, KV heads, blocks], ascending, -1 behind
  std::vector<float> cos, sin;
  Numbers pool;

  Batch(Case& c, const Layer& l)
      : table(l.rows() * l.table_width(), INT32_MAX), positions(l.tokens(), -1), slots(l.tokens()), row_of(l.tokens()),
        chosen(l.tokens() * l.kv_heads * l.num_chosen(), -1), cos(l.tokens() * l.rotated_pairs), sin(cos), pool(l.pages() * l.page_size * l.row_width(), kNan) {
    int64_t t = 0;
    for (int64_t row = 0; row < l.rows(); ++row) {
      const int64_t room = row < l.singles ? 1 : l.block_tokens, used = c.below(4) ? 1 + c.below(int(room)) : 0;
      const int64_t first = c.below(int(kMost - room) + 1), end = used ? first + used : 0;
      const int64_t first_seen = l.window ? std::max<int64_t>(0, first - l.window + 1) : 0;
      for (int64_t p = first_seen / l.page_size; p * l.page_size < end; ++p)
        table[row * l.table_width() + p] = int32_t(1 + p * l.rows() + row);
      for (int64_t place = first_seen; place < end && place < first; ++place) {
        const Numbers both = c.draw(l.row_width());
        std::copy(both.begin(), both.end(), pool.begin() + slot(l, row, place) * l.row_width());
      }
      for (int64_t i = 0; i < room; ++i, ++t) {
        row_of[t] = int32_t(row);
        if (i < used) positions[t] = int32_t(first + i), slots[t] = int32_t(slot(l, row, first + i));
      }
    }
    for (int64_t i = 0; i < l.tokens() * l.kv_heads && l.chosen_size; ++i) {  // its own block, and others before it
      int32_t* next = chosen.data() + i * l.num_chosen();
      const int64_t own = positions[i / l.kv_heads] / l.chosen_size;
      for (int64_t number = 0; number <= own && positions[i / l.kv_heads] >= 0; ++number)
        if (number == own || c.below(2)) *next++ = int32_t(number);
    }
    for (size_t i = 0, half = l.rotated_pairs; i < cos.size(); ++i) {
      const double angle = positions[i / half] * std::pow(1e4, -double(i % half) / double(half));
      cos[i] = float(std::cos(angle)), sin[i] = float(std::sin(angle));
    }
  }

  int64_t slot(const Layer& l, int64_t row, int64_t place) const {
    return int64_t(table[row * l.table_width() + place / l.page_size]) * l.page_size + place % l.page_size;
  }
};

// Whether a token sees a position with the heads of a KV head.
inline bool is_chosen(const Layer& l, const Batch& b, int64_t t, int64_t kv_head, int64_t place) {
  const int32_t* const numbers = b.chosen.data() + (t * l.kv_heads + kv_head) * l.num_chosen();
  return !l.chosen_size || std::count(numbers, numbers + l.num_chosen(), int32_t(place / l.chosen_size));
}

struct Weights {
  Numbers q, k, v, o, q_norm, k_norm, q_bias, k_bias, v_bias, sinks, gate;

  Weights(Case& c, const Layer& l)
      : q(c.draw(kWidth * l.q_width(), 0.2)), k(c.draw(kWidth * l.k_width(), 0.2)),
        v(c.draw(kWidth * l.v_width(), 0.2)), o(c.draw(l.out_width() * kWidth, 0.2)),
        q_norm(c.draw(l.q_norm_width(), 0.2, 1)), k_norm(c.draw(l.k_norm_width(), 0.2, 1)),
        q_bias(c.draw(l.has_biases ? l.q_width() : 0)), k_bias(c.draw(l.has_biases ? l.k_width() : 0)),
        v_bias(c.draw(l.has_biases ? l.v_width() : 0)), sinks(c.draw(l.has_sinks ? l.heads : 0)),
        gate(c.draw(kWidth * l.gate_width, 0.2)) {}
};

inline void norm(Numbers& heads, const Numbers& scale) {
  const int64_t width = int64_t(scale.size());
  for (int64_t first = 0; width && first < int64_t(heads.size()); first += width) {
    double squares = 0;
    for (int64_t i = 0; i < width; ++i) squares += value_of(heads[first + i]) * value_of(heads[first + i]);
    for (int64_t i = 0; i < width; ++i) {
      const bf16 shrunk = rounded(value_of(heads[first + i]) / std::sqrt(squares / double(width) + 1e-6));
      heads[first + i] = rounded(value_of(shrunk) * value_of(scale[i]));
    }
  }
}

// Heads of one token as the definition has them: projected, with a bias, normed, bounded, rotated; rounded after each.
inline Numbers heads_of(const Layer& l, const bf16* row, const Numbers& weights, const Numbers& bias,
                        const Numbers& scale, const float* cos, const float* sin, int64_t width) {
  Numbers out(width);
  for (int64_t i = 0; i < width; ++i) {
    out[i] = rounded(dot(row, weights, i, kWidth, width));
    if (!bias.empty()) out[i] = rounded(value_of(out[i]) + value_of(bias[i]));
  }
  if (!l.norms_after) norm(out, scale);
  const double bound = value_of(rounded(double(l.clip)));
  for (bf16& each : out)
    if (bound > 0) each = rounded(std::clamp(value_of(each), -bound, bound));
  for (int64_t first = 0; first < width && cos; first += l.head_width)
    for (int64_t i = 0; i < l.rotated_pairs; ++i) {
      const int64_t one = first + (l.is_interleaved ? 2 * i : i), two = one + (l.is_interleaved ? 1 : l.rotated_pairs);
      const double a = value_of(out[one]), b = value_of(out[two]);
      out[one] = rounded(a * cos[i] - b * sin[i]), out[two] = rounded(b * cos[i] + a * sin[i]);
    }
  if (l.norms_after) norm(out, scale);
  return out;
}

// Queries of every token; their keys and values are written to `pool`.
inline std::vector<Numbers> project(const Layer& l, const Weights& w, const Batch& b, const Numbers& hidden,
                                    Numbers& pool) {
  std::vector<Numbers> queries;
  const int64_t h = l.head_width, v = l.value();
  const Numbers ones(l.norms_values ? v : 0, rounded(1.0));
  Layer of_values = l;
  of_values.norms_after = false;
  for (int64_t t = 0; t < l.tokens(); ++t) {
    const bf16* row = hidden.data() + t * kWidth;
    const float *cos = b.cos.data() + t * l.rotated_pairs, *sin = b.sin.data() + t * l.rotated_pairs;
    queries.push_back(heads_of(l, row, w.q, w.q_bias, w.q_norm, cos, sin, l.q_width()));
    const Numbers key = heads_of(l, row, w.k, w.k_bias, w.k_norm, cos, sin, l.k_width());
    Numbers value = heads_of(of_values, row, w.v, w.v_bias, ones, nullptr, nullptr, l.v_width());
    for (bf16& each : value) each = rounded(value_of(each) * double(l.value_scale));
    for (int64_t g = 0; g < l.kv_heads && b.positions[t] >= 0; ++g) {
      const auto target = pool.begin() + b.slots[t] * l.row_width() + g * (h + v);
      std::copy_n(key.begin() + g * h, h, target), std::copy_n(value.begin() + g * v, v, target + h);
    }
  }
  return queries;
}

// What one head of a token sees of its sequence.
inline Numbers attend(const Layer& l, const Batch& b, const Weights& w, const Numbers& pool, const bf16* query, int64_t t,
                      int64_t head) {
  const int64_t h = l.head_width, v = l.value(), group = head / (l.heads / l.kv_heads);
  std::vector<const bf16*> keys;
  Exact totals(v), scores;
  double sum = 0, largest = l.has_sinks ? value_of(w.sinks[head]) : -1e30;
  const int64_t first = l.window ? std::max<int64_t>(0, b.positions[t] - l.window + 1) : 0;
  for (int64_t place = first; place <= b.positions[t]; ++place) {
    if (!is_chosen(l, b, t, group, place)) continue;
    keys.push_back(pool.data() + (b.slot(l, b.row_of[t], place) * l.kv_heads + group) * (h + v));
    double score = 0;
    for (int64_t i = 0; i < h; ++i) score += value_of(query[i]) * value_of(keys.back()[i]);
    scores.push_back(score / std::sqrt(double(h)));
    largest = std::max(largest, scores.back());
  }
  if (l.has_sinks) sum = std::exp(value_of(w.sinks[head]) - largest);
  for (size_t i = 0; i < keys.size(); ++i) {
    const double weight = std::exp(scores[i] - largest);
    sum += weight;
    for (int64_t d = 0; d < v; ++d) totals[d] += weight * value_of(keys[i][h + d]);
  }
  Numbers out(v);
  for (int64_t d = 0; d < v && !keys.empty(); ++d) out[d] = rounded(totals[d] / sum);
  return out;
}

// Accepts the places as they are, and none that lies outside the pool.
inline void check_places(Case& c, const native::AttentionShapes& s, native::AttentionArrays a) {
  bool is_right = native::fit(s) && native::are_in_pool(s, a);
  const int64_t t = std::max_element(a.positions, a.positions + s.num_tokens) - a.positions, last = a.positions[t];
  const int64_t block = t < s.num_singles ? t : s.num_singles + (t - s.num_singles) / s.block_tokens;
  const int32_t num_slots = int32_t(s.num_pages * s.page_size), num_pages = int32_t(s.num_pages);
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
  wide.rules.rotated_pairs = wide.rules.head_width / 2 + 1;
  native::AttentionShapes odd = s;
  odd.rules.head_width += 1, odd.rules.rotated_pairs = 0;
  if (is_right && !native::fit(wide) && !native::fit(odd)) return;
  ++num_wrong;
  std::printf("%s %d: places that are there are refused, or others are not\n", c.name, c.number);
}

inline const bf16* or_null(const Numbers& numbers) { return numbers.empty() ? nullptr : numbers.data(); }

// Attended heads of one token times their gates.
inline void gate_heads(const Layer& l, const bf16* row, const Weights& w, Numbers& attended) {
  for (int64_t i = 0; i < l.out_width() && l.gate_width; ++i) {
    const int64_t column = l.gate_width == l.out_width() ? i : i / l.value();
    const double raw = value_of(rounded(dot(row, w.gate, column, kWidth, l.gate_width)));
    attended[i] = rounded(value_of(attended[i]) * (l.has_softplus ? std::log1p(std::exp(raw)) : 1 / (1 + std::exp(-raw))));
  }
}

inline void attention(Case c, const Layer& l) {
  const Weights w(c, l);
  Batch b(c, l);
  const Numbers hidden = c.draw(l.tokens() * kWidth), q = packed(w.q, kWidth, l.q_width()),
                k = packed(w.k, kWidth, l.k_width()), v = packed(w.v, kWidth, l.v_width()),
                o = packed(w.o, l.out_width(), kWidth),
                gate = l.gate_width ? packed(w.gate, kWidth, l.gate_width) : Numbers();
  Numbers expected_pool = b.pool;
  std::vector<float> found(l.tokens() * kWidth);
  const native::AttentionShapes shapes{
      l.tokens(),  kWidth,   l.heads,        l.kv_heads,      l.page_size, l.pages(),
      l.singles,   l.blocks, l.block_tokens, l.table_width(), l.window,    1 / std::sqrt(float(l.head_width)),
      {l.head_width, l.rotated_pairs, l.is_interleaved, l.norms_after, l.clip, 1e-6f, l.norms_values},
      l.value(), l.value_scale, l.gate_width, l.has_softplus, l.num_chosen(), l.chosen_size};
  native::AttentionArrays arrays{};
  arrays.hidden = hidden.data(), arrays.q = q.data(), arrays.k = k.data(), arrays.v = v.data(), arrays.o = o.data();
  arrays.gate = or_null(gate);
  arrays.q_norm = {{or_null(w.q_norm)}, l.q_norm_width()}, arrays.k_norm = {{or_null(w.k_norm)}, l.k_norm_width()};
  arrays.q_bias = or_null(w.q_bias), arrays.k_bias = or_null(w.k_bias), arrays.v_bias = or_null(w.v_bias);
  arrays.sinks = or_null(w.sinks), arrays.cos = b.cos.data(), arrays.sin = b.sin.data();
  arrays.kv_slots = b.slots.data(), arrays.positions = b.positions.data(), arrays.page_table = b.table.data();
  arrays.chosen = l.chosen_size ? b.chosen.data() : nullptr;
  arrays.pool = b.pool.data(), arrays.out = found.data();
  check_places(c, shapes, arrays);
  native::attention_layer(shapes, arrays);
  const std::vector<Numbers> queries = project(l, w, b, hidden, expected_pool);
  Exact expected;
  for (int64_t t = 0; t < l.tokens(); ++t) {
    Numbers attended;
    for (int64_t head = 0; head < l.heads; ++head) {
      const Numbers one = attend(l, b, w, expected_pool, queries[t].data() + head * l.head_width, t, head);
      attended.insert(attended.end(), one.begin(), one.end());
    }
    gate_heads(l, hidden.data() + t * kWidth, w, attended);
    for (int64_t d = 0; d < kWidth; ++d) expected.push_back(dot(attended.data(), w.o, d, l.out_width(), kWidth));
  }
  c.compare("attention", found, expected, 0x1p-6);
  Exact here, there;
  for (size_t i = 0; i < b.pool.size(); ++i) {
    if (expected_pool[i] == kNan && b.pool[i] == kNan) continue;
    here.push_back(value_of(b.pool[i])), there.push_back(value_of(expected_pool[i]));
  }
  c.compare("pool", here, there, 0x1p-8);
}
