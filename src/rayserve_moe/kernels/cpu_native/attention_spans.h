// The keys and values of a span of positions, laid out as panels of products.
#pragma once

#include <algorithm>
#include <vector>

#include "panels.h"
#include "products.h"
#include "rows.h"
#include "transpose.h"

namespace native {

constexpr int64_t kSpan = 64;  // keys that are visited together, from positions that it divides
static_assert(kSpan % kPanel == 0, "a span of keys is several panels of a product");

// Where keys and values of one KV head lie: slot s at `first + s * stride`, its value `value_offset` behind its key, and
// the next head's `head_stride` behind both.
struct PagedKeys {
  const bf16* first;
  int64_t stride, page_size, key_width, value_width, value_offset, head_stride;
};

// Positions begin .. end - 1.
struct Range {
  int64_t begin, end;
};

static_assert(kSpan == 64, "keys of a span are the bits of a number");

// A bit for each key of a span that lies in a range, which counts from the span's first key.
inline uint64_t keys_in(Range here) {
  const auto below = [](int64_t key) { return key >= kSpan ? ~uint64_t(0) : key <= 0 ? 0 : (uint64_t(1) << key) - 1; };
  return below(here.end) & ~below(here.begin);
}

inline int64_t whole_panels(int64_t width) { return num_panels(width) * kPanel; }

struct SpanBuffers {
  std::vector<bf16> queries;     // [rows][key width], where rows do not lie behind each other
  std::vector<int32_t> keys;     // [key width / 2, to whole vectors][32] pairs of a key's numbers: a panel of the span
  std::vector<float> scores;     // [panels of the span][rows][32]
  std::vector<bf16> values;      // panels of [span / 2][32] pairs of the numbers of two neighbouring keys
  std::vector<bf16> weights;     // [rows][span]
  std::vector<float> totals;     // [rows] of whole panels
  std::vector<float> largest, shrinks, sums;  // [rows], [rows], [rows][16]
  std::vector<uint64_t> seen;    // [tokens], the keys of the span that a token sees
  const bf16* rows[kSpan];       // of the pool, the span's keys; null: the block does not see the key

  void fit(int64_t num_rows, const PagedKeys& kv) {
    keys.resize((kv.key_width / 2 + 15) / 16 * 16 * kPanel);
    scores.resize(num_rows * kSpan);
    values.resize(kSpan * whole_panels(kv.value_width));
    weights.resize(num_rows * kSpan);
    shrinks.resize(num_rows);
    seen.resize(num_rows);
    totals.assign(num_rows * whole_panels(kv.value_width), 0.0f);
    sums.assign(num_rows * 16, 0.0f);
    largest.assign(num_rows, -1e30f);
  }
};

// Lays out the 32 keys from `key` on as one panel of a product whose columns are the keys.
inline void load_keys(int64_t key, const PagedKeys& kv, SpanBuffers& b) {
  const int64_t num_words = kv.key_width / 2;
  const bf16* const* rows = b.rows + key;
  for (int64_t first = 0; first < kPanel; first += 16)
    for (int64_t word = 0; word < num_words; word += 16) {
      const Mask lanes = lanes_of(word, num_words);
      const int32_t* words[16];
      for (int64_t i = 0; i < 16; ++i)
        words[i] = rows[first + i] ? reinterpret_cast<const int32_t*>(rows[first + i]) + word : nullptr;
      transpose(words, lanes, b.keys.data() + word * kPanel + first, kPanel);
    }
}

// Lays out values of `seen` keys, of the first `count`, as panels of a product whose depth is the keys, beside zeros.
// Whether all are finite.
inline bool load_values(uint64_t seen, int64_t count, const PagedKeys& kv, SpanBuffers& b) {
  bool is_finite = true;
  for (int64_t i = 0; i < count; i += 2) {
    const bf16* from[2];
    for (int64_t key : {0, 1}) {
      const bool is_seen = b.rows[i + key] && (seen >> (i + key) & 1);
      from[key] = is_seen ? b.rows[i + key] + kv.value_offset : nullptr;
    }
    for (int64_t d = 0; d < kv.value_width; d += kPairedNumbers) {
      PairedRow row[2];
      for (int64_t key : {0, 1}) {
        row[key] = paired_row(from[key] ? from[key] + d : nullptr, kv.value_width - d);
        is_finite &= !has_infinite(row[key]);
      }
      put_pairs(b.values.data() + d / kPanel * kPanel * kSpan + i * kPanel + d % kPanel * 2, row[0], row[1]);
    }
  }
  return is_finite;
}

// Finds the keys of `here`, a part of the span from `start` on.
inline void find_span(const int32_t* pages, int64_t start, Range here, const PagedKeys& kv, SpanBuffers& b) {
  std::fill(b.rows, b.rows + kSpan, nullptr);
  for (int64_t key = here.begin; key < here.end;) {
    const int64_t page = key / kv.page_size, in_page = key - page * kv.page_size;
    const bf16* row = kv.first + (pages[page] * kv.page_size + in_page) * kv.stride;
    const int64_t last = std::min(here.end, key + kv.page_size - in_page);
    for (; key < last; ++key, row += kv.stride) b.rows[key - start] = row;
  }
}

// Reads one number of each cache line of the first `size` numbers of the keys of a span.
inline void read_ahead(int64_t size, const SpanBuffers& b) {
  constexpr int64_t kLine = 64 / sizeof(bf16);
  for (const bf16* row : b.rows)
    for (int64_t i = 0; row && i < size; i += kLine) (void)*const_cast<const volatile bf16*>(row + i);
}

}  // namespace native
