#include "host/diagnosis.h"

#include <algorithm>  // std::max, std::min
#include <map>        // std::map
#include <mutex>      // std::mutex
#include <optional>   // std::nullopt, std::optional
#include <utility>    // std::move
#include <vector>     // std::vector

#include "core/clock.h"
#include "host/recorder.h"
#include "host/stalemate.h"

namespace jaxcoll {
namespace {

struct Folder {
  std::mutex mutex;
  std::string path;

  static Folder& Get() {
    static auto* const folder = new Folder();  // leaked: the watchdog may read it at exit
    return *folder;
  }
};

// Calls of a device that may be under way at once are few; who waits for this text is in a hurry.
constexpr std::size_t kLatest = 64;
// What is written with one decimal of a second.
constexpr std::int64_t kTellableNs = 50'000'000;

std::int64_t At(const CallRecord& record, Moment moment) {
  return record.moments_ns[static_cast<std::size_t>(moment)];
}

// When a call of this process ended last; 0 if none did.
std::int64_t LastEnd(const BlackBox& box) {
  std::int64_t last_ns = 0;
  for (const CallRecord& record : RecordsIn(box, kLatest)) {
    if (At(record, Moment::kMoved) != 0) {  // a failed one may have ended after it was asked
      last_ns = std::max(last_ns, At(record, Moment::kResumed));
    }
  }
  return last_ns;
}

// Whether a rank has made a call; nothing where its record would be gone by now.
std::optional<bool> HasMade(const std::vector<CallRecord>& records, std::int64_t rank,
                            std::uint64_t group, std::uint64_t site, std::int64_t execution) {
  bool are_all_kept = true;
  bool is_one_before_kept = false;
  std::optional<std::int64_t> device;
  for (const CallRecord& record : records) {
    are_all_kept = are_all_kept && (record.device == device || record.sequence == 1);
    device = record.device;
    if (record.group == group && record.site == site && record.rank == rank) {
      if (record.execution >= execution) {
        return true;
      }
      is_one_before_kept = true;
    }
  }
  return are_all_kept || is_one_before_kept ? std::optional<bool>(false) : std::nullopt;
}

std::string Indented(const std::string& lines, const std::string& by) {
  std::string text;
  for (std::size_t begin = 0; begin < lines.size();) {
    const std::size_t end = std::min(lines.find('\n', begin), lines.size());
    text += "\n" + by + lines.substr(begin, end - begin);
    begin = end + 1;
  }
  return text;
}

}  // namespace

std::set<std::int64_t> DevicesIn(const BlackBox& box) {
  std::set<std::int64_t> devices;
  for (std::size_t i = 0; i < box.num_rings(); ++i) {
    devices.insert(box.ring(i).device.load(std::memory_order_relaxed));
  }
  return devices;
}

std::string LastCallText(const BlackBox& box, const std::set<std::int64_t>& devices,
                         std::int64_t now_ns) {
  std::map<std::int64_t, std::int64_t> named;  // as they are called here, by what records call them
  for (const std::int64_t device : devices) {
    named[Recorder::DeviceInRecords(device)] = device;
  }
  const std::vector<CallRecord> records = RecordsIn(box, kLatest);
  const CallRecord* ended = nullptr;
  const CallRecord* open = nullptr;
  for (const CallRecord& record : records) {
    if (named.count(record.device) == 0) {
      continue;
    }
    if (At(record, Moment::kResumed) == 0) {
      if (open == nullptr || At(record, Moment::kArrived) >= At(*open, Moment::kArrived)) {
        open = &record;
      }
    } else if (ended == nullptr || At(record, Moment::kResumed) >= At(*ended, Moment::kResumed)) {
      ended = &record;
    }
  }
  const auto name = [&](const CallRecord& record) {
    const bool is_known = !box.SiteTexts(record.site).empty();
    return SiteText(record.site, is_known ? box : BlackBox::Get()) + " (call " +
           std::to_string(record.sequence) + " of device " +
           std::to_string(named.at(record.device)) + ")";
  };
  std::string text;
  if (open != nullptr) {
    text =
        "waits, since " + SecondsText(now_ns - At(*open, Moment::kArrived)) + ", in " + name(*open);
  }
  if (ended != nullptr) {
    const char* const how = At(*ended, Moment::kMoved) == 0 ? "failed " : "ended ";
    text += (text.empty() ? "" : "; ") + ("last call, " + std::string(how)) +
            SecondsText(now_ns - At(*ended, Moment::kResumed)) + " ago: " + name(*ended);
  }
  return text.empty() ? "no call yet" : text;
}

RanksThere FindRanks(const BlackBox& box, std::uint64_t group, std::uint64_t site,
                     std::int64_t execution) {
  RanksThere ranks;
  for (const CallRecord& record : RecordsIn(box)) {
    if (record.group != group) {
      if (record.site == site) {
        ranks.elsewhere.insert(record.device);
      }
      continue;
    }
    ranks.device_of[record.rank] = record.device;
    if (record.site == site && record.execution == execution && At(record, Moment::kResumed) == 0) {
      ranks.in_call.insert(record.rank);
    }
  }
  return ranks;
}

std::string LastCallOfRank(const BlackBox& box, const RanksThere& ranks, std::int64_t rank,
                           std::int64_t now_ns) {
  if (const auto found = ranks.device_of.find(rank); found != ranks.device_of.end()) {
    return LastCallText(box, {found->second}, now_ns);
  }
  std::set<std::int64_t> devices = DevicesIn(box);
  for (const auto& [other, device] : ranks.device_of) {
    devices.erase(device);
  }
  for (const std::int64_t device : ranks.elsewhere) {
    devices.erase(device);
  }
  return LastCallText(box, devices, now_ns);
}

std::string PythonText(const BlackBox& box, std::int64_t now_ns) {
  const BlackBox::Told told = box.stack();
  const auto phase = static_cast<Phase>(box.header().phase.load(std::memory_order_relaxed));
  if (told.at_ns == 0 || phase == Phase::kUnknown) {
    return "";
  }
  if (phase == Phase::kEnded) {
    return told.stack.empty() ? "" : "\n  ended with " + told.stack;
  }
  const std::string stack = Indented(told.stack, "    ");
  if (told.at_ns < LastEnd(box)) {  // it has gone on since: what it did then is no reason
    return told.stack.empty() ? ""
                              : "\n  Python stack, " + SecondsText(now_ns - told.at_ns) +
                                    " ago, before its last call ended:" + stack;
  }
  const std::int64_t since_ns = box.header().phase_since_ns.load(std::memory_order_relaxed);
  // Who stops has often just begun to do what it was last seen to do.
  const std::int64_t for_ns = told.at_ns - since_ns;
  const std::int64_t paused_until_ns = box.header().paused_until_ns.load(std::memory_order_relaxed);
  const bool has_paused = paused_until_ns != 0 && paused_until_ns < now_ns;  // and goes on with it
  const std::string text =
      "\n  " + std::string(Name(phase)) +
      (for_ns < kTellableNs ? "" : " for " + SecondsText(for_ns)) +
      (has_paused ? "; its allow_pause was over " + SecondsText(now_ns - paused_until_ns) + " ago"
                  : "");
  if (told.stack.empty()) {  // no code of the user's, as in hooks at the exit
    return text + "; no Python code of the user's runs";
  }
  return text + "; Python stack, " + SecondsText(now_ns - told.at_ns) + " ago:" + stack;
}

std::string AbsentText(const Session& session, const std::vector<std::int64_t>& processes,
                       std::uint64_t group, std::uint64_t site, std::int64_t execution) {
  const auto absent_of = [&](std::size_t seat) {
    std::vector<std::int64_t> absent;
    const BlackBox* const box = session.box(seat);
    if (seat == session.seat() || box == nullptr) {
      return absent;
    }
    const std::vector<CallRecord> records = RecordsIn(*box);
    for (std::size_t rank = 0; rank < processes.size(); ++rank) {
      const auto number = static_cast<std::int64_t>(rank);
      if (processes[rank] == session.processes()[seat] &&
          !HasMade(records, number, group, site, execution).value_or(true)) {
        absent.push_back(number);
      }
    }
    return absent;
  };
  const std::int64_t until_ns = NowNs() + BlackBox::kAnswerNs;
  for (std::size_t seat = 0; seat < session.processes().size(); ++seat) {
    if (!absent_of(seat).empty() && session.WhereIs(seat, NowNs()).state == "running") {
      session.box(seat)->AskForStack(std::max<std::int64_t>(until_ns - NowNs(), 0));
    }
  }
  std::string names;
  std::string doing;
  for (std::size_t seat = 0; seat < session.processes().size(); ++seat) {
    const std::vector<std::int64_t> absent = absent_of(seat);  // some may have come meanwhile
    if (absent.empty()) {
      continue;
    }
    const BlackBox& box = *session.box(seat);
    const RanksThere there = FindRanks(box, group, site, execution);
    std::string ranks;
    for (const std::int64_t rank : absent) {
      ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank);
      doing +=
          "\n  rank " + std::to_string(rank) + ": " + LastCallOfRank(box, there, rank, NowNs());
    }
    names +=
        (names.empty() ? "rank " : ", rank ") + ranks + " (" + ProcessText(session, seat) + ")";
    doing += PythonText(box, NowNs());
  }
  return names + doing;
}

