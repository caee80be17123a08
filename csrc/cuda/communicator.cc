#include "cuda/communicator.h"

#include <algorithm>  // std::min
#include <chrono>     // std::chrono
#include <thread>     // std::this_thread

namespace jaxcoll::cuda {
namespace {

// NCCL takes some ten microseconds for a call, unless it connects to others or a stream is full.
constexpr int kEagerTries = 200;
constexpr auto kLongestNap = std::chrono::microseconds(500);
// Who is inside NCCL for so long waits there.
constexpr auto kStuckAfter = std::chrono::milliseconds(200);

void Pause(int tries) {
  if (tries < kEagerTries) {
    std::this_thread::yield();
  } else {
    std::this_thread::sleep_for(
        std::min(kLongestNap, std::chrono::microseconds(tries - kEagerTries)));
  }
}

}  // namespace

Status Communicator::Begin(const Libraries& libraries, const NcclId& id, std::size_t num_ranks,
                           std::size_t rank, bool is_on_one_host) {
  NcclConfig config;
  is_blocking_ = libraries.can_revoke() && is_on_one_host;
  config.blocking = is_blocking_ ? 1 : 0;
  const int result = libraries.nccl.comm_init_rank_config(&handle_, static_cast<int>(num_ranks), id,
                                                          static_cast<int>(rank), &config);
  return HasTaken(result) ? Status{} : libraries.OfNccl("ncclCommInitRankConfig", result);
}

std::unique_lock<std::mutex> Communicator::Enter() const {
  std::unique_lock<std::mutex> lock(mutex_, std::defer_lock);
  // Not lock(): who aborts may hold it for long.
  for (int tries = 0; !is_given_up_.load(); ++tries) {
    if (lock.try_lock()) {
      if (is_given_up_.load()) {
        lock.unlock();
      }
      break;
    }
    Pause(tries);
  }
  return lock;
}

Status Communicator::Await(const Libraries& libraries) const {
  for (int tries = 0;; ++tries) {
    if (const std::unique_lock<std::mutex> inside = Enter(); inside) {
      int state = kNcclSuccess;
      const int result = libraries.nccl.comm_get_async_error(handle_, &state);
      if (result != kNcclSuccess || (state != kNcclSuccess && state != kNcclInProgress)) {
        return libraries.OfNccl("communication", result == kNcclSuccess ? state : result, handle_);
      }
      if (state == kNcclSuccess) {
        return {};
      }
    } else {
      return GivenUp();
    }
    Pause(tries);
  }
}

std::optional<int> Communicator::State(const Libraries& libraries) const {
  const std::unique_lock<std::mutex> inside(mutex_, std::try_to_lock);
  if (!inside || is_given_up_.load() || handle_ == nullptr) {
    return std::nullopt;
  }
  int state = kNcclSuccess;
  const int result = libraries.nccl.comm_get_async_error(handle_, &state);
  return result == kNcclSuccess ? state : result;
}

bool Communicator::TryAbort(const Libraries& libraries) {
  // What these of NCCL's return changes nothing.
  const std::unique_lock<std::mutex> inside(mutex_, std::try_to_lock);
  if (inside) {
    if (handle_ != nullptr) {
      libraries.nccl.comm_abort(handle_);
      handle_ = nullptr;
    }
    return true;
  }
  // NCCL is not made for who goes on working while the communicator is revoked.
  const auto now = std::chrono::steady_clock::now();
  first_try_ = first_try_.value_or(now);
  if (now - *first_try_ >= kStuckAfter && is_made_.load() && is_blocking_ && !is_revoked_) {
    is_revoked_ = true;  // NCCL refuses it a second time
    libraries.nccl.comm_revoke(handle_, kNcclRevokeDefault);
  }
  return false;
}

}  // namespace jaxcoll::cuda
