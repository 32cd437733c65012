// Sixteen lanes of float32 or int32, in as many registers as the processor needs: one of AVX-512, two of AVX2, four of
// NEON or SSE2. The compiler's own vectors (GCC and Clang) do nearly all of it.
//
// A vector is a register, or two halves of it (`Two`): members with names, since compilers keep those in registers and
// put arrays into memory. Results do not depend on the width of a register: sums over lanes are formed in one order, and
// of NaN and a number `least` and `most` return their second argument.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace native {

#if defined(__AVX512F__)
constexpr int kPartLanes = 16;
#elif defined(__AVX2__)
constexpr int kPartLanes = 8;
#else
constexpr int kPartLanes = 4;
#endif

typedef float PartF __attribute__((vector_size(4 * kPartLanes)));
typedef int32_t PartI __attribute__((vector_size(4 * kPartLanes)));
typedef uint32_t PartU __attribute__((vector_size(4 * kPartLanes)));
typedef uint16_t PartH __attribute__((vector_size(2 * kPartLanes)));
typedef int8_t PartB __attribute__((vector_size(kPartLanes)));
typedef uint16_t Eight __attribute__((vector_size(16)));
typedef int32_t Four __attribute__((vector_size(16)));

template <class Half>
struct Two {
  Half low, high;
};

template <class Part, int Lanes>
struct Halved {
  using type = Two<typename Halved<Part, Lanes / 2>::type>;
};
template <class Part>
struct Halved<Part, kPartLanes> {
  using type = Part;
};
using F16 = Halved<PartF, 16>::type;
using I16 = Halved<PartI, 16>::type;

using Mask = uint16_t;  // a bit for each lane
constexpr Mask kAllLanes = 0xffff;

#define LANES_INLINE inline __attribute__((always_inline))

