#include "cuda/block_windows.h"

#include <array>  // std::array

namespace jaxcoll::cuda {

Status BlockWindows::Make(const Libraries& libraries, std::size_t slot_bytes,
                          const std::vector<LocalRank>& local,
                          const std::vector<PeerSignals>& signals, Rounds& rounds) {
  offers_.resize(rounds.num_ranks());
  for (const LocalRank& rank : local) {
    windows_.Offer(libraries, rank, kSlotsAt + slot_bytes, rounds.is_needed(), offers_[rank.rank]);
  }
  if (Status status = rounds.Share(offers_); !status.ok()) {
    return status;
  }
  problem_ = FirstProblem(offers_);
  if (!problem_.empty()) {
    return {};  // which all know
  }
  struct Answer {
    PeerText problem{};
  };
  std::vector<Answer> answers(rounds.num_ranks());
  const std::string problem = MakeSeats(libraries, local, signals).message;
  for (const LocalRank& rank : local) {
    answers[rank.rank].problem = ToPeerText(problem);
  }
  Status status = rounds.Share(answers);
  problem_ = FirstProblem(answers);
  return status;
}

Status BlockWindows::MakeSeats(const Libraries& libraries, const std::vector<LocalRank>& local,
                               const std::vector<PeerSignals>& signals) {
  for (std::size_t i = 0; i < local.size(); ++i) {
    BlockSeat& seat = *seats_.emplace_back(std::make_unique<BlockSeat>());
    std::array<std::byte*, kMostPeers> windows{};
    Status status = windows_.Map(libraries, local[i], offers_, windows);
    if (status.ok()) {
      status = seat.Create(libraries, signals[i], local[i].rank, offers_.size(), windows,
                           local[i].stream);
    }
    if (!status.ok()) {
      status.message = "rank " + std::to_string(local[i].rank) + ": " + status.message;
      return status;
    }
  }
  return {};
}

}  // namespace jaxcoll::cuda
