// tests/cpp/kernels_reference.h: what kernels/reduce.h promises, one element at a time, and
// operands that try it. Shares no code with the kernels: 16-bit floats are arithmetic here, not bit
// patterns.
//
// Compile what includes this with -ffp-contract=off, as the kernels are.
#pragma once

#include <bit>       // std::bit_cast
#include <cmath>     // std::ldexp
#include <cstddef>   // std::byte
#include <cstdint>   // std::uint64_t
#include <cstring>   // std::memcpy
#include <iterator>  // std::size
#include <limits>    // std::numeric_limits
#include <random>    // std::mt19937_64
#include <vector>    // std::vector

#include "core/types.h"

namespace jaxcoll::testing {

using Bytes = std::vector<std::byte>;
using Words = std::vector<std::uint64_t>;

/// Bits of fraction of the two 16-bit formats.
inline constexpr int kHalf = 10;
inline constexpr int kBrain = 7;

/// A 16-bit float with this many bits of fraction, as IEEE 754 defines it.
inline double Decode16(std::uint16_t bits, int fraction_bits) {
  const int exponent_bits = 15 - fraction_bits;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = (bits & 0x7FFF) >> fraction_bits;
  const int fraction = bits & ((1 << fraction_bits) - 1);
  const double sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;
  if (exponent == (1 << exponent_bits) - 1) {
    return fraction != 0 ? std::numeric_limits<double>::quiet_NaN() : sign * HUGE_VAL;
  }
  const int leading = exponent == 0 ? 0 : 1 << fraction_bits;
  const int power = (exponent == 0 ? 1 : exponent) - bias - fraction_bits;
  return sign * std::ldexp(leading + fraction, power);
}

/// Nearest, ties to even: std::nearbyint of the value in units of its last place.
inline std::uint16_t Encode16(float value, int fraction_bits) {
  const int bias = (1 << (14 - fraction_bits)) - 1;
  const int sign = std::signbit(value) ? 0x8000 : 0;
  const int infinity = 0x7FFF & ~((1 << fraction_bits) - 1);
  if (std::isnan(value)) {
    return fraction_bits == kHalf ? 0x7E00 : 0x7FC0;
  }
  if (std::isinf(value)) {
    return static_cast<std::uint16_t>(sign | infinity);
  }
  const double magnitude = std::fabs(static_cast<double>(value));
  int exponent = magnitude == 0.0 ? 1 - bias : std::ilogb(magnitude);
  exponent = exponent < 1 - bias ? 1 - bias : exponent;
  const int units =
      static_cast<int>(std::nearbyint(std::ldexp(magnitude, fraction_bits - exponent)));
  // A carry out of the fraction raises the exponent, and denormals have none: the sum does both.
  const int code = units + ((exponent + bias - 1) << fraction_bits);
  return static_cast<std::uint16_t>(sign | (code < infinity ? code : infinity));
}

template <typename T>
T Combine(ReduceOp op, T acc, T x) {
  switch (op) {
    case ReduceOp::kMax:
      return acc < x ? x : acc;
    case ReduceOp::kMin:
      return x < acc ? x : acc;
    case ReduceOp::kProd:
      return static_cast<T>(acc * x);
    default:
      return static_cast<T>(acc + x);
  }
}

template <typename T>
T ReferenceReal(ReduceOp op, const std::vector<T>& xs) {
  constexpr T kInfinity = std::numeric_limits<T>::infinity();
  T acc = op == ReduceOp::kProd  ? T{1}
          : op == ReduceOp::kMax ? -kInfinity
          : op == ReduceOp::kMin ? kInfinity
                                 : T{0};
  for (const T x : xs) {
    acc = Combine(op, acc, x);
  }
  acc = op == ReduceOp::kMean ? acc / static_cast<T>(xs.size()) : acc;
  return std::isnan(acc) ? std::numeric_limits<T>::quiet_NaN() : acc;
}

/// Starts from the first operand, where the kernels start from an identity.
template <typename T>
std::uint64_t ReferenceInteger(ReduceOp op, const Words& words) {
  std::uint64_t acc = words[0];
  for (std::size_t r = 1; r < words.size(); ++r) {
    const std::uint64_t x = words[r];
    if (op == ReduceOp::kMax || op == ReduceOp::kMin) {
      acc = static_cast<std::uint64_t>(Combine(op, static_cast<T>(acc), static_cast<T>(x)));
    } else {
      acc = op == ReduceOp::kAnd ? acc & x : op == ReduceOp::kOr ? acc | x : Combine(op, acc, x);
    }
  }
  return acc;
}

template <typename Float, typename Bits>
std::uint64_t ReferenceFloat(ReduceOp op, const Words& words) {
  std::vector<Float> xs;
  for (const std::uint64_t word : words) {
    xs.push_back(std::bit_cast<Float>(static_cast<Bits>(word)));
  }
  return std::bit_cast<Bits>(ReferenceReal(op, xs));
}

inline std::uint64_t Reference16(ReduceOp op, const Words& words, int fraction_bits) {
  std::vector<float> xs;
  for (const std::uint64_t word : words) {
    xs.push_back(static_cast<float>(Decode16(static_cast<std::uint16_t>(word), fraction_bits)));
  }
  return Encode16(ReferenceReal(op, xs), fraction_bits);
}

/// The result's bits, from the operands' bits in rank order.
inline std::uint64_t ReferenceScalar(DType dtype, ReduceOp op, const Words& words) {
  switch (dtype) {
    case DType::kBool:
    case DType::kU8:
      return ReferenceInteger<std::uint8_t>(op, words);
    case DType::kI8:
      return ReferenceInteger<std::int8_t>(op, words);
    case DType::kI16:
      return ReferenceInteger<std::int16_t>(op, words);
    case DType::kI32:
      return ReferenceInteger<std::int32_t>(op, words);
    case DType::kI64:
      return ReferenceInteger<std::int64_t>(op, words);
    case DType::kU16:
      return ReferenceInteger<std::uint16_t>(op, words);
    case DType::kU32:
      return ReferenceInteger<std::uint32_t>(op, words);
    case DType::kU64:
      return ReferenceInteger<std::uint64_t>(op, words);
    case DType::kF16:
      return Reference16(op, words, kHalf);
    case DType::kBF16:
      return Reference16(op, words, kBrain);
    case DType::kF32:
    case DType::kC64:
      return ReferenceFloat<float, std::uint32_t>(op, words);
    case DType::kF64:
    case DType::kC128:
      return ReferenceFloat<double, std::uint64_t>(op, words);
  }
  return 0;
}

inline bool IsComplex(DType dtype) { return dtype == DType::kC64 || dtype == DType::kC128; }

template <typename T>
void ReferenceComplexProd(const std::vector<Bytes>& srcs, std::size_t at, std::byte* result) {
  T acc[2] = {1, 0};
  for (const Bytes& src : srcs) {
    T x[2];
    std::memcpy(x, src.data() + at, sizeof(x));
    const T real = acc[0] * x[0] - acc[1] * x[1];
    const T imag = acc[0] * x[1] + acc[1] * x[0];
    acc[0] = real;
    acc[1] = imag;
  }
  for (T& part : acc) {
    part = std::isnan(part) ? std::numeric_limits<T>::quiet_NaN() : part;
  }
  std::memcpy(result, acc, sizeof(acc));
}

/// The result's bytes for the ranks' operands, all of one size.
inline Bytes Reference(DType dtype, ReduceOp op, const std::vector<Bytes>& srcs) {
  Bytes result(srcs[0].size());
  const bool complex_prod = IsComplex(dtype) && op == ReduceOp::kProd;
  const std::size_t step = SizeOf(dtype) / (IsComplex(dtype) && !complex_prod ? 2 : 1);
  for (std::size_t at = 0; at < result.size(); at += step) {
    if (complex_prod) {
      dtype == DType::kC64 ? ReferenceComplexProd<float>(srcs, at, result.data() + at)
                           : ReferenceComplexProd<double>(srcs, at, result.data() + at);
      continue;
    }
    Words words;
    for (const Bytes& src : srcs) {  // Little-endian, like every machine that JAX runs on.
      std::memcpy(&words.emplace_back(0), src.data() + at, step);
    }
    const std::uint64_t bits = ReferenceScalar(dtype, op, words);
    std::memcpy(result.data() + at, &bits, step);
  }
  return result;
}

/// Bits of one number: by turns a small exact one, any bit pattern (of moderate size on wide
/// floats, so that sums round instead of drowning), and one of the cases that go wrong.
inline std::uint64_t RandomBits(DType dtype, std::size_t index, std::mt19937_64& random) {
  const std::uint64_t any = random();
  const int small = static_cast<int>(any % 9) - 4;
  const std::uint64_t kind = index % 3;
  const auto pick = [&any](const auto& cases) -> std::uint64_t {
    return cases[(any >> 32) % std::size(cases)];
  };
  const bool narrow = dtype == DType::kF16;
  switch (dtype) {
    case DType::kBool:
      return any & 1;
    case DType::kF16:
    case DType::kBF16: {  // Zeros, denormals, ones, largest, infinities, NaNs (signalling first).
      constexpr std::uint16_t kHalfCases[] = {0,      0x8000, 1,      0x83FF, 0x0400,
                                              0x3C00, 0xBC00, 0x7BFF, 0xFBFF, 0x7C00,
                                              0xFC00, 0x7C01, 0xFE55};
      constexpr std::uint16_t kBrainCases[] = {0,      0x8000, 1,      0x807F, 0x0080,
                                               0x3F80, 0xBF80, 0x7F7F, 0xFF7F, 0x7F80,
                                               0xFF80, 0x7F81, 0xFFD5};
      return kind == 0   ? Encode16(static_cast<float>(small), narrow ? kHalf : kBrain)
             : kind == 1 ? any & 0xFFFF
                         : (narrow ? pick(kHalfCases) : pick(kBrainCases));
    }
    case DType::kF32:
    case DType::kC64: {
      constexpr std::uint32_t kCases[] = {0,          0x80000000, 1,          0x807FFFFF,
                                          0x00800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000,
                                          0xFF800000, 0x7F800001, 0xFFC12345, 0x3F800000};
      return kind == 0   ? std::bit_cast<std::uint32_t>(static_cast<float>(small))
             : kind == 1 ? 0x3D000000 + (any & 0x83FFFFFF)
                         : pick(kCases);
    }
    case DType::kF64:
    case DType::kC128: {
      constexpr std::uint64_t kCases[] = {0,
                                          std::uint64_t{1} << 63,
                                          1,
                                          0x800FFFFFFFFFFFFF,
                                          0x0010000000000000,
                                          0x7FEFFFFFFFFFFFFF,
                                          0x7FF0000000000000,
                                          0xFFF0000000000000,
                                          0x7FF0000000000001,
                                          0xFFF8000012345678};
      return kind == 0   ? std::bit_cast<std::uint64_t>(static_cast<double>(small))
             : kind == 1 ? 0x3FA0000000000000 + (any & 0x807FFFFFFFFFFFFF)
                         : pick(kCases);
    }
    default: {
      constexpr std::uint64_t kCases[] = {0, 1, ~std::uint64_t{0}, 0x7F7F7F7F7F7F7F7F,
                                          0x8080808080808080};
      return kind == 0 ? static_cast<std::uint64_t>(small) : kind == 1 ? any : pick(kCases);
    }
  }
}

inline std::vector<Bytes> RandomSrcs(DType dtype, std::size_t num_srcs, std::size_t count) {
  std::mt19937_64 random(count * 100 + num_srcs * 20 + static_cast<std::size_t>(dtype));
  std::vector<Bytes> srcs(num_srcs, Bytes(count * SizeOf(dtype)));
  const std::size_t step = SizeOf(dtype) / (IsComplex(dtype) ? 2 : 1);
  for (Bytes& src : srcs) {
    for (std::size_t at = 0; at < src.size(); at += step) {
      const std::uint64_t bits = RandomBits(dtype, at / step, random);
      std::memcpy(src.data() + at, &bits, step);
    }
  }
  return srcs;
}

}  // namespace jaxcoll::testing
