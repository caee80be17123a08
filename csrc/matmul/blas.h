// matmul/blas.h: matrix products by the BLAS that comes with JAX.
//
// A BLAS of its own is somebody else's work, and well done: SciPy, which JAX needs, brings one. It
// is found at run time (jaxcoll/_blas.py); nothing here is linked against it.
#pragma once

#include <cstddef>  // std::size_t

#include "core/types.h"

namespace jaxcoll {

/// What a BLAS offers, with 32-bit integers and Fortran's conventions.
struct BlasFunctions {
  using Sgemm = void (*)(const char* transa, const char* transb, const int* m, const int* n,
                         const int* k, const float* alpha, const float* a, const int* lda,
                         const float* b, const int* ldb, const float* beta, float* c,
                         const int* ldc);
  using Dgemm = void (*)(const char* transa, const char* transb, const int* m, const int* n,
                         const int* k, const double* alpha, const double* a, const int* lda,
                         const double* b, const int* ldb, const double* beta, double* c,
                         const int* ldc);

  Sgemm sgemm = nullptr;
  Dgemm dgemm = nullptr;
  /// How many threads a product may use, of the whole process; both null where it uses one.
  void (*set_num_threads)(int count) = nullptr;
  int (*num_threads)() = nullptr;
};

/// Sets the BLAS that Multiply uses, once and before its first use.
void SetBlas(const BlasFunctions& functions);

/// A matrix in memory: element (i, j) is at `data[i * step + j]`, or, where `is_transposed`, at
/// `data[j * step + i]`. `step` counts elements.
struct Matrix {
  const void* data;
  std::size_t step;
  bool is_transposed = false;
};

/// A product's measures: (rows, inner) times (inner, columns), none of them 0 or over 2**31 - 1.
struct ProductShape {
  std::size_t rows, inner, columns;
};

/// c = a b, or c += a b with `adds`, where row i of c begins at `c + i * c_step` elements. kF32 or
/// kF64. By the calling thread alone, however many threads the BLAS would take.
void Multiply(DType dtype, const ProductShape& shape, const Matrix& a, const Matrix& b, void* c,
              std::size_t c_step, bool adds);

}  // namespace jaxcoll
