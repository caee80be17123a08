#include "cuda/site.h"

#include <algorithm>  // std::find
#include <string>     // std::string, std::to_string

#include "core/clock.h"
#include "core/small_array.h"

namespace jaxcoll::cuda {
namespace {

// Leaves of a tree whose pointers need no allocation.
constexpr std::size_t kFewBuffers = 32;

}  // namespace

Status Site::Initialize(int ordinal, Stream stream) {
  if (ordinal < 0 || ordinal >= kMaxOrdinals) {
    return Internal("CUDA device " + std::to_string(ordinal) + " is beyond the " +
                    std::to_string(kMaxOrdinals) + " that jaxcoll knows");
  }
  Place& place = places_[static_cast<std::size_t>(ordinal)];
  if (place.generation != engine_.generation()) {
    if (Status status = Enter(place, ordinal); !status.ok()) {
      return status;
    }
  }
  Status status = place.clique->Join(ordinal, stream, engine_.limits());
  if (place.is_ready) {
    return status;
  }
  if (status.ok() && !place.is_prepared) {
    status = Prepare(place, ordinal, stream);
  }
  return Start(place, ordinal, status);
}

Status Site::Enter(Place& place, int ordinal) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const std::int64_t generation = engine_.generation();
  if (generation == Engine::kBetween) {
    return Internal(Engine::SiteText(id_) +
                    ": jaxcoll.reset() has not come to its end: call it again, on all processes");
  }
  const std::int64_t id = engine_.IdOf(ordinal);
  for (const std::vector<std::int64_t>& group : groups_) {
    if (std::find(group.begin(), group.end(), id) == group.end()) {
      continue;
    }
    if (generation_ != generation) {
      generation_ = generation;
      start_ = std::make_shared<LocalMeeting>(engine_.LocalOf(groups_));
      first_calls_.clear();
    }
    const std::shared_ptr<Clique> clique = engine_.Find(group, generation);
    if (clique == nullptr) {
      return Internal(Engine::SiteText(id_) + ": jaxcoll.reset() was called meanwhile");
    }
    std::shared_ptr<FirstCall>& first_call = first_calls_[clique.get()];
    if (first_call == nullptr) {
      first_call = std::make_shared<FirstCall>(engine_.LocalOf({group}));
    }
    place = {.clique = clique,
             .start = start_,
             .first_call = first_call,
             .generation = generation,
             .recorded = {.device = id,
                          .site = id_,
                          .group = clique->group_id(),
                          .rank = static_cast<std::int64_t>(clique->SeatOf(ordinal).rank),
                          .iteration = -1},
             .occurrences = &clique->OccurrencesOf(ordinal, id_)};
    return {};
  }
  return Internal("CUDA device " + std::to_string(ordinal) + " (id " + std::to_string(id) +
                  ") is in none of the groups");
}

Status Site::Prepare(Place& place, int ordinal, Stream stream) {
  const Libraries& libraries = engine_.libraries();
  BlockSeat* blocks = nullptr;
  if (const std::size_t bytes = operation_->peer_slot_bytes(); bytes > 0) {
    Status status = place.clique->OpenBlocks(ordinal, stream, bytes, engine_.limits(), blocks);
    if (!status.ok()) {
      return status;
    }
  }
  const std::lock_guard<std::mutex> lock(prepare_mutex_);
  int before = 0;
  if (const int error = libraries.runtime.get_device(&before); error != kCudaSuccess) {
    return libraries.OfRuntime("cudaGetDevice", error);
  }
  if (const int error = libraries.runtime.set_device(ordinal); error != kCudaSuccess) {
    return libraries.OfRuntime("cudaSetDevice", error);
  }
  Status status = operation_->Prepare(libraries, place.clique->SeatOf(ordinal), blocks);
  if (const int error = libraries.runtime.set_device(before); error != kCudaSuccess) {
    return libraries.OfRuntime("cudaSetDevice", error);
  }
  place.is_prepared = status.ok();
  return status;
}