template <class To, class From>
LANES_INLINE To bits_of(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

// A vector whose registers are `of(lanes before it)`.
template <class Vector, class Of>
LANES_INLINE Vector made(Of of, int begin = 0) {
  if constexpr (sizeof(Vector) == sizeof(PartF)) {
    return (Vector)of(begin);
  } else {
    using Half = decltype(Vector::low);
    constexpr int kHalf = sizeof(Half) / 4;
    return {made<Half>(of, begin), made<Half>(of, begin + kHalf)};
  }
}

// Calls `use(register, lanes before it)` for each register of a vector.
template <class Vector, class Use>
LANES_INLINE void visit(const Vector& x, Use use, int begin = 0) {
  if constexpr (sizeof(Vector) == sizeof(PartF)) {
    use(x, begin);
  } else {
    constexpr int kHalf = sizeof(x.low) / 4;
    visit(x.low, use, begin);
    visit(x.high, use, begin + kHalf);
  }
}

LANES_INLINE float first_lane(PartF x) { return x[0]; }
LANES_INLINE int32_t first_lane(PartI x) { return x[0]; }
template <class Half>
LANES_INLINE auto first_lane(Two<Half> x) {
  return first_lane(x.low);
}

// Unaligned loads and stores of registers, and of what widens to them.
template <class Vector>
LANES_INLINE Vector read(const void* from) {
  typedef Vector Unaligned __attribute__((aligned(1), may_alias));
  return *static_cast<const Unaligned*>(from);
}
template <class Vector>
LANES_INLINE void write(void* to, Vector x) {
  typedef Vector Unaligned __attribute__((aligned(1), may_alias));
  *static_cast<Unaligned*>(to) = x;
}

#define LANES_BODY __attribute__((always_inline))

// Every lane the same. `x - 0` of a scalar is a broadcast; GCC adds for `0 + x`.
LANES_INLINE F16 all(float x) {
  return made<F16>([=](int) LANES_BODY { return x - PartF{}; });
}
LANES_INLINE I16 all_i(int32_t x) {
  return made<I16>([=](int) LANES_BODY { return x - PartI{}; });
}
LANES_INLINE F16 zeros() { return F16{}; }
LANES_INLINE I16 zeros_i() { return I16{}; }

// Operators of one register are the compiler's; those of halves follow. Integers wrap (-fwrapv).
#define OF_HALVES(sign)                                            \
  template <class Half>                                            \
  LANES_INLINE Two<Half> operator sign(Two<Half> a, Two<Half> b) { \
    return {a.low sign b.low, a.high sign b.high};                 \
  }
OF_HALVES(+)
OF_HALVES(-)
OF_HALVES(*)
OF_HALVES(/)
OF_HALVES(&)
OF_HALVES(|)
OF_HALVES(^)
#undef OF_HALVES

// A function of one register, and the same of halves.
#define UNARY(name, From, expression)                             \
  LANES_INLINE auto name(From a) { return expression; }           \
  template <class Half>                                           \
  LANES_INLINE auto name(Two<Half> a) {                           \
    return Two<decltype(name(a.low))>{name(a.low), name(a.high)}; \
  }
UNARY(bits, PartF, (PartI)a)
UNARY(from_bits, PartI, (PartF)a)
UNARY(to_float, PartI, __builtin_convertvector(a, PartF))
UNARY(to_int, PartF, __builtin_convertvector(a, PartI))
#undef UNARY

template <class Vector>
LANES_INLINE Vector shifted_left(Vector x, int n) {
  if constexpr (sizeof(Vector) == sizeof(PartI)) return (Vector)((PartU)x << n);
  else return {shifted_left(x.low, n), shifted_left(x.high, n)};
}
template <class Vector>
LANES_INLINE Vector shifted_right(Vector x, int n) {  // zeros come in
  if constexpr (sizeof(Vector) == sizeof(PartI)) return (Vector)((PartU)x >> n);
  else return {shifted_right(x.low, n), shifted_right(x.high, n)};
}
LANES_INLINE I16 turned_left(I16 x, int n) { return shifted_left(x, n) | shifted_right(x, 32 - n); }

// a * b + c, rounded once.
LANES_INLINE PartF fma(PartF a, PartF b, PartF c) {
#if defined(__AVX512F__)
  return (PartF)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
  return (PartF)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (PartF)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  for (int i = 0; i < kPartLanes; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
#endif
}
template <class Half>
LANES_INLINE Two<Half> fma(Two<Half> a, Two<Half> b, Two<Half> c) {
  return {fma(a.low, b.low, c.low), fma(a.high, b.high, c.high)};
}
LANES_INLINE PartF negated(PartF x) { return -x; }
template <class Half>
LANES_INLINE Two<Half> negated(Two<Half> x) {
  return {negated(x.low), negated(x.high)};
}
LANES_INLINE F16 fms(F16 a, F16 b, F16 c) { return fma(a, b, negated(c)); }   // a * b - c
LANES_INLINE F16 fnma(F16 a, F16 b, F16 c) { return fma(negated(a), b, c); }  // c - a * b

// sum += a * b, in the register that `sum` has: GCC takes others, and then moves sums through memory.
LANES_INLINE void add_product(PartF& sum, PartF a, PartF b) {
#if defined(__AVX2__) && defined(__FMA__) && !defined(__clang__)
  asm("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
#else
  sum = fma(a, b, sum);
#endif
}

// The smaller and the larger one; the second where either is NaN.
LANES_INLINE PartF least(PartF a, PartF b) {
#if defined(__AVX512F__)
  return (PartF)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (PartF)_mm256_min_ps((__m256)a, (__m256)b);
#else
  return a < b ? a : b;
#endif
}
LANES_INLINE PartF most(PartF a, PartF b) {
#if defined(__AVX512F__)
  return (PartF)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (PartF)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}
template <class Half>
LANES_INLINE Two<Half> least(Two<Half> a, Two<Half> b) {
  return {least(a.low, b.low), least(a.high, b.high)};
}
template <class Half>
LANES_INLINE Two<Half> most(Two<Half> a, Two<Half> b) {
  return {most(a.low, b.low), most(a.high, b.high)};
}

// Comparisons: a bit for each lane.
#if defined(__AVX512F__)
LANES_INLINE Mask is_more(F16 a, F16 b) { return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GT_OQ); }
LANES_INLINE Mask is_same(F16 a, F16 b) { return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_EQ_OQ); }
LANES_INLINE Mask is_more(I16 a, I16 b) { return _mm512_cmpgt_epi32_mask((__m512i)a, (__m512i)b); }
LANES_INLINE Mask is_same(I16 a, I16 b) { return _mm512_cmpeq_epi32_mask((__m512i)a, (__m512i)b); }
LANES_INLINE Mask is_no_less(I16 a, I16 b) { return _mm512_cmpge_epi32_mask((__m512i)a, (__m512i)b); }
#else
LANES_INLINE unsigned signs(PartI x) {
#if defined(__AVX2__)
  return unsigned(_mm256_movemask_ps((__m256)x));
#elif defined(__aarch64__)
  const int32x4_t places = {0, 1, 2, 3};
  return vaddvq_u32(vshlq_u32(vshrq_n_u32((uint32x4_t)x, 31), places));
#elif defined(__SSE2__)
  return unsigned(_mm_movemask_ps((__m128)x));
#else
  unsigned r = 0;
  for (int i = 0; i < kPartLanes; ++i) r |= unsigned(x[i] < 0) << i;
  return r;
#endif
}
template <class Half>
LANES_INLINE unsigned signs(Two<Half> x) {
  return signs(x.low) | signs(x.high) << sizeof(Half) / 4;
}
#define COMPARISON(name, Part, sign)                                          \
  LANES_INLINE PartI name##_lanes(Part a, Part b) { return (PartI)(a sign b); } \
  template <class Half>                                                       \
  LANES_INLINE auto name##_lanes(Two<Half> a, Two<Half> b) {                   \
    return Two<decltype(name##_lanes(a.low, b.low))>{name##_lanes(a.low, b.low), name##_lanes(a.high, b.high)}; \
  }
COMPARISON(more_f, PartF, >)
COMPARISON(same_f, PartF, ==)
COMPARISON(more_i, PartI, >)
COMPARISON(same_i, PartI, ==)
COMPARISON(no_less_i, PartI, >=)
#undef COMPARISON
LANES_INLINE Mask is_more(F16 a, F16 b) { return Mask(signs(more_f_lanes(a, b))); }
LANES_INLINE Mask is_same(F16 a, F16 b) { return Mask(signs(same_f_lanes(a, b))); }
LANES_INLINE Mask is_more(I16 a, I16 b) { return Mask(signs(more_i_lanes(a, b))); }
LANES_INLINE Mask is_same(I16 a, I16 b) { return Mask(signs(same_i_lanes(a, b))); }
LANES_INLINE Mask is_no_less(I16 a, I16 b) { return Mask(signs(no_less_i_lanes(a, b))); }
#endif

// `x` in the lanes of a mask, `rest` in the others.
#if defined(__AVX512F__)
LANES_INLINE I16 either(Mask lanes, I16 x, I16 rest) {
  return (I16)_mm512_mask_blend_epi32(lanes, (__m512i)rest, (__m512i)x);
}
#else
constexpr int32_t kLaneBits[16] = {1 << 0, 1 << 1, 1 << 2,  1 << 3,  1 << 4,  1 << 5,  1 << 6,  1 << 7,
                                   1 << 8, 1 << 9, 1 << 10, 1 << 11, 1 << 12, 1 << 13, 1 << 14, 1 << 15};
LANES_INLINE I16 either(Mask lanes, I16 x, I16 rest) {
  const I16 where = made<I16>([=](int begin) LANES_BODY {
    return (PartI)(((int32_t(lanes) - PartI{}) & read<PartI>(kLaneBits + begin)) != 0);
  });
  return rest ^ ((rest ^ x) & where);
}
#endif
LANES_INLINE F16 either(Mask lanes, F16 x, F16 rest) { return from_bits(either(lanes, bits(x), bits(rest))); }

LANES_INLINE F16 load(const float* from) {
  return made<F16>([=](int begin) LANES_BODY { return read<PartF>(from + begin); });
}
LANES_INLINE I16 load_i(const void* from) {
  return made<I16>([=](int begin) LANES_BODY { return read<PartI>(static_cast<const int32_t*>(from) + begin); });
}
LANES_INLINE void put(float* to, F16 x) {
  visit(x, [=](PartF part, int begin) LANES_BODY { write(to + begin, part); });
}
LANES_INLINE void put_i(void* to, I16 x) {
  visit(x, [=](PartI part, int begin) LANES_BODY { write(static_cast<int32_t*>(to) + begin, part); });
}

// The same of some lanes: no memory is touched for the others, which are `rest`, or zeros.
template <class Number>
__attribute__((noinline)) inline void copy_lanes(Number* to, const Number* from, uint32_t lanes) {
  for (int i = 0; lanes; ++i, lanes >>= 1)
    if (lanes & 1) to[i] = from[i];
}
LANES_INLINE F16 load(Mask lanes, const float* from, float rest = 0.0f) {
#if defined(__AVX512F__)
  return (F16)_mm512_mask_loadu_ps((__m512)all(rest), lanes, from);
#else
  if (__builtin_expect(lanes == kAllLanes, 1)) return load(from);
  float numbers[16];
  put(numbers, all(rest));
  copy_lanes(numbers, from, lanes);
  return load(numbers);
#endif
}
LANES_INLINE I16 load_i(Mask lanes, const void* from) {
#if defined(__AVX512F__)
  return (I16)_mm512_maskz_loadu_epi32(lanes, from);
#else
  if (__builtin_expect(lanes == kAllLanes, 1)) return load_i(from);
  int32_t numbers[16] = {};
  copy_lanes(numbers, static_cast<const int32_t*>(from), lanes);
  return load_i(numbers);
#endif
}
LANES_INLINE void put(float* to, Mask lanes, F16 x) {
#if defined(__AVX512F__)
  _mm512_mask_storeu_ps(to, lanes, (__m512)x);
#else
  if (__builtin_expect(lanes == kAllLanes, 1)) return put(to, x);
  float numbers[16];
  put(numbers, x);
  copy_lanes(to, numbers, lanes);
#endif
}
LANES_INLINE void put_i(void* to, Mask lanes, I16 x) {
#if defined(__AVX512F__)
  _mm512_mask_storeu_epi32(to, lanes, (__m512i)x);
#else
  if (__builtin_expect(lanes == kAllLanes, 1)) return put_i(to, x);
  int32_t numbers[16];
  put_i(numbers, x);
  copy_lanes(static_cast<int32_t*>(to), numbers, lanes);
#endif
}

// Over all lanes: lane i with lane i + 8, then with i + 4, i + 2 and i + 1, on every processor.
template <class Join>
LANES_INLINE float joined_lanes(F16 x, Join join) {
  float n[16];
  put(n, x);
  for (int half = 8; half; half /= 2)
    for (int i = 0; i < half; ++i) n[i] = join(n[i], n[i + half]);
  return n[0];
}
LANES_INLINE float total(F16 x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)x);
#else
  return joined_lanes(x, [](float a, float b) LANES_BODY { return a + b; });
