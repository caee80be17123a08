// cuda/ring.h: who sends which rank's block to whom, and when it is computed with.
//
// A collective matmul sends blocks around a ring of the ranks, while it multiplies what it has.
// Both ways around, so that each link carries half of the blocks in half of the steps; of two ranks
// a half of a sum is on its way while the other one is computed.
#pragma once

#include <cstddef>  // std::size_t
#include <vector>   // std::vector

namespace jaxcoll::cuda {

/// What a rank sends and gets in one step, by the ranks that own the blocks.
struct Transfer {
  std::size_t to;
  std::size_t from;
  std::size_t sent;
  std::size_t received;
};

/// A gather of the blocks of all ranks. The transfers of step i run beside the products of step i;
/// those of step i + 1 need them.
struct GatherStep {
  std::vector<Transfer> transfers;
  std::vector<std::size_t> products;  ///< owners of the blocks that are there
};

/// The steps of `rank`.
inline std::vector<GatherStep> GatherSteps(std::size_t rank, std::size_t num_ranks) {
  const std::size_t p = num_ranks;
  const auto after = [&](std::size_t steps) { return (rank + steps) % p; };
  const auto before = [&](std::size_t steps) { return (rank + p - steps) % p; };
  const std::size_t of_backward = (p - 1) / 2;
  const std::size_t of_forward = p - 1 - of_backward;
  std::vector<GatherStep> steps(of_forward + 1);
  steps[0].products.push_back(rank);
  for (std::size_t i = 0; i < of_forward; ++i) {
    steps[i].transfers.push_back(
        {.to = after(1), .from = before(1), .sent = before(i), .received = before(i + 1)});
    steps[i + 1].products.push_back(before(i + 1));
  }
  for (std::size_t i = 0; i < of_backward; ++i) {
    steps[i].transfers.push_back(
        {.to = before(1), .from = after(1), .sent = after(i), .received = after(i + 1)});
    steps[i + 1].products.push_back(after(i + 1));
  }
  return steps;
}

/// One step of a sum over all ranks that ends at the block's owner: adds this rank's product for
/// `owner` to what came from `from`, and sends the sum on to `to`. In the first step nothing came;
/// in the last, of this rank's own block, nothing is sent.
struct ScatterStep {
  std::size_t owner;
  std::size_t to;
  std::size_t from;
};

/// The steps of `rank`, forward or backward around the ring. Block o is summed in the order o + 1,
/// o + 2, ..., o forward, and o - 1, o - 2, ..., o backward.
inline std::vector<ScatterStep> ScatterSteps(std::size_t rank, std::size_t num_ranks,
                                             bool is_forward) {
  const std::size_t p = num_ranks;
  const std::size_t after = (rank + 1) % p;
  const std::size_t before = (rank + p - 1) % p;
  std::vector<ScatterStep> steps;
  for (std::size_t i = 0; i < p; ++i) {
    const std::size_t owner = is_forward ? (rank + 2 * p - 1 - i) % p : (rank + 1 + i) % p;
    steps.push_back(
        {.owner = owner, .to = is_forward ? after : before, .from = is_forward ? before : after});
  }
  return steps;
}

}  // namespace jaxcoll::cuda
