// core/spin_lock.h: a lock for a few instructions at a time.
#pragma once

#include <atomic>  // std::atomic
#include <thread>  // std::this_thread::yield

namespace jaxcoll {

/// Half the cost of std::mutex where nobody contends, and nothing to sleep on: for sections that
/// neither wait nor allocate. Works with std::lock_guard.
class SpinLock {
 public:
  void lock() {
    for (int tries = 0; locked_.exchange(true, std::memory_order_acquire); ++tries) {
      if (tries > kTries) {  // its holder may have lost the core
        std::this_thread::yield();
      }
    }
  }
  void unlock() { locked_.store(false, std::memory_order_release); }

 private:
  static constexpr int kTries = 100;
  std::atomic<bool> locked_{false};
};

}  // namespace jaxcoll
