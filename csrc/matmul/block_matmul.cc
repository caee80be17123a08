#include "matmul/block_matmul.h"

#include <algorithm>  // std::min
#include <atomic>     // std::atomic
#include <bitset>     // std::bitset

namespace jaxcoll {
namespace {

// Of a chunk. BLAS arranges w anew for each: with fewer rows that shows, with more the cores end at
// different times.
constexpr std::size_t kBlockPanelRows = 512;

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

BlockMatmul::BlockMatmul(const MatmulLayout& layout)
    : MatmulWork(layout),
      panel_rows_(std::min(layout.rows, kBlockPanelRows)),
      num_panels_((layout.rows + panel_rows_ - 1) / panel_rows_) {}

std::size_t BlockMatmul::num_chunks(std::size_t num_ranks) const {
  return num_ranks * num_ranks * num_panels_;
}

std::size_t BlockMatmul::num_ready(const std::size_t* arrivals, std::size_t count,
                                   std::size_t /*num_ranks*/) const {
  Sources sources(layout().kind);
  std::size_t num_sources = 0;
  for (std::size_t i = 0; i < count; ++i) {
    num_sources = sources.Add(arrivals[i]);
  }
  return count * num_sources * num_panels_;
}

std::size_t BlockMatmul::num_counters(std::size_t num_ranks) const {
  return layout().kind == MatmulKind::kGatherRows ? 0 : num_ranks * num_panels_;
}

// With each rank that comes: what it gets of the sources before it, then what all get of others.
BlockMatmul::Blocks BlockMatmul::BlocksOf(std::size_t number, const std::size_t* arrivals) const {
  const bool are_summed = layout().kind != MatmulKind::kGatherRows;
  Sources sources(layout().kind);
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

void BlockMatmul::Run(std::size_t chunk, const Buffers& buffers) const {
  const std::size_t panel = chunk % num_panels_;
  const std::size_t begin = panel * panel_rows_;
  const MatmulPart part{.begin = begin,
                        .count = std::min(panel_rows_, layout().rows - begin),
                        .first = 0,
                        .width = layout().gathers() ? layout().inner : layout().columns};
  const auto [source, target] = BlocksOf(chunk / num_panels_, buffers.arrivals);
  const auto multiply = [&](bool adds) {
    const std::size_t w = layout().gathers() ? target : source;
    MultiplyPart(layout(), part, source, target, buffers.operands[source],
                 buffers.operands[buffers.num_ranks + w], buffers.results[target], adds);
  };
  if (layout().kind == MatmulKind::kGatherRows) {
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

}  // namespace jaxcoll
