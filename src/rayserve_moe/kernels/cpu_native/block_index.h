// The index of block-sparse attention of one layer: writes the keys of new tokens, and chooses the blocks of keys that
// each token sees with each head of the index.
//
// A token with no more than `top_k` blocks up to its own sees them all, and nothing is scored. Otherwise the score of a
// block is the largest product of the query with a key in it, and the best are taken: of equal scores the lower blocks.
#pragma once

#include <limits>

#include "index.h"

namespace native {

struct BlockIndexShapes {
  AttentionShapes batch;       // of A index heads; nothing is said of KV heads, windows and rules
  int64_t head, pairs, top_k;  // d, pairs of a head that rotate, K
  int64_t block_size, first_blocks, local_blocks;
  float eps;
  bool is_interleaved;
  int64_t heads() const { return batch.num_heads; }
};

struct BlockIndexArrays {
  const bf16* hidden;                   // [T, D], normed
  const bf16 *q, *k;                    // this layer's, packed: [D, A * d], [D, d]
  NormScale q_norm, k_norm;             // [d]
  const float *cos, *sin;               // [T, pairs]
  const int32_t *kv_slots, *positions;  // [T]
  const int32_t* page_table;            // [singles + blocks, P]
  bf16* pool;                           // this layer's pages, [pages, page, 1, d]
  int32_t* chosen;                      // [T, A, K], ascending, -1 behind
};

struct BlockIndexRows {
  Scratch<bf16> keys, queries;  // [T, d], [T, A, d]
  Scratch<float> scores;        // of tokens of a block: [tokens, A, blocks of keys]
};

// Norms and rotates the heads of all tokens.
inline void shape_index_heads(bf16* heads, int64_t num_heads, NormScale norm, const BlockIndexShapes& s,
                              const BlockIndexArrays& a) {
  for_pieces(s.batch.num_tokens, 8, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin * num_heads; row < end * num_heads; ++row) {
      const int64_t t = row / num_heads;
      bf16* const head = heads + row * s.head;
      norm_row(head, norm, head, s.head, s.eps);
      (s.is_interleaved ? rotate_neighbours : rotate_halves)(head, a.cos + t * s.pairs, a.sin + t * s.pairs, s.pairs);
    }
  });
}

// The largest product of each row in the blocks of keys that a span of keys passes.
struct BlockPeaks {
  std::vector<float> best;  // [rows][16], of the block that is passed

  // Takes the products of a row with the keys from `key` on, of which it sees those before `end`.
  void take(int64_t row, int64_t key, int64_t end, const Pair& products, int64_t size, float* scores) {
    float* const lanes = best.data() + row * 16;
    for (int64_t first = key; first < std::min(key + kPanel, end);) {
      const int64_t block = first / size, last = std::min({key + kPanel, end, (block + 1) * size});
      F16 peak = load(lanes);
      const uint32_t here = uint32_t(keys_in({first - key, last - key}));
      peak = either(Mask(here), most(peak, least(products.low, all(INFINITY))), peak);  // NaN is infinite
      peak = either(Mask(here >> 16), most(peak, least(products.high, all(INFINITY))), peak);
      put(lanes, peak);
      if (last == (block + 1) * size || last == end) {
        scores[block] = largest_of(peak);
        put(lanes, all(-INFINITY));
      }
      first = last;
    }
  }
};

// Tokens of one sequence that are scored together, and the keys that they are scored for, whole blocks.
struct BlockIndexPiece {
  int64_t item;  // of the batch: a single token or a block of them
  Range keys;
  int64_t first_score, num_blocks;  // their scores, [tokens, A, blocks]
};

