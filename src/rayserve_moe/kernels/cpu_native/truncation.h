// Truncation of a row's words by top-k, top-p and min-p, as `truncation.last_kept` of `decoding`: the same words are kept.
//
// Words are ordered by log-probability, equal ones by falling id. Only the words near a limit are sorted. The first k lie
// in the k groups with the largest words. For larger k, and for mass, words are counted or weighed by the leading bits of
// their keys, until the bucket is known where the limit lies.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

namespace native {

constexpr int kBucketBits = 12;
constexpr int64_t kGroup = 32;
constexpr float kMassOfOne = float(1 << 30);

// A word in the order above: its key in the upper half, its place, which falls with its id, in the lower. 0: all words.
using Ranked = uint64_t;

struct RowLimits {
  uint32_t top_k;  // 0: all
  float top_p, min_p;
};

struct RowWords {
  const float *logprobs, *probs;
  int64_t count;

  static uint32_t key(float logprob) {
    uint32_t bits;
    std::memcpy(&bits, &logprob, sizeof bits);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
  }
  Ranked ranked(int64_t word) const { return Ranked(key(logprobs[word])) << 32 | uint32_t(count - 1 - word); }
  int32_t mass(int64_t word) const {
    const float mass = std::nearbyint(probs[word] * kMassOfOne);
    return mass >= 0 && mass <= kMassOfOne ? int32_t(mass) : 0;
  }
  uint32_t largest_key(int64_t begin, int64_t end) const {
    uint32_t largest = 0;
    for (int64_t word = begin; word < end; ++word) largest = std::max(largest, key(logprobs[word]));
    return largest;
  }
};

// The first `k` words, in their order. There are at least `k` groups.
inline std::vector<Ranked> first_words(const RowWords& words, int64_t k) {
  std::vector<uint32_t> largest;
  for (int64_t begin = 0; begin < words.count; begin += kGroup)
    largest.push_back(words.largest_key(begin, std::min(begin + kGroup, words.count)));
  std::vector<uint32_t> ordered = largest;
  std::nth_element(ordered.begin(), ordered.begin() + (k - 1), ordered.end(), std::greater<>());
  const uint32_t bound = ordered[k - 1];
  std::vector<Ranked> found;
  for (int64_t group = 0; group < int64_t(largest.size()); ++group) {
    if (largest[group] < bound) continue;
    for (int64_t word = group * kGroup; word < std::min((group + 1) * kGroup, words.count); ++word)
      if (RowWords::key(words.logprobs[word]) >= bound) found.push_back(words.ranked(word));
  }
  std::sort(found.begin(), found.end(), std::greater<>());
  found.resize(k);
  return found;
}

inline int64_t share_of(float top_p, int64_t total) { return std::max<int64_t>(1, int64_t(std::ceil(top_p * float(total)))); }

// The last of the first `k` words that top-p keeps as well.
inline Ranked last_of_first(const RowWords& words, int64_t k, float top_p) {
  const std::vector<Ranked> found = first_words(words, k);
  if (!(top_p < 1)) return found.back();
  const auto mass = [&](Ranked ranked) { return words.mass(words.count - 1 - int64_t(uint32_t(ranked))); };
  int64_t total = 0, before = 0;
  for (Ranked ranked : found) total += mass(ranked);
  for (Ranked ranked : found)
    if ((before += mass(ranked)) >= share_of(top_p, total)) return ranked;
  return found.back();
}

// The last word with less than `limit` of weight before it, of those from `last` on; `last` where all weigh less.
template <class Weight>
Ranked last_within(const RowWords& words, Ranked last, int64_t limit, const Weight& weight) {
  std::vector<int64_t> buckets(1 << kBucketBits);
  for (int64_t word = 0; word < words.count; ++word) {
    const Ranked ranked = words.ranked(word);
    buckets[ranked >> (64 - kBucketBits)] += ranked >= last ? weight(word) : 0;
  }
  int64_t bucket = int64_t(buckets.size()) - 1, before = 0;
  while (bucket >= 0 && before + buckets[bucket] < limit) before += buckets[bucket--];
  if (bucket < 0) return last;
  std::vector<std::pair<Ranked, int64_t>> found;
  for (int64_t word = 0; word < words.count; ++word) {
    const Ranked ranked = words.ranked(word);
    if (int64_t(ranked >> (64 - kBucketBits)) == bucket && ranked >= last) found.emplace_back(ranked, weight(word));
  }
  std::sort(found.begin(), found.end(), std::greater<>());
  for (const auto& [ranked, own] : found)
    if ((before += own) >= limit) return ranked;
  return last;
}

inline Ranked last_kept(const RowWords& words, const RowLimits& limits) {
  Ranked last = 0;
  if (limits.top_k > 0 && limits.top_k <= words.count / kGroup) {
    last = last_of_first(words, limits.top_k, limits.top_p);
  } else {
    if (limits.top_k > 0) last = last_within(words, last, limits.top_k, [](int64_t) { return 1; });
    const auto mass = [&](int64_t word) { return words.mass(word); };
    int64_t total = 0;
    for (int64_t word = 0; limits.top_p < 1 && word < words.count; ++word) total += words.ranked(word) >= last ? mass(word) : 0;
    if (limits.top_p < 1) last = last_within(words, last, share_of(limits.top_p, total), mass);
  }
  if (limits.min_p > 0) {
    const float largest = *std::max_element(words.probs, words.probs + words.count);
    uint32_t floor = UINT32_MAX;
    for (int64_t word = 0; word < words.count; ++word)
      if (words.probs[word] >= limits.min_p * largest) floor = std::min(floor, RowWords::key(words.logprobs[word]));
    last = std::max(last, Ranked(floor) << 32);
  }
  return last;
}

// Sets the bits of the kept words that can be sampled, word i in bit i % 32 of number i / 32; all were 0. Returns their
// mass.
inline double keep_words(const RowWords& words, Ranked last, int64_t num_words, uint32_t* bits) {
  double mass = 0;
  for (int64_t first = 0; first < num_words; first += 32) {
    const int64_t end = std::min(first + 32, num_words);
    uint32_t here = 0;
    if (words.largest_key(first, end) < uint32_t(last >> 32)) continue;
    for (int64_t word = first; word < end; ++word) {
      const bool is_kept = words.ranked(word) >= last && words.probs[word] > 0;
      here |= uint32_t(is_kept) << (word - first), mass += is_kept ? words.probs[word] : 0.0f;
    }
    bits[first / 32] = here;
  }
  return mass;
}

}  // namespace native
