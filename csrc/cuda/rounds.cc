#include "cuda/rounds.h"

namespace jaxcoll::cuda {

Status Rounds::Make(std::span<std::byte> rows) {
  const std::string problem = exchange_ == nullptr
                                  ? "they are in several processes"
                                  : exchange_(devices_, generation_, next_++, rows);
  return problem.empty()
             ? Status{}
             : Internal("no " + what_ + " of devices " + Listed(devices_) + ": " + problem);
}

std::string Listed(const std::vector<std::int64_t>& ids) {
  std::string text;
  for (const std::int64_t id : ids) {
    text += (text.empty() ? "" : ", ") + std::to_string(id);
  }
  return text;
}

}  // namespace jaxcoll::cuda
