// host/runners.h: the threads on which waiting programs resume and large moves get help.
//
// A program that waits at a meeting is resumed by completing its Future, and the rest of that
// device's program then runs on the completing thread. So completions never happen inside a handler
// (that would run one device's program on another's stack, where a blocking XLA collective
// deadlocks) but on runners, from one queue. Three cases want three behaviours:
//
//   short continuations   one runner drains the queue: a chain of small collectives of p devices
//                         then needs no thread switch at all;
//   long continuations    a runner for each core but this thread's takes part;
//   blocking ones         (an XLA collective follows) every waiting program needs a thread.
//
// Where programs compute much longer between calls than these take, a thread of XLA that comes to
// wait had better stay: one that goes back to XLA's pool looks around there for more work, for 25
// us each time (Eigen's threads spin), which is taken from those that compute; and what a program
// leaves to the pool goes there faster from a thread of it. It stays for a moment only, as others
// may need the thread, and seldom where that was in vain before.
//
// Each call site learns which it is: its Pace counts how its continuations behaved lately. Until it
// has learnt, a standby thread looks at the queue every kOverdueNs while there is work, and wakes a
// runner for every task that stood too long. Tasks never wait for one another.
#pragma once

#include <atomic>              // std::atomic
#include <condition_variable>  // std::condition_variable
#include <cstddef>             // std::size_t
#include <cstdint>             // std::int64_t
#include <memory>              // std::unique_ptr
#include <mutex>               // std::mutex
#include <vector>              // std::vector

namespace jaxcoll {

/// What one call site has taught about the work that its tasks start. Written by runners with
/// relaxed atomics: it only steers wake-ups.
class Pace {
 public:
  /// Notes one finished task: how long it ran and whether it stood in the queue too long before.
  void Note(std::int64_t duration_ns, bool overdue);

  enum class Kind { kShort, kLong, kBlocking };
  [[nodiscard]] Kind kind() const;

  /// Notes whether a program computed for long after the call, before its next one.
  void NoteComputing(bool long_enough);

  /// Whether a thread that comes to wait should stay, for kStayNs at most.
  [[nodiscard]] bool Stays();
  /// Notes whether what it waited for came meanwhile.
  void NoteStay(bool came);

 private:
  std::atomic<int> length_{0};     // > 0: continuations were long lately
  std::atomic<int> stalls_{0};     // > 0: tasks had to be taken over lately
  std::atomic<int> computing_{0};  // > 0: there was much to compute lately
  std::atomic<int> rest_{0};       // so many don't stay
  std::atomic<int> next_rest_{0};
};

/// For how long a thread stays: longer than devices that share cores compute between two calls.
inline constexpr std::int64_t kStayNs = 20'000'000;

/// Something to run once on a runner. Intrusive: the queue allocates nothing. The owner keeps it
/// alive until Run() is entered; the queue does not touch it after that.
class Task {
 public:
  Task(const Task&) = delete;
  Task& operator=(const Task&) = delete;
  virtual void Run() = 0;

 protected:
  Task() = default;
  ~Task() = default;

 private:
  friend class TaskList;
  friend class Runners;
  Task* next_ = nullptr;
  Pace* pace_ = nullptr;
  std::int64_t queued_ns_ = 0;
  bool waits_ = false;  // it may stand in Run() for long, so that its runner is none to count on
};

/// A chain of tasks under construction.
class TaskList {
 public:
  void Append(Task& task);
  [[nodiscard]] std::size_t size() const { return size_; }

 private:
  friend class Runners;
  Task* head_ = nullptr;
  Task* tail_ = nullptr;
  std::size_t size_ = 0;
};

/// The process's runners. One instance, created on first use and never destroyed: its threads may
/// stand in XLA's code when the process exits. All methods may be called from any thread.
class Runners {
 public:
  static Runners& Get();

  /// Whether the calling thread is one of them.
  static bool IsRunner();

  /// Makes at least `count` runners exist.
  void Reserve(std::size_t count);

  /// Queues programs to resume, in order, and wakes as many runners as `pace` suggests.
  void Resume(const TaskList& programs, Pace& pace);

  /// Queues help for a move in progress: one runner for each task, if one is free.
  void Help(const TaskList& helpers);

  /// Queues a task that must run, and may wait in there for long.
  void Start(Task& task);

  /// As many cores as this process may run on.
  [[nodiscard]] std::size_t num_cores() const { return num_cores_; }

 private:
  struct Runner {
    std::condition_variable wake;
    bool woken = false;
    Runner* next_idle = nullptr;
  };

  Runners();
  void Append(const TaskList& tasks, Pace* pace);  // requires mutex_
  bool AddRunner();              // requires mutex_; false where no thread can be had
  void Wake(std::size_t count);  // requires mutex_
  void StartWatch();             // requires mutex_
  void RunnerLoop(Runner& self);
  void StandbyLoop();

  const std::size_t num_cores_;
  std::mutex mutex_;  // guards everything below
  std::vector<std::unique_ptr<Runner>> runners_;
  Task* head_ = nullptr;
  Task* tail_ = nullptr;
  Runner* idle_ = nullptr;  // last in, first out: the hottest runner is woken first
  std::size_t num_idle_ = 0;
  std::size_t num_woken_ = 0;  // woken, and not yet at the queue
  std::size_t num_busy_ = 0;   // inside Task::Run
  bool watching_ = false;
  std::condition_variable standby_;
};

}  // namespace jaxcoll
