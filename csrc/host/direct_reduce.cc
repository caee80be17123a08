#include "host/direct_reduce.h"

#include <algorithm>  // std::max, std::min
#include <array>      // std::array
#include <cstring>    // std::memcpy

#include "core/align.h"
#include "core/types.h"
#include "host/direct_route.h"
#include "host/peer_memory.h"

namespace jaxcoll {
namespace {

// What is read of each rank at a time, and reduced while it is in the L2 cache.
constexpr std::size_t kMostPlaceBytes = std::size_t{128} * 1024;
// Less is not worth a system call.
constexpr std::size_t kLeastPlaceBytes = std::size_t{16} * 1024;

// Of a rank's operand, measured on 2 processes: below, pieces through windows stay in a cache;
// beyond, what is summed has left the caches before the others read it.
constexpr std::size_t kLeastSummedBytes = std::size_t{2} << 20;
constexpr std::size_t kMostSummedBytes = std::size_t{8} << 20;

bool IsOfASize(std::size_t bytes) {
  return kLeastSummedBytes <= bytes && bytes <= kMostSummedBytes;
}

// A chunk for each process, or one less.
std::size_t PartBytes(const std::vector<ReducedLeaf>& leaves, const Membership& members) {
  const std::size_t processes = members.num_processes();
  return RoundedUp((PackedTree::PackedBytes(leaves) + processes - 1) / processes, kCacheLine);
}

bool ReadRow(std::int64_t pid, std::byte* to, const std::byte* from, std::size_t bytes) {
  return ReadPeer(pid, to, from, {.rows = 1, .bytes = bytes, .from_step = 0, .to_step = 0});
}

}  // namespace

// ---- Windows ----------------------------------------------------------------------------------

AddressBook::AddressBook(const Membership& members, std::size_t num_addresses,
                         std::size_t window_bytes)
    : num_addresses_(num_addresses),
      header_bytes_(RoundedUp(members.most_ranks() * num_addresses * sizeof(void*), kCacheLine)),
      place_bytes_(header_bytes_ >= window_bytes
                       ? 0
                       : std::min(kMostPlaceBytes,
                                  RoundedDown((window_bytes - header_bytes_) / members.num_ranks(),
                                              kCacheLine))) {}

void AddressBook::Write(std::byte* window, std::size_t position, std::size_t i,
                        const void* address) const {
  std::memcpy(window + (position * num_addresses_ + i) * sizeof(address),
              static_cast<const void*>(&address), sizeof(address));
}

std::byte* AddressBook::Read(const std::byte* window, std::size_t position, std::size_t i) const {
  std::byte* address = nullptr;
  std::memcpy(static_cast<void*>(&address),
              window + (position * num_addresses_ + i) * sizeof(address), sizeof(address));
  return address;
}

// ---- all_reduce -------------------------------------------------------------------------------

DirectAllReduce::DirectAllReduce(const std::vector<ReducedLeaf>& leaves, const Membership& members,
                                 std::size_t window_bytes)
    : leaves_(leaves),
      members_(members),
      book_(members, 2 * leaves.size(), window_bytes),
      tree_(leaves, PartBytes(leaves, members)) {}

bool DirectAllReduce::IsBetter(const std::vector<ReducedLeaf>& leaves, const Membership& members,
                               const RouteOptions& options) {
  const std::size_t bytes = PackedTree::PackedBytes(leaves);
  if (!options.can_read_peers || !IsOfASize(bytes) ||
      !IsWorthReading(bytes, bytes / std::max<std::size_t>(1, leaves.size())) ||
      AddressBook(members, 2 * leaves.size(), options.window_bytes).place_bytes() <
          kLeastPlaceBytes) {
    return false;
  }
  // In parts of the tree, of the process with most to do: the others do theirs meanwhile.
  const CopyCosts& costs = options.copy_costs;
  const auto others = static_cast<double>(members.num_processes() - 1);
  double reading = 0;
  double through_windows = 0;
  for (std::size_t process = 0; process < members.num_processes(); ++process) {
    const auto own = static_cast<double>(members.num_ranks_of(process));
    const double taken = static_cast<double>(members.num_ranks()) - own + others;
    reading = std::max(reading, costs.reading * taken);
    through_windows =
        std::max(through_windows, costs.leaving * (own * others + 1) + costs.taking * taken);
  }
  return reading < through_windows;
}

bool DirectAllReduce::Run(std::size_t phase, std::size_t /*round*/, const Buffers& local,
                          const Processes& processes) const {
  const std::size_t mine = members_.mine();
  if (phase == 0) {
    Leave(local, processes.windows[mine]);
    return true;
  }
  if (phase == 3) {
    return true;
  }
  const std::size_t count = phase == 1 ? 1 : members_.num_processes() - 1;
  for (std::size_t n = 0; n < count; ++n) {
    // All begin with another one.
    const std::size_t owner = phase == 1 ? mine : (mine + 1 + n) % members_.num_processes();
    if (owner >= tree_.num_chunks()) {
      continue;
    }
    for (std::size_t i = tree_.begin(owner); i < tree_.end(owner); ++i) {
      if (!(phase == 1 ? Reduce(tree_.piece(i), local, processes)
                       : Fetch(tree_.piece(i), owner, local, processes))) {
        return false;
      }
    }
  }
  return true;
}

void DirectAllReduce::Leave(const Buffers& local, std::byte* window) const {
  for (std::size_t leaf = 0; leaf < leaves_.size(); ++leaf) {
    for (std::size_t j = 0; j < local.num_ranks; ++j) {
      book_.Write(window, j, 2 * leaf, local.operand(leaf, j));
      book_.Write(window, j, 2 * leaf + 1, local.result(leaf, j));
    }
  }
}

// Results may lie where operands do: nobody else reads this part of the operands.
bool DirectAllReduce::Reduce(const PackedPiece& piece, const Buffers& local,
                             const Processes& processes) const {
  const ReducedLeaf& leaf = leaves_[piece.leaf];
  const std::size_t size = SizeOf(leaf.dtype);
  const std::size_t most = book_.place_bytes() / size;
  std::array<const void*, kMaxRanks> sources;
  std::array<void*, kMaxRanks> targets;
  for (std::size_t done = 0; done < piece.count; done += most) {
    const std::size_t count = std::min(most, piece.count - done);
    const std::size_t begin = piece.begin + done * size;
    for (std::size_t r = 0; r < members_.num_ranks(); ++r) {
      const std::size_t j = members_.position(r);
      if (members_.is_mine(r)) {
        sources[r] = local.operand(piece.leaf, j) + begin;
        targets[j] = local.result(piece.leaf, j) + begin;
        continue;
      }
      const std::size_t process = members_.process_of(r);
      std::byte* const place = book_.Place(processes.windows[members_.mine()], r);
      sources[r] = place;
      if (!ReadRow(processes.pids[process], place,
                   book_.Read(processes.windows[process], j, 2 * piece.leaf) + begin,
                   count * size)) {
        return false;
      }
    }
    leaf.reduce(sources.data(), members_.num_ranks(), targets.data(), local.num_ranks, count);
  }
  return true;
}

bool DirectAllReduce::Fetch(const PackedPiece& piece, std::size_t owner, const Buffers& local,
                            const Processes& processes) const {
  std::byte* const first = local.result(piece.leaf, 0) + piece.begin;
  if (!ReadRow(processes.pids[owner], first,
               book_.Read(processes.windows[owner], 0, 2 * piece.leaf + 1) + piece.begin,
               piece.bytes)) {
    return false;
  }
  for (std::size_t j = 1; j < local.num_ranks; ++j) {
    std::memcpy(local.result(piece.leaf, j) + piece.begin, first, piece.bytes);
  }
  return true;
}

// ---- reduce_scatter ---------------------------------------------------------------------------

DirectReduceScatter::DirectReduceScatter(std::size_t element_bytes, ReduceFn reduce,
                                         std::size_t outer, std::size_t inner,
                                         const Membership& members, std::size_t window_bytes)
    : element_bytes_(element_bytes),
      reduce_(reduce),
      inner_(inner),
      members_(members),
      book_(members, 1, window_bytes),
      slabs_(outer, inner, book_.place_bytes() / element_bytes) {}

bool DirectReduceScatter::IsBetter(std::size_t element_bytes, std::size_t outer, std::size_t inner,
                                   const Membership& members, const RouteOptions& options) {
  const std::size_t row_bytes = inner * element_bytes;
  return IsOfASize(members.num_ranks() * outer * row_bytes) &&
         IsWorthReading((members.num_ranks() - 1) * outer * row_bytes, row_bytes) &&
         AddressBook(members, 1, options.window_bytes).place_bytes() >= kLeastPlaceBytes &&
         IsReadingFaster(options, members, /*leaves_once=*/false,
                         [](std::size_t, std::size_t) { return true; });
}

bool DirectReduceScatter::Run(std::size_t phase, std::size_t /*round*/, const Buffers& local,
                              const Processes& processes) const {
  if (phase == 0) {
    for (std::size_t j = 0; j < local.num_ranks; ++j) {
      book_.Write(processes.windows[members_.mine()], j, 0, local.operand(0, j));
    }
  }
  if (phase != 1) {
    return true;
  }
  for (const std::size_t target : members_.my_ranks()) {
    for (std::size_t i = 0; i < slabs_.num_pieces(); ++i) {
      if (!Reduce(slabs_.piece(i), target, local, processes)) {
        return false;
      }
    }
  }
  return true;
}

bool DirectReduceScatter::Reduce(const Slabs::Piece& piece, std::size_t target,
                                 const Buffers& local, const Processes& processes) const {
  const std::size_t row_bytes = piece.length * element_bytes_;
  const std::size_t from_step = members_.num_ranks() * inner_ * element_bytes_;
  const std::size_t begin =
      ((piece.row * members_.num_ranks() + target) * inner_ + piece.begin) * element_bytes_;
  std::byte* const window = processes.windows[members_.mine()];
  for (std::size_t r = 0; r < members_.num_ranks(); ++r) {
    const std::size_t process = members_.process_of(r);
    if (process != members_.mine() &&
        !ReadPeer(processes.pids[process], book_.Place(window, r),
                  book_.Read(processes.windows[process], members_.position(r), 0) + begin,
                  {.rows = piece.num_rows,
                   .bytes = row_bytes,
                   .from_step = from_step,
                   .to_step = row_bytes})) {
      return false;
    }
  }
  std::array<const void*, kMaxRanks> sources;
  for (std::size_t row = 0; row < piece.num_rows; ++row) {
    for (std::size_t r = 0; r < members_.num_ranks(); ++r) {
      sources[r] = members_.is_mine(r)
                       ? local.operand(0, members_.position(r)) + begin + row * from_step
                       : book_.Place(window, r) + row * row_bytes;
    }
    void* to = local.result(0, members_.position(target)) +
               ((piece.row + row) * inner_ + piece.begin) * element_bytes_;
    reduce_(sources.data(), members_.num_ranks(), &to, 1, piece.length);
  }
  return true;
}

}  // namespace jaxcoll
