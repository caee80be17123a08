// tests/cpp/kernels_test.cc: every instruction set against a naive reference, bit by bit.
#include <sys/mman.h>  // mmap, mprotect
#include <unistd.h>    // sysconf

#include <algorithm>  // std::copy
#include <bit>        // std::bit_cast
#include <cmath>      // std::fabs
#include <cstddef>    // std::byte
#include <cstdint>    // std::uint16_t
#include <cstring>    // std::memcmp
#include <limits>     // std::numeric_limits
#include <string>     // std::string
#include <vector>     // std::vector

#include "core/types.h"
#include "kernels/kernel_sets.h"
#include "kernels/reduce.h"
#include "kernels_reference.h"
#include "testing.h"

#if defined(__x86_64__)
#include <xmmintrin.h>  // _mm_setcsr
#endif

namespace jaxcoll::testing::kernels_test {
namespace {

constexpr std::byte kPoison{0xA5};
constexpr std::size_t kGuard = 96;  // Bytes watched on both sides: more than any vector.

#if defined(__clang__)
constexpr bool kMaxKeepsDenormals = false;  // While flushing: reduce.h says why.
#else
constexpr bool kMaxKeepsDenormals = true;
#endif

constexpr std::size_t kNumSrcs[] = {1, 2, 3, 4, 5, 8};

std::string Describe(const KernelSet& set, DType dtype, ReduceOp op, std::size_t num_srcs,
                     std::size_t count) {
  return std::string(set.name) + " " + std::string(Name(op)) + " " + std::string(Name(dtype)) +
         ", " + std::to_string(num_srcs) + " ranks, count " + std::to_string(count);
}

/// Calls fn(set, dtype, op, kernel) for every combination that has a kernel.
template <typename F>
void ForEachKernel(F&& fn) {
  for (const KernelSet& set : SupportedKernelSets()) {
    for (std::size_t d = 0; d < kNumDTypes; ++d) {
      for (std::size_t o = 0; o < kNumReduceOps; ++o) {
        const DType dtype = static_cast<DType>(d);
        const ReduceOp op = static_cast<ReduceOp>(o);
        if (const ReduceFn kernel = set.get(dtype, op)) {
          fn(set, dtype, op, kernel);
        }
      }
    }
  }
}

/// Where the result goes: into the operands, or into this many buffers of its own.
enum class Placement : std::size_t { kInPlace = 0, kOneDst = 1, kThreeDsts = 3 };

/// Runs a kernel on poisoned buffers that start `shift` elements off their alignment. Returns the
/// first destination; reports different destinations, changed sources and bytes outside.
Bytes Run(Context& context, ReduceFn kernel, const std::vector<Bytes>& srcs, std::size_t size_of,
          Placement placement, std::size_t shift, const std::string& what) {
  const std::size_t begin = kGuard + shift * size_of;
  const std::size_t size = srcs[0].size();
  const std::size_t num_srcs = srcs.size();
  const bool in_place = placement == Placement::kInPlace;
  const std::size_t num_dsts = in_place ? num_srcs : static_cast<std::size_t>(placement);
  std::vector<Bytes> buffers(num_srcs + (in_place ? 0 : num_dsts),
                             Bytes(begin + size + kGuard, kPoison));
  std::vector<const void*> src_pointers;
  std::vector<void*> dst_pointers;
  for (std::size_t b = 0; b < buffers.size(); ++b) {
    std::byte* data = buffers[b].data() + begin;
    if (b < num_srcs) {
      std::copy(srcs[b].begin(), srcs[b].end(), data);
      src_pointers.push_back(data);
    }
    if (in_place || b >= num_srcs) {
      dst_pointers.push_back(data);
    }
  }
  kernel(src_pointers.data(), num_srcs, dst_pointers.data(), num_dsts, size / size_of);

  const std::size_t first_dst = in_place ? 0 : num_srcs;
  const Bytes result(buffers[first_dst].begin() + static_cast<std::ptrdiff_t>(begin),
                     buffers[first_dst].end() - static_cast<std::ptrdiff_t>(kGuard));
  for (std::size_t b = 0; b < buffers.size(); ++b) {
    const Bytes& expected = b < first_dst ? srcs[b] : result;
    Bytes whole(begin + size + kGuard, kPoison);
    std::copy(expected.begin(), expected.end(), whole.data() + begin);
    context.Expect(buffers[b] == whole, [&] {
      return what + (b < first_dst ? ": changed source " : ": wrong destination or guard ") +
             std::to_string(b);
    });
  }
  return result;
}

/// For tests with one or a few operands of a type that C++ has or of 16-bit patterns.
template <typename T>
T Reduce(const KernelSet& set, DType dtype, ReduceOp op, const std::vector<T>& xs) {
  std::vector<const void*> srcs;
  for (const T& x : xs) {
    srcs.push_back(&x);
  }
  T result;
  void* dst = &result;
  set.get(dtype, op)(srcs.data(), srcs.size(), &dst, 1, 1);
  return result;
}

void EverySetHasTheSameTable(Context& context) {
  const auto sets = SupportedKernelSets();
  context.Expect(sets.front().name == "baseline", "the baseline comes first");
  for (std::size_t d = 0; d < kNumDTypes; ++d) {
    for (std::size_t o = 0; o < kNumReduceOps; ++o) {
      const DType dtype = static_cast<DType>(d);
      const ReduceOp op = static_cast<ReduceOp>(o);
      const bool is_float = dtype >= DType::kF16 && dtype <= DType::kF64;
      const bool is_integer = dtype >= DType::kI8 && dtype <= DType::kU64;
      bool expected = false;
      switch (op) {
        case ReduceOp::kSum:
        case ReduceOp::kProd:
          expected = dtype != DType::kBool;
          break;
        case ReduceOp::kMean:
          expected = is_float || IsComplex(dtype);
          break;
        case ReduceOp::kMax:
        case ReduceOp::kMin:
          expected = !IsComplex(dtype);
          break;
        case ReduceOp::kAnd:
        case ReduceOp::kOr:
          expected = is_integer || dtype == DType::kBool;
          break;
      }
      for (const KernelSet& set : sets) {
        context.Expect((set.get(dtype, op) != nullptr) == expected,
                       [&] { return Describe(set, dtype, op, 0, 0) + ": wrong support"; });
      }
      context.Expect(GetReduce(dtype, op) == sets.back().get(dtype, op),
                     "GetReduce is the last set's");
    }
  }
}

void MatchesReference(Context& context) {
  for (std::size_t d = 0; d < kNumDTypes; ++d) {
    const DType dtype = static_cast<DType>(d);
    // Around one vector of every set, one unrolled step (256 bytes) and the baseline's block.
    const std::size_t size_of = SizeOf(dtype);
    const std::size_t lanes = 64 / size_of;
    const std::size_t counts[] = {0,     1,         lanes / 2 - 1, lanes / 2, lanes - 1,
                                  lanes, lanes + 1, 4 * lanes - 1, 4 * lanes, 6 * lanes + 3,
                                  513,   1009};
    for (std::size_t o = 0; o < kNumReduceOps; ++o) {
      const ReduceOp op = static_cast<ReduceOp>(o);
      if (GetReduce(dtype, op) == nullptr) {
        continue;
      }
      const auto check = [&](std::size_t num_srcs, std::size_t count) {
        const std::vector<Bytes> srcs = RandomSrcs(dtype, num_srcs, count);
        const Bytes expected = Reference(dtype, op, srcs);
        for (const KernelSet& set : SupportedKernelSets()) {
          const std::string what = Describe(set, dtype, op, num_srcs, count);
          for (const Placement placement :
               {Placement::kInPlace, Placement::kOneDst, Placement::kThreeDsts}) {
            for (const std::size_t shift : {std::size_t{0}, std::size_t{1}}) {
              const Bytes got =
                  Run(context, set.get(dtype, op), srcs, size_of, placement, shift, what);
              context.Expect(got == expected, what + ": differs from the reference");
            }
          }
        }
      };
      for (const std::size_t num_srcs : kNumSrcs) {
        for (const std::size_t count : counts) {
          check(num_srcs, count);
        }
      }
      check(3, 20011);
      check(4, 20011);
    }
  }
}

/// The reference above rounds as the kernels do; this one knows better and allows for it: each of
/// the p steps errs by at most half an epsilon of what has accumulated.
template <typename T>
void CheckNearLongDouble(Context& context, DType dtype) {
  for (const KernelSet& set : SupportedKernelSets()) {
    for (std::size_t trial = 0; trial < 1000; ++trial) {
      std::vector<T> xs;
      long double sum = 0;
      long double magnitude = 0;
      for (std::size_t r = 0; r < 7; ++r) {
        xs.push_back(static_cast<T>(std::sin(static_cast<double>(trial * 7 + r))));
        sum += xs.back();
        magnitude += std::fabs(xs.back());
      }
      const long double bound = 7 * std::numeric_limits<T>::epsilon() / 2 * magnitude;
      const T got = Reduce(set, dtype, ReduceOp::kSum, xs);
      context.Expect(std::fabs(got - sum) <= bound,
                     [&] { return std::string(set.name) + ": sum off by more than its bound"; });
      const T mean = Reduce(set, dtype, ReduceOp::kMean, xs);
      context.Expect(std::fabs(mean - sum / 7) <= bound / 7 + std::fabs(mean) * bound,
                     [&] { return std::string(set.name) + ": mean off by more than its bound"; });
    }
  }
}

void NearLongDouble(Context& context) {
  CheckNearLongDouble<float>(context, DType::kF32);
  CheckNearLongDouble<double>(context, DType::kF64);
}

/// One operand comes back as it is: conversion from and to 16 bits is exact for all patterns.
void SixteenBitFloatsSurvive(Context& context) {
  for (const DType dtype : {DType::kF16, DType::kBF16}) {
    const int fraction_bits = dtype == DType::kF16 ? kHalf : kBrain;
    std::vector<Bytes> srcs(1, Bytes(65536 * 2));
    for (std::uint32_t bits = 0; bits < 65536; ++bits) {
      std::memcpy(srcs[0].data() + bits * 2, &bits, 2);
    }
    for (const KernelSet& set : SupportedKernelSets()) {
      for (const ReduceOp op : {ReduceOp::kProd, ReduceOp::kMax, ReduceOp::kMin}) {
        const std::string what = Describe(set, dtype, op, 1, 65536);
        const Bytes got = Run(context, set.get(dtype, op), srcs, 2, Placement::kOneDst, 0, what);
        const std::uint16_t nan = Encode16(std::numeric_limits<float>::quiet_NaN(), fraction_bits);
        const std::uint16_t infinity = Encode16(HUGE_VALF, fraction_bits);
        for (std::uint32_t bits = 0; bits < 65536; ++bits) {
          const bool is_nan = (bits & 0x7FFF) > infinity;
          const std::uint32_t skipped = op == ReduceOp::kMax ? infinity | 0x8000U : infinity;
          const std::uint32_t expected = !is_nan ? bits : op == ReduceOp::kProd ? nan : skipped;
          context.Expect(std::memcmp(got.data() + bits * 2, &expected, 2) == 0,
                         [&] { return what + ": pattern " + std::to_string(bits); });
        }
      }
    }
  }
}

void SixteenBitFloatsRoundOnce(Context& context) {
  for (const KernelSet& set : SupportedKernelSets()) {
    const std::string name(set.name);
    // 2048 + 1 + 1 + 1 lies between 2050 and 2052; rounded at each step it would stay 2048.
    context.Expect(Reduce<std::uint16_t>(set, DType::kF16, ReduceOp::kSum,
                                         {0x6800, 0x3C00, 0x3C00, 0x3C00}) == 0x6802,
                   name + ": float16 2048 + 1 + 1 + 1 = 2052");
    context.Expect(Reduce<std::uint16_t>(set, DType::kBF16, ReduceOp::kSum,
                                         {0x4380, 0x3F80, 0x3F80, 0x3F80}) == 0x4382,
                   name + ": bfloat16 256 + 1 + 1 + 1 = 260");
    context.Expect(Reduce<std::uint16_t>(set, DType::kF16, ReduceOp::kMean,
                                         {0x7BFF, 0x7BFF, 0x7BFF}) == 0x7BFF,
                   name + ": the mean of three 65504 does not overflow");
    context.Expect(
        Reduce<std::uint16_t>(set, DType::kF16, ReduceOp::kSum, {0x7BFF, 0x4BFF}) == 0x7BFF,
        name + ": 65504 + 15.99 rounds down");
    context.Expect(
        Reduce<std::uint16_t>(set, DType::kF16, ReduceOp::kSum, {0x7BFF, 0x4C00}) == 0x7C00,
        name + ": 65504 + 16 rounds to infinity");
  }
}

void SpecialValues(Context& context) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  const float payload = std::bit_cast<float>(0xFFC12345U);
  struct Case {
    ReduceOp op;
    std::vector<float> operands;
    std::uint32_t expected;
    const char* why;
  };
  const Case cases[] = {
      {ReduceOp::kSum, {-0.0F, -0.0F}, 0, "a sum starts from +0"},
      {ReduceOp::kMean, {-0.0F}, 0, "so does a mean"},
      {ReduceOp::kProd, {-0.0F}, 0x80000000, "a product starts from 1"},
      {ReduceOp::kMax, {-0.0F, 0.0F}, 0x80000000, "zeros are equal, so the first one stays"},
      {ReduceOp::kMin, {0.0F, -0.0F}, 0, "zeros are equal, so the first one stays"},
      {ReduceOp::kMax, {kNan, 1.0F, kNan}, 0x3F800000, "max skips NaN"},
      {ReduceOp::kMin, {1.0F, payload}, 0x3F800000, "min skips NaN"},
      {ReduceOp::kMax, {kNan, payload}, 0xFF800000, "max of NaNs is where it started"},
      {ReduceOp::kMin, {kNan}, 0x7F800000, "min of NaNs is where it started"},
      {ReduceOp::kSum, {payload, 1.0F}, 0x7FC00000, "a sum's NaN has no payload"},
      {ReduceOp::kSum, {kInf, -kInf}, 0x7FC00000, "nor that of infinity - infinity"},
      {ReduceOp::kProd, {kInf, 0.0F}, 0x7FC00000, "nor that of a product"},
      {ReduceOp::kMean, {payload, kNan}, 0x7FC00000, "nor that of a mean"},
  };
  for (const KernelSet& set : SupportedKernelSets()) {
    for (const Case& test : cases) {
      const float got = Reduce(set, DType::kF32, test.op, test.operands);
      context.Expect(std::bit_cast<std::uint32_t>(got) == test.expected,
                     [&] { return std::string(set.name) + ": " + test.why; });
    }
  }
}

/// XLA's threads and our runners flush denormals; the sets agree in that mode as well.
void FlushToZeroChangesAllSetsAlike(Context& context) {
#if defined(__x86_64__)
  const unsigned int saved = _mm_getcsr();
  const KernelSet& baseline = SupportedKernelSets().front();
  ForEachKernel([&](const KernelSet& set, DType dtype, ReduceOp op, ReduceFn kernel) {
    if (!kMaxKeepsDenormals && (op == ReduceOp::kMax || op == ReduceOp::kMin)) {
      return;
    }
    const std::vector<Bytes> srcs = RandomSrcs(dtype, 4, 1009);
    const std::string what = Describe(set, dtype, op, 4, 1009) + ", flush to zero";
    const std::size_t size_of = SizeOf(dtype);
    _mm_setcsr(saved | 0x8040);  // FTZ and DAZ.
    const Bytes got = Run(context, kernel, srcs, size_of, Placement::kInPlace, 0, what);
    const Bytes truth =
        Run(context, baseline.get(dtype, op), srcs, size_of, Placement::kOneDst, 0, what);
    _mm_setcsr(saved);
    context.Expect(got == truth, what);
  });
  const float denormal = std::bit_cast<float>(0x00000123U);
  for (const KernelSet& set : SupportedKernelSets()) {
    _mm_setcsr(saved | 0x8040);
    const float max = Reduce<float>(set, DType::kF32, ReduceOp::kMax, {-1.0F, denormal});
    const float sum = Reduce<float>(set, DType::kF32, ReduceOp::kSum, {denormal, denormal});
    _mm_setcsr(saved);
    context.Expect(!kMaxKeepsDenormals || std::bit_cast<std::uint32_t>(max) == 0x123,
                   "max returns a denormal whole");
    context.Expect(std::bit_cast<std::uint32_t>(sum) == 0, "a sum flushes denormals");
  }
#else
  context.Expect(true, "one set only");
#endif
}

void CutsDoNotMatter(Context& context) {
  constexpr std::size_t kCount = 1009;
  ForEachKernel([&](const KernelSet& set, DType dtype, ReduceOp op, ReduceFn kernel) {
    const std::string what = Describe(set, dtype, op, 3, kCount);
    const std::size_t size_of = SizeOf(dtype);
    const std::vector<Bytes> srcs = RandomSrcs(dtype, 3, kCount);
    const Bytes whole = Run(context, kernel, srcs, size_of, Placement::kOneDst, 0, what);
    Bytes pieces(whole.size(), kPoison);
    for (std::size_t begin = 0, size = 1; begin < kCount; begin += size, size = size * 2 + 1) {
      size = kCount - begin < size ? kCount - begin : size;
      const std::size_t offset = begin * size_of;
      const void* piece_srcs[] = {srcs[0].data() + offset, srcs[1].data() + offset,
                                  srcs[2].data() + offset};
      void* dst = pieces.data() + offset;
      kernel(piece_srcs, 3, &dst, 1, size);
    }
    context.Expect(pieces == whole, what + ": depends on the cuts");
  });
}

void StreamCopiesAreCopies(Context& context) {
  constexpr std::size_t kMargin = 70;
  for (const KernelSet& set : SupportedKernelSets()) {
    for (const std::size_t bytes : {0, 1, 63, 64, 65, 127, 128, 1000, 4096, 100'003}) {
      for (const std::size_t shift : {0, 1, 32, 63}) {
        Bytes from(bytes + 2 * kMargin);
        for (std::size_t i = 0; i < from.size(); ++i) {
          from[i] = static_cast<std::byte>(i * 31 + i / 256);
        }
        Bytes to(from.size(), kPoison);
        Bytes expected = to;
        std::memcpy(expected.data() + shift, from.data() + 7, bytes);
        set.stream_copy(to.data() + shift, from.data() + 7, bytes);
        context.Expect(to == expected, [&] {
          return std::string(set.name) + ": " + std::to_string(bytes) + " bytes to " +
                 std::to_string(shift);
        });
      }
    }
  }
}

/// Buffers whose neighbouring pages cannot be touched: sanitizers do not see masked vector loads.
void StaysInsidePages(Context& context) {
  const std::size_t page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  void* mapping = mmap(nullptr, 5 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (!context.Expect(mapping != MAP_FAILED, "mmap")) {
    return;
  }
  std::byte* first = static_cast<std::byte*>(mapping) + page;  // Pages 1 and 3 are usable.
  std::byte* second = first + 2 * page;
  context.Expect(mprotect(first, page, PROT_READ | PROT_WRITE) == 0 &&
                     mprotect(second, page, PROT_READ | PROT_WRITE) == 0,
                 "mprotect");
  ForEachKernel([&](const KernelSet& set, DType dtype, ReduceOp op, ReduceFn kernel) {
    const std::size_t size_of = SizeOf(dtype);
    for (const std::size_t count : {std::size_t{1}, 100 / size_of, 68 / size_of, page / size_of}) {
      for (const std::size_t start : {std::size_t{0}, page - count * size_of}) {
        void* buffers[] = {first + start, second + start};
        kernel(buffers, 2, buffers, 2, count);
        context.Expect(std::memcmp(first + start, second + start, count * size_of) == 0,
                       [&] { return Describe(set, dtype, op, 2, count) + ": results differ"; });
      }
    }
  });
  munmap(mapping, 5 * page);
}

const Suite suite("kernels", {{"EverySetHasTheSameTable", EverySetHasTheSameTable},
                              {"MatchesReference", MatchesReference},
                              {"NearLongDouble", NearLongDouble},
                              {"SixteenBitFloatsSurvive", SixteenBitFloatsSurvive},
                              {"SixteenBitFloatsRoundOnce", SixteenBitFloatsRoundOnce},
                              {"SpecialValues", SpecialValues},
                              {"FlushToZeroChangesAllSetsAlike", FlushToZeroChangesAllSetsAlike},
                              {"CutsDoNotMatter", CutsDoNotMatter},
                              {"StreamCopiesAreCopies", StreamCopiesAreCopies},
                              {"StaysInsidePages", StaysInsidePages}});

}  // namespace
}  // namespace jaxcoll::testing::kernels_test
