#include "host/device_stalemate.h"

#include <unistd.h>  // getpid

#include <algorithm>  // std::any_of
#include <map>        // std::map
#include <memory>     // std::make_shared
#include <set>        // std::set
#include <string>     // std::string
#include <utility>    // std::move

#include "core/clock.h"
#include "host/black_box.h"
#include "host/diagnosis.h"
#include "host/job.h"
#include "host/recorder.h"
#include "host/stalemate.h"
#include "host/threads.h"
#include "host/watchdog.h"

namespace jaxcoll {
namespace {

// Calls that have stood for so long may be part of a stalemate, which is one if meanwhile no thread
// of this process had anything to do at most looks.
constexpr std::int64_t kStandingNs = 500'000'000;
constexpr int kMostLooks = 10;
constexpr int kMostBusyLooks = 2;
// A look that comes later says that the process was stopped, or does not get its turns.
constexpr std::int64_t kLateNs = 4 * DeviceStalemate::kPeriodNs;
// A call that is begun so soon after a failure was launched before it: whoever gets an error and
// goes on takes longer.
constexpr std::int64_t kLaunchedNs = 50'000'000;

// Whether somebody looks after this process, and has not seen a reason to wait.
bool MayBeStuck(std::int64_t now_ns) {
  const BlackBox& box = BlackBox::Get();
  const auto phase = static_cast<Phase>(box.header().phase.load(std::memory_order_acquire));
  const std::int64_t compile_timeout_ns = Watchdog::Get().compile_timeout_ns();
  const std::shared_ptr<Session> session = Job::Get().session();
  return phase != Phase::kUnknown && phase != Phase::kCallback &&
         box.header().callbacks.load(std::memory_order_relaxed) == 0 &&
         !box.IsExcused(now_ns, compile_timeout_ns) &&
         (session == nullptr || !session->IsAnyoneExcused(now_ns, compile_timeout_ns));
}

// Why the last call of a device failed, if it did, after a call was launched that was opened at
// `opened_ns`. JAX starts nothing on it that needs the results of that run, as what was launched
// before may.
std::shared_ptr<const Status> FailureSince(std::int64_t device, std::int64_t opened_ns) {
  for (const CallRecord& record : RecordsIn(BlackBox::Get(), 1)) {
    const auto at = [&](Moment moment) {
      return record.moments_ns[static_cast<std::size_t>(moment)];
    };
    if (record.device == Recorder::DeviceInRecords(device) &&
        at(Moment::kResumed) > opened_ns - kLaunchedNs && at(Moment::kMoved) == 0) {
      return Watchdog::Get().FailureOf(record.run);
    }
  }
  return nullptr;
}

// Whether a device is in no call because it ended in a callback, as far as can be told. Where there
// are other processes it may wait for those, in a collective of XLA's own.
bool MayHaveEnded(const CallSite::Place& place, const std::vector<CallSite::UnderWay>& calls,
                  std::int64_t opened_ns) {
  return Job::Get().session() == nullptr && !Watchdog::Get().CallbackErrorFor(opened_ns).empty() &&
         std::none_of(calls.begin(), calls.end(), [&](const CallSite::UnderWay& each) {
           return std::any_of(
               each.arrived.begin(), each.arrived.end(),
               [&](const CallSite::Place& there) { return there.device == place.device; });
         });
}

// Devices that will wait for ever, and why.
struct Stuck {
  std::set<std::int64_t> devices;
  // Those of them that have failed.
  std::map<std::int64_t, std::shared_ptr<const Status>> failed;
  // A call that waits for one that ended in a callback, or null.
  const CallSite::UnderWay* for_ended = nullptr;
};

// Devices that wait for one another, or for one that has failed or ended.
Stuck FindStuckDevices(const std::vector<CallSite::UnderWay>& calls, std::int64_t now_ns) {
  Stuck found;
  std::vector<Wait> waits;
  for (const CallSite::UnderWay& each : calls) {
    std::vector<std::int64_t> missing;  // nobody: it may go on
    if (!each.call.is_complete && now_ns - each.call.opened_ns >= kStandingNs) {
      for (const CallSite::Place& place : each.missing) {
        missing.push_back(place.device);
        auto failure = FailureSince(place.device, each.call.opened_ns);
        if (failure != nullptr) {
          found.failed[place.device] = std::move(failure);
        } else if (MayHaveEnded(place, calls, each.call.opened_ns)) {
          waits.push_back({.waiter = place.device, .missing = {place.device}});
          found.for_ended = &each;
        }
      }
    }
    for (const CallSite::Place& place : each.arrived) {
      waits.push_back({.waiter = place.device, .missing = missing});
    }
  }
  for (const auto& [device, failure] : found.failed) {
    waits.push_back({.waiter = device, .missing = {device}});
  }
  found.devices = FindStuck(waits);
  return found;
}

std::string Text(const std::vector<CallSite::UnderWay>& calls,
                 const std::set<std::int64_t>& stuck) {
  std::map<std::int64_t, std::string> doings;  // by device
  std::set<std::int64_t> runs;
  for (const CallSite::UnderWay& each : calls) {
    for (const CallSite::Place& place : each.arrived) {
      if (stuck.count(place.device) > 0) {
        std::string& doing = doings[place.device];
        doing += (doing.empty() ? "waits in " : ", and in ") + each.site->Text() + ", execution " +
                 std::to_string(each.call.key.iteration + 1) + " of this call";
        runs.insert(each.call.key.run);
      }
    }
  }
  std::string text = DoingsText("device", {doings.begin(), doings.end()});
  for (const std::int64_t run : runs) {  // which tells this failure from another one like it
    text += "; run " + std::to_string(run);
  }
  const BlackBox::Header& here = BlackBox::Get().header();
  const std::string process =
      here.num_processes.load() > 1 ? " of process " + std::to_string(here.process.load()) : "";
  return "the devices" + process +
         " called different collectives, or the same in another order: " + text + DumpText();
}

}  // namespace

void DeviceStalemate::End(const std::vector<CallSite::UnderWay>& calls, std::int64_t now_ns) {
  const Stuck found = FindStuckDevices(calls, now_ns);
  const std::set<std::int64_t>& stuck = found.devices;
  if (stuck.empty() || !MayBeStuck(now_ns) || now_ns - last_look_ns_ > kLateNs) {
    num_looks_ = stuck.empty() ? 0 : 1;
    num_busy_ = 0;
    was_asked_ = false;
    last_look_ns_ = now_ns;
    return;
  }
  if (now_ns - last_look_ns_ < kPeriodNs) {  // of a watchdog with short limits
    return;
  }
  last_look_ns_ = now_ns;
  num_busy_ += IsAnyThreadBusy(getpid()) ? 1 : 0;
  if (++num_looks_ <= kMostLooks) {
    return;
  }
  const bool is_idle = num_busy_ <= kMostBusyLooks;
  num_busy_ = 0;
  if (!is_idle) {
    num_looks_ = 1;
    was_asked_ = false;
    return;
  }
  if (!was_asked_) {  // what was seen of callbacks may be old; the next look decides
    was_asked_ = BlackBox::Get().AskForStack();
    num_looks_ = was_asked_ ? kMostLooks : 1;
    last_look_ns_ = NowNs();
    return;
  }
  num_looks_ = 0;
  was_asked_ = false;
  std::shared_ptr<const Status> cause;
  for (const auto& [device, failure] : found.failed) {
    cause = cause == nullptr && stuck.count(device) > 0 ? failure : cause;
  }
  if (cause == nullptr && found.for_ended != nullptr) {
    const CallSite::UnderWay& call = *found.for_ended;
    cause = std::make_shared<const Status>(Internal(
        call.site->Describe(call, calls, NowNs() - call.call.opened_ns, /*timeout_ns=*/-1)));
  }
  if (cause == nullptr) {
    cause = std::make_shared<const Status>(Internal(Text(calls, stuck)));
  }
  for (const CallSite::UnderWay& each : calls) {
    if (std::any_of(each.arrived.begin(), each.arrived.end(),
                    [&](const CallSite::Place& place) { return stuck.count(place.device) > 0; })) {
      each.site->Fail(each, cause);
    }
  }
}

}  // namespace jaxcoll
