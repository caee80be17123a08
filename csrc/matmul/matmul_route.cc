#include "matmul/matmul_route.h"

#include <algorithm>  // std::max, std::min
#include <cstring>    // std::memcpy

namespace jaxcoll {
namespace {

// Of a part: see kBlockPanelRows in block_matmul.cc.
constexpr std::size_t kPartRows = 256;

template <typename T>
void AddRows(std::byte* to, std::size_t to_step, const std::byte* from, std::size_t rows,
             std::size_t width) {
  for (std::size_t i = 0; i < rows; ++i) {
    T* const sum = reinterpret_cast<T*>(to) + i * to_step;
    const T* const term = reinterpret_cast<const T*>(from) + i * width;
    for (std::size_t j = 0; j < width; ++j) {
      sum[j] += term[j];
    }
  }
}

// The most ranks that one process leaves something for.
std::size_t MostTargets(const Membership& members) {
  std::size_t most = 0;
  for (std::size_t process = 0; process < members.num_processes(); ++process) {
    most = std::max(most, members.num_ranks() - members.num_ranks_of(process));
  }
  return most;
}

}  // namespace

MatmulRoute::MatmulRoute(const MatmulLayout& layout, const Membership& members,
                         std::size_t window_bytes)
    : layout_(layout),
      members_(members),
      slots_in_round_(members.most_ranks() * (layout.gathers() ? 1 : MostTargets(members))) {
  const std::size_t width = layout.gathers() ? layout.inner : layout.columns;
  slot_bytes_ =
      PieceBytes(window_bytes, slots_in_round_, layout.rows * width * SizeOf(layout.dtype));
  const std::size_t capacity = std::max<std::size_t>(1, slot_bytes_ / SizeOf(layout.dtype));
  part_rows_ = std::min({layout.rows, kPartRows, capacity});
  part_width_ = std::min(width, capacity / part_rows_);
  if (part_width_ == width) {  // then more rows fit
    part_rows_ = std::min(layout.rows, capacity / width);
  }
  num_row_parts_ = (layout.rows + part_rows_ - 1) / part_rows_;
  num_parts_ = (width + part_width_ - 1) / part_width_;
}

std::size_t MatmulRoute::At(std::size_t round, std::size_t source, std::size_t target) const {
  std::size_t slot = 0;
  for (std::size_t rank = 0; rank < target && !layout_.gathers(); ++rank) {
    slot += members_.process_of(rank) == members_.process_of(source) ? 0 : members_.most_ranks();
  }
  return RoundBegin(round, round_bytes()) + (slot + members_.position(source)) * slot_bytes_;
}

MatmulPart MatmulRoute::Part(std::size_t round) const {
  const std::size_t width = layout_.gathers() ? layout_.inner : layout_.columns;
  const std::size_t begin = round / num_parts_ * part_rows_;
  const std::size_t first = round % num_parts_ * part_width_;
  return {.begin = begin,
          .count = std::min(part_rows_, layout_.rows - begin),
          .first = first,
          .width = std::min(part_width_, width - first)};
}

bool MatmulRoute::Run(std::size_t phase, std::size_t round, const Buffers& local,
                      const Processes& processes) const {
  const MatmulPart part = Part(round);
  if (phase == 0) {
    Leave(round, part, local, processes);
  } else if (layout_.gathers()) {
    GatherSums(round, local, processes);
  } else {
    AddUp(round, part, local, processes);
  }
  return true;
}

void MatmulRoute::LeaveX(const MatmulPart& part, const std::byte* x, std::byte* to,
                         CopyFn stream_copy) const {
  const std::size_t size = SizeOf(layout_.dtype);
  const bool transposed = layout_.x_is_transposed;
  const std::size_t rows = transposed ? part.width : part.count;  // of what lies in memory
  const std::size_t bytes = (transposed ? part.count : part.width) * size;
  const std::size_t step = (transposed ? layout_.rows : layout_.inner) * size;
  x += transposed ? part.first * step + part.begin * size : part.begin * step + part.first * size;
  if (bytes == step) {
    Copy(to, x, rows * bytes, stream_copy);
    return;
  }
  for (std::size_t row = 0; row < rows; ++row) {
    Copy(to + row * bytes, x + row * step, bytes, stream_copy);
  }
}

void MatmulRoute::Leave(std::size_t round, const MatmulPart& part, const Buffers& local,
                        const Processes& processes) const {
  std::byte* const window = processes.windows[members_.mine()];
  for (std::size_t j = 0; j < local.num_ranks; ++j) {
    const void* const x = local.operands[j];
    if (layout_.gathers()) {
      LeaveX(part, static_cast<const std::byte*>(x), window + At(round, members_.my_ranks()[j], 0),
             processes.copies.leave);
      continue;
    }
    const std::size_t source = members_.my_ranks()[j];
    for (std::size_t target = 0; target < members_.num_ranks(); ++target) {
      if (!members_.is_mine(target)) {
        MultiplyPart(layout_, part, source, target, x, local.operands[local.num_ranks + j],
                     window + At(round, source, target), false, part.width);
      }
    }
  }
}

void MatmulRoute::Meanwhile(std::size_t round, const Buffers& local) const {
  if (layout_.kind == MatmulKind::kGatherRows) {
    Gather(round, members_.mine(), local, nullptr);
  } else if (OwnIsFirst() && round == 0) {
    const MatmulPart all{.begin = 0, .count = layout_.rows, .first = 0, .width = layout_.columns};
    const std::size_t mine = members_.my_ranks()[0];
    MultiplyPart(layout_, all, mine, mine, local.operands[0], local.operands[1], local.results[0],
                 false);
  }
}

bool MatmulRoute::Take(std::size_t round, std::size_t process, const Buffers& local,
                       const Processes& processes) const {
  Gather(round, process, local, processes.windows[process]);
  return true;
}

void MatmulRoute::Gather(std::size_t round, std::size_t process, const Buffers& local,
                         const std::byte* window) const {
  for (const std::size_t target : members_.my_ranks()) {
    for (std::size_t source = 0; source < members_.num_ranks(); ++source) {
      if (members_.process_of(source) == process) {
        MultiplyX(round, source, target, local, window, Part(round).first > 0);
      }
    }
  }
}

void MatmulRoute::GatherSums(std::size_t round, const Buffers& local,
                             const Processes& processes) const {
  for (const std::size_t target : members_.my_ranks()) {
    for (std::size_t source = 0; source < members_.num_ranks(); ++source) {
      MultiplyX(round, source, target, local, processes.windows[members_.process_of(source)],
                Part(round).first > 0 || source > 0);
    }
  }
}

void MatmulRoute::MultiplyX(std::size_t round, std::size_t source, std::size_t target,
                            const Buffers& local, const std::byte* window, bool adds) const {
  const MatmulPart part = Part(round);
  const std::size_t j = members_.position(source);
  const std::size_t t = members_.position(target);
  const void* const w = local.operands[local.num_ranks + t];
  if (members_.is_mine(source)) {
    MultiplyPart(layout_, part, source, target, local.operands[j], w, local.results[t], adds);
  } else {
    MultiplyPackedPart(layout_, part, source, window + At(round, source, 0), w, local.results[t],
                       adds);
  }
}

void MatmulRoute::AddUp(std::size_t round, const MatmulPart& part, const Buffers& local,
                        const Processes& processes) const {
  const std::size_t size = SizeOf(layout_.dtype);
  for (const std::size_t target : members_.my_ranks()) {
    auto* const y = static_cast<std::byte*>(local.results[members_.position(target)]);
    std::byte* const to = y + (part.begin * layout_.columns + part.first) * size;
    for (std::size_t source = 0; source < members_.num_ranks(); ++source) {
      if (members_.is_mine(source)) {
        const std::size_t j = members_.position(source);
        if (!OwnIsFirst()) {
          MultiplyPart(layout_, part, source, target, local.operands[j],
                       local.operands[local.num_ranks + j], y, source > 0);
        }
        continue;
      }
      const std::byte* const from =
          processes.windows[members_.process_of(source)] + At(round, source, target);
      if (source == 0 && !OwnIsFirst()) {
        for (std::size_t row = 0; row < part.count; ++row) {
          std::memcpy(to + row * layout_.columns * size, from + row * part.width * size,
                      part.width * size);
        }
      } else if (layout_.dtype == DType::kF64) {
        AddRows<double>(to, layout_.columns, from, part.count, part.width);
      } else {
        AddRows<float>(to, layout_.columns, from, part.count, part.width);
      }
    }
  }
}

}  // namespace jaxcoll
