#include "mpi/door.h"

#include <dlfcn.h>  // dlopen, dlsym, dlerror

#include <algorithm>  // std::move, std::partition
#include <deque>      // std::deque
#include <iterator>   // std::back_inserter
#include <map>        // std::map
#include <memory>     // std::make_unique, std::unique_ptr
#include <mutex>      // std::mutex
#include <thread>     // std::this_thread, std::thread

#include "core/status.h"
#include "core/types.h"
#include "host/communicator.h"
#include "host/job.h"

namespace jaxcoll {
namespace {

struct Handle;

/// What a request of XLA points to. XLA waits for it right after it has begun all that belongs to
/// one of its calls, so that a thread that receives need not do so before.
struct Request {
  Handle& handle;
  Operation operation;
  void* receive;  // null: it sends
  PendingCall call;
  std::thread::id thread = std::this_thread::get_id();  // whose call of XLA it belongs to
};

/// What a communicator of XLA points to. Never freed: XLA keeps its communicators, too.
struct Handle {
  std::unique_ptr<Communicator> communicator;  // null: XLA asked for an unknown one
  std::string problem;
  bool is_new = false;  // the next call is the one that only asked for the communicator
  std::mutex mutex;     // guards the next
  std::vector<std::unique_ptr<Request>> requests;  // not waited for yet
};

class Door {
 public:
  static Door& Get() {
    static auto* const door = new Door();  // leaked: XLA may call at exit
    return *door;
  }

  std::size_t Expect(const std::vector<ExpectedClique>& cliques, bool is_of_job) {
    const std::lock_guard<std::mutex> lock(mutex_);
    expected_.clear();
    for (const ExpectedClique& clique : cliques) {
      std::unique_ptr<Clique>& known = cliques_[clique.devices];
      if (known == nullptr) {
        known = std::make_unique<Clique>(clique.devices, clique.processes,
                                         is_of_job ? &Job::Get() : nullptr);
      }
      expected_.push_back(known.get());
    }
    const std::size_t num_made = num_made_;
    num_made_ = 0;
    return num_made;
  }

  void Describe(const std::vector<std::int64_t>& devices, Operation::Kind kind, std::size_t count,
                const std::string& origin) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (const auto found = cliques_.find(devices); found != cliques_.end()) {
      found->second->Describe(kind, count, origin);
    }
  }

  Handle& Split(int color, int key) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Handle& handle = handles_.emplace_back();
    for (Clique* const clique : expected_) {
      const std::vector<std::int64_t>& devices = clique->devices();
      if (devices[0] == color && key >= 0 && static_cast<std::size_t>(key) < devices.size()) {
        handle.communicator =
            std::make_unique<Communicator>(*clique, static_cast<std::size_t>(key));
        handle.is_new = true;
        ++num_made_;
        return handle;
      }
    }
    handle.problem = "XLA asked for a group of devices that jaxcoll has not seen: rank " +
                     std::to_string(key) + " of one that begins with device " +
                     std::to_string(color) +
                     ". The program was compiled before jaxcoll.initialize(accelerate=True), or "
                     "not by JAX";
    return handle;
  }

  int Error(const std::string& message) {
    const std::lock_guard<std::mutex> lock(mutex_);
    // Many ranks fail for one cause.
    for (std::size_t i = 0; i < errors_.size(); ++i) {
      if (errors_[i] == message) {
        return static_cast<int>(i) + kFirstError;
      }
    }
    if (errors_.size() < kMaxErrors) {
      errors_.push_back(message);
      return static_cast<int>(errors_.size()) - 1 + kFirstError;
    }
    return kFirstError - 1;
  }

  const char* ErrorText(int error) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto i = static_cast<std::size_t>(error - kFirstError);
    return error < kFirstError || i >= errors_.size()
               ? "jaxcoll.CollectiveError: another failure, after very many"
               : errors_[i].c_str();
  }

 private:
  static constexpr int kFirstError = 1000;
  static constexpr std::size_t kMaxErrors = 10'000;

  std::mutex mutex_;                                                      // guards everything below
  std::map<std::vector<std::int64_t>, std::unique_ptr<Clique>> cliques_;  // by devices
  std::vector<Clique*> expected_;
  std::size_t num_made_ = 0;
  std::deque<Handle> handles_;  // a deque's elements don't move
  std::deque<std::string> errors_;
};

