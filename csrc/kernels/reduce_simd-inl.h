// kernels/reduce_simd-inl.h: the body of the x86 sets.
//
// Fused: kUnroll vectors of accumulators stay in registers while a loop over the ranks adds theirs,
// then every destination gets them. Each byte is read once and written once, whatever the number of
// ranks. An Isa (reduce_avx2.cc, reduce_avx512.cc) offers
//
//   kVectorBytes                          one vector register
//   kUnroll                               vectors per rank and step
//   Max(acc, x), Min(acc, x)              of float and double vectors, as the contract says
//   Halves                                half a register of float16
//   LoadHalves(address)                   kVectorBytes / 4 float16 to floats
//   ToHalves(floats)                      and back, to nearest even
//   LoadTail(buffer, address, bytes)      the first bytes < kVectorBytes into a buffer of
//   StoreTail(address, buffer, bytes)     kVectorBytes, the rest zeroed; and back
//
// Everything else is the compilers' vector extension, so one text serves all widths.
//
// Why this shape: prototypes of float32 sums in place, p ranks, buffers at one offset in a page,
// GB/s read plus written by one thread of a shared 2-core Zen 4 virtual machine (g++ 12 -O3,
// AVX-512, thread CPU time, medians of 3 runs; sizes are those of all ranks together):
//
//                                p=2 256K  4M 320M    p=4 256K  4M 320M    p=8 256K  4M 320M
//   fused, 4 vectors                  184 177   49         183 171   49         147 134   50
//   same, addresses in registers      223 197   50         221 195   50         184 144   51
//   blocked, 4 KiB, 2 ranks a pass    103  86   34         102  94   32         100  67   25
//   fused, non-temporal stores         29  29   31          30  30   31          26  27   23
//
// 8 vectors lose at p = 8 (118, 111, 43). They win in cache where the ranks' buffers lie 64 bytes
// apart modulo a page (p = 4, 256K: 149 against 112, one run), which large allocations do not.
// In one run each, prefetching 512 bytes or 2 KiB ahead helped nowhere and cost 27 to 42% at p = 8
// beyond L3; non-temporal stores to one destination apart from the sources gained there (p = 4,
// 64M: 50 against 26), but a kernel sees one slice and cannot know the size of the whole.
//
// The `#pragma GCC unroll`s make registers of the small arrays at -O2 too; without them g++ 12 does
// so at -O3 only (p = 2, 16K: 57 against 220).
#pragma once

#include <cstddef>  // std::byte, std::size_t
#include <utility>  // std::index_sequence

#include "core/types.h"                // DType, ReduceOp
#include "kernels/isa_units.h"         // GetReduceBaseline
#include "kernels/reduce.h"            // ReduceFn
#include "kernels/reduce_lanes-inl.h"  // Lane
#include "kernels/reduce_table-inl.h"  // Identity

namespace jaxcoll {
namespace {  // NOLINT(google-build-namespaces): internal on purpose, see reduce_sets.h

template <typename Isa, typename Element, ReduceOp kOp>
struct Kernel {
  using L = Lane<Isa, Element>;
  using T = typename L::Acc;
  using Vector = typename L::Vector;

  static Vector Apply(Vector acc, Vector x) {
    if constexpr (kOp == ReduceOp::kSum || kOp == ReduceOp::kMean) {
      return acc + x;
    } else if constexpr (kOp == ReduceOp::kProd) {
      return acc * x;
    } else if constexpr (kOp == ReduceOp::kAnd) {
      return acc & x;
    } else if constexpr (kOp == ReduceOp::kOr) {
      return acc | x;
    } else if constexpr (kIsReal<T>) {
      return kOp == ReduceOp::kMax ? Isa::Max(acc, x) : Isa::Min(acc, x);
    } else if constexpr (kOp == ReduceOp::kMax) {
      return acc < x ? x : acc;
    } else {
      return x < acc ? x : acc;
    }
  }

  /// Every NaN becomes the positive quiet one without payload: which operand's payload survives
  /// an addition depends on the order in which the compiler put them.
  static Vector Finish(Vector acc, std::size_t num_srcs) {
    if constexpr (kOp == ReduceOp::kMean) {
      acc /= static_cast<T>(num_srcs);
    }
    if constexpr (kIsReal<T> && kOp != ReduceOp::kMax && kOp != ReduceOp::kMin) {
      const Vector nan = Vector{} + static_cast<T>(__builtin_nan(""));
      acc = acc == acc ? acc : nan;
    }
    return acc;
  }

  /// kVectors registers of results.
  template <std::size_t kVectors>
  struct Results {
    typename L::Packed packed[kVectors];

    void Store(void* dst) const {
#pragma GCC unroll 8
      for (std::size_t v = 0; v < kVectors; ++v) {
        L::Store(static_cast<std::byte*>(dst) + v * Isa::kVectorBytes, packed[v]);
      }
    }
  };

  /// The accumulators of kVectors registers of storage.
  template <std::size_t kVectors>
  struct Block {
    static constexpr std::size_t kBytes = kVectors * Isa::kVectorBytes;
    Vector parts[kVectors * L::kParts];

