// Runs the native kernels beside naive loops over a matrix of shapes, for the sanitizers: every array has exactly the
// size that its call needs, pages of no sequence hold NaN, and unused entries of page tables lie far outside.
//
// driver STRIDE CPUS CALLERS: products and scores, and every STRIDE-th of the other cases, on a machine of so many
// cores, by so many calling threads at once.
#include <array>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <utility>

#include "attention_case.h"
#include "delta_case.h"
#include "experts.h"
#include "index_case.h"
#include "latent_case.h"
#include "mamba2_case.h"

namespace {

int num_cpus = 1;

// By the instruction that `multiply_rows` takes on this machine, and by the one that every machine has.
void product(Case c, int64_t rows, int64_t depth, int64_t width) {
  const Numbers left = c.draw(rows * depth), right = c.draw(depth * width), lying = packed(right, depth, width);
  std::vector<float> found(rows * width), by_dots(found);
  native::for_each(native::num_panels(width), [&](int64_t panel) {
    const bf16* panels[1] = {native::panel_of(lying.data(), depth, width, panel)};
    const auto into = [&](std::vector<float>& out) {
      return [&, panel](int64_t r, const native::Pair(&result)[1]) {
        native::store_columns(out.data() + r * width, result[0], panel * 32, width);
      };
    };
    native::multiply_rows(left.data(), depth, rows, depth, panels, into(found));
    native::multiply<1>(0, rows, depth, panels, [&](int64_t r) { return left.data() + r * depth; }, into(by_dots));
  });
  Exact expected;
  for (int64_t i = 0; i < rows * width; ++i)
    expected.push_back(dot(left.data() + i / width * depth, right, i % width, depth, width));
  c.compare("product", found, expected, 1e-6);
  c.compare("product by dots", by_dots, expected, 1e-6);
}

void scores(Case c, int64_t width, int64_t experts) {
  const int64_t num_rows = 1 + c.number % 6;
  const Numbers rows = c.draw(num_rows * width);
  std::vector<float> matrix(width * experts), found(num_rows * experts + 16, 7);  // sanitizers do not see masked stores
  for (float& each : matrix) each = float(value_of(rounded(c.below(1000) / 500.0 - 1)));
  std::vector<float> bias(experts), alone(experts);
  for (float& each : bias) each = c.below(100) / 50.0f - 1;
  const bool is_sigmoid = c.number % 2, is_biased = c.number / 2 % 2;
  const native::Router router{matrix.data(), is_biased ? bias.data() : nullptr, is_sigmoid, width, experts};
  native::score_rows(rows.data(), num_rows, router, found.data());
  Exact expected;
  for (int64_t r = 0; r < num_rows; ++r) {
    native::score_rows(rows.data() + r * width, 1, router, alone.data());
    c.compare("scores of a row alone", found.data() + r * experts, Exact(alone.begin(), alone.end()), 0);
    Exact of_row(experts);
    double total = 0;
    for (int64_t e = 0; e < experts; ++e) {
      for (int64_t d = 0; d < width; ++d) of_row[e] += value_of(rows[r * width + d]) * matrix[d * experts + e];
      if (is_biased) of_row[e] += bias[e];
      total += of_row[e] = std::exp(of_row[e]);
    }
    for (double& each : of_row) expected.push_back(each / (is_sigmoid ? 1 + each : total));
  }
  expected.insert(expected.end(), 16, 7);
  c.compare("scores", found, expected, 1e-5);
}

double activated(const native::ActivationConfig& activation, double gate, double up) {
  if (activation.kind == native::Activation::kSilu) return gate / (1 + std::exp(-gate)) * up;
  if (activation.kind == native::Activation::kGelu)
    return gate * (1 + std::tanh(std::sqrt(2 / M_PI) * (gate + 0.044715 * gate * gate * gate))) / 2 * up;
  const double slope = activation.slope, limit = activation.limit;
  gate = std::min(gate, limit), up = std::clamp(up, -limit, limit);
  return gate / (1 + std::exp(-slope * gate)) * (up + 1);
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
  const native::ActivationConfig activation{native::Activation(c.number % 3), 1.702f, c.number % 2 ? 7.0f : 1.5f};
  const bool has_biases = c.number / 3 % 2;
  const Numbers biases[3] = {c.draw(slots * inner, 2), c.draw(slots * inner, 2), c.draw(slots * width)};
  const bf16* given[3] = {};
  for (int i = 0; i < 3 && has_biases; ++i) given[i] = biases[i].data();
  const auto bias = [&](int i, int64_t place) { return has_biases ? value_of(biases[i][place]) : 0.0; };
  const native::ExpertShapes shapes{tokens, top_k, width, inner, slots, activation};
  native::expert_sums(shapes, native::ExpertArrays<bf16>{hidden.data(), slot_of.data(), gates.data(), lying[0].data(),
                                                         lying[1].data(), lying[2].data(), given[0], given[1], given[2],
                                                         nullptr, nullptr, nullptr, found.data()});
  Exact expected(tokens * width);
  for (int64_t pick = 0; pick < picks; ++pick) {
    if (slot_of[pick] < 0 || slot_of[pick] >= slots) continue;
    const int64_t t = pick / top_k, slot = slot_of[pick], first = slot * size;
    Numbers row(inner);
    for (int64_t f = 0; f < inner; ++f) {
      const double g = dot(hidden.data() + t * width, gate, first + f, width, inner) + bias(0, slot * inner + f);
      const double u = dot(hidden.data() + t * width, up, first + f, width, inner) + bias(1, slot * inner + f);
      row[f] = rounded(activated(activation, g, u));
    }
    for (int64_t d = 0; d < width; ++d) {
      const double sum = dot(row.data(), down, first + d, inner, width) + bias(2, slot * width + d);
      expected[t * width + d] += gates[pick] * value_of(rounded(sum));
    }
  }
  c.compare("sums of experts", found, expected, 0x1p-8);
}

double value_of(int8_t number) { return number; }

double value_of(native::Fp8 number) {
  const int exponent = number.bits >> 3 & 15, mantissa = number.bits & 7;
  const double magnitude = exponent ? std::ldexp(8 + mantissa, exponent - 10) : std::ldexp(mantissa, -9);
  return number.bits < 0 ? -magnitude : magnitude;
}

void draw_one(Case& c, int8_t& number) { number = int8_t(c.below(255) - 127); }

void draw_one(Case& c, native::Fp8& number) { number.bits = int8_t(c.below(127) | c.below(2) << 7); }

// Numbers of 8 bits with scales that are powers of two, and the bfloat16 numbers that they stand for: the same bits.
template <class Weight>
void narrow_experts(Case c, bool has_blocks, int64_t tokens, int64_t top_k, int64_t width, int64_t inner, int64_t slots) {
  const int64_t size = width * inner, picks = tokens * top_k;
  const Numbers hidden = c.draw(tokens * width);
  std::vector<Weight> integers[3];
  int64_t blocks[3];
  std::vector<float> scales[3];
  Numbers stand[3];
  for (int i = 0; i < 3; ++i) {
    const int64_t depth = i == 2 ? inner : width, columns = i == 2 ? width : inner;
    const int64_t rows = has_blocks ? native::kScaleBlock : depth;
    blocks[i] = has_blocks ? (depth + rows - 1) / rows + 1 : 1;
    for (int64_t s = 0; s < slots; ++s) {
      std::vector<Weight> one(size);
      Numbers wide(size);
      for (int64_t n = 0; n < blocks[i] * columns; ++n) scales[i].push_back(std::ldexp(1.0f, -6 - c.below(4)));
      for (int64_t j = 0; j < size; ++j) {
        draw_one(c, one[j]);
        const float scale = scales[i][(s * blocks[i] + j / columns / rows) * columns + j % columns];
        wide[j] = rounded(value_of(one[j]) * double(scale));
      }
      const auto lying = packed(one, depth, columns);
      const auto wide_lying = packed(wide, depth, columns);
      integers[i].insert(integers[i].end(), lying.begin(), lying.end());
      stand[i].insert(stand[i].end(), wide_lying.begin(), wide_lying.end());
    }
    integers[i].shrink_to_fit(), scales[i].shrink_to_fit(), stand[i].shrink_to_fit();
  }
  std::vector<int32_t> slot_of(picks);
  std::vector<float> gates(picks, 0.5f), found(tokens * width), wanted(found);
  for (int32_t& each : slot_of) each = c.below(int(slots) + 1);
  const native::ExpertShapes shapes{tokens, top_k, width, inner, slots, {native::Activation::kSilu}};
  native::expert_sums(shapes, native::ExpertArrays<Weight>{hidden.data(), slot_of.data(), gates.data(),
                                                           integers[0].data(), integers[1].data(), integers[2].data(),
                                                           nullptr, nullptr, nullptr, scales[0].data(),
                                                           scales[1].data(), scales[2].data(), found.data(), blocks[0],
                                                           blocks[2]});
  native::expert_sums(shapes, native::ExpertArrays<bf16>{hidden.data(), slot_of.data(), gates.data(), stand[0].data(),
                                                         stand[1].data(), stand[2].data(), nullptr, nullptr, nullptr,
                                                         nullptr, nullptr, nullptr, wanted.data()});
  c.compare("sums of experts in 8 bits", found, Exact(wanted.begin(), wanted.end()), 0);
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
  for (int64_t rows : {0, 1, 2, 5, 11, 12, 13, 16, 17, 32, 33, 40})
    for (int64_t depth : {2, 30, 64, 70})
      for (int64_t width : {32, 96, 3, 50})
        cases.push_back([=](int i) { product({"product", i, std::mt19937(i)}, rows, depth, width); });
  for (int64_t width : {32, 96})
    for (int64_t count : {1, 5, 16, 17, 127, 128, 129, 200})
      cases.push_back([=](int i) { scores({"scores", i, std::mt19937(i)}, width, count); });
  for (int64_t count : {2, 5, 100, 4095, 4096, 9000})
    for (int64_t top_k : {1, 2, 50, 2048})
      for (int kind = 0; kind < 5 && top_k < count; ++kind)
        cases.push_back([=](int i) { index_choice({"index choice", i, std::mt19937(i)}, count, top_k, kind); });
  const int num_cheap = int(cases.size());
  for (int64_t tokens : {0, 1, 7, 40})
    for (int64_t top_k : {1, 2, 8})
      for (int64_t slots : {1, 3, 16})
        for (int64_t inner : {32, 96})
          for (int64_t width : {64, inner == 32 ? 10 : 50}) {
            cases.push_back([=](int i) { experts({"experts", i, std::mt19937(i)}, tokens, top_k, width, inner, slots); });
            cases.push_back([=](int i) {
              narrow_experts<int8_t>({"int8", i, std::mt19937(i)}, false, tokens, top_k, width, inner, slots);
            });
          }
  for (int64_t head_width : {32, 64, 160, 2, 24, 80})
    for (auto heads : {std::pair{1, 1}, {2, 1}, {6, 2}, {3, 3}, {14, 2}})
      for (int64_t page_size : {1, 16, 33, 128})
        for (auto blocks : {std::array{1, 0, 0}, {0, 1, 1}, {5, 0, 0}, {2, 2, 8}, {1, 1, 37}})
          cases.push_back([=](int i) {
            Case c{"attention", i, std::mt19937(i)};
            attention(c, layer_of(c, {blocks[0], blocks[1], blocks[2], heads.first, heads.second, head_width, page_size}));
          });
  for (auto widths : {std::array{64, 2, 32, 32, 32, 32, 64}, {24, 3, 8, 4, 12, 16, 20}, {32, 6, 34, 18, 7, 50, 0},
                     {32, 9, 16, 2, 8, 162, 34}})
    for (int64_t page_size : {1, 16, 33})
      for (auto blocks : {std::array{1, 0, 0}, {0, 1, 1}, {5, 0, 0}, {2, 2, 8}, {1, 1, 37}})
        cases.push_back([=](int i) {
          latent_attention({"latent attention", i, std::mt19937(i)},
                           {blocks[0], blocks[1], blocks[2], widths[0], widths[1], widths[2], widths[3], widths[4],
                            widths[5], widths[6], page_size, i % 2 == 0, i % 3 == 0, i % 4 == 0});
        });
  for (int64_t tokens : {0, 1, 7, 40})
    for (int64_t slots : {1, 3})
      for (int64_t inner : {32, 160}) {
        cases.push_back([=](int i) {
          narrow_experts<native::Fp8>({"fp8", i, std::mt19937(i)}, false, tokens, 2, 64, inner, slots);
        });
        cases.push_back([=](int i) {
          narrow_experts<native::Fp8>({"fp8 in blocks", i, std::mt19937(i)}, true, tokens, 2, 160, inner, slots);
        });
        cases.push_back([=](int i) {
          narrow_experts<int8_t>({"int8 in blocks", i, std::mt19937(i)}, true, tokens, 2, 160, inner, slots);
        });
        cases.push_back([=](int i) {
          narrow_experts<native::Fp8>({"fp8, narrow panel", i, std::mt19937(i)}, i % 2, tokens, 2, 150, inner, slots);
        });
      }
  for (const DeltaLayer& layer :
       {DeltaLayer{1, 1, 16, 16, 2, 32}, {2, 3, 20, 7, 4, 34}, {3, 1, 8, 40, 3, 10}, {1, 2, 64, 48, 8, 64},
        {2, 1, 20, 20, 4, 34, 20, 6, 0, false, true}, {1, 1, 32, 32, 3, 8, 32, 0, -0.5f, true, true}})
    for (const auto& lengths : {std::vector<int32_t>{1}, {5, 64}, {70, 3, 130}})
      for (int32_t num_single : {0, 3, 62})
        cases.push_back([=](int i) { gated_delta({"gated delta", i, std::mt19937(i)}, layer, lengths, num_single); });
  for (const DeltaLayer& layer : {DeltaLayer{2, 3, 20, 7, 4, 34}, {1, 2, 64, 48, 8, 64}, {2, 2, 16, 64, 3, 10}})
    for (const auto& lengths : {std::vector<int32_t>{1}, {70, 3, 130}})
      for (int32_t num_single : {3, 62})
        cases.push_back([=](int i) { mamba2({"mamba2", i, std::mt19937(i)}, layer, lengths, num_single); });
  std::vector<int> chosen;
  for (int i = 0; i < int(cases.size()); ++i)
    if (i < num_cheap || i % stride == 0) chosen.push_back(i);
  std::vector<std::thread> callers;
  for (int caller = 0; caller < num_callers; ++caller)
    callers.emplace_back([&, caller] {
      for (size_t i = caller; i < chosen.size(); i += num_callers) cases[chosen[i]](chosen[i]);
    });
  for (std::thread& each : callers) each.join();
  std::printf("%zu cases, %d wrong\n", chosen.size(), num_wrong.load());
  return num_wrong != 0;
}
