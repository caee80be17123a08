// cuda/clique.h: the communicators of one group of devices, as far as these are in this process.
//
// Every device of a program joins before the program's first kernel (XLA's "initialize" stage), so
// that nothing is made inside a step. Whoever comes last has the communicators of all local devices
// made, in one group of NCCL. They stay until they fail or all are forgotten: to destroy one is
// collective, and the end of a program is no point in time that its ranks share.
#pragma once

#include <atomic>              // std::atomic
#include <condition_variable>  // std::condition_variable
#include <cstddef>             // std::size_t
#include <cstdint>             // std::int64_t, std::uint64_t
#include <functional>          // std::function
#include <map>                 // std::map
#include <memory>              // std::enable_shared_from_this, std::unique_ptr
#include <mutex>               // std::mutex
#include <set>                 // std::set
#include <string>              // std::string
#include <utility>             // std::exchange
#include <vector>              // std::vector

#include "core/status.h"
#include "cuda/block_seat.h"
#include "cuda/block_windows.h"
#include "cuda/call_watch.h"
#include "cuda/communicator.h"
#include "cuda/failing.h"
#include "cuda/libraries.h"
#include "cuda/local_meeting.h"
#include "cuda/peer_memory.h"
#include "cuda/recording.h"
#include "cuda/rounds.h"

namespace jaxcoll::cuda {

/// CUDA's numbers of devices are below this.
inline constexpr int kMaxOrdinals = 64;

/// What a clique asks of the rest of the process.
struct Surroundings {
  const Libraries* libraries = nullptr;
  Rounds::Exchange exchange = nullptr;
  /// Says what nobody expected, and what goes on all the same.
  void (*notice)(const std::string& text) = nullptr;
  std::string (*site_text)(std::uint64_t site) = nullptr;
  /// Runs something on a thread of its own.
  bool (*start)(std::function<void()> work) = nullptr;  ///< false: there is no thread
  bool traps = true;                                    ///< see cuda/failing.h
  /// Of the kernels over peer memory; null: there is none, or they are turned off.
  const void* peer_image = nullptr;
  std::uint64_t host = 0;  ///< the same for processes that can share memory
};

/// How long a call waits for others; < 0: for ever.
struct Limits {
  std::int64_t timeout_ns = -1;
  std::int64_t first_timeout_ns = -1;     ///< of the first call of a site: others may compile it
  bool (*is_anyone_excused)() = nullptr;  ///< one who compiles or pauses; may be null
  /// Which ranks of these devices won't come, as their processes have ended or failed, or nothing;
  /// may be null.
  std::string (*gone)(const std::vector<std::int64_t>& devices, std::int64_t generation) = nullptr;
  /// Which ranks of other processes have not made a call, or nothing; may be null.
  std::string (*absent)(const std::vector<std::int64_t>& devices, std::uint64_t group,
                        std::uint64_t site, std::int64_t execution) = nullptr;
};

/// One local device in a group.
struct Seat {
  int ordinal = 0;  ///< CUDA's number of the device
  std::size_t rank = 0;
  std::size_t num_ranks = 0;
  Communicator comm;
  Stream side_stream = nullptr;  ///< of communication that runs beside computation
  CallWatch watch;
  FailureCheck check;
  PeerSeat* peers = nullptr;  ///< null: small sums are NCCL's, too
  std::mutex mutex;           ///< held while something is put on a stream through `comm`
  std::atomic<std::uint64_t> num_calls{0};  ///< begun

  /// Of who looks at calls: which ranks were gone, in which call, and when that was asked.
  std::string gone;
  std::size_t gone_call = 0;
  std::int64_t gone_asked_ns = 0;

  std::mutex occurrences_mutex;                                    ///< guards the following
  std::map<std::uint64_t, std::atomic<std::int64_t>> occurrences;  ///< calls begun, by site
};

/// Of a std::shared_ptr: a thread that NCCL does not let go keeps it.
class Clique : public std::enable_shared_from_this<Clique> {
 public:
  /// A device of this process: its global id and CUDA's number.
  struct LocalDevice {
    std::int64_t id;
    int ordinal;
  };

