#include "host/threads.h"

#include <unistd.h>  // gettid

#include <filesystem>    // std::filesystem::directory_iterator
#include <fstream>       // std::ifstream
#include <iterator>      // std::istreambuf_iterator
#include <string>        // std::string
#include <system_error>  // std::error_code

namespace jaxcoll {

bool IsAnyThreadBusy(std::int64_t pid) {
  const std::string own = std::to_string(gettid());
  std::error_code error;
  std::filesystem::directory_iterator task("/proc/" + std::to_string(pid) + "/task", error);
  for (const std::filesystem::directory_iterator end; !error && task != end;
       task.increment(error)) {
    std::ifstream file(task->path() / "stat");
    const std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
    const std::size_t name_end = text.rfind(')');  // a name may hold anything
    // One that can't be read may be busy, or is no more.
    const char state = name_end + 2 < text.size() ? text[name_end + 2] : 'R';
    if ((state == 'R' || state == 'D') && task->path().filename() != own) {
      return true;
    }
  }
  return static_cast<bool>(error);
}

}  // namespace jaxcoll
