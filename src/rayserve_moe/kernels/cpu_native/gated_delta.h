// Layers with a delta rule: projections, convolution, recurrence on a grid of 64 tokens, gates and the output product.
// Rule, entries and rings are as in `kernels/reference/gated_delta.py`. A head has a decay, or one per element of a key.
//
// Each sum over elements or tokens is one chain in ascending order (`chains.h`), so a token's bits do not depend on the
// tokens computed beside it. Arrays of a ring are ordered for these chains: see `DeltaPools`.
#pragma once

#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "chains.h"
#include "logarithm.h"
#include "projections.h"
#include "scratch.h"
#include "threads.h"

namespace native {

constexpr int64_t kChunk = 64;       // tokens from one entry to the next
constexpr int64_t kPiece = 8;        // tokens that are computed together
constexpr int64_t kWindowRows = 16;  // inputs of the convolution that a row keeps
constexpr float kUnitEps = 1e-6f;    // added to the sum of squares of a query or key

struct DeltaShapes {
  int64_t num_tokens, width, num_heads, num_key_heads, key_width, value_width, num_taps;
  int64_t num_entries, num_rows, num_pieces;  // entries and rows of this layer
  float eps;
  int64_t num_decays = 1;      // of a head: 1, or the width of a key
  int64_t rank = 0;            // width between the two products of decays, and of gates; 0: each is one product
  float decay_floor = 0;       // decays are floor * sigmoid(rate * x); 0: -rate * softplus(x)
  bool rounds_decays = false;  // to bfloat16
  bool has_sigmoid = false;    // function of the output's gate; else SiLU
  int64_t per_key() const { return num_heads / num_key_heads; }
  int64_t q_width() const { return num_key_heads * key_width; }
  int64_t v_width() const { return num_heads * value_width; }
  int64_t channels() const { return 2 * key_width + per_key() * value_width; }  // of a key head
};

// This layer's entries and rings.
struct DeltaPools {
  float* state;   // [E, H, d, v]
  float* window;  // [E, taps - 1, K, channels], oldest first
  float* keys;    // [R, K, d, 64]
  float* fresh;   // [R, H, 64, v]
  float* decay;   // [R, H, decays, 64], sums since the entry
  float* inputs;  // [R, 16, K, channels], position p at p % 16
};

struct DeltaWeights {
  const bf16 *q, *k, *v, *z, *b, *a, *o;       // this layer's, packed
  const bf16 *q_taps, *k_taps, *v_taps;        // [taps, channels of all heads]
  const float *log_decay, *decay_bias, *norm;  // [H], [H, decays], [v]
  const bf16 *a_in = nullptr, *z_in = nullptr;  // the first of two products, packed
};

// Biases of the convolution, of q, k and v of all heads; null: none.
struct ConvBiases {
  const bf16 *q = nullptr, *k = nullptr, *v = nullptr;
};

struct DeltaPiece {
  int32_t row, start, known, count, token, own, source, base;
};

// Rows of all tokens between the projections and the output product.
struct DeltaRows {
  bf16 *q, *k, *v, *z, *b, *a, *gated;
  float *decay, *beta;  // [T, H, decays], [T, H]
  float* is_finite;     // [T], 1 or 0
};

// Memory of a thread for a piece of one key head.
struct PieceBuffers {
  float *rows;     // [2 * piece, d]: keys, then queries
  float *scaled;   // [2 * piece, d], times the decay since the entry
  float *dots;     // [2 * piece, 64], with keys of the ring
  float *weights;  // [2 * piece, 64]
  float *sums;     // [2 * piece, v]
  float *mixed;    // [piece, channels]
  float *folded;   // [d, 64], of a fold, or keys ahead of the piece with their decays up to its start
  float *near;     // [2 * piece, d], rows times the decay since the piece's start
  float *totals;   // [1 + piece, d], sums of decays at the piece's start, then up to its tokens
  float *own;      // [piece, d], keys of the piece

