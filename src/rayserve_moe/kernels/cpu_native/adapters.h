// Low-rank adapters of tokens beside the products of a layer: s B (A x), of each token's own adapter, added in float32 to
// the sums of the base matrix. Other tokens do not change a token's bits. Tokens without one have the base model's bits.
#pragma once

#include <algorithm>

#include "rows.h"
#include "scratch.h"
#include "threads.h"

namespace native {

// The resident adapters of one matrix of a layer, or of a matrix of each expert.
struct Adapters {
  const bf16* a = nullptr;          // [experts, slots, rank, inputs]; null: adapters never change the matrix
  const bf16* b = nullptr;          // [experts, slots, rank, outputs]
  const int32_t* slots = nullptr;   // of each token; -1: it has no adapter
  int64_t num_slots = 0, rank = 0, inputs = 0, outputs = 0;
  bool shares_a = false, shares_b = false;  // all experts have the first matrix there

  bool change(int64_t token) const { return a && slots[token] >= 0; }
  // Index of A and of B of a token's adapter for an expert, in slots.
  int64_t place_of_a(int64_t token, int64_t expert) const { return (shares_a ? 0 : expert) * num_slots + slots[token]; }
  int64_t place_of_b(int64_t token, int64_t expert) const { return (shares_b ? 0 : expert) * num_slots + slots[token]; }
};

// Where an adapter reads its inputs: `a` and `b` change places where a matrix is read from its outputs to its inputs.
struct Ranks {
  const bf16* matrix;        // of slot 0: rows of the ranks, from the first of `inputs` on
  int64_t stride, of_slot;   // from rank to rank, and from slot to slot
  int64_t inputs;
};

inline Ranks ranks_of(const Adapters& adapters) {
  return {adapters.a, adapters.inputs, adapters.rank * adapters.inputs, adapters.inputs};
}

inline float dot(const bf16* x, const bf16* y, int64_t size) {
  F16 sums = zeros();
  for (int64_t i = 0; i < size; i += 16) {
    const Mask lanes = lanes_of(i, size);
    sums = fma(wide(x + i, lanes), wide(y + i, lanes), sums);
  }
  return total(sums);
}

// A x of the adapter in `slot`, rounded to bfloat16: [rank].
inline void reduce_row(const Ranks& ranks, int64_t rank, int64_t slot, const bf16* x, float* out) {
  const bf16* row = ranks.matrix + slot * ranks.of_slot;
  for (int64_t j = 0; j < rank; ++j, row += ranks.stride) out[j] = dot(x, row, ranks.inputs);
  for (int64_t j = 0; j < rank; j += 16) {
    const Mask lanes = lanes_of(j, rank);
    put(out + j, lanes, rounded(load(lanes, out + j)));
  }
}

// Columns `column` and behind it of `row` of the adapter in `slot`, times the ranks of a token, added to a panel's sums.
inline void add_ranks(Pair& sums, const bf16* rows, int64_t width, int64_t rank, const float* ranks, int64_t column) {
  const Mask low = lanes_of(column, width), high = column + 16 < width ? lanes_of(column + 16, width) : Mask(0);
  for (int64_t j = 0; j < rank; ++j, rows += width) {
    const F16 by = all(ranks[j]);
    sums.low = fma(by, wide(rows + column, low), sums.low);
    if (high) sums.high = fma(by, wide(rows + column + 16, high), sums.high);
  }
}

// A x of all tokens for one matrix, and the sums s B (A x) for the panels of its product.
class AdaptedRows {
 public:
  // `token_of(row)` is the token that a row of `rows` belongs to, and `expert_of(row)` the expert that multiplies it.
  template <class TokenOf, class ExpertOf>
  void find(const Adapters& adapters, const bf16* rows, int64_t stride, int64_t num_rows, TokenOf&& token_of,
            ExpertOf&& expert_of) {
    adapters_ = &adapters;
    if (!adapters.a) return;
    float* const ranks = ranks_.sized(num_rows * adapters.rank);
    for_pieces(num_rows, 2, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const int64_t token = token_of(r);
        if (adapters.change(token))
          reduce_row(ranks_of(adapters), adapters.rank, adapters.place_of_a(token, expert_of(r)), rows + r * stride,
                     ranks + r * adapters.rank);
      }
    });
  }
  void find(const Adapters& adapters, const bf16* rows, int64_t stride, int64_t num_rows) {
    find(adapters, rows, stride, num_rows, [](int64_t row) { return row; }, [](int64_t) { return 0; });
  }

  void add(Pair& sums, int64_t row, int64_t token, int64_t column, int64_t expert = 0) const {
    const Adapters& of = *adapters_;
    if (!of.change(token)) return;
    add_ranks(sums, of.b + of.place_of_b(token, expert) * of.rank * of.outputs, of.outputs, of.rank,
              ranks_.data() + row * of.rank, column);
  }
  void add(Pair& sums, int64_t row, int64_t column) const { add(sums, row, row, column); }

 private:
  const Adapters* adapters_ = nullptr;
  Scratch<float> ranks_;  // [rows, rank], of rows whose tokens have adapters
};

}  // namespace native