int Fail(const std::string& message) {
  return Door::Get().Error("jaxcoll.CollectiveError: " + message);
}

int Result(const Status& status) { return status.ok() ? 0 : Fail(status.message); }

// The communicator to call, or null and the error.
Communicator* Enter(void* handle, int& error) {
  auto& entered = *static_cast<Handle*>(handle);
  error = entered.communicator == nullptr ? Fail(entered.problem) : 0;
  return entered.communicator.get();
}

bool IsType(int dtype) { return dtype >= 0 && static_cast<std::size_t>(dtype) < kNumDTypes; }
bool IsOp(int op) { return op >= 0 && static_cast<std::size_t>(op) < kNumReduceOps; }
bool IsRank(int rank, const Communicator& communicator) {
  return rank >= 0 && static_cast<std::size_t>(rank) < communicator.size();
}

int Call(void* handle, const Operation& operation, const void* send, void* receive) {
  int error = 0;
  Communicator* const communicator = Enter(handle, error);
  return communicator == nullptr ? error : Result(communicator->Call(operation, send, receive));
}

int Split(int color, int key, void** communicator) {
  Handle& handle = Door::Get().Split(color, key);
  *communicator = &handle;
  return handle.communicator == nullptr ? Fail(handle.problem) : 0;
}

int Rank(const void* handle) {
  const auto& communicator = static_cast<const Handle*>(handle)->communicator;
  // No rank at all, so that XLA takes nothing for a copy from itself, and comes to the error.
  return communicator == nullptr ? -1 : static_cast<int>(communicator->rank());
}

int Size(const void* handle) {
  const auto& communicator = static_cast<const Handle*>(handle)->communicator;
  return communicator == nullptr ? 1 : static_cast<int>(communicator->size());
}

int AllReduce(void* handle, const void* send, void* receive, std::int64_t count, int dtype,
              int op) {
  auto& entered = *static_cast<Handle*>(handle);
  if (entered.is_new) {
    entered.is_new = false;
    return 0;
  }
  if (!IsType(dtype) || !IsOp(op) || count < 0) {
    return Fail("MPI_Allreduce of an unknown type, operation or count");
  }
  return Call(handle,
              {.kind = Operation::Kind::kAllReduce,
               .dtype = static_cast<DType>(dtype),
               .op = static_cast<ReduceOp>(op),
               .count = static_cast<std::size_t>(count)},
              send, receive);
}

int AllGather(void* handle, const void* send, void* receive, std::int64_t count, int dtype) {
  if (!IsType(dtype) || count < 0) {
    return Fail("MPI_Allgather of an unknown type or count");
  }
  return Call(handle,
              {.kind = Operation::Kind::kAllGather,
               .dtype = static_cast<DType>(dtype),
               .count = static_cast<std::size_t>(count)},
              send, receive);
}

int ReduceScatter(void* handle, const void* send, void* receive, std::int64_t count, int dtype,
                  int op) {
  if (!IsType(dtype) || !IsOp(op) || count < 0) {
    return Fail("MPI_Reduce_scatter of an unknown type, operation or count");
  }
  return Call(handle,
              {.kind = Operation::Kind::kReduceScatter,
               .dtype = static_cast<DType>(dtype),
               .op = static_cast<ReduceOp>(op),
               .count = static_cast<std::size_t>(count)},
              send, receive);
}

// A step of XLA's all-to-all: all ranks send over the same distance.
int Exchange(void* handle, const void* send, int to, void* receive, int from, std::int64_t bytes) {
  int error = 0;
  Communicator* const communicator = Enter(handle, error);
  if (communicator == nullptr) {
    return error;
  }
  const std::size_t size = communicator->size();
  if (!IsRank(to, *communicator) || !IsRank(from, *communicator) || bytes < 0) {
    return Fail("MPI_Sendrecv with an unknown rank or count");
  }
  const std::size_t distance = (static_cast<std::size_t>(to) + size - communicator->rank()) % size;
  if ((static_cast<std::size_t>(from) + distance) % size != communicator->rank()) {
    return Fail("MPI_Sendrecv over two different distances");
  }
  return Result(communicator->Call(
      {.kind = Operation::Kind::kShift, .count = static_cast<std::size_t>(bytes), .from = distance},
      send, receive));
}