  explicit PieceBuffers(const DeltaShapes& s) {
    thread_local Scratch<float> scratch;
    const int64_t d = s.key_width, twice = 2 * kPiece;
    float* at = scratch.sized(twice * (5 * d + 2 * kChunk + s.value_width) + kPiece * s.channels() + d * kChunk + 16);
    const auto take = [&](int64_t size) { return std::exchange(at, at + size); };
    rows = take(twice * d), scaled = take(twice * d), dots = take(twice * kChunk), weights = take(twice * kChunk);
    sums = take(twice * s.value_width), mixed = take(kPiece * s.channels()), folded = take(d * kChunk);
    near = take(twice * d), totals = take((1 + kPiece) * d), own = take(kPiece * d);
  }
};

inline bool are_finite(const bf16* numbers, int64_t count) {
  uint32_t is_finite = 1;
  for (int64_t i = 0; i < count; ++i) is_finite &= (numbers[i] & 0x7f80) != 0x7f80;
  return is_finite;
}

inline float softplus(float x) { return std::max(x, 0.0f) + std::log1p(std::exp(-std::abs(x))); }

// Logarithms of the decays of a token.
inline void find_decays(const DeltaShapes& s, const DeltaWeights& w, const bf16* a, float* decay) {
  const int64_t count = s.num_decays;
  for (int64_t h = 0; h < s.num_heads; ++h) {
    const float rate = std::exp(w.log_decay[h]);
    if (count == 1) {
      decay[h] = -rate * softplus(narrow(a[h]) + w.decay_bias[h]);
      continue;
    }
    for (int64_t e = h * count; e < (h + 1) * count; e += 16) {
      const Mask lanes = lanes_of(e, (h + 1) * count);
      const F16 x = wide(a + e, lanes) + load(lanes, w.decay_bias + e);
      const F16 found = s.decay_floor < 0 ? gated_by_sigmoid(all(s.decay_floor), all(rate) * x) : all(-rate) * softplus(x);
      put(decay + e, lanes, s.rounds_decays ? rounded(found) : found);
    }
  }
}

// Decays and betas of a token. If its projections are not finite, it is computed as zeros.
inline void shape_token(const DeltaShapes& s, const DeltaWeights& w, const DeltaRows& rows, int64_t t) {
  const int64_t heads = s.num_heads, decays = heads * s.num_decays;
  bf16 *q = rows.q + t * s.q_width(), *k = rows.k + t * s.q_width(), *v = rows.v + t * s.v_width();
  const bf16 *a = rows.a + t * decays, *b = rows.b + t * heads;
  float *decay = rows.decay + t * decays, *beta = rows.beta + t * heads;
  bool is_finite = are_finite(q, s.q_width()) && are_finite(k, s.q_width()) && are_finite(v, s.v_width()) &&
                   are_finite(a, decays) && are_finite(b, heads);
  find_decays(s, w, a, decay);
  for (int64_t i = 0; i < decays; ++i) is_finite = is_finite && std::isfinite(decay[i]);
  for (int64_t h = 0; h < heads; ++h) beta[h] = 1.0f / (1.0f + std::exp(-narrow(b[h])));
  rows.is_finite[t] = is_finite;
  if (is_finite) return;
  std::fill_n(q, s.q_width(), bf16{}), std::fill_n(k, s.q_width(), bf16{}), std::fill_n(v, s.v_width(), bf16{});
  std::fill_n(decay, decays, 0.0f), std::fill_n(beta, heads, 0.0f);
}

// The pieces of one row in a step, for one key head and its value heads.
class DeltaHead {
 public:
  DeltaHead(const DeltaShapes& s, const DeltaWeights& w, const DeltaPools& pools, const DeltaRows& rows, int64_t head)
      : s_(s), w_(w), pools_(pools), rows_(rows), buffers_(s), head_(head) {}

  void compute(const DeltaPiece& p) {
    const int64_t entry = folded_entry(p);
    mix(p);
    shape_rows(p);
    for (int64_t h = 0; h < s_.per_key(); ++h) advance(p, head_ * s_.per_key() + h, h, entry);
  }

