#include "host/process_stat.h"

#include <cstddef>  // std::size_t
#include <fstream>  // std::ifstream
#include <sstream>  // std::istringstream
#include <string>   // std::getline, std::string

namespace jaxcoll {

std::optional<ProcessStat> ReadProcessStat(const std::filesystem::path& folder) {
  std::ifstream file(folder / "stat");
  std::string text;
  // Not by the file's buffer itself, which throws where a process ends between open and read.
  std::getline(file, text, '\0');
  const std::size_t name_end = text.rfind(')');  // a name may hold anything
  if (name_end == std::string::npos) {
    return std::nullopt;
  }
  ProcessStat stat;
  std::istringstream fields(text.substr(name_end + 1));
  fields >> stat.state;
  constexpr int kFieldsBetween = 18;  // from the state, field 3, to the start time, field 22
  for (int i = 0; i < kFieldsBetween; ++i) {
    std::string skipped;
    fields >> skipped;
  }
  fields >> stat.start_ticks;
  return fields.fail() ? std::nullopt : std::optional(stat);
}

}  // namespace jaxcoll
