// benchmarks/bare.cc: collectives between processes with nothing around them, as XLA's calls.
//
// What of a call nobody can do without: the ranks learn of each other, and the bytes move. Nothing
// is checked, named, recorded or timed, no rank may be missing, there is one rank in a process and
// one group, and operands are f32. What a library takes beyond this is its own; what it can't be
// below this is the machine's.
//
// Bytes between private memories of two processes can go two ways: through memory that both have,
// which is two copies, or by the system's call that reads another process. Both are here; the
// faster one counts.
#include <fcntl.h>     // open
#include <sched.h>     // sched_yield
#include <sys/mman.h>  // mmap
#include <sys/uio.h>   // process_vm_readv
#include <unistd.h>    // close, getpid

#include <algorithm>  // std::max, std::min
#include <atomic>     // std::atomic
#include <chrono>     // std::chrono::steady_clock
#include <cstddef>    // offsetof, std::byte, std::size_t
#include <cstdint>    // std::int64_t, std::uint64_t
#include <cstring>    // std::memcpy
#include <vector>     // std::vector

#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;

// As in bare_chains.py.
enum class Op : std::int64_t {
  kAllReduce,
  kAllGather,
  kReduceScatter,
  kAllToAll,
  kPPermute,
  kBroadcast
};
enum class Route : std::int64_t { kNothing, kWindow, kRead };

// So many pieces may a rank leave before those that read them have taken the first.
constexpr std::size_t kPieces = 4;
constexpr std::size_t kMostPieceBytes = std::size_t{256} * 1024;
// Pieces go round in this much, so that what is written again has left the caches of those that
// have read it, and their cores need not be asked for it; all of kPieces fit.
constexpr std::size_t kRingBytes = std::size_t{2} * 1024 * 1024;
// But for smaller ones, which are faster in lines that are near.
constexpr std::size_t kSmallBytes = std::size_t{8} * 1024;
// Of all others; up to here each rank reduces all of it, for one meeting instead of two.
constexpr std::size_t kOneShotBytes = std::size_t{64} * 1024;
// Of what is read of another process before it is added.
constexpr std::size_t kChunkBytes = std::size_t{128} * 1024;
// Looks before the core is offered to others, where each rank has one.
constexpr int kLooks = 10'000;
// And where ranks share cores.
constexpr int kCrowdedLooks = 5;

struct Rank {
  // Steps that it has done, of all calls: all ranks count alike.
  alignas(64) std::atomic<std::uint64_t> steps;
  // Hand-overs of a line, see BareRoundTrip.
  alignas(64) std::atomic<std::uint64_t> turns;
  // Of its call, for those that read its memory.
  alignas(64) std::int64_t pid;
  const std::byte* operand;
  const std::byte* result;
  alignas(4096) std::byte small[kPieces][kSmallBytes];
  std::byte ring[kRingBytes];
};

Rank* ranks = nullptr;
std::size_t num_ranks = 0;
std::size_t me = 0;
int looks_at_once = kLooks;
std::uint64_t steps = 0;               // of this rank
std::size_t next_in_ring = 0;          // for all ranks, which leave pieces of the same sizes
std::size_t place = 0;                 // of the last piece, in each rank
std::vector<std::uint64_t> last_seen;  // of all, which may be more by now

void Await(std::size_t rank, std::uint64_t wanted) {
  if (last_seen[rank] >= wanted) {
    return;
  }
  for (int looks = 0;; ++looks) {
    last_seen[rank] = ranks[rank].steps.load(std::memory_order_acquire);
    if (last_seen[rank] >= wanted) {
      return;
    }
    if (looks < looks_at_once) {
      __builtin_ia32_pause();
    } else {
      sched_yield();
      looks = 0;
    }
  }
}

void Publish() { ranks[me].steps.store(++steps, std::memory_order_release); }

// Who reads what `from` leaves.
bool Reads(Op op, std::size_t reader, std::size_t from) {
  switch (op) {
    case Op::kPPermute:
      return reader == (from + 1) % num_ranks;
    case Op::kBroadcast:
      return from == 0 && reader != 0;
    default:
      return reader != from;
  }
}

// f(rank) of those whose data this rank reads; all begin with another one.
template <typename F>
void EachSource(Op op, const F& f) {
  for (std::size_t i = 1; i < num_ranks; ++i) {
    if (const std::size_t rank = (me + i) % num_ranks; Reads(op, me, rank)) {
      f(rank);
    }
  }
}

template <typename F>
void EachReader(Op op, const F& f) {
  for (std::size_t rank = 0; rank < num_ranks; ++rank) {
    if (rank != me && Reads(op, rank, me)) {
      f(rank);
    }
  }
}

// In place there is nothing to do for a rank's own part.
void Copy(void* to, const void* from, std::size_t bytes) {
  if (to != from) {
    std::memcpy(to, from, bytes);
  }
}

// to = a + b; `to` may be `a`.
void Add(std::byte* to, const std::byte* a, const std::byte* b, std::size_t bytes) {
  auto* const sums = reinterpret_cast<float*>(to);
  const auto* const x = reinterpret_cast<const float*>(a);
  const auto* const y = reinterpret_cast<const float*>(b);
#pragma GCC ivdep
  for (std::size_t i = 0; i < bytes / sizeof(float); ++i) {
    sums[i] = x[i] + y[i];
  }
}

