// Memory that a thread keeps between calls.
#pragma once

#include <cstdint>
#include <new>

namespace native {

// An array that begins on a cache line: panels of 32 columns that threads write side by side then share no line.
template <class T>
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  ~Scratch() { ::operator delete(data_, kLine); }

  T* data() const { return data_; }

  // At least `size` elements; what they hold is not kept.
  T* sized(int64_t size) {
    if (size <= size_) return data_;
    ::operator delete(data_, kLine);
    data_ = nullptr, size_ = 0;
    data_ = static_cast<T*>(::operator new(size * sizeof(T), kLine));
    size_ = size;
    return data_;
  }

 private:
  static constexpr std::align_val_t kLine{64};
  T* data_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace native
