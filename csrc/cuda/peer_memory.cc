#include "cuda/peer_memory.h"

#include <algorithm>  // std::none_of
#include <array>      // std::array
#include <random>     // std::random_device

#include "cuda/peer_probe.h"

namespace jaxcoll::cuda {
namespace {

/// How far a rank has come.
struct Answer {
  std::uint32_t number = 0;  // for the probe
  PeerText problem{};
};

/// Tells all processes how far this one has come; `problem` is the first one's by rank then.
Status Agree(Rounds& rounds, const std::vector<LocalRank>& local, std::vector<Answer>& answers,
             std::string& problem) {
  for (const LocalRank& rank : local) {
    answers[rank.rank].problem = ToPeerText(problem);
  }
  Status status = rounds.Share(answers);
  problem = FirstProblem(answers);
  return status;
}

}  // namespace

std::string PeerMemory::Problem(const Libraries& libraries, const void* image,
                                const std::vector<int>& ordinals, std::size_t num_ranks) {
  if (image == nullptr) {
    return "there are no kernels for it (built without nvcc, or JAXCOLL_CUDA_PEERS=0)";
  }
  if (num_ranks > kMostPeers) {
    return "a group of " + std::to_string(num_ranks) + " ranks, more than " +
           std::to_string(kMostPeers);
  }
  if (ordinals.size() < num_ranks && !libraries.ipc_problem.empty()) {
    return "CUDA's runtime can't share memory between processes (" + libraries.ipc_problem + ")";
  }
  for (const int device : ordinals) {
    for (const int peer : ordinals) {
      int can = 1;
      const int error = device == peer
                            ? kCudaSuccess
                            : libraries.runtime.device_can_access_peer(&can, device, peer);
      if (error != kCudaSuccess || can == 0) {
        return "device " + std::to_string(device) + " can't read the memory of device " +
               std::to_string(peer);
      }
    }
  }
  return "";
}

Status PeerMemory::Offer(const Libraries& libraries, const Plan& plan, Rounds& rounds) {
  std::vector<int> ordinals;
  ordinals.reserve(plan.local.size());
  for (const LocalRank& rank : plan.local) {
    ordinals.push_back(rank.ordinal);
  }
  problem_ = Problem(libraries, plan.image, ordinals, rounds.num_ranks());
  is_foreseen_ = !problem_.empty();
  offers_.resize(rounds.num_ranks());
  for (const LocalRank& rank : plan.local) {
    PeerOffer& offer = offers_[rank.rank];
    offer.host = plan.host;
    if (problem_.empty()) {
      windows_.Offer(libraries, rank, sizeof(PeerWindow), rounds.is_needed(), offer);
    } else {
      offer.problem = ToPeerText("rank " + std::to_string(rank.rank) + ": " + problem_);
    }
  }
  if (Status status = rounds.Share(offers_); !status.ok()) {
    return status;
  }
  problem_ = FirstProblem(offers_);
  is_on_one_host_ = std::none_of(offers_.begin(), offers_.end(),
                                 [&](const PeerOffer& offer) { return offer.host != plan.host; });
  if (!is_on_one_host_) {
    problem_ = "the group is on several hosts";
    is_foreseen_ = true;
  }
  return {};
}

Status PeerMemory::Connect(const Libraries& libraries, const Plan& plan, Rounds& rounds) {
  if (!problem_.empty()) {
    return {};  // which all know
  }
  std::vector<Answer> answers(rounds.num_ranks());
  std::random_device random;
  for (const LocalRank& rank : plan.local) {
    answers[rank.rank].number = random() | 1;
  }
  problem_ = MakeSeats(libraries, plan).message;
  if (Status status = Agree(rounds, plan.local, answers, problem_);
      !status.ok() || !problem_.empty()) {
    return status;
  }
  std::vector<std::uint32_t> numbers;
  numbers.reserve(answers.size());
  for (const Answer& answer : answers) {
    numbers.push_back(answer.number);
  }
  std::string wrong = ProbePeers(libraries, plan.local, seats_, numbers, plan.timeout_ns).message;
  if (Status status = Agree(rounds, plan.local, answers, wrong); !status.ok()) {
    return status;
  }
  if (!wrong.empty()) {
    return Internal("devices " + Listed(rounds.devices()) + ": " + wrong +
                    " (JAXCOLL_CUDA_PEERS=0 does without peer memory)");
  }
  for (const auto& seat : seats_) {
    seat->EndAt(plan.ended, plan.raised);
  }
  is_usable_ = true;
  return {};
}

Status PeerMemory::MakeSeats(const Libraries& libraries, const Plan& plan) {
  for (const LocalRank& rank : plan.local) {
    PeerSeat& seat = *seats_.emplace_back(std::make_unique<PeerSeat>());
    std::array<std::byte*, kMostPeers> windows{};
    Status status = windows_.Map(libraries, rank, offers_, windows);
    if (status.ok()) {
      status = seat.Create(libraries, plan.image, rank.rank, offers_.size(), windows);
    }
    if (!status.ok()) {
      status.message = "rank " + std::to_string(rank.rank) + ": " + status.message;
      return status;
    }
  }
  return {};
}

}  // namespace jaxcoll::cuda
