// Sums of products in float32, each element one chain of fused steps: its bits do not depend on the rows beside it.
#pragma once

#include "rows.h"

namespace native {

// A matrix of float32 in memory: element (r, k) at `first[r * row + k * column]`.
struct Factors {
  const float* first;
  int64_t row, column;
};

constexpr int kChainRows = kPartLanes == 16 ? 8 : 4;        // rows that share a load of the right side
constexpr int kChainRegisters = kPartLanes == 16 ? 16 : 6;  // sums of 16 lanes that are held in registers

template <int Rows, int Parts, bool IsWhole>
inline void chain_tile(Factors left, int64_t depth, const float* right, int64_t stride, float* out, int64_t out_stride,
                       Mask lanes) {
  const auto read_part = [&](const float* from) __attribute__((always_inline)) {
    return IsWhole ? load(from) : load(lanes, from);
  };
  F16 sums[Rows][Parts];
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
    for (int p = 0; p < Parts; ++p) sums[r][p] = read_part(out + r * out_stride + 16 * p);
  for (int64_t k = 0; k < depth; ++k) {
    F16 here[Parts];
#pragma GCC unroll 8
    for (int p = 0; p < Parts; ++p) here[p] = read_part(right + k * stride + 16 * p);
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
      const F16 factor = all(left.first[r * left.row + k * left.column]);
#pragma GCC unroll 8
      for (int p = 0; p < Parts; ++p) sums[r][p] = fma(factor, here[p], sums[r][p]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
    for (int p = 0; p < Parts; ++p) {
      float* const to = out + r * out_stride + 16 * p;
      if constexpr (IsWhole) put(to, sums[r][p]);
      else put(to, lanes, sums[r][p]);
    }
}

template <int Rows>
inline void chain_rows(Factors left, int64_t depth, const float* right, int64_t stride, float* out, int64_t out_stride,
                       int64_t columns) {
  constexpr int kParts = std::min(8, std::max(1, kChainRegisters / Rows));
  int64_t c = 0;
  for (; c + 16 * kParts <= columns; c += 16 * kParts)
    chain_tile<Rows, kParts, true>(left, depth, right + c, stride, out + c, out_stride, kAllLanes);
  for (; c + 16 <= columns; c += 16)
    chain_tile<Rows, 1, true>(left, depth, right + c, stride, out + c, out_stride, kAllLanes);
  if (c < columns)
    chain_tile<Rows, 1, false>(left, depth, right + c, stride, out + c, out_stride, lanes_of(c, columns));
}

// out[r][c] += left(r, 0) * right[0][c], then left(r, 1) * right[1][c] and so on, for `rows` rows and all columns.
inline void add_chains(int64_t rows, Factors left, int64_t depth, const float* right, int64_t stride, float* out,
                       int64_t out_stride, int64_t columns) {
  const auto next = [&](auto count) __attribute__((always_inline)) {
    chain_rows<count>(left, depth, right, stride, out, out_stride, columns);
    left.first += count * left.row, out += count * out_stride, rows -= count;
  };
  while (rows >= kChainRows) next(std::integral_constant<int, kChainRows>{});
  if (kChainRows > 4 && rows >= 4) next(std::integral_constant<int, 4>{});
  if (rows >= 2) next(std::integral_constant<int, 2>{});
  if (rows >= 1) next(std::integral_constant<int, 1>{});
}

}  // namespace native
