// kernels/isa_units.h: what the instruction sets' units define, for dispatch.cc only.
//
// Each function is defined by the unit that is compiled with the set's flags, and none but the
// baseline's may be called before dispatch.cc has asked the processor. What the units share sits in
// unnamed namespaces (the -inl.h files): a function with external linkage that two units compile
// with different flags is one function to the linker, which may keep the AVX-512 copy and run it on
// a machine without.
#pragma once

#include <cstddef>  // std::size_t

#include "core/types.h"      // DType, ReduceOp
#include "kernels/reduce.h"  // ReduceFn

namespace jaxcoll {

/// Plain C++ for every machine; the tests take it for the truth.
ReduceFn GetReduceBaseline(DType dtype, ReduceOp op);

/// x86-64 only: needs AVX2 and F16C.
ReduceFn GetReduceAvx2(DType dtype, ReduceOp op);
void StreamCopyAvx2(void* to, const void* from, std::size_t bytes);

/// x86-64 only: needs AVX-512 F, BW, DQ and VL.
ReduceFn GetReduceAvx512(DType dtype, ReduceOp op);

}  // namespace jaxcoll
