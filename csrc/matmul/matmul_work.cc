#include "matmul/matmul_work.h"

#include <algorithm>  // std::min

#include "matmul/block_matmul.h"
#include "matmul/direct_matmul.h"
#include "matmul/joined_matmul.h"
#include "matmul/matmul_route.h"

namespace jaxcoll {
namespace {

// Two cores gain from a second one where they multiply this often; a helper takes some 10 us.
constexpr std::size_t kMultiplicationsPerByte = 2;

bool ScattersRows(const MatmulLayout& layout) { return layout.kind == MatmulKind::kScatterRows; }

// What a matrix is at element (i, j).
Matrix At(const MatmulLayout& layout, const void* data, std::size_t step, bool is_transposed,
          std::size_t i, std::size_t j) {
  const std::size_t elements = is_transposed ? j * step + i : i * step + j;
  return {.data = static_cast<const std::byte*>(data) + elements * SizeOf(layout.dtype),
          .step = step,
          .is_transposed = is_transposed};
}

Matrix WAt(const MatmulLayout& layout, const void* w, std::size_t i, std::size_t j) {
  const std::size_t inner =
      layout.inner * (layout.kind == MatmulKind::kGatherInner ? layout.num_ranks : 1);
  const std::size_t columns =
      layout.columns * (layout.kind == MatmulKind::kScatterColumns ? layout.num_ranks : 1);
  return At(layout, w, layout.w_is_transposed ? inner : columns, layout.w_is_transposed, i, j);
}

// Calls run(row, count, x_row, y_row) for each run of rows that are consecutive on both sides.
template <typename Run>
void EachRun(const MatmulLayout& layout, const MatmulPart& part, std::size_t source,
             std::size_t target, Run run) {
  const std::size_t end = part.begin + part.count;
  if (layout.kind == MatmulKind::kGatherInner || layout.kind == MatmulKind::kScatterColumns) {
    run(part.begin, part.count, part.begin, part.begin);
    return;
  }
  const std::size_t per_batch = layout.rows / layout.batch;
  const std::size_t block = ScattersRows(layout) ? target : source;
  for (std::size_t row = part.begin; row < end;) {
    const std::size_t batch = row / per_batch;
    const std::size_t count = std::min(end, (batch + 1) * per_batch) - row;
    const std::size_t spread =
        (batch * layout.num_ranks + block) * per_batch + (row - batch * per_batch);
    run(row, count, ScattersRows(layout) ? spread : row, ScattersRows(layout) ? row : spread);
    row += count;
  }
}

}  // namespace

std::size_t MatmulLayout::x_bytes() const {
  return rows * inner * (kind == MatmulKind::kScatterRows ? num_ranks : 1) * SizeOf(dtype);
}

std::size_t MatmulLayout::w_bytes() const {
  const bool has_all = kind == MatmulKind::kGatherInner || kind == MatmulKind::kScatterColumns;
  return inner * columns * (has_all ? num_ranks : 1) * SizeOf(dtype);
}

std::size_t MatmulLayout::y_bytes() const {
  return rows * columns * (kind == MatmulKind::kGatherRows ? num_ranks : 1) * SizeOf(dtype);
}

std::size_t MatmulLayout::products() const {
  return num_ranks * num_ranks * rows * inner * columns;
}

void MultiplyPart(const MatmulLayout& layout, const MatmulPart& part, std::size_t source,
                  std::size_t target, const void* x, const void* w, void* y, bool adds,
                  std::size_t packed_step) {
  const std::size_t x_step = layout.x_is_transposed
                                 ? layout.rows * (ScattersRows(layout) ? layout.num_ranks : 1)
                                 : layout.inner;
  EachRun(layout, part, source, target,
          [&](std::size_t row, std::size_t count, std::size_t x_row, std::size_t y_row) {
            const bool gathers = layout.gathers();
            const std::size_t x_first = gathers ? part.first : 0;
            const std::size_t w_row =
                x_first + (layout.kind == MatmulKind::kGatherInner ? source * layout.inner : 0);
            const std::size_t y_first = gathers ? 0 : part.first;
            const std::size_t w_column =
                y_first +
                (layout.kind == MatmulKind::kScatterColumns ? target * layout.columns : 0);
            const std::size_t step = packed_step == 0 ? layout.columns : packed_step;
            const std::size_t at =
                packed_step == 0 ? y_row * step + y_first : (row - part.begin) * step;
            Multiply(layout.dtype,
                     {.rows = count,
                      .inner = gathers ? part.width : layout.inner,
                      .columns = gathers ? layout.columns : part.width},
                     At(layout, x, x_step, layout.x_is_transposed, x_row, x_first),
                     WAt(layout, w, w_row, w_column),
                     static_cast<std::byte*>(y) + at * SizeOf(layout.dtype), step, adds);
          });
}

void MultiplyPackedPart(const MatmulLayout& layout, const MatmulPart& part, std::size_t source,
                        const void* x, const void* w, void* y, bool adds) {
  const std::size_t x_step = layout.x_is_transposed ? part.count : part.width;
  EachRun(layout, part, source, 0,
          [&](std::size_t row, std::size_t count, std::size_t, std::size_t y_row) {
            const std::size_t w_row =
                part.first + (layout.kind == MatmulKind::kGatherInner ? source * layout.inner : 0);
            Multiply(layout.dtype, {.rows = count, .inner = part.width, .columns = layout.columns},
                     At(layout, x, x_step, layout.x_is_transposed, row - part.begin, 0),
                     WAt(layout, w, w_row, 0),
                     static_cast<std::byte*>(y) + y_row * layout.columns * SizeOf(layout.dtype),
                     layout.columns, adds);
          });
}

std::size_t MatmulWork::bytes_moved(std::size_t /*num_ranks*/) const {
  return layout_.products() / kMultiplicationsPerByte;
}

std::unique_ptr<const Route> MatmulWork::MakeRoute(const Membership& members,
                                                   const RouteOptions& options) const {
  if (options.can_read_peers && DirectMatmul::Suits(layout_)) {
    return std::make_unique<DirectMatmul>(layout_, members);
  }
  return std::make_unique<MatmulRoute>(layout_, members, options.window_bytes);
}

std::unique_ptr<const MatmulWork> MakeMatmulWork(const MatmulLayout& layout) {
  if (JoinedMatmul::IsFaster(layout)) {
    return std::make_unique<JoinedMatmul>(layout);
  }
  return std::make_unique<BlockMatmul>(layout);
}

}  // namespace jaxcoll
