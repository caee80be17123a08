#include "host/reduce_route.h"

#include <algorithm>  // std::max, std::min
#include <array>      // std::array

#include "core/align.h"

namespace jaxcoll {
namespace {

// Reading the trees of all others costs less than a second synchronisation up to here, in all.
constexpr std::size_t kOneShotBytes = std::size_t{64} * 1024;

// A chunk for each process in each round, all of about the same size.
std::size_t ChunkBytes(const std::vector<ReducedLeaf>& leaves, const Membership& members,
                       std::size_t window_bytes) {
  const std::size_t processes = members.num_processes();
  const std::size_t bytes = PackedTree::PackedBytes(leaves);
  const std::size_t most = PieceBytes(window_bytes, processes * members.most_ranks() + 1, bytes);
  const std::size_t rounds =
      std::max<std::size_t>(1, (bytes + processes * most - 1) / (processes * most));
  return std::min(most,
                  RoundedUp((bytes + rounds * processes - 1) / (rounds * processes), kCacheLine));
}

}  // namespace

// ---- Trees ------------------------------------------------------------------------------------

PackedTree::PackedTree(const std::vector<ReducedLeaf>& leaves, std::size_t chunk_bytes) {
  std::vector<PackedPiece> pieces;
  std::vector<std::size_t> ends;
  std::size_t filled = 0;
  for (std::size_t i = 0; i < leaves.size(); ++i) {
    const std::size_t size = SizeOf(leaves[i].dtype);
    for (std::size_t begin = 0; begin < leaves[i].count;) {
      if (filled + kCacheLine > chunk_bytes) {
        ends.push_back(pieces.size());
        filled = 0;
      }
      const std::size_t count = std::min(leaves[i].count - begin, (chunk_bytes - filled) / size);
      pieces.push_back(
          {.leaf = i, .begin = begin * size, .bytes = count * size, .count = count, .at = filled});
      begin += count;
      filled += RoundedUp(count * size, kCacheLine);
    }
  }
  if (filled > 0) {
    ends.push_back(pieces.size());
  }
  pieces_.Assign(pieces);
  ends_.Assign(ends);
}

std::size_t PackedTree::PackedBytes(const std::vector<ReducedLeaf>& leaves) {
  std::size_t bytes = 0;
  for (const ReducedLeaf& leaf : leaves) {
    bytes += RoundedUp(leaf.count * SizeOf(leaf.dtype), kCacheLine);
  }
  return bytes;
}

OneShotAllReduce::OneShotAllReduce(const std::vector<ReducedLeaf>& leaves,
                                   const Membership& members)
    : leaves_(leaves),
      members_(members),
      rank_bytes_(PackedTree::PackedBytes(leaves)),
      tree_(leaves, rank_bytes_) {}

bool OneShotAllReduce::Run(std::size_t phase, std::size_t /*round*/, const Buffers& local,
                           const Processes& processes) const {
  const std::size_t num_pieces = tree_.num_chunks() == 0 ? 0 : tree_.end(0);
  if (phase == 0) {
    for (std::size_t j = 0; j < local.num_ranks; ++j) {
      std::byte* const mine = processes.windows[members_.mine()] + j * rank_bytes_;
      for (std::size_t i = 0; i < num_pieces; ++i) {
        const PackedPiece& piece = tree_.piece(i);
        Copy(mine + piece.at, local.operand(piece.leaf, j), piece.bytes, processes.copies.leave);
      }
    }
    return true;
  }
  std::array<const void*, kMaxRanks> sources;
  for (std::size_t i = 0; i < num_pieces; ++i) {
    const PackedPiece& piece = tree_.piece(i);
    for (std::size_t r = 0; r < members_.num_ranks(); ++r) {
      sources[r] = members_.is_mine(r) ? local.operand(piece.leaf, members_.position(r))
                                       : processes.windows[members_.process_of(r)] +
                                             members_.position(r) * rank_bytes_ + piece.at;
    }
    leaves_[piece.leaf].reduce(sources.data(), members_.num_ranks(),
                               local.results + piece.leaf * local.num_ranks, local.num_ranks,
                               piece.count);
  }
  return true;
}

// A round: for each owner, each of this process's ranks' chunk; then the reduced chunk.
ChunkedAllReduce::ChunkedAllReduce(const std::vector<ReducedLeaf>& leaves,
                                   const Membership& members, std::size_t window_bytes)
    : leaves_(leaves),
      members_(members),
      chunk_bytes_(ChunkBytes(leaves, members, window_bytes)),
      tree_(leaves, chunk_bytes_) {}

std::size_t ChunkedAllReduce::num_rounds() const {
  const std::size_t processes = members_.num_processes();
  return std::max<std::size_t>(1, (tree_.num_chunks() + processes - 1) / processes);
}

std::byte* ChunkedAllReduce::Staged(std::byte* window, std::size_t round, std::size_t owner,
                                    std::size_t position) const {
  return window + RoundBegin(round, round_bytes()) +
         (owner * members_.most_ranks() + position) * chunk_bytes_;
}

std::byte* ChunkedAllReduce::Reduced(std::byte* window, std::size_t round) const {
  return Staged(window, round, members_.num_processes(), 0);
}

bool ChunkedAllReduce::Run(std::size_t phase, std::size_t round, const Buffers& local,
                           const Processes& processes) const {
  const std::size_t mine = members_.mine();
  for (std::size_t owner = 0; owner < members_.num_processes(); ++owner) {
    const std::size_t chunk = round * members_.num_processes() + owner;
    if (chunk >= tree_.num_chunks() || (owner == mine) != (phase == 1)) {
      continue;
    }
    for (std::size_t i = tree_.begin(chunk); i < tree_.end(chunk); ++i) {
      const PackedPiece& piece = tree_.piece(i);
      if (phase == 0) {
        for (std::size_t j = 0; j < local.num_ranks; ++j) {
          Copy(Staged(processes.windows[mine], round, owner, j) + piece.at,
               local.operand(piece.leaf, j) + piece.begin, piece.bytes, processes.copies.leave);
        }
      } else if (phase == 1) {
        std::array<const void*, kMaxRanks> sources;
        std::array<void*, kMaxRanks + 1> targets;
        for (std::size_t r = 0; r < members_.num_ranks(); ++r) {
          const std::size_t j = members_.position(r);
          sources[r] =
              members_.is_mine(r)
                  ? local.operand(piece.leaf, j) + piece.begin
                  : Staged(processes.windows[members_.process_of(r)], round, mine, j) + piece.at;
        }
        for (std::size_t j = 0; j < local.num_ranks; ++j) {
          targets[j] = local.result(piece.leaf, j) + piece.begin;
        }
        std::byte* const left = Reduced(processes.windows[mine], round) + piece.at;
        targets[local.num_ranks] = left;
        // What is left past the caches is copied from one of the results.
        const bool streams = processes.copies.leave != nullptr;
        leaves_[piece.leaf].reduce(sources.data(), members_.num_ranks(), targets.data(),
                                   local.num_ranks + (streams ? 0 : 1), piece.count);
        if (streams) {
          Copy(left, targets[0], piece.bytes, processes.copies.leave);
        }
      } else {
        for (std::size_t j = 0; j < local.num_ranks; ++j) {
          Copy(local.result(piece.leaf, j) + piece.begin,
               Reduced(processes.windows[owner], round) + piece.at, piece.bytes,
               processes.copies.take);
        }
      }
    }
  }
  return true;
}

std::unique_ptr<const Route> MakeAllReduceRoute(const std::vector<ReducedLeaf>& leaves,
                                                const Membership& members,
                                                std::size_t window_bytes) {
  const std::size_t bytes = PackedTree::PackedBytes(leaves);
  if (bytes * (members.num_ranks() - 1) <= kOneShotBytes &&
      bytes * members.most_ranks() <= window_bytes) {
    return std::make_unique<OneShotAllReduce>(leaves, members);
  }
  return std::make_unique<ChunkedAllReduce>(leaves, members, window_bytes);
}

// ---- reduce_scatter ---------------------------------------------------------------------------

// A round: for each target, a piece of each of this process's ranks.
ReduceScatterRoute::ReduceScatterRoute(std::size_t element_bytes, ReduceFn reduce,
                                       std::size_t outer, std::size_t inner,
                                       const Membership& members, std::size_t window_bytes)
    : element_bytes_(element_bytes),
      reduce_(reduce),
      inner_(inner),
      members_(members),
      pieces_in_round_(members.num_ranks() * members.most_ranks()),
      piece_bytes_(PieceBytes(window_bytes, pieces_in_round_, outer * inner * element_bytes)),
      slabs_(outer, inner, piece_bytes_ / element_bytes) {}

std::size_t ReduceScatterRoute::num_rounds() const {
  return std::max<std::size_t>(1, slabs_.num_pieces());
}

std::size_t ReduceScatterRoute::From(const Slabs::Piece& piece, std::size_t row,
                                     std::size_t target) const {
  return ((piece.row + row) * members_.num_ranks() + target) * inner_ + piece.begin;
}

std::size_t ReduceScatterRoute::At(std::size_t round, std::size_t target,
                                   std::size_t position) const {
  return RoundBegin(round, round_bytes()) +
         (target * members_.most_ranks() + position) * piece_bytes_;
}

bool ReduceScatterRoute::Run(std::size_t phase, std::size_t round, const Buffers& local,
                             const Processes& processes) const {
  if (round >= slabs_.num_pieces()) {
    return true;
  }
  const Slabs::Piece piece = slabs_.piece(round);
  const std::size_t row_bytes = piece.length * element_bytes_;
  for (std::size_t target = 0; target < members_.num_ranks(); ++target) {
    if (members_.is_mine(target) != (phase == 1)) {
      continue;
    }
    for (std::size_t row = 0; row < piece.num_rows; ++row) {
      const std::size_t from = From(piece, row, target) * element_bytes_;
      if (phase == 0) {
        for (std::size_t j = 0; j < local.num_ranks; ++j) {
          Copy(processes.windows[members_.mine()] + At(round, target, j) + row * row_bytes,
               local.operand(0, j) + from, row_bytes, processes.copies.leave);
        }
        continue;
      }
      std::array<const void*, kMaxRanks> sources;
      for (std::size_t r = 0; r < members_.num_ranks(); ++r) {
        const std::size_t j = members_.position(r);
        sources[r] = members_.is_mine(r) ? local.operand(0, j) + from
                                         : processes.windows[members_.process_of(r)] +
                                               At(round, target, j) + row * row_bytes;
      }
      void* to = local.result(0, members_.position(target)) +
                 ((piece.row + row) * inner_ + piece.begin) * element_bytes_;
      reduce_(sources.data(), members_.num_ranks(), &to, 1, piece.length);
    }
  }
  return true;
}

}  // namespace jaxcoll
