#include "host/segment.h"

#include <fcntl.h>        // posix_fallocate
#include <linux/futex.h>  // FUTEX_WAKE
#include <sys/mman.h>     // mmap, munmap
#include <sys/stat.h>     // fstat
#include <sys/syscall.h>  // SYS_futex
#include <unistd.h>       // syscall, sysconf

#include <algorithm>  // std::max
#include <cerrno>     // errno
#include <climits>    // INT_MAX
#include <cstring>    // std::strerror
#include <new>        // placement new
#include <thread>     // std::this_thread::yield

#include "core/align.h"
#include "core/clock.h"

namespace jaxcoll {
namespace {

// Changes with every change of what stands in a segment.
constexpr std::uint64_t kSegmentMagic = 0x6a61'7863'6f6c'0008;
constexpr std::size_t kHeaderBytes = 8 * kPage;
constexpr std::int64_t kCausePatienceNs = 100'000'000;

// Far beyond it the kernel does not refuse shared memory: it kills whoever fills it.
std::size_t MachineBytes() {
  return static_cast<std::size_t>(sysconf(_SC_PHYS_PAGES)) *
         static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
}

std::uint64_t Mixed(std::uint64_t hash, std::uint64_t value) {
  // splitmix64's finalizer: every bit of a name counts.
  std::uint64_t z = (hash ^ value) + 0x9e37'79b9'7f4a'7c15;
  z = (z ^ (z >> 30)) * 0xbf58'476d'1ce4'e5b9;
  z = (z ^ (z >> 27)) * 0x94d0'49bb'1331'11eb;
  return z ^ (z >> 31);
}

std::string ErrorText(int error) { return std::strerror(error); }  // NOLINT(concurrency-mt-unsafe)

}  // namespace

std::uint64_t CallName::HashOf(std::uint64_t group, std::uint64_t site) {
  return Mixed(Mixed(0, group), site);
}

std::uint64_t CallName::Tag(std::uint64_t hash, std::uint64_t occurrence) {
  return std::max<std::uint64_t>(Mixed(hash, occurrence) >> Lane::kProgressBits, 1);
}

struct Segment::Header {
  std::atomic<std::uint64_t> magic;  // written last
  std::uint64_t nonce;
  std::uint64_t num_seats;
  std::uint64_t num_lanes;
  std::uint64_t window_bytes;
  alignas(kCacheLine) std::atomic<std::uint32_t> state;
  alignas(kCacheLine) SharedText<Segment::kMaxCauseBytes> cause;
};

std::size_t SegmentShape::bytes() const {
  const std::size_t num_ended = num_seats * num_seats * ended_step();
  return kHeaderBytes + RoundedUp(num_seats * sizeof(Seat), kPage) +
         RoundedUp(num_seats * num_lanes * sizeof(Lane), kPage) +
         RoundedUp(num_ended * sizeof(std::uint64_t), kPage) + num_seats * num_lanes * window_bytes;
}

Status Segment::Format(int memory, const SegmentShape& shape, std::uint64_t nonce) {
  static_assert(sizeof(Header) <= kHeaderBytes);
  if (shape.num_seats == 0 || shape.num_lanes == 0 || shape.window_bytes % kPage != 0 ||
      shape.window_bytes == 0) {
    return InvalidArgument("a segment needs seats, lanes, and windows of whole pages");
  }
  if (shape.window_bytes > MachineBytes() / shape.num_lanes / shape.num_seats) {
    return Internal("no memory for " + std::to_string(shape.num_seats) + " times " +
                    std::to_string(shape.num_lanes) + " windows of " +
                    std::to_string(shape.window_bytes) + " bytes");
  }
  // Not ftruncate, which succeeds beyond what there is, so that the first write would kill.
  int error = EINTR;
  while (error == EINTR) {
    error = posix_fallocate(memory, 0, static_cast<off_t>(shape.bytes()));
  }
  if (error != 0) {
    return Internal("no " + std::to_string(shape.bytes() >> 20) +
                    " MiB of shared memory: " + ErrorText(error));
  }
  void* const base = mmap(nullptr, shape.bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
  if (base == MAP_FAILED) {
    return Internal("mmap: " + ErrorText(errno));
  }
  // Fresh memory is zero, which is the initial value of all else.
  auto* const header = new (base) Header();
  header->nonce = nonce;
  header->num_seats = shape.num_seats;
  header->num_lanes = shape.num_lanes;
  header->window_bytes = shape.window_bytes;
  header->magic.store(kSegmentMagic, std::memory_order_release);
  munmap(base, shape.bytes());
  return {};
}

Status Segment::Map(int memory, std::uint64_t nonce) {
  struct stat info{};
  if (fstat(memory, &info) != 0) {
    return Internal("fstat: " + ErrorText(errno));
  }
  const auto size = static_cast<std::size_t>(info.st_size);
  if (size < sizeof(Header)) {
    return Internal("what was to be the job's segment has " + std::to_string(size) + " bytes");
  }
  void* const base = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
  if (base == MAP_FAILED) {
    return Internal("mmap: " + ErrorText(errno));
  }
  auto* const header = static_cast<Header*>(base);
  const SegmentShape shape{.num_seats = header->num_seats,
                           .num_lanes = header->num_lanes,
                           .window_bytes = header->window_bytes};
  if (header->magic.load(std::memory_order_acquire) != kSegmentMagic || header->nonce != nonce ||
      shape.bytes() != size) {
    munmap(base, size);
    return Internal("a segment of another job, or of another version of jaxcoll");
  }
  base_ = static_cast<std::byte*>(base);
  shape_ = shape;
  ended_lines_ = shape_.ended_lines();
  header_ = header;
  state_ = &header->state;
  std::byte* at = base_ + kHeaderBytes;
  seats_ = reinterpret_cast<Seat*>(at);
  at += RoundedUp(shape.num_seats * sizeof(Seat), kPage);
  lanes_ = reinterpret_cast<Lane*>(at);
  at += RoundedUp(shape.num_seats * shape.num_lanes * sizeof(Lane), kPage);
  ended_ = reinterpret_cast<std::atomic<std::uint64_t>*>(at);
  windows_ =
      at + RoundedUp(shape.num_seats * shape.num_seats * shape.ended_step() * sizeof(std::uint64_t),
                     kPage);
  return {};
}

std::uint64_t Segment::nonce() const { return header_->nonce; }

Segment::~Segment() {
  if (base_ != nullptr) {
    munmap(base_, shape_.bytes());
  }
}

bool Segment::Fail(std::string_view cause) const {
  std::uint32_t state = kSound;
  if (!header_->state.compare_exchange_strong(state, kFailing, std::memory_order_acq_rel)) {
    return false;
  }
  header_->cause.Set(cause);
  header_->state.store(kFailed, std::memory_order_seq_cst);
  for (std::size_t i = 0; i < shape_.num_seats; ++i) {
    Ring(i);
  }
  return true;
}

std::string Segment::failure() const {
  const std::int64_t since_ns = NowNs();
  while (header_->state.load(std::memory_order_acquire) != kFailed) {
    if (NowNs() - since_ns > kCausePatienceNs) {
      return "a process of the job failed and could not say why";
    }
    std::this_thread::yield();
  }
  return header_->cause.Get();
}

void Segment::Ring(std::size_t seat) const {
  std::atomic<std::uint32_t>& bell = seats_[seat].bell;
  bell.fetch_add(1, std::memory_order_seq_cst);
  syscall(SYS_futex, &bell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace jaxcoll
