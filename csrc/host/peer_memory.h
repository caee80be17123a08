// host/peer_memory.h: reading what lies in another process.
#pragma once

#include <cstddef>  // std::byte, std::size_t
#include <cstdint>  // std::int64_t

namespace jaxcoll {

/// `rows` rows of `bytes` bytes, so many bytes apart on both sides.
struct PeerRows {
  std::size_t rows;
  std::size_t bytes;
  std::size_t from_step;
  std::size_t to_step;
};

/// Copies from the memory of process `pid`, past any segment. False where the system refuses; what
/// lies at `to` is then undefined.
bool ReadPeer(std::int64_t pid, std::byte* to, const std::byte* from, const PeerRows& layout);

}  // namespace jaxcoll
