#include "host/copy_route.h"

#include <algorithm>  // std::max
#include <cstring>    // std::memset

namespace jaxcoll {

// ---- all_gather and all_to_all ----------------------------------------------------------------

ExchangeRoute::ExchangeRoute(const ExchangeLayout& layout, const Membership& members,
                             std::size_t window_bytes)
    : layout_(layout),
      members_(members),
      one_for_all_(layout.from_block == 0),
      pieces_in_round_(members.most_ranks() * (one_for_all_ ? 1 : members.num_ranks())),
      piece_bytes_(
          PieceBytes(window_bytes, pieces_in_round_, layout.rows * layout.columns * layout.bytes)),
      slabs_(layout.rows * layout.columns, layout.bytes, piece_bytes_) {}

std::size_t ExchangeRoute::num_rounds() const {
  return std::max<std::size_t>(1, slabs_.num_pieces());
}

std::size_t ExchangeRoute::At(std::size_t round, std::size_t target, std::size_t position) const {
  return RoundBegin(round, round_bytes()) +
         ((one_for_all_ ? 0 : target) * members_.most_ranks() + position) * piece_bytes_;
}

BlockSide ExchangeRoute::Packed(const Slabs::Piece& piece) const {
  return {.row = layout_.columns * piece.length, .column = piece.length};
}

bool ExchangeRoute::Run(std::size_t /*phase*/, std::size_t round, const Buffers& local,
                        const Processes& processes) const {
  if (round >= slabs_.num_pieces()) {
    return true;
  }
  const Slabs::Piece piece = slabs_.piece(round);
  const std::size_t num_targets = one_for_all_ ? 1 : members_.num_ranks();
  for (std::size_t target = 0; target < num_targets; ++target) {
    if (!one_for_all_ && members_.is_mine(target)) {
      continue;
    }
    for (std::size_t j = 0; j < local.num_ranks; ++j) {
      CopyBlock(piece, layout_.columns,
                static_cast<const std::byte*>(local.operands[j]) + piece.begin +
                    target * layout_.from_block,
                {.row = layout_.from_row, .column = layout_.from_column},
                processes.windows[members_.mine()] + At(round, target, j) - Skipped(piece),
                Packed(piece), processes.copies.leave);
    }
  }
  return true;
}

bool ExchangeRoute::Take(std::size_t round, std::size_t process, const Buffers& local,
                         const Processes& processes) const {
  if (round >= slabs_.num_pieces()) {
    return true;
  }
  const Slabs::Piece piece = slabs_.piece(round);
  for (const std::size_t target : members_.my_ranks()) {
    std::byte* const result =
        static_cast<std::byte*>(local.results[members_.position(target)]) + piece.begin;
    for (std::size_t source = 0; source < members_.num_ranks(); ++source) {
      if (members_.process_of(source) == process) {
        CopyBlock(piece, layout_.columns,
                  processes.windows[process] + At(round, target, members_.position(source)) -
                      Skipped(piece),
                  Packed(piece), result + source * layout_.to_block,
                  {.row = layout_.to_row, .column = layout_.to_column}, processes.copies.take);
      }
    }
  }
  return true;
}

void ExchangeRoute::Meanwhile(std::size_t round, const Buffers& local) const {
  if (round >= slabs_.num_pieces()) {
    return;
  }
  const Slabs::Piece piece = slabs_.piece(round);
  for (const std::size_t target : members_.my_ranks()) {
    for (const std::size_t source : members_.my_ranks()) {
      CopyBlock(piece, layout_.columns,
                static_cast<const std::byte*>(local.operands[members_.position(source)]) +
                    piece.begin + target * layout_.from_block,
                {.row = layout_.from_row, .column = layout_.from_column},
                static_cast<std::byte*>(local.results[members_.position(target)]) + piece.begin +
                    source * layout_.to_block,
                {.row = layout_.to_row, .column = layout_.to_column}, nullptr);
    }
  }
}

// ---- ppermute and broadcast -------------------------------------------------------------------

PermuteRoute::PermuteRoute(const std::vector<std::size_t>& source_of, std::size_t bytes,
                           const Membership& members, std::size_t window_bytes)
    : source_of_(source_of),
      members_(members),
      is_wanted_(members.num_ranks()),
      piece_bytes_(PieceBytes(window_bytes, members.most_ranks(), bytes)),
      slabs_(1, bytes, piece_bytes_) {
  for (std::size_t target = 0; target < source_of_.size(); ++target) {
    const std::size_t source = source_of_[target];
    if (source != PermuteWork::kNone && members.process_of(source) != members.process_of(target)) {
      is_wanted_[source] = true;
    }
  }
}

std::size_t PermuteRoute::num_rounds() const {
  return std::max<std::size_t>(1, slabs_.num_pieces());
}

std::size_t PermuteRoute::At(std::size_t round, std::size_t position) const {
  return RoundBegin(round, round_bytes()) + position * piece_bytes_;
}

bool PermuteRoute::Reads(std::size_t /*phase*/, std::size_t reader, std::size_t process) const {
  for (std::size_t target = 0; target < source_of_.size(); ++target) {
    const std::size_t source = source_of_[target];
    if (source != PermuteWork::kNone && members_.process_of(target) == reader &&
        members_.process_of(source) == process) {
      return true;
    }
  }
  return false;
}

bool PermuteRoute::Run(std::size_t phase, std::size_t round, const Buffers& local,
                       const Processes& processes) const {
  if (round >= slabs_.num_pieces()) {
    return true;
  }
  const Slabs::Piece piece = slabs_.piece(round);
  const SmallArray<std::size_t, 4>& mine = members_.my_ranks();
  for (std::size_t j = 0; j < mine.size(); ++j) {
    const std::size_t rank = mine[j];
    if (phase == 0) {
      if (is_wanted_[rank]) {
        Copy(processes.windows[members_.mine()] + At(round, j),
             static_cast<const std::byte*>(local.operands[j]) + piece.begin, piece.length,
             processes.copies.leave);
      }
      continue;
    }
    if (local.results[j] == nullptr) {
      continue;
    }
    std::byte* const to = static_cast<std::byte*>(local.results[j]) + piece.begin;
    const std::size_t source = source_of_[rank];
    if (source == PermuteWork::kNone) {
      std::memset(to, 0, piece.length);
      continue;
    }
    const std::size_t k = members_.position(source);
    const std::byte* const from =
        members_.is_mine(source) ? static_cast<const std::byte*>(local.operands[k]) + piece.begin
                                 : processes.windows[members_.process_of(source)] + At(round, k);
    if (from != to) {
      Copy(to, from, piece.length, processes.copies.take);
    }
  }
  return true;
}

}  // namespace jaxcoll
