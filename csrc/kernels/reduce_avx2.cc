// kernels/reduce_avx2.cc: the AVX2 set. Compiled with -mavx2 -mf16c -ffp-contract=off; called only
// where the processor has both. -mfma would add nothing: fused products round
// differently, so -ffp-contract=off forbids them.
#include <immintrin.h>

#include <cstddef>  // std::byte, std::size_t
#include <cstring>  // std::memcpy, std::memset

#include "core/types.h"
#include "kernels/isa_units.h"
#include "kernels/reduce.h"
#include "kernels/reduce_simd-inl.h"

namespace jaxcoll {
namespace {

struct Avx2 {
  static constexpr std::size_t kVectorBytes = 32;
  /// 16-bit floats need two registers of accumulators for one of storage: 8 of the 16.
  static constexpr std::size_t kUnroll = 4;

  // Compare and blend, for vmaxps turns a denormal into 0 under denormals-are-zero. (clang makes it
  // vmaxps nevertheless: reduce.h.)
  static __m256 Max(__m256 acc, __m256 x) {
    return _mm256_blendv_ps(acc, x, _mm256_cmp_ps(acc, x, _CMP_LT_OQ));
  }
  static __m256 Min(__m256 acc, __m256 x) {
    return _mm256_blendv_ps(acc, x, _mm256_cmp_ps(x, acc, _CMP_LT_OQ));
  }
  static __m256d Max(__m256d acc, __m256d x) {
    return _mm256_blendv_pd(acc, x, _mm256_cmp_pd(acc, x, _CMP_LT_OQ));
  }
  static __m256d Min(__m256d acc, __m256d x) {
    return _mm256_blendv_pd(acc, x, _mm256_cmp_pd(x, acc, _CMP_LT_OQ));
  }

  using Halves = __m128i;
  static __m256 LoadHalves(const std::byte* address) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(address)));
  }
  static Halves ToHalves(__m256 floats) {
    return _mm256_cvtps_ph(floats, _MM_FROUND_TO_NEAREST_INT);
  }

  static void LoadTail(std::byte* buffer, const std::byte* address, std::size_t bytes) {
    std::memset(buffer, 0, kVectorBytes);
    std::memcpy(buffer, address, bytes);
  }
  static void StoreTail(std::byte* address, const std::byte* buffer, std::size_t bytes) {
    std::memcpy(address, buffer, bytes);
  }
};

}  // namespace

ReduceFn GetReduceAvx2(DType dtype, ReduceOp op) { return SelectReduce<SimdBody<Avx2>>(dtype, op); }

}  // namespace jaxcoll
