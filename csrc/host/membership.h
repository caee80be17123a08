// host/membership.h: which processes take part in a group.
#pragma once

#include <cstddef>  // std::size_t
#include <memory>   // std::shared_ptr
#include <vector>   // std::vector

#include "core/small_array.h"

namespace jaxcoll {

/// Which process holds which ranks of a group. Processes are counted in the order of their first
/// rank. Immutable.
class Membership {
 public:
  /// `seat_of` holds the seat in the segment of each rank's process, `my_seat` this process's.
  Membership(const std::vector<std::size_t>& seat_of, std::size_t my_seat);

  [[nodiscard]] std::size_t num_ranks() const { return places_.size(); }
  [[nodiscard]] std::size_t num_processes() const { return seats_.size(); }
  /// The process of a rank, and the rank's place among its process's ranks.
  [[nodiscard]] std::size_t process_of(std::size_t rank) const { return places_[rank].process; }
  [[nodiscard]] std::size_t position(std::size_t rank) const { return places_[rank].position; }
  [[nodiscard]] std::size_t seat(std::size_t process) const { return seats_[process]; }
  /// This process, and its ranks in order; none where it has no part in the group.
  [[nodiscard]] std::size_t mine() const { return mine_; }
  [[nodiscard]] const SmallArray<std::size_t, 4>& my_ranks() const { return my_ranks_; }
  [[nodiscard]] bool is_mine(std::size_t rank) const { return process_of(rank) == mine_; }
  [[nodiscard]] std::size_t num_ranks_of(std::size_t process) const {
    std::size_t count = 0;
    for (const Place& place : places_) {
      count += place.process == process ? 1 : 0;
    }
    return count;
  }
  /// The ranks of the process that has most.
  [[nodiscard]] std::size_t most_ranks() const { return most_ranks_; }

 private:
  struct Place {
    std::size_t process, position;
  };

  SmallArray<Place, 4> places_;  // by rank
  SmallArray<std::size_t, 4> seats_;
  SmallArray<std::size_t, 4> my_ranks_;
  std::size_t mine_ = static_cast<std::size_t>(-1);
  std::size_t most_ranks_ = 0;
};

/// The membership of these (see the constructor); one for all calls of the group, so that it is in
/// a cache when a call needs it.
std::shared_ptr<const Membership> MembershipOf(const std::vector<std::size_t>& seat_of,
                                               std::size_t my_seat);

}  // namespace jaxcoll
