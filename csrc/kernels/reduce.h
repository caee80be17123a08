// kernels/reduce.h: element-wise reduction of several ranks' blocks, in rank order.
//
// One contract, one implementation per instruction set (reduce_{base,avx2,avx512}.cc, each compiled
// with its own flags), chosen once at load. Single-threaded; callers split the work.
#pragma once

#include <cstddef>  // std::size_t

#include "core/types.h"

namespace jaxcoll {

/// Computes, for i in [0, count),
///
///   acc = identity(op); for r = 0 .. num_srcs-1 in this order: acc = acc op srcs[r][i]
///   (kMean: acc / num_srcs), and dsts[d][i] = acc for every d in [0, num_dsts)
///
/// so that the result depends on nothing but the inputs: not on count, alignment, instruction set
/// or on how a caller cuts the range. float16 and bfloat16 are accumulated in float32 and rounded
/// once, to nearest even (kMax and kMin are exact either way). kMax is `acc < x ? x : acc` and kMin
/// `x < acc ? x : acc` from an infinite start (the type's lowest or highest value for integers): a
/// NaN operand is skipped, as XLA's CPU collectives do. Integers wrap around. kBool must hold bytes
/// 0 and 1. A complex product is (ac - bd) + (ad + bc)i as written, and complex kMean divides both
/// parts.
///
/// A NaN result of kSum, kMean and kProd is the positive quiet NaN without payload (float32:
/// 0x7FC00000), whatever the operands' payloads: processors and compilers differ in which one
/// survives. Where the calling thread flushes denormals to zero (x86 MXCSR), float32, float64 and
/// bfloat16 arithmetic and comparisons do, alike in all sets; kMax and kMin still return the
/// operand's own bits if g++ compiled them, while clang's may return a denormal operand as zero.
///
/// srcs[r] and dsts[d] may be the same address (in place) or disjoint, never partly overlapping.
/// Any alignment of at least one element is accepted; count may be 0; num_srcs >= 1.
using ReduceFn = void (*)(const void* const* srcs, std::size_t num_srcs, void* const* dsts,
                          std::size_t num_dsts, std::size_t count);

/// The implementation for (dtype, op) on this machine, or nullptr where the combination has no
/// meaning: kMax and kMin of complex numbers, kAnd and kOr of anything but kBool and integers,
/// kMean of anything but floating point and complex numbers, kSum and kProd of kBool.
ReduceFn GetReduce(DType dtype, ReduceOp op);

}  // namespace jaxcoll