 protected:
  // The entry with the state ahead of a piece's chunk. A piece that begins a chunk folds the chunk before it.
  int64_t folded_entry(const DeltaPiece& p) const {
    const bool folds = p.start % kChunk == 0 && p.known == 0 && p.start != p.base;
    const int64_t base = p.start / kChunk * kChunk - (folds ? kChunk : 0);
    const int64_t entry = base == p.base ? p.source : p.own;
    if (folds) fold(p, entry);
    return folds ? p.own : entry;
  }

  float* state(int64_t entry, int64_t h) const {
    return pools_.state + (entry * s_.num_heads + h) * s_.key_width * s_.value_width;
  }
  float* keys(int64_t row) const { return pools_.keys + (row * s_.num_key_heads + head_) * s_.key_width * kChunk; }
  float* fresh(int64_t row, int64_t h) const { return pools_.fresh + (row * s_.num_heads + h) * kChunk * s_.value_width; }
  float* decay(int64_t row, int64_t h) const { return pools_.decay + (row * s_.num_heads + h) * s_.num_decays * kChunk; }
  float* inputs(int64_t row, int64_t position) const {
    return pools_.inputs + ((row * kWindowRows + position % kWindowRows) * s_.num_key_heads + head_) * s_.channels();
  }
  float* window(int64_t entry, int64_t place) const {
    return pools_.window + ((entry * (s_.num_taps - 1) + place) * s_.num_key_heads + head_) * s_.channels();
  }

  // Writes the state after a full ring, and the inputs ahead of the piece, to the row's own entry.
  void fold(const DeltaPiece& p, int64_t entry) const {
    const int64_t d = s_.key_width, v = s_.value_width;
    for (int64_t i = 0; i < s_.per_key(); ++i) {
      const int64_t h = head_ * s_.per_key() + i;
      const float* const from = state(entry, h);
      float* const to = state(p.own, h);
      const int64_t of_decay = d / s_.num_decays;  // elements of a key
      for (int64_t first = 0; first < d; first += of_decay) {
        const float* const decays = decay(p.row, h) + first / of_decay * kChunk;
        const F16 last = all(decays[kChunk - 1]), kept = exponential(last);
        for (int64_t j = 0; j < kChunk; j += 16) {
          const F16 factor = exponential(last - load(decays + j));
          for (int64_t e = first; e < first + of_decay; ++e)
            put(buffers_.folded + e * kChunk + j, load(keys(p.row) + e * kChunk + j) * factor);
        }
        for (int64_t e = first * v, end = (first + of_decay) * v; e < end; e += 16) {
          const Mask lanes = lanes_of(e, end);
          put(to + e, lanes, load(lanes, from + e) * kept);
        }
      }
      add_chains(d, {buffers_.folded, kChunk, 1}, kChunk, fresh(p.row, h), v, to, v, v);
    }
    for (int64_t place = 0; place < s_.num_taps - 1; ++place)
      std::copy_n(inputs(p.row, p.start - (s_.num_taps - 1) + place), s_.channels(), window(p.own, place));
  }

  // A part of this head's channels: q, k or v.
  struct Part {
    const bf16 *rows, *taps, *bias;
    int64_t width;         // of all heads
    int64_t first, count;  // channels of this head
  };

  template <class Use>
  void for_parts(const ConvBiases& bias, Use&& use) const {
    const int64_t d = s_.key_width, v = s_.per_key() * s_.value_width;
    use(Part{rows_.q, w_.q_taps, bias.q, s_.q_width(), 0, d});
    use(Part{rows_.k, w_.k_taps, bias.k, s_.q_width(), d, d});
    use(Part{rows_.v, w_.v_taps, bias.v, s_.v_width(), 2 * d, v});
  }

  // The input of the convolution `back` tokens before `position`; null: zeros.
  const float* input_before(const DeltaPiece& p, int64_t position, int64_t back) const {
    const int64_t at = position - back;
    if (at >= p.base) return inputs(p.row, at);
    return at < 0 ? nullptr : window(p.source, at - p.base + s_.num_taps - 1);
  }

