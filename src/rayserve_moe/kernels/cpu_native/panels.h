// Panels of packed matrices of any width: products of matrices whose last panel is narrower than the others.
#pragma once

#include <vector>

#include "adapters.h"
#include "products.h"
#include "rows.h"
#include "threads.h"

namespace native {

inline int64_t num_panels(int64_t width) { return (width + kPanel - 1) / kPanel; }

// Pairs of a narrow panel, `columns` of them, to where those of a whole one lie.
inline void widen_pairs(const bf16* pairs, int64_t columns, bf16* out) { std::memcpy(out, pairs, 2 * columns * sizeof(bf16)); }

template <class Narrow>
inline void widen_pairs(const Narrow* pairs, int64_t columns, Narrow* out) {  // of 8 bits
  for (int64_t c = 0; c < columns; ++c)
    for (int64_t i = 0; i < 2; ++i) out[c / 16 * kPanel + 16 * i + c % 16] = pairs[2 * c + i];
}

// A panel of a packed [depth, width] matrix. A narrower one is copied with zeros beside it, and lies there until this
// thread asks for the next.
template <class Weight>
inline const Weight* panel_of(const Weight* matrix, int64_t depth, int64_t width, int64_t panel) {
  const int64_t columns = width - panel * kPanel;
  const Weight* here = matrix + panel * kPanel * depth;
  if (columns >= kPanel) return here;
  thread_local std::vector<Weight> copy;
  copy.assign(depth * kPanel, Weight{});
  for (int64_t k = 0; k < depth; k += 2) widen_pairs(here + k * columns, columns, copy.data() + k * kPanel);
  return copy.data();
}

// Stores what a row of a product has at `column` and behind it, as far as the matrix is wide.
inline void store_columns(float* target, const Pair& result, int64_t column, int64_t width) {
  put(target + column, lanes_of(column, width), result.low);
  if (column + 16 < width) put(target + column + 16, lanes_of(column + 16, width), result.high);
}

inline void store_columns(bf16* target, const Pair& result, int64_t column, int64_t width) {
  store(target + column, result.low, lanes_of(column, width));
  if (column + 16 < width) store(target + column + 16, result.high, lanes_of(column + 16, width));
}

// Runs `body(first row, rows, panel)` on all threads, for as many rows at a time as their caches hold.
template <class Body>
void for_panels(int64_t num_rows, int64_t depth, int64_t num_panels, Body&& body) {
  const int64_t most = rows_together(depth);
  for_each((num_rows + most - 1) / most * num_panels, [&](int64_t item) {
    const int64_t first = item / num_panels * most;
    body(first, std::min(most, num_rows - first), item % num_panels);
  });
}

// Rows of `left` [rows, depth] times a packed matrix [depth, width]; `add(sums, row, column)` adds to a panel's sums.
template <class Number, class Add>
void multiply_all(const bf16* left, int64_t num_rows, int64_t depth, const bf16* matrix, int64_t width, Number* out,
                  Add&& add) {
  for_panels(num_rows, depth, num_panels(width), [&](int64_t first, int64_t count, int64_t panel) {
    multiply_panel(left + first * depth, count, depth, panel_of(matrix, depth, width, panel),
                   [&](int64_t r, Pair result) {
                     add(result, first + r, panel * kPanel);
                     store_columns(out + (first + r) * width, result, panel * kPanel, width);
                   });
  });
}

template <class Number>
void multiply_all(const bf16* left, int64_t num_rows, int64_t depth, const bf16* matrix, int64_t width, Number* out) {
  multiply_all(left, num_rows, depth, matrix, width, out, [](Pair&, int64_t, int64_t) {});
}

// The same with the adapters of the rows' tokens.
template <class Number>
void multiply_adapted(const bf16* left, int64_t num_rows, int64_t depth, const bf16* matrix, int64_t width, Number* out,
                      const Adapters& adapters) {
  if (!adapters.a) return multiply_all(left, num_rows, depth, matrix, width, out);
  thread_local AdaptedRows rows_here;
  AdaptedRows& rows = rows_here;
  rows.find(adapters, left, depth, num_rows);
  multiply_all(left, num_rows, depth, matrix, width, out,
               [&](Pair& sums, int64_t r, int64_t column) { rows.add(sums, r, column); });
}

}  // namespace native
