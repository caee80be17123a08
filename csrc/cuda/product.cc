#include "cuda/product.h"

#include <map>      // std::map
#include <mutex>    // std::mutex
#include <string>   // std::string, std::to_string
#include <utility>  // std::swap

namespace jaxcoll::cuda {
namespace {

BlasType TypeOf(DType dtype) {
  switch (dtype) {
    case DType::kF64:
      return BlasType::kF64;
    case DType::kF16:
      return BlasType::kF16;
    case DType::kBF16:
      return BlasType::kBF16;
    default:
      return BlasType::kF32;
  }
}

BlasCompute ComputeOf(const ProductShape& shape) {
  if (shape.operand == DType::kF64) {
    return BlasCompute::kF64;
  }
  return shape.operand == DType::kF32 && shape.allows_tf32 ? BlasCompute::kF32FastTF32
                                                           : BlasCompute::kF32;
}

Status Checked(const char* function, int result) {
  return result == kBlasSuccess
             ? Status{}
             : Internal(std::string(function) + ": cuBLASLt error " + std::to_string(result));
}

/// The handle of the current device, which all its products share. Never destroyed: that waits for
/// the device, and may come after the end of CUDA.
Status FindHandle(const Libraries& libraries, BlasHandle& handle) {
  static std::mutex mutex;
  static auto* const handles = new std::map<int, BlasHandle>();
  int device = 0;
  if (const int error = libraries.runtime.get_device(&device); error != kCudaSuccess) {
    return libraries.OfRuntime("cudaGetDevice", error);
  }
  const std::lock_guard<std::mutex> lock(mutex);
  BlasHandle& known = (*handles)[device];
  Status status =
      known == nullptr ? Checked("cublasLtCreate", libraries.blas.create(&known)) : Status{};
  handle = known;
  return status;
}

/// Frees a preference at the end of its scope.
class Preference {
 public:
  explicit Preference(const Blas& blas) : blas_(blas) {}
  Preference(const Preference&) = delete;
  Preference& operator=(const Preference&) = delete;
  ~Preference() {
    if (object != nullptr) {
      blas_.preference_destroy(object);
    }
  }

  BlasObject object = nullptr;

 private:
  const Blas& blas_;
};

}  // namespace

Product::~Product() {
  for (const BlasObject layout : {layout_w_, layout_x_, layout_y_}) {
    if (layout != nullptr) {
      blas_->layout_destroy(layout);
    }
  }
  if (description_ != nullptr) {
    blas_->description_destroy(description_);
  }
}

// cuBLASLt's matrices lie column by column, where a row-major matrix is its own transpose: what it
// computes is y^T = w^T x^T.
Status Product::Plan(const Libraries& libraries, const ProductShape& shape,
                     std::size_t workspace_bytes) {
  blas_ = &libraries.blas;
  const Blas& blas = libraries.blas;
  workspace_bytes_ = workspace_bytes;
  is_double_ = shape.operand == DType::kF64;
  Status status = FindHandle(libraries, handle_);
  const auto then = [&](const char* function, const auto& call) {
    if (status.ok()) {
      status = Checked(function, call());
    }
  };
  const BlasType scale = is_double_ ? BlasType::kF64 : BlasType::kF32;
  then("cublasLtMatmulDescCreate",
       [&] { return blas.description_create(&description_, ComputeOf(shape), scale); });
  const auto set_op = [&](BlasDescription which, bool is_transposed) {
    const BlasOp op = is_transposed ? BlasOp::kT : BlasOp::kN;
    then("cublasLtMatmulDescSetAttribute",
         [&] { return blas.description_set(description_, which, &op, sizeof(op)); });
  };
  set_op(BlasDescription::kTransA, shape.w_is_transposed);
  set_op(BlasDescription::kTransB, shape.x_is_transposed);

  // Of a matrix of so many rows and columns, as they lie.
  const auto lay_out = [&](BlasObject& layout, DType dtype, std::size_t rows, std::size_t columns,
                           std::size_t leading, std::size_t stride) {
    then("cublasLtMatrixLayoutCreate", [&] {
      return blas.layout_create(&layout, TypeOf(dtype), columns, rows,
                                static_cast<std::int64_t>(leading));
    });
    const auto count = static_cast<std::int32_t>(shape.batch);
    const auto offset = static_cast<std::int64_t>(stride);
    then("cublasLtMatrixLayoutSetAttribute",
         [&] { return blas.layout_set(layout, BlasLayout::kBatchCount, &count, sizeof(count)); });
    then("cublasLtMatrixLayoutSetAttribute", [&] {
      return blas.layout_set(layout, BlasLayout::kStridedBatchOffset, &offset, sizeof(offset));
    });
  };
  std::size_t x_rows = shape.rows;
  std::size_t x_columns = shape.inner;
  std::size_t w_rows = shape.inner;
  std::size_t w_columns = shape.columns;
  if (shape.x_is_transposed) {
    std::swap(x_rows, x_columns);
  }
  if (shape.w_is_transposed) {
    std::swap(w_rows, w_columns);
  }
  lay_out(layout_w_, shape.operand, w_rows, w_columns, shape.w_leading, 0);
  lay_out(layout_x_, shape.operand, x_rows, x_columns, shape.x_leading, shape.x_stride);
  lay_out(layout_y_, shape.result, shape.rows, shape.columns, shape.y_leading, shape.y_stride);

  Preference preference(blas);
  then("cublasLtMatmulPreferenceCreate",
       [&] { return blas.preference_create(&preference.object); });
  const std::uint64_t bytes = workspace_bytes;
  then("cublasLtMatmulPreferenceSetAttribute", [&] {
    return blas.preference_set(preference.object, BlasPreference::kMaxWorkspaceBytes, &bytes,
                               sizeof(bytes));
  });
  const auto alignment = static_cast<std::uint32_t>(shape.alignment);
  for (const BlasPreference which :
       {BlasPreference::kMinAlignmentA, BlasPreference::kMinAlignmentB,
        BlasPreference::kMinAlignmentC, BlasPreference::kMinAlignmentD}) {
    then("cublasLtMatmulPreferenceSetAttribute", [&] {
      return blas.preference_set(preference.object, which, &alignment, sizeof(alignment));
    });
  }
  BlasHeuristic found{};
  int num_found = 0;
  then("cublasLtMatmulAlgoGetHeuristic", [&] {
    return blas.get_heuristic(handle_, description_, layout_w_, layout_x_, layout_y_, layout_y_,
                              preference.object, 1, &found, &num_found);
  });
  if (status.ok() && (num_found < 1 || found.state != kBlasSuccess)) {
    status = Internal("cuBLASLt has no algorithm for this product");
  }
  algorithm_ = found.algorithm;
  return status;
}

Status Product::Enqueue(Stream stream, const void* x, const void* w, const void* sum, void* y,
                        void* workspace) const {
  const bool adds = sum != nullptr;
  const float alpha32 = 1;
  const float beta32 = adds ? 1 : 0;
  const double alpha64 = 1;
  const double beta64 = adds ? 1 : 0;
  const void* const alpha = is_double_ ? static_cast<const void*>(&alpha64) : &alpha32;
  const void* const beta = is_double_ ? static_cast<const void*>(&beta64) : &beta32;
  return Checked(
      "cublasLtMatmul",
      blas_->matmul(handle_, description_, alpha, w, layout_w_, x, layout_x_, beta, adds ? sum : y,
                    layout_y_, y, layout_y_, &algorithm_, workspace, workspace_bytes_, stream));
}

}  // namespace jaxcoll::cuda
