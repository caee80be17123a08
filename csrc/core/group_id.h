// core/group_id.h: how records and other processes name a group.
#pragma once

#include <cstdint>  // std::int64_t, std::uint64_t
#include <vector>   // std::vector

namespace jaxcoll {

/// FNV-1a over the devices in rank order, as jaxcoll/diagnosis/records.py has it.
inline std::uint64_t GroupId(const std::vector<std::int64_t>& devices) {
  std::uint64_t hash = 0xcbf2'9ce4'8422'2325;
  for (const std::int64_t device : devices) {
    for (int byte = 0; byte < 8; ++byte) {
      hash ^= static_cast<std::uint64_t>(device) >> (8 * byte) & 0xff;
      hash *= 0x100'0000'01b3;
    }
  }
  return hash;
}

}  // namespace jaxcoll
