#include "host/membership.h"

#include <algorithm>  // std::max
#include <map>        // std::erase_if, std::map
#include <mutex>      // std::lock_guard, std::mutex
#include <utility>    // std::pair

namespace jaxcoll {

Membership::Membership(const std::vector<std::size_t>& seat_of, std::size_t my_seat)
    : places_(seat_of.size()) {
  std::vector<std::size_t> seats;
  std::vector<std::size_t> counts;
  std::vector<std::size_t> my_ranks;
  for (std::size_t rank = 0; rank < seat_of.size(); ++rank) {
    std::size_t process = 0;
    while (process < seats.size() && seats[process] != seat_of[rank]) {
      ++process;
    }
    if (process == seats.size()) {
      seats.push_back(seat_of[rank]);
      counts.push_back(0);
    }
    places_[rank] = {.process = process, .position = counts[process]++};
    most_ranks_ = std::max(most_ranks_, counts[process]);
    if (seat_of[rank] == my_seat) {
      mine_ = process;
      my_ranks.push_back(rank);
    }
  }
  seats_.Assign(seats);
  my_ranks_.Assign(my_ranks);
}

std::shared_ptr<const Membership> MembershipOf(const std::vector<std::size_t>& seat_of,
                                               std::size_t my_seat) {
  using Known =
      std::map<std::pair<std::vector<std::size_t>, std::size_t>, std::weak_ptr<const Membership>>;
  static std::mutex mutex;
  static auto* const known = new Known();  // leaked: call sites may be made at exit
  const std::lock_guard<std::mutex> lock(mutex);
  std::erase_if(*known, [](const auto& entry) { return entry.second.expired(); });
  std::weak_ptr<const Membership>& found = (*known)[{seat_of, my_seat}];
  std::shared_ptr<const Membership> members = found.lock();
  if (members == nullptr) {
    members = std::make_shared<const Membership>(seat_of, my_seat);
    found = members;
  }
  return members;
}

}  // namespace jaxcoll
