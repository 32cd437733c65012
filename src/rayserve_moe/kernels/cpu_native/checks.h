// What a call of attention has to hold to before anything is written: shapes that fit, and places inside the pool.
#pragma once

#include "attention.h"
#include "latent.h"

namespace native {

// How often `part` goes into `whole`; -1 where it does not divide it.
inline int64_t times(int64_t part, int64_t whole) { return part > 0 && whole % part == 0 ? whole / part : -1; }

// Whether heads can be shaped and attended so. Pairs of numbers are what products take.
inline bool are_heads(const AttentionShapes& s) {
  const HeadRules& rules = s.rules;
  return rules.head_width > 0 && rules.head_width % 2 == 0 && s.value_width > 0 && s.out_width() % 2 == 0 && times(s.num_kv_heads, s.num_heads) > 0 &&
         rules.rotated_pairs >= 0 && 2 * rules.rotated_pairs <= rules.head_width && rules.clip >= 0 && s.window >= 0;
}

inline bool are_blocks(const AttentionShapes& s) {
  return s.num_singles >= 0 && s.num_blocks >= 0 && s.block_tokens >= 0 && s.page_size > 0 && s.num_pages > 0 &&
         s.num_singles + s.num_blocks * s.block_tokens == s.num_tokens;
}

// Whether the kernel can be called with these. Sizes that came out as -1 (see `times`) fit nothing.
inline bool fit(const AttentionShapes& s) { return are_heads(s) && are_blocks(s) && s.width > 0 && s.width % 2 == 0; }

inline bool fit(const LatentShapes& s) {
  const auto is_even = [](int64_t width) { return width > 0 && width % 2 == 0; };
  return are_blocks(s.batch) && is_even(s.batch.width) && s.heads() > 0 && s.value > 0 && is_even(s.heads() * s.value) &&
         is_even(s.nope) && is_even(s.rope) && is_even(s.latent) && (s.query_latent == 0 || is_even(s.query_latent));
}

// Whether all that the tokens of `s` write and see lies on this layer's pages. `a` needs the three int32 arrays alone.
inline bool are_in_pool(const AttentionShapes& s, const AttentionArrays& a) {
  const int64_t num_slots = s.num_pages * s.page_size;
  for (int64_t t = 0; t < s.num_tokens; ++t)
    if (a.positions[t] >= 0 && (a.kv_slots[t] < 0 || a.kv_slots[t] >= num_slots)) return false;
  for (int64_t block = 0; block < s.num_singles + s.num_blocks; ++block) {
    const Range seen = seen_by(tokens_of(block, s), a.positions, s.window);
    if (seen.end > s.table_width * s.page_size) return false;
    for (int64_t p = seen.begin / s.page_size; p * s.page_size < seen.end; ++p) {
      const int64_t page = a.page_table[block * s.table_width + p];
      if (page < 0 || page >= s.num_pages) return false;
    }
  }
  return true;
}

}  // namespace native
