// kernels/dispatch.cc: chooses the instruction set, once.
#include <unistd.h>  // sysconf

#include <algorithm>  // std::clamp
#include <cstddef>    // std::size_t
#include <cstring>    // std::memcpy
#include <span>       // std::span

#include "core/types.h"
#include "kernels/copy.h"
#include "kernels/isa_units.h"
#include "kernels/kernel_sets.h"
#include "kernels/reduce.h"

#if defined(__x86_64__)
#include <cpuid.h>  // __get_cpuid
#endif

namespace jaxcoll {
namespace {

void MemoryCopy(void* to, const void* from, std::size_t bytes) { std::memcpy(to, from, bytes); }

struct SetList {
  KernelSet sets[3] = {{"baseline", &GetReduceBaseline, &MemoryCopy}};
  std::size_t size = 1;

  void Add(KernelSet set) { sets[size++] = set; }
};

SetList FindSets() {
  SetList list;
#if defined(__x86_64__)
  // __builtin_cpu_supports also asks XCR0 whether the operating system saves the registers. It has
  // no "f16c" in some compilers, so that bit is read here; it needs no state beyond AVX's.
  unsigned int eax = 0;
  unsigned int ebx = 0;
  unsigned int ecx = 0;
  unsigned int edx = 0;
  const bool has_f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
  __builtin_cpu_init();  // A constructor of another library may call us before libgcc's has run.
  if (__builtin_cpu_supports("avx2") && has_f16c) {
    list.Add({"avx2", &GetReduceAvx2, &StreamCopyAvx2});
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
      list.Add({"avx512", &GetReduceAvx512, &StreamCopyAvx2});
    }
  }
#endif
  return list;
}

}  // namespace

std::span<const KernelSet> SupportedKernelSets() {
  static const SetList list = FindSets();  // On first use, so no initialisation order matters.
  return {list.sets, list.size};
}

CopyFn GetStreamCopy() { return SupportedKernelSets().back().stream_copy; }

std::size_t CacheBytes() {
  static const std::size_t size = [] {
    const long known = sysconf(_SC_LEVEL3_CACHE_SIZE);
    // The C library may not know; and more than the limit is several caches.
    return std::size_t{1024} * 1024 *
           static_cast<std::size_t>(known > 0 ? std::clamp(known >> 20, 4L, 64L) : 32L);
  }();
  return size;
}

ReduceFn GetReduce(DType dtype, ReduceOp op) { return SupportedKernelSets().back().get(dtype, op); }

}  // namespace jaxcoll