  // Keeps the piece's inputs in the ring, then convolves them: SiLU of the sum over taps, rounded to bfloat16.
  void mix(const DeltaPiece& p, const ConvBiases& biases = {}) const {
    for (int64_t i = 0; i < p.count; ++i)
      for_parts(biases, [&](const Part& part) {
        const bf16* const from = part.rows + (p.token + i) * part.width + head_ * part.count;
        float* const to = inputs(p.row, p.start + p.known + i) + part.first;
        for (int64_t c = 0; c < part.count; ++c) to[c] = narrow(from[c]);
      });
    for (int64_t i = 0; i < p.count; ++i)
      for_parts(biases, [&](const Part& part) {
        mix_token(p, p.start + p.known + i, part, buffers_.mixed + i * s_.channels() + part.first);
      });
  }

  void mix_token(const DeltaPiece& p, int64_t position, const Part& part, float* out) const {
    const bf16* const taps = part.taps + head_ * part.count;
    for (int64_t c = 0; c < part.count; c += 16) {
      const Mask lanes = lanes_of(c, part.count);
      const auto tap_of = [&](int64_t tap) { return wide(taps + tap * part.width + c, lanes); };
      F16 sum = load(lanes, inputs(p.row, position) + part.first + c) * tap_of(s_.num_taps - 1);
      for (int64_t tap = 0; tap < s_.num_taps - 1; ++tap)
        if (const float* const before = input_before(p, position, s_.num_taps - 1 - tap))
          sum = fma(load(lanes, before + part.first + c), tap_of(tap), sum);
      if (part.bias) sum = sum + wide(part.bias + head_ * part.count + c, lanes);
      put(out + c, lanes, rounded(gated_by_sigmoid(sum, sum)));
    }
  }

  // Norms keys and queries and adds the keys to the ring. With a decay per head, multiplies both by all keys up to the
  // newest.
  void shape_rows(const DeltaPiece& p) const {
    const int64_t d = s_.key_width;
    for (int64_t i = 0; i < p.count; ++i) {
      const float* const mixed = buffers_.mixed + i * s_.channels();
      make_unit(mixed + d, 1.0f, buffers_.rows + i * d);
      make_unit(mixed, 1.0f / std::sqrt(float(d)), buffers_.rows + (p.count + i) * d);
    }
    add_keys(p);
    if (s_.num_decays == 1) multiply_by_keys(p);  // else `weigh_elements` multiplies
  }

  // Adds the keys of a piece to the ring.
  void add_keys(const DeltaPiece& p) const {
    const int64_t d = s_.key_width, first = p.start % kChunk + p.known;
    float* const ring = keys(p.row);
    for (int64_t i = 0; i < p.count; ++i)
      for (int64_t e = 0; e < d; ++e) ring[e * kChunk + first + i] = buffers_.rows[i * d + e];
  }

  // Multiplies the keys and queries of a piece by all keys up to the newest.
  void multiply_by_keys(const DeltaPiece& p) const {
    const int64_t d = s_.key_width, first = p.start % kChunk + p.known;
    const float* const ring = keys(p.row);
    const int64_t columns = (first + p.count + 15) / 16 * 16;
    std::fill_n(buffers_.dots, 2 * p.count * kChunk, 0.0f);
    add_chains(2 * p.count, {buffers_.rows, d, 1}, d, ring, kChunk, buffers_.dots, kChunk, columns);
  }

  void make_unit(const float* from, float scale, float* to) const {
    F16 squares = zeros();
    for (int64_t e = 0; e < s_.key_width; e += 16) {
      const F16 x = load(lanes_of(e, s_.key_width), from + e);
      squares = fma(x, x, squares);
    }
    const F16 shrink = all(1.0f / std::sqrt(total(squares) + kUnitEps)), by = all(scale);
    for (int64_t e = 0; e < s_.key_width; e += 16) {
      const Mask lanes = lanes_of(e, s_.key_width);
      put(to + e, lanes, rounded(load(lanes, from + e) * shrink * by));
    }
  }