  /// The group of `devices`, global ids in rank order, at least one of which is among `local`.
  Clique(Surroundings surroundings, std::vector<std::int64_t> devices,
         const std::vector<LocalDevice>& local, std::int64_t generation);
  Clique(const Clique&) = delete;
  Clique& operator=(const Clique&) = delete;
  ~Clique() = default;

  /// Returns when the device can communicate, or why it can't. The first time this waits for the
  /// other local devices, up to `limits.first_timeout_ns`, and for `stream`: a collective that is
  /// still under way could wait for a kernel that CUDA holds back while NCCL allocates.
  Status Join(int ordinal, Stream stream, const Limits& limits);

  /// Of a device that has joined: slots for so many bytes, the same ones for each call that asks
  /// for as many; null where blocks have to go by NCCL. The first time this waits for the other
  /// local devices and `stream`, as Join does, and for the other processes.
  Status OpenBlocks(int ordinal, Stream stream, std::size_t bytes, const Limits& limits,
                    BlockSeat*& blocks);

  /// The seat of a local device that has joined.
  [[nodiscard]] Seat& SeatOf(int ordinal) const;

  /// Counts the calls of a site on a device, over all programs that have it; for ever.
  [[nodiscard]] std::atomic<std::int64_t>& OccurrencesOf(int ordinal, std::uint64_t site) const;
  /// How records name an occurrence of a site, from 1: alike for the ranks that meet.
  [[nodiscard]] std::int64_t Execution(std::int64_t occurrence) const;
  [[nodiscard]] std::uint64_t group_id() const { return group_id_; }

  /// Puts `enqueue` (Seat& -> Status) on the stream of a device that has joined, watched and, where
  /// `is_checked`, followed by what makes the device fail if the group has (cuda/failing.h).
  template <typename Enqueue>
  Status Run(int ordinal, Stream stream, std::uint64_t site, bool is_first, bool is_checked,
             const RecordedCall& recorded, const Enqueue& enqueue) {
    Seat& seat = SeatOf(ordinal);
    const std::lock_guard<std::mutex> lock(seat.mutex);
    Status status = Failure();
    if (!status.ok()) {
      return status;
    }
    seat.num_calls.fetch_add(1, std::memory_order_relaxed);
    const std::size_t slot = seat.watch.Begin(libraries(), stream, site, is_first, recorded);
    status = enqueue(seat);
    seat.watch.End(libraries(), stream, slot);
    if (status.ok() && is_checked) {
      status = seat.check.Enqueue(libraries(), flag_, stream);
    }
    if (!status.ok()) {
      status.message = surroundings_.site_text(site) + ": " + status.message;
      Fail(status);
      return Failure();  // the first cause
    }
    if (!is_ready()) {
      recorded.Fail();  // too late for Close
    }
    return {};
  }

  /// From the watching thread: fails where NCCL has, or where a call takes longer than its limit on
  /// a device. Whether it failed now.
  bool Look(std::int64_t now_ns, const Limits& limits);

  /// Why calls fail, or ok.
  [[nodiscard]] Status Failure() const;
  /// Every call fails from now on, with the first cause; what is under way is for TryAbort.
  /// `is_orderly`: programs that have made their calls are well.
  void Fail(const Status& cause, bool is_orderly = false);
  /// Of a group that has failed, on a thread for each local device, of number `at`: notes which
  /// calls have failed, and ends what is under way on the device, unless somebody is inside NCCL;
  /// they are to come out then. Returns whether all is ended there. May wait for the device.
  bool TryAbort(std::size_t at);
  [[nodiscard]] std::size_t num_local() const { return seats_.size(); }
  /// Whether the caller is the first to ask, once the group has failed: who is, is to abort it.
  [[nodiscard]] bool ClaimsAbort() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return !failure_.ok() && !std::exchange(is_claimed_, true);
  }
  /// What others wait in vain without: why the group has failed; empty of one that is given up in
  /// order, or is this process's alone.
  [[nodiscard]] std::string TellableFailure() const;
  [[nodiscard]] bool is_ended() const { return num_ended_.load() == seats_.size(); }

