// cuda/product.h: a matrix product by cuBLASLt, planned before it runs.
#pragma once

#include <cstddef>  // std::size_t
#include <cstdint>  // std::int64_t

#include "core/status.h"
#include "core/types.h"
#include "cuda/libraries.h"

namespace jaxcoll::cuda {

/// y = x w, or y = sum + x w, for each of a batch; matrices lie row by row, and w is the same for
/// all of the batch. Strides and leading dimensions are in elements.
struct ProductShape {
  std::size_t batch = 1;
  std::size_t rows = 0;
  std::size_t inner = 0;
  std::size_t columns = 0;
  std::size_t x_leading = 0;
  std::size_t w_leading = 0;
  std::size_t y_leading = 0;
  std::size_t x_stride = 0;  ///< from one of the batch to the next
  std::size_t y_stride = 0;
  bool x_is_transposed = false;  ///< it lies as (inner, rows)
  bool w_is_transposed = false;  ///< it lies as (columns, inner)
  DType operand = DType::kF32;
  DType result = DType::kF32;
  bool allows_tf32 = false;    ///< of float32: rounds operands to TF32, as XLA does by default
  std::size_t alignment = 16;  ///< bytes that divide every address of an operand or result
};

/// For one device.
class Product {
 public:
  Product() = default;
  Product(const Product&) = delete;
  Product& operator=(const Product&) = delete;
  ~Product();

  /// Chooses the algorithm for the current device.
  Status Plan(const Libraries& libraries, const ProductShape& shape, std::size_t workspace_bytes);

  /// Puts it on a stream: y = x w, and of `sum`, which may be y, y = sum + x w; null: none.
  Status Enqueue(Stream stream, const void* x, const void* w, const void* sum, void* y,
                 void* workspace) const;

 private:
  const Blas* blas_ = nullptr;
  BlasHandle handle_ = nullptr;
  BlasObject description_ = nullptr;
  BlasObject layout_w_ = nullptr;
  BlasObject layout_x_ = nullptr;
  BlasObject layout_y_ = nullptr;
  BlasAlgorithm algorithm_{};
  std::size_t workspace_bytes_ = 0;
  bool is_double_ = false;
};

}  // namespace jaxcoll::cuda
