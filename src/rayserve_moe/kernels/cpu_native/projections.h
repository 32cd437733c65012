// Products of the same rows with several packed matrices: the projections of a layer.
#pragma once

#include <initializer_list>

#include "panels.h"

namespace native {

struct Projection {
  const bf16 *weights, *bias;  // bias null: none
  bf16* out;                   // [T, width]
  int64_t width;               // 0: nothing is projected
  const AdaptedRows* adapted = nullptr;  // adapters of the rows; null: none
};

inline void add_bias(Pair& result, const bf16* bias, int64_t column, int64_t width) {
  result.low = rounded(result.low) + wide(bias + column, lanes_of(column, width));
  if (column + 16 < width)
    result.high = rounded(result.high) + wide(bias + column + 16, lanes_of(column + 16, width));
}

// Multiplies rows [T, depth] by the matrix of each part, and adds its bias; the panels of all parts share the threads.
inline void project(const bf16* rows, int64_t num_rows, int64_t depth, std::initializer_list<Projection> parts) {
  int64_t count = 0;
  for (const Projection& part : parts) count += num_panels(part.width);
  for_panels(num_rows, depth, count, [&](int64_t first, int64_t rows_here, int64_t item) {
    const Projection* part = parts.begin();
    for (; item >= num_panels(part->width); ++part) item -= num_panels(part->width);
    const bf16* panel = panel_of(part->weights, depth, part->width, item);
    multiply_panel(rows + first * depth, rows_here, depth, panel, [&](int64_t r, Pair result) {
      if (part->adapted) part->adapted->add(result, first + r, item * kPanel);
      if (part->bias) add_bias(result, part->bias, item * kPanel, part->width);
      store_columns(part->out + (first + r) * part->width, result, item * kPanel, part->width);
    });
  });
}

}  // namespace native
