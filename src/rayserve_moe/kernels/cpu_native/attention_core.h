// Attention of query rows over the keys and values on a sequence's pages: spans of keys with an online softmax.
//
// Heads have any even width of keys and any width of values. A row's sums are formed over spans that begin at multiples
// of kSpan, each key in order of its position, so that they have the same bits whichever rows share the spans.
#pragma once

#include <algorithm>
#include <cmath>

#include "attention_spans.h"

namespace native {

struct BlockTokens {
  int64_t first, count;
};

// Blocks of neighbouring keys that the tokens see with the heads of one KV head.
struct ChosenBlocks {
  const int32_t* first = nullptr;  // numbers of token t from first + t * stride on, ascending, -1 behind; null: all
  int64_t stride = 0, count = 0;   // `count` numbers of a token
  int64_t size = 0;                // keys of a block, from positions that it divides

  // The keys of the span from `start` on that lie in blocks of token `t`.
  uint64_t keys_of(int64_t t, int64_t start) const {
    const int32_t *const begin = first + t * stride, *const end = begin + count;
    const auto is_before = [](int32_t number, int64_t least) { return int64_t(uint32_t(number)) < least; };
    uint64_t keys = 0;
    for (const int32_t* at = std::lower_bound(begin, end, start / size, is_before); at != end; ++at) {
      const int64_t key = int64_t(uint32_t(*at)) * size - start;  // -1 is behind all
      if (key >= kSpan) break;
      keys |= keys_in({key, key + size});
    }
    return keys;
  }
};

struct Scoring {
  float scale;
  int64_t window;     // positions that a query sees, its own among them; 0: all
  const bf16* sinks;  // scores of all query heads, each in the denominator of its softmax alone; null: none
  ChosenBlocks blocks = {};
};

// The queries of one block that share a KV head: row r is query r / group, head first_head + r % group.
struct QueryRows {
  const bf16* queries;       // [T, heads, key width]
  const int32_t* positions;  // [T]; -1: padding
  BlockTokens tokens;
  int64_t num_heads, first_head, group;
  int64_t num_chosen = 0;  // keys that a single token sees, wherever they lie; 0: all up to its position
  int64_t count() const { return tokens.count * group; }
  int64_t head(int64_t row) const { return first_head + row % group; }
  int64_t place(int64_t row) const { return (tokens.first + row / group) * num_heads + head(row); }  // in [T, heads]
  int64_t position(int64_t row) const {  // of the last key that it sees
    return num_chosen > 0 ? num_chosen - 1 : positions[tokens.first + row / group];
  }
};

inline Range seen_from(int64_t position, int64_t window) {
  return {window > 0 ? std::max<int64_t>(0, position - window + 1) : 0, position + 1};
}

// What any of the tokens sees; empty where all are padding.
inline Range seen_by(const BlockTokens& tokens, const int32_t* positions, int64_t window) {
  Range all{INT64_MAX, 0};
  for (int64_t t = tokens.first; t < tokens.first + tokens.count; ++t) {
    if (positions[t] < 0) continue;
    const Range seen = seen_from(positions[t], window);
    all = {std::min(all.begin, seen.begin), std::max(all.end, seen.end)};
  }
  return all;
}

// One row's running softmax over the `seen` keys of a span, of which `count` have scores: its weights, bfloat16, and by
// what earlier sums shrink.
inline void weigh(int64_t row, int64_t num_rows, uint64_t seen, int64_t count, float scale, SpanBuffers& b) {
  const F16 factor = all(scale);
  const auto scores = [&](int64_t key) {
    return load(b.scores.data() + (key / kPanel * num_rows + row) * kPanel + key % kPanel);
  };
  const float before = b.largest[row];
  F16 peak = all(before);
  for (int64_t key = 0; key < count; key += 16)
    peak = either(Mask(seen >> key), most(peak, scores(key) * factor), peak);
  const float largest = largest_of(peak);
  const F16 top = all(largest);
  F16 sum = zeros();
  for (int64_t key = 0; key < count; key += 16) {
    const F16 weight = exponential(fms(scores(key), factor, top));
    const F16 weight_seen = rounded(either(Mask(seen >> key), weight, zeros()));
    store(b.weights.data() + row * kSpan + key, weight_seen);
    sum = sum + weight_seen;
  }
  const float shrink = first_lane(exponential(all(before - largest)));
  float* sums = b.sums.data() + row * 16;
  put(sums, fma(load(sums), all(shrink), sum));
  b.largest[row] = largest;
  b.shrinks[row] = shrink;
}

// Adds the weighted values of the first `count` keys of a span to the totals of rows begin .. end - 1, after shrinking
// them.
inline void add_values(int64_t begin, int64_t end, int64_t count, int64_t width, TileScope* tiles, SpanBuffers& b) {
  const auto add = [&](const auto& panels, int64_t column) {
    multiply_rows(b.weights.data() + begin * kSpan, kSpan, end - begin, count, panels, [&](int64_t r, const auto& sums) {
      const float shrink = b.shrinks[begin + r];
      float* total = b.totals.data() + (begin + r) * width + column;
      for (const Pair& sum : sums) {
        put(total, fma(load(total), all(shrink), sum.low));
        put(total + 16, fma(load(total + 16), all(shrink), sum.high));
        total += kPanel;
      }
    }, tiles);
  };
  int64_t column = 0;
  for (; column + 2 * kPanel <= width; column += 2 * kPanel) {
    const bf16* panels[2] = {b.values.data() + column * kSpan, b.values.data() + (column + kPanel) * kSpan};
    add(panels, column);
  }
  if (column == width) return;
  const bf16* panels[1] = {b.values.data() + column * kSpan};
  add(panels, column);
}

// Where the queries of the rows lie, one behind the other: where they are, or in a copy.
inline const bf16* rows_of(const QueryRows& rows, int64_t width, SpanBuffers& b) {
  if (rows.group == rows.num_heads || rows.tokens.count == 1) return rows.queries + rows.place(0) * width;
  b.queries.resize(rows.count() * width);
  for (int64_t r = 0; r < rows.count(); ++r)
    std::copy_n(rows.queries + rows.place(r) * width, width, b.queries.data() + r * width);
  return b.queries.data();
}

// The sink of each row's head counts as a key whose value is zero.
inline void begin_with_sinks(const QueryRows& rows, const bf16* sinks, SpanBuffers& b) {
  for (int64_t r = 0; r < rows.count(); ++r) b.largest[r] = narrow(sinks[rows.head(r)]), b.sums[r * 16] = 1.0f;
}

// Rows on their way over the keys.
struct Walk {
  const QueryRows* rows;
  const bf16* queries;
};

inline Walk begin_walk(const QueryRows& rows, const PagedKeys& kv, const Scoring& scoring, SpanBuffers& b) {
  b.fit(rows.count(), kv);
  if (scoring.sinks) begin_with_sinks(rows, scoring.sinks, b);
  return {&rows, rows_of(rows, kv.key_width, b)};
}

// Marks the keys of the span from `start` on that each token sees; returns those that any sees.
inline uint64_t mark_span(const Walk& walk, int64_t start, const Scoring& scoring, SpanBuffers& b) {
  const QueryRows& rows = *walk.rows;
  uint64_t any = 0;
  for (int64_t i = 0; i < rows.tokens.count; ++i) {
    const Range range = seen_from(rows.position(i * rows.group), scoring.window);
    uint64_t keys = keys_in({range.begin - start, range.end - start});
    if (keys && scoring.blocks.first) keys &= scoring.blocks.keys_of(rows.tokens.first + i, start);
    b.seen[i] = keys, any |= keys;
  }
  return any;
}

// Attends rows to the keys of a span that they see: `any` are those of all of them, which `b` has found and marked, and
// the first `count` have scores.
inline void visit_span(const Walk& walk, uint64_t any, int64_t count, const PagedKeys& kv, const Scoring& scoring,
                       TileScope* tiles, SpanBuffers& b) {
  const QueryRows& rows = *walk.rows;
  const int64_t width = whole_panels(kv.value_width), group = rows.group;
  const bf16* panels[1] = {reinterpret_cast<const bf16*>(b.keys.data())};
  const auto for_seeing = [&](auto&& visit) {  // the rows of neighbouring tokens that see some of the keys
    for (int64_t token = 0, end; token < rows.tokens.count; token = end) {
      for (end = token; end < rows.tokens.count && b.seen[end]; ++end) {}
      if (token < end) visit(token * group, end * group);
      else ++end;
    }
  };
  for (int64_t key = 0; key < count; key += kPanel) {
    if (!uint32_t(any >> key)) continue;  // none of the panel is weighed
    load_keys(key, kv, b);
    for_seeing([&](int64_t begin, int64_t end) {
      float* const target = b.scores.data() + (key / kPanel * rows.count() + begin) * kPanel;
      multiply_rows(walk.queries + begin * kv.key_width, kv.key_width, end - begin, kv.key_width, panels,
                    [&](int64_t r, const Pair(&products)[1]) {
                      put(target + r * kPanel, products[0].low);
                      put(target + r * kPanel + 16, products[0].high);
                    }, tiles);
    });
  }
  for_seeing([&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) weigh(r, rows.count(), b.seen[r / group], count, scoring.scale, b);
  });
  const bool is_finite = load_values(any, count, kv, b);
  for_seeing([&](int64_t begin, int64_t end) {
    if (is_finite) return add_values(begin, end, count, width, tiles, b);
    for (int64_t r = begin; r < end; ++r) {  // zero times what is not finite is not zero: only what the row sees
      load_values(b.seen[r / group], count, kv, b);
      add_values(r, r + 1, count, width, tiles, b);
    }
  });
}