  // Decays since the entry of the piece's tokens, and the weights of the tokens that each of them reads.
  void weigh(const DeltaPiece& p, int64_t h) const {
    const int64_t d = s_.key_width, first = p.start % kChunk + p.known;
    float* const decays = decay(p.row, h);
    for (int64_t i = 0; i < p.count; ++i) {
      const float before = first + i ? decays[first + i - 1] : 0.0f;
      const F16 own = all(decays[first + i] = before + rows_.decay[(p.token + i) * s_.num_heads + h]);
      const F16 since = exponential(own);
      for (int64_t r : {i, p.count + i}) {
        for (int64_t e = 0; e < d; e += 16) {
          const Mask lanes = lanes_of(e, d);
          put(buffers_.scaled + r * d + e, lanes, load(lanes, buffers_.rows + r * d + e) * since);
        }
        for (int64_t j = 0; j <= first + i; j += 16)
          put(buffers_.weights + r * kChunk + j,
              load(buffers_.dots + r * kChunk + j) * exponential(own - load(decays + j)));
      }
    }
  }

  // Like `weigh`, with a decay for each element of a key. Between a token ahead of the piece and one in it, the decay
  // is split at the start of the piece, so that both factors are at most 1. Between tokens of the piece, it is the
  // exponential of a difference of sums.
  void weigh_elements(const DeltaPiece& p, int64_t h) const {
    const int64_t d = s_.key_width, past = p.start % kChunk, end = past + p.known + p.count;
    const float* const ring = keys(p.row);
    for (int64_t e = 0; e < d; ++e) {
      float* const sums = decay(p.row, h) + e * kChunk;
      for (int64_t i = 0; i < p.count; ++i) {
        const int64_t at = past + p.known + i;
        sums[at] = (at ? sums[at - 1] : 0.0f) + rows_.decay[((p.token + i) * s_.num_heads + h) * d + e];
      }
      const float start = buffers_.totals[e] = past ? sums[past - 1] : 0.0f;
      for (int64_t j = 0; j < past; j += 16) {
        const Mask lanes = lanes_of(j, past);
        put(buffers_.folded + e * kChunk + j, lanes,
            load(lanes, ring + e * kChunk + j) * exponential(all(start) - load(lanes, sums + j)));
      }
      for (int64_t j = past; j < end; ++j) {
        buffers_.totals[(1 + j - past) * d + e] = sums[j];
        buffers_.own[(j - past) * d + e] = ring[e * kChunk + j];
      }
    }
    for (int64_t i = 0; i < p.count; ++i)
      for (int64_t e = 0; e < d; e += 16) {
        const Mask lanes = lanes_of(e, d);
        const F16 sum = load(lanes, buffers_.totals + (1 + p.known + i) * d + e);
        const F16 since_entry = exponential(sum), since_start = exponential(sum - load(lanes, buffers_.totals + e));
        for (int64_t r : {i, p.count + i}) {
          const F16 row = load(lanes, buffers_.rows + r * d + e);
          put(buffers_.scaled + r * d + e, lanes, row * since_entry);
          put(buffers_.near + r * d + e, lanes, row * since_start);
        }
      }
    std::fill_n(buffers_.weights, 2 * p.count * kChunk, 0.0f);
    add_chains(2 * p.count, {buffers_.near, d, 1}, d, buffers_.folded, kChunk, buffers_.weights, kChunk, past);
    for (int64_t i = 0; i < p.count; ++i)
      for (int64_t j = 0; j <= p.known + i; ++j)
        for (int64_t r : {i, p.count + i})
          buffers_.weights[r * kChunk + past + j] =
                  decayed_product(buffers_.rows + r * d, buffers_.own + j * d, buffers_.totals + (1 + p.known + i) * d,
                              buffers_.totals + (1 + j) * d);
  }

