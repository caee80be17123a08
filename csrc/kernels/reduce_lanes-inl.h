// kernels/reduce_lanes-inl.h: how the x86 sets load, accumulate and store each element type. What
// an Isa offers is in reduce_simd-inl.h.
#pragma once

#include <cstddef>  // std::byte, std::size_t
#include <cstdint>  // std::uint32_t

#include "kernels/reduce_table-inl.h"  // BFloat16, Float16

namespace jaxcoll {
namespace {  // NOLINT(google-build-namespaces): internal on purpose, see reduce_sets.h

/// A vector register of Ts.
template <typename Isa, typename T>
struct VectorOf {
  using Type __attribute__((vector_size(Isa::kVectorBytes))) = T;
};

template <typename V>
V LoadVector(const std::byte* address) {
  V vector;
  __builtin_memcpy(&vector, address, sizeof(V));
  return vector;
}

template <typename V>
void StoreVector(std::byte* address, V vector) {
  __builtin_memcpy(address, &vector, sizeof(V));
}

/// How one vector register of storage becomes kParts vectors of accumulators, and how these are
/// rounded: Pack is apart from Store so that it is done once, however many the destinations.
template <typename Isa, typename T>
struct Lane {
  using Acc = T;
  using Vector = typename VectorOf<Isa, T>::Type;
  using Packed = Vector;
  static constexpr std::size_t kParts = 1;
  static void Load(const std::byte* address, Vector* parts) {
    parts[0] = LoadVector<Vector>(address);
  }
  static Packed Pack(const Vector* parts) { return parts[0]; }
  static void Store(std::byte* address, Packed packed) { StoreVector(address, packed); }
};

/// A bfloat16 is the upper half of a float, so the 32-bit word that holds two of them gives the
/// even one by a shift and the odd one by a mask: no lane ever moves. (AVX512-BF16's conversion is
/// of no use: it flushes denormals, whatever the mode.)
template <typename Isa>
struct Lane<Isa, BFloat16> {
  using Acc = float;
  using Vector = typename VectorOf<Isa, float>::Type;
  using Words = typename VectorOf<Isa, std::uint32_t>::Type;
  using Packed = Words;
  static constexpr std::size_t kParts = 2;
  static void Load(const std::byte* address, Vector* parts) {
    const Words words = LoadVector<Words>(address);
    parts[0] = reinterpret_cast<Vector>(words << 16);
    parts[1] = reinterpret_cast<Vector>(words & 0xFFFF0000U);
  }
  static Packed Pack(const Vector* parts) {
    return (Rounded(parts[0]) >> 16) | (Rounded(parts[1]) & 0xFFFF0000U);
  }
  static void Store(std::byte* address, Packed packed) { StoreVector(address, packed); }
  /// To nearest even in the upper half. A canonical NaN has no low bits to carry over.
  static Words Rounded(Vector part) {
    const Words bits = reinterpret_cast<Words>(part);
    return bits + 0x7FFFU + ((bits >> 16) & 1U);
  }
};

template <typename Isa>
struct Lane<Isa, Float16> {
  using Acc = float;
  using Vector = typename VectorOf<Isa, float>::Type;
  struct Packed {
    typename Isa::Halves lower;
    typename Isa::Halves upper;
  };
  static constexpr std::size_t kParts = 2;
  static void Load(const std::byte* address, Vector* parts) {
    parts[0] = Isa::LoadHalves(address);
    parts[1] = Isa::LoadHalves(address + Isa::kVectorBytes / 2);
  }
  static Packed Pack(const Vector* parts) {
    return {Isa::ToHalves(parts[0]), Isa::ToHalves(parts[1])};
  }
  static void Store(std::byte* address, const Packed& packed) {
    StoreVector(address, packed.lower);
    StoreVector(address + Isa::kVectorBytes / 2, packed.upper);
  }
};

}  // namespace
}  // namespace jaxcoll
