// tests/cpp/forks_test.cc: ranks in processes of their own, forked from this one, which has no
// thread and only waits: programs drawn by chance, and processes that are killed, stopped or leave.
#include <fcntl.h>      // open
#include <sys/prctl.h>  // prctl
#include <sys/wait.h>   // waitpid
#include <unistd.h>     // alarm, close, fork, _exit

#include <algorithm>     // std::any_of, std::max_element, std::min, std::shuffle
#include <cerrno>        // errno
#include <chrono>        // std::chrono::microseconds
#include <csignal>       // kill, SIGCONT, SIGKILL, SIGSTOP
#include <cstddef>       // std::size_t
#include <cstdint>       // std::int64_t, std::uint64_t
#include <cstdio>        // std::fflush, std::printf
#include <filesystem>    // std::filesystem::directory_iterator, std::filesystem::read_symlink
#include <functional>    // std::function
#include <map>           // std::map
#include <memory>        // std::make_shared, std::make_unique, std::shared_ptr, std::unique_ptr
#include <mutex>         // std::mutex
#include <numeric>       // std::iota
#include <string>        // std::string, std::to_string
#include <system_error>  // std::error_code
#include <thread>        // std::this_thread
#include <utility>       // std::move
#include <vector>        // std::vector

#include "core/clock.h"
#include "failures.h"
#include "host/black_box.h"
#include "host/job.h"
#include "host/recorder.h"
#include "host/segment.h"
#include "host/watchdog.h"
#include "ops.h"
#include "processes.h"
#include "ranks.h"
#include "testing.h"

namespace jaxcoll::testing::forks_test {
namespace {

constexpr std::int64_t kMs = 1'000'000;
constexpr unsigned kAlarmS = 50;  // ends a process that hangs

enum : int { kOk = 0, kWrong = 1, kFailed = 7 };  // exit codes

/// Processes with the ranks `process_of`, which run programs together.
struct Team {
  Places process_of;
  std::size_t num_lanes = 6;
  std::size_t window_bytes = 16 * 1024;
  std::size_t max_bytes = 100 * 1024;  // of a buffer
  bool has_groups = true;              // else all ranks take part in all calls
  std::int64_t timeout_ns = -1;
  std::uint64_t seed = 1;
};

std::size_t NumProcesses(const Team& team) {
  return *std::max_element(team.process_of.begin(), team.process_of.end()) + 1;
}

/// A site of the program that all processes draw alike, with the call sites of this one.
struct DrawnSite {
  Op op;
  Groups groups;
  Site site;
};

DrawnSite DrawSite(const Team& team, Random& random, std::uint64_t id) {
  const std::size_t num_ranks = team.process_of.size();
  std::vector<std::size_t> sizes{num_ranks};
  for (std::size_t size = 2; size < num_ranks && team.has_groups; ++size) {
    if (num_ranks % size == 0) {
      sizes.push_back(size);
    }
  }
  const std::size_t size = sizes[Below(random, sizes.size())];
  std::vector<std::int64_t> ids(num_ranks);
  std::iota(ids.begin(), ids.end(), std::int64_t{0});
  std::shuffle(ids.begin(), ids.end(), random);
  DrawnSite drawn{.op = DrawOp(random, size, team.max_bytes), .groups = {}, .site = nullptr};
  for (std::size_t i = 0; i < num_ranks; i += size) {
    const auto first = ids.begin() + static_cast<std::ptrdiff_t>(i);
    drawn.groups.emplace_back(first, first + static_cast<std::ptrdiff_t>(size));
  }
  const Placement placement = PlacementOf(Job::Get(), drawn.groups, team.process_of);
  Check(CallSite::Problem(placement).empty(), CallSite::Problem(placement));
  DescribeSite(id, "call " + std::to_string(id));
  drawn.site = Site(new CallSite(id, drawn.groups, drawn.op.make(), placement));
  return drawn;
}

/// The first error of this process's ranks.
class FirstError {
 public:
  void Set(const std::string& text) {
    const std::lock_guard<std::mutex> lock(mutex_);
    text_ = text_.empty() ? text : text_;
  }
  std::string text() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return text_;
  }

