// The index of sparse attention of one layer: writes the keys of new tokens, and chooses the tokens that each token sees.
//
// A token with no more than `top_k` tokens before and at its position sees them all, and nothing is scored. Otherwise the
// score of a key is the sum over heads, in their order, of weight * relu(query * key), and the best are taken: of equal
// scores those at lower positions. A token's scores and choice are its own, to the last bit.
#pragma once

#include <algorithm>
#include <cmath>
#include <optional>
#include <vector>

#include "attention.h"
#include "panels.h"
#include "scratch.h"
#include "threads.h"

namespace native {

constexpr int64_t kIndexPiece = 16 * kSpan;  // keys that a thread scores together
constexpr int64_t kScoredTogether = 8;       // tokens that share these keys: a core's cache keeps their queries

struct IndexShapes {
  AttentionShapes batch;                     // of A index heads; nothing is said of KV heads, windows and rules
  int64_t query_latent, head, pairs, top_k;  // R, d, pairs of a head that rotate, K
  float latent_eps, key_eps;
  bool is_interleaved;
  int64_t heads() const { return batch.num_heads; }
};

struct IndexArrays {
  const bf16* hidden;                   // [T, D], normed
  const bf16 *q_a, *q, *k;              // this layer's, packed: [D, R], [R, A * d], [D, d]
  const bf16 *q_a_norm, *q_a_bias;      // [R]; no bias: null
  const bf16 *k_norm, *k_norm_bias;     // [d]
  const float* weights;                 // [D, A], of heads
  const float *cos, *sin;               // [T, pairs]
  const int32_t *kv_slots, *positions;  // [T]
  const int32_t* page_table;            // [singles + blocks, P]
  bf16* pool;                           // this layer's pages, [pages, page, 1, d]; null if they are of 8 bits
  Fp8* narrow_pool;                     // the same in e4m3, or null
  int32_t* chosen;                      // [T, K], ascending, -1 behind
  Adapters q_a_adapters;
};

struct IndexRows {
  Scratch<bf16> keys, query_latents, queries;  // [T, d], [T, R], [T, A, d]
  Scratch<float> weights;                      // [T, A]
  AdaptedRows adapted;
  std::vector<int64_t> first;                  // [T], place of each one's scores
  Scratch<float> scores;                       // of tokens that do not see all
};

// Norms a row to mean 0 and variance 1, then scales and shifts it.
inline void layer_norm_row(bf16* row, const bf16* scale, const bf16* bias, int64_t width, float eps) {
  F16 sums = zeros(), squares = zeros();
  for (int64_t i = 0; i < width; i += 16) sums = sums + wide(row + i, lanes_of(i, width));
  const F16 mean = all(total(sums) / width);
  const auto centred = [&](int64_t i) {
    const Mask lanes = lanes_of(i, width);
    return either(lanes, wide(row + i, lanes) - mean, zeros());
  };
  for (int64_t i = 0; i < width; i += 16) squares = fma(centred(i), centred(i), squares);
  const F16 shrink = all(1.0f / std::sqrt(total(squares) / width + eps));
  for (int64_t i = 0; i < width; i += 16) {
    const Mask lanes = lanes_of(i, width);
    store(row + i, centred(i) * shrink * wide(scale + i, lanes) + wide(bias + i, lanes), lanes);
  }
}

// The nearest number of e4m3, of two the even one; what is beyond 448 is 448.
inline Fp8 narrowed(float x) {
  const int8_t sign = int8_t(bits_of<uint32_t>(x) >> 24 & 0x80);
  if (!(x == x)) return {int8_t(sign | 0x7f)};
  const float size = std::min(std::fabs(x), 448.0f);
  if (size < 0x1p-6f) return {int8_t(sign | int8_t(std::nearbyint(size * 0x1p9f)))};  // subnormal
  const uint32_t bits = bits_of<uint32_t>(size), rounded = (bits + 0x7ffff + (bits >> 20 & 1)) >> 20;
  return {int8_t(sign | int8_t(rounded - (120 << 3)))};
}

// Widens a key of e4m3; bfloat16 holds all of its numbers. `wide` makes 480 of NaN.
inline void widen_key(const Fp8* from, bf16* to, int64_t width) {
  const auto widened = [](const Fp8* numbers) {
    const F16 x = wide(numbers) * all(kUnit<Fp8>);
    return either(Mask(is_more(x, all(448.0f)) | is_more(all(-448.0f), x)), all(NAN), x);
  };
  int64_t i = 0;
  for (; i + 16 <= width; i += 16) store(to + i, widened(from + i));
  if (i == width) return;
  Fp8 rest[16] = {};
  std::copy(from + i, from + width, rest);
  store(to + i, widened(rest), lanes_of(i, width));
}

inline void rotate_head(bf16* head, int64_t t, const IndexShapes& s, const IndexArrays& a) {
  (s.is_interleaved ? rotate_neighbours : rotate_halves)(head, a.cos + t * s.pairs, a.sin + t * s.pairs, s.pairs);
}

// Keys of all tokens, into the pool.
inline void write_keys(const IndexShapes& s, const IndexArrays& a, IndexRows& rows) {
  const int64_t T = s.batch.num_tokens;
  bf16* const keys = rows.keys.sized(T * s.head);
  multiply_all(a.hidden, T, s.batch.width, a.k, s.head, keys);
  for_pieces(T, 8, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      if (a.positions[t] < 0) continue;  // padding: all of it has the same slot
      bf16* const key = keys + t * s.head;
      layer_norm_row(key, a.k_norm, a.k_norm_bias, s.head, s.key_eps);
      rotate_head(key, t, s, a);
      const int64_t first = int64_t(a.kv_slots[t]) * s.head;
      if (a.pool) {
        std::copy_n(key, s.head, a.pool + first);
        continue;
      }
      for (int64_t i = 0; i < s.head; ++i) a.narrow_pool[first + i] = narrowed(narrow(key[i]));
    }
  });
}