  // The product of a row and a key with the decays between them, given the sums of decays at both.
  float decayed_product(const float* row, const float* key, const float* at_row, const float* at_key) const {
    F16 sum = zeros();
    for (int64_t e = 0; e < s_.key_width; e += 16) {
      const Mask lanes = lanes_of(e, s_.key_width);
      const F16 decay = exponential(load(lanes, at_row + e) - load(lanes, at_key + e));
      sum = fma(load(lanes, row + e) * load(lanes, key + e), decay, sum);
    }
    return total(sum);
  }

  // Advances a value head, the `in_key`-th of its key head: products of keys and queries with the state and the ring,
  // fresh values one after the other, then the outputs.
  void advance(const DeltaPiece& p, int64_t h, int64_t in_key, int64_t entry) const {
    const int64_t d = s_.key_width, v = s_.value_width, past = p.start % kChunk, first = past + p.known;
    s_.num_decays > 1 ? weigh_elements(p, h) : weigh(p, h);
    float* const ring = fresh(p.row, h);
    std::fill_n(buffers_.sums, 2 * p.count * v, 0.0f);
    add_chains(2 * p.count, {buffers_.scaled, d, 1}, d, state(entry, h), v, buffers_.sums, v, v);
    add_chains(2 * p.count, {buffers_.weights, kChunk, 1}, past, ring, v, buffers_.sums, v, v);
    const auto add_own = [&](int64_t r, int64_t end) {
      add_chains(1, {buffers_.weights + r * kChunk + past, 0, 1}, end - past, ring + past * v, v, buffers_.sums + r * v, v, v);
    };
    for (int64_t i = 0; i < p.count; ++i) {
      add_own(i, first + i);
      const F16 beta = all(rows_.beta[(p.token + i) * s_.num_heads + h]);
      const float* const value = buffers_.mixed + i * s_.channels() + 2 * d + in_key * v;
      for (int64_t c = 0; c < v; c += 16) {
        const Mask lanes = lanes_of(c, v);
        put(ring + (first + i) * v + c, lanes, beta * (load(lanes, value + c) - load(lanes, buffers_.sums + i * v + c)));
      }
    }
    for (int64_t i = 0; i < p.count; ++i) {
      add_own(p.count + i, first + i + 1);
      gate(p.token + i, h, buffers_.sums + (p.count + i) * v);
    }
  }

  // Norms an output and multiplies it by the function of its gate.
  void gate(int64_t t, int64_t h, const float* out) const {
    const int64_t v = s_.value_width;
    const bf16* const z = rows_.z + t * s_.v_width() + h * v;
    bf16* const to = rows_.gated + t * s_.v_width() + h * v;
    if (!rows_.is_finite[t]) {
      std::fill_n(to, v, bf16{0x7fc0});  // NaN
      return;
    }
    F16 squares = zeros();
    for (int64_t c = 0; c < v; c += 16) {
      const F16 x = load(lanes_of(c, v), out + c);
      squares = fma(x, x, squares);
    }
    const F16 shrink = all(1.0f / std::sqrt(total(squares) / v + s_.eps));
    for (int64_t c = 0; c < v; c += 16) {
      const Mask lanes = lanes_of(c, v);
      const F16 normed = load(lanes, out + c) * shrink * load(lanes, w_.norm + c), g = wide(z + c, lanes);
      store(to + c, s_.has_sigmoid ? gated_by_sigmoid(normed, g) : normed * gated_by_sigmoid(g, g), lanes);
    }
  }

