#include "host/black_box.h"

#include <signal.h>    // sigaction, NOLINT(modernize-deprecated-headers)
#include <sys/mman.h>  // memfd_create, mmap, munmap
#include <sys/stat.h>  // fstat
#include <unistd.h>    // ftruncate, getpid

#include <algorithm>  // std::find, std::min, std::reverse
#include <cstdlib>    // std::abort
#include <ctime>      // clock_gettime, nanosleep
#include <mutex>      // std::mutex
#include <new>        // placement new
#include <thread>     // std::this_thread::yield
#include <utility>    // std::move
#include <vector>     // std::vector

#include "core/align.h"
#include "core/clock.h"

namespace jaxcoll {
namespace {

// Changes with every change of what stands in a black box.
constexpr std::uint64_t kBoxMagic = 0x6a61'7863'626f'0002;
constexpr std::int64_t kAnswerLookNs = 5'000'000;
// Whoever looks after a process does so more often.
constexpr std::int64_t kDeafNs = 3'000'000'000;
// XLA and MLIR can keep the interpreter for a while when they compile.
constexpr std::int64_t kSilentNs = 60'000'000'000;

// Alike calls of functions of one name share a site id, which must not depend on source lines. The
// latest: a function that is edited and defined anew, as in a notebook, has no other id either.
constexpr std::size_t kMaxTexts = 4;

constexpr std::size_t kStackAt = kPage;
constexpr std::size_t kSitesAt = kStackAt + RoundedUp(sizeof(BlackBox::Stack), kPage);
constexpr std::size_t kRingsAt =
    kSitesAt + RoundedUp(BlackBox::kMaxSites * sizeof(BlackBox::SiteSlot), kPage);
constexpr std::size_t kBoxBytes = kRingsAt + BlackBox::kMaxRings * sizeof(BlackBox::Ring);
static_assert(sizeof(BlackBox::Header) <= kPage);

constexpr std::array<std::uint64_t, 11> kMeasures = {kBoxBytes,
                                                     kStackAt,
                                                     sizeof(BlackBox::Stack),
                                                     kSitesAt,
                                                     sizeof(BlackBox::SiteSlot),
                                                     BlackBox::kMaxSites,
                                                     kRingsAt,
                                                     sizeof(BlackBox::Ring),
                                                     BlackBox::kMaxRings,
                                                     sizeof(BlackBox::Entry),
                                                     BlackBox::kCapacity};

std::int64_t WallNs() {
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  return std::int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

// Only what is touched takes memory. Private where the system gives no file for it.
void* Memory(int& file) {
  file = memfd_create("jaxcoll-black-box", MFD_CLOEXEC);
  if (file >= 0 && ftruncate(file, kBoxBytes) == 0) {
    void* const base = mmap(nullptr, kBoxBytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (base != MAP_FAILED) {
      return base;
    }
  }
  if (file >= 0) {
    close(file);
    file = -1;
  }
  return mmap(nullptr, kBoxBytes, PROT_READ | PROT_WRITE,
              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
}

std::mutex& WriteMutex() {  // of this process's: sites, rings and the stack have several writers
  static auto* const mutex = new std::mutex();
  return *mutex;
}

}  // namespace

BlackBox& BlackBox::Get() {
  static BlackBox* const box = [] {
    auto* const made = new BlackBox();  // leaked: threads record until the process ends
    void* const base = Memory(made->memory_);
    if (base == MAP_FAILED) {
      std::abort();  // no address space
    }
    auto* const header = new (base) Header();
    header->measures = kMeasures;
    header->pid.store(getpid(), std::memory_order_relaxed);
    header->num_processes.store(1, std::memory_order_relaxed);
    header->started_ns.store(NowNs(), std::memory_order_relaxed);
    header->started_wall_ns.store(WallNs(), std::memory_order_relaxed);
    header->magic.store(kBoxMagic, std::memory_order_release);
    made->Attach(base);
    return made;
  }();
  return *box;
}

std::shared_ptr<BlackBox> BlackBox::Map(int memory) {
  struct stat info{};
  if (fstat(memory, &info) != 0 || static_cast<std::size_t>(info.st_size) != kBoxBytes) {
    return nullptr;
  }
  void* const base = mmap(nullptr, kBoxBytes, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
  if (base == MAP_FAILED) {
    return nullptr;
  }
  std::shared_ptr<BlackBox> box(new BlackBox());
  if (!box->Attach(base)) {
    return nullptr;
  }
  return box;
}

bool BlackBox::Attach(void* base) {
  auto* const bytes = static_cast<std::byte*>(base);
  header_ = reinterpret_cast<Header*>(bytes);
  stack_ = reinterpret_cast<Stack*>(bytes + kStackAt);
  sites_ = reinterpret_cast<SiteSlot*>(bytes + kSitesAt);
  rings_ = reinterpret_cast<Ring*>(bytes + kRingsAt);
  return header_->magic.load(std::memory_order_acquire) == kBoxMagic &&
         header_->measures == kMeasures;
}

BlackBox::~BlackBox() { munmap(header_, kBoxBytes); }

std::size_t BlackBox::num_rings() const {
  return std::min<std::size_t>(header_->num_rings.load(std::memory_order_acquire), kMaxRings);
}

BlackBox::Ring& BlackBox::NewRing(std::int64_t device) {
  const std::lock_guard<std::mutex> lock(WriteMutex());
  const std::size_t number = num_rings();
  for (std::size_t i = 0; i < number; ++i) {
    if (rings_[i].device.load(std::memory_order_relaxed) == device) {
      return rings_[i];
    }
  }
  if (number == kMaxRings) {
    return rings_[kMaxRings - 1];
  }
  rings_[number].device.store(device, std::memory_order_relaxed);
  header_->num_rings.store(number + 1, std::memory_order_release);
  return rings_[number];
}

void BlackBox::AddSite(std::uint64_t id, std::string_view text, std::string_view json) {
  const std::lock_guard<std::mutex> lock(WriteMutex());
  const std::uint64_t number = header_->num_sites.load(std::memory_order_relaxed);
  SiteSlot& slot = sites_[number % kMaxSites];
  slot.id.store(0, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  slot.text.Set(std::string(text) + "\n" + std::string(json));
  slot.id.store(id, std::memory_order_release);
  header_->num_sites.store(number + 1, std::memory_order_release);
}

std::vector<std::string> BlackBox::SiteTexts(std::uint64_t id) const {
  std::vector<std::string> texts;
  const std::uint64_t number = header_->num_sites.load(std::memory_order_acquire);
  const std::uint64_t first = number - std::min<std::uint64_t>(number, kMaxSites);
  for (std::uint64_t i = number; i > first && texts.size() < kMaxTexts; --i) {
    const SiteSlot& slot = sites_[(i - 1) % kMaxSites];
    if (slot.id.load(std::memory_order_acquire) != id) {
      continue;
    }
    std::string text = slot.text.Get();
    text.resize(std::min(text.find('\n'), text.size()));
    std::atomic_thread_fence(std::memory_order_acquire);
    if (slot.id.load(std::memory_order_relaxed) == id &&
        std::find(texts.begin(), texts.end(), text) == texts.end()) {
      texts.push_back(std::move(text));
    }
  }
  std::reverse(texts.begin(), texts.end());
  return texts;
}

void BlackBox::SetStack(std::string_view text, std::int64_t now_ns) {
  const std::lock_guard<std::mutex> lock(WriteMutex());
  const std::uint64_t version = stack_->version.load(std::memory_order_relaxed);
  stack_->version.store(version + 1, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  stack_->text.Set(text);
  stack_->at_ns.store(now_ns, std::memory_order_relaxed);
  stack_->version.store(version + 2, std::memory_order_release);
}

BlackBox::Told BlackBox::stack() const {
  Told told;
  for (int i = 0; i < 100; ++i) {
    const std::uint64_t version = stack_->version.load(std::memory_order_acquire);
    told = {.stack = stack_->text.Get(), .at_ns = stack_->at_ns.load(std::memory_order_relaxed)};
    std::atomic_thread_fence(std::memory_order_acquire);
    if (version % 2 == 0 && stack_->version.load(std::memory_order_relaxed) == version) {
      break;
    }
    std::this_thread::yield();
  }
  return told;  // torn where the process died while it wrote: better than nothing
}

bool BlackBox::AskForStack(std::int64_t limit_ns) const {
  const std::uint64_t question = header_->asked.fetch_add(1, std::memory_order_acq_rel) + 1;
  const std::int64_t since_ns = NowNs();
  if (since_ns - header_->beat_ns.load(std::memory_order_acquire) > kDeafNs) {
    return false;
  }
  const timespec nap{.tv_sec = 0, .tv_nsec = kAnswerLookNs};
  while (header_->told.load(std::memory_order_acquire) < question &&
         NowNs() - since_ns < limit_ns) {
    nanosleep(&nap, nullptr);
  }
  return header_->told.load(std::memory_order_acquire) >= question;
}

void BlackBox::DumpOnSignal(int number) const {
  struct sigaction action{};
  if (sigaction(number, nullptr, &action) == 0 && action.sa_handler == SIG_DFL) {
    BlackBox::Get();  // which a handler may not make
    action.sa_handler = [](int) {
      Get().header().dumps_asked.fetch_add(1, std::memory_order_relaxed);
    };
    action.sa_flags = SA_RESTART;
    sigaction(number, &action, nullptr);
  }
}

bool BlackBox::IsExcused(std::int64_t now_ns, std::int64_t compile_timeout_ns) const {
  if (header_->paused_until_ns.load(std::memory_order_acquire) > now_ns) {
    return true;
  }
  const auto phase = static_cast<Phase>(header_->phase.load(std::memory_order_acquire));
  const std::int64_t since_ns = header_->phase_since_ns.load(std::memory_order_relaxed);
  // Nobody can say any more whether it still compiles: it is stopped, or keeps the interpreter.
  const bool is_silent = now_ns - header_->beat_ns.load(std::memory_order_acquire) > kSilentNs;
  return phase == Phase::kCompiling && !is_silent &&
         (compile_timeout_ns < 0 || now_ns - since_ns < compile_timeout_ns);
}

std::string_view Name(Phase phase) {
  switch (phase) {
    case Phase::kPython:
      return "in Python";
    case Phase::kCompiling:
      return "compiling";
    case Phase::kCallback:
      return "in a callback";
    case Phase::kAwaiting:
      return "waiting for results";
    case Phase::kEnded:
      return "ended";
    case Phase::kCalling:
      return "in a call";
    case Phase::kUnknown:
      break;
  }
  return "doing something unknown";
}

void DescribeSite(std::uint64_t id, std::string_view text, std::string_view json) {
  BlackBox& box = BlackBox::Get();
  const std::vector<std::string> known = box.SiteTexts(id);
  if (known.empty() || known.back() != text) {
    box.AddSite(id, text, json);
  }
}

std::string SiteText(std::uint64_t id, const BlackBox& box) {
  std::string all;
  for (const std::string& text : box.SiteTexts(id)) {
    all += (all.empty() ? "" : ", or ") + text;
  }
  return all.empty() ? "a collective of unknown origin" : all;
}

}  // namespace jaxcoll
