#include "host/meeting.h"

#include <sched.h>  // sched_yield

#include <algorithm>  // std::max, std::min
#include <chrono>     // std::chrono::nanoseconds
#include <string>     // std::to_string
#include <utility>    // std::exchange, std::move

#include "core/clock.h"
#include "core/quick_clock.h"
#include "host/call_site.h"
#include "host/exchange.h"
#include "host/watchdog.h"
#include "host/witness.h"

namespace jaxcoll {
namespace {

// Moves smaller than this are done by the last rank alone: at 30 to 50 GB/s they take less time
// than waking a helper does.
constexpr std::size_t kHelpBytes = std::size_t{512} * 1024;
// Of Meeting::chunks_; memory for 2**32 chunks there is nowhere.
constexpr unsigned kReadyShift = 32;
constexpr std::uint64_t kNextChunk = (std::uint64_t{1} << kReadyShift) - 1;

// How long a rank that has run chunks looks for the end of those that still run, before its program
// waits: about as long as waking a runner for it takes.
constexpr std::int64_t kChunkEndNs = 50'000;

// Programs compute for long between calls if it is this long, and so many times as long as the call
// moves data: where they hardly do more than that, the threads that move have it in their caches.
constexpr std::int64_t kLongNs = 50'000;
constexpr std::int64_t kLongMoves = 4;

std::shared_ptr<const Status> Share(Status status) {
  return std::make_shared<const Status>(std::move(status));
}

// Meetings of one process have numbers of their own for their calls.
std::int64_t FirstExecution() {
  constexpr unsigned kCallBits = 40;
  static std::atomic<std::int64_t> meetings{0};
  return (meetings.fetch_add(1, std::memory_order_relaxed) << kCallBits) + 1;
}

std::size_t CountHelpers(const Work& work, std::size_t num_ranks, std::size_t num_chunks) {
  if (num_chunks < 2 || work.bytes_moved(num_ranks) < kHelpBytes) {
    return 0;
  }
  return std::min(num_chunks, Runners::Get().num_cores()) - 1;
}

}  // namespace

thread_local Meeting::GoingOn Meeting::going_on;

Meeting::Meeting(CallSite& site, std::size_t num_ranks, std::unique_ptr<Exchange> exchange)
    : site_(site),
      num_ranks_(num_ranks),
      exchange_(std::move(exchange)),
      num_chunks_(exchange_ != nullptr ? 0 : site.work().num_chunks(num_ranks)),
      num_helpers_(CountHelpers(site.work(), num_ranks, num_chunks_)),
      starts_early_(num_chunks_ > 0 && site.work().starts_early()),
      first_execution_(FirstExecution()),
      ranks_(num_ranks),
      operands_(site.work().num_operands() * num_ranks),
      results_(site.work().num_results() * num_ranks),
      arrivals_(starts_early_ ? num_ranks : 0),
      counters_(starts_early_ ? site.work().num_counters(num_ranks) : 0),
      helpers_(num_helpers_),
      continuation_(*this) {
  for (Rank& rank : ranks_) {
    rank.operands.Reset(site.work().num_operands());
    rank.results.Reset(site.work().num_results());
  }
  for (Help& helper : helpers_) {
    helper.meeting = this;
  }
  if (exchange_ != nullptr) {
    exchange_->Bind(buffers());
  }
}

Meeting::~Meeting() = default;

void Meeting::AddTo(Footprint& footprint, std::size_t rank) const {
  if (exchange_ != nullptr) {
    exchange_->AddTo(footprint);
  }
  footprint.Add(this, sizeof(*this));
  if (num_ranks_ > 1) {  // else it lies within
    footprint.Add(&ranks_[rank], sizeof(Rank));
  }
}

Arrival Meeting::Arrive(const Key& key, std::size_t rank, std::int64_t now_ns,
                        Recorder::Entry& entry, WaiterFactory& factory) {
  if (auto failure = Watchdog::Get().FailureOf(key.run); failure != nullptr) {
    return {Answer::kFailed, std::move(failure)};
  }
  if (Pace* const pace = std::exchange(going_on.pace, nullptr); pace != nullptr) {
    pace->NoteComputing(key.run == going_on.run && now_ns - going_on.since_ns > going_on.long_ns);
  }
  Rank& me = ranks_[rank];
  std::uint64_t num_done_before = 0;
  std::size_t num_helpers = 0;
  {
    std::unique_lock<SpinLock> lock(mutex_);
    if ((state_ == State::kDone || !(key_ == key)) && !Open(key, now_ns, lock)) {
      // The run may have failed since this rank asked.
      auto failure = Watchdog::Get().FailureOf(key.run);
      return {Answer::kFailed,
              failure != nullptr
                  ? std::move(failure)
                  : Share(Internal("two executions of one call overlap: run " +
                                   std::to_string(key_.run) + " iteration " +
                                   std::to_string(key_.iteration) + " is not over and run " +
                                   std::to_string(key.run) + " iteration " +
                                   std::to_string(key.iteration) + " begins"))};
    }
    if (state_ == State::kFailed || state_ == State::kFailing) {
      return {Answer::kFailed, failure_};
    }
    if (exchange_ != nullptr && state_ == State::kOpen && exchange_->HasFailed()) {
      auto failure = exchange_->Failure();
      Watchdog::Get().FailRun(key.run, failure);  // see Fail
      FailOpenCall(failure);
      return {Answer::kFailed, std::move(failure)};
    }
    if (me.arrived) {
      return {Answer::kFailed,
              Share(Internal("rank " + std::to_string(rank) + " came twice to one meeting"))};
    }
    me.arrived = true;
    me.resumption.entry = &entry;
    for (std::size_t i = 0; i < me.operands.size(); ++i) {
      operands_[i * num_ranks_ + rank] = me.operands[i];
    }
    for (std::size_t i = 0; i < me.results.size(); ++i) {
      results_[i * num_ranks_ + rank] = me.results[i];
    }
    // Ranks read the clock before they get here, not always in this order.
    opened_ns_ = std::min(opened_ns_, now_ns);
    met_ns_ = std::max(met_ns_, now_ns);
    entry.Set(Moment::kOpened, opened_ns_);
    entry.execution.store(execution_, std::memory_order_relaxed);
    const bool is_last = ++num_arrived_ == num_ranks_;
    state_ = is_last ? State::kMoving : State::kOpen;
    num_done_before = num_done_;
    bool takes_part = is_last;
    num_helpers = is_last ? num_helpers_ : 0;
    if (starts_early_) {
      arrivals_[num_arrived_ - 1] = rank;
      AddReadyChunks();
      const std::size_t num_cores = Runners::Get().num_cores();
      takes_part = num_at_work_ < num_cores;
      num_at_work_ += takes_part ? 1 : 0;
      num_helpers = std::min(num_helpers, num_cores - num_at_work_);
    }
    if (!takes_part) {
      return Wait(me, num_done_before, entry, factory, lock);
    }
  }

  if (exchange_ != nullptr) {
    return BeginExchange(me, entry, factory);
  }
  if (starts_early_) {
    if (num_helpers > 0) {
      CallHelpers(num_helpers);
    }
    return TakePart(me, num_done_before, entry, factory);
  }
  // This is the last rank: everything below is its own until Finish or until chunks are handed out.
  if (num_helpers == 0) {
    for (std::size_t chunk = 0; chunk < num_chunks_; ++chunk) {
      site_.work().Run(chunk, buffers());
    }
    entry.Set(Moment::kResumed, Finish());
    return {Answer::kReady, nullptr};
  }
  num_unfinished_.store(num_chunks_, std::memory_order_relaxed);
  chunks_.store(std::uint64_t{num_chunks_} << kReadyShift, std::memory_order_release);
  CallHelpers(num_helpers);
  return TakePart(me, num_done_before, entry, factory);
}

void Meeting::AddReadyChunks() {
  const std::uint64_t ready = site_.work().num_ready(arrivals_.data(), num_arrived_, num_ranks_);
  const std::uint64_t before = chunks_.load(std::memory_order_relaxed) >> kReadyShift;
  chunks_.fetch_add((ready - before) << kReadyShift, std::memory_order_release);
}

void Meeting::CallHelpers(std::size_t count) {
  TaskList help;
  for (std::size_t i = 0; i < count; ++i) {
    if (!helpers_[i].queued.exchange(true, std::memory_order_acq_rel)) {
      site_.Ref();
      help.Append(helpers_[i]);
    }
  }
  Runners::Get().Help(help);
}

Arrival Meeting::TakePart(Rank& me, std::uint64_t num_done_before, Recorder::Entry& entry,
                          WaiterFactory& factory) {
  for (;;) {
    if (RunChunks()) {
      Finish();
    } else if (starts_early_) {
      LookForEnd();
    }
    std::unique_lock<SpinLock> lock(mutex_);
    if (starts_early_) {
      if (AreChunksReady()) {  // since a rank came that found enough others at work
        continue;
      }
      --num_at_work_;
    }
    return Wait(me, num_done_before, entry, factory, lock);
  }
}

Arrival Meeting::Wait(Rank& me, std::uint64_t num_done_before, Recorder::Entry& entry,
                      WaiterFactory& factory, std::unique_lock<SpinLock>& lock) {
  // Not state_: the next call may be open already.
  const auto is_done = [this, num_done_before] { return num_done_ != num_done_before; };
  if (!is_done() && factory.may_stay() && !Runners::IsRunner() && site_.pace().Stays()) {
    const std::int64_t run = key_.run;  // which may be another one in the end
    ++num_staying_;
    const bool came = ended_.wait_for(lock, std::chrono::nanoseconds(kStayNs), is_done);
    --num_staying_;
    site_.pace().NoteStay(came);
    going_on = {came ? &site_.pace() : nullptr, run, NowNs(), long_ns_};
  }
  if (is_done()) {
    entry.Set(Moment::kResumed, NowNs());
    std::shared_ptr<const Status> failure = std::move(me.resumption.failure);
    return {failure == nullptr ? Answer::kReady : Answer::kFailed, std::move(failure)};
  }
  me.resumption.waiter = factory.Make();
  me.waits = true;
  return {Answer::kWaits, nullptr};
}

Arrival Meeting::BeginExchange(Rank& me, Recorder::Entry& entry, WaiterFactory& factory) {
  const Patience patience = factory.patience();
  Exchange::Progress progress = exchange_->Begin(/*spins=*/patience != Patience::kReturns);
  if (exchange_->execution() != execution_) {  // another meeting of the same site came before
    for (Rank& rank : ranks_) {
      rank.resumption.entry->execution.store(exchange_->execution(), std::memory_order_relaxed);
    }
  }
  if (progress == Exchange::Progress::kWaits && patience == Patience::kWaits) {
    progress = exchange_->Finish();
  }
  switch (progress) {
    case Exchange::Progress::kDone:
      entry.Set(Moment::kResumed, Finish());
      return {Answer::kReady, nullptr};
    case Exchange::Progress::kFailed: {
      std::shared_ptr<const Status> failure = exchange_->Failure();
      Finish(failure);
      return {Answer::kFailed, std::move(failure)};
    }
    case Exchange::Progress::kWaits:
      break;
  }
  const Waiter waiter = factory.Make();
  {
    const std::lock_guard<SpinLock> lock(mutex_);
    me.resumption.waiter = waiter;
    me.waits = true;
  }
  site_.Ref();
  if (patience == Patience::kReturns && exchange_->IsLeft()) {
    is_left_.store(true, std::memory_order_relaxed);
  } else {
    Runners::Get().Start(continuation_);
  }
  return {Answer::kWaits, nullptr};
}

void Meeting::Continue() {
  if (is_left_.exchange(false, std::memory_order_relaxed)) {
    continuation_.Run();
  }
}

void Meeting::Continuation::Run() {
  Meeting& meeting = meeting_;
  CallSite& site = meeting.site_;
  const bool is_done = meeting.exchange_->Finish() == Exchange::Progress::kDone;
  meeting.Finish(is_done ? nullptr : meeting.exchange_->Failure());
  site.Unref();
}

std::shared_ptr<const Status> Meeting::JobFailure() {
  const std::lock_guard<SpinLock> lock(mutex_);
  return exchange_ == nullptr || state_ != State::kOpen ? nullptr : exchange_->Failure();
}

bool Meeting::Open(const Key& key, std::int64_t now_ns, std::unique_lock<SpinLock>& lock) {
  while (state_ != State::kDone && state_ != State::kFailed) {
    if (state_ == State::kFailing) {  // as long as its chunks take
      ended_.wait(lock, [this] { return state_ != State::kFailing; });
      if (key_ == key) {  // another rank has opened it meanwhile
        return true;
      }
      continue;
    }
    auto failure = state_ == State::kOpen ? Watchdog::Get().FailureOf(key_.run) : nullptr;
    if (failure == nullptr) {
      return false;
    }
    FailOpenCall(std::move(failure));
  }
  if (exchange_ != nullptr) {
    exchange_->Prepare();
  }
  epoch_ = site_.epoch();
  key_ = key;
  execution_ = exchange_ != nullptr ? exchange_->NextExecution()
                                    : -(first_execution_ + static_cast<std::int64_t>(num_done_));
  state_ = State::kOpen;
  opened_ns_ = now_ns;
  met_ns_ = now_ns;
  num_arrived_ = 0;
  failure_ = nullptr;
  for (Rank& rank : ranks_) {
    rank.arrived = false;
    rank.waits = false;
  }
  if (starts_early_) {
    for (std::atomic<int>& counter : counters_) {
      counter.store(0, std::memory_order_relaxed);
    }
    num_unfinished_.store(num_chunks_, std::memory_order_relaxed);
    chunks_.store(0, std::memory_order_relaxed);
  }
  return true;
}

bool Meeting::RunChunks() {
  std::size_t chunk = 0;
  while (TakeChunk(chunk)) {
    site_.work().Run(chunk, buffers());
    if (num_unfinished_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
      return true;
    }
  }
  return false;
}

bool Meeting::TakeChunk(std::size_t& chunk) {
  std::uint64_t chunks = chunks_.load(std::memory_order_relaxed);
  do {
    chunk = chunks & kNextChunk;
    if (chunk >= chunks >> kReadyShift) {
      return false;
    }
  } while (!chunks_.compare_exchange_weak(chunks, chunks + 1, std::memory_order_acq_rel,
                                          std::memory_order_relaxed));
  return true;
}

bool Meeting::AreChunksReady() const {
  const std::uint64_t chunks = chunks_.load(std::memory_order_relaxed);
  return (chunks & kNextChunk) < chunks >> kReadyShift;
}

void Meeting::LookForEnd() const {
  if ((chunks_.load(std::memory_order_relaxed) & kNextChunk) < num_chunks_) {
    return;  // a rank is missing
  }
  const std::int64_t until_ns = NowNs() + kChunkEndNs;
  while (num_unfinished_.load(std::memory_order_relaxed) > 0 && NowNs() < until_ns) {
    sched_yield();
  }
}

std::int64_t Meeting::Finish(std::shared_ptr<const Status> failure) {
  std::int64_t now_ns = QuickNowNs();
  TaskList resumptions;
  if (failure != nullptr) {  // before any rank learns of it, see Fail
    Watchdog::Get().FailRun(key_.run, failure);
  }
  {
    const std::lock_guard<SpinLock> lock(mutex_);
    if (state_ == State::kFailing) {
      EndFailedCall();
      return now_ns;
    }
    now_ns = std::max(now_ns, met_ns_);  // which another thread has read
    long_ns_ = std::max(kLongNs, kLongMoves * (now_ns - met_ns_));
    state_ = failure == nullptr ? State::kDone : State::kFailed;
    failure_ = std::move(failure);
    ++num_done_;
    for (Rank& rank : ranks_) {
      rank.resumption.entry->Set(Moment::kOpened, opened_ns_);
      rank.resumption.entry->Set(Moment::kMet, met_ns_);
      if (failure_ == nullptr) {
        rank.resumption.entry->Set(Moment::kMoved, now_ns);
      }
    }
    Collect(resumptions);
    if (num_staying_ > 0) {
      ended_.notify_all();
    }
  }
  Runners::Get().Resume(resumptions, site_.pace());
  return now_ns;
}

void Meeting::ShowLeft(std::int64_t now_ns) {
  const std::lock_guard<SpinLock> lock(mutex_);
  if (exchange_ != nullptr && num_done_ > 0) {  // Prepare comes before the first call
    exchange_->ShowLeft(now_ns);
  }
}

bool Meeting::IsUnderWay(Call& call) {
  const std::lock_guard<SpinLock> lock(mutex_);
  if (state_ != State::kOpen && state_ != State::kMoving) {
    return false;
  }
  call.is_complete = state_ == State::kMoving;
  call.key = key_;
  call.opened_ns = opened_ns_;
  call.epoch = epoch_;
  call.arrived.resize(num_ranks_);
  for (std::size_t r = 0; r < num_ranks_; ++r) {
    call.arrived[r] = ranks_[r].arrived;
  }
  return true;
}

bool Meeting::Fail(const Key& key, const std::shared_ptr<const Status>& failure) {
  const std::lock_guard<SpinLock> lock(mutex_);
  if (state_ != State::kOpen || !(key_ == key)) {
    return false;
  }
  // Before any rank learns of it: the next run may begin, and a late rank of this one must be told.
  Watchdog::Get().FailRun(key.run, failure);
  if (exchange_ != nullptr) {
    exchange_->Fail(*failure);
  }
  FailOpenCall(failure);
  return true;
}

void Meeting::FailOpenCall(std::shared_ptr<const Status> failure) {
  failure_ = std::move(failure);
  if (starts_early_) {  // no chunk is begun any more, but some may run
    const std::size_t begun = chunks_.exchange(0, std::memory_order_acq_rel) & kNextChunk;
    const std::size_t others = num_chunks_ - begun;
    if (num_unfinished_.fetch_sub(others, std::memory_order_acq_rel) != others) {
      state_ = State::kFailing;
      return;
    }
  }
  EndFailedCall();
}

void Meeting::EndFailedCall() {
  state_ = State::kFailed;
  ++num_done_;
  TaskList resumptions;
  Collect(resumptions);
  ended_.notify_all();
  Runners::Get().Resume(resumptions, site_.pace());
}

void Meeting::Collect(TaskList& resumptions) {
  for (Rank& rank : ranks_) {
    if (rank.arrived && rank.resumption.failure != failure_) {
      rank.resumption.failure = failure_;  // a rank that does not wait looks here
    }
    if (rank.waits) {
      rank.waits = false;
      rank.resumption.next = {&site_.pace(), key_.run, 0, long_ns_};
      if (rank.resumption.waiter.is_brief) {
        rank.resumption.Run();
      } else {
        resumptions.Append(rank.resumption);
      }
    }
  }
}

void Meeting::Resumption::Run() {
  // The program that goes on here may come back to this very object before `resume` returns.
  const Waiter resumed = waiter;
  const std::shared_ptr<const Status> cause = std::move(failure);
  const std::int64_t now_ns = NowNs();
  entry->Set(Moment::kResumed, now_ns);
  if (cause != nullptr && !resumed.is_brief) {
    Witness::Get().AwaitLook();
  }
  going_on = next;
  going_on.since_ns = now_ns;
  resumed.resume(resumed, cause.get());
  if (Pace* const ended = std::exchange(going_on.pace, nullptr); ended != nullptr) {
    ended->NoteComputing(NowNs() - now_ns > going_on.long_ns);
  }
}

void Meeting::Help::Run() {
  queued.store(false, std::memory_order_release);
  CallSite& site = meeting->site_;
  if (meeting->RunChunks()) {
    meeting->Finish();
  }
  site.Unref();
}

}  // namespace jaxcoll
