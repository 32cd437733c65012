// What a call of attention has to hold to before anything is written: shapes that fit, and places inside the pool.
#pragma once

#include "attention.h"

namespace native {

// How often `part` goes into `whole`; -1 where it does not divide it.
inline int64_t times(int64_t part, int64_t whole) { return part > 0 && whole % part == 0 ? whole / part : -1; }

// Whether the kernel can be called with these. Sizes that came out as -1 (see `times`) fit nothing.
inline bool fit(const AttentionShapes& s) {
  const bool are_heads = Heads::have(s.head_width) && s.num_kv_heads > 0 && times(s.num_kv_heads, s.num_heads) > 0;
  const bool are_blocks = s.num_singles >= 0 && s.num_blocks >= 0 && s.block_tokens >= 0;
  return are_heads && are_blocks && times(kPanel, s.width) > 0 && s.page_size > 0 && s.pages_per_layer > 0 &&
         s.num_singles + s.num_blocks * s.block_tokens == s.num_tokens;
}

// Whether all that the tokens of `s` write and see lies on this layer's pages. `a` needs the three int32 arrays alone.
inline bool are_in_pool(const AttentionShapes& s, const AttentionArrays& a) {
  const int64_t num_slots = s.pages_per_layer * s.page_size;
  for (int64_t t = 0; t < s.num_tokens; ++t)
    if (a.positions[t] >= 0 && (a.kv_slots[t] < 0 || a.kv_slots[t] >= num_slots)) return false;
  for (int64_t block = 0; block < s.num_singles + s.num_blocks; ++block) {
    const int64_t last = last_position(tokens_of(block, s), a.positions);
    if (last >= s.table_width * s.page_size) return false;
    for (int64_t p = 0; p * s.page_size <= last; ++p) {
      const int64_t page = a.page_table[block * s.table_width + p];
      if (page < 0 || page >= s.pages_per_layer) return false;
    }
  }
  return true;
}

}  // namespace native
