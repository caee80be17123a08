// core/spin_lock.h: a lock for a few instructions at a time.
#pragma once

#include <atomic>  // std::atomic
#include <thread>  // std::this_thread::yield

#include "core/relax.h"

namespace jaxcoll {

/// Half the cost of std::mutex where nobody contends, and nothing to sleep on: for sections that
/// wait for nobody, and take longer than some instructions only where a rank has to wait, or
/// something fails. Works with std::lock_guard.
class SpinLock {
 public:
  void lock() {
    while (locked_.exchange(true, std::memory_order_acquire)) {
      // Only looks meanwhile, so that its holder keeps the line.
      for (int looks = 0; locked_.load(std::memory_order_relaxed); ++looks) {
        if (looks < kLooks) {
          Relax();
        } else {  // its holder may have lost the core
          std::this_thread::yield();
        }
      }
    }
  }
  void unlock() { locked_.store(false, std::memory_order_release); }

 private:
  static constexpr int kLooks = 100;
  std::atomic<bool> locked_{false};
};

}  // namespace jaxcoll
