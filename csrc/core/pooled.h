// core/pooled.h: objects that lie one after the other in the order in which they are made.
#pragma once

#include <cstddef>  // std::size_t

namespace jaxcoll {

/// Base of the classes of which a call site is made. What belongs to one call so is on one or two
/// pages, and what belongs to the next call on the same or the next ones: a program that other work
/// has thrown out of the caches comes back in a few misses, of the TLB too.
class Pooled {
 public:
  static void* operator new(std::size_t bytes) { return Allocate(bytes); }
  static void* operator new[](std::size_t bytes) { return Allocate(bytes); }
  static void operator delete(void* object) { Free(object); }
  static void operator delete[](void* objects) { Free(objects); }

 private:
  static void* Allocate(std::size_t bytes);
  static void Free(void* object);
};

}  // namespace jaxcoll
