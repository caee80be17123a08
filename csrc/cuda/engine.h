// cuda/engine.h: this process's GPUs, its groups of them, and the thread that watches these.
#pragma once

#include <atomic>              // std::atomic
#include <condition_variable>  // std::condition_variable
#include <cstddef>             // std::byte, std::size_t
#include <cstdint>             // std::int64_t, std::uint64_t
#include <functional>          // std::function
#include <map>                 // std::map
#include <memory>              // std::shared_ptr
#include <mutex>               // std::mutex
#include <optional>            // std::optional
#include <set>                 // std::set
#include <span>                // std::span
#include <string>              // std::string
#include <vector>              // std::vector

#include "core/status.h"
#include "cuda/clique.h"
#include "cuda/libraries.h"

namespace jaxcoll::cuda {

/// What Python does for the engine. C functions, which may be called from any thread; texts go to a
/// buffer of `bytes`, ended by a zero.
struct Callbacks {
  /// A round of a group's processes (cuda/rounds.h), with rows of `row_bytes` for each device.
  /// Returns 0, or writes why it failed to `text`.
  int (*exchange)(const std::int64_t* devices, std::size_t num_devices, std::int64_t generation,
                  std::int64_t round, void* rows, std::size_t row_bytes, char* text,
                  std::size_t bytes) = nullptr;
  /// What stands at a call site.
  void (*site_text)(std::uint64_t site, char* text, std::size_t bytes) = nullptr;
  /// Whether another process compiles, or has said that it pauses; 0 or 1.
  int (*is_anyone_excused)() = nullptr;
  /// Which ranks of a group were of processes that have ended, or in which it has failed, as errors
  /// name them, or nothing.
  void (*gone)(const std::int64_t* devices, std::size_t num_devices, std::int64_t generation,
               char* text, std::size_t bytes) = nullptr;
  /// Which ranks of other processes have not made a call, as far as that is known; and in lines of
  /// their own what they do.
  void (*absent)(const std::int64_t* devices, std::size_t num_devices, std::uint64_t group,
                 std::uint64_t site, std::int64_t execution, char* text,
                 std::size_t bytes) = nullptr;
  /// A group of several processes has failed in this one.
  void (*tell)(const std::int64_t* devices, std::size_t num_devices, std::int64_t generation,
               const char* text) = nullptr;
  /// A group has failed.
  void (*report)(const char* text) = nullptr;
  /// Something is not as expected, and goes on.
  void (*notice)(const char* text) = nullptr;
};

class Engine {
 public:
  /// The process's engine; never destroyed.
  static Engine& Get();

  /// Opens the libraries; once. The rest is for who has done so.
  Status Open(const LibraryPaths& paths);
  [[nodiscard]] const Libraries& libraries() const { return libraries_; }

  /// The global ids of the local devices, by CUDA's number. Before programs run.
  void SetDevices(const std::vector<Clique::LocalDevice>& devices);
  void SetCallbacks(const Callbacks& callbacks);
  /// How long a rank may wait for the others; < 0: for ever.
  void SetTimeout(std::int64_t timeout_ns) { timeout_ns_.store(timeout_ns); }
  /// The same where others may compile the program; counts where it is more.
  void SetCompileTimeout(std::int64_t timeout_ns) { compile_timeout_ns_.store(timeout_ns); }
  /// Whether programs fail on the device whose calls were aborted; of groups that are made later.
  void SetTraps(bool traps) { traps_.store(traps); }
  /// The kernels over peer memory, or null: none; of groups that are made later.
  void SetPeerImage(const void* image) { peer_image_.store(image); }
  /// The same for processes that can share memory; before programs run.
  void SetHost(std::uint64_t host) { host_.store(host); }
  /// Why small sums of these devices, global ids, are not done over peer memory; or nothing. Of a
  /// group in several processes that is not connected yet: as far as this process knows.
  [[nodiscard]] std::string PeerProblem(const std::vector<std::int64_t>& devices);
  [[nodiscard]] Limits limits() const;

  /// CUDA's numbers of the local devices in some groups of global ids.
  [[nodiscard]] std::set<int> LocalOf(const std::vector<std::vector<std::int64_t>>& groups);
  /// The global id of a local device, or -1.
  [[nodiscard]] std::int64_t IdOf(int ordinal);
  /// The group of these devices, in rank order; made when it is first asked for. Null: the engine
  /// is between two generations, or another one than the caller's has begun.
  std::shared_ptr<Clique> Find(const std::vector<std::int64_t>& devices,
                               std::optional<std::int64_t> generation = {});

  /// Ends all communicators and forgets them, so that the next programs make new ones, of the next
  /// generation. All processes of a job do so together. Those of a device that is stuck end later,
  /// if ever.
  void Reset();
  /// A generation in which programs are refused: not all processes of the job have reset yet.
  static constexpr std::int64_t kBetween = -2;
  /// In a job of several processes, whose generations have the same numbers.
  void SetGeneration(std::int64_t generation);
  /// Ends the engine's threads, before the process ends: CUDA must not be called while it goes. One
  /// that is held up inside CUDA or NCCL is left to itself.
  void Stop();
  /// Of communicators.
  [[nodiscard]] std::int64_t generation() const { return generation_.load(); }

  /// Calls put on streams so far, over all devices.
  [[nodiscard]] std::uint64_t num_calls() const { return num_calls_.load(); }
  /// What stands at a call site.
  static std::string SiteText(std::uint64_t site);

  void CountCall() { num_calls_.fetch_add(1, std::memory_order_relaxed); }

 private:
  Engine() = default;
  [[nodiscard]] Callbacks callbacks() const;
  void Watch();
  static bool IsAnyoneExcused();
  static std::string Gone(const std::vector<std::int64_t>& devices, std::int64_t generation);
  static std::string Absent(const std::vector<std::int64_t>& devices, std::uint64_t group,
                            std::uint64_t site, std::int64_t execution);
  /// Aborts a group that has failed, once, and tells the other processes why.
  void End(const std::shared_ptr<Clique>& clique);
  /// Of a group that has failed, on a thread for each local device, as this may wait for them.
  void Abort(const std::shared_ptr<Clique>& clique);
  /// On a thread that Stop knows. False: the system has no more threads.
  static bool Start(std::function<void()> work);

  static std::string Exchange(const std::vector<std::int64_t>& devices, std::int64_t generation,
                              std::int64_t round, std::span<std::byte> rows);
  static void Notice(const std::string& text);

  Libraries libraries_;
  std::atomic<std::int64_t> timeout_ns_{-1};
  std::atomic<std::int64_t> compile_timeout_ns_{0};
  std::atomic<std::int64_t> generation_{0};
  std::atomic<bool> traps_{true};
  std::atomic<const void*> peer_image_{nullptr};
  std::atomic<std::uint64_t> host_{0};
  std::atomic<std::uint64_t> num_calls_{0};

  mutable std::mutex callbacks_mutex_;  // guards the following
  Callbacks callbacks_{};

  std::mutex mutex_;  // guards the following
  std::vector<Clique::LocalDevice> devices_;
  std::map<std::vector<std::int64_t>, std::shared_ptr<Clique>> cliques_;
  bool is_watched_ = false;

  std::atomic<bool> stops_{false};
  std::mutex threads_mutex_;  // guards the following
  std::condition_variable thread_ended_;
  int num_threads_ = 0;
};

}  // namespace jaxcoll::cuda
