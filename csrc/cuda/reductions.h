// cuda/reductions.h: which of our reductions NCCL has.
#pragma once

#include <bit>       // std::has_single_bit
#include <cstddef>   // std::size_t
#include <optional>  // std::optional

#include "core/types.h"
#include "cuda/abi.h"

namespace jaxcoll::cuda {

/// A reduction as NCCL takes it.
struct Reduction {
  NcclType type;
  NcclOp op;
  std::size_t parts;  ///< of NCCL's elements, in one of ours: 2 in a complex number
};

/// NCCL's type with the values of `dtype`; bool as the integers 0 and 1. None for 16-bit integers
/// and for complex numbers.
constexpr std::optional<NcclType> NcclTypeOf(DType dtype) {
  switch (dtype) {
    case DType::kI8:
      return NcclType::kI8;
    case DType::kBool:
    case DType::kU8:
      return NcclType::kU8;
    case DType::kI32:
      return NcclType::kI32;
    case DType::kU32:
      return NcclType::kU32;
    case DType::kI64:
      return NcclType::kI64;
    case DType::kU64:
      return NcclType::kU64;
    case DType::kF16:
      return NcclType::kF16;
    case DType::kBF16:
      return NcclType::kBF16;
    case DType::kF32:
      return NcclType::kF32;
    case DType::kF64:
      return NcclType::kF64;
    case DType::kI16:
    case DType::kU16:
    case DType::kC64:
    case DType::kC128:
      break;
  }
  return std::nullopt;
}

/// The reduction over `num_ranks`, or none. NCCL's mean multiplies by 1 / num_ranks before it adds:
/// that is exact for powers of two alone, so other means are a sum and a division in the program.
/// Half precision is rounded at every step: from three ranks on the program widens it before, and
/// for means of float16, whose small numbers can't be halved, of two (jaxcoll/_nccl_types.py).
constexpr std::optional<Reduction> ReductionOf(DType dtype, ReduceOp op, std::size_t num_ranks) {
  const bool is_complex = dtype == DType::kC64 || dtype == DType::kC128;
  if (is_complex) {
    dtype = dtype == DType::kC64 ? DType::kF32 : DType::kF64;
  }
  const std::optional<NcclType> type = NcclTypeOf(dtype);
  if (!type) {
    return std::nullopt;
  }
  const bool is_bool = dtype == DType::kBool;
  const bool is_float =
      dtype == DType::kF16 || dtype == DType::kBF16 || dtype == DType::kF32 || dtype == DType::kF64;
  const std::size_t parts = is_complex ? 2 : 1;
  switch (op) {
    case ReduceOp::kSum:
      return is_bool ? std::nullopt : std::optional(Reduction{*type, NcclOp::kSum, parts});
    case ReduceOp::kMean:
      return is_float && std::has_single_bit(num_ranks)
                 ? std::optional(Reduction{*type, NcclOp::kAvg, parts})
                 : std::nullopt;
    case ReduceOp::kProd:
      return is_bool || is_complex ? std::nullopt
                                   : std::optional(Reduction{*type, NcclOp::kProd, parts});
    case ReduceOp::kMax:
    case ReduceOp::kMin:
      return is_complex ? std::nullopt
                        : std::optional(Reduction{
                              *type, op == ReduceOp::kMax ? NcclOp::kMax : NcclOp::kMin, parts});
    case ReduceOp::kAnd:
    case ReduceOp::kOr:
      return is_bool ? std::optional(Reduction{
                           *type, op == ReduceOp::kOr ? NcclOp::kMax : NcclOp::kMin, parts})
                     : std::nullopt;
  }
  return std::nullopt;
}

}  // namespace jaxcoll::cuda
