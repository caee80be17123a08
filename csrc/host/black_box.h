// host/black_box.h: what a process tells about itself in memory that others can read, also when it
// can't answer any more: its calls, what stands at their sites, what its Python does.
//
//   header | stack | sites (a text each) | rings (one a device, of entries)
//
// Anonymous memory in a file: a process of the same user finds it under /proc/PID/fd, and who has
// mapped it keeps it when the process is gone. jaxcoll/diagnosis/black_box.py reads it, too, by the
// measures that stand in the header.
#pragma once

#include <array>        // std::array
#include <atomic>       // std::atomic
#include <cstddef>      // std::byte, std::size_t
#include <cstdint>      // std::int64_t, std::uint64_t
#include <memory>       // std::shared_ptr
#include <string>       // std::string
#include <string_view>  // std::string_view
#include <vector>       // std::vector

#include "core/shared_text.h"

namespace jaxcoll {

/// The five moments of a call on one device, in nanoseconds of core/clock.h; 0: not reached.
enum class Moment : std::size_t {
  kArrived = 0,  ///< this device called
  kOpened = 1,   ///< the first device of the group called
  kMet = 2,      ///< the last device of the group in this process called
  kMoved = 3,    ///< all data is in place; not of a call that failed
  kResumed = 4,  ///< this device's program went on
};
inline constexpr std::size_t kNumMoments = 5;

/// What a process was last seen at: its main thread, or others for which that one waits.
enum class Phase : std::int64_t {
  kUnknown = 0,    ///< nobody looks
  kPython = 1,     ///< runs Python code
  kCompiling = 2,  ///< traces, lowers or compiles a program
  kCallback = 3,   ///< runs Python code that a program calls
  kAwaiting = 4,   ///< waits for results
  kEnded = 5,      ///< nothing more; the stack's place has the exception that ended it, if any
  kCalling = 6,    ///< waits in a call of a program that runs where it was started
};

/// A process's memory for its diagnosis.
class BlackBox {
 public:
  static constexpr std::size_t kCapacity = 4096;  ///< calls kept per device
  static constexpr std::size_t kMaxRings = 256;
  static constexpr std::size_t kMaxSites = 16384;  ///< the latest
  /// How long to wait for a stack: a process looks for questions far more often.
  static constexpr std::int64_t kAnswerNs = 1'000'000'000;

  /// One call of one device. `sequence`, of the device and from 1, is stored last.
  struct alignas(128) Entry {
    std::atomic<std::uint64_t> sequence;
    std::atomic<std::uint64_t> site;      ///< the id that the lowering wrote into the program
    std::atomic<std::uint64_t> group;     ///< of the devices that take part, in rank order
    std::atomic<std::int64_t> rank;       ///< in the group
    std::atomic<std::int64_t> execution;  ///< see CallRecord
    std::atomic<std::int64_t> run;
    std::atomic<std::int64_t> iteration;
    std::array<std::atomic<std::int64_t>, kNumMoments> moments_ns;

    void Set(Moment moment, std::int64_t ns) {
      moments_ns[static_cast<std::size_t>(moment)].store(ns, std::memory_order_relaxed);
    }
  };
  struct Ring {
    std::atomic<std::int64_t> device;
    std::atomic<std::uint64_t> next;  ///< the sequence of the last entry begun
    alignas(128) std::array<Entry, kCapacity> entries;
  };
  struct SiteSlot {
    std::atomic<std::uint64_t> id;  ///< stored last; 0: none, or it is being written
    SharedText<2040> text;          ///< for people; in a second line for programs, as JSON
  };
  struct Stack {
    std::atomic<std::uint64_t> version;  ///< odd while it is written
    std::atomic<std::int64_t> at_ns;
    SharedText<16368> text;
  };
  struct Header {
    std::atomic<std::uint64_t> magic;  // stored last
    std::array<std::uint64_t, 11> measures;
    std::atomic<std::int64_t> pid;
    std::atomic<std::int64_t> process;  ///< JAX's number; 0 before that is known
    std::atomic<std::int64_t> num_processes;
    std::atomic<std::int64_t> started_ns;       ///< of the clock of moments
    std::atomic<std::int64_t> started_wall_ns;  ///< the same moment since 1970
    std::atomic<std::int64_t> phase;
    std::atomic<std::int64_t> phase_since_ns;
    std::atomic<std::int64_t> beat_ns;          ///< when somebody looked last, for the phase
    std::atomic<std::int64_t> callbacks;        ///< threads of Python that were in one then
    std::atomic<std::int64_t> paused_until_ns;  ///< the others are to wait for it until then
    std::atomic<std::uint64_t> asked;           ///< for a stack of this moment, how often
    std::atomic<std::uint64_t> told;            ///< up to which question
    std::atomic<std::uint64_t> dumps_asked;     ///< how often somebody wanted one
    std::atomic<std::uint64_t> num_sites;  ///< ever described; number i is in slot i % kMaxSites
    std::atomic<std::uint64_t> num_rings;
  };

  /// This process's own; never destroyed.
  static BlackBox& Get();
  /// Maps another process's; null where it is not one, or another version's.
  static std::shared_ptr<BlackBox> Map(int memory);

  BlackBox(const BlackBox&) = delete;
  BlackBox& operator=(const BlackBox&) = delete;
  ~BlackBox();

  /// The descriptor of its memory in this process, or -1 where others can't read it.
  [[nodiscard]] int memory() const { return memory_; }
  [[nodiscard]] Header& header() const { return *header_; }
  [[nodiscard]] std::size_t bytes() const { return header_->measures[0]; }
  [[nodiscard]] Ring& ring(std::size_t i) const { return rings_[i]; }
  [[nodiscard]] std::size_t num_rings() const;

  /// A ring for a device; the last one is shared where there are too many devices.
  Ring& NewRing(std::int64_t device);
  /// Notes a site's latest text, for people and, as JSON, for programs.
  void AddSite(std::uint64_t id, std::string_view text, std::string_view json);
  /// The texts of a site, for people: the latest few, each once, in the order in which they were
  /// noted last; none where it is not known.
  [[nodiscard]] std::vector<std::string> SiteTexts(std::uint64_t id) const;

  void SetStack(std::string_view text, std::int64_t now_ns);
  struct Told {
    std::string stack;
    std::int64_t at_ns = 0;  ///< 0: never
  };
  [[nodiscard]] Told stack() const;
  /// Asks for a stack of this moment and waits for it, if the process looks after itself; bounded.
  /// Whether it came.
  bool AskForStack(std::int64_t limit_ns = kAnswerNs) const;

  /// Has the process dump when it gets the signal, unless something else is to happen then.
  void DumpOnSignal(int number) const;

  /// Whether waits for this process have no limit now: it is seen to compile, or has said that it
  /// pauses.
  [[nodiscard]] bool IsExcused(std::int64_t now_ns, std::int64_t compile_timeout_ns) const;

 private:
  BlackBox() = default;
  bool Attach(void* base);

  int memory_ = -1;
  Header* header_ = nullptr;
  Stack* stack_ = nullptr;
  SiteSlot* sites_ = nullptr;
  Ring* rings_ = nullptr;
};

/// As in "in Python".
std::string_view Name(Phase phase);

/// Text about a site for errors: the op, its axes, shapes and dtypes, and the user's source line;
/// and the same as JSON. Kept by site id in this process's black box; the lowering writes it. An id
/// can have several texts, of which errors show the latest four.
void DescribeSite(std::uint64_t id, std::string_view text, std::string_view json = "");
std::string SiteText(std::uint64_t id, const BlackBox& box = BlackBox::Get());

}  // namespace jaxcoll
