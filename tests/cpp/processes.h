// tests/cpp/processes.h: processes that share memory, without processes: each is a Job of its own
// with call sites of its own, and its ranks are threads, as in ranks.h. All use one mapping, so
// that the thread sanitizer sees every access.
//
//   Host host(2, {.num_lanes = 4, .window_bytes = 4096});
//   const SharedSite site(host, /*id=*/7, OneGroup(4), /*process_of=*/{0, 0, 1, 1}, op.make);
//   RunRanks(context, 4, [&](std::size_t rank) -> Program {
//     Check((co_await site.Begin(rank, run, data)).ok, "the call succeeds");
//   });
#pragma once

#include <sys/mman.h>  // memfd_create
#include <unistd.h>    // close

#include <atomic>      // std::atomic
#include <cstddef>     // std::size_t
#include <cstdint>     // std::int64_t, std::uint64_t
#include <deque>       // std::deque
#include <functional>  // std::function
#include <memory>      // std::make_shared, std::unique_ptr
#include <string>      // std::string
#include <utility>     // std::move
#include <vector>      // std::vector

#include "core/status.h"
#include "host/call_site.h"
#include "host/copy_costs.h"
#include "host/job.h"
#include "host/membership.h"
#include "host/route.h"
#include "host/segment.h"
#include "host/work.h"
#include "ops.h"
#include "ranks.h"
#include "testing.h"

namespace jaxcoll::testing {

/// JAX's numbers of processes differ from seats and from counts, so that what confuses them shows.
inline constexpr std::int64_t kFirstProcess = 40;

/// The process of each logical id, counted from 0.
using Places = std::vector<std::size_t>;

/// Makes an anonymous segment; `memory` is its file descriptor.
inline Status CreateSegment(const SegmentShape& shape, std::uint64_t nonce, int& memory) {
  memory = memfd_create("jaxcoll", MFD_CLOEXEC);
  return memory < 0 ? Internal("memfd_create") : Segment::Format(memory, shape, nonce);
}

struct Measures {
  std::size_t num_lanes = 8;
  std::size_t window_bytes = 64 * 1024;
  bool can_read_peers = false;
};

inline constexpr CopyCosts kReadingIsFree{.leaving = 1, .taking = 1, .reading = 0};

/// The processes of a host, attached to one segment.
class Host {
 public:
  explicit Host(std::size_t num_processes, const Measures& measures = {}) : measures_(measures) {
    for (std::size_t p = 0; p < num_processes; ++p) {
      jobs_.push_back(MakeJob());
    }
    Attach();
  }

  Host(const Host&) = delete;
  Host& operator=(const Host&) = delete;

  ~Host() {
    for (Job* job : jobs_) {
      job->Attach(nullptr);
    }
  }

  /// All processes attach to a new segment.
  void Attach() {
    segment_ = MakeSegment();
    for (std::size_t p = 0; p < jobs_.size(); ++p) {
      AttachOne(p);
    }
  }

  Job& job(std::size_t process) const { return *jobs_[process]; }
  const Segment& segment() const { return *segment_; }
  std::size_t num_processes() const { return jobs_.size(); }

  /// Process numbers by seat, which are not in order.
  std::vector<std::int64_t> Seats() const {
    std::vector<std::int64_t> seats;
    for (std::size_t p = jobs_.size(); p > 0; --p) {
      seats.push_back(kFirstProcess + static_cast<std::int64_t>(p - 1));
    }
    return seats;
  }

 private:
  /// Never destroyed, as Job::Get() is not: the watchdog may still look after its call sites.
  static Job* MakeJob() {
    static auto* const jobs = new std::deque<Job>();
    return &jobs->emplace_back();
  }

  std::shared_ptr<const Segment> MakeSegment() const {
    static std::atomic<std::uint64_t> nonce{1};
    const std::uint64_t mine = nonce.fetch_add(1);
    int memory = -1;
    Status status = CreateSegment({.num_seats = jobs_.size(),
                                   .num_lanes = measures_.num_lanes,
                                   .window_bytes = measures_.window_bytes},
                                  mine, memory);
    const auto segment = std::make_shared<Segment>();
    if (status.ok()) {
      status = segment->Map(memory, mine);
      close(memory);
    }
    Check(status.ok(), status.message);
    return segment;
  }