  const DeltaShapes& s_;
  const DeltaWeights& w_;
  const DeltaPools& pools_;
  const DeltaRows& rows_;
  const PieceBuffers buffers_;
  const int64_t head_;
};

// Groups pieces with tokens by row, each group in the order of the step.
inline std::vector<std::vector<DeltaPiece>> by_row(const DeltaPiece* pieces, const DeltaShapes& s) {
  std::vector<std::vector<DeltaPiece>> groups;
  std::vector<int32_t> group_of(s.num_rows, -1);
  for (int64_t i = 0; i < s.num_pieces; ++i) {
    if (pieces[i].count <= 0) continue;
    int32_t& group = group_of[pieces[i].row];
    if (group < 0) group = int32_t(groups.size()), groups.emplace_back();
    groups[group].push_back(pieces[i]);
  }
  return groups;
}

// Shapes all tokens, then computes the pieces of each row in their order, for every key head.
template <class ShapeToken, class HeadOf>
inline void advance_rows(const DeltaShapes& s, const DeltaRows& rows, const DeltaPiece* pieces, ShapeToken&& shape,
                         HeadOf&& head_of) {
  for_pieces(s.num_tokens, 8, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) shape(t);
    std::fill(rows.gated + begin * s.v_width(), rows.gated + end * s.v_width(), bf16{});  // padding stays zeros
  });
  const auto of_rows = by_row(pieces, s);
  for_each(int64_t(of_rows.size()) * s.num_key_heads, [&](int64_t item) {
    auto head = head_of(item % s.num_key_heads);
    for (const DeltaPiece& piece : of_rows[item / s.num_key_heads]) head.compute(piece);
  });
}

inline void delta_layer(const DeltaShapes& s, const DeltaWeights& w, const DeltaPools& pools, const bf16* hidden,
                        const DeltaPiece* pieces, float* out) {
  thread_local Scratch<bf16> narrow_rows;
  thread_local Scratch<float> wide_rows;
  const int64_t T = s.num_tokens, q = s.q_width(), v = s.v_width(), heads = s.num_heads, decays = heads * s.num_decays;
  bf16* at = narrow_rows.sized(T * (2 * q + 3 * v + heads + decays + 2 * s.rank));
  const auto take = [&](int64_t width) { return std::exchange(at, at + T * width); };
  DeltaRows rows{take(q), take(q), take(v), take(v), take(heads), take(decays), take(v), nullptr, nullptr, nullptr};
  rows.decay = wide_rows.sized(T * (decays + heads + 1));
  rows.beta = rows.decay + T * decays, rows.is_finite = rows.beta + T * heads;
  bf16 *const a_mid = take(s.rank), *const z_mid = take(s.rank);
  const Projection a{w.a, nullptr, rows.a, decays}, z{w.z, nullptr, rows.z, v};
  const Projection a_first = s.rank ? Projection{w.a_in, nullptr, a_mid, s.rank} : a;
  const Projection z_first = s.rank ? Projection{w.z_in, nullptr, z_mid, s.rank} : z;
  project(hidden, T, s.width, {{w.q, nullptr, rows.q, q}, {w.k, nullptr, rows.k, q}, {w.v, nullptr, rows.v, v},
                               z_first, {w.b, nullptr, rows.b, heads}, a_first});
  if (s.rank) project(a_mid, T, s.rank, {a}), project(z_mid, T, s.rank, {z});
  advance_rows(
      s, rows, pieces, [&](int64_t t) { shape_token(s, w, rows, t); },
      [&](int64_t head) { return DeltaHead(s, w, pools, rows, head); });
  multiply_all(rows.gated, T, v, w.o, s.width, out);
}

// Whether pieces lie within the step, and their rows and entries in the pools.
inline bool are_in_pools(const DeltaShapes& s, const DeltaPiece* pieces) {
  const auto is_entry = [&](int32_t entry) { return entry >= 0 && entry < s.num_entries; };
  for (int64_t i = 0; i < s.num_pieces; ++i) {
    const DeltaPiece& p = pieces[i];
    if (p.count <= 0) continue;
    if (p.row < 0 || p.row >= s.num_rows || !is_entry(p.own) || !is_entry(p.source) || p.start < 0 ||
        p.start % kPiece || p.known < 0 || p.known + p.count > kPiece || p.token < 0 || p.token + p.count > s.num_tokens)
      return false;
    if (p.base < 0 || p.base % kChunk || p.base > p.start) return false;
  }
  return true;
}

}  // namespace native
