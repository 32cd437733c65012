// One loop over independent items, shared by the calling thread and helpers that outlive it.
//
// A caller never waits for a helper that has not begun: it claims items itself until none is left, then waits for
// those that helpers have claimed. So a helper whose core is taken away, or that a fork has lost, costs time alone.
#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

#include "lanes.h"

namespace native {

constexpr int kMostThreads = 16;  // more would wait for memory, and for each other
constexpr uint64_t kNoItem = 0xffffffff;
constexpr uint64_t kFirstTurn = kNoItem - 15;  // turns are counted in 32 bits: every process sees the count start over
constexpr int kClaimsOfShare = 2;  // a claim takes this part of what each thread would have of the items left
constexpr int kSpins = 30000;  // pauses of a helper before it sleeps: longer than what lies between two steps
constexpr int kPausesOfYield = 256;  // after so many it gives way to the threads that bring the next call

class Crew {
 public:
  static Crew& instance() {
    static Crew* crew = new Crew;  // helpers use it until the process ends
    return *crew;
  }

  // Calls `run(context, item)` for every item in 0 .. num_items - 1, on any of the threads.
  void run(void (*run)(void*, int64_t), void* context, int64_t num_items) {
    bool is_mine = false;
    const bool is_for_one = num_items < 2 || num_items >= int64_t(kNoItem) || num_helpers_ == 0;
    if (is_for_one || !busy_.compare_exchange_strong(is_mine, true)) {
      for (int64_t item = 0; item < num_items; ++item) run(context, item);
      return;
    }
    // Nobody may claim anything while the next turn is described: a late helper still holds the claim it read last.
    const uint64_t turn = ((claims_.load(std::memory_order_relaxed) >> 32) + 1) & kNoItem;
    claims_.store((turn - 1) << 32 | kNoItem, std::memory_order_seq_cst);
    run_.store(run, std::memory_order_relaxed);
    context_.store(context, std::memory_order_relaxed);
    num_items_.store(num_items, std::memory_order_relaxed);
    finished_.store(0, std::memory_order_relaxed);
    claims_.store(turn << 32, std::memory_order_seq_cst);
    if (num_asleep_.load(std::memory_order_seq_cst) > 0) {
      std::lock_guard<std::mutex> lock(mutex_);
      wake_.notify_all();
    }
    work(turn);
    while (finished_.load(std::memory_order_acquire) < num_items) pause();
    busy_.store(false, std::memory_order_release);
  }

  int num_threads() const { return num_helpers_ + 1; }

 private:
  Crew() {
    cpu_set_t cpus;
    const int num_cpus = sched_getaffinity(0, sizeof(cpus), &cpus) == 0 ? CPU_COUNT(&cpus) : 1;
    num_helpers_ = (num_cpus < kMostThreads ? num_cpus : kMostThreads) - 1;
    for (int i = 0; i < num_helpers_; ++i) std::thread([this] { help(); }).detach();
  }

  // Claims and runs items of `turn`, neighbours first in long stretches of memory, at last one by one, so that all
  // threads end together. A claim succeeds only while the turn has items left: what was read of it holds.
  void work(uint64_t turn) {
    for (;;) {
      uint64_t claims = claims_.load(std::memory_order_acquire);
      if (claims >> 32 != turn) return;
      auto run = run_.load(std::memory_order_relaxed);
      void* context = context_.load(std::memory_order_relaxed);
      const int64_t first = claims & kNoItem, left = num_items_.load(std::memory_order_relaxed) - first;
      if (left <= 0) return;
      const int64_t count = std::max<int64_t>(left / (kClaimsOfShare * (num_helpers_ + 1)), 1);
      if (!claims_.compare_exchange_weak(claims, claims + count, std::memory_order_acq_rel)) continue;
      for (int64_t item = first; item < first + count; ++item) run(context, item);
      finished_.fetch_add(count, std::memory_order_release);
    }
  }

  void help() {
    uint64_t seen = kFirstTurn;
    for (;;) {
      int spins = 0;
      while (claims_.load(std::memory_order_acquire) >> 32 == seen) {
        if (++spins < kSpins) {
          if (spins % kPausesOfYield == 0) sched_yield();
          pause();
          continue;
        }
        std::unique_lock<std::mutex> lock(mutex_);
        num_asleep_.fetch_add(1, std::memory_order_seq_cst);
        wake_.wait(lock, [&] { return claims_.load(std::memory_order_seq_cst) >> 32 != seen; });
        num_asleep_.fetch_sub(1, std::memory_order_relaxed);
      }
      seen = claims_.load(std::memory_order_acquire) >> 32;
      work(seen);
    }
  }

  std::atomic<bool> busy_{false};
  std::atomic<uint64_t> claims_{kFirstTurn << 32};  // turn << 32 | next item
  std::atomic<void (*)(void*, int64_t)> run_{nullptr};
  std::atomic<void*> context_{nullptr};
  std::atomic<int64_t> num_items_{0};
  std::atomic<int64_t> finished_{0};
  std::atomic<int> num_asleep_{0};
  std::mutex mutex_;
  std::condition_variable wake_;
  int num_helpers_ = 0;
};

// Runs `body(item)` for every item, on all threads.
template <class Body>
void for_each(int64_t num_items, Body&& body) {
  Crew::instance().run([](void* context, int64_t item) { (*static_cast<Body*>(context))(item); }, &body, num_items);
}

// Runs `body(begin, end)` for pieces of 0 .. size of at most `grain`.
template <class Body>
void for_pieces(int64_t size, int64_t grain, Body&& body) {
  for_each((size + grain - 1) / grain, [&](int64_t piece) {
    const int64_t begin = piece * grain;
    body(begin, begin + grain < size ? begin + grain : size);
  });
}

}  // namespace native