// Queries of all tokens, and the weights of their heads, times the scale of products.
inline void make_queries(const IndexShapes& s, const IndexArrays& a, IndexRows& rows) {
  const int64_t T = s.batch.num_tokens, R = s.query_latent, width = s.heads() * s.head;
  bf16 *const latents = rows.query_latents.sized(T * R), *const queries = rows.queries.sized(T * width);
  float* const weights = rows.weights.sized(T * s.heads());
  rows.adapted.find(a.q_a_adapters, a.hidden, s.batch.width, T);
  project(a.hidden, T, s.batch.width, {{a.q_a, a.q_a_bias, latents, R, &rows.adapted}});
  for_pieces(T, 8, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) norm_row(latents + t * R, {a.q_a_norm}, latents + t * R, R, s.latent_eps);
  });
  multiply_all(latents, T, R, a.q, width, queries);
  const Router of_heads{a.weights, nullptr, false, s.batch.width, s.heads()};
  const float scale = 1.0f / std::sqrt(float(s.heads() * s.head));
  for_pieces(T, 4, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t h = 0; h < s.heads(); ++h) rotate_head(queries + t * width + h * s.head, t, s, a);
      float* const of_token = weights + t * s.heads();
      for (int64_t h = 0; h < s.heads(); h += 16)
        score_chunks<1, 1>(a.hidden + t * s.batch.width, of_heads, h, of_token);
      for (int64_t h = 0; h < s.heads(); ++h) of_token[h] *= scale;
    }
  });
}

// Does as `find_span`, of a pool of 8 bits: its keys are widened into `keys`, [span, d].
inline void find_narrow_span(const int32_t* pages, int64_t start, Range here, const IndexShapes& s, const IndexArrays& a,
                             bf16* keys, SpanBuffers& b) {
  std::fill(b.rows, b.rows + kSpan, nullptr);
  const int64_t page_size = s.batch.page_size;
  for (int64_t key = here.begin; key < here.end; ++key) {
    const int64_t row = int64_t(pages[key / page_size]) * page_size + key % page_size;
    bf16* const to = keys + (key - start) * s.head;
    widen_key(a.narrow_pool + row * s.head, to, s.head);
    b.rows[key - start] = to;
  }
}

inline int64_t block_of(int64_t t, const AttentionShapes& s) {
  return t < s.num_singles ? t : s.num_singles + (t - s.num_singles) / s.block_tokens;
}

// Scores of neighbouring tokens of a block for the keys of `here`, which begins with a span, as far as each sees them.
inline void score_keys(BlockTokens tokens, Range here, const IndexShapes& s, const IndexArrays& a, const IndexRows& rows) {
  thread_local SpanBuffers b;
  thread_local Scratch<bf16> widened;
  const PagedKeys kv{a.pool, s.head, s.batch.page_size, s.head, s.head, 0, 0};
  const int32_t* const pages = a.page_table + block_of(tokens.first, s.batch) * s.batch.table_width;
  b.keys.resize((s.head / 2 + 15) / 16 * 16 * kPanel);
  std::optional<TileScope> tiles;
  if (has_tiles) tiles.emplace();
  const bf16* panels[1] = {reinterpret_cast<const bf16*>(b.keys.data())};
  for (int64_t start = here.begin; start < here.end; start += kSpan) {
    const Range span{start, std::min(here.end, start + kSpan)};
    if (a.pool)
      find_span(pages, start, span, kv, b);
    else
      find_narrow_span(pages, start, span, s, a, widened.sized(kSpan * s.head), b);
    for (int64_t key = start; key < std::min(start + kSpan, here.end); key += kPanel) {
      load_keys(key - start, kv, b);
      for (int64_t t = tokens.first; t < tokens.first + tokens.count; ++t) {
        const int64_t end = std::min(here.end, int64_t(a.positions[t]) + 1);
        if (end <= key) continue;
        const float* const weights = rows.weights.data() + t * s.heads();
        F16 low = zeros(), high = zeros();
        multiply_rows(rows.queries.data() + t * s.heads() * s.head, s.head, s.heads(), s.head, panels,
                      [&](int64_t h, const Pair(&products)[1]) {
                        const F16 weight = all(weights[h]);
                        low = fma(weight, most(zeros(), products[0].low), low);  // the second one, if it is NaN
                        high = fma(weight, most(zeros(), products[0].high), high);
                      }, tiles ? &*tiles : nullptr);
        float* const target = rows.scores.data() + rows.first[t] + key;
        put(target, lanes_of(key, end), low);
        if (key + 16 < end) put(target + 16, lanes_of(key + 16, end), high);
      }
    }
  }
}

