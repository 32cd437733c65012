// Products by the processor's tile registers (AMX): up to 16 rows by 16 columns, 32 numbers deep, in one instruction.
//
// A panel (see products.h) is what TDPBF16PS takes as its right side: rows of 16 pairs, 128 bytes from one to the next.
// Each element of a result is one chain of sums over its own row and column, in the same order for every number of rows.
#pragma once

#if NATIVE_TILES
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>

#ifndef NATIVE_TILE_FEATURE
#define NATIVE_TILE_FEATURE 18  // tile data, among the states of a thread that the system keeps on request
#endif

namespace native {

constexpr int64_t kTileRows = 16, kTileDepth = 32;
constexpr int64_t kAhead = 6144;  // bytes of a panel, and of what lies behind it, that are fetched ahead of their use

#if NATIVE_TILES
// Asks the system, once for the process, to keep tile registers. False: it refuses, or the processor has none.
inline bool ask_for_tiles() {
  constexpr long kRequestPermission = 0x1023;
  constexpr unsigned kTilesOfBf16 = 1u << 22;
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & kTilesOfBf16)) return false;
  return syscall(SYS_arch_prctl, kRequestPermission, NATIVE_TILE_FEATURE) == 0;
}

inline const bool has_tiles = ask_for_tiles();

// Instructions as text, which compilers take without options of their own. `stride` is in bytes.
template <int Tile>
inline void load_tile(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(Tile) : "memory");
}

template <int Tile>
inline void store_tile(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(Tile) : "memory");
}

template <int Sum, int Left, int Right>
inline void add_product() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sum), "i"(Left), "i"(Right));
}

// Sanitizers do not see what tiles read: there, both ends of each row are read first.
inline void show_rows(const uint16_t* from, int64_t stride, int64_t num_rows, int64_t size) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  for (int64_t r = 0; r < num_rows && size > 0; ++r)
    (void)*const_cast<const volatile uint16_t*>(from + r * stride),
        (void)*const_cast<const volatile uint16_t*>(from + r * stride + size - 1);
#endif
}

// This thread's tile registers, for as long as it multiplies. 0 to 3 are sums, 4 and 5 left sides, 6 and 7 right sides.
class TileScope {
 public:
  TileScope() = default;
  TileScope(const TileScope&) = delete;
  ~TileScope() { asm volatile("tilerelease"); }

  // 1 to 32 rows, `stride` numbers apart, times a panel: rows of 32 float32 to `out`.
  void multiply(const uint16_t* left, int64_t stride, int64_t num_rows, int64_t depth, const uint16_t* panel, float* out) {
    show_rows(left, stride, num_rows, depth);
    show_rows(panel, 64, depth / 2, 64);
    set_rows(std::min(num_rows, kTileRows), std::max<int64_t>(num_rows - kTileRows, 0));
    if (num_rows > kTileRows)
      sum_up<2>(left, stride, num_rows, depth, panel, out);
    else
      sum_up<1>(left, stride, num_rows, depth, panel, out);
  }

 private:
  // Rows of the two left sides. What the registers hold is lost.
  void set_rows(int64_t first, int64_t second) {
    if (first == first_ && second == second_) return;
    first_ = first, second_ = second;
    struct alignas(64) {
      uint8_t palette = 1, begin = 0, unused[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } shapes;
    const int64_t rows[] = {first, first, second, second, first, second, kTileRows, kTileRows};
    for (int i = 0; i < 8; ++i) shapes.rows[i] = uint8_t(rows[i]), shapes.row_bytes[i] = rows[i] ? 64 : 0;
    asm volatile("ldtilecfg %0" ::"m"(shapes));
  }

  template <int Lefts>
  static void sum_up(const uint16_t* left, int64_t stride, int64_t num_rows, int64_t depth, const uint16_t* panel,
                     float* out) {
    asm volatile("tilezero %tmm0\n\ttilezero %tmm1");
    if constexpr (Lefts == 2) asm volatile("tilezero %tmm2\n\ttilezero %tmm3");
    int64_t k = 0;
    for (; k + kTileDepth <= depth; k += kTileDepth) add_step<Lefts>(left + k, stride, panel + 32 * k);
    if (k < depth) add_rest<Lefts>(left + k, stride, num_rows, depth - k, panel + 32 * k);
    store_tile<0>(out, 128);
    store_tile<1>(out + 16, 128);
    if constexpr (Lefts == 2) store_tile<2>(out + 32 * kTileRows, 128);
    if constexpr (Lefts == 2) store_tile<3>(out + 32 * kTileRows + 16, 128);
  }

  // Adds the products of 32 numbers of each row with 16 pairs of rows of the panel.
  template <int Lefts>
  static void add_step(const uint16_t* left, int64_t stride, const uint16_t* panel) {
    if constexpr (Lefts == 1)
      for (int i = 0; i < 32; ++i) _mm_prefetch(reinterpret_cast<const char*>(panel) + kAhead + 64 * i, _MM_HINT_T0);
    load_tile<4>(left, 2 * stride);
    load_tile<6>(panel, 128);
    if constexpr (Lefts == 2) load_tile<5>(left + kTileRows * stride, 2 * stride);
    add_product<0, 4, 6>();
    load_tile<7>(panel + 32, 128);
    if constexpr (Lefts == 2) add_product<2, 5, 6>();
    add_product<1, 4, 7>();
    if constexpr (Lefts == 2) add_product<3, 5, 7>();
  }

  // The same of fewer numbers, between zeros.
  template <int Lefts>
  static void add_rest(const uint16_t* left, int64_t stride, int64_t num_rows, int64_t size, const uint16_t* panel) {
    alignas(64) uint16_t last_left[2 * kTileRows][kTileDepth] = {}, last_panel[kTileDepth * 32] = {};
    for (int64_t r = 0; r < num_rows; ++r) std::memcpy(last_left[r], left + r * stride, 2 * size);
    std::memcpy(last_panel, panel, 64 * size);
    add_step<Lefts>(last_left[0], kTileDepth, last_panel);
  }

  int64_t first_ = 0, second_ = 0;
};

#else
constexpr bool has_tiles = false;

class TileScope {  // never made
 public:
  void multiply(const uint16_t*, int64_t, int64_t, int64_t, const uint16_t*, float*) {}
};
#endif

}  // namespace native