#endif
}
LANES_INLINE float largest_of(F16 x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)x);
#else
  return joined_lanes(x, [](float a, float b) LANES_BODY { return a > b ? a : b; });
#endif
}
LANES_INLINE int32_t least_of(Mask lanes, I16 x) {
  int32_t n[16], r = INT32_MAX;
  put_i(n, x);
  for (int i = 0; i < 16; ++i)
    if (lanes >> i & 1 && n[i] < r) r = n[i];
  return r;
}

LANES_INLINE F16 nearest(F16 x) {  // whole number, of numbers below 2 to the 22
  const F16 large = all(12582912.0f);
  return (x + large) - large;
}
LANES_INLINE F16 scaled(F16 x, F16 n) {  // x * 2^n, n whole, of -126 .. 127
  return x * from_bits(shifted_left(to_int(n) + all_i(127), 23));
}
LANES_INLINE F16 exponent_of(F16 x) {  // of positive normal numbers
  return to_float(shifted_right(bits(x), 23) - all_i(127));
}
LANES_INLINE F16 mantissa_of(F16 x) { return from_bits((bits(x) & all_i(0x7fffff)) | all_i(0x3f800000)); }

// bfloat16: the upper halves of float32. Widened, and rounded to the nearest, of two to the even one; NaN stays.
LANES_INLINE F16 widened(const uint16_t* from) {
  return made<F16>([=](int begin) LANES_BODY {
    return (PartF)(__builtin_convertvector(read<PartH>(from + begin), PartU) << 16);
  });
}
LANES_INLINE PartI rounded_bits(PartF x) {  // in the upper halves; the lower ones are zeros
  const PartU u = (PartU)x, even = u + 0x7fffu + ((u >> 16) & 1u);
  return (PartI)((PartU)(x == x ? (PartI)even : (PartI)(u | 0x400000u)) & 0xffff0000u);
}
template <class Half>
LANES_INLINE auto rounded_bits(Two<Half> x) {
  return Two<decltype(rounded_bits(x.low))>{rounded_bits(x.low), rounded_bits(x.high)};
}
LANES_INLINE void narrow_to(uint16_t* to, F16 x) {
  const I16 r = shifted_right(rounded_bits(x), 16);
#if defined(__AVX2__) && !defined(__AVX512F__)
  const __m256i packed = _mm256_packus_epi32((__m256i)r.low, (__m256i)r.high);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permute4x64_epi64(packed, 0xd8));