// ---- Through windows --------------------------------------------------------------------------

// Where this rank's next step leaves so many bytes.
std::byte* NextPlace(Op op, std::size_t bytes) {
  if (steps >= kPieces) {  // who begins a step has ended those before it
    EachReader(op, [](std::size_t rank) { Await(rank, steps + 2 - kPieces); });
  }
  if (bytes < kSmallBytes) {
    place = offsetof(Rank, small) + steps % kPieces * kSmallBytes;
  } else {
    if (next_in_ring + bytes > kRingBytes) {
      next_in_ring = 0;
    }
    place = offsetof(Rank, ring) + next_in_ring;
    next_in_ring += (bytes + 63) / 64 * 64;
  }
  return reinterpret_cast<std::byte*>(&ranks[me]) + place;
}

// What `rank` has left in the last step of this one.
const std::byte* Left(std::size_t rank) {
  Await(rank, steps);
  return reinterpret_cast<const std::byte*>(&ranks[rank]) + place;
}

void ReduceInWindows(const std::byte* x, std::byte* y, std::size_t bytes) {
  for (std::size_t at = 0; at < bytes; at += kMostPieceBytes) {
    const std::size_t length = std::min(kMostPieceBytes, bytes - at);
    Copy(NextPlace(Op::kAllReduce, length), x + at, length);
    Publish();
    const std::byte* sum = x + at;
    EachSource(Op::kAllReduce, [&](std::size_t rank) {
      Add(y + at, sum, Left(rank), length);
      sum = y + at;
    });
  }
}

// In blocks of `block` bytes for each rank, who sums its own up; the others copy all_reduce's.
void ReduceBlocksInWindows(Op op, const std::byte* x, std::byte* y, std::size_t block) {
  const std::size_t most = kMostPieceBytes / num_ranks / 64 * 64;
  const bool gathers = op == Op::kAllReduce;
  for (std::size_t at = 0; at < block; at += most) {
    const std::size_t length = std::min(most, block - at);
    std::byte* const to = NextPlace(op, num_ranks * length);
    EachReader(op,
               [&](std::size_t rank) { Copy(to + rank * length, x + rank * block + at, length); });
    Publish();
    std::byte* const mine = y + (gathers ? me * block : 0) + at;
    const std::byte* sum = x + me * block + at;
    EachSource(op, [&](std::size_t rank) {
      Add(mine, sum, Left(rank) + me * length, length);
      sum = mine;
    });
    if (gathers) {
      Copy(NextPlace(op, length), mine, length);
      Publish();
      EachSource(op, [&](std::size_t rank) { Copy(y + rank * block + at, Left(rank), length); });
    }
  }
}

void CopyInWindows(Op op, const std::byte* x, std::byte* y, std::size_t bytes) {
  const bool exchanges = op == Op::kAllToAll;
  const std::size_t block = exchanges ? bytes / num_ranks : bytes;
  const std::size_t most = exchanges ? kMostPieceBytes / num_ranks / 64 * 64 : kMostPieceBytes;
  for (std::size_t at = 0; at < block; at += most) {
    const std::size_t length = std::min(most, block - at);
    std::byte* const to = NextPlace(op, exchanges ? num_ranks * length : length);
    if (exchanges) {
      EachReader(
          op, [&](std::size_t rank) { Copy(to + rank * length, x + rank * block + at, length); });
    } else if (op != Op::kBroadcast || me == 0) {
      Copy(to, x + at, length);
    }
    Publish();
    if (op == Op::kAllGather || exchanges) {
      Copy(y + me * block + at, x + (exchanges ? me * block : 0) + at, length);
    } else if (op == Op::kBroadcast && me == 0) {
      Copy(y + at, x + at, length);
    }
    EachSource(op, [&](std::size_t rank) {
      Copy(y + (op == Op::kAllGather || exchanges ? rank * block : 0) + at,
           Left(rank) + (exchanges ? me * length : 0), length);
    });
  }
}

// ---- From another process's memory ------------------------------------------------------------

bool ReadPeer(std::size_t rank, std::byte* to, const std::byte* from, std::size_t bytes) {
  while (bytes > 0) {
    iovec here{.iov_base = to, .iov_len = bytes};
    iovec there{.iov_base = const_cast<std::byte*>(from), .iov_len = bytes};
    const ssize_t got =
        process_vm_readv(static_cast<pid_t>(ranks[rank].pid), &here, 1, &there, 1, 0);
    if (got <= 0) {
      return false;
    }
    to += got;
    from += got;
    bytes -= static_cast<std::size_t>(got);
  }
  return true;
}

// After a step in which others were read: until none reads this rank any more.
void AwaitReaders(Op op) {
  Publish();
  EachReader(op, [](std::size_t rank) { Await(rank, steps); });
}

