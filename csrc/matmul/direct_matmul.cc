#include "matmul/direct_matmul.h"

#include <algorithm>  // std::clamp, std::min
#include <cstring>    // std::memcpy

#include "host/direct_route.h"
#include "host/peer_memory.h"
#include "matmul/scratch.h"

namespace jaxcoll {
namespace {

// Of a part, which stays in the cache of a core, unless it had fewer rows than these: see
// kBlockPanelRows in block_matmul.cc.
constexpr std::size_t kPartBytes = std::size_t{1} << 20;
constexpr std::size_t kLeastPartRows = 256, kMostPartRows = 512;
// Longer rows would take too much scratch memory.
constexpr std::size_t kMostRowBytes = std::size_t{64} << 10;

std::size_t PartRows(const MatmulLayout& layout) {
  const std::size_t fit = kPartBytes / (layout.inner * SizeOf(layout.dtype));
  return std::min(layout.rows, std::clamp(fit, kLeastPartRows, kMostPartRows));
}

}  // namespace

DirectMatmul::DirectMatmul(const MatmulLayout& layout, const Membership& members)
    : layout_(layout),
      members_(members),
      part_rows_(PartRows(layout)),
      num_parts_((layout.rows + part_rows_ - 1) / part_rows_) {}

MatmulPart DirectMatmul::Part(std::size_t i) const {
  const std::size_t begin = i * part_rows_;
  return {.begin = begin,
          .count = std::min(part_rows_, layout_.rows - begin),
          .first = 0,
          .width = layout_.inner};
}

bool DirectMatmul::Suits(const MatmulLayout& layout) {
  return layout.kind == MatmulKind::kGatherRows && !layout.x_is_transposed &&
         layout.inner * SizeOf(layout.dtype) <= kMostRowBytes &&
         IsWorthReading((layout.num_ranks - 1) * layout.x_bytes(), layout.x_bytes());
}

bool DirectMatmul::Run(std::size_t phase, std::size_t /*round*/, const Buffers& local,
                       const Processes& processes) const {
  for (std::size_t j = 0; phase == 0 && j < local.num_ranks; ++j) {
    const void* const address = local.operands[j];
    std::memcpy(processes.windows[members_.mine()] + j * sizeof(address),
                static_cast<const void*>(&address), sizeof(address));
  }
  return true;
}

void DirectMatmul::Meanwhile(std::size_t /*round*/, const Buffers& local) const {
  for (std::size_t t = 0; t < local.num_ranks; ++t) {
    for (std::size_t i = 0; i < local.num_ranks * num_parts_; ++i) {
      const std::size_t j = i / num_parts_;
      MultiplyPart(layout_, Part(i % num_parts_), members_.my_ranks()[j], members_.my_ranks()[t],
                   local.operands[j], local.operands[local.num_ranks + t], local.results[t], false);
    }
  }
}

bool DirectMatmul::Take(std::size_t /*round*/, std::size_t process, const Buffers& local,
                        const Processes& processes) const {
  const std::size_t row_bytes = layout_.inner * SizeOf(layout_.dtype);
  std::byte* const rows = Scratch(part_rows_ * row_bytes);
  for (std::size_t source = 0; source < members_.num_ranks(); ++source) {
    if (members_.process_of(source) != process) {
      continue;
    }
    const std::byte* x = nullptr;
    std::memcpy(static_cast<void*>(&x),
                processes.windows[process] + members_.position(source) * sizeof(x), sizeof(x));
    for (std::size_t i = 0; i < num_parts_; ++i) {
      const MatmulPart part = Part(i);
      if (!ReadPeer(processes.pids[process], rows, x + part.begin * row_bytes,
                    {.rows = 1, .bytes = part.count * row_bytes, .from_step = 0, .to_step = 0})) {
        return false;
      }
      for (std::size_t t = 0; t < local.num_ranks; ++t) {
        MultiplyPackedPart(layout_, part, source, rows, local.operands[local.num_ranks + t],
                           local.results[t], false);
      }
    }
  }
  return true;
}

}  // namespace jaxcoll
