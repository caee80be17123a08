#include "host/threads.h"

#include <unistd.h>  // getpid, gettid

#include <atomic>        // std::atomic
#include <filesystem>    // std::filesystem::directory_iterator
#include <string>        // std::string
#include <system_error>  // std::error_code

#include "host/process_stat.h"

namespace jaxcoll {
namespace {

std::atomic<bool (*)()> python_thread_test{nullptr};

}  // namespace

bool IsAnyThreadBusy(std::int64_t pid) {
  const std::string own = std::to_string(gettid());
  std::error_code error;
  std::filesystem::directory_iterator task("/proc/" + std::to_string(pid) + "/task", error);
  for (const std::filesystem::directory_iterator end; !error && task != end;
       task.increment(error)) {
    // One that can't be read may be busy, or is no more.
    const char state = ReadProcessStat(task->path()).value_or(ProcessStat{.state = 'R'}).state;
    if ((state == 'R' || state == 'D') && task->path().filename() != own) {
      return true;
    }
  }
  return static_cast<bool>(error);
}

bool IsMainThread() {
  thread_local const bool is_main = gettid() == getpid();
  return is_main;
}

void SetPythonThreadTest(bool (*is_python_thread)()) { python_thread_test.store(is_python_thread); }

bool IsPythonThread() {
  bool (*const test)() = python_thread_test.load(std::memory_order_relaxed);
  return test != nullptr && test();
}

}  // namespace jaxcoll
