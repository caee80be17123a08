// host/call_site.h: one native call in one compiled program, shared by the devices of this process.
//
// Which call meets which: XLA gives custom calls no order, may clone them, and reuses RunIds across
// programs. So an execution is identified by the call site itself (an object of its own, made when
// XLA instantiates the call), the RunId, and how many times this device has been here in that run;
// nothing depends on the order in which devices reach different call sites.
#pragma once

#include <atomic>   // std::atomic
#include <cstddef>  // std::size_t
#include <cstdint>  // std::int64_t, std::uint64_t
#include <memory>   // std::unique_ptr, std::shared_ptr
#include <string>   // std::string
#include <vector>   // std::vector

#include "core/footprint.h"
#include "core/pooled.h"
#include "core/small_array.h"
#include "core/status.h"
#include "host/exchange.h"
#include "host/job.h"
#include "host/meeting.h"
#include "host/membership.h"
#include "host/runners.h"
#include "host/work.h"

namespace jaxcoll {

/// Where the members of a site's groups are, in a job of several processes.
struct Placement {
  Job* job = nullptr;  ///< null: all are in this process
  /// By group and rank, as `groups` of the site.
  std::vector<std::vector<std::int64_t>> processes;
  std::vector<std::vector<std::int64_t>> devices;
  /// Calls whose ranks are all here fail with the job, too.
  bool fails_with_job = false;
};

class CallSite final : public Pooled, private CallNames {
 public:
  /// `id` is the site id of the lowered program. `groups` holds the logical ids of each group's
  /// members in rank order; every group has the same number, at most kMaxRanks. The members of
  /// `placement` fit into the job's session (see Problem).
  CallSite(std::uint64_t id, const std::vector<std::vector<std::int64_t>>& groups,
           std::unique_ptr<const Work> work, const Placement& placement = {});

  /// Says why groups so placed can't communicate in this process, or nothing.
  static std::string Problem(const Placement& placement);

  CallSite(const CallSite&) = delete;
  CallSite& operator=(const CallSite&) = delete;

  /// The object lives until its last reference is gone: the compiled program's and those of
  /// helpers.
  void Ref() { references_.fetch_add(1, std::memory_order_relaxed); }
  void Unref();

  [[nodiscard]] const Work& work() const { return *work_; }
  [[nodiscard]] std::uint64_t id() const { return id_; }
  /// For errors.
  [[nodiscard]] std::string Text() const override;
  /// Of the programs that resume here.
  [[nodiscard]] Pace& pace() const { return *pace_; }

  /// The logical id of the one member in this process; -1 where there is none, or several.
  [[nodiscard]] std::int64_t only_member() const { return only_member_; }

  /// Asks for the memory that Begin and Arrive will touch; before anything else.
  void Prefetch(std::int64_t logical_id) const {
    if (const std::size_t at = At(logical_id); at < members_.size()) {
      members_[at].footprint.Prefetch();
    }
  }

  /// Where the program of that member runs, each time; -1 where that is not known: it has not been
  /// here, or it is a program of one device, which may run on any.
  [[nodiscard]] std::int64_t FixedDevice(std::int64_t logical_id) const {
    const std::size_t at = At(logical_id);
    const bool is_known = at < members_.size() && !is_of_one_device_;
    return is_known ? members_[at].device.load(std::memory_order_relaxed) : -1;
  }

  /// One execution on one device, between Begin and Arrive. Null meeting: `logical_id` is in no
  /// group.
  struct Visit {
    Meeting* meeting = nullptr;
    std::size_t rank = 0;
    Key key;
    Recorder::Entry* entry = nullptr;
    std::int64_t now_ns = 0;
  };
  /// Device `device`, number `logical_id` in the program, executes the call in run `run`. At most
  /// one thread at a time per logical id (a program is sequential at one of its calls).
  Visit Begin(std::int64_t logical_id, std::int64_t device, std::int64_t run);

  /// Arrives with the pointers that were set on visit.meeting. See Meeting::Arrive.
  Arrival Arrive(const Visit& visit, WaiterFactory& factory);

  /// Fails the job, if this process is one of several: others may wait for what run `run` was to
  /// call. Not where the run had failed before the job was attached as it is now.
  void FailJob(std::int64_t run, const Status& cause) const;

