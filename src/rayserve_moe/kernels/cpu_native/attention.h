// Grouped-query attention of one layer over the paged pool: projections, rotation, writing keys and values, attending,
// and the output product, each step on all threads.
#pragma once

#include "attention_core.h"
#include "attention_heads.h"
#include "logarithm.h"
#include "projections.h"
#include "scratch.h"
#include "threads.h"

namespace native {

struct AttentionShapes {
  int64_t num_tokens, width, num_heads, num_kv_heads, page_size, num_pages;  // pages of this layer
  int64_t num_singles, num_blocks, block_tokens, table_width;
  int64_t window;  // positions that a query sees; 0: all
  float scale;
  HeadRules rules;
  int64_t value_width = 0;  // of a head; its key has rules.head_width
  float value_scale = 1.0f;  // factor of values, ahead of the pool
  int64_t gate_width = 0;     // gates of a token: one for each element of its queries, or for each head; 0: none
  bool has_softplus = false;  // gates are softplus, not sigmoids
  int64_t num_chosen = 0, chosen_size = 0;  // blocks of keys that a token sees at most, and keys of a block
  bool stores_only = false;  // keys and values are stored; no token attends, and nothing is written to `out`
  int64_t q_width() const { return num_heads * rules.head_width; }
  int64_t k_width() const { return num_kv_heads * rules.head_width; }
  int64_t v_width() const { return num_kv_heads * value_width; }
  int64_t out_width() const { return num_heads * value_width; }
  int64_t row_width() const { return k_width() + v_width(); }
};

struct AttentionArrays {
  const bf16* hidden;          // [T, D], normed
  const bf16 *q, *k, *v, *o;   // this layer's, packed
  const bf16* gate;            // packed; null: none
  HeadNorm q_norm, k_norm;
  const bf16 *q_bias, *k_bias, *v_bias;  // null: none
  const bf16* sinks;                     // [H]; null: none
  const float *cos, *sin;                // [T, rotated pairs]
  const float* mean_squares;             // [T, 2], of queries and of keys of all devices; null: those of these heads
  const int32_t *kv_slots, *positions;   // [T]
  const int32_t* page_table;             // [singles + blocks, P]
  const int32_t* chosen = nullptr;       // [T, G, blocks], numbers of blocks that a token sees; null: all keys
  bf16* pool;                            // this layer's pages, [pages, page, G, h + v]
  float* out;                            // [T, D]
  Adapters q_adapters, k_adapters, v_adapters, gate_adapters, o_adapters;
};

// Tokens of a block: the single ones come first, each a block of its own.
inline BlockTokens tokens_of(int64_t block, const AttentionShapes& s) {
  if (block < s.num_singles) return {block, 1};
  return {s.num_singles + (block - s.num_singles) * s.block_tokens, s.block_tokens};
}

// Norms, bounds and rotates the key of one token, and writes it to the pool with its value; likewise its queries, unless
// `query` is null.
inline void place_token(const AttentionShapes& s, const AttentionArrays& a, int64_t t, bf16* query, bf16* key,
                        bf16* value) {
  const int64_t h = s.rules.head_width, v = s.value_width;
  const float *cos = a.cos + t * s.rules.rotated_pairs, *sin = a.sin + t * s.rules.rotated_pairs;
  const float* mean_squares = a.mean_squares ? a.mean_squares + 2 * t : nullptr;
  if (query) shape_heads(query, s.q_width(), a.q_norm, mean_squares, cos, sin, s.rules);
  shape_heads(key, s.k_width(), a.k_norm, mean_squares ? mean_squares + 1 : nullptr, cos, sin, s.rules);
  if (s.rules.norms_values) norm_plain(value, s.v_width(), v, s.rules.eps);
  if (s.rules.clip > 0) clip_row(value, s.v_width(), s.rules.clip);
  if (s.value_scale != 1.0f) multiply_row(value, s.v_width(), s.value_scale);
  if (a.positions[t] < 0) return;  // padding: all of it has the same slot
  bf16* target = a.pool + int64_t(a.kv_slots[t]) * s.row_width();
  for (int64_t g = 0; g < s.num_kv_heads; ++g, target += h + v) {
    std::memcpy(target, key + g * h, h * sizeof(bf16));
    std::memcpy(target + h, value + g * v, v * sizeof(bf16));
  }
}

// How many KV heads of a single token one item attends with: all, or as many as leave each thread as much to do. Heads
// that see blocks of their own attend alone.
inline int64_t heads_together(const AttentionShapes& s, int64_t num_threads) {
  constexpr int64_t kManyItems = 4;  // of a thread: enough to share out whatever their number
  if (s.num_chosen > 0) return 1;
  int64_t shares = 1;
  while (shares < s.num_kv_heads && s.num_singles * shares < kManyItems * num_threads &&
         s.num_singles * shares % num_threads)
    ++shares;
  return (s.num_kv_heads + shares - 1) / shares;
}

// Attends all blocks. Single tokens read more than they compute, and take several heads at a time; other blocks one.
inline void attend_blocks(const AttentionShapes& s, const AttentionArrays& a, const bf16* queries, bf16* attended) {
  const int64_t h = s.rules.head_width, v = s.value_width, group = s.num_heads / s.num_kv_heads;
  const int64_t together = heads_together(s, Crew::instance().num_threads());
  const int64_t pieces = (s.num_kv_heads + together - 1) / together, of_singles = s.num_singles * pieces;
  const auto run = [&](int64_t block, int64_t g, int64_t count) {
    const QueryRows rows{queries, a.positions, tokens_of(block, s), s.num_heads, g * group, group};
    const PagedKeys kv{a.pool + g * (h + v), s.row_width(), s.page_size, h, v, h, h + v};
    Scoring scoring{s.scale, s.window, a.sinks};
    if (a.chosen) scoring.blocks = {a.chosen + g * s.num_chosen, s.num_kv_heads * s.num_chosen, s.num_chosen, s.chosen_size};
    attend(rows, count, a.page_table + block * s.table_width, kv, scoring, attended);
  };
  for_each(of_singles + s.num_blocks * s.num_kv_heads, [&](int64_t item) {
    const int64_t g = item % pieces * together, in_blocks = item - of_singles;
    if (in_blocks < 0) run(item / pieces, g, std::min(together, s.num_kv_heads - g));
    else run(s.num_singles + in_blocks / s.num_kv_heads, in_blocks % s.num_kv_heads, 1);
  });
}

// `x` times the gate of `y`.
inline F16 gated(F16 x, F16 y, bool has_softplus) { return has_softplus ? x * softplus(y) : gated_by_sigmoid(x, y); }

// Attended queries times their gates, in place.
inline void gate_rows(const AttentionShapes& s, bf16* attended, const bf16* gates) {
  const int64_t width = s.out_width(), v = s.value_width;
  for_pieces(s.num_tokens, 8, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * width; i < end * width && s.gate_width == width; i += 16) {
      const Mask lanes = lanes_of(i, end * width);
      store(attended + i, gated(wide(attended + i, lanes), wide(gates + i, lanes), s.has_softplus), lanes);
    }
    for (int64_t head = begin * s.num_heads; head < end * s.num_heads && s.gate_width != width; ++head) {
      const F16 gate = from_bits(all_i(int32_t(gates[head]) << 16));
      bf16* row = attended + head * v;
      for (int64_t i = 0; i < v; i += 16) {
        const Mask lanes = lanes_of(i, v);
        store(row + i, gated(wide(row + i, lanes), gate, s.has_softplus), lanes);
      }
    }
  });
}