// Scores of the tokens of a piece for the blocks of its keys.
inline void score_blocks(const BlockIndexPiece& piece, const BlockIndexShapes& s, const BlockIndexArrays& a,
                         const bf16* queries, float* scores) {
  thread_local SpanBuffers b;
  thread_local BlockPeaks peaks;
  const PagedKeys kv{a.pool, s.head, s.batch.page_size, s.head, s.head, 0, 0};
  const BlockTokens tokens = tokens_of(piece.item, s.batch);
  const int64_t num_rows = tokens.count * s.heads();
  b.keys.resize((s.head / 2 + 15) / 16 * 16 * kPanel);
  peaks.best.assign(num_rows * 16, -INFINITY);
  std::optional<TileScope> tiles;
  if (has_tiles) tiles.emplace();
  const bf16* panels[1] = {reinterpret_cast<const bf16*>(b.keys.data())};
  const bf16* const rows = queries + tokens.first * s.heads() * s.head;
  for (int64_t start = piece.keys.begin; start < piece.keys.end; start += kSpan) {
    find_span(a.page_table + piece.item * s.batch.table_width, start, {start, std::min(piece.keys.end, start + kSpan)}, kv, b);
    for (int64_t key = 0; key < kSpan && start + key < piece.keys.end; key += kPanel) {
      load_keys(key, kv, b);
      multiply_rows(rows, s.head, num_rows, s.head, panels, [&](int64_t r, const Pair(&products)[1]) {
        const int64_t seen = int64_t(a.positions[tokens.first + r / s.heads()]) + 1;
        float* const of_row = scores + piece.first_score + r * piece.num_blocks;
        peaks.take(r, start + key, std::min(seen, piece.keys.end), products[0], s.block_size, of_row);
      }, tiles ? &*tiles : nullptr);
    }
  }
}

// The blocks of the best scores of a head of a token whose own block is the last of `count`, ascending.
inline void take_best_blocks(float* scores, int64_t count, const BlockIndexShapes& s, int32_t* chosen) {
  std::fill(scores, scores + std::min(count, s.first_blocks), INFINITY);
  std::fill(scores + std::max<int64_t>(count - s.local_blocks, 0), scores + count, INFINITY);
  take_best(scores, count, s.top_k, chosen);
}

inline void choose_blocks(const BlockIndexShapes& s, const BlockIndexArrays& a) {
  thread_local BlockIndexRows rows_here;
  BlockIndexRows& rows = rows_here;
  const int64_t T = s.batch.num_tokens, A = s.heads(), width = A * s.head, of_token = A * s.top_k;
  bf16 *const keys = rows.keys.sized(T * s.head), *const queries = rows.queries.sized(T * width);
  multiply_all(a.hidden, T, s.batch.width, a.k, s.head, keys);
  shape_index_heads(keys, 1, a.k_norm, s, a);
  for (int64_t t = 0; t < T; ++t)
    if (a.positions[t] >= 0) std::copy_n(keys + t * s.head, s.head, a.pool + int64_t(a.kv_slots[t]) * s.head);
  const auto num_blocks = [&](int64_t t) { return (int64_t(a.positions[t]) + s.block_size) / s.block_size; };
  std::vector<BlockIndexPiece> pieces;
  std::vector<int64_t> first_score(s.batch.num_singles + s.batch.num_blocks, -1), stride(first_score.size(), 0);
  int64_t num_scores = 0;
  const int64_t piece = std::max<int64_t>(kIndexPiece / s.block_size, 1) * s.block_size;
  for (int64_t item = 0; item < int64_t(first_score.size()); ++item) {
    const BlockTokens tokens = tokens_of(item, s.batch);
    const int64_t end = seen_by(tokens, a.positions, 0).end;
    const int64_t blocks = (end + s.block_size - 1) / s.block_size;
    if (blocks <= s.top_k) continue;
    first_score[item] = num_scores, stride[item] = blocks;
    for (int64_t start = 0; start < end; start += piece)
      pieces.push_back({item, {start, std::min(end, start + piece)}, num_scores, blocks});
    num_scores += tokens.count * A * blocks;
  }
  float* const scores = rows.scores.sized(num_scores);
  if (num_scores > 0) {
    multiply_all(a.hidden, T, s.batch.width, a.q, width, queries);
    shape_index_heads(queries, A, a.q_norm, s, a);
    for_each(int64_t(pieces.size()), [&](int64_t i) { score_blocks(pieces[i], s, a, queries, scores); });
  }
  for_pieces(T * A, 8, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t t = row / A, item = block_of(t, s.batch), count = num_blocks(t);
      int32_t* const chosen = a.chosen + t * of_token + row % A * s.top_k;
      if (count <= s.top_k) {
        see_all(a.positions[t] < 0 ? -1 : count - 1, s.top_k, chosen);
        continue;
      }
      const int64_t in_item = (t - tokens_of(item, s.batch).first) * A + row % A;
      take_best_blocks(scores + first_score[item] + in_item * stride[item], count, s, chosen);
    }
  });
}

}  // namespace native