 private:
  mutable std::mutex mutex_;
  std::string text_;
};

/// The black box of a process, as others find it; null where it has none yet.
std::shared_ptr<const BlackBox> BoxOf(std::int64_t pid) {
  std::error_code error;
  const std::string files = "/proc/" + std::to_string(pid) + "/fd";
  for (const auto& file : std::filesystem::directory_iterator(files, error)) {
    const std::string target = std::filesystem::read_symlink(file.path(), error).string();
    if (target.find("jaxcoll-black-box") == std::string::npos) {
      continue;
    }
    const int memory = open(file.path().c_str(), O_RDWR | O_CLOEXEC);
    std::shared_ptr<const BlackBox> box = BlackBox::Map(memory);
    close(memory);
    return box;
  }
  return nullptr;
}

/// Has the session read what the other processes tell about themselves, which takes until all have
/// sat down.
void ObserveOthers(Session& session) {
  for (std::size_t seat = 0; seat < session.processes().size(); ++seat) {
    if (seat == session.seat()) {
      continue;
    }
    std::shared_ptr<const BlackBox> box;
    for (int i = 0; i < 5000 && box == nullptr; ++i) {
      SleepMs(1);
      box = BoxOf(session.segment().seat(seat).pid.load(std::memory_order_acquire));
    }
    session.Observe(seat, std::move(box));
  }
}

/// What a process did last, as texts say it, by device.
std::vector<std::string> LastCalls(const BlackBox& box) {
  std::map<std::int64_t, CallRecord> last;
  const auto end = [](const CallRecord& record) {
    return record.moments_ns[static_cast<std::size_t>(Moment::kResumed)];
  };
  for (const CallRecord& record : RecordsIn(box)) {
    if (end(record) > end(last[record.device])) {
      last[record.device] = record;
    }
  }
  std::vector<std::string> texts;
  for (const auto& [device, record] : last) {
    if (end(record) > 0) {
      texts.push_back(" s ago: call " + std::to_string(record.site) + " (call " +
                      std::to_string(record.sequence) + " of device " + std::to_string(device) +
                      ")");
    }
  }
  return texts;
}

/// What one process does: calls drawn by chance until `num_calls` are over or one fails. Returns
/// the exit code; `error` gets the cause.
int RunProgram(const Team& team, std::size_t process, int memory, std::size_t num_calls,
               std::string& error) {
  constexpr std::size_t kBatch = 16;
  const auto segment = std::make_shared<Segment>();
  Status status = segment->Map(memory, team.seed);
  std::vector<std::int64_t> seats(NumProcesses(team));
  std::iota(seats.begin(), seats.end(), kFirstProcess);
  std::shared_ptr<Session> session;
  BlackBox::Get();  // which others find once this process has sat down
  if (status.ok()) {
    status = Session::Begin(segment, seats, seats[process], session);
  }
  if (!status.ok()) {
    error = status.message;
    return kWrong;
  }
  ObserveOthers(*session);
  Job::Get().Attach(session);
  Watchdog::Get().SetTimeout(team.timeout_ns);

  Random random(team.seed);  // draws the same in all processes
  std::vector<DrawnSite> sites;
  for (std::uint64_t id = 1; id <= 14; ++id) {
    sites.push_back(DrawSite(team, random, id));
  }
  Context context;
  FirstError first;
  for (std::size_t done = 0; done < num_calls && first.text().empty(); done += kBatch) {
    struct DrawnCall {
      std::size_t site;
      std::vector<std::unique_ptr<CallData>> data;  // by group
    };
    std::vector<DrawnCall> calls(kBatch);
    for (DrawnCall& call : calls) {
      call.site = Below(random, sites.size());
      const DrawnSite& site = sites[call.site];
      for (std::size_t g = 0; g < site.groups.size(); ++g) {
        const std::uint64_t seed = random();
        const std::vector<std::int64_t>& group = site.groups[g];
        call.data.push_back(
            std::any_of(group.begin(), group.end(),
                        [&](std::int64_t id) { return team.process_of[id] == process; })
                ? std::make_unique<CallData>(site.op, group.size(), seed)
                : nullptr);
      }
    }
    const auto program = [&](std::size_t id, std::uint64_t seed) -> Program {
      Random mine(seed);
      for (const DrawnCall& call : calls) {
        if (Below(mine, 30) == 0) {
          std::this_thread::sleep_for(std::chrono::microseconds(Below(mine, 2000)));
        }
        const DrawnSite& site = sites[call.site];
        for (std::size_t g = 0; g < site.groups.size(); ++g) {
          for (std::size_t rank = 0; rank < site.groups[g].size(); ++rank) {
            if (site.groups[g][rank] != static_cast<std::int64_t>(id)) {
              continue;
            }
            const CallData& data = *call.data[g];
            const std::int64_t begun_ns = NowNs();
            const CallResult result = co_await Call(*site.site, id, static_cast<std::int64_t>(done),
                                                    data.operands(rank), data.results(rank));
            if (!result.ok) {
              const std::int64_t took_ms = (NowNs() - begun_ns) / kMs;
              first.Set(result.error + " [after " + std::to_string(took_ms) + " ms]");
              Check(took_ms < 2000, "it fails soon");
              co_return;
            }
            Check(data.Problem(rank).empty(), [&] { return data.Problem(rank); });
          }
        }
      }
    };
    std::vector<std::size_t> mine;
    for (std::size_t id = 0; id < team.process_of.size(); ++id) {
      if (team.process_of[id] == process) {
        mine.push_back(id);
      }
    }
    RunThreads(context, mine.size(), [&](std::size_t i) {
      program(mine[i], team.seed * 1000 + done * 10 + mine[i]).Start();
    });
    if (context.failures() > 0) {
      return kWrong;
    }
  }
  error = first.text();
  return error.empty() ? kOk : kFailed;
}

/// A child of this process.
struct Child {
  pid_t pid;
  int report;  // a pipe, on which it says why it failed
};

using Body = std::function<int(std::size_t process, int memory, std::string& error)>;

std::vector<Child> Fork(Context& context, const Team& team, const Body& body) {
  int memory = -1;
  const Status status = CreateSegment({.num_seats = NumProcesses(team),
                                       .num_lanes = team.num_lanes,
                                       .window_bytes = team.window_bytes},
                                      team.seed, memory);
  std::vector<Child> children;
  if (!context.Expect(status.ok(), status.message)) {
    return children;
  }
  std::fflush(stdout);
  const pid_t parent = getpid();
  for (std::size_t process = 0; process < NumProcesses(team); ++process) {
    int ends[2];
    if (!context.Expect(pipe(ends) == 0, "a pipe")) {
      break;
    }
    const pid_t pid = fork();
    if (pid == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      alarm(getppid() == parent ? kAlarmS : 1);
      std::string error;
      const int code = body(process, memory, error);
      std::fflush(stdout);
      static_cast<void>(!write(ends[1], error.data(), std::min<std::size_t>(error.size(), 4000)));
      _exit(code);  // runners may still be at work
    }
    close(ends[1]);
    children.push_back({.pid = pid, .report = ends[0]});
  }
  close(memory);
  return children;
}

/// The black box of a child that has ended some calls.
std::shared_ptr<const BlackBox> BoxAtWork(Context& context, const Child& child) {
  constexpr std::uint64_t kSome = 30;
  std::shared_ptr<const BlackBox> box;
  std::uint64_t num_calls = 0;
  for (int i = 0; i < 10'000 && num_calls < kSome; ++i) {
    SleepMs(1);
    box = box == nullptr ? BoxOf(child.pid) : box;
    num_calls = box == nullptr || box->num_rings() == 0 ? 0 : box->ring(0).next.load();
  }
  context.Expect(num_calls >= kSome, "it works");
  return box;
}

/// How the child ended: its exit code, or minus the signal; `error` gets what it said.
int Await(const Child& child, std::string& error) {
  char text[4096];
  for (ssize_t n = 1; n > 0;) {
    n = read(child.report, text, sizeof(text));
    error.append(text, n > 0 ? static_cast<std::size_t>(n) : 0);
  }
  close(child.report);
  int status = 0;
  while (waitpid(child.pid, &status, 0) < 0 && errno == EINTR) {
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

/// Also with one of `any_of`, where there are some.
void ExpectEnd(Context& context, const Child& child, int wanted,
               const std::vector<std::string>& parts, const std::vector<std::string>& any_of = {}) {
  std::string error;
  const int code = Await(child, error);
  context.Expect(code == wanted, [&] {
    return "expected " + std::to_string(wanted) + ", ends with " + std::to_string(code) + ": " +
           error;
  });
  for (const std::string& part : parts) {
    Contains(context, error, part);
  }
  const auto is_there = [&](const std::string& part) {
    return error.find(part) != std::string::npos;
  };
  context.Expect(any_of.empty() || std::any_of(any_of.begin(), any_of.end(), is_there),
                 [&] { return "expected \"" + any_of[0] + "\" or the like in: " + error; });
}

// ---- Tests ------------------------------------------------------------------------------------

constexpr std::size_t kEndless = static_cast<std::size_t>(-1) / 2;

void ProgramsDrawnByChance(Context& context) {
  const std::vector<Team> teams{
      {.process_of = {0, 1}, .seed = 11},
      {.process_of = {0, 0, 1, 1}, .num_lanes = 3, .window_bytes = 4096, .seed = 12},
      {.process_of = {0, 1, 2, 0, 1, 2}, .window_bytes = 8192, .seed = 13},
      {.process_of = {0, 0, 0, 1}, .window_bytes = 65536, .max_bytes = 300'000, .seed = 14}};
  for (const Team& team : teams) {
    const std::vector<Child> children =
        Fork(context, team, [&](std::size_t process, int memory, std::string& error) {
          return RunProgram(team, process, memory, /*num_calls=*/320, error);
        });
    for (const Child& child : children) {
      ExpectEnd(context, child, kOk, {});
    }
  }
}

/// At any point of a program of calls by all.
void AKilledProcessIsNamed(Context& context) {
  for (std::uint64_t i = 0; i < 6; ++i) {
    const Team team{.process_of = {0, 1, 1, 2}, .has_groups = i % 2 == 0, .seed = 20 + i};
    const std::vector<Child> children =
        Fork(context, team, [&](std::size_t process, int memory, std::string& error) {
          return RunProgram(team, process, memory, kEndless, error);
        });
    const std::size_t victim = i % 3;
    const std::shared_ptr<const BlackBox> box = BoxAtWork(context, children[victim]);
    SleepMs(static_cast<std::int64_t>(37 * i));
    kill(children[victim].pid, SIGKILL);
    ExpectEnd(context, children[victim], -SIGKILL, {});
    const std::vector<std::string> last_calls = LastCalls(*box);
    context.Expect(!last_calls.empty(), "what it did last is there still");
    const std::string name = "(process " + std::to_string(kFirstProcess + victim) + ", pid " +
                             std::to_string(children[victim].pid) + ", gone)";
    for (std::size_t process = 0; process < children.size(); ++process) {
      if (process != victim) {
        ExpectEnd(context, children[process], kFailed,
                  {name, "(the process is gone)", "last call, ended "}, last_calls);
      }
    }
  }
}

void AProcessThatEndsEarlyIsNamed(Context& context) {
  const Team team{.process_of = {0, 1, 1, 2}, .seed = 31};
  const std::vector<Child> children =
      Fork(context, team, [&](std::size_t process, int memory, std::string& error) {
        return RunProgram(team, process, memory, process == 1 ? 48 : kEndless, error);
      });
  ExpectEnd(context, children[1], kOk, {});
  for (const std::size_t process : Sizes{0, 2}) {
    ExpectEnd(context, children[process], kFailed, {"(process 41, pid ", "the process is gone"});
  }
}

/// The others fail at the deadline; it fails as well, once it goes on.
void AStoppedProcessIsNamed(Context& context) {
  for (std::uint64_t i = 0; i < 3; ++i) {
    const Team team{
        .process_of = {0, 1, 1, 2}, .has_groups = false, .timeout_ns = 500 * kMs, .seed = 40 + i};
    const std::vector<Child> children =
        Fork(context, team, [&](std::size_t process, int memory, std::string& error) {
          return RunProgram(team, process, memory, kEndless, error);
        });
    SleepMs(static_cast<std::int64_t>(150 + 41 * i));
    kill(children[i].pid, SIGSTOP);
    const std::string name = "(process " + std::to_string(kFirstProcess + i) + ", pid " +
                             std::to_string(children[i].pid) + ", stopped)";
    for (std::size_t process = 0; process < children.size(); ++process) {
      if (process != i) {
        ExpectEnd(context, children[process], kFailed, {name, "(the limit is 0.5 s)"});
      }
    }
    kill(children[i].pid, SIGCONT);
    ExpectEnd(context, children[i], kFailed, {name});
  }
}

/// Not for long: then it goes on as if nothing had been.
void AShortStopIsNoFailure(Context& context) {
  const Team team{.process_of = {0, 0, 1, 2}, .timeout_ns = 20'000 * kMs, .seed = 51};
  const std::vector<Child> children =
      Fork(context, team, [&](std::size_t process, int memory, std::string& error) {
        return RunProgram(team, process, memory, /*num_calls=*/640, error);
      });
  for (std::size_t i = 0; i < 12; ++i) {
    kill(children[i % 3].pid, SIGSTOP);
    SleepMs(static_cast<std::int64_t>(5 * (i % 4)));
    kill(children[i % 3].pid, SIGCONT);
    SleepMs(5);
  }
  for (const Child& child : children) {
    ExpectEnd(context, child, kOk, {});
  }
}

/// What a process forks for itself has the process's session, and runs its handlers at exit.
void AForkedChildDoesNotLeave(Context& context) {
  const Host host(1);
  const pid_t pid = fork();
  if (pid == 0) {
    host.job(0).session()->Leave();
    _exit(kOk);
  }
  int status = 0;
  context.Expect(waitpid(pid, &status, 0) == pid && status == 0, "the child ends");
  context.Expect(host.segment().seat(0).leaves_since_ns.load() == 0, "the process has not left");
  host.job(0).session()->Leave();
  context.Expect(host.segment().seat(0).leaves_since_ns.load() != 0, "now it has");
}

const Suite suite("forks",
                  {{"ProgramsDrawnByChance", ProgramsDrawnByChance},
                   {"AKilledProcessIsNamed", AKilledProcessIsNamed},
                   {"AProcessThatEndsEarlyIsNamed", AProcessThatEndsEarlyIsNamed},
                   {"AStoppedProcessIsNamed", AStoppedProcessIsNamed},
                   {"AShortStopIsNoFailure", AShortStopIsNoFailure},
                   {"AForkedChildDoesNotLeave", AForkedChildDoesNotLeave}},
                  {.before = [] { alarm(3 * kAlarmS); }});

}  // namespace
}  // namespace jaxcoll::testing::forks_test
