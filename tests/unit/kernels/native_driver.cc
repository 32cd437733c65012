// Runs the native kernels beside naive loops over a matrix of shapes, for the sanitizers: every array has exactly the
// size that its call needs, pages that no sequence has hold NaN, and unused entries of page tables lie far outside.
//
// driver STRIDE CPUS CALLERS: every STRIDE-th case, on a machine of so many cores, by so many calling threads at once.
#include <array>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <utility>

#include "attention.h"
#include "checks.h"
#include "experts.h"

namespace {

using native::bf16;
using Numbers = std::vector<bf16>;
using Exact = std::vector<double>;

constexpr bf16 kNan = 0x7fc0;
int num_cpus = 1;
std::atomic<int> num_wrong{0};

double value_of(bf16 bits) {
  const uint32_t wide = uint32_t(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

bf16 rounded(double value) {
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

// [K, N] as panels of 32 columns, in each the pairs of neighbouring k.
Numbers packed(const Numbers& plain, int64_t depth, int64_t width) {
  Numbers out(plain.size());
  for (int64_t k = 0; k < depth; ++k)
    for (int64_t n = 0; n < width; ++n)
      out[n / 32 * 32 * depth + k / 2 * 64 + n % 32 * 2 + k % 2] = plain[k * width + n];
  return out;
}

double dot(const bf16* row, const Numbers& plain, int64_t first, int64_t depth, int64_t width) {
  double sum = 0;
  for (int64_t k = 0; k < depth; ++k) sum += value_of(row[k]) * value_of(plain[first + k * width]);
  return sum;
}

void product(Case c, int64_t rows, int64_t depth, int64_t width) {
  const Numbers left = c.draw(rows * depth), right = c.draw(depth * width), lying = packed(right, depth, width);
  std::vector<float> found(rows * width);
  native::for_each(width / 32, [&](int64_t panel) {
    native::multiply_panel(left.data(), rows, depth, lying.data() + panel * 32 * depth,
                           [&](int64_t r, const native::Pair& result) {
                             _mm512_storeu_ps(found.data() + r * width + panel * 32, result.low);
                             _mm512_storeu_ps(found.data() + r * width + panel * 32 + 16, result.high);
                           });
  });
  Exact expected;
  for (int64_t i = 0; i < rows * width; ++i)
    expected.push_back(dot(left.data() + i / width * depth, right, i % width, depth, width));
  c.compare("product", found, expected, 1e-5);
}

void scores(Case c, int64_t width, int64_t experts) {
  const Numbers row = c.draw(width);
  std::vector<float> router(width * experts), found(experts);
  for (float& each : router) each = float(value_of(rounded(c.below(1000) / 500.0 - 1)));
  native::score_row(row.data(), router.data(), found.data(), width, experts);
  Exact expected(experts);
  double total = 0;
  for (int64_t e = 0; e < experts; ++e) {
    for (int64_t d = 0; d < width; ++d) expected[e] += value_of(row[d]) * router[d * experts + e];
    total += expected[e] = std::exp(expected[e]);
  }
  for (double& each : expected) each /= total;
  c.compare("scores", found, expected, 1e-4);
}

void experts(Case c, int64_t tokens, int64_t top_k, int64_t width, int64_t inner, int64_t slots) {
  const int64_t size = width * inner, picks = tokens * top_k;
  const Numbers hidden = c.draw(tokens * width), gate = c.draw(size * slots, 0.2), up = c.draw(size * slots, 0.2),
                down = c.draw(size * slots, 0.2);
  Numbers lying[3];
  for (int64_t s = 0; s < slots; ++s)
    for (int i = 0; i < 3; ++i) {
      const Numbers& plain = i == 0 ? gate : i == 1 ? up : down;
      const Numbers one(plain.begin() + s * size, plain.begin() + (s + 1) * size);
      const Numbers out = i == 2 ? packed(one, inner, width) : packed(one, width, inner);
      lying[i].insert(lying[i].end(), out.begin(), out.end());
    }
  for (Numbers& each : lying) each.shrink_to_fit();
  std::vector<int32_t> slot_of(picks);
  std::vector<float> gates(picks), found(tokens * width);
  for (int32_t& each : slot_of) each = c.below(int(slots) + 3) - 1;  // some lie on other devices
  for (float& each : gates) each = float(c.below(1000)) / 1000;
  native::expert_sums({tokens, top_k, width, inner, slots}, {hidden.data(), slot_of.data(), gates.data(),
                      lying[0].data(), lying[1].data(), lying[2].data(), found.data()});
  Exact expected(tokens * width);
  for (int64_t pick = 0; pick < picks; ++pick) {
    if (slot_of[pick] < 0 || slot_of[pick] >= slots) continue;
    const int64_t t = pick / top_k, first = slot_of[pick] * size;
    Numbers row(inner);
    for (int64_t f = 0; f < inner; ++f) {
      const double g = dot(hidden.data() + t * width, gate, first + f, width, inner);
      row[f] = rounded(g / (1 + std::exp(-g)) * dot(hidden.data() + t * width, up, first + f, width, inner));
    }
    for (int64_t d = 0; d < width; ++d)
      expected[t * width + d] += gates[pick] * value_of(rounded(dot(row.data(), down, first + d, inner, width)));
  }
  c.compare("sums of experts", found, expected, 0x1p-8);
}

struct Layer {
  int64_t singles, blocks, block_tokens, heads, kv_heads, head_width, page_size;
  bool has_norms, has_biases;
};

// Heads of one token as the definition has them: projected, with a bias, normed, rotated; rounded after each.
Numbers heads_of(const bf16* row, const Numbers& weights, const Numbers& bias, const Numbers& norm, const float* cos,
                 const float* sin, int64_t depth, int64_t width, int64_t head_width) {
  Numbers out(width);
  for (int64_t i = 0; i < width; ++i) {
    out[i] = rounded(dot(row, weights, i, depth, width));
    if (!bias.empty()) out[i] = rounded(value_of(out[i]) + value_of(bias[i]));
  }
  for (int64_t first = 0; first < width && cos; first += head_width) {
    double squares = 0;
    for (int64_t i = 0; i < head_width; ++i) squares += value_of(out[first + i]) * value_of(out[first + i]);
    for (int64_t i = 0; i < head_width && !norm.empty(); ++i) {
      const bf16 shrunk = rounded(value_of(out[first + i]) / std::sqrt(squares / double(head_width) + 1e-6));
      out[first + i] = rounded(value_of(shrunk) * value_of(norm[i]));
    }
    for (int64_t i = 0, half = head_width / 2; i < half; ++i) {
      const double a = value_of(out[first + i]), b = value_of(out[first + half + i]);
      out[first + i] = rounded(a * cos[i] - b * sin[i]), out[first + half + i] = rounded(b * cos[i] + a * sin[i]);
    }
  }
  return out;
}

// Accepts the places as they are, and none that lies outside the pool.
void check_places(Case& c, const native::AttentionShapes& s, native::AttentionArrays a) {
  bool is_right = native::fit(s) && native::are_in_pool(s, a);
  const int64_t t = std::max_element(a.positions, a.positions + s.num_tokens) - a.positions, last = a.positions[t];
  const int64_t block = t < s.num_singles ? t : s.num_singles + (t - s.num_singles) / s.block_tokens;
  const int32_t num_slots = int32_t(s.pages_per_layer * s.page_size), num_pages = int32_t(s.pages_per_layer);
  const auto is_taken = [&](const int32_t*& array, int64_t size, int64_t place, int32_t value) {
    std::vector<int32_t> other(array, array + size);
    other[place] = value;
    const int32_t* const whole = array;
    array = other.data();
    const bool taken = native::are_in_pool(s, a);
    array = whole;
    return taken;
  };
  for (int32_t slot : {-1, num_slots, INT32_MAX})
    is_right &= last < 0 || !is_taken(a.kv_slots, s.num_tokens, t, slot);
  for (int32_t position : {int32_t(s.table_width * s.page_size), INT32_MAX})
    is_right &= !is_taken(a.positions, s.num_tokens, t, position);
  const int64_t rows = s.num_singles + s.num_blocks, table_size = rows * s.table_width;
  for (int32_t page : {-1, num_pages, INT32_MAX})
    is_right &= last < 0 || !is_taken(a.page_table, table_size, block * s.table_width + last / s.page_size, page);
  native::AttentionShapes wide = s;
  wide.head_width += 16;
  if (is_right && !native::fit(wide)) return;
  ++num_wrong;
  std::printf("%s %d: places that are there are refused, or others are not\n", c.name, c.number);
}

const bf16* or_null(const Numbers& numbers) { return numbers.empty() ? nullptr : numbers.data(); }

void attention(Case c, const Layer& l) {
  const int64_t width = 64, h = l.head_width, q_width = l.heads * h, kv_width = l.kv_heads * h;
  const int64_t tokens = l.singles + l.blocks * l.block_tokens, rows = l.singles + l.blocks, most = 75;
  const int64_t table_width = (most + l.page_size - 1) / l.page_size, pages = rows * table_width + 1;
  std::vector<int32_t> table(rows * table_width), positions(tokens, -1), slots(tokens, 0), block_of(tokens);
  Numbers pool(pages * l.page_size * 2 * kv_width, kNan);
  for (int64_t b = 0, t = 0; b < rows; ++b) {
    const int64_t room = b < l.singles ? 1 : l.block_tokens, used = c.below(4) ? 1 + c.below(int(room)) : 0;
    const int64_t first = c.below(int(most - room) + 1), num_pages = (first + used + l.page_size - 1) / l.page_size;
    for (int64_t p = 0; p < table_width; ++p)
      table[b * table_width + p] = used && p < num_pages ? int32_t(1 + p * rows + b) : INT32_MAX;
    for (int64_t place = 0; used && place < first; ++place) {
      const Numbers both = c.draw(2 * kv_width);
      const int64_t slot = table[b * table_width + place / l.page_size] * l.page_size + place % l.page_size;
      std::copy(both.begin(), both.end(), pool.begin() + slot * 2 * kv_width);
    }
    for (int64_t i = 0; i < room; ++i, ++t) {
      block_of[t] = int32_t(b);
      if (i >= used) continue;
      positions[t] = int32_t(first + i);
      slots[t] = int32_t(table[b * table_width + (first + i) / l.page_size] * l.page_size + (first + i) % l.page_size);
    }
  }
  const Numbers hidden = c.draw(tokens * width), q = c.draw(width * q_width, 0.2), k = c.draw(width * kv_width, 0.2),
                v = c.draw(width * kv_width, 0.2), o = c.draw(q_width * width, 0.2), none;
  const Numbers norms = l.has_norms ? c.draw(2 * h, 0.2, 1) : none;
  const Numbers q_norm(norms.begin(), norms.begin() + int64_t(norms.size()) / 2), k_norm(norms.begin() + int64_t(norms.size()) / 2, norms.end());
  const Numbers q_bias = l.has_biases ? c.draw(q_width) : none, k_bias = l.has_biases ? c.draw(kv_width) : none,
                v_bias = l.has_biases ? c.draw(kv_width) : none;
  const Numbers lying[] = {packed(q, width, q_width), packed(k, width, kv_width), packed(v, width, kv_width),
                           packed(o, q_width, width)};
  std::vector<float> cos(tokens * h / 2), sin(tokens * h / 2), found(tokens * width);
  for (size_t i = 0; i < cos.size(); ++i) {
    const double angle = positions[i / (h / 2)] * std::pow(1e4, -double(i % (h / 2)) / double(h / 2));
    cos[i] = float(std::cos(angle)), sin[i] = float(std::sin(angle));
  }
  Numbers expected_pool = pool;
  const native::AttentionShapes shapes{tokens,    width,    l.heads,        l.kv_heads,  h,    l.page_size, pages,
                                       l.singles, l.blocks, l.block_tokens, table_width, 1e-6f};
  const native::AttentionArrays arrays{
      hidden.data(), lying[0].data(), lying[1].data(), lying[2].data(), lying[3].data(),
      or_null(q_norm), or_null(k_norm), or_null(q_bias), or_null(k_bias), or_null(v_bias),
      cos.data(), sin.data(), slots.data(), positions.data(), table.data(), pool.data(), found.data()};
  check_places(c, shapes, arrays);
  native::attention_layer(shapes, arrays);
  // Keys and values of all tokens come first.
  std::vector<Numbers> queries;
  for (int64_t t = 0; t < tokens; ++t) {
    const bf16* row = hidden.data() + t * width;
    const float *cosines = cos.data() + t * h / 2, *sines = sin.data() + t * h / 2;
    queries.push_back(heads_of(row, q, q_bias, q_norm, cosines, sines, width, q_width, h));
    const Numbers key = heads_of(row, k, k_bias, k_norm, cosines, sines, width, kv_width, h);
    const Numbers value = heads_of(row, v, v_bias, none, nullptr, nullptr, width, kv_width, h);
    for (int64_t i = 0; i < kv_width && positions[t] >= 0; ++i) {
      bf16* target = expected_pool.data() + slots[t] * 2 * kv_width + i / h * 2 * h + i % h;
      target[0] = key[i], target[h] = value[i];
    }
  }
  Exact expected(tokens * width);
  for (int64_t t = 0; t < tokens; ++t) {
    Numbers attended(q_width);
    for (int64_t head = 0; head < l.heads && positions[t] >= 0; ++head) {
      const int64_t group = head / (l.heads / l.kv_heads);
      const bf16* query = queries[t].data() + head * h;
      Exact totals(h), weights;
      double sum = 0, largest = -1e30;
      std::vector<const bf16*> keys;
      for (int64_t place = 0; place <= positions[t]; ++place) {
        const int64_t page = table[block_of[t] * table_width + place / l.page_size];
        keys.push_back(expected_pool.data() + (page * l.page_size + place % l.page_size) * 2 * kv_width + group * 2 * h);
        double score = 0;
        for (int64_t i = 0; i < h; ++i) score += value_of(query[i]) * value_of(keys.back()[i]);
        weights.push_back(score / std::sqrt(double(h)));
        largest = std::max(largest, weights.back());
      }
      for (size_t i = 0; i < keys.size(); ++i) {
        const double weight = std::exp(weights[i] - largest);
        sum += weight;
        for (int64_t d = 0; d < h; ++d) totals[d] += weight * value_of(keys[i][h + d]);
      }
      for (int64_t d = 0; d < h; ++d) attended[head * h + d] = rounded(totals[d] / sum);
    }
    for (int64_t d = 0; d < width; ++d) expected[t * width + d] = dot(attended.data(), o, d, q_width, width);
  }
  c.compare("attention", found, expected, 0x1p-6);
  Exact there;
  std::vector<double> here;
  for (size_t i = 0; i < pool.size(); ++i) {
    if (expected_pool[i] == kNan && pool[i] == kNan) continue;
    there.push_back(value_of(expected_pool[i])), here.push_back(value_of(pool[i]));
  }
  c.compare("pool", here, there, 0x1p-8);
}

}  // namespace

// Also what the kernels ask, so that they start as many threads as the case wants.
extern "C" int sched_getaffinity(pid_t, size_t, cpu_set_t* cpus) noexcept {
  CPU_ZERO(cpus);
  for (int i = 0; i < num_cpus; ++i) CPU_SET(i, cpus);
  return 0;
}

int main(int, char** arguments) {
  const int stride = std::atoi(arguments[1]), num_callers = std::atoi(arguments[3]);
  num_cpus = std::atoi(arguments[2]);
  std::vector<std::function<void(int)>> cases;
  for (int64_t rows : {0, 1, 2, 5, 11, 12, 13, 29})
    for (int64_t depth : {2, 6, 64})
      for (int64_t width : {32, 96}) cases.push_back([=](int i) { product({"product", i, std::mt19937(i)}, rows, depth, width); });
  for (int64_t width : {32, 96})
    for (int64_t count : {1, 5, 16, 17, 127, 128, 129, 200})
      cases.push_back([=](int i) { scores({"scores", i, std::mt19937(i)}, width, count); });
  for (int64_t tokens : {0, 1, 7, 40})
    for (int64_t top_k : {1, 2, 8})
      for (int64_t slots : {1, 3, 16})
        for (int64_t inner : {32, 96})
          cases.push_back([=](int i) { experts({"experts", i, std::mt19937(i)}, tokens, top_k, 64, inner, slots); });
  for (int64_t head_width : {NATIVE_HEAD_WIDTHS})
    for (auto [heads, kv_heads] : {std::pair{1, 1}, {2, 1}, {6, 2}, {3, 3}, {14, 2}})
      for (int64_t page_size : {1, 16, 33, 128})
        for (auto [singles, blocks, tokens] : {std::array{1, 0, 0}, {0, 1, 1}, {5, 0, 0}, {2, 2, 8}, {1, 1, 37}})
          cases.push_back([=, heads = heads, kv_heads = kv_heads, singles = singles, blocks = blocks, tokens = tokens](int i) {
            attention({"attention", i, std::mt19937(i)},
                      {singles, blocks, tokens, heads, kv_heads, head_width, page_size, i % 2 == 0, i % 3 == 0});
          });
  std::vector<std::thread> callers;
  for (int caller = 0; caller < num_callers; ++caller)
    callers.emplace_back([&, caller] {
      for (int i = caller * stride; i < int(cases.size()); i += stride * num_callers) cases[i](i);
    });
  for (std::thread& each : callers) each.join();
  std::printf("%zu cases, %d wrong\n", (cases.size() + stride - 1) / stride, num_wrong.load());
  return num_wrong != 0;
}
