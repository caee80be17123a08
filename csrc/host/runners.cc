#include "host/runners.h"

#include <pthread.h>  // pthread_setname_np
#include <sched.h>    // sched_getaffinity

#include <algorithm>     // std::max, std::min
#include <chrono>        // std::chrono::nanoseconds
#include <system_error>  // std::system_error
#include <thread>        // std::thread

#include "core/clock.h"
#include "core/denormals.h"

namespace jaxcoll {
namespace {

// A task that stood this long was not reached by a running runner: wake another one for it.
constexpr std::int64_t kOverdueNs = 100'000;
// A continuation longer than this pays for waking a second core (a wake-up costs 5 to 50 us here).
constexpr std::int64_t kLongContinuationNs = 50'000;
// Evidence counts up quickly and decays one task at a time, so that a single preempted thread does
// not turn a chain of small calls into a crowd for long.
constexpr int kEvidence = 16;
constexpr int kMaxEvidence = 64;
// Of calls for which no thread stays, after it was in vain once, and again and again.
constexpr int kLeastRest = 64;
constexpr int kMostRest = 1 << 16;
// The standby stops looking after this many looks at an empty queue.
constexpr int kQuietLooks = 20;
// Blocked runners are bounded by the device programs in flight; this only stops a runaway.
constexpr std::size_t kMaxRunners = 1024;

thread_local bool is_runner = false;

std::size_t CountCores() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) {
    return static_cast<std::size_t>(std::max(1, CPU_COUNT(&set)));
  }
  return std::max(1U, std::thread::hardware_concurrency());
}

void Move(std::atomic<int>& evidence, bool seen) {
  const int value = evidence.load(std::memory_order_relaxed);
  if (seen) {
    evidence.store(std::min(value + kEvidence, kMaxEvidence), std::memory_order_relaxed);
  } else if (value > 0) {
    evidence.store(value - 1, std::memory_order_relaxed);
  }
}

}  // namespace

void Pace::Note(std::int64_t duration_ns, bool overdue) {
  Move(length_, duration_ns > kLongContinuationNs);
  Move(stalls_, overdue);
}

Pace::Kind Pace::kind() const {
  if (stalls_.load(std::memory_order_relaxed) > 0) {
    return Kind::kBlocking;
  }
  return length_.load(std::memory_order_relaxed) > 0 ? Kind::kLong : Kind::kShort;
}

void Pace::NoteComputing(bool long_enough) { Move(computing_, long_enough); }

bool Pace::Stays() {
  if (computing_.load(std::memory_order_relaxed) == 0) {
    return false;
  }
  const int rest = rest_.load(std::memory_order_relaxed);
  if (rest > 0) {
    rest_.store(rest - 1, std::memory_order_relaxed);
  }
  return rest == 0;
}

void Pace::NoteStay(bool came) {
  const int next = next_rest_.load(std::memory_order_relaxed);
  if (!came) {
    rest_.store(std::max(next, kLeastRest), std::memory_order_relaxed);
  }
  next_rest_.store(came ? next / 2 : std::min(2 * std::max(next, kLeastRest), kMostRest),
                   std::memory_order_relaxed);
}

void TaskList::Append(Task& task) {
  task.next_ = nullptr;
  if (tail_ == nullptr) {
    head_ = &task;
  } else {
    tail_->next_ = &task;
  }
  tail_ = &task;
  ++size_;
}

Runners& Runners::Get() {
  static Runners* const runners = new Runners();  // leaked: see the class comment
  return *runners;
}

Runners::Runners() : num_cores_(CountCores()) {
  std::thread([this] { StandbyLoop(); }).detach();
}

bool Runners::IsRunner() { return is_runner; }

void Runners::Reserve(std::size_t count) {
  const std::lock_guard<std::mutex> lock(mutex_);
  while (runners_.size() < std::min(count, kMaxRunners) && AddRunner()) {
  }
}

bool Runners::AddRunner() {
  runners_.push_back(std::make_unique<Runner>());
  Runner& runner = *runners_.back();
  try {
    std::thread([this, &runner] { RunnerLoop(runner); }).detach();
  } catch (const std::system_error&) {  // no more threads: those that exist have to do
    runners_.pop_back();
    return false;
  }
  ++num_woken_;  // it goes to the queue first
  return true;
}

void Runners::Wake(std::size_t count) {
  for (; count > 0 && idle_ != nullptr; --count) {
    Runner& runner = *idle_;
    idle_ = runner.next_idle;
    --num_idle_;
    ++num_woken_;
    runner.woken = true;
    runner.wake.notify_one();
  }
}

