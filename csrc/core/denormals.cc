#include "core/denormals.h"

#if defined(__x86_64__)
#include <immintrin.h>  // _mm_getcsr, _mm_setcsr
#elif defined(__aarch64__)
#include <cstdint>  // std::uint64_t
#endif

namespace jaxcoll {

void FlushDenormalsOnThisThread() {
#if defined(__x86_64__)
  constexpr unsigned kFlushToZero = 0x8000;
  constexpr unsigned kDenormalsAreZero = 0x0040;
  _mm_setcsr(_mm_getcsr() | kFlushToZero | kDenormalsAreZero);
#elif defined(__aarch64__)
  constexpr std::uint64_t kFlushToZero = std::uint64_t{1} << 24;
  std::uint64_t mode = 0;
  asm volatile("mrs %0, fpcr" : "=r"(mode));
  asm volatile("msr fpcr, %0" : : "r"(mode | kFlushToZero));
#endif
}

}  // namespace jaxcoll
