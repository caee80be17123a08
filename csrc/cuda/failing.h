// cuda/failing.h: has programs fail on the device whose calls were aborted.
//
// A call is put on a stream long before it runs, and XLA takes it for done: when NCCL aborts it,
// the program would go on with garbage. So a kernel of one thread follows each call, which does
// nothing while the group is well, and else makes the device fail: then all that waits for the
// program gets an error. It takes the device's state with it, so the process can't use its GPUs any
// more. Kernels of ours that sum over peer memory do so themselves, where they wait in vain.
#pragma once

#include <atomic>   // std::atomic_ref
#include <cstddef>  // std::size_t
#include <cstdint>  // std::uint32_t

#include "core/status.h"
#include "cuda/libraries.h"

namespace jaxcoll::cuda {

/// Of a group, in memory that all devices read.
class FailureFlag {
 public:
  Status Create(const Libraries& libraries);
  void Raise() const { Set(0); }
  [[nodiscard]] std::uint32_t* word() const { return words_; }
  /// Has our own kernels end that wait for other ranks: what they compute is lost.
  void End() const { Set(1); }
  [[nodiscard]] const std::uint32_t* ended() const { return words_ + 1; }

 private:
  void Set(std::size_t word) const {
    if (words_ != nullptr) {
      std::atomic_ref(words_[word]).store(1);
    }
  }

  std::uint32_t* words_ = nullptr;  // never freed: a kernel may read them
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
