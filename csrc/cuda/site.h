// cuda/site.h: one call site of a compiled program, on all local devices.
#pragma once

#include <array>    // std::array
#include <atomic>   // std::atomic
#include <cstddef>  // std::size_t
#include <cstdint>  // std::int64_t, std::uint64_t
#include <map>      // std::map
#include <memory>   // std::shared_ptr, std::unique_ptr
#include <mutex>    // std::mutex
#include <set>      // std::set
#include <span>     // std::span
#include <utility>  // std::move
#include <vector>   // std::vector

#include "core/status.h"
#include "cuda/engine.h"
#include "cuda/local_meeting.h"
#include "cuda/operation.h"
#include "cuda/recording.h"

namespace jaxcoll::cuda {

struct Operand {
  const void* data;
  std::size_t bytes;
};
struct Result {
  void* data;
  std::size_t bytes;
};

/// Thread-safe, with one thread at a time for each device.
class Site {
 public:
  /// `groups`: global ids of devices, in rank order.
  Site(Engine& engine, std::uint64_t id, std::vector<std::vector<std::int64_t>> groups,
       std::unique_ptr<Operation> operation)
      : engine_(engine), id_(id), groups_(std::move(groups)), operation_(std::move(operation)) {}

  /// Before every run of the program, on each of its devices. Costs a few loads but for the first
  /// time: see Clique::Join. Then it returns when all local devices of the site are ready. One that
  /// communicates while another loads a kernel or allocates can make CUDA wait for ever.
  Status Initialize(int ordinal, Stream stream);

  /// Puts the call on the device's stream. The first time the local devices of the group begin
  /// together, and go on together: NCCL connects and allocates then. `run`: of the program.
  Status Execute(int ordinal, Stream stream, std::int64_t run, std::span<const Operand> operands,
                 std::span<const Result> results);

 private:
  /// Of the local devices of a group.
  struct FirstCall {
    explicit FirstCall(const std::set<int>& ordinals) : before(ordinals), after(ordinals) {}

    LocalMeeting before;
    LocalMeeting after;
  };
  struct Place {
    std::shared_ptr<Clique> clique;       // null before the first run, as what follows
    std::shared_ptr<LocalMeeting> start;  // of all local devices
    std::shared_ptr<FirstCall> first_call;
    std::int64_t generation = -1;
    RecordedStart recorded;  // what the last call began with
    std::atomic<std::int64_t>* occurrences = nullptr;
    bool is_prepared = false;
    bool is_ready = false;  // all others are, too
  };

  Status Enter(Place& place, int ordinal);
  Status Prepare(Place& place, int ordinal, Stream stream);
  Status Start(Place& place, int ordinal, const Status& prepared);
  [[nodiscard]] static RecordedCall Record(Place& place, std::int64_t run);
  /// Runs `call` (-> Status) between meetings.
  template <typename Call>
  Status RunFirst(Place& place, int ordinal, const Call& call);

  Engine& engine_;
  const std::uint64_t id_;
  const std::vector<std::vector<std::int64_t>> groups_;
  const std::unique_ptr<Operation> operation_;
  std::mutex prepare_mutex_;
  std::mutex mutex_;  // guards the following
  std::int64_t generation_ = -1;
  std::shared_ptr<LocalMeeting> start_;
  std::map<const Clique*, std::shared_ptr<FirstCall>> first_calls_;

  std::array<Place, kMaxOrdinals> places_{};  // each used by its device's thread alone
};

}  // namespace jaxcoll::cuda
