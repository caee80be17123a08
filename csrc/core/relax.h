// core/relax.h: what a thread does between two looks at a word.
#pragma once

namespace jaxcoll {

/// Tells the core that its thread waits.
inline void Relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace jaxcoll
