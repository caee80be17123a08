#include "matmul/joined_matmul.h"

#include <algorithm>  // std::clamp, std::min
#include <cstring>    // std::memcpy

#include "matmul/scratch.h"

namespace jaxcoll {
namespace {

// Blocks of more rows gain too little to wait for all ranks.
constexpr std::size_t kFewRows = 128;
// Smaller products the BLAS makes without arranging anything.
constexpr std::size_t kArrangedProducts = std::size_t{1} << 20;
// Of a chunk: with more rows w is arranged less often, with more columns x.
constexpr std::size_t kJoinedPanelRows = 256;
constexpr std::size_t kGatherColumns = 512;
constexpr std::size_t kScatterColumns = 128;
// Of the gathered rows, for each thread.
constexpr std::size_t kScratchBytes = std::size_t{8} << 20;

std::size_t CountPanels(std::size_t size, std::size_t panel) { return (size + panel - 1) / panel; }

std::size_t PanelRows(const MatmulLayout& layout, std::size_t num_rows) {
  const std::size_t fit = kScratchBytes / (layout.inner * SizeOf(layout.dtype));
  return std::min(num_rows, std::clamp<std::size_t>(fit, 1, kJoinedPanelRows));
}

}  // namespace

bool JoinedMatmul::IsFaster(const MatmulLayout& layout) {
  const std::size_t run = layout.rows / layout.batch;
  return (layout.kind == MatmulKind::kGatherRows || layout.kind == MatmulKind::kScatterRows) &&
         layout.num_ranks * layout.batch > 1 && run < kFewRows &&
         run * layout.inner * layout.columns >= kArrangedProducts;
}

JoinedMatmul::JoinedMatmul(const MatmulLayout& layout)
    : MatmulWork(layout),
      size_(SizeOf(layout.dtype)),
      num_rows_(layout.rows * layout.num_ranks),
      panel_rows_(PanelRows(layout, num_rows_)),
      panel_columns_(std::min(layout.columns, layout.gathers() ? kGatherColumns : kScatterColumns)),
      num_row_panels_(CountPanels(num_rows_, panel_rows_)),
      num_column_panels_(CountPanels(layout.columns, panel_columns_)) {}

std::size_t JoinedMatmul::num_chunks(std::size_t num_ranks) const {
  return (layout().gathers() ? num_ranks : 1) * num_row_panels_ * num_column_panels_;
}

void JoinedMatmul::Run(std::size_t chunk, const Buffers& buffers) const {
  const std::size_t begin = chunk % num_row_panels_ * panel_rows_;
  const std::size_t first = chunk / num_row_panels_ % num_column_panels_ * panel_columns_;
  const Panel panel{.begin = begin,
                    .count = std::min(panel_rows_, num_rows_ - begin),
                    .first = first,
                    .width = std::min(panel_columns_, layout().columns - first)};
  if (layout().gathers()) {
    Gather(panel, chunk / num_row_panels_ / num_column_panels_, buffers);
  } else {
    Scatter(panel, buffers);
  }
}

template <typename Visit>
void JoinedMatmul::EachRun(const Panel& panel, Visit visit) const {
  const std::size_t per_run = layout().rows / layout().batch;
  for (std::size_t at = 0; at < panel.count;) {
    const std::size_t block = (panel.begin + at) / per_run;
    const std::size_t in_block = (panel.begin + at) % per_run;
    const std::size_t count = std::min(per_run - in_block, panel.count - at);
    visit(RowRun{.rank = block % layout().num_ranks,
                 .row = block / layout().num_ranks * per_run + in_block,
                 .count = count,
                 .at = at});
    at += count;
  }
}

Matrix JoinedMatmul::From(const void* data, std::size_t step, bool is_transposed, std::size_t i,
                          std::size_t j) const {
  const std::size_t elements = is_transposed ? j * step + i : i * step + j;
  return {.data = static_cast<const std::byte*>(data) + elements * size_,
          .step = step,
          .is_transposed = is_transposed};
}

Matrix JoinedMatmul::WFrom(const void* w, std::size_t column) const {
  const bool transposed = layout().w_is_transposed;
  return From(w, transposed ? layout().inner : layout().columns, transposed, 0, column);
}

void JoinedMatmul::Gather(const Panel& panel, std::size_t target, const Buffers& buffers) const {
  const std::size_t inner = layout().inner;
  const bool transposed = layout().x_is_transposed;
  std::byte* const rows = Scratch(panel.count * inner * size_);
  EachRun(panel, [&](const RowRun& run) {
    const auto* const x = static_cast<const std::byte*>(buffers.operands[run.rank]);
    if (!transposed) {
      std::memcpy(rows + run.at * inner * size_, x + run.row * inner * size_,
                  run.count * inner * size_);
      return;
    }
    for (std::size_t i = 0; i < inner; ++i) {
      std::memcpy(rows + (i * panel.count + run.at) * size_,
                  x + (i * layout().rows + run.row) * size_, run.count * size_);
    }
  });
  auto* const y = static_cast<std::byte*>(buffers.results[target]);
  Multiply(layout().dtype, {.rows = panel.count, .inner = inner, .columns = panel.width},
           From(rows, transposed ? panel.count : inner, transposed, 0, 0),
           WFrom(buffers.operands[buffers.num_ranks + target], panel.first),
           y + (panel.begin * layout().columns + panel.first) * size_, layout().columns, false);
}

void JoinedMatmul::Scatter(const Panel& panel, const Buffers& buffers) const {
  std::byte* const sums = Scratch(panel.count * panel.width * size_);
  const bool transposed = layout().x_is_transposed;
  for (std::size_t source = 0; source < buffers.num_ranks; ++source) {
    Multiply(layout().dtype, {.rows = panel.count, .inner = layout().inner, .columns = panel.width},
             From(buffers.operands[source], transposed ? num_rows_ : layout().inner, transposed,
                  panel.begin, 0),
             WFrom(buffers.operands[buffers.num_ranks + source], panel.first), sums, panel.width,
             source > 0);
  }
  EachRun(panel, [&](const RowRun& run) {
    auto* const y = static_cast<std::byte*>(buffers.results[run.rank]);
    for (std::size_t i = 0; i < run.count; ++i) {
      std::memcpy(y + ((run.row + i) * layout().columns + panel.first) * size_,
                  sums + (run.at + i) * panel.width * size_, panel.width * size_);
    }
  });
}

}  // namespace jaxcoll