  void AttachOne(std::size_t process) {
    std::shared_ptr<Session> session;
    const Status status = Session::Begin(
        segment_, Seats(), kFirstProcess + static_cast<std::int64_t>(process), session);
    Check(status.ok(), status.message);
    CopyCostsBySize costs;
    costs.each.fill(kReadingIsFree);
    session->LetPeersBeRead(measures_.can_read_peers, costs);
    jobs_[process]->Attach(std::move(session));
  }

  Measures measures_;
  std::shared_ptr<const Segment> segment_;
  std::vector<Job*> jobs_;
};

inline Placement PlacementOf(Job& job, const Groups& groups, const Places& process_of) {
  Placement placement{.job = &job, .processes = {}, .devices = {}};
  for (const auto& group : groups) {
    placement.processes.emplace_back();
    placement.devices.emplace_back();
    for (const std::int64_t id : group) {
      placement.processes.back().push_back(
          kFirstProcess + static_cast<std::int64_t>(process_of[static_cast<std::size_t>(id)]));
      placement.devices.back().push_back(kFirstDevice + id);
    }
  }
  return placement;
}

/// Eight bytes of each rank, for a route of a test's own.
class RoutedWork final : public Work {
 public:
  using Make = std::function<std::unique_ptr<const Route>(const Membership&)>;

  explicit RoutedWork(Make make) : make_(std::move(make)) {}
  [[nodiscard]] std::size_t num_operands() const override { return 1; }
  [[nodiscard]] std::size_t num_results() const override { return 1; }
  [[nodiscard]] std::size_t operand_bytes(std::size_t) const override { return 8; }
  [[nodiscard]] std::size_t result_bytes(std::size_t) const override { return 8; }
  [[nodiscard]] std::size_t num_chunks(std::size_t) const override { return 0; }
  [[nodiscard]] std::size_t bytes_moved(std::size_t) const override { return 8; }
  void Run(std::size_t, const Buffers&) const override {}
  [[nodiscard]] std::unique_ptr<const Route> MakeRoute(const Membership& members,
                                                       const RouteOptions&) const override {
    return make_(members);
  }

 private:
  const Make make_;
};

/// One call of the job's program: a call site in each process.
class SharedSite {
 public:
  using MakeWork = std::function<std::unique_ptr<const Work>()>;

  SharedSite(Host& host, std::uint64_t id, const Groups& groups, Places process_of,
             const MakeWork& make_work)
      : process_of_(std::move(process_of)) {
    for (std::size_t p = 0; p < host.num_processes(); ++p) {
      const Placement placement = PlacementOf(host.job(p), groups, process_of_);
      const std::string problem = CallSite::Problem(placement);
      Check(problem.empty(), problem);
      sites_.push_back(Site(new CallSite(id, groups, make_work(), placement)));
    }
  }

  CallSite& in_process(std::size_t process) const { return *sites_[process]; }

  /// To co_await. Processes number their runs for themselves: `run` is that of the program.
  Call Begin(std::size_t logical_id, std::int64_t run, std::span<const void* const> operands,
             std::span<void* const> results) const {
    const std::size_t process = process_of_[logical_id];
    return {*sites_[process], logical_id, RunIn(process, run), operands, results};
  }

  /// Where all ranks form one group.
  Call Begin(std::size_t rank, std::int64_t run, const CallData& data) const {
    return Begin(rank, run, data.operands(rank), data.results(rank));
  }

  /// The RunId in a process: what fails a run in one must not fail it in another by itself.
  static std::int64_t RunIn(std::size_t process, std::int64_t run) {
    return run * 16 + static_cast<std::int64_t>(process);
  }

 private:
  Places process_of_;
  std::vector<Site> sites_;
};

}  // namespace jaxcoll::testing
