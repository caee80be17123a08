// kernels/kernel_sets.h: every instruction set's implementations, for tests that compare them.
#pragma once

#include <span>         // std::span
#include <string_view>  // std::string_view

#include "core/types.h"
#include "kernels/copy.h"
#include "kernels/reduce.h"

namespace jaxcoll {

struct KernelSet {
  std::string_view name;  ///< "baseline", "avx2", "avx512"
  ReduceFn (*get)(DType dtype, ReduceOp op);
  CopyFn stream_copy;
};

/// Every set that this machine can run, the baseline first, the one in use last.
std::span<const KernelSet> SupportedKernelSets();

}  // namespace jaxcoll
