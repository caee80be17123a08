// cuda/peer_probe.h: whether the ranks of a group read what the others write in their memory.
#pragma once

#include <cstdint>  // std::int64_t, std::uint32_t
#include <memory>   // std::unique_ptr
#include <vector>   // std::vector

#include "core/status.h"
#include "cuda/libraries.h"
#include "cuda/peer_seat.h"
#include "cuda/peer_windows.h"

namespace jaxcoll::cuda {

/// Has the ranks of this process, `local` in the order of `seats`, sum a number of each rank of the
/// group, so that each has read what every other one wrote, and waited for it, with a kernel:
/// within `timeout_ns` (< 0: for ever). All processes of the group do so. Changes the current
/// device, and what the seats' kernels end at.
Status ProbePeers(const Libraries& libraries, const std::vector<LocalRank>& local,
                  const std::vector<std::unique_ptr<PeerSeat>>& seats,
                  const std::vector<std::uint32_t>& numbers, std::int64_t timeout_ns);

}  // namespace jaxcoll::cuda