std::string ProcessText(const Session& session, std::size_t seat) {
  const std::int64_t pid = session.segment().seat(seat).pid.load(std::memory_order_relaxed);
  return "process " + std::to_string(session.processes()[seat]) + ", pid " + std::to_string(pid) +
         ", " + std::string(session.WhereIs(seat, NowNs()).state);
}

std::string ChainText(const Session& session, const std::vector<std::size_t>& seats) {
  std::string text;
  for (const Wait& wait : FindWaits(session, seats)) {
    const auto seat = static_cast<std::size_t>(wait.missing.front());
    if (seat == session.seat()) {
      continue;
    }
    const auto waiter = static_cast<std::size_t>(wait.waiter);
    text += "\n  " + ProcessText(session, seat) + ", for which process " +
            std::to_string(session.processes()[waiter]) + " waits";
    if (const BlackBox* const box = session.box(seat); box != nullptr) {
      text += ": " + LastCallText(*box, DevicesIn(*box), NowNs()) + PythonText(*box, NowNs());
    }
  }
  return text;
}

void SetDumpFolder(std::string folder) {
  const std::lock_guard<std::mutex> lock(Folder::Get().mutex);
  Folder::Get().path = std::move(folder);
}

std::string DumpText() {
  const std::lock_guard<std::mutex> lock(Folder::Get().mutex);
  const std::string& path = Folder::Get().path;
  return path.empty() ? "" : "\n  more: jaxcoll doctor \"" + path + "\"";
}

}  // namespace jaxcoll
