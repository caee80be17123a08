#include "matmul/matmul_work.h"

#include <algorithm>  // std::max, std::min
#include <atomic>     // std::atomic
#include <bitset>     // std::bitset

#include "matmul/matmul_route.h"

namespace jaxcoll {
namespace {

// Of a chunk. BLAS arranges w anew for each: with fewer rows that shows, with more the cores end at
// different times.
constexpr std::size_t kPanelRows = 512;
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

// How many sources ranks that come make possible, for products of each of them.
class Sources {
 public:
  explicit Sources(MatmulKind kind) : are_summed_(kind != MatmulKind::kGatherRows) {}

  std::size_t Add(std::size_t rank) {
    if (!are_summed_) {
      return ++count_;
    }
    came_.set(rank);
    while (count_ < kMaxRanks && came_.test(count_)) {
      ++count_;
    }
    return count_;
  }

 private:
  const bool are_summed_;
  std::bitset<kMaxRanks> came_;
  std::size_t count_ = 0;
};

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

MatmulWork::MatmulWork(const MatmulLayout& layout)
    : layout_(layout),
      panel_rows_(std::min(layout.rows, kPanelRows)),
      num_panels_((layout.rows + panel_rows_ - 1) / panel_rows_) {}

std::size_t MatmulWork::num_chunks(std::size_t num_ranks) const {
  return num_ranks * num_ranks * num_panels_;
}

std::size_t MatmulWork::num_ready(const std::size_t* arrivals, std::size_t count,
                                  std::size_t /*num_ranks*/) const {
  Sources sources(layout_.kind);
  std::size_t num_sources = 0;
  for (std::size_t i = 0; i < count; ++i) {
    num_sources = sources.Add(arrivals[i]);
  }
  return count * num_sources * num_panels_;
}

std::size_t MatmulWork::num_counters(std::size_t num_ranks) const {
  return layout_.kind == MatmulKind::kGatherRows ? 0 : num_ranks * num_panels_;
}

std::size_t MatmulWork::bytes_moved(std::size_t /*num_ranks*/) const {
  return layout_.products() / kMultiplicationsPerByte;
}

// With each rank that comes: what it gets of the sources before it, then what all get of others.
MatmulWork::Blocks MatmulWork::BlocksOf(std::size_t number, const std::size_t* arrivals) const {
  const bool are_summed = layout_.kind != MatmulKind::kGatherRows;
  Sources sources(layout_.kind);
  std::size_t before = 0;
  for (std::size_t count = 1;; ++count) {
    const std::size_t newcomer = arrivals[count - 1];
    const std::size_t now = sources.Add(newcomer);
    if (number < count * now) {
      const std::size_t at = number - (count - 1) * before;
      const std::size_t source = at < before ? at : before + (at - before) / count;
      return {.source = are_summed ? source : arrivals[source],
              .target = at < before ? newcomer : arrivals[(at - before) % count]};
    }
    before = now;
  }
}

void MatmulWork::Run(std::size_t chunk, const Buffers& buffers) const {
  const std::size_t panel = chunk % num_panels_;
  const std::size_t begin = panel * panel_rows_;
  const MatmulPart part{.begin = begin,
                        .count = std::min(panel_rows_, layout_.rows - begin),
                        .first = 0,
                        .width = layout_.gathers() ? layout_.inner : layout_.columns};
  const auto [source, target] = BlocksOf(chunk / num_panels_, buffers.arrivals);
  const auto multiply = [&](bool adds) {
    const std::size_t w = layout_.gathers() ? target : source;
    MultiplyPart(layout_, part, source, target, buffers.operands[source],
                 buffers.operands[buffers.num_ranks + w], buffers.results[target], adds);
  };
  if (layout_.kind == MatmulKind::kGatherRows) {
    multiply(false);
    return;
  }
  std::atomic<int>& num_added = buffers.counters[target * num_panels_ + panel];
  const int term = static_cast<int>(source);
  for (int done = num_added.load(std::memory_order_acquire); done != term;
       done = num_added.load(std::memory_order_acquire)) {
    num_added.wait(done, std::memory_order_acquire);  // the term before was begun before
  }
  multiply(source > 0);
  num_added.store(term + 1, std::memory_order_release);
  num_added.notify_all();
}

std::unique_ptr<const Route> MatmulWork::MakeRoute(const Membership& members,
                                                   const RouteOptions& options) const {
  return std::make_unique<MatmulRoute>(layout_, members, options.window_bytes);
}

}  // namespace jaxcoll
