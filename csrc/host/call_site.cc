#include "host/call_site.h"

#include <algorithm>      // std::find, std::max
#include <array>          // std::array
#include <cstdio>         // std::snprintf
#include <mutex>          // std::mutex
#include <unordered_map>  // std::unordered_map
#include <utility>        // std::move

#include "core/clock.h"
#include "host/watchdog.h"

namespace jaxcoll {
namespace {

// Paces outlive their call sites (a runner notes how a task went after the task's program may have
// ended and been freed), so they stand in a fixed table; sites that share one only share a hint.
constexpr std::size_t kNumPaces = 1024;

// Alike calls of functions of one name share a site id, which must not depend on source lines.
constexpr std::size_t kMaxTexts = 4;

Pace& NextPace() {
  static auto* const paces = new std::array<Pace, kNumPaces>();
  static std::atomic<std::size_t> next{0};
  return (*paces)[next.fetch_add(1, std::memory_order_relaxed) % kNumPaces];
}

struct SiteTexts {
  std::mutex mutex;
  std::unordered_map<std::uint64_t, std::vector<std::string>> by_id;

  static SiteTexts& Get() {
    static auto* const texts = new SiteTexts();  // leaked: the watchdog may read it at exit
    return *texts;
  }
};

std::size_t CountMembers(const std::vector<std::vector<std::int64_t>>& groups) {
  std::int64_t last = -1;
  for (const auto& group : groups) {
    for (const std::int64_t id : group) {
      last = std::max(last, id);
    }
  }
  return static_cast<std::size_t>(last + 1);
}

std::string Seconds(std::int64_t ns) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.1f s", static_cast<double>(ns) * 1e-9);
  return text.data();
}

}  // namespace

void DescribeSite(std::uint64_t id, std::string text) {
  SiteTexts& texts = SiteTexts::Get();
  const std::lock_guard<std::mutex> lock(texts.mutex);
  std::vector<std::string>& known = texts.by_id[id];
  if (known.size() < kMaxTexts && std::find(known.begin(), known.end(), text) == known.end()) {
    known.push_back(std::move(text));
  }
}

std::string SiteText(std::uint64_t id) {
  SiteTexts& texts = SiteTexts::Get();
  const std::lock_guard<std::mutex> lock(texts.mutex);
  const auto found = texts.by_id.find(id);
  if (found == texts.by_id.end()) {
    return "a collective of unknown origin";
  }
  std::string all;
  for (const std::string& text : found->second) {
    all += (all.empty() ? "" : ", or ") + text;
  }
  return all;
}

CallSite::CallSite(std::uint64_t id, std::vector<std::vector<std::int64_t>> groups,
                   std::unique_ptr<const Work> work)
    : id_(id),
      groups_(std::move(groups)),
      work_(std::move(work)),
      pace_(&NextPace()),
      members_(CountMembers(groups_)) {
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    for (std::size_t r = 0; r < groups_[g].size(); ++r) {
      Member& member = members_[static_cast<std::size_t>(groups_[g][r])];
      member.group = g;
      member.rank = r;
      member.known = true;
    }
    meetings_.push_back(std::make_unique<Meeting>(*this, groups_[g].size()));
  }
  // One in reserve for each device, so that every waiting program can find a thread at once.
  Runners::Get().Reserve(members_.size() + 1);
  Watchdog::Get().Add(*this);
}

CallSite::~CallSite() = default;

void CallSite::Unref() {
  if (references_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
    Watchdog::Get().Remove(*this);
    delete this;
  }
}

CallSite::Visit CallSite::Begin(std::int64_t logical_id, std::int64_t device, std::int64_t run) {
  Visit visit;
  if (logical_id < 0 || static_cast<std::size_t>(logical_id) >= members_.size()) {
    return visit;
  }
  Member& member = members_[static_cast<std::size_t>(logical_id)];
  if (!member.known) {
    return visit;
  }
  member.device.store(device, std::memory_order_relaxed);
  if (member.iteration < 0 || member.run != run) {
    member.run = run;
    member.iteration = 0;
  } else {
    ++member.iteration;
  }
  visit.key = {.run = run, .iteration = member.iteration};
  visit.rank = member.rank;
  visit.now_ns = NowNs();
  visit.meeting = meetings_[member.group].get();
  visit.entry = &Recorder::Get().Begin(device, id_, run, member.iteration, visit.now_ns);
  return visit;
}

Arrival CallSite::Arrive(const Visit& visit, WaiterFactory& factory) {
  Arrival arrival =
      visit.meeting->Arrive(visit.key, visit.rank, visit.now_ns, *visit.entry, factory);
  if (arrival.answer == Answer::kFailed) {
    Watchdog::Get().FailRun(visit.key.run, arrival.failure);
  }
  return arrival;
}

void CallSite::Check(std::int64_t now_ns, std::int64_t timeout_ns) {
  Meeting::OpenCall call;
  for (std::size_t group = 0; group < meetings_.size(); ++group) {
    Meeting& meeting = *meetings_[group];
    if (!meeting.IsOpen(call)) {
      continue;
    }
    if (auto cause = Watchdog::Get().FailureOf(call.key.run); cause != nullptr) {
      meeting.Fail(call.key, cause);
      continue;
    }
    const std::int64_t waited_ns = now_ns - call.opened_ns;
    if (timeout_ns >= 0 && waited_ns >= timeout_ns) {
      meeting.Fail(call.key, std::make_shared<const Status>(
                                 DeadlineExceeded(Describe(group, call, waited_ns, timeout_ns))));
    }
  }
}

std::string CallSite::Describe(std::size_t group, const Meeting::OpenCall& call,
                               std::int64_t waited_ns, std::int64_t timeout_ns) const {
  std::string came;
  std::string missing;
  for (std::size_t r = 0; r < groups_[group].size(); ++r) {
    const Member& member = members_[static_cast<std::size_t>(groups_[group][r])];
    const std::int64_t device = member.device.load(std::memory_order_relaxed);
    std::string& list = call.arrived[r] ? came : missing;
    list += (list.empty() ? "" : ", ") + std::to_string(r);
    list += device >= 0 ? " (device " + std::to_string(device) + ")"
                        : " (partition " + std::to_string(groups_[group][r]) + ")";
  }
  return SiteText(id_) + ": waited " + Seconds(waited_ns) + " (the limit is " +
         Seconds(timeout_ns) + ") for rank " + missing + " of " +
         std::to_string(groups_[group].size()) + "; arrived: rank " + came + "; run " +
         std::to_string(call.key.run) + ", execution " + std::to_string(call.key.iteration + 1) +
         " of this call in it";
}

}  // namespace jaxcoll