inline void attention_layer(const AttentionShapes& s, const AttentionArrays& a) {
  const bool attends = !s.stores_only;
  const int64_t q_width = attends ? s.q_width() : 0, out_width = attends ? s.out_width() : 0;
  const int64_t k_width = s.k_width(), v_width = s.v_width(), gate_width = attends ? s.gate_width : 0;
  thread_local Scratch<bf16> scratch;
  bf16* queries = scratch.sized(s.num_tokens * (q_width + out_width + k_width + v_width + gate_width));
  bf16* attended = queries + s.num_tokens * q_width;
  bf16* keys = attended + s.num_tokens * out_width;
  bf16* values = keys + s.num_tokens * k_width;
  bf16* gates = values + s.num_tokens * v_width;
  thread_local AdaptedRows adapted_here[4];
  const AdaptedRows* adapted[4] = {};
  const Adapters none, *const of[4] = {attends ? &a.q_adapters : &none, &a.k_adapters, &a.v_adapters,
                                       attends ? &a.gate_adapters : &none};
  for (int i = 0; i < 4; ++i) {
    if (!of[i]->a) continue;
    adapted_here[i].find(*of[i], a.hidden, s.width, s.num_tokens);
    adapted[i] = &adapted_here[i];
  }
  project(a.hidden, s.num_tokens, s.width, {{a.q, a.q_bias, queries, q_width, adapted[0]},
                                            {a.k, a.k_bias, keys, k_width, adapted[1]},
                                            {a.v, a.v_bias, values, v_width, adapted[2]},
                                            {a.gate, nullptr, gates, gate_width, adapted[3]}});
  for_pieces(s.num_tokens, 8, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t)
      place_token(s, a, t, attends ? queries + t * q_width : nullptr, keys + t * k_width, values + t * v_width);
  });
  if (!attends) return;
  attend_blocks(s, a, queries, attended);
  if (a.gate) gate_rows(s, attended, gates);
  multiply_adapted(attended, s.num_tokens, out_width, a.o, s.width, a.out, a.o_adapters);
}

}  // namespace native