// Keys of a span of which the last one is before `end`, to whole panels.
inline int64_t keys_of_span(int64_t start, int64_t end) { return whole_panels(std::min(end - start, kSpan)); }

// Writes what the rows have summed up, [T, heads, value width].
inline void end_walk(const QueryRows& rows, const PagedKeys& kv, const SpanBuffers& b, bf16* out) {
  for (int64_t r = 0; r < rows.count(); ++r) {
    const float sum = total(load(b.sums.data() + r * 16));
    const F16 weight = all(1.0f / std::max(sum, 1.0f));
    bf16* target = out + rows.place(r) * kv.value_width;
    const float* total = b.totals.data() + r * whole_panels(kv.value_width);
    for (int64_t d = 0; d < kv.value_width; d += 16)
      store(target + d, (load(total + d) * weight), lanes_of(d, kv.value_width));
  }
}

// Attends the rows of neighbouring KV heads to the keys up to their own positions, as far as the window reaches: `out`
// is [T, heads, value width]. `first` and `kv` are those of the first head; each head attends as if alone. Chosen blocks are those of one head.
//
// Heads go over a span together, after all that they have there has been read in the order in which it lies: one head
// is a few lines of a place, and a processor foresees what is read next only where lines follow each other.
inline void attend(const QueryRows& first, int64_t num_kv_heads, const int32_t* pages, const PagedKeys& kv,
                   const Scoring& scoring, bf16* out) {
  thread_local std::vector<SpanBuffers> buffers;
  thread_local std::vector<QueryRows> rows;
  thread_local std::vector<Walk> walks;
  if (int64_t(buffers.size()) < num_kv_heads) buffers.resize(num_kv_heads);
  rows.assign(num_kv_heads, first), walks.clear();
  for (int64_t g = 0; g < num_kv_heads; ++g) {
    rows[g].first_head += g * first.group;
    walks.push_back(begin_walk(rows[g], kv, scoring, buffers[g]));
  }
  std::optional<TileScope> scope;
  if (has_tiles) scope.emplace();
  const Range all = seen_by(first.tokens, first.positions, scoring.window);
  for (int64_t start = all.begin / kSpan * kSpan; start < all.end; start += kSpan) {
    const Range here{std::max(all.begin, start), std::min(all.end, start + kSpan)};
    PagedKeys of_head = kv;
    for (int64_t g = 0; g < num_kv_heads; ++g, of_head.first += kv.head_stride) {
      const uint64_t any = mark_span(walks[g], start, scoring, buffers[g]);
      if (!any) continue;
      find_span(pages, start, here, of_head, buffers[g]);
      if (g == 0 && num_kv_heads > 1) read_ahead(num_kv_heads * kv.head_stride, buffers[0]);
      const int64_t count = keys_of_span(start, all.end);
      visit_span(walks[g], any, count, of_head, scoring, scope ? &*scope : nullptr, buffers[g]);
    }
  }
  for (int64_t g = 0; g < num_kv_heads; ++g) end_walk(rows[g], kv, buffers[g], out);
}

// Attends the rows of one token to the keys at its chosen positions, `rows.num_chosen` of them: `out` is as in `attend`.
inline void attend_chosen(const QueryRows& rows, const int32_t* chosen, const int32_t* pages, const PagedKeys& kv,
                          const Scoring& scoring, bf16* out) {
  thread_local SpanBuffers b;
  Walk walk = begin_walk(rows, kv, scoring, b);
  std::optional<TileScope> tiles;
  if (has_tiles) tiles.emplace();
  for (int64_t start = 0; start < rows.num_chosen; start += kSpan) {
    for (int64_t i = 0; i < kSpan; ++i) {
      const int64_t key = start + i < rows.num_chosen ? chosen[start + i] : -1;
      b.rows[i] = key < 0 ? nullptr : kv.first + (pages[key / kv.page_size] * kv.page_size + key % kv.page_size) * kv.stride;
    }
    const uint64_t any = mark_span(walk, start, scoring, b);
    visit_span(walk, any, keys_of_span(start, rows.num_chosen), kv, scoring, tiles ? &*tiles : nullptr, b);
  }
  end_walk(rows, kv, b, out);
}

}  // namespace native
