// core/types.h: the vocabulary of every layer: element types and reductions.
#pragma once

#include <cstddef>      // std::size_t
#include <cstdint>      // std::uint8_t
#include <string_view>  // std::string_view

namespace jaxcoll {

/// Element types that the kernels accept. The values are the wire format of the "dtype" attributes
/// that Python writes (jaxcoll/_types.py), so they never change meaning.
enum class DType : std::uint8_t {
  kBool = 0,
  kI8 = 1,
  kI16 = 2,
  kI32 = 3,
  kI64 = 4,
  kU8 = 5,
  kU16 = 6,
  kU32 = 7,
  kU64 = 8,
  kF16 = 9,
  kBF16 = 10,
  kF32 = 11,
  kF64 = 12,
  kC64 = 13,
  kC128 = 14,
};
inline constexpr std::size_t kNumDTypes = 15;

/// Reductions over ranks. kMean is kSum divided by the number of ranks before the one rounding.
/// kAnd and kOr are bitwise on integers and logical on kBool. The values are a wire format as well.
enum class ReduceOp : std::uint8_t {
  kSum = 0,
  kMean = 1,
  kMax = 2,
  kMin = 3,
  kProd = 4,
  kAnd = 5,
  kOr = 6,
};
inline constexpr std::size_t kNumReduceOps = 7;

/// Bytes of one element.
constexpr std::size_t SizeOf(DType dtype) {
  constexpr std::size_t kBytes[kNumDTypes] = {1, 1, 2, 4, 8, 1, 2, 4, 8, 2, 2, 4, 8, 8, 16};
  return kBytes[static_cast<std::size_t>(dtype)];
}

/// NumPy's name of the type, as error texts show it.
constexpr std::string_view Name(DType dtype) {
  constexpr std::string_view kNames[kNumDTypes] = {
      "bool",   "int8",    "int16",    "int32",   "int64",   "uint8",     "uint16",    "uint32",
      "uint64", "float16", "bfloat16", "float32", "float64", "complex64", "complex128"};
  return kNames[static_cast<std::size_t>(dtype)];
}

constexpr std::string_view Name(ReduceOp op) {
  constexpr std::string_view kNames[kNumReduceOps] = {"sum",  "mean", "max", "min",
                                                      "prod", "and",  "or"};
  return kNames[static_cast<std::size_t>(op)];
}

}  // namespace jaxcoll
