// kernels/copy_avx2.cc: copies with AVX2's streaming stores. Compiled with -mavx2; called only
// where the processor has it.
#include <immintrin.h>

#include <algorithm>  // std::min
#include <cstddef>    // std::byte, std::size_t
#include <cstdint>    // std::uintptr_t
#include <cstring>    // std::memcpy

#include "core/align.h"
#include "kernels/isa_units.h"

namespace jaxcoll {
namespace {

__m256i Load(const std::byte* from) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}
void Stream(std::byte* to, __m256i value) {
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to), value);
}

}  // namespace

void StreamCopyAvx2(void* to_start, const void* from_start, std::size_t bytes) {
  auto* to = static_cast<std::byte*>(to_start);
  const auto* from = static_cast<const std::byte*>(from_start);
  const std::size_t misaligned = reinterpret_cast<std::uintptr_t>(to) % kCacheLine;
  const std::size_t head = misaligned == 0 ? 0 : std::min(kCacheLine - misaligned, bytes);
  std::memcpy(to, from, head);
  std::size_t i = head;
  for (; i + kCacheLine <= bytes; i += kCacheLine) {
    const __m256i low = Load(from + i);
    const __m256i high = Load(from + i + kCacheLine / 2);
    Stream(to + i, low);
    Stream(to + i + kCacheLine / 2, high);
  }
  std::memcpy(to + i, from + i, bytes - i);
  _mm_sfence();  // streamed stores have no order; who is told next must find them
}

}  // namespace jaxcoll
