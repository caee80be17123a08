// module.cc: the extension module jaxcoll._core: the one registration table, and the engine's
// knobs.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <signal.h>  // SIGUSR2, NOLINT(modernize-deprecated-headers)

#include <bit>        // std::bit_cast
#include <cstddef>    // std::size_t
#include <cstdint>    // std::int64_t, std::uint64_t, std::uintptr_t
#include <cstdio>     // std::fflush
#include <cstdlib>    // std::_Exit
#include <memory>     // std::shared_ptr
#include <optional>   // std::optional
#include <stdexcept>  // std::runtime_error
#include <string>     // std::string
#include <utility>    // std::move
#include <vector>     // std::vector

#include "core/clock.h"
#include "core/status.h"
#include "ffi/handlers.h"
#include "ffi/site.h"
#include "host/black_box.h"
#include "host/communicator.h"
#include "host/copy_costs.h"
#include "host/diagnosis.h"
#include "host/job.h"
#include "host/recorder.h"
#include "host/recorder_door.h"
#include "host/segment.h"
#include "host/threads.h"
#include "host/watchdog.h"
#include "host/witness.h"
#include "kernels/kernel_sets.h"
#include "matmul/blas.h"
#include "mpi/door.h"

namespace nb = nanobind;

namespace jaxcoll {
namespace {

/// An op's custom-call target: its name in lowered programs and its own stage; all share `execute`.
struct Target {
  const char* name;
  XLA_FFI_Error* (*instantiate)(XLA_FFI_CallFrame*);
};

constexpr Target kTargets[] = {
    {"jaxcoll_all_reduce", JaxcollAllReduce},
    {"jaxcoll_all_gather", JaxcollAllGather},
    {"jaxcoll_reduce_scatter", JaxcollReduceScatter},
    {"jaxcoll_all_to_all", JaxcollAllToAll},
    {"jaxcoll_ppermute", JaxcollPpermute},
    {"jaxcoll_broadcast", JaxcollBroadcast},
    {"jaxcoll_all_gather_matmul", JaxcollAllGatherMatmul},
    {"jaxcoll_matmul_reduce_scatter", JaxcollMatmulReduceScatter},
};

nb::capsule Capsule(const void* pointer) { return nb::capsule(pointer); }

nb::dict Targets() {
  nb::dict targets;
  for (const Target& target : kTargets) {
    nb::dict stages;
    stages["instantiate"] = Capsule(reinterpret_cast<const void*>(target.instantiate));
    stages["execute"] = Capsule(reinterpret_cast<const void*>(JaxcollExecute));
    targets[target.name] = stages;
  }
  nb::dict token;
  token["execute"] = Capsule(reinterpret_cast<const void*>(JaxcollToken));
  targets["jaxcoll_token"] = token;
  return targets;
}

nb::dict Types() {
  nb::dict type;
  type["type_id"] = Capsule(&SiteState::id);
  type["type_info"] = Capsule(&SiteState::info);
  nb::dict types;
  types["jaxcoll_site"] = type;
  return types;
}

nb::list KernelSets() {
  nb::list names;
  for (const KernelSet& set : SupportedKernelSets()) {
    names.append(nb::str(set.name.data(), set.name.size()));
  }
  return names;
}

// The black box's memory, which is never unmapped.
nb::object BlackBoxMemory() {
  const BlackBox& box = BlackBox::Get();
  return nb::steal(PyMemoryView_FromMemory(reinterpret_cast<char*>(&box.header()),
                                           static_cast<Py_ssize_t>(box.bytes()), PyBUF_READ));
}

std::int64_t Nanoseconds(std::optional<double> seconds) {
  return seconds ? static_cast<std::int64_t>(*seconds * 1e9) : -1;
}

void SetCompileTimeout(std::optional<double> seconds) {
  Watchdog::Get().SetCompileTimeout(Nanoseconds(seconds));
}

void SetProcess(std::int64_t process, std::int64_t num_processes) {
  BlackBox::Header& header = BlackBox::Get().header();
  header.process.store(process, std::memory_order_relaxed);
  header.num_processes.store(num_processes, std::memory_order_relaxed);
}

void Tell(std::int64_t phase, const std::string& stack, std::int64_t callbacks,
          std::uint64_t question) {
  BlackBox::Header& header = BlackBox::Get().header();
  const std::int64_t now_ns = NowNs();
  if (header.phase.load(std::memory_order_relaxed) != phase) {
    header.phase_since_ns.store(now_ns, std::memory_order_relaxed);
    header.phase.store(phase, std::memory_order_release);
  }
  header.callbacks.store(callbacks, std::memory_order_relaxed);
  header.beat_ns.store(now_ns, std::memory_order_release);
  BlackBox::Get().SetStack(stack, now_ns);
  header.told.store(question, std::memory_order_release);
}

// Whether a program that runs in Python's main thread stands in a call, or in one whose error waits
// to be looked at.
bool IsCalling() {
  constexpr std::size_t kLatest = 2;  // of each device
  const bool is_held = Witness::Get().IsAnyoneHeld();
  const std::vector<CallRecord> records = RecordsIn(BlackBox::Get(), kLatest);
  return std::any_of(records.begin(), records.end(), [&](const CallRecord& record) {
    const auto is_unset = [&](Moment moment) {
      return record.moments_ns[static_cast<std::size_t>(moment)] == 0;
    };
    return (is_unset(Moment::kResumed) || (is_held && is_unset(Moment::kMoved))) &&
           Watchdog::Get().IsOfMainThread(record.run);
  });
}

// The frames of all threads, as (file, line, function) and where on that line the expression begins
// that is evaluated, and on which line and where it ends (-1: not known); the innermost first.
// Taken in one go: no bytecode and no collection of garbage meanwhile, which would let the threads
// go on.
nb::dict Frames() {
  struct NoCollection {
    NoCollection() : was_on(PyGC_Disable() != 0) {}
    ~NoCollection() {
      if (was_on) {
        PyGC_Enable();
      }
    }
    bool was_on;
  };
  const nb::object current_frames = nb::module_::import_("sys").attr("_current_frames");
  const NoCollection none;
  nb::dict found;
  for (const auto& [thread, top] : nb::cast<nb::dict>(current_frames())) {
    nb::list frames;
    for (nb::object frame = nb::borrow(top); frame.is_valid();) {
      auto* const raw = reinterpret_cast<PyFrameObject*>(frame.ptr());
      const nb::object held = nb::steal(reinterpret_cast<PyObject*>(PyFrame_GetCode(raw)));
      auto* const code = reinterpret_cast<PyCodeObject*>(held.ptr());
      int line = -1;
      int column = -1;
      int end_line = -1;
      int end_column = -1;
      PyCode_Addr2Location(code, PyFrame_GetLasti(raw), &line, &column, &end_line, &end_column);
      frames.append(nb::make_tuple(nb::borrow(code->co_filename), PyFrame_GetLineNumber(raw),
                                   nb::borrow(code->co_name), column, end_line, end_column));
      frame = nb::steal(reinterpret_cast<PyObject*>(PyFrame_GetBack(raw)));
    }
    found[thread] = frames;
  }
  return found;
}

std::vector<std::uintptr_t> RecorderFunctions() {
  return {std::bit_cast<std::uintptr_t>(&RecordBegin), std::bit_cast<std::uintptr_t>(&RecordEnd),
          std::bit_cast<std::uintptr_t>(&WriteLastCall),
          std::bit_cast<std::uintptr_t>(&WriteDumpText)};
}

bool has_failed_unseen = false;
std::uint64_t known_failures = 0;

// After all else, when JAX has waited for what runs. A status of the program's own stays.
void EndAsFailed(int status) {
  const std::vector<std::string> failures = Watchdog::Get().FailuresSince(known_failures);
  for (const std::string& text : failures) {
    std::fprintf(stderr, "jaxcoll: work that was not awaited has failed: %s\n", text.c_str());
  }
  if (status == 0 && (has_failed_unseen || !failures.empty())) {
    std::fflush(nullptr);
    std::_Exit(1);
  }
}

// Nobody looks after this process any more, and nobody awaits what fails beyond `failures`: if
// anything does, or has, it is to end as a failed one.
void EndWatch(bool has_failed, std::uint64_t failures) {
  Witness::Get().End();
  BlackBox::Get().header().beat_ns.store(0, std::memory_order_release);
  has_failed_unseen = has_failed;
  known_failures = failures;
#if defined(__GLIBC__)
  on_exit([](int status, void*) { EndAsFailed(status); }, nullptr);
#else
  Py_AtExit([] { EndAsFailed(0); });
#endif
}

void PauseUntil(double seconds) {
  BlackBox::Get().header().paused_until_ns.store(
      seconds > 0 ? NowNs() + static_cast<std::int64_t>(seconds * 1e9) : 0,
      std::memory_order_release);
}

void SetTimeout(std::optional<double> seconds) { Watchdog::Get().SetTimeout(Nanoseconds(seconds)); }

void FormatSegment(int memory, std::size_t num_seats, std::size_t num_lanes,
                   std::size_t window_bytes, std::uint64_t nonce) {
  const Status status = Segment::Format(
      memory, {.num_seats = num_seats, .num_lanes = num_lanes, .window_bytes = window_bytes},
      nonce);
  if (!status.ok()) {
    throw std::runtime_error(status.message);
  }
}

std::size_t SegmentBytes(std::size_t num_seats, std::size_t num_lanes, std::size_t window_bytes) {
  return SegmentShape{.num_seats = num_seats, .num_lanes = num_lanes, .window_bytes = window_bytes}
      .bytes();
}

// Of a process that has joined a segment, and not begun to use it.
std::shared_ptr<Session>& Joined() {
  static std::shared_ptr<Session> session;
  return session;
}

void Join(int memory, std::uint64_t nonce, std::vector<std::int64_t> processes,
          std::int64_t process) {
  const auto segment = std::make_shared<Segment>();
  std::shared_ptr<Session> session;
  Status status = segment->Map(memory, nonce);
  if (status.ok()) {
    status = Session::Begin(segment, std::move(processes), process, session);
  }
  if (!status.ok()) {
    throw std::runtime_error(status.message);
  }
  Joined() = std::move(session);
}

void RequireJoined() {
  if (Joined() == nullptr) {
    throw std::runtime_error("no segment was joined");
  }
}

bool Observe(std::int64_t process, int memory) {
  RequireJoined();
  const int seat = Joined()->SeatOf(process);
  std::shared_ptr<const BlackBox> box = BlackBox::Map(memory);
  if (seat < 0 || box == nullptr) {
    return false;
  }
  Joined()->Observe(static_cast<std::size_t>(seat), std::move(box));
  return true;
}

std::optional<std::string> JobFailure() {
  const std::shared_ptr<const Status> failure = Job::Get().Failure();
  return failure == nullptr ? std::nullopt : std::optional(failure->message);
}

bool ProbePeers() {
  RequireJoined();
  return Joined()->Probe();
}

// Of each size, in their order, what leaving, taking and reading cost.
using FlatCopyCosts = std::array<double, 3 * CopyCostsBySize::kBytes.size()>;

FlatCopyCosts MeasureCopyCosts() {
  RequireJoined();
  const CopyCostsBySize measured = MeasureCopies(*Joined());
  FlatCopyCosts flat;
  for (std::size_t i = 0; i < measured.each.size(); ++i) {
    flat[3 * i] = measured.each[i].leaving;
    flat[3 * i + 1] = measured.each[i].taking;
    flat[3 * i + 2] = measured.each[i].reading;
  }
  return flat;
}

void Start(bool may_read, const FlatCopyCosts& flat) {
  RequireJoined();
  CopyCostsBySize agreed;
  for (std::size_t i = 0; i < agreed.each.size(); ++i) {
    agreed.each[i] = {
        .leaving = flat[3 * i], .taking = flat[3 * i + 1], .reading = flat[3 * i + 2]};
  }
  Joined()->LetPeersBeRead(may_read, agreed);
  Job::Get().Attach(std::move(Joined()));
}

std::size_t ExpectCliques(const std::vector<std::vector<std::int64_t>>& devices,
                          const std::vector<std::vector<std::int64_t>>& processes, bool is_of_job) {
  std::vector<ExpectedClique> cliques;
  for (std::size_t i = 0; i < devices.size(); ++i) {
    cliques.push_back({.devices = devices[i], .processes = processes.at(i)});
  }
  return ExpectCommunicators(cliques, is_of_job);
}

// Addresses, as Python finds them.
void UseBlas(std::uintptr_t sgemm, std::uintptr_t dgemm, std::uintptr_t set_num_threads,
             std::uintptr_t num_threads) {
  BlasFunctions blas;
  blas.sgemm = std::bit_cast<BlasFunctions::Sgemm>(sgemm);
  blas.dgemm = std::bit_cast<BlasFunctions::Dgemm>(dgemm);
  blas.set_num_threads = std::bit_cast<void (*)(int)>(set_num_threads);
  blas.num_threads = std::bit_cast<int (*)()>(num_threads);
  SetBlas(blas);
}

void NoteReset(bool resets) {
  if (const std::shared_ptr<Session> session = Job::Get().session(); session != nullptr) {
    session->NoteReset(resets ? NowNs() : 0);
  }
}

void Leave() {
  if (const std::shared_ptr<Session> session = Job::Get().session(); session != nullptr) {
    session->Leave();
  }
}

}  // namespace

NB_MODULE(_core, m) {
  SetPythonThreadTest([] { return PyGILState_GetThisThreadState() != nullptr; });
  m.doc() = "The native engine of jaxcoll. Private: use jaxcoll's own functions.";
  m.def("targets", &Targets, nb::sig("def targets() -> dict[str, dict[str, object]]"),
        "Custom-call targets by name: the stages that jax.ffi.register_ffi_target takes.");
  m.def("types", &Types, nb::sig("def types() -> dict[str, dict[str, object]]"),
        "State types by name, as jax.ffi.register_ffi_type takes them.");
  m.def("kernel_sets", &KernelSets, nb::sig("def kernel_sets() -> list[str]"),
        "Instruction sets that this machine can run; the last one is in use.");
  m.def("describe_site", &DescribeSite, nb::arg("site"), nb::arg("text"), nb::arg("json"),
        "Sets the text that errors show for a site id, and the same for programs.");
  m.def("set_timeout", &SetTimeout, nb::arg("seconds").none(),
        "How long a rank may wait for the others; None waits for ever.");
  m.def("set_compile_timeout", &SetCompileTimeout, nb::arg("seconds").none(),
        "How long a rank may wait for one that compiles; None waits for ever.");
  m.def("segment_bytes", &SegmentBytes, nb::arg("num_seats"), nb::arg("num_lanes"),
        nb::arg("window_bytes"), "How much memory a segment of these measures takes.");
  m.def("format_segment", &FormatSegment, nb::arg("memory"), nb::arg("num_seats"),
        nb::arg("num_lanes"), nb::arg("window_bytes"), nb::arg("nonce"),
        "Makes the empty file behind a descriptor the shared memory of a job's processes on this "
        "host. RuntimeError: there is not as much.");
  m.def("join", &Join, nb::arg("memory"), nb::arg("nonce"), nb::arg("processes"),
        nb::arg("process"),
        "Joins the segment behind a file descriptor as `process`, one of `processes`.");
  m.def("job_failure", &JobFailure,
        "Why calls between processes fail until all attach anew, or None.");
  m.def("probe_peers", &ProbePeers,
        "Whether this process may read the memory of the others, when all have joined.");
  m.def("copy_costs", &MeasureCopyCosts, nb::call_guard<nb::gil_scoped_release>(),
        "What copies between processes take, in nanoseconds for each KiB: into the own window, out "
        "of another one's, out of another one's memory; of operands of 1, 4 and 16 MiB. All "
        "processes call it at once, when they have joined.");
  m.def(
      "start", &Start, nb::arg("may_read"), nb::arg("copy_costs"),
      "Begins to use the segment that was joined. Whether processes may read each other's memory, "
      "and what that costs: the same on all processes.");
  m.def("use_blas", &UseBlas, nb::arg("sgemm"), nb::arg("dgemm"), nb::arg("set_num_threads"),
        nb::arg("num_threads"),
        "The addresses of a BLAS's functions; the last two are 0 where it has one thread.");
  m.def("is_calling", &IsCalling,
        "Whether a program that runs in Python's main thread stands in a call.");
  m.def("note_reset", &NoteReset, nb::arg("resets"),
        "Tells the other processes whether this one waits for them in reset().");
  m.def("leave", &Leave, "Tells the other processes that this one is about to exit.");
  m.def("connect_mpi", &ConnectMpi, nb::arg("path"),
        "Connects libjaxcoll_mpi.so with the engine; returns why that failed, or ''.");
  m.def("expect_communicators", &ExpectCliques, nb::arg("devices"), nb::arg("processes"),
        nb::arg("is_of_job"),
        "The groups of which XLA will ask for communicators now, by the ids of their devices and "
        "by their processes; returns how many it asked for since the last call.");
  m.def("describe_mpi", &DescribeCalls, nb::arg("devices"), nb::arg("kind"), nb::arg("count"),
        nb::arg("origin"), "Says, for errors, what a group's calls of a kind and size are for.");
  m.def("reset_mpi", &Communicator::Reset,
        "Lets XLA's calls begin anew after one has failed; none is under way.");
  m.def(
      "num_calls",
      [] {
        const std::uint64_t of_xla = Communicator::NumCalls();  // first: it may only grow
        return Recorder::Get().num_calls() - of_xla;
      },
      "Native calls begun so far, over all devices; without those of XLA's own collectives.");
  m.def("num_mpi_calls", &Communicator::NumCalls,
        "Calls that XLA's own collectives have begun so far, over all devices.");
  m.def("recorder", &RecorderFunctions,
        "The addresses of the recorder's functions, for the engine for GPUs; see "
        "csrc/host/recorder_door.h.");
  m.def("black_box", &BlackBoxMemory, nb::sig("def black_box() -> memoryview"),
        "What this process tells about itself; see csrc/host/black_box.h.");
  m.def(
      "black_box_file", [] { return BlackBox::Get().memory(); },
      "The descriptor of that memory, or -1 where it has none.");
  m.def("set_process", &SetProcess, nb::arg("process"), nb::arg("num_processes"),
        "Notes in the black box which process of the job this one is.");
  m.def("observe", &Observe, nb::arg("process"), nb::arg("memory"),
        "Maps the black box of another process of the segment that was joined, behind a "
        "descriptor; returns whether it is one.");
  m.def(
      "question", [] { return BlackBox::Get().header().asked.load(); },
      "How often somebody has asked what this process does.");
  m.def("tell", &Tell, nb::arg("phase"), nb::arg("stack"), nb::arg("callbacks"),
        nb::arg("question"),
        "Notes what the main thread does now, and how many others are in a callback, and answers "
        "that question so.");
  m.def("pause", &PauseUntil, nb::arg("seconds"),
        "Has the others wait for this process for so long from now; 0: as usual.");
  m.def("set_dump_folder", &SetDumpFolder, nb::arg("path"),
        "The folder that errors name, where dumps are; '' for none.");
  m.def(
      "dumps_asked", [] { return BlackBox::Get().header().dumps_asked.load(); },
      "How often somebody wanted a dump of this process.");
  m.def(
      "dump_on_signal", [] { BlackBox::Get().DumpOnSignal(SIGUSR2); },
      "Counts SIGUSR2 among those, unless the program does something else then.");
  m.def("frames", &Frames,
        nb::sig("def frames() -> dict[int, list[tuple[str, int, str, int, int, int]]]"),
        "What each thread of Python does, the innermost first: file, line, function; and of the "
        "expression that is evaluated its column, end line and end column, -1 if not known.");
  m.def(
      // Who waits for the interpreter sleeps: it must not be the caller that has it.
      "is_busy", [] { return IsAnyThreadBusy(getpid()); }, nb::call_guard<nb::gil_scoped_release>(),
      "Whether another thread of this process runs, or would if it got its turn.");
  m.def(
      "is_anyone_excused",
      [] {
        const std::shared_ptr<Session> session = Job::Get().session();
        return session != nullptr &&
               session->IsAnyoneExcused(NowNs(), Watchdog::Get().compile_timeout_ns());
      },
      "Whether another process of this host compiles, or has said that it pauses.");
  m.def(
      "absent",
      [](const std::vector<std::int64_t>& processes, std::uint64_t group, std::uint64_t site,
         std::int64_t execution) {
        const std::shared_ptr<Session> session = Job::Get().session();
        return session == nullptr ? std::string()
                                  : AbsentText(*session, processes, group, site, execution);
      },
      nb::call_guard<nb::gil_scoped_release>(), nb::arg("processes"), nb::arg("group"),
      nb::arg("site"), nb::arg("execution"),
      "Which ranks of other processes of this host have not made a call on their GPUs, and what "
      "they do, as errors say it; by the process of each rank.");
  m.def(
      "await_failure",
      [](double seconds) { return Witness::Get().AwaitFailure(Nanoseconds(seconds)); },
      nb::call_guard<nb::gil_scoped_release>(), nb::arg("seconds"),
      "Waits until a call has failed, whose error is held back for a look, or for so long. For "
      "the thread that looks; whether it is to go on.");
  m.def(
      "note_look", [](std::uint64_t failures) { Witness::Get().NoteLook(failures); },
      nb::arg("failures"), "Lets errors go: a look is over that began after so many failures.");
  m.def("stop_looks", [] { Witness::Get().Stop(); }, "Ends the wait of the thread that looks.");
  m.def("end_watch", &EndWatch, nb::arg("has_failed"), nb::arg("failures"),
        "Has this process end with exit code 1 if work has failed, or more than so often.");
  m.def(
      "note_callback_error",
      [](std::string text) { Watchdog::Get().NoteCallbackError(std::move(text)); }, nb::arg("text"),
      "Tells that a callback of the user's has raised; errors of calls that wait have the text.");
  m.def(
      "num_failures", [] { return Watchdog::Get().num_failures(); },
      "Runs of programs that failed so far in native calls.");
  m.def(
      "failures", [](std::uint64_t known) { return Watchdog::Get().FailuresSince(known); },
      nb::arg("known"), "Why those of them beyond the first `known` failed, of the latest.");
}

}  // namespace jaxcoll
