// Multi-head latent attention of one layer over the paged pool: projections, norms, rotation, writing latents, attending
// to them with queries that are multiplied into the latent space, and the output product, each step on all threads.
//
// The pool holds one row [C | r] of each token: its normed latent, value of all heads, and the rotated key that they
// share. Widths of latents and heads are any even numbers.
#pragma once

#include <algorithm>
#include <vector>

#include "attention.h"
#include "panels.h"
#include "scratch.h"
#include "threads.h"

namespace native {

constexpr int64_t kAbsorbedPanels = 4;      // of one head that are multiplied together
constexpr int64_t kMostRowsTogether = 256;  // that attend: their sums are to stay in a core's cache
constexpr int64_t kFewestRows = 4;          // fewer would load keys more often than they save
constexpr int64_t kPiecesPerThread = 2;     // of attention that there should be

struct LatentShapes {
  AttentionShapes batch;  // of A query heads; nothing is said of KV heads, windows and rules for heads
  int64_t nope, rope, value, latent, query_latent;  // n, r, v, C, R; R 0: queries come from the hidden rows
  float norm_eps;
  bool is_interleaved;  // rotated pairs are (2 i, 2 i + 1), not (i, i + r / 2)
  int64_t head() const { return nope + rope; }
  int64_t cached() const { return latent + rope; }
  int64_t heads() const { return batch.num_heads; }
};

struct LatentArrays {
  const bf16* hidden;                            // [T, D], normed
  const bf16 *q_a, *q_b, *kv_a, *k_b, *v_b, *o;  // this layer's, packed; without q_a, q_b is [D, A * (n + r)]
  const bf16 *q_a_norm, *kv_a_norm;              // [R], [C]
  const bf16 *q_a_bias, *kv_a_bias;              // [R], [C + r]; null: none
  const float *cos, *sin;                        // [T, r / 2]
  const int32_t *kv_slots, *positions;           // [T]
  const int32_t* page_table;                     // [singles + blocks, P]
  const float* query_scale;                      // [T], factors of queries; null: 1
  const int32_t* chosen;                         // [T, K], positions that tokens see, -1 behind; null: all
  int64_t num_chosen;                            // K
  bf16* pool;                                    // this layer's pages, [pages, page, 1, C + r]
  float* out;                                    // [T, D]
  const bf16* gate = nullptr;  // [D, A], packed, of the heads' outputs; null: none
  Adapters q_a_adapters, q_b_adapters, kv_a_adapters, k_b_adapters, v_b_adapters, o_adapters, gate_adapters;
};

// Rows of the steps between.
struct LatentRows {
  Scratch<bf16> latents, query_latents, queries;  // [T, C + r], [T, R], [T, A, n + r]
  Scratch<bf16> absorbed, attended, values;       // [T, A, C + r], [T, A, C], [T, A, v]
  Scratch<bf16> gates;                            // [T, A]
  AdaptedRows keys_adapted, queries_adapted, gates_adapted;
  Scratch<float> ranks;                           // of each head of the tokens with adapters, [T, A, rank]

  void fit(const LatentShapes& s) {
    const int64_t T = s.batch.num_tokens, A = s.heads();
    latents.sized(T * s.cached());
    query_latents.sized(T * s.query_latent);
    queries.sized(T * A * s.head());
    absorbed.sized(T * A * s.cached());
    attended.sized(T * A * s.latent);
    values.sized(T * A * s.value);
  }
};

// One panel of a packed matrix, and where its results go: rows of `width` columns.
struct LatentProduct {
  const bf16 *matrix, *bias;
  int64_t depth, width;
  bf16* target;
  const AdaptedRows& adapted;

