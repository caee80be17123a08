// cuda/failing.h: has programs fail on the device whose calls were aborted.
//
// A call is put on a stream long before it runs, and XLA takes it for done: when NCCL aborts it,
// the program would go on with garbage. So a kernel of one thread follows each call, which does
// nothing while the group is well, and else makes the device fail: then all that waits for the
// program gets an error. It takes the device's state with it, so the process can't use its GPUs any
// more.
#pragma once

#include <atomic>   // std::atomic
#include <cstdint>  // std::uint32_t

#include "core/status.h"
#include "cuda/libraries.h"

namespace jaxcoll::cuda {

/// Of a group, in memory that all devices read.
class FailureFlag {
 public:
  Status Create(const Libraries& libraries);
  void Raise() const {
    if (word_ != nullptr) {
      std::atomic_ref(*word_).store(1);
    }
  }
  [[nodiscard]] std::uint32_t* word() const { return word_; }

 private:
  std::uint32_t* word_ = nullptr;  // never freed: a kernel may read it
};

/// Of a device.
class FailureCheck {
 public:
  /// For the current device.
  Status Create(const Libraries& libraries);
  Status Enqueue(const Libraries& libraries, const FailureFlag& flag, Stream stream) const;

 private:
  Function kernel_ = nullptr;
};

}  // namespace jaxcoll::cuda
