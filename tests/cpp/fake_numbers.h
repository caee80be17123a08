// tests/cpp/fake_numbers.h: what the fake of NCCL and cuBLASLt computes with: numbers of 16 bits,
// and reductions, rounded at every step as NCCL does.
#pragma once

#include <algorithm>    // std::max, std::min
#include <bit>          // std::bit_cast
#include <cstddef>      // std::byte, std::size_t
#include <cstdint>      // std::int8_t, std::uint8_t, std::uint16_t, std::int32_t, std::uint32_t
#include <cstring>      // std::memcpy
#include <type_traits>  // std::is_floating_point_v
#include <vector>       // std::vector

#include "cuda/abi.h"

namespace jaxcoll::testing {

using cuda::NcclOp;
using cuda::NcclType;
using Bytes = std::vector<std::byte>;

inline float FromHalf(std::uint16_t bits) {
  const float sign = (bits & 0x8000U) != 0 ? -1.0F : 1.0F;
  const int exponent = (bits >> 10) & 31;
  const float mantissa = static_cast<float>(bits & 1023U) / 1024.0F;
  if (exponent == 0) {
    return sign * mantissa * 0x1p-14F;
  }
  float scale = 1.0F;
  for (int i = 15; i < exponent; ++i) {
    scale *= 2.0F;
  }
  for (int i = exponent; i < 15; ++i) {
    scale /= 2.0F;
  }
  return sign * (1.0F + mantissa) * scale;
}

// Rounds to nearest, ties to even, by trying: tests are small.
inline std::uint16_t ToHalf(float value) {
  std::uint16_t best = 0;
  float error = 1e30F;
  for (std::uint32_t bits = 0; bits < 0x7C00U; ++bits) {
    const auto candidate = static_cast<std::uint16_t>(bits | (value < 0 ? 0x8000U : 0U));
    const float found = FromHalf(candidate) - value;
    const float distance = found < 0 ? -found : found;
    if (distance < error || (distance == error && (candidate & 1U) == 0)) {
      error = distance;
      best = candidate;
    }
  }
  return best;
}

inline std::uint16_t ToBf16(float value) {
  auto bits = std::bit_cast<std::uint32_t>(value);
  bits += 0x7FFFU + ((bits >> 16) & 1U);
  return static_cast<std::uint16_t>(bits >> 16);
}

inline float FromBf16(std::uint16_t bits) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

inline std::size_t SizeOf(NcclType type) {
  switch (type) {
    case NcclType::kI8:
    case NcclType::kU8:
      return 1;
    case NcclType::kF16:
    case NcclType::kBF16:
      return 2;
    case NcclType::kI32:
    case NcclType::kU32:
    case NcclType::kF32:
      return 4;
    default:
      return 8;
  }
}

template <typename T>
T Combine(NcclOp op, T a, T b) {
  switch (op) {
    case NcclOp::kProd:
      return static_cast<T>(a * b);
    case NcclOp::kMax:
      return std::max(a, b);
    case NcclOp::kMin:
      return std::min(a, b);
    default:
      return static_cast<T>(a + b);
  }
}

/// Rank by rank. `load` and `store` are of the type in memory.
template <typename T, typename Stored, typename Load, typename Store>
void Reduce(const std::vector<const Bytes*>& inputs, std::size_t first, std::size_t count,
            NcclOp op, void* to, Load load, Store store) {
  const auto at = [&](std::size_t rank, std::size_t i) {
    Stored value;
    std::memcpy(&value, inputs[rank]->data() + (first + i) * sizeof(Stored), sizeof(Stored));
    T loaded = load(value);
    if constexpr (std::is_floating_point_v<T>) {
      loaded = op == NcclOp::kAvg ? loaded / static_cast<T>(inputs.size()) : loaded;
    }
    return loaded;
  };
  for (std::size_t i = 0; i < count; ++i) {
    Stored total = store(at(0, i));
    for (std::size_t rank = 1; rank < inputs.size(); ++rank) {
      total = store(Combine<T>(op, load(total), at(rank, i)));
    }
    std::memcpy(static_cast<std::byte*>(to) + i * sizeof(Stored), &total, sizeof(Stored));
  }
}

template <typename T>
void ReducePlain(const std::vector<const Bytes*>& inputs, std::size_t first, std::size_t count,
                 NcclOp op, void* to) {
  const auto same = [](T value) { return value; };
  Reduce<T, T>(inputs, first, count, op, to, same, same);
}

inline void ReduceAny(NcclType type, const std::vector<const Bytes*>& inputs, std::size_t first,
                      std::size_t count, NcclOp op, void* to) {
  switch (type) {
    case NcclType::kI8:
      return ReducePlain<std::int8_t>(inputs, first, count, op, to);
    case NcclType::kU8:
      return ReducePlain<std::uint8_t>(inputs, first, count, op, to);
    case NcclType::kI32:
      return ReducePlain<std::int32_t>(inputs, first, count, op, to);
    case NcclType::kU32:
      return ReducePlain<std::uint32_t>(inputs, first, count, op, to);
    case NcclType::kI64:
      return ReducePlain<std::int64_t>(inputs, first, count, op, to);
    case NcclType::kU64:
      return ReducePlain<std::uint64_t>(inputs, first, count, op, to);
    case NcclType::kF32:
      return ReducePlain<float>(inputs, first, count, op, to);
    case NcclType::kF64:
      return ReducePlain<double>(inputs, first, count, op, to);
    case NcclType::kF16:
      return Reduce<float, std::uint16_t>(inputs, first, count, op, to, FromHalf, ToHalf);
    case NcclType::kBF16:
      return Reduce<float, std::uint16_t>(inputs, first, count, op, to, FromBf16, ToBf16);
  }
}

}  // namespace jaxcoll::testing