  void run(const bf16* left, int64_t num_rows, int64_t panel) const {
    const int64_t column = panel * kPanel;
    multiply_panel(left, num_rows, depth, panel_of(matrix, depth, width, panel), [&](int64_t t, Pair result) {
      adapted.add(result, t, column);
      if (bias) add_bias(result, bias, column, width);
      store_columns(target + t * width, result, column, width);
    });
  }
};

// Latents of keys and of queries; or the queries themselves, where they have none. Only keys if no token attends.
inline void project_down(const LatentShapes& s, const LatentArrays& a, LatentRows& rows) {
  const int64_t depth = s.batch.width;
  rows.keys_adapted.find(a.kv_a_adapters, a.hidden, depth, s.batch.num_tokens);
  if (!s.batch.stores_only)
    rows.queries_adapted.find(s.query_latent > 0 ? a.q_a_adapters : a.q_b_adapters, a.hidden, depth, s.batch.num_tokens);
  const LatentProduct keys{a.kv_a, a.kv_a_bias, depth, s.cached(), rows.latents.data(), rows.keys_adapted};
  const LatentProduct queries = s.query_latent > 0
      ? LatentProduct{a.q_a, a.q_a_bias, depth, s.query_latent, rows.query_latents.data(), rows.queries_adapted}
      : LatentProduct{a.q_b, nullptr, depth, s.heads() * s.head(), rows.queries.data(), rows.queries_adapted};
  const int64_t panels_of_keys = num_panels(keys.width);
  for_each(panels_of_keys + (s.batch.stores_only ? 0 : num_panels(queries.width)), [&](int64_t item) {
    if (item < panels_of_keys) keys.run(a.hidden, s.batch.num_tokens, item);
    else queries.run(a.hidden, s.batch.num_tokens, item - panels_of_keys);
  });
}

// Rotates what `source` has, into `target`.
inline void rotate_into(bf16* target, const bf16* source, int64_t t, const LatentShapes& s, const LatentArrays& a) {
  const int64_t pairs = s.rope / 2;
  std::copy_n(source, s.rope, target);
  (s.is_interleaved ? rotate_neighbours : rotate_halves)(target, a.cos + t * pairs, a.sin + t * pairs, pairs);
}

// Norms both latents, and writes those of keys to the pool, with the rotated key.
inline void norm_latents(const LatentShapes& s, const LatentArrays& a, LatentRows& rows) {
  for_pieces(s.batch.num_tokens, 8, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      bf16* const query = rows.query_latents.data() + t * s.query_latent;
      if (s.query_latent > 0 && !s.batch.stores_only) norm_row(query, {a.q_a_norm}, query, s.query_latent, s.norm_eps);
      if (a.positions[t] < 0) continue;  // padding: all of it has the same slot
      const bf16* const latent = rows.latents.data() + t * s.cached();
      bf16* const target = a.pool + a.kv_slots[t] * s.cached();
      norm_row(latent, {a.kv_a_norm}, target, s.latent, s.norm_eps);
      rotate_into(target + s.latent, latent + s.latent, t, s, a);
    }
  });
}

inline Pair scaled(const Pair& pair, float factor) { return {pair.low * all(factor), pair.high * all(factor)}; }

inline void scale_row(bf16* row, int64_t width, float factor) {
  for (int64_t i = 0; i < width; i += 16) {
    const Mask lanes = lanes_of(i, width);
    store(row + i, wide(row + i, lanes) * all(factor), lanes);
  }
}

// Ranks of the adapters of a matrix between heads and latents, [T, A, rank]; `of_head(h)` is how a head reads it, and
// `rows` its inputs, [T, A, stride].
template <class OfHead>
inline const float* find_ranks(const LatentShapes& s, const Adapters& adapters, const bf16* rows, int64_t stride,
                               Scratch<float>& scratch, OfHead&& of_head) {
  if (!adapters.a) return nullptr;
  float* const ranks = scratch.sized(s.batch.num_tokens * s.heads() * adapters.rank);
  for_each(s.batch.num_tokens * s.heads(), [&](int64_t item) {
    const int64_t t = item / s.heads();
    if (adapters.change(t))
      reduce_row(of_head(item % s.heads()), adapters.rank, adapters.slots[t], rows + item * stride,
                 ranks + item * adapters.rank);
  });
  return ranks;
}