// After an error XLA waits for none of a call's other requests, and frees their buffers.
int EndAll(Handle& handle, int error) {
  std::vector<std::unique_ptr<Request>> requests;
  {
    const std::lock_guard<std::mutex> lock(handle.mutex);
    const auto is_others = [](const std::unique_ptr<Request>& request) {
      return request->thread != std::this_thread::get_id();
    };
    const auto mine = std::partition(handle.requests.begin(), handle.requests.end(), is_others);
    std::move(mine, handle.requests.end(), std::back_inserter(requests));
    handle.requests.erase(mine, handle.requests.end());
  }
  for (const std::unique_ptr<Request>& request : requests) {
    static_cast<void>(request->call.Wait());  // has failed, too, or will soon
  }
  return error;
}

Request& Add(Handle& handle, const Operation& operation, void* receive) {
  const std::lock_guard<std::mutex> lock(handle.mutex);
  return *handle.requests.emplace_back(std::make_unique<Request>(handle, operation, receive));
}

int Send(void* handle, const void* data, std::int64_t bytes, int to, void** request) {
  int error = 0;
  Communicator* const communicator = Enter(handle, error);
  if (communicator == nullptr) {
    return error;
  }
  if (!IsRank(to, *communicator) || bytes < 0) {
    return Fail("MPI_Isend with an unknown rank or count");
  }
  Request& made = Add(*static_cast<Handle*>(handle),
                      {.kind = Operation::Kind::kSend,
                       .count = static_cast<std::size_t>(bytes),
                       .from = communicator->rank(),
                       .to = static_cast<std::size_t>(to)},
                      nullptr);
  const Status status = communicator->Begin(made.operation, data, nullptr, made.call);
  *request = &made;
  return status.ok() ? 0 : EndAll(made.handle, Result(status));
}

int Receive(void* handle, void* data, std::int64_t bytes, int from, void** request) {
  int error = 0;
  Communicator* const communicator = Enter(handle, error);
  if (communicator == nullptr) {
    return error;
  }
  if (!IsRank(from, *communicator) || bytes < 0) {
    return Fail("MPI_Irecv with an unknown rank or count");
  }
  *request = &Add(*static_cast<Handle*>(handle),
                  {.kind = Operation::Kind::kSend,
                   .count = static_cast<std::size_t>(bytes),
                   .from = static_cast<std::size_t>(from),
                   .to = communicator->rank()},
                  data);
  return 0;
}

int Wait(void* waited_for) {
  auto* const request = static_cast<Request*>(waited_for);
  Handle& handle = request->handle;
  const Status status =
      request->receive == nullptr
          ? request->call.Wait()
          : handle.communicator->Call(request->operation, nullptr, request->receive);
  {
    const std::lock_guard<std::mutex> lock(handle.mutex);
    std::erase_if(handle.requests, [request](const std::unique_ptr<Request>& other) {
      return other.get() == request;
    });
  }
  return status.ok() ? 0 : EndAll(handle, Result(status));
}

int Refuse(const char* function) {
  return Fail(std::string(function) +
              ": XLA has not called it before, and jaxcoll does not have it");
}

constexpr MpiCalls kCalls = {
    .split = &Split,
    .rank = &Rank,
    .size = &Size,
    .all_reduce = &AllReduce,
    .all_gather = &AllGather,
    .reduce_scatter = &ReduceScatter,
    .exchange = &Exchange,
    .send = &Send,
    .receive = &Receive,
    .wait = &Wait,
    .refuse = &Refuse,
    .error_text = [](int error) { return Door::Get().ErrorText(error); },
};

}  // namespace

std::string ConnectMpi(const std::string& path) {
  void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);  // stays open
  void* const connect = library == nullptr ? nullptr : dlsym(library, kConnectName);
  if (connect == nullptr) {
    const char* const why = dlerror();  // NOLINT(concurrency-mt-unsafe): of this thread
    return why == nullptr ? "it has no " + std::string(kConnectName) : why;
  }
  reinterpret_cast<void (*)(const MpiCalls*)>(connect)(&kCalls);
  return "";
}

void DescribeCalls(const std::vector<std::int64_t>& devices, int kind, std::size_t count,
                   const std::string& origin) {
  Door::Get().Describe(devices, static_cast<Operation::Kind>(kind), count, origin);
}

std::size_t ExpectCommunicators(const std::vector<ExpectedClique>& cliques, bool is_of_job) {
  return Door::Get().Expect(cliques, is_of_job);
}

}  // namespace jaxcoll