    Block() {
#pragma GCC unroll 8
      for (Vector& part : parts) {
        part = Vector{} + Identity<T, kOp>();
      }
    }
    void Accumulate(const void* src) {
#pragma GCC unroll 8
      for (std::size_t v = 0; v < kVectors; ++v) {
        Vector x[L::kParts];
        L::Load(static_cast<const std::byte*>(src) + v * Isa::kVectorBytes, x);
#pragma GCC unroll 8
        for (std::size_t k = 0; k < L::kParts; ++k) {
          Vector& acc = parts[v * L::kParts + k];
          acc = Apply(acc, x[k]);
        }
      }
    }
    Results<kVectors> Finish(std::size_t num_srcs) const {
      Results<kVectors> results;
#pragma GCC unroll 8
      for (std::size_t v = 0; v < kVectors; ++v) {
        Vector finished[L::kParts];
#pragma GCC unroll 8
        for (std::size_t k = 0; k < L::kParts; ++k) {
          finished[k] = Kernel::Finish(parts[v * L::kParts + k], num_srcs);
        }
        results.packed[v] = L::Pack(finished);
      }
      return results;
    }
  };

  /// Reduces whole blocks from byte `offset` on; returns the first byte that is left.
  template <std::size_t kVectors>
  static std::size_t Blocks(const void* const* srcs, std::size_t num_srcs, void* const* dsts,
                            std::size_t num_dsts, std::size_t offset, std::size_t bytes) {
    for (; bytes - offset >= Block<kVectors>::kBytes; offset += Block<kVectors>::kBytes) {
      Block<kVectors> block;
      for (std::size_t r = 0; r < num_srcs; ++r) {
        block.Accumulate(static_cast<const std::byte*>(srcs[r]) + offset);
      }
      const auto results = block.Finish(num_srcs);
      for (std::size_t d = 0; d < num_dsts; ++d) {
        results.Store(static_cast<std::byte*>(dsts[d]) + offset);
      }
    }
    return offset;
  }

  /// Blocks<kUnroll> for as many sources as destinations with all addresses in registers: the
  /// generic loop has to reload them, because for all the compiler knows a store changed them.
  template <std::size_t... kRanks>
  static std::size_t BlocksOf(std::index_sequence<kRanks...> /*ranks*/, const void* const* srcs,
                              void* const* dsts, std::size_t bytes) {
    constexpr std::size_t kStep = Block<Isa::kUnroll>::kBytes;
    const std::byte* const src[] = {static_cast<const std::byte*>(srcs[kRanks])...};
    std::byte* const dst[] = {static_cast<std::byte*>(dsts[kRanks])...};
    std::size_t offset = 0;
    for (; bytes - offset >= kStep; offset += kStep) {
      Block<Isa::kUnroll> block;
      (block.Accumulate(src[kRanks] + offset), ...);
      const auto results = block.Finish(sizeof...(kRanks));
      (results.Store(dst[kRanks] + offset), ...);
    }
    return offset;
  }

  /// The last 0 < bytes < kVectorBytes, as one vector.
  static void Tail(const void* const* srcs, std::size_t num_srcs, void* const* dsts,
                   std::size_t num_dsts, std::size_t offset, std::size_t bytes) {
    alignas(Isa::kVectorBytes) std::byte buffer[Isa::kVectorBytes];
    Block<1> block;
    for (std::size_t r = 0; r < num_srcs; ++r) {
      Isa::LoadTail(buffer, static_cast<const std::byte*>(srcs[r]) + offset, bytes);
      block.Accumulate(buffer);
    }
    block.Finish(num_srcs).Store(buffer);
    for (std::size_t d = 0; d < num_dsts; ++d) {
      Isa::StoreTail(static_cast<std::byte*>(dsts[d]) + offset, buffer, bytes);
    }
  }

  template <std::size_t kBytesPerElement>
  static void Reduce(const void* const* srcs, std::size_t num_srcs, void* const* dsts,
                     std::size_t num_dsts, std::size_t count) {
    // Gradients: the operations of a train step, in place, get code of their own.
    constexpr bool kHot = kIsReal<T> && (kOp == ReduceOp::kSum || kOp == ReduceOp::kMean);
    const std::size_t bytes = count * kBytesPerElement;
    std::size_t offset = 0;
    if constexpr (kHot) {
      if (num_srcs == num_dsts) {
        if (num_srcs == 2) {
          offset = BlocksOf(std::make_index_sequence<2>{}, srcs, dsts, bytes);
        } else if (num_srcs == 4) {
          offset = BlocksOf(std::make_index_sequence<4>{}, srcs, dsts, bytes);
        } else if (num_srcs == 8) {
          offset = BlocksOf(std::make_index_sequence<8>{}, srcs, dsts, bytes);
        }
      }
    }
    offset = Blocks<Isa::kUnroll>(srcs, num_srcs, dsts, num_dsts, offset, bytes);
    offset = Blocks<1>(srcs, num_srcs, dsts, num_dsts, offset, bytes);
    if (offset != bytes) {
      Tail(srcs, num_srcs, dsts, num_dsts, offset, bytes - offset);
    }
  }
};

template <typename Element>
inline constexpr std::size_t kStorageBytes = sizeof(Element);
template <>
inline constexpr std::size_t kStorageBytes<Float16> = 2;
template <>
inline constexpr std::size_t kStorageBytes<BFloat16> = 2;

template <typename Isa>
struct SimdBody {
  template <typename Element, ReduceOp kOp, std::size_t kPerElement>
  static ReduceFn Get() {
    return &Kernel<Isa, Element, kOp>::template Reduce<kStorageBytes<Element> * kPerElement>;
  }
  /// Nobody multiplies complex numbers over ranks often enough to pay for shuffles.
  template <typename T>
  static ReduceFn GetComplexProd() {
    return GetReduceBaseline(sizeof(T) == 4 ? DType::kC64 : DType::kC128, ReduceOp::kProd);
  }
};

}  // namespace
}  // namespace jaxcoll
