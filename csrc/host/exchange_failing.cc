// What an exchange does when other processes do not come.
#include "host/exchange.h"

#include <algorithm>    // std::all_of, std::find, std::max
#include <cstddef>      // std::size_t
#include <cstdint>      // std::int64_t
#include <optional>     // std::nullopt
#include <string>       // std::string, std::to_string
#include <string_view>  // std::string_view
#include <vector>       // std::vector

#include "core/clock.h"
#include "host/stalemate.h"

namespace jaxcoll {
namespace {

// Of how many missing processes errors show the stack.
constexpr std::size_t kMostStacks = 4;
// By how much later than its limit who waits for others that wait says so: some naps.
constexpr std::int64_t kChainNs = 250'000'000;

}  // namespace

void Exchange::Look(std::int64_t now_ns, std::int64_t since_ns) {
  // Those that wait for it may be whom this process waits for.
  if (session_->IsAnyoneExcused(now_ns, names_.compile_timeout_ns())) {
    excused_ns_ = now_ns;
  }
  const std::int64_t waited_ns = now_ns - std::max(since_ns, excused_ns_);
  std::vector<std::size_t> missing = Missing();
  for (const std::size_t seat : missing) {
    const std::string_view gone = session_->WhereIs(seat, now_ns).gone;
    // It may have done its part, and ended, since it was found missing.
    const std::vector<std::size_t> still = gone.empty() ? std::vector<std::size_t>{} : Missing();
    if (std::find(still.begin(), still.end(), seat) != still.end()) {
      session_->segment().Fail(WaitText(waited_ns, " (" + std::string(gone) + ")"));
      return;
    }
  }
  if (std::string calls = WrongCalls(now_ns, now_ns - since_ns); !calls.empty()) {
    session_->segment().Fail(DifferentCallsText(calls));
    return;
  }
  const std::int64_t timeout_ns = names_.timeout_ns();
  if (timeout_ns < 0 || waited_ns < timeout_ns) {
    return;
  }
  // Those that wait themselves know better who is late.
  const auto waits = [this, now_ns](std::size_t seat) {
    return session_->IsWaiting(seat) && session_->WhereIs(seat, now_ns).state == "running";
  };
  if (waited_ns < timeout_ns + kChainNs && std::all_of(missing.begin(), missing.end(), waits)) {
    return;
  }
  AskForStacks(missing);  // and with it for what they do now; they may come meanwhile
  if (!Missing().empty() && !session_->IsAnyoneExcused(NowNs(), names_.compile_timeout_ns())) {
    session_->segment().Fail(
        WaitText(waited_ns, " (the limit is " + SecondsText(timeout_ns) + ")"));
  }
}

std::vector<std::size_t> Exchange::Missing() {
  if (lane_ < 0) {
    return session_->Laggards();
  }
  std::vector<std::size_t> missing;
  for (Peer& peer : peers_) {
    if (!HasReached(peer)) {
      missing.push_back(peer.seat);
    }
  }
  return missing;
}

void Exchange::AskForStacks(const std::vector<std::size_t>& seats) const {
  const std::int64_t until_ns = NowNs() + BlackBox::kAnswerNs;
  for (const std::size_t seat : seats) {
    const BlackBox* const box = session_->box(seat);
    if (box != nullptr && session_->WhereIs(seat, NowNs()).state == "running") {
      box->AskForStack(std::max<std::int64_t>(until_ns - NowNs(), 0));
    }
  }
}

std::string Exchange::WrongCalls(std::int64_t now_ns, std::int64_t waited_ns) {
  if (waited_ns < kMismatchNs) {
    return "";
  }
  if (Stalemate found = FindStalemate(*session_, group_, now_ns, kMismatchNs);
      !found.seats.empty()) {
    return found.text;
  }
  if (waited_ns < next_look_ns_) {
    return "";
  }
  const bool is_long = waited_ns >= kStalemateNs;
  const std::int64_t patience_ns = is_long ? kStalemateNs : kMismatchNs;
  const Stalemate found = FindStalemate(*session_, std::nullopt, now_ns, patience_ns);
  if (found.seats.empty() || !(is_long || DoAllAwait(*session_, found.seats))) {
    return "";
  }
  if (MayComeToMore(*session_, found.seats, names_.compile_timeout_ns()) ||
      !(is_long || DoAllAwait(*session_, found.seats))) {
    next_look_ns_ = waited_ns + kMismatchNs;  // it takes this thread, for which others may wait
    return "";
  }
  return FindStalemate(*session_, std::nullopt, NowNs(), patience_ns).text;  // they may have come
}

std::vector<bool> Exchange::Absent(std::vector<RanksThere>& there) {
  std::vector<bool> waited_for(members_.num_ranks());
  std::vector<bool> absent(members_.num_ranks());
  there.resize(members_.num_processes());
  for (Peer& peer : peers_) {
    if (lane_ < 0 || HasReached(peer)) {
      continue;
    }
    RanksThere& ranks = there[peer.process];
    if (const BlackBox* const box = session_->box(peer.seat); box != nullptr) {
      ranks = FindRanks(*box, name_.group, name_.site, execution());
    }
    // Whose process does not run takes no further part, though it has come.
    if (session_->WhereIs(peer.seat, NowNs()).state != "running") {
      ranks.in_call.clear();
    }
    for (std::size_t r = 0; r < members_.num_ranks(); ++r) {
      if (members_.process_of(r) == peer.process) {
        waited_for[r] = true;
        absent[r] = ranks.in_call.count(static_cast<std::int64_t>(r)) == 0;
      }
    }
  }
  const bool is_any_absent = std::find(absent.begin(), absent.end(), true) != absent.end();
  return is_any_absent ? absent : waited_for;
}

std::string Exchange::WaitText(std::int64_t waited_ns, const std::string& why) {
  std::string came;
  std::string missing;
  std::string doing;
  std::size_t num_shown = 0;
  bool are_all_named = true;
  std::vector<std::size_t> seats = {session_->seat()};
  std::vector<RanksThere> there;
  const std::vector<bool> absent = Absent(there);
  const auto add = [](std::string& list, const std::string& text) {
    list += (list.empty() ? "" : ", ") + text;
  };
  for (std::size_t process = 0, i = 0; process < members_.num_processes(); ++process) {
    Peer* const peer = process == members_.mine() ? nullptr : &peers_[i++];
    const bool is_waited_for = lane_ >= 0 && peer != nullptr && !HasReached(*peer);
    if (peer != nullptr && !is_waited_for && peer->lane == nullptr) {
      are_all_named = false;
      continue;
    }
    const std::size_t seat = members_.seat(process);
    const BlackBox* const box = session_->box(seat);
    std::string here;
    std::string late;
    for (std::size_t r = 0; r < members_.num_ranks(); ++r) {
      if (members_.process_of(r) != process) {
        continue;
      }
      add(absent[r] ? late : here, std::to_string(r));
      if (absent[r] && box != nullptr) {
        doing += "\n  rank " + std::to_string(r) + ": " +
                 LastCallOfRank(*box, there[process], static_cast<std::int64_t>(r), NowNs());
      }
    }
    if (!here.empty()) {
      add(came, "rank " + here + " (process " + std::to_string(session_->processes()[seat]) + ")");
    }
    if (!late.empty()) {
      add(missing, "rank " + late + " (" + ProcessText(*session_, seat) + ")");
      seats.push_back(seat);
      if (box != nullptr && ++num_shown <= kMostStacks) {
        doing += PythonText(*box, NowNs());
      }
    }
  }
  if (lane_ < 0) {
    for (const std::size_t seat : session_->Laggards()) {
      add(missing, ProcessText(*session_, seat));
    }
    missing =
        "a free lane" + (missing.empty() ? "" : ": an earlier call is not over for " + missing);
  }
  return names_.Text() + ": waited " + SecondsText(waited_ns) + " for " + missing +
         (steps_.is_end(step_) ? " to read what this process left" : "") + "; arrived: " + came +
         (are_all_named ? "" : " of " + std::to_string(members_.num_ranks())) + "; execution " +
         std::to_string(name_.occurrence) + " of this call" + why + DumpText() + doing +
         ChainText(*session_, seats);
}

}  // namespace jaxcoll
