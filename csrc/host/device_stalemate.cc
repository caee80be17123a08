#include "host/device_stalemate.h"

#include <algorithm>  // std::any_of
#include <ctime>      // clock_gettime
#include <map>        // std::map
#include <memory>     // std::make_shared
#include <string>     // std::string
#include <utility>    // std::move, std::pair

#include "host/black_box.h"
#include "host/diagnosis.h"
#include "host/recorder.h"
#include "host/stalemate.h"
#include "host/watchdog.h"

namespace jaxcoll {
namespace {

// Calls that have stood for so long may be part of a stalemate, which is one if the process
// computes for less than a part of as much time again.
constexpr std::int64_t kPatienceNs = 500'000'000;
constexpr std::int64_t kIdlePart = 5;

std::int64_t ComputedNs() {
  timespec used{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used);
  return std::int64_t{used.tv_sec} * 1'000'000'000 + used.tv_nsec;
}

bool MayComputeUnseen() {
  const auto phase =
      static_cast<Phase>(BlackBox::Get().header().phase.load(std::memory_order_relaxed));
  return phase == Phase::kCallback || phase == Phase::kUnknown;
}

// Why the last call of a device failed, if it did and its run is not forgotten. JAX starts nothing
// on it that needs the results of that run.
std::shared_ptr<const Status> LastFailure(std::int64_t device) {
  for (const CallRecord& record : RecordsIn(BlackBox::Get(), 1)) {
    const auto at = [&](Moment moment) {
      return record.moments_ns[static_cast<std::size_t>(moment)];
    };
    if (record.device == device && at(Moment::kResumed) != 0 && at(Moment::kMoved) == 0) {
      return Watchdog::Get().FailureOf(record.run);
    }
  }
  return nullptr;
}

// Devices that wait for one another, or for one of `failed`, which are added.
std::set<std::int64_t> StuckDevices(const std::vector<CallSite::UnderWay>& calls,
                                    std::int64_t now_ns,
                                    std::map<std::int64_t, std::shared_ptr<const Status>>& failed) {
  // The device of a rank that has not been at a call may be known from another one of its run.
  std::map<std::pair<std::int64_t, std::int64_t>, std::int64_t> device_of;
  for (const CallSite::UnderWay& each : calls) {
    for (const CallSite::Place& place : each.arrived) {
      device_of[{each.call.key.run, place.logical_id}] = place.device;
    }
  }
  std::vector<Wait> waits;
  for (const CallSite::UnderWay& each : calls) {
    std::vector<std::int64_t> missing;  // nobody: it may go on
    if (!each.call.is_complete && now_ns - each.call.opened_ns >= kPatienceNs) {
      for (const CallSite::Place& place : each.missing) {
        const auto found = device_of.find({each.call.key.run, place.logical_id});
        const bool is_known = place.device < 0 && found != device_of.end();
        missing.push_back(is_known ? found->second : place.device);
        if (auto failure = LastFailure(missing.back()); failure != nullptr) {
          failed[missing.back()] = std::move(failure);
        }
      }
    }
    for (const CallSite::Place& place : each.arrived) {
      waits.push_back({.waiter = place.device, .missing = missing});
    }
  }
  for (const auto& [device, failure] : failed) {
    waits.push_back({.waiter = device, .missing = {device}});
  }
  return FindStuck(waits);
}

std::string Text(const std::vector<CallSite::UnderWay>& calls,
                 const std::set<std::int64_t>& stuck) {
  std::map<std::int64_t, std::string> by_device;  // its calls
  for (const CallSite::UnderWay& each : calls) {
    for (const CallSite::Place& place : each.arrived) {
      if (stuck.count(place.device) > 0) {
        std::string& text = by_device[place.device];
        text += (text.empty() ? " waits in " : ", and in ") + each.site->Text();
      }
    }
  }
  std::string text;
  for (const auto& [device, waits_in] : by_device) {
    text += (text.empty() ? "device " : "; device ") + std::to_string(device) + waits_in;
  }
  const BlackBox::Header& here = BlackBox::Get().header();
  const std::string process =
      here.num_processes.load() > 1 ? " of process " + std::to_string(here.process.load()) : "";
  return "the devices" + process +
         " called different collectives, or the same in another order: " + text + DumpText();
}

}  // namespace

void DeviceStalemate::End(const std::vector<CallSite::UnderWay>& calls, std::int64_t now_ns) {
  std::map<std::int64_t, std::shared_ptr<const Status>> failed;
  const std::set<std::int64_t> stuck = StuckDevices(calls, now_ns, failed);
  if (stuck.empty() || MayComputeUnseen()) {
    since_ns_ = 0;
    return;
  }
  if (!IsIdle(now_ns)) {
    return;
  }
  since_ns_ = 0;
  const auto cause = failed.empty() ? std::make_shared<const Status>(Internal(Text(calls, stuck)))
                                    : failed.begin()->second;
  for (const CallSite::UnderWay& each : calls) {
    if (std::any_of(each.arrived.begin(), each.arrived.end(),
                    [&](const CallSite::Place& place) { return stuck.count(place.device) > 0; })) {
      each.site->Fail(each, cause);
    }
  }
}

bool DeviceStalemate::IsIdle(std::int64_t now_ns) {
  const std::int64_t computed_ns = ComputedNs();
  const std::int64_t passed_ns = now_ns - since_ns_;
  if (since_ns_ > 0 && passed_ns < kPatienceNs) {
    return false;
  }
  const bool is_idle = since_ns_ > 0 && computed_ns - computed_ns_ <= passed_ns / kIdlePart;
  since_ns_ = now_ns;
  computed_ns_ = computed_ns;
  return is_idle;
}

}  // namespace jaxcoll