  /// What a call says when it has waited for these local devices, CUDA's numbers; where there are
  /// none, for ranks of other processes: `others`, who may be followed by lines of what they do.
  [[nodiscard]] std::string WaitText(std::uint64_t site, std::int64_t waited_ns,
                                     const std::set<int>& late,
                                     const std::string& others = "") const;

  [[nodiscard]] const std::vector<std::int64_t>& devices() const { return devices_; }
  [[nodiscard]] std::int64_t generation() const { return generation_; }
  /// Whether there are ranks of other processes.
  [[nodiscard]] bool is_shared() const { return seats_.size() != devices_.size(); }
  [[nodiscard]] bool is_ready() const { return state_.load() == State::kReady; }
  /// Of a group that is ready: why its small sums are NCCL's, or nothing.
  [[nodiscard]] const std::string& peer_problem() const { return peers_.problem(); }

 private:
  enum class State : std::uint8_t { kWaiting, kConnecting, kReady, kFailed };

  /// Windows of one size.
  struct Blocks {
    explicit Blocks(const std::set<int>& ordinals) : meeting(ordinals) {}

    LocalMeeting meeting;
    std::mutex mutex;  // guards the following
    bool is_made = false;
    BlockWindows windows;
  };

  [[nodiscard]] const Libraries& libraries() const { return *surroundings_.libraries; }
  Status Connect(std::int64_t timeout_ns);
  [[nodiscard]] std::vector<LocalRank> LocalRanks() const;
  Blocks& BlocksOf(std::size_t slot_bytes);
  Status MakeBlocks(Blocks& blocks, std::size_t slot_bytes);
  /// Tells the others whether the local ranks can take part, and returns whether all can.
  Status Introduce(Status status, Rounds& rounds, NcclId& id);
  Status ConnectLocal(Rounds& rounds, const NcclId& id, std::int64_t timeout_ns);
  [[nodiscard]] PeerMemory::Plan PeerPlan(std::int64_t timeout_ns) const;
  void GiveUp();
  void CloseCalls();
  Status MakeTools();
  /// Makes the communicators and has NCCL connect the ranks. A thread of its own calls NCCL, as who
  /// makes a communicator can't be freed where a rank does not come.
  Status ConnectNccl(const NcclId& id, std::int64_t timeout_ns);
  Status BeginCommunicators(const NcclId& id) const;
  /// Waits until NCCL has done what it was called for on all seats.
  Status AwaitNccl() const;
  /// A first call, of some bytes: NCCL connects the ranks and allocates then.
  Status WarmUp() const;
  /// Locks the communicators of all seats; none after GiveUp.
  [[nodiscard]] std::vector<std::unique_lock<std::mutex>> EnterAll() const;
  [[nodiscard]] std::string MissingText() const;
  /// Which ranks are gone for that long that the call would have ended if it could.
  [[nodiscard]] std::string GoneText(Seat& seat, const LateCall& call, std::int64_t now_ns,
                                     const Limits& limits) const;
  [[nodiscard]] std::string LateText(const Seat& seat, const LateCall& call,
                                     const Limits& limits) const;

  const Surroundings surroundings_;
  const std::vector<std::int64_t> devices_;
  const std::int64_t generation_;
  const std::uint64_t group_id_;
  std::vector<std::unique_ptr<Seat>> seats_;  // by ordinal
  FailureFlag flag_;
  PeerMemory peers_;

  std::mutex blocks_mutex_;                                // guards the following
  std::map<std::size_t, std::unique_ptr<Blocks>> blocks_;  // by the bytes of slots

  std::atomic<State> state_{State::kWaiting};
  std::atomic<std::size_t> num_ended_{0};  // seats
  mutable std::mutex mutex_;               // guards the following
  std::condition_variable changed_;
  std::set<int> joined_;  // ordinals
  Status failure_;
  bool is_orderly_ = false;
  bool is_claimed_ = false;
};

}  // namespace jaxcoll::cuda