Status Site::Start(Place& place, int ordinal, const Status& prepared) {
  const std::int64_t timeout_ns = engine_.limits().first_timeout_ns;
  Status status = place.start->Arrive(
      ordinal, prepared,
      {.timeout_ns = timeout_ns,
       .interruption = [&] { return place.clique->Failure(); },
       .late =
           [&](const std::set<int>& missing) {
             std::string ids;
             for (const int other : missing) {
               ids += (ids.empty() ? "" : ", ") + std::to_string(engine_.IdOf(other));
             }
             return DeadlineExceeded(Engine::SiteText(id_) + ": waited " + SecondsText(timeout_ns) +
                                     " for devices " + ids +
                                     ", which are not ready for the program's first run");
           }});
  place.is_ready = status.ok();
  if (!status.ok() && place.clique->is_shared()) {
    place.clique->Fail(status);  // the others wait for its first call
  }
  return status;
}

RecordedCall Site::Record(Place& place, std::int64_t run) {
  RecordedStart& start = place.recorded;
  start.iteration = start.iteration >= 0 && start.run == run ? start.iteration + 1 : 0;
  start.run = run;
  start.execution =
      place.clique->Execution(place.occurrences->fetch_add(1, std::memory_order_relaxed) + 1);
  return RecordedCall(start);
}

template <typename Call>
Status Site::RunFirst(Place& place, int ordinal, const Call& call) {
  Clique& clique = *place.clique;
  const std::int64_t timeout_ns = engine_.limits().first_timeout_ns;
  const LocalMeeting::Terms terms{
      .timeout_ns = timeout_ns,
      .interruption = [&] { return clique.Failure(); },
      .late =
          [&](const std::set<int>& missing) {
            return DeadlineExceeded(clique.WaitText(id_, timeout_ns, missing));
          }};
  Status status = place.first_call->before.Arrive(ordinal, {}, terms);
  if (status.ok()) {
    status = call();
  }
  status = place.first_call->after.Arrive(ordinal, status, terms);
  if (status.ok()) {
    return {};
  }
  clique.Fail(status);
  return clique.Failure();  // the first cause
}

Status Site::Execute(int ordinal, Stream stream, std::int64_t run,
                     std::span<const Operand> operands, std::span<const Result> results) {
  if (ordinal < 0 || ordinal >= kMaxOrdinals ||
      !places_[static_cast<std::size_t>(ordinal)].is_ready) {
    return Internal("CUDA device " + std::to_string(ordinal) + " was not initialized");
  }
  if (operands.size() != operation_->num_operands() ||
      results.size() != operation_->num_results()) {
    return Internal("wrong number of buffers");
  }
  SmallArray<const void*, kFewBuffers> from(operands.size());
  SmallArray<void*, kFewBuffers> to(results.size());
  for (std::size_t i = 0; i < operands.size(); ++i) {
    if (operands[i].bytes != operation_->operand_bytes(i)) {
      return Internal("operand " + std::to_string(i) + ": expected " +
                      std::to_string(operation_->operand_bytes(i)) + " bytes, got " +
                      std::to_string(operands[i].bytes));
    }
    from[i] = operands[i].data;
  }
  for (std::size_t i = 0; i < results.size(); ++i) {
    if (results[i].bytes != operation_->result_bytes(i)) {
      return Internal("result " + std::to_string(i) + ": expected " +
                      std::to_string(operation_->result_bytes(i)) + " bytes, got " +
                      std::to_string(results[i].bytes));
    }
    to[i] = results[i].data;
  }
  // XLA has its context on this thread already; that is nowhere promised.
  const Libraries& libraries = engine_.libraries();
  if (const int error = libraries.runtime.set_device(ordinal); error != kCudaSuccess) {
    return libraries.OfRuntime("cudaSetDevice", error);
  }
  engine_.CountCall();
  Place& place = places_[static_cast<std::size_t>(ordinal)];
  const bool is_first = !place.first_call->after.is_done();
  const RecordedCall recorded = Record(place, run);
  const bool is_checked = !operation_->traps(place.clique->SeatOf(ordinal));
  const auto call = [&] {
    return place.clique->Run(
        ordinal, stream, id_, is_first, is_checked, recorded, [&](const Seat& seat) {
          return operation_->Enqueue(libraries, seat, stream, {from.data(), operands.size()},
                                     {to.data(), results.size()});
        });
  };
  Status status = is_first ? RunFirst(place, ordinal, call) : call();
  if (!status.ok()) {
    recorded.Fail();
  }
  return status;
}

}  // namespace jaxcoll::cuda
