// Logarithms of registers, and functions made of them.
#pragma once

#include "products.h"

namespace native {

// Natural logarithm of positive normal numbers, to about one unit in the last place: Cephes' polynomial.
inline F16 logarithm(F16 x) {
  F16 exponent = exponent_of(x), m = mantissa_of(x);
  const F16 one = all(1.0f);
  const Mask is_large = is_more(m, all(1.41421356f));
  m = either(is_large, m * all(0.5f), m);
  exponent = either(is_large, exponent + one, exponent);
  const F16 r = m - one, square = r * r;
  F16 p = all(7.0376836292e-2f);
  for (float c : {-1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f, -1.6668057665e-1f,
                  2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f})
    p = fma(p, r, all(c));
  F16 rest = fma(exponent, all(-2.12194440e-4f), (((p * r)) * square));
  rest = fnma(all(0.5f), square, rest);
  return fma(exponent, all(0.693359375f), (r + rest));
}

// log(1 + e^x), as exact where e^x is small: the rounding of the sum corrects its logarithm.
inline F16 softplus(F16 x) {
  const F16 zero = zeros(), one = all(1.0f);
  const F16 grown = exponential(zero - most(x, zero - x)), sum = one + grown, step = sum - one;
  const F16 corrected = logarithm(sum) * (grown / step);
  return most(zero, x) + either(is_same(step, zero), grown, corrected);
}

}  // namespace native
