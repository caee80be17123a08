#include "host/copy_work.h"

#include <algorithm>  // std::min
#include <cstddef>    // std::byte, std::size_t
#include <cstring>    // std::memcpy, std::memset
#include <utility>    // std::move

#include "host/copy_route.h"
#include "host/direct_route.h"

namespace jaxcoll {
namespace {

// A source piece of this size stays in L2 while it is copied to every target.
constexpr std::size_t kCopiedChunkBytes = std::size_t{128} * 1024;

// memcpy with the size known at compile time: a call each would dominate rows of one element.
template <std::size_t kBytes>
void CopyColumns(std::byte* to, std::size_t to_step, const std::byte* from, std::size_t from_step,
                 std::size_t count) {
  for (std::size_t j = 0; j < count; ++j) {
    std::memcpy(to + j * to_step, from + j * from_step, kBytes);
  }
}

void CopyRuns(std::byte* to, std::size_t to_step, const std::byte* from, std::size_t from_step,
              std::size_t count, std::size_t bytes, CopyFn stream_copy) {
  if (stream_copy != nullptr && bytes >= kLeastStreamBytes) {
    for (std::size_t j = 0; j < count; ++j) {
      stream_copy(to + j * to_step, from + j * from_step, bytes);
    }
    return;
  }
  switch (bytes) {
    case 1:
      return CopyColumns<1>(to, to_step, from, from_step, count);
    case 2:
      return CopyColumns<2>(to, to_step, from, from_step, count);
    case 4:
      return CopyColumns<4>(to, to_step, from, from_step, count);
    case 8:
      return CopyColumns<8>(to, to_step, from, from_step, count);
    case 16:
      return CopyColumns<16>(to, to_step, from, from_step, count);
    default:
      for (std::size_t j = 0; j < count; ++j) {
        std::memcpy(to + j * to_step, from + j * from_step, bytes);
      }
  }
}

// For a call that moves so many bytes; null where they stay in the caches.
CopyFn StreamCopyFor(std::size_t bytes_moved) {
  return bytes_moved >= CacheBytes() ? GetStreamCopy() : nullptr;
}

}  // namespace

void CopyRows(const Slabs::Piece& piece, std::size_t columns, const std::byte* from,
              const BlockSide& from_side, std::byte* to, const BlockSide& to_side,
              CopyFn stream_copy) {
  std::size_t i = piece.row == 0 ? 0 : piece.row / columns;
  std::size_t j = piece.row - i * columns;
  // A run within one row has constant steps.
  for (std::size_t left = piece.num_rows; left > 0;) {
    const std::size_t count = std::min(columns - j, left);
    CopyRuns(to + i * to_side.row + j * to_side.column, to_side.column,
             from + i * from_side.row + j * from_side.column, from_side.column, count, piece.length,
             stream_copy);
    left -= count;
    ++i;
    j = 0;
  }
}

ExchangeWork::ExchangeWork(const ExchangeLayout& layout, std::size_t operand_bytes,
                           std::size_t result_bytes)
    : layout_(layout),
      operand_bytes_(operand_bytes),
      result_bytes_(result_bytes),
      slabs_(layout.rows * layout.columns, layout.bytes, kCopiedChunkBytes) {}

std::size_t ExchangeWork::num_chunks(std::size_t num_ranks) const {
  return slabs_.num_pieces() * num_ranks * num_ranks;
}

std::size_t ExchangeWork::bytes_moved(std::size_t num_ranks) const {
  return 2 * num_ranks * result_bytes_;
}

void ExchangeWork::Run(std::size_t chunk, const Buffers& buffers) const {
  const std::size_t target = chunk % buffers.num_ranks;
  const std::size_t source = chunk / buffers.num_ranks % buffers.num_ranks;
  const Slabs::Piece piece = slabs_.piece(chunk / (buffers.num_ranks * buffers.num_ranks));
  const std::byte* const from = static_cast<const std::byte*>(buffers.operands[source]) +
                                target * layout_.from_block + piece.begin;
  std::byte* const to =
      static_cast<std::byte*>(buffers.results[target]) + source * layout_.to_block + piece.begin;
  CopyBlock(piece, layout_.columns, from, {.row = layout_.from_row, .column = layout_.from_column},
            to, {.row = layout_.to_row, .column = layout_.to_column},
            StreamCopyFor(bytes_moved(buffers.num_ranks)));
}

std::unique_ptr<const Route> ExchangeWork::MakeRoute(const Membership& members,
                                                     const RouteOptions& options) const {
  const std::size_t block_bytes = layout_.rows * layout_.columns * layout_.bytes;
  const bool one_for_all = layout_.from_block == 0;
  // Of all_to_all its operand, and so what stays here, too: measured on 2 and 4 processes.
  const std::size_t num_blocks = members.num_ranks() - (one_for_all ? 1 : 0);
  if (IsWorthReading(num_blocks * block_bytes, layout_.bytes) &&
      IsReadingFaster(options, members, /*leaves_once=*/one_for_all,
                      [](std::size_t, std::size_t) { return true; })) {
    return std::make_unique<DirectExchange>(layout_, members);
  }
  return std::make_unique<ExchangeRoute>(layout_, members, options.window_bytes);
}

PermuteWork::PermuteWork(std::vector<std::size_t> source_of, std::size_t bytes)
    : source_of_(std::move(source_of)), bytes_(bytes), slabs_(1, bytes, kCopiedChunkBytes) {}

std::size_t PermuteWork::num_chunks(std::size_t num_ranks) const {
  return slabs_.num_pieces() * num_ranks;
}

std::size_t PermuteWork::bytes_moved(std::size_t num_ranks) const { return 2 * num_ranks * bytes_; }

void PermuteWork::Run(std::size_t chunk, const Buffers& buffers) const {
  const std::size_t target = chunk % buffers.num_ranks;
  const Slabs::Piece piece = slabs_.piece(chunk / buffers.num_ranks);
  if (buffers.results[target] == nullptr) {
    return;
  }
  std::byte* const to = static_cast<std::byte*>(buffers.results[target]) + piece.begin;
  const std::size_t source = source_of_[target];
  if (source == kNone) {
    std::memset(to, 0, piece.length);
    return;
  }
  const std::byte* const from =
      static_cast<const std::byte*>(buffers.operands[source]) + piece.begin;
  if (from != to) {
    CopyRuns(to, 0, from, 0, 1, piece.length, StreamCopyFor(bytes_moved(buffers.num_ranks)));
  }
}

std::unique_ptr<const Route> PermuteWork::MakeRoute(const Membership& members,
                                                    const RouteOptions& options) const {
  if (IsWorthReading(bytes_, bytes_) &&
      IsReadingFaster(options, members, /*leaves_once=*/true,
                      [this](std::size_t target, std::size_t source) {
                        return source_of_[target] == source;
                      })) {
    return std::make_unique<DirectPermute>(source_of_, bytes_, members);
  }
  return std::make_unique<PermuteRoute>(source_of_, bytes_, members, options.window_bytes);
}

}  // namespace jaxcoll
