// kernels/reduce_table-inl.h: which (dtype, op) exists and how many kernels that takes.
//
// The three units fill this one table, so that no set can lack a combination that another has.
// A Body offers
//
//   template <typename Element, ReduceOp kOp, std::size_t kPerElement> static ReduceFn Get();
//   template <typename T> static ReduceFn GetComplexProd();
//
// where Element is a number type, Float16 or BFloat16, and one element of the caller's dtype is
// kPerElement of them: a complex sum is the sum of twice as many reals.
#pragma once

#include <cstddef>  // std::size_t
#include <cstdint>  // std::int8_t

#include "core/types.h"      // DType, ReduceOp
#include "kernels/reduce.h"  // ReduceFn

namespace jaxcoll {
namespace {  // NOLINT(google-build-namespaces): internal on purpose, see reduce_sets.h

/// Stored in 16 bits, accumulated as float.
struct Float16 {};
struct BFloat16 {};

template <typename T>
inline constexpr bool kIsReal = static_cast<T>(0.5) != T{0};

/// kBool is bytes 0 and 1, on which "and" is min and "or" is max.
template <typename Body>
ReduceFn SelectBool(ReduceOp op) {
  switch (op) {
    case ReduceOp::kMin:
    case ReduceOp::kAnd:
      return Body::template Get<std::uint8_t, ReduceOp::kAnd, 1>();
    case ReduceOp::kMax:
    case ReduceOp::kOr:
      return Body::template Get<std::uint8_t, ReduceOp::kOr, 1>();
    default:
      return nullptr;
  }
}

/// Only max and min depend on the sign; unsigned arithmetic wraps around without being undefined.
template <typename Body, typename T, typename Unsigned>
ReduceFn SelectInteger(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return Body::template Get<Unsigned, ReduceOp::kSum, 1>();
    case ReduceOp::kProd:
      return Body::template Get<Unsigned, ReduceOp::kProd, 1>();
    case ReduceOp::kMax:
      return Body::template Get<T, ReduceOp::kMax, 1>();
    case ReduceOp::kMin:
      return Body::template Get<T, ReduceOp::kMin, 1>();
    case ReduceOp::kAnd:
      return Body::template Get<Unsigned, ReduceOp::kAnd, 1>();
    case ReduceOp::kOr:
      return Body::template Get<Unsigned, ReduceOp::kOr, 1>();
    default:
      return nullptr;
  }
}

template <typename Body, typename Element>
ReduceFn SelectFloat(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return Body::template Get<Element, ReduceOp::kSum, 1>();
    case ReduceOp::kMean:
      return Body::template Get<Element, ReduceOp::kMean, 1>();
    case ReduceOp::kMax:
      return Body::template Get<Element, ReduceOp::kMax, 1>();
    case ReduceOp::kMin:
      return Body::template Get<Element, ReduceOp::kMin, 1>();
    case ReduceOp::kProd:
      return Body::template Get<Element, ReduceOp::kProd, 1>();
    default:
      return nullptr;
  }
}

template <typename Body, typename T>
ReduceFn SelectComplex(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return Body::template Get<T, ReduceOp::kSum, 2>();
    case ReduceOp::kMean:
      return Body::template Get<T, ReduceOp::kMean, 2>();
    case ReduceOp::kProd:
      return Body::template GetComplexProd<T>();
    default:
      return nullptr;
  }
}

template <typename Body>
ReduceFn SelectReduce(DType dtype, ReduceOp op) {
  switch (dtype) {
    case DType::kBool:
      return SelectBool<Body>(op);
    case DType::kI8:
      return SelectInteger<Body, std::int8_t, std::uint8_t>(op);
    case DType::kI16:
      return SelectInteger<Body, std::int16_t, std::uint16_t>(op);
    case DType::kI32:
      return SelectInteger<Body, std::int32_t, std::uint32_t>(op);
    case DType::kI64:
      return SelectInteger<Body, std::int64_t, std::uint64_t>(op);
    case DType::kU8:
      return SelectInteger<Body, std::uint8_t, std::uint8_t>(op);
    case DType::kU16:
      return SelectInteger<Body, std::uint16_t, std::uint16_t>(op);
    case DType::kU32:
      return SelectInteger<Body, std::uint32_t, std::uint32_t>(op);
    case DType::kU64:
      return SelectInteger<Body, std::uint64_t, std::uint64_t>(op);
    case DType::kF16:
      return SelectFloat<Body, Float16>(op);
    case DType::kBF16:
      return SelectFloat<Body, BFloat16>(op);
    case DType::kF32:
      return SelectFloat<Body, float>(op);
    case DType::kF64:
      return SelectFloat<Body, double>(op);
    case DType::kC64:
      return SelectComplex<Body, float>(op);
    case DType::kC128:
      return SelectComplex<Body, double>(op);
  }
  return nullptr;
}

/// What accumulation starts from, as the contract in reduce.h says. T is float for 16-bit floats.
template <typename T, ReduceOp kOp>
constexpr T Identity() {
  constexpr bool kIsSigned = static_cast<T>(-1) < T{0};
  if constexpr (kOp == ReduceOp::kSum || kOp == ReduceOp::kMean || kOp == ReduceOp::kOr) {
    return T{0};
  } else if constexpr (kOp == ReduceOp::kProd) {
    return T{1};
  } else if constexpr (kOp == ReduceOp::kAnd) {
    return static_cast<T>(~T{0});
  } else if constexpr (kIsReal<T>) {
    constexpr T kInfinity = static_cast<T>(__builtin_inf());
    return kOp == ReduceOp::kMax ? -kInfinity : kInfinity;
  } else {
    // By hand: std::numeric_limits' functions are inline and would be shared between the units.
    constexpr T kLowest =
        kIsSigned ? static_cast<T>(std::uint64_t{1} << (sizeof(T) * 8 - 1)) : T{0};
    return kOp == ReduceOp::kMax ? kLowest : static_cast<T>(~kLowest);
  }
}

}  // namespace
}  // namespace jaxcoll