#else
  visit(r, [=](PartI part, int begin) LANES_BODY { write(to + begin, __builtin_convertvector((PartU)part, PartH)); });
#endif
}

// float32 of int8, and of e4m3 in parts of 256: the bits of e4m3 lie where those of float16 do, whose exponents have one
// more. `part_of` makes one register.
LANES_INLINE PartF part_of(const int8_t* from) {
  return __builtin_convertvector(__builtin_convertvector(read<PartB>(from), PartI), PartF);
}
LANES_INLINE PartF part_of_e4m3(const int8_t* from) {
#if defined(__AVX512F__)
  const __m256i words = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  return (PartF)_mm512_cvtph_ps(_mm256_and_si256(_mm256_slli_epi16(words, 7), _mm256_set1_epi16(int16_t(0xBFFF))));
#elif defined(__AVX2__)
  const __m128i words = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
  return (PartF)_mm256_cvtph_ps(_mm_and_si128(_mm_slli_epi16(words, 7), _mm_set1_epi16(int16_t(0xBFFF))));
#else
  uint16_t halves[kPartLanes];
  for (int i = 0; i < kPartLanes; ++i) halves[i] = uint16_t(int16_t(from[i]) * 128) & 0xBFFF;
#if defined(__aarch64__)
  return (PartF)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(halves)));
#else
  PartF numbers;
  for (int i = 0; i < kPartLanes; ++i) {  // exact, by whole numbers
    const int exponent = halves[i] >> 10 & 15, mantissa = halves[i] & 1023;
    const float size = exponent ? __builtin_ldexpf(float(1024 + mantissa), exponent - 25) : __builtin_ldexpf(float(mantissa), -24);
    numbers[i] = halves[i] >> 15 ? -size : size;
  }
  return numbers;
#endif
#endif
}
LANES_INLINE F16 widened(const int8_t* from) {
  return made<F16>([=](int begin) LANES_BODY { return part_of(from + begin); });
}
LANES_INLINE F16 widened_e4m3(const int8_t* from) {
  return made<F16>([=](int begin) LANES_BODY { return part_of_e4m3(from + begin); });
}

LANES_INLINE void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

#undef LANES_INLINE
#undef LANES_BODY

}  // namespace native
