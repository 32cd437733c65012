// A case of the driver: what it draws, and how what is found is compared; and a matrix as the kernels want it to lie.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <random>
#include <vector>

#include "products.h"
#include "rows.h"

using native::bf16;
using Numbers = std::vector<bf16>;
using Exact = std::vector<double>;

constexpr bf16 kNan = 0x7fc0;
inline std::atomic<int> num_wrong{0};

inline double value_of(bf16 bits) {
  const uint32_t wide = uint32_t(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

inline bf16 rounded(double value) {
  const float narrow = float(value);
  uint32_t bits;
  std::memcpy(&bits, &narrow, sizeof bits);
  return bf16((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

struct Case {
  const char* name;
  int number;
  std::mt19937 random;

  int below(int bound) { return int(random() % uint32_t(bound)); }

  Numbers draw(int64_t size, double scale = 1.0, double mean = 0.0) {
    Numbers drawn(size);
    std::normal_distribution<double> normal(mean, scale);
    for (bf16& each : drawn) each = rounded(normal(random));
    return drawn;
  }

  // The root of the mean square of the difference, and its largest, against those of what is expected.
  template <class Found>
  void compare(const char* what, const Found& found, const Exact& expected, double bound) {
    double squares = 0, worst = 0, scale = 0, largest = 0;
    for (size_t i = 0; i < expected.size(); ++i) {
      const double off = std::fabs(double(found[i]) - expected[i]);
      worst = off <= worst ? worst : off;  // NaN stays
      squares += off * off, scale += expected[i] * expected[i], largest = std::max(largest, std::fabs(expected[i]));
    }
    if (squares <= bound * bound * (scale + 1e-12) && worst <= 8 * bound * (largest + 1e-6)) return;
    ++num_wrong;
    std::printf("%s %d: %s differs by %g of %g\n", name, number, what, worst, largest);
  }
};

// [K, N] as panels of 32 columns, the last one of what remains, in each the pairs of neighbouring k. Pairs of int8 lie by
// halves of the columns of a whole panel.
template <class Number>
std::vector<Number> packed(const std::vector<Number>& plain, int64_t depth, int64_t width) {
  std::vector<Number> out(plain.size());
  for (int64_t k = 0; k < depth; ++k)
    for (int64_t n = 0; n < width; ++n) {
      const int64_t columns = std::min<int64_t>(32, width - n / 32 * 32);
      const int64_t of_pair = sizeof(Number) == 1 && columns == 32 ? n % 32 / 16 * 32 + k % 2 * 16 + n % 16 : n % 32 * 2 + k % 2;
      out[n / 32 * 32 * depth + k / 2 * 2 * columns + of_pair] = plain[k * width + n];
    }
  return out;
}

inline double dot(const bf16* row, const Numbers& plain, int64_t first, int64_t depth, int64_t width) {
  double sum = 0;
  for (int64_t k = 0; k < depth; ++k) sum += value_of(row[k]) * value_of(plain[first + k * width]);
  return sum;
}
