#include "host/reduce_work.h"

#include <algorithm>  // std::min
#include <array>      // std::array
#include <cstddef>    // std::byte, std::size_t

#include "host/direct_reduce.h"

namespace jaxcoll {
namespace {

// One chunk's share of one rank's block. With 8 ranks a chunk's blocks fill half of a 1 MiB L2, so
// that the results are written while the operands are still there; larger chunks leave the second
// core idle at the end, smaller ones cost an atomic each.
constexpr std::size_t kReducedChunkBytes = std::size_t{64} * 1024;

}  // namespace

AllReduceWork::AllReduceWork(const std::vector<Leaf>& leaves) : leaves_(leaves) {
  std::size_t chunk_bytes = 0;
  for (std::size_t i = 0; i < leaves_.size(); ++i) {
    const std::size_t size = SizeOf(leaves_[i].dtype);
    for (std::size_t begin = 0; begin < leaves_[i].count;) {
      if (chunk_bytes >= kReducedChunkBytes) {
        chunk_ends_.push_back(pieces_.size());
        chunk_bytes = 0;
      }
      const std::size_t room = std::max<std::size_t>(1, (kReducedChunkBytes - chunk_bytes) / size);
      const std::size_t count = std::min(leaves_[i].count - begin, room);
      pieces_.push_back({i, begin, count});
      begin += count;
      chunk_bytes += count * size;
      bytes_ += count * size;
    }
  }
  if (chunk_bytes > 0) {
    chunk_ends_.push_back(pieces_.size());
  }
}

std::size_t AllReduceWork::operand_bytes(std::size_t i) const {
  return leaves_[i].count * SizeOf(leaves_[i].dtype);
}

std::size_t AllReduceWork::num_chunks(std::size_t /*num_ranks*/) const {
  return chunk_ends_.size();
}

std::size_t AllReduceWork::bytes_moved(std::size_t num_ranks) const {
  return 2 * num_ranks * bytes_;
}

void AllReduceWork::Run(std::size_t chunk, const Buffers& buffers) const {
  std::array<const void*, kMaxRanks> sources;
  std::array<void*, kMaxRanks> targets;
  const std::size_t first = chunk == 0 ? 0 : chunk_ends_[chunk - 1];
  for (std::size_t i = first; i < chunk_ends_[chunk]; ++i) {
    const Piece& piece = pieces_[i];
    const Leaf& leaf = leaves_[piece.leaf];
    const std::size_t offset = piece.begin * SizeOf(leaf.dtype);
    for (std::size_t r = 0; r < buffers.num_ranks; ++r) {
      const std::size_t at = piece.leaf * buffers.num_ranks + r;
      sources[r] = static_cast<const std::byte*>(buffers.operands[at]) + offset;
      targets[r] = static_cast<std::byte*>(buffers.results[at]) + offset;
    }
    leaf.reduce(sources.data(), buffers.num_ranks, targets.data(), buffers.num_ranks, piece.count);
  }
}

std::unique_ptr<const Route> AllReduceWork::MakeRoute(const Membership& members,
                                                      const RouteOptions& options) const {
  const std::vector<Leaf> leaves{leaves_.begin(), leaves_.end()};
  if (DirectAllReduce::IsBetter(leaves, members, options)) {
    return std::make_unique<DirectAllReduce>(leaves, members, options.window_bytes);
  }
  return MakeAllReduceRoute(leaves, members, options.window_bytes);
}

ReduceScatterWork::ReduceScatterWork(DType dtype, ReduceFn reduce, std::size_t outer,
                                     std::size_t num_ranks, std::size_t inner)
    : reduce_(reduce),
      element_bytes_(SizeOf(dtype)),
      outer_(outer),
      num_ranks_(num_ranks),
      inner_(inner),
      slabs_(outer, inner, kReducedChunkBytes / SizeOf(dtype)) {}

std::size_t ReduceScatterWork::operand_bytes(std::size_t /*i*/) const {
  return outer_ * num_ranks_ * inner_ * element_bytes_;
}

std::size_t ReduceScatterWork::result_bytes(std::size_t /*i*/) const {
  return outer_ * inner_ * element_bytes_;
}

std::size_t ReduceScatterWork::num_chunks(std::size_t num_ranks) const {
  return slabs_.num_pieces() * num_ranks;
}

std::size_t ReduceScatterWork::bytes_moved(std::size_t num_ranks) const {
  return num_ranks * (operand_bytes(0) + result_bytes(0));
}

void ReduceScatterWork::Run(std::size_t chunk, const Buffers& buffers) const {
  std::array<const void*, kMaxRanks> sources;
  const std::size_t target = chunk % num_ranks_;
  const Slabs::Piece piece = slabs_.piece(chunk / num_ranks_);
  for (std::size_t row = piece.row; row < piece.row + piece.num_rows; ++row) {
    const std::size_t from = ((row * num_ranks_ + target) * inner_ + piece.begin) * element_bytes_;
    for (std::size_t r = 0; r < num_ranks_; ++r) {
      sources[r] = static_cast<const std::byte*>(buffers.operands[r]) + from;
    }
    void* to = static_cast<std::byte*>(buffers.results[target]) +
               (row * inner_ + piece.begin) * element_bytes_;
    reduce_(sources.data(), num_ranks_, &to, 1, piece.length);
  }
}

std::unique_ptr<const Route> ReduceScatterWork::MakeRoute(const Membership& members,
                                                          const RouteOptions& options) const {
  if (DirectReduceScatter::IsBetter(element_bytes_, outer_, inner_, members, options)) {
    return std::make_unique<DirectReduceScatter>(element_bytes_, reduce_, outer_, inner_, members,
                                                 options.window_bytes);
  }
  return std::make_unique<ReduceScatterRoute>(element_bytes_, reduce_, outer_, inner_, members,
                                              options.window_bytes);
}

}  // namespace jaxcoll
