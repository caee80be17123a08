// cuda/peer_numbers.h: elements of sums over peer memory, on a device or on the host.
#pragma once

#include <cstdint>  // std::int32_t, std::uint16_t, std::uint32_t
#include <cstring>  // std::memcpy

#include "cuda/peer_flags.h"

namespace jaxcoll::cuda {

/// Integers of both signs and the floats that the hardware adds: a sum wraps around.
template <typename T>
struct PlainElement {
  using Stored = T;
  using Sum = T;
  static JAXCOLL_ON_DEVICE Sum Load(Stored value) { return value; }
  static JAXCOLL_ON_DEVICE Stored Round(Sum sum) { return sum; }
};

JAXCOLL_ON_DEVICE std::uint32_t BitsOf(float value) {
  std::uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}
JAXCOLL_ON_DEVICE float FloatOf(std::uint32_t bits) {
  float value = 0;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

/// Added in float, and rounded once, to nearest, ties to even.
struct BF16Element {
  using Stored = std::uint16_t;
  using Sum = float;
  static JAXCOLL_ON_DEVICE float Load(std::uint16_t value) {
    return FloatOf(static_cast<std::uint32_t>(value) << 16);
  }
  static JAXCOLL_ON_DEVICE std::uint16_t Round(float sum) {
    const std::uint32_t bits = BitsOf(sum);
    if (sum != sum) {
      return static_cast<std::uint16_t>((bits >> 16) | 0x40);  // a quiet NaN, not infinity
    }
    return static_cast<std::uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  }
};

/// The same.
struct F16Element {
  using Stored = std::uint16_t;
  using Sum = float;
  static JAXCOLL_ON_DEVICE float Load(std::uint16_t value) {
    const std::uint32_t sign = static_cast<std::uint32_t>(value & 0x8000) << 16;
    const std::uint32_t rest = static_cast<std::uint32_t>(value & 0x7fff) << 13;
    if ((value & 0x7c00) == 0x7c00) {
      return FloatOf(sign | rest | 0x7f80'0000);
    }
    // The exponent has another bias; subnormal numbers come out right, too.
    return FloatOf(sign | BitsOf(FloatOf(rest) * 0x1p112F));
  }
  static JAXCOLL_ON_DEVICE std::uint16_t Round(float sum) {
    const std::uint32_t bits = BitsOf(sum);
    const auto sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000);
    const std::uint32_t size = bits & 0x7fff'ffff;
    if (size > 0x7f80'0000) {
      return static_cast<std::uint16_t>(sign | 0x7e00 | ((size >> 13) & 0x3ff));
    }
    if (size >= 0x4780'0000) {  // 65536
      return static_cast<std::uint16_t>(sign | 0x7c00);
    }
    if (size < 0x3880'0000) {  // 2^-14: to multiples of 2^-24, as float rounds there
      return static_cast<std::uint16_t>(sign | (BitsOf(FloatOf(size) + 0.5F) - BitsOf(0.5F)));
    }
    const std::uint32_t rounded = size - 0x3800'0000 + 0xfff + ((size >> 13) & 1);
    return static_cast<std::uint16_t>(sign | (rounded >> 13));
  }
};

}  // namespace jaxcoll::cuda
