// kernels/dispatch.cc: chooses the instruction set, once.
#include <cstddef>  // std::size_t
#include <span>     // std::span

#include "core/types.h"
#include "kernels/reduce.h"
#include "kernels/reduce_sets.h"

#if defined(__x86_64__)
#include <cpuid.h>  // __get_cpuid
#endif

namespace jaxcoll {
namespace {

struct SetList {
  KernelSet sets[3] = {{"baseline", &GetReduceBaseline}};
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
    list.Add({"avx2", &GetReduceAvx2});
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
      list.Add({"avx512", &GetReduceAvx512});
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

ReduceFn GetReduce(DType dtype, ReduceOp op) { return SupportedKernelSets().back().get(dtype, op); }

}  // namespace jaxcoll
