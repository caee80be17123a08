// core/denormals.h: the floating-point mode of XLA's own threads, for ours.
#pragma once

namespace jaxcoll {

/// Makes this thread treat denormals as zero and flush results to zero, as XLA does on every thread
/// that runs a program: a program that resumes on one of our threads must give the same bits.
void FlushDenormalsOnThisThread();

}  // namespace jaxcoll
