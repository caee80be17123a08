// host/witness.h: has failures looked at before programs learn of them.
//
// What a rank stood in when its call failed is seen only until its program has the error: then the
// user's code goes on, and may end the process at once. So who hands out an error waits here until
// the thread of jaxcoll/diagnosis/watcher.py has taken the stacks and written the dump.
#pragma once

#include <condition_variable>  // std::condition_variable
#include <cstdint>             // std::int64_t, std::uint64_t
#include <mutex>               // std::mutex

namespace jaxcoll {

/// One instance, never destroyed. All methods may be called from any thread.
class Witness {
 public:
  static Witness& Get();

  /// Waits until the watchdog's failures so far have been looked at, if somebody looks, and has
  /// since others waited in vain; bounded. Not under a lock, and not on a thread that has Python's.
  void AwaitLook();
  [[nodiscard]] bool IsAnyoneHeld();

  /// For the thread that looks: waits until somebody waits for that, or for so long. Whether it is
  /// to go on.
  bool AwaitFailure(std::int64_t limit_ns);
  /// A look that was begun after the first `num_failures` is over.
  void NoteLook(std::uint64_t num_failures);
  /// That thread is to end; another one looks once more.
  void Stop();
  /// Nobody looks any more.
  void End();

 private:
  Witness() = default;

  std::mutex mutex_;  // guards everything below
  std::condition_variable wanted_;
  std::condition_variable looked_;
  bool looks_ = false;
  bool is_stopped_ = false;
  bool is_deaf_ = false;          // somebody has waited in vain since the last look
  std::uint64_t num_wanted_ = 0;  // failures that somebody waits to have looked at
  std::uint64_t num_looked_at_ = 0;
  int num_held_ = 0;
};

}  // namespace jaxcoll
