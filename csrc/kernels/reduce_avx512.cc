// kernels/reduce_avx512.cc: the AVX-512 set. Compiled with -mavx512f -mavx512bw -mavx512dq
// -mavx512vl -ffp-contract=off; called only where the processor has all four.
#include <immintrin.h>

#include <cstddef>  // std::byte, std::size_t
#include <cstdint>  // std::uint64_t

#include "core/types.h"
#include "kernels/isa_units.h"
#include "kernels/reduce.h"
#include "kernels/reduce_simd-inl.h"

namespace jaxcoll {
namespace {

struct Avx512 {
  static constexpr std::size_t kVectorBytes = 64;
  static constexpr std::size_t kUnroll = 4;

  // Compare and blend, for vmaxps turns a denormal into 0 under denormals-are-zero. (clang makes it
  // vmaxps nevertheless: reduce.h.)
  static __m512 Max(__m512 acc, __m512 x) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(acc, x, _CMP_LT_OQ), acc, x);
  }
  static __m512 Min(__m512 acc, __m512 x) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, acc, _CMP_LT_OQ), acc, x);
  }
  static __m512d Max(__m512d acc, __m512d x) {
    return _mm512_mask_blend_pd(_mm512_cmp_pd_mask(acc, x, _CMP_LT_OQ), acc, x);
  }
  static __m512d Min(__m512d acc, __m512d x) {
    return _mm512_mask_blend_pd(_mm512_cmp_pd_mask(x, acc, _CMP_LT_OQ), acc, x);
  }

  // Masked by all ones: g++ 12 warns of uninitialised values in the header's plain forms
  // (GCC bug 105593). The instruction is the plain one.
  using Halves = __m256i;
  static constexpr __mmask16 kAll = 0xFFFF;
  static __m512 LoadHalves(const std::byte* address) {
    const auto* halves = reinterpret_cast<const __m256i*>(address);
    return _mm512_maskz_cvtph_ps(kAll, _mm256_loadu_si256(halves));
  }
  static Halves ToHalves(__m512 floats) {
    return _mm512_maskz_cvtps_ph(kAll, floats, _MM_FROUND_TO_NEAREST_INT);
  }

  // Masked-out bytes are never touched, so they may lie in a page that does not exist.
  static void LoadTail(std::byte* buffer, const std::byte* address, std::size_t bytes) {
    _mm512_store_si512(buffer, _mm512_maskz_loadu_epi8(FirstBytes(bytes), address));
  }
  static void StoreTail(std::byte* address, const std::byte* buffer, std::size_t bytes) {
    _mm512_mask_storeu_epi8(address, FirstBytes(bytes), _mm512_load_si512(buffer));
  }
  static __mmask64 FirstBytes(std::size_t bytes) { return (std::uint64_t{1} << bytes) - 1; }
};

}  // namespace

ReduceFn GetReduceAvx512(DType dtype, ReduceOp op) {
  return SelectReduce<SimdBody<Avx512>>(dtype, op);
}

}  // namespace jaxcoll
