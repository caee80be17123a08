// kernels/reduce_base.cc: the portable set: plain C++, and the truth for the other sets' tests.
// Compiled with -O3 -ffp-contract=off: at -O2 g++ 12 gives 13 instead of 39 GB/s (float32, p = 2).
//
// Blocked: a block of accumulators stays in L1 while the ranks' blocks stream past it, one after
// the other. These are loops that any compiler vectorises, with NEON for instance; the x86 sets
// keep the accumulators in registers, which is faster (reduce_simd-inl.h has the numbers).
#include <bit>      // std::bit_cast
#include <cstddef>  // std::byte, std::size_t
#include <cstdint>  // std::uint16_t
#include <cstring>  // std::memcpy

#include "core/types.h"
#include "kernels/isa_units.h"
#include "kernels/reduce.h"
#include "kernels/reduce_table-inl.h"

namespace jaxcoll {
namespace {

/// Accumulators per block: 2 KiB of float, 4 KiB of complex double, so that they and a block of
/// one rank fit any L1.
constexpr std::size_t kBlock = 512;

template <typename To>
To LoadAs(const std::byte* address) {  // Callers' buffers are aligned to one element at best.
  To value;
  std::memcpy(&value, address, sizeof(To));
  return value;
}

/// `condition ? yes : no` by masking the bits. g++ turns the plain expression on floats, also
/// behind a bit_cast, into the processor's max, which under denormals-are-zero returns 0 for a
/// denormal operand; this way the operand comes back whole. (clang sees through this one too:
/// reduce.h.)
template <typename Bits, typename T>
T Select(bool condition, T yes, T no) {
  const Bits mask = Bits{0} - static_cast<Bits>(condition);
  return std::bit_cast<T>((std::bit_cast<Bits>(yes) & mask) | (std::bit_cast<Bits>(no) & ~mask));
}

/// The positive quiet NaN without payload for any NaN.
template <typename T>
T Canonical(T value) {
  return value == value ? value : static_cast<T>(__builtin_nan(""));
}

/// One element's storage and the type in which it is accumulated.
template <typename T>
struct Element {
  using Storage = T;
  using Acc = T;
  static T Load(const std::byte* address) { return LoadAs<T>(address); }
  static T Round(T acc) { return acc; }
};

template <>
struct Element<BFloat16> {
  using Storage = std::uint16_t;
  using Acc = float;
  static float Load(const std::byte* address) {
    const std::uint32_t bits = LoadAs<std::uint16_t>(address);
    return std::bit_cast<float>(bits << 16);
  }
  /// To nearest even. A canonical NaN has no low bits to carry over, so it needs no branch.
  static std::uint16_t Round(float acc) {
    const auto bits = std::bit_cast<std::uint32_t>(acc);
    return static_cast<std::uint16_t>((bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16);
  }
};

template <>
struct Element<Float16> {
  using Storage = std::uint16_t;
  using Acc = float;
  static float Load(const std::byte* address) {
    const std::uint32_t half = LoadAs<std::uint16_t>(address);
    const std::uint32_t sign = (half & 0x8000U) << 16;
    const std::uint32_t magnitude = half & 0x7FFFU;
    // A denormal is magnitude * 2^-24, which is a normal float: no flush-to-zero mode touches it.
    const float small = static_cast<float>(static_cast<std::int32_t>(magnitude)) * 0x1p-24F;
    const std::uint32_t rebias = magnitude < 0x7C00U ? 112U << 23 : 224U << 23;
    const std::uint32_t normal = (magnitude << 13) + rebias;
    const std::uint32_t bits = magnitude < 0x0400U ? std::bit_cast<std::uint32_t>(small) : normal;
    return std::bit_cast<float>(bits | sign);
  }
  /// To nearest even, as vcvtps2ph does it, without branches so that the loop vectorises.
  static std::uint16_t Round(float acc) {
    const auto bits = std::bit_cast<std::uint32_t>(acc);
    const std::uint32_t sign = (bits >> 16) & 0x8000U;
    const std::uint32_t magnitude = bits & 0x7FFFFFFFU;
    // Below 2^-14 the result counts units of 2^-24; adding 0.5, whose last bit that is, rounds.
    const float shifted = std::bit_cast<float>(magnitude) + 0.5F;
    const std::uint32_t small = std::bit_cast<std::uint32_t>(shifted) - 0x3F000000U;
    const std::uint32_t odd = (magnitude >> 13) & 1U;
    const std::uint32_t normal = (magnitude + 0xFFFU + odd - (112U << 23)) >> 13;
    std::uint32_t half = magnitude < 0x38800000U ? small : normal;
    half = magnitude < 0x47800000U ? half : 0x7C00U;  // From 2^16 on: infinity.
    half = magnitude <= 0x7F800000U ? half : 0x7E00U;
    return static_cast<std::uint16_t>(half | sign);
  }
};

/// Real and imaginary part. std::complex multiplies with C99's recovery of infinities, which XLA
/// does not have and which costs a library call.
template <typename T>
struct Complex {
  T real;
  T imag;
};

template <ReduceOp kOp, typename T>
T Apply(T acc, T x) {
  if constexpr (kOp == ReduceOp::kSum || kOp == ReduceOp::kMean) {
    return static_cast<T>(acc + x);
  } else if constexpr (kOp == ReduceOp::kProd) {
    if constexpr (!kIsReal<T>) {
      return static_cast<T>(1U * acc * x);  // 1U: uint16 would be promoted to a signed int.
    } else {
      return acc * x;
    }
  } else if constexpr (kOp == ReduceOp::kAnd) {
    return static_cast<T>(acc & x);
  } else if constexpr (kOp == ReduceOp::kOr) {
    return static_cast<T>(acc | x);
  } else {
    const bool take_x = kOp == ReduceOp::kMax ? acc < x : x < acc;
    if constexpr (!kIsReal<T>) {
      return take_x ? x : acc;
    } else if constexpr (sizeof(T) == sizeof(std::uint32_t)) {
      return Select<std::uint32_t>(take_x, x, acc);
    } else {
      return Select<std::uint64_t>(take_x, x, acc);
    }
  }
}

template <ReduceOp kOp, typename T>
T Finish(T acc, std::size_t num_srcs) {
  if constexpr (kOp == ReduceOp::kMean) {
    return Canonical(acc / static_cast<T>(num_srcs));
  } else if constexpr (kIsReal<T> && (kOp == ReduceOp::kSum || kOp == ReduceOp::kProd)) {
    return Canonical(acc);
  } else {
    return acc;
  }
}

template <typename Tag, ReduceOp kOp, std::size_t kPerElement>
void Reduce(const void* const* srcs, std::size_t num_srcs, void* const* dsts, std::size_t num_dsts,
            std::size_t count) {
  using E = Element<Tag>;
  using Acc = typename E::Acc;
  using Storage = typename E::Storage;
  const std::size_t total = count * kPerElement;
  for (std::size_t begin = 0; begin < total; begin += kBlock) {
    const std::size_t size = total - begin < kBlock ? total - begin : kBlock;
    Acc acc[kBlock];
    Storage result[kBlock];
    for (std::size_t i = 0; i < size; ++i) {
      acc[i] = Identity<Acc, kOp>();
    }
    for (std::size_t r = 0; r < num_srcs; ++r) {
      const std::byte* src = static_cast<const std::byte*>(srcs[r]) + begin * sizeof(Storage);
      for (std::size_t i = 0; i < size; ++i) {
        acc[i] = Apply<kOp>(acc[i], E::Load(src + i * sizeof(Storage)));
      }
    }
    for (std::size_t i = 0; i < size; ++i) {
      result[i] = E::Round(Finish<kOp>(acc[i], num_srcs));
    }
    for (std::size_t d = 0; d < num_dsts; ++d) {
      std::byte* dst = static_cast<std::byte*>(dsts[d]) + begin * sizeof(Storage);
      std::memcpy(dst, result, size * sizeof(Storage));
    }
  }
}

/// (a + bi)(c + di) = (ac - bd) + (ad + bc)i, each product rounded.
template <typename T>
void ReduceComplexProd(const void* const* srcs, std::size_t num_srcs, void* const* dsts,
                       std::size_t num_dsts, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t offset = i * sizeof(Complex<T>);
    Complex<T> acc = {T{1}, T{0}};
    for (std::size_t r = 0; r < num_srcs; ++r) {
      const auto x = LoadAs<Complex<T>>(static_cast<const std::byte*>(srcs[r]) + offset);
      acc = {acc.real * x.real - acc.imag * x.imag, acc.real * x.imag + acc.imag * x.real};
    }
    acc = {Canonical(acc.real), Canonical(acc.imag)};
    for (std::size_t d = 0; d < num_dsts; ++d) {
      std::memcpy(static_cast<std::byte*>(dsts[d]) + offset, &acc, sizeof(acc));
    }
  }
}

struct BaselineBody {
  template <typename Tag, ReduceOp kOp, std::size_t kPerElement>
  static ReduceFn Get() {
    return &Reduce<Tag, kOp, kPerElement>;
  }
  template <typename T>
  static ReduceFn GetComplexProd() {
    return &ReduceComplexProd<T>;
  }
};

}  // namespace

ReduceFn GetReduceBaseline(DType dtype, ReduceOp op) {
  return SelectReduce<BaselineBody>(dtype, op);
}

}  // namespace jaxcoll