// Orders by descending score. -0 is 0, and NaN is infinite, so that NaN is chosen and reaches the output.
inline uint32_t order_of(float score) {
  const float plain = score == score ? score + 0.0f : INFINITY;
  const uint32_t bits = bits_of<uint32_t>(plain);
  return bits >> 31 ? bits : ~(bits | 0x80000000u);
}

// The positions of the best `top_k` of `count` scores, of equal ones the lower, ascending.
//
// Many scores are counted by the upper bits of their order first: those of one bin alone are then put in order.
inline void take_best(const float* scores, int64_t count, int64_t top_k, int32_t* chosen) {
  constexpr int kShift = 20;
  constexpr int64_t kBins = int64_t(1) << (32 - kShift), kTallies = 4;  // neighbours are often of one bin
  thread_local std::vector<uint32_t> orders, tallies;
  thread_local std::vector<uint64_t> in_bin;
  orders.resize(count), in_bin.clear();
  for (int64_t i = 0; i < count; ++i) orders[i] = order_of(scores[i]);
  const bool has_bins = count >= kBins;
  uint32_t bin = 0;
  int64_t left = top_k;  // that are taken from the bin
  if (has_bins) {
    tallies.assign(kTallies * kBins, 0);
    for (int64_t i = 0; i < count; ++i) ++tallies[i % kTallies * kBins + (orders[i] >> kShift)];
    for (;; ++bin) {
      int64_t here = 0;
      for (int64_t i = 0; i < kTallies; ++i) here += tallies[i * kBins + bin];
      if (here >= left) break;
      left -= here;
    }
  }
  for (int64_t i = 0; i < count; ++i)
    if (!has_bins || orders[i] >> kShift == bin) in_bin.push_back(uint64_t(orders[i]) << 32 | uint64_t(i));
  std::nth_element(in_bin.begin(), in_bin.begin() + (left - 1), in_bin.end());
  const uint64_t last = in_bin[left - 1];
  for (int64_t i = 0; i < count; ++i)
    if ((uint64_t(orders[i]) << 32 | uint64_t(i)) <= last) *chosen++ = int32_t(i);
}

inline void see_all(int64_t position, int64_t top_k, int32_t* chosen) {
  for (int64_t i = 0; i < top_k; ++i) chosen[i] = i <= position ? int32_t(i) : -1;
}

// Tokens of a block that are scored together, and for which keys.
struct IndexPiece {
  BlockTokens tokens;
  Range keys;
};

// The pieces of all tokens that do not see all others: neighbours of a block share one.
inline std::vector<IndexPiece> cut_into_pieces(const IndexShapes& s, const IndexArrays& a) {
  std::vector<IndexPiece> pieces;
  const auto is_scored = [&](int64_t t) { return int64_t(a.positions[t]) >= s.top_k; };
  for (int64_t t = 0, end; t < s.batch.num_tokens; t = end) {
    end = t + 1;
    if (!is_scored(t)) continue;
    int64_t count = int64_t(a.positions[t]) + 1;
    for (; end < std::min(t + kScoredTogether, s.batch.num_tokens); ++end) {
      if (!is_scored(end) || block_of(end, s.batch) != block_of(t, s.batch)) break;
      count = std::max(count, int64_t(a.positions[end]) + 1);
    }
    for (int64_t start = 0; start < count; start += kIndexPiece)
      pieces.push_back({{t, end - t}, {start, std::min(count, start + kIndexPiece)}});
  }
  return pieces;
}

inline void choose_tokens(const IndexShapes& s, const IndexArrays& a) {
  thread_local IndexRows rows_here;
  IndexRows& rows = rows_here;
  write_keys(s, a, rows);
  rows.first.assign(s.batch.num_tokens, 0);
  int64_t num_scores = 0;
  for (int64_t t = 0; t < s.batch.num_tokens; ++t) {
    rows.first[t] = num_scores;
    if (a.positions[t] >= s.top_k) num_scores += int64_t(a.positions[t]) + 1;
    else see_all(a.positions[t], s.top_k, a.chosen + t * s.top_k);
  }
  if (num_scores == 0) return;
  make_queries(s, a, rows);
  rows.scores.sized(num_scores);
  const std::vector<IndexPiece> pieces = cut_into_pieces(s, a);
  for_each(int64_t(pieces.size()), [&](int64_t i) { score_keys(pieces[i].tokens, pieces[i].keys, s, a, rows); });
  for_each(s.batch.num_tokens, [&](int64_t t) {
    if (a.positions[t] < s.top_k) return;
    take_best(rows.scores.data() + rows.first[t], int64_t(a.positions[t]) + 1, s.top_k, a.chosen + t * s.top_k);
  });
}

}  // namespace native