bool ReduceByReading(Op op, const std::byte* x, std::byte* y, std::size_t block) {
  static std::vector<std::byte> chunk(kChunkBytes);
  bool ok = true;
  std::byte* const mine = y + (op == Op::kAllReduce ? me * block : 0);
  for (std::size_t at = 0; at < block; at += kChunkBytes) {
    const std::size_t length = std::min(kChunkBytes, block - at);
    const std::byte* sum = x + me * block + at;
    EachSource(op, [&](std::size_t rank) {
      Await(rank, steps);
      ok = ok && ReadPeer(rank, chunk.data(), ranks[rank].operand + me * block + at, length);
      Add(mine + at, sum, chunk.data(), length);
      sum = mine + at;
    });
  }
  if (op == Op::kAllReduce) {
    Publish();
    EachSource(op, [&](std::size_t rank) {
      Await(rank, steps);
      ok = ok && ReadPeer(rank, y + rank * block, ranks[rank].result + rank * block, block);
    });
  }
  return ok;
}

bool CopyByReading(Op op, const std::byte* x, std::byte* y, std::size_t bytes) {
  const bool exchanges = op == Op::kAllToAll;
  const std::size_t block = exchanges ? bytes / num_ranks : bytes;
  const bool places = exchanges || op == Op::kAllGather;
  if (places) {
    Copy(y + me * block, x + (exchanges ? me * block : 0), block);
  } else if (op == Op::kBroadcast && me == 0) {
    Copy(y, x, block);
  }
  bool ok = true;
  EachSource(op, [&](std::size_t rank) {
    Await(rank, steps);
    ok = ok && ReadPeer(rank, y + (places ? rank * block : 0),
                        ranks[rank].operand + (exchanges ? me * block : 0), block);
  });
  return ok;
}

bool Read(Op op, const std::byte* x, std::byte* y, std::size_t bytes) {
  ranks[me].operand = x;
  ranks[me].result = y;
  Publish();
  const bool ok = op == Op::kAllReduce || op == Op::kReduceScatter
                      ? ReduceByReading(op, x, y, bytes / num_ranks)
                      : CopyByReading(op, x, y, bytes);
  AwaitReaders(op);
  return ok;
}

ffi::Error Call(ffi::AnyBuffer operand, ffi::Result<ffi::AnyBuffer> result, std::int64_t op_number,
                std::int64_t route) {
  const auto* const x = static_cast<const std::byte*>(operand.untyped_data());
  auto* const y = static_cast<std::byte*>(result->untyped_data());
  const auto op = static_cast<Op>(op_number);
  const std::size_t bytes = operand.size_bytes();
  switch (static_cast<Route>(route)) {
    case Route::kNothing:
      break;
    case Route::kRead:
      return Read(op, x, y, bytes) ? ffi::Error::Success()
                                   : ffi::Error::Internal("another process can't be read");
    case Route::kWindow:
      if (op == Op::kAllReduce && bytes * (num_ranks - 1) <= kOneShotBytes) {
        ReduceInWindows(x, y, bytes);
      } else if (op == Op::kAllReduce || op == Op::kReduceScatter) {
        ReduceBlocksInWindows(op, x, y, bytes / num_ranks);
      } else {
        CopyInWindows(op, x, y, bytes);
      }
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(BareCall, Call,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<std::int64_t>("op")
                                  .Attr<std::int64_t>("route"));

/// What the file of a job of so many ranks must hold.
extern "C" std::size_t BareBytes(std::size_t ranks_of_job) { return sizeof(Rank) * ranks_of_job; }

/// Before any call; `path` is a file of zeros that all ranks share. False: it can't be mapped.
extern "C" bool BareJoin(const char* path, std::size_t rank, std::size_t ranks_of_job,
                         bool share_cores) {
  const int file = open(path, O_RDWR);
  void* const at = mmap(nullptr, BareBytes(ranks_of_job), PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_POPULATE, file, 0);
  close(file);
  if (at == MAP_FAILED) {
    return false;
  }
  ranks = static_cast<Rank*>(at);
  num_ranks = ranks_of_job;
  me = rank;
  looks_at_once = share_cores ? kCrowdedLooks : kLooks;
  last_seen.assign(num_ranks, 0);
  ranks[me].pid = getpid();
  return true;
}

/// All ranks call. Ns that a cache line takes from rank 0's core to rank 1's and back, to rank 0; 0
/// to others, and where ranks share cores.
extern "C" double BareRoundTrip(std::uint64_t times) {
  if (me > 1 || num_ranks < 2 || looks_at_once == kCrowdedLooks) {
    return 0;
  }
  const std::uint64_t begin = ranks[me].turns.load(std::memory_order_relaxed);
  const auto since = std::chrono::steady_clock::now();
  for (std::uint64_t turn = begin + 1; turn <= begin + times; ++turn) {
    if (me == 0) {
      ranks[0].turns.store(turn, std::memory_order_release);
    }
    while (ranks[1 - me].turns.load(std::memory_order_acquire) < turn) {
    }
    if (me == 1) {
      ranks[1].turns.store(turn, std::memory_order_release);
    }
  }
  const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - since;
  return me == 0 ? took.count() / static_cast<double>(times) : 0;
}
