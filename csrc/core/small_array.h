// core/small_array.h: an array of fixed size that lies within its owner where it is small.
#pragma once

#include <algorithm>  // std::copy
#include <array>      // std::array
#include <cstddef>    // std::size_t
#include <memory>     // std::make_unique, std::unique_ptr
#include <vector>     // std::vector

namespace jaxcoll {

/// A call touches dozens of cache lines that nobody has touched since the program's last run. What
/// lies together, as a small array does with the pointer to it, can be fetched together
/// (core/footprint.h).
template <typename T, std::size_t kInside>
class SmallArray {
 public:
  SmallArray() = default;
  explicit SmallArray(std::size_t size) { Reset(size); }
  explicit SmallArray(const std::vector<T>& values) { Assign(values); }
  SmallArray(const SmallArray&) = delete;
  SmallArray& operator=(const SmallArray&) = delete;
  ~SmallArray() { Free(); }

  /// Once, before the array is used.
  void Reset(std::size_t size) {
    Free();
    data_ = size > kInside ? std::make_unique<T[]>(size).release() : inside_.data();
    size_ = size;
  }
  void Assign(const std::vector<T>& values) {
    Reset(values.size());
    std::copy(values.begin(), values.end(), begin());
  }

  [[nodiscard]] std::size_t size() const { return size_; }
  [[nodiscard]] T* data() { return data_; }
  [[nodiscard]] const T* data() const { return data_; }
  T& operator[](std::size_t i) { return data()[i]; }
  const T& operator[](std::size_t i) const { return data()[i]; }
  [[nodiscard]] T* begin() { return data(); }
  [[nodiscard]] T* end() { return data() + size_; }
  [[nodiscard]] const T* begin() const { return data(); }
  [[nodiscard]] const T* end() const { return data() + size_; }

 private:
  void Free() { const std::unique_ptr<T[]> outside(data_ == inside_.data() ? nullptr : data_); }

  std::size_t size_ = 0;
  T* data_ = nullptr;  // until Reset
  std::array<T, kInside> inside_{};
};

}  // namespace jaxcoll