  /// Counts the attachments of the job; 0 without one.
  [[nodiscard]] std::uint64_t epoch() const { return job_ == nullptr ? 0 : job_->epoch(); }

  /// A member of a group, in this process.
  struct Place {
    std::int64_t logical_id;
    std::int64_t device;  ///< -1: not known: it has been nowhere in this run
    std::size_t rank;     ///< in the group
  };
  /// A call that members of a group are in.
  struct UnderWay {
    CallSite* site;
    std::size_t group;
    Meeting::Call call;
    std::vector<Place> arrived, missing;  ///< of this process
  };
  [[nodiscard]] Job* job() const { return job_; }  ///< null: all members are in this process
  /// Adds those of this site, for the watchdog, whose looks are of all sites. A member that has not
  /// been here has no device yet.
  void AddUnderWay(std::int64_t now_ns, std::vector<UnderWay>& calls);
  /// The device of the member `logical_id`, if it has been here in run `run` and not since; or -1.
  [[nodiscard]] std::int64_t DeviceIn(std::int64_t run, std::int64_t logical_id) const;

  /// Fails the call if its run is known to have failed, or its job, or if its deadline is over
  /// (timeout_ns < 0: none). `all`: what is under way in this process.
  void Check(const UnderWay& call, const std::vector<UnderWay>& all, std::int64_t now_ns,
             std::int64_t timeout_ns);
  /// What the error of a call says that is not complete; timeout_ns < 0: for another reason than
  /// that its limit is over. Asks what others do now.
  std::string Describe(UnderWay call, const std::vector<UnderWay>& all, std::int64_t waited_ns,
                       std::int64_t timeout_ns) const;
  /// Fails the call if it is still open, with its job.
  void Fail(const UnderWay& call, const std::shared_ptr<const Status>& cause);

 private:
  struct Member : Pooled {
    Meeting* meeting = nullptr;   // null: no member of a group here has this logical id
    std::size_t rank = 0;         // among those of the group in this process
    std::int64_t group_rank = 0;  // among all
    std::int64_t home = -1;       // its device, where the placement has it
    std::uint64_t group = 0;
    std::atomic<std::int64_t> device{-1};  // -1: has not been here
    std::atomic<std::int64_t> run{0};
    std::int64_t iteration = -1;
    Footprint footprint;
  };

  /// The logical ids from the first member in this process to the last one.
  struct MembersHere {
    MembersHere(const std::vector<std::vector<std::int64_t>>& groups, const Placement& placement);

    std::int64_t first = 0;
    std::size_t count = 0;
  };
  CallSite(std::uint64_t id, std::vector<std::vector<std::int64_t>> groups,
           std::unique_ptr<const Work> work, const Placement& placement, const MembersHere& here);
  ~CallSite();

  /// Where in members_ the one with that number is; beyond its end where there is none.
  [[nodiscard]] std::size_t At(std::int64_t logical_id) const {
    return static_cast<std::size_t>(logical_id) - static_cast<std::size_t>(first_member_);
  }

  [[nodiscard]] std::int64_t timeout_ns() const override;
  [[nodiscard]] std::int64_t compile_timeout_ns() const override;

  /// Whether somebody who may be waited for has a reason not to come for now.
  [[nodiscard]] bool IsAnyoneExcused(std::int64_t now_ns) const;

  const std::uint64_t id_;
  const std::unique_ptr<const Work> work_;
  std::int64_t only_member_ = -1;
  const bool is_of_one_device_;  // the program
  const std::int64_t first_member_;
  SmallArray<Member, 1> members_;  // of this process, and what is between them; see At
  Pace* const pace_;
  Job* const job_;  // null: all members are in this process
  const bool fails_with_job_;
  const std::vector<std::vector<std::int64_t>> groups_;
  // By group. Null: without a job, or none is here.
  std::vector<std::shared_ptr<const Membership>> memberships_;
  std::vector<std::unique_ptr<Meeting>> meetings_;  // by group; null: none is here
  std::int64_t excused_ns_ = 0;                     // the watchdog's: when somebody had a reason
  std::atomic<int> references_{1};
};

}  // namespace jaxcoll