// Multiplies the part of each head that has no position into the latent space, and rotates the other; both times the
// factor of the token's queries, before they are rounded.
inline void absorb(const LatentShapes& s, const LatentArrays& a, LatentRows& rows) {
  const int64_t depth = s.heads() * s.nope, panels = num_panels(s.latent);
  const Adapters& of = a.k_b_adapters;  // read from outputs to inputs
  const float* const ranks = find_ranks(s, of, rows.queries.data(), s.head(), rows.ranks, [&](int64_t head) {
    return Ranks{of.b + head * s.nope, of.outputs, of.rank * of.outputs, s.nope};
  });
  const int64_t pieces = (panels + kAbsorbedPanels - 1) / kAbsorbedPanels;
  for_each(s.heads() * pieces, [&](int64_t item) {
    const int64_t head = item / pieces, first = item % pieces * kAbsorbedPanels;
    const int64_t query_stride = s.heads() * s.head(), stride = s.heads() * s.cached();
    const bf16* const queries = rows.queries.data() + head * s.head();
    bf16* const target = rows.absorbed.data() + head * s.cached();
    for (int64_t panel = first; panel < std::min(panels, first + kAbsorbedPanels); ++panel) {
      const int64_t column = panel * kPanel, columns = std::min(kPanel, s.latent - column);
      const bf16* const of_head = a.k_b + column * depth + head * s.nope * columns;  // its rows of the panel
      const bf16* panels[1] = {panel_of(of_head, s.nope, columns, 0)};
      multiply_rows(queries, query_stride, s.batch.num_tokens, s.nope, panels, [&](int64_t t, const Pair(&result)[1]) {
        Pair query = result[0];
        if (of.change(t))
          add_ranks(query, of.a + of.slots[t] * of.rank * of.inputs, of.inputs, of.rank,
                    ranks + (t * s.heads() + head) * of.rank, column);
        if (a.query_scale) query = scaled(query, a.query_scale[t]);
        store_columns(target + t * stride, query, column, s.latent);
      });
    }
    for (int64_t t = 0; t < s.batch.num_tokens && first == 0; ++t) {
      bf16* const turned = target + t * stride + s.latent;
      rotate_into(turned, queries + t * query_stride + s.nope, t, s, a);
      if (a.query_scale) scale_row(turned, s.rope, a.query_scale[t]);
    }
  });
}

// A part of the tokens of a block, or of the heads of a single token: rows that attend together lie behind each other.
struct LatentPiece {
  int64_t block;
  BlockTokens tokens;
  int64_t first_head, num_heads;
};

// How many chosen tokens a token sees; 0 where it sees all.
inline int64_t num_seen(int64_t t, const LatentArrays& a) {
  if (!a.chosen || a.positions[t] < 0) return 0;
  const int32_t* const chosen = a.chosen + t * a.num_chosen;
  int64_t count = std::min(a.num_chosen, int64_t(a.positions[t]) + 1);
  while (count > 0 && chosen[count - 1] < 0) --count;
  return count == int64_t(a.positions[t]) + 1 ? 0 : count;
}

// At most `most` rows each, and enough pieces for all threads where there are the rows for it.
// Tokens of blocks in which one does not see all are pieces of their own.
inline std::vector<LatentPiece> cut_into_pieces(const LatentShapes& s, const LatentArrays& a) {
  const AttentionShapes& b = s.batch;
  const int64_t num_pieces = kPiecesPerThread * Crew::instance().num_threads();
  const auto size = [&](int64_t all, int64_t fewest, int64_t most) {
    return std::max(fewest, std::min(most, (all + num_pieces - 1) / num_pieces));
  };
  const int64_t heads = size(b.num_singles * s.heads(), kFewestRows, s.heads());
  const int64_t tokens = size(b.num_blocks * b.block_tokens, 1, std::max<int64_t>(1, kMostRowsTogether / s.heads()));
  std::vector<LatentPiece> pieces;
  for (int64_t t = 0; t < b.num_singles; ++t)
    for (int64_t head = 0; head < s.heads(); head += heads)
      pieces.push_back({t, {t, 1}, head, std::min(heads, s.heads() - head)});
  for (int64_t block = b.num_singles; block < b.num_singles + b.num_blocks; ++block) {
    const int64_t begin = tokens_of(block, b).first;
    bool is_sparse = false;
    for (int64_t t = begin; t < begin + b.block_tokens; ++t) is_sparse |= num_seen(t, a) > 0;
    const int64_t together = is_sparse ? 1 : tokens;
    for (int64_t first = 0; first < b.block_tokens; first += together)
      pieces.push_back({block, {begin + first, std::min(together, b.block_tokens - first)}, 0, s.heads()});
  }
  return pieces;
}