void Runners::StartWatch() {
  if (!watching_) {
    watching_ = true;
    standby_.notify_one();
  }
}

void Runners::Resume(const TaskList& programs, Pace& pace) {
  if (programs.head_ == nullptr) {
    return;
  }
  const Pace::Kind kind = pace.kind();
  const std::lock_guard<std::mutex> lock(mutex_);
  Append(programs, &pace);
  std::size_t wanted = 1;
  std::size_t coming = num_woken_;
  if (kind == Pace::Kind::kShort) {
    // A runner that submits comes back to the queue soon, and so does any other.
    coming += is_runner ? 1 : num_busy_;
  } else {
    // This thread goes on with a program of its own, and not for a short time.
    wanted = kind == Pace::Kind::kLong ? num_cores_ - 1 : programs.size_;
  }
  wanted = std::clamp<std::size_t>(wanted, 1, programs.size_);
  if (wanted > coming) {
    Wake(wanted - coming);
  }
  if (programs.size_ > num_woken_) {
    StartWatch();
  }
}

void Runners::Help(const TaskList& helpers) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Append(helpers, nullptr);
  Wake(helpers.size_);
}

void Runners::Start(Task& task) {
  TaskList tasks;
  tasks.Append(task);
  const std::lock_guard<std::mutex> lock(mutex_);
  Append(tasks, nullptr);
  task.waits_ = true;
  if (num_idle_ == 0) {
    StartWatch();  // those that are busy may wait for what this task does
  }
  Wake(1);
}

void Runners::Append(const TaskList& tasks, Pace* pace) {
  if (tasks.head_ == nullptr) {
    return;
  }
  const std::int64_t now_ns = NowNs();
  for (Task* task = tasks.head_; task != nullptr; task = task->next_) {
    task->queued_ns_ = now_ns;
    task->pace_ = pace;
  }
  if (tail_ == nullptr) {
    head_ = tasks.head_;
  } else {
    tail_->next_ = tasks.head_;
  }
  tail_ = tasks.tail_;
}

void Runners::RunnerLoop(Runner& self) {
  is_runner = true;
  pthread_setname_np(pthread_self(), "jaxcoll-runner");
  FlushDenormalsOnThisThread();
  std::unique_lock<std::mutex> lock(mutex_);
  --num_woken_;
  for (;;) {
    while (head_ == nullptr) {
      self.woken = false;
      self.next_idle = idle_;
      idle_ = &self;
      ++num_idle_;
      self.wake.wait(lock, [&self] { return self.woken; });
      --num_woken_;
    }
    Task* const task = head_;
    head_ = task->next_;
    if (head_ == nullptr) {
      tail_ = nullptr;
    } else {
      StartWatch();
    }
    const bool is_busy = !task->waits_;
    num_busy_ += is_busy ? 1 : 0;
    lock.unlock();

    Pace* const pace = task->pace_;
    const std::int64_t start_ns = NowNs();
    const bool overdue = start_ns - task->queued_ns_ > kOverdueNs;
    task->Run();  // the task may be gone, or queued again, from here on
    if (pace != nullptr) {
      pace->Note(NowNs() - start_ns, overdue);
    }

    lock.lock();
    num_busy_ -= is_busy ? 1 : 0;
  }
}

void Runners::StandbyLoop() {
  pthread_setname_np(pthread_self(), "jaxcoll-standby");
  std::unique_lock<std::mutex> lock(mutex_);
  int quiet_looks = 0;
  for (;;) {
    standby_.wait(lock, [this] { return watching_; });
    standby_.wait_for(lock, std::chrono::nanoseconds(kOverdueNs));
    if (head_ == nullptr) {
      if (++quiet_looks >= kQuietLooks) {
        quiet_looks = 0;
        watching_ = false;
      }
      continue;
    }
    quiet_looks = 0;
    const std::int64_t before = NowNs() - kOverdueNs;
    std::size_t num_overdue = 0;
    for (const Task* task = head_; task != nullptr && task->queued_ns_ <= before;
         task = task->next_) {
      ++num_overdue;
    }
    if (num_overdue > num_woken_) {
      Wake(num_overdue - num_woken_);
      while (num_overdue > num_woken_ && runners_.size() < kMaxRunners && AddRunner()) {
      }
    }
  }
}

}  // namespace jaxcoll