inline void attend_to_latents(const LatentShapes& s, const LatentArrays& a, LatentRows& rows) {
  const AttentionShapes& b = s.batch;
  const PagedKeys kv{a.pool, s.cached(), b.page_size, s.cached(), s.latent, 0};
  const std::vector<LatentPiece> pieces = cut_into_pieces(s, a);
  for_each(int64_t(pieces.size()), [&](int64_t item) {
    const LatentPiece& piece = pieces[item];
    const int64_t first = piece.tokens.first, seen = piece.tokens.count == 1 ? num_seen(first, a) : 0;
    const QueryRows queries{rows.absorbed.data(), a.positions, piece.tokens, s.heads(), piece.first_head,
                            piece.num_heads, seen};
    const int32_t* const pages = a.page_table + piece.block * b.table_width;
    const Scoring scoring{b.scale, 0, nullptr};
    if (seen > 0) attend_chosen(queries, a.chosen + first * a.num_chosen, pages, kv, scoring, rows.attended.data());
    else attend(queries, 1, pages, kv, scoring, rows.attended.data());
  });
}

// Multiplies what each head has attended out of the latent space. A panel may have columns of several heads.
inline void expand(const LatentShapes& s, const LatentArrays& a, LatentRows& rows) {
  const int64_t width = s.heads() * s.value;
  const Adapters& of = a.v_b_adapters;
  const float* const ranks = find_ranks(s, of, rows.attended.data(), s.latent, rows.ranks,
                                        [&](int64_t) { return ranks_of(of); });
  for_each(num_panels(width), [&](int64_t panel) {
    const int64_t begin = panel * kPanel, end = std::min(begin + kPanel, width);
    const bf16* panels[1] = {panel_of(a.v_b, s.latent, width, panel)};
    for (int64_t head = begin / s.value; head * s.value < end; ++head) {
      const int64_t from = std::max(begin, head * s.value) - begin, to = std::min(end, (head + 1) * s.value) - begin;
      const uint32_t lanes = uint32_t((uint64_t(1) << to) - (uint64_t(1) << from));
      multiply_rows(rows.attended.data() + head * s.latent, s.heads() * s.latent, s.batch.num_tokens, s.latent, panels,
                    [&](int64_t t, const Pair(&result)[1]) {
                      bf16* const target = rows.values.data() + t * width + begin;
                      Pair values = result[0];
                      if (of.change(t))
                        add_ranks(values, of.b + of.slots[t] * of.rank * width, width, of.rank,
                                  ranks + (t * s.heads() + head) * of.rank, begin);
                      store(target, values.low, Mask(lanes));
                      if (lanes >> 16) store(target + 16, values.high, Mask(lanes >> 16));
                    });
    }
  });
}

// Multiplies the values of each head by the sigmoid of its gate.
inline void gate_heads(const LatentShapes& s, const LatentArrays& a, LatentRows& rows) {
  AttentionShapes shapes = s.batch;
  shapes.value_width = s.value, shapes.gate_width = s.heads();
  bf16* const gates = rows.gates.sized(s.batch.num_tokens * s.heads());
  rows.gates_adapted.find(a.gate_adapters, a.hidden, s.batch.width, s.batch.num_tokens);
  project(a.hidden, s.batch.num_tokens, s.batch.width, {{a.gate, nullptr, gates, s.heads(), &rows.gates_adapted}});
  gate_rows(shapes, rows.values.data(), gates);
}

inline void latent_attention_layer(const LatentShapes& s, const LatentArrays& a) {
  thread_local LatentRows rows_here;
  LatentRows& rows = rows_here;
  rows.fit(s);
  project_down(s, a, rows);
  norm_latents(s, a, rows);
  if (s.batch.stores_only) return;
  const int64_t num_tokens = s.batch.num_tokens, query_width = s.heads() * s.head();
  if (s.query_latent > 0)
    multiply_adapted(rows.query_latents.data(), num_tokens, s.query_latent, a.q_b, query_width, rows.queries.data(),
                     a.q_b_adapters);
  absorb(s, a, rows);
  attend_to_latents(s, a, rows);
  expand(s, a, rows);
  if (a.gate) gate_heads(s, a, rows);
  multiply_adapted(rows.values.data(), num_tokens, s.heads() * s.value, a.o, s.batch.width, a.out, a.o_adapters);
}

}  // namespace native
