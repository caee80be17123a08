// tests/cpp/black_box_test.cc: what a process tells about itself, read through another mapping.
#include <sys/mman.h>  // memfd_create
#include <unistd.h>    // close, ftruncate, getpid

#include <atomic>  // std::atomic
#include <chrono>  // std::chrono::microseconds
#include <map>     // std::map
#include <memory>  // std::shared_ptr
#include <set>     // std::set
#include <string>  // std::string
#include <thread>  // std::thread
#include <vector>  // std::vector

#include "core/clock.h"
#include "host/black_box.h"
#include "host/diagnosis.h"
#include "host/recorder.h"
#include "ranks.h"
#include "testing.h"

namespace jaxcoll::testing::black_box_test {
namespace {

constexpr std::int64_t kSecond = 1'000'000'000;

/// This process's box as another process has it.
std::shared_ptr<BlackBox> Mapped() {
  auto box = BlackBox::Map(BlackBox::Get().memory());
  Check(box != nullptr, "the box can be mapped");
  return box;
}

void OthersReadWhatIsWritten(Context& context) {
  const auto box = Mapped();
  context.Expect(box->header().pid.load() == getpid(), "the process");
  DescribeSite(5001, "the one", R"({"op":"x"})");
  DescribeSite(5001, "the other");
  DescribeSite(5001, "the one");
  context.Expect(box->SiteTexts(5001) == std::vector<std::string>{"the other", "the one"},
                 "the texts of a site, without the details, each once");
  context.Expect(box->SiteTexts(5002).empty(), "an unknown site");
  context.Expect(SiteText(5002) == "a collective of unknown origin", "its name");
  BlackBox::Get().SetStack("main\nstep", 77);
  context.Expect(box->stack().stack == "main\nstep" && box->stack().at_ns == 77, "the stack");
  Recorder::Get().Begin(1500, {.site = 5001, .group = 9, .rank = 3, .now_ns = NowNs()});
  const std::vector<CallRecord> records = RecordsIn(*box);
  context.Expect(!records.empty() && records.back().device == 1500 && records.back().rank == 3,
                 "the calls");
}

/// As a cell of a notebook does that is edited and run again.
void TheLatestTextsOfASite(Context& context) {
  const auto box = Mapped();
  for (int line = 1; line <= 6; ++line) {
    DescribeSite(5007, "line " + std::to_string(line));
  }
  using Texts = std::vector<std::string>;
  context.Expect(box->SiteTexts(5007) == Texts{"line 3", "line 4", "line 5", "line 6"},
                 "the oldest drop out");
  for (int i = 0; i < 3; ++i) {  // programs that are lowered again and again
    DescribeSite(5007, "line 6");
    DescribeSite(5007, "line 4");
  }
  context.Expect(SiteText(5007) == "line 3, or line 5, or line 6, or line 4",
                 "those that are alive stay, the last one at the end");
}

void OnlyBlackBoxesAreMapped(Context& context) {
  const int other = memfd_create("other", MFD_CLOEXEC);
  context.Expect(BlackBox::Map(other) == nullptr, "an empty file");
  context.Expect(ftruncate(other, static_cast<off_t>(BlackBox::Get().bytes())) == 0, "grows");
  context.Expect(BlackBox::Map(other) == nullptr, "a file of zeros");
  close(other);
}

/// A process has thousands of programs in its life.
void TheLatestSitesAreKept(Context& context) {
  for (std::uint64_t i = 1; i <= BlackBox::kMaxSites + 10; ++i) {
    BlackBox::Get().AddSite(100'000 + i, "site " + std::to_string(i), "");
  }
  const std::uint64_t last = BlackBox::kMaxSites + 10;
  context.Expect(SiteText(100'000 + last) == "site " + std::to_string(last), "the last one");
  BlackBox::Get().AddSite(100'100, "another", "");  // in a slot before that of the first one
  context.Expect(SiteText(100'100) == "site 100, or another", "in the order of their coming");
  context.Expect(Mapped()->SiteTexts(100'001).empty(), "the first one is gone");
}

void TextsOfAnyLength(Context& context) {
  BlackBox::Get().AddSite(5003, std::string(5000, 'x'), "{}");
  context.Expect(SiteText(5003) == std::string(2040, 'x'), "as much as there is room for");
}

/// Readers get whole stacks while they are written.
void StacksAreConsistent(Context& context) {
  std::atomic<bool> stop{false};
  std::thread writer([&stop] {
    for (char c = 'a'; !stop.load(); c = c == 'z' ? 'a' : static_cast<char>(c + 1)) {
      BlackBox::Get().SetStack(std::string(300, c), c);
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  });
  const auto box = Mapped();
  while (box->stack().stack.size() != 300) {
    std::this_thread::yield();
  }
  for (int i = 0; i < 2000; ++i) {
    const BlackBox::Told told = box->stack();
    const bool ok = told.stack == std::string(300, told.stack[0]) && told.at_ns == told.stack[0];
    context.Expect(ok, [&] { return "torn: " + told.stack; });
  }
  stop.store(true);
  writer.join();
}

/// A process whose end waits for its work runs nothing of the user's.
void AnEmptyStackHasNoHeading(Context& context) {
  BlackBox::Header& header = BlackBox::Get().header();
  const auto box = Mapped();
  const auto phase = header.phase.exchange(static_cast<std::int64_t>(Phase::kPython));
  header.phase_since_ns.store(1 * kSecond);
  const auto text = [&](const std::string& stack) {
    BlackBox::Get().SetStack(stack, 3 * kSecond);
    return PythonText(*box, 4 * kSecond);
  };
  context.Expect(text("") == "\n  in Python for 2.0 s; no Python code of the user's runs",
                 [&] { return text(""); });
  context.Expect(text("a") == "\n  in Python for 2.0 s; Python stack, 1.0 s ago:\n    a",
                 [&] { return text("a"); });
  header.paused_until_ns.store(5 * kSecond);
  context.Expect(text("a") == "\n  in Python for 2.0 s; Python stack, 1.0 s ago:\n    a",
                 [&] { return text("a"); });
  header.paused_until_ns.store(kSecond / 2);
  context.Expect(text("a") ==
                     "\n  in Python for 2.0 s; its allow_pause was over 3.5 s ago; "
                     "Python stack, 1.0 s ago:\n    a",
                 [&] { return text("a"); });
  header.paused_until_ns.store(0);
  header.phase.store(static_cast<std::int64_t>(Phase::kEnded));
  context.Expect(text("").empty(), [&] { return text(""); });
  context.Expect(text("E: a, at b:1 (c)") == "\n  ended with E: a, at b:1 (c)",
                 [&] { return text("E: a, at b:1 (c)"); });
  header.phase.store(phase);
}

/// Who is dead or stopped went on after it was seen: what it did then is not what it does.
void AStackFromBeforeTheLastCallEndedIsNotTakenForWhatItDoes(Context& context) {
  BlackBox::Header& header = BlackBox::Get().header();
  const auto box = Mapped();
  const auto phase = header.phase.exchange(static_cast<std::int64_t>(Phase::kCompiling));
  const std::int64_t now_ns = NowNs() + 10 * kSecond;
  header.phase_since_ns.store(now_ns - 6 * kSecond);
  BlackBox::Get().SetStack("a", now_ns - 4 * kSecond);
  Recorder::Entry& entry =
      Recorder::Get().Begin(1601, {.site = 5007, .now_ns = now_ns - 5 * kSecond});
  const auto text = [&] { return PythonText(*box, now_ns); };
  const std::string current = "\n  compiling for 2.0 s; Python stack, 4.0 s ago:\n    a";
  context.Expect(text() == current, text);
  entry.Set(Moment::kResumed, now_ns - 3 * kSecond);
  context.Expect(text() == current, "a failed call is none that it went on from");
  entry.Set(Moment::kMoved, now_ns - 3 * kSecond);
  context.Expect(text() == "\n  Python stack, 4.0 s ago, before its last call ended:\n    a", text);
  BlackBox::Get().SetStack("", now_ns - 4 * kSecond);
  context.Expect(text().empty(), text);
  entry.Set(Moment::kResumed, now_ns - 5 * kSecond);  // for the tests that follow
  header.phase.store(phase);
}

void AQuestionIsAnswered(Context& context) {
  BlackBox::Header& header = BlackBox::Get().header();
  header.beat_ns.store(NowNs());
  std::thread watcher([&header] {
    while (header.asked.load() == header.told.load()) {
      std::this_thread::yield();
    }
    BlackBox::Get().SetStack("of this moment", NowNs());
    header.told.store(header.asked.load());
  });
  const auto box = Mapped();
  box->AskForStack(10 * kSecond);
  context.Expect(box->stack().stack == "of this moment", "the answer");
  watcher.join();
  const std::int64_t since_ns = NowNs();
  box->AskForStack(kSecond / 10);
  context.Expect(NowNs() - since_ns < 5 * kSecond, "who does not answer is not waited for");
  header.beat_ns.store(NowNs() - 10 * kSecond);
  const std::int64_t deaf_since_ns = NowNs();
  box->AskForStack(60 * kSecond);
  context.Expect(NowNs() - deaf_since_ns < 5 * kSecond, "nor who does not look");
}

void WhoCompilesOrPausesIsExcused(Context& context) {
  BlackBox::Header& header = BlackBox::Get().header();
  const auto box = Mapped();
  const std::int64_t now_ns = NowNs();
  const auto set = [&header](Phase phase, std::int64_t since_ns, std::int64_t beat_ns) {
    header.phase.store(static_cast<std::int64_t>(phase));
    header.phase_since_ns.store(since_ns);
    header.beat_ns.store(beat_ns);
  };
  set(Phase::kPython, now_ns, now_ns);
  context.Expect(!box->IsExcused(now_ns, -1), "who runs Python code is not");
  set(Phase::kCompiling, now_ns - 5 * kSecond, now_ns);
  context.Expect(box->IsExcused(now_ns, -1), "who compiles is, for ever");
  context.Expect(box->IsExcused(now_ns, 6 * kSecond), "or for so long");
  context.Expect(!box->IsExcused(now_ns, 4 * kSecond), "and no longer");
  set(Phase::kCompiling, now_ns - 70 * kSecond, now_ns - 65 * kSecond);
  context.Expect(!box->IsExcused(now_ns, -1), "who was seen to compile long ago is not");
  set(Phase::kPython, now_ns, now_ns);
  header.paused_until_ns.store(now_ns + kSecond);
  context.Expect(box->IsExcused(now_ns, -1), "who pauses is");
  context.Expect(!box->IsExcused(now_ns + 2 * kSecond, -1), "until then");
  header.paused_until_ns.store(0);
}

void TheLastCallOfADevice(Context& context) {
  DescribeSite(5004, "the call in question");
  const BlackBox& box = BlackBox::Get();
  const std::int64_t now_ns = NowNs();
  context.Expect(LastCallText(box, {1600}, now_ns) == "no call yet", "none");
  Recorder::Entry& entry =
      Recorder::Get().Begin(1600, {.site = 5004, .now_ns = now_ns - 3 * kSecond});
  context.Expect(LastCallText(box, {1600}, now_ns) ==
                     "waits, since 3.0 s, in the call in question (call 1 of device 1600)",
                 LastCallText(box, {1600}, now_ns));
  entry.Set(Moment::kResumed, now_ns - kSecond);
  context.Expect(LastCallText(box, {1600}, now_ns) ==
                     "last call, failed 1.0 s ago: the call in question (call 1 of device 1600)",
                 LastCallText(box, {1600}, now_ns));
  entry.Set(Moment::kMoved, now_ns - kSecond);
  context.Expect(LastCallText(box, {1600}, now_ns) ==
                     "last call, ended 1.0 s ago: the call in question (call 1 of device 1600)",
                 LastCallText(box, {1600}, now_ns));
  Recorder::Get().Begin(1600, {.site = 5004, .now_ns = now_ns - kSecond / 2});
  context.Expect(LastCallText(box, {1600}, now_ns) ==
                     "waits, since 0.5 s, in the call in question (call 2 of device 1600); "
                     "last call, ended 1.0 s ago: the call in question (call 1 of device 1600)",
                 LastCallText(box, {1600}, now_ns));
  DescribeSite(5004, "one alike");
  const std::string text = LastCallText(box, {1600}, now_ns);
  context.Expect(text.find("in the call in question, or one alike (call 2 ") != std::string::npos,
                 text);
}

/// JAX numbers the devices of all processes of a job; records have those of their process.
void ADeviceIsFoundByItsNumberInTheJob(Context& context) {
  const BlackBox& box = BlackBox::Get();
  const std::int64_t now_ns = NowNs();
  DescribeSite(5008, "the call of process 1");
  Recorder::Get().Begin(2048 + 1602, {.site = 5008, .now_ns = now_ns - kSecond});
  const std::string text = LastCallText(box, {2048 + 1602}, now_ns);
  context.Expect(text == "waits, since 1.0 s, in the call of process 1 (call 1 of device 3650)",
                 text);
}

/// Of a group's ranks in a process, by its calls: who is in a call, and where the others are.
void TheRanksOfACall(Context& context) {
  DescribeSite(5005, "the call before");
  const BlackBox& box = BlackBox::Get();
  const std::int64_t now_ns = NowNs();
  const auto call = [&](std::int64_t device, std::uint64_t site, std::int64_t rank,
                        std::int64_t execution) -> Recorder::Entry& {
    Recorder::Entry& entry = Recorder::Get().Begin(
        device, {.site = site, .group = 77, .rank = rank, .now_ns = now_ns - kSecond});
    entry.execution.store(execution);
    return entry;
  };
  call(1700, 5005, 0, 3);
  for (const std::int64_t execution : {3, 4}) {
    call(1701, 5006, 1, execution).Set(Moment::kResumed, now_ns);
  }
  call(1702, 5006, 2, 3);
  call(1703, 5006, 3, 4);
  Recorder::Get().Begin(1704, {.site = 5006, .group = 78, .rank = 0, .now_ns = now_ns});
  const RanksThere ranks = FindRanks(box, 77, 5006, 4);
  context.Expect(ranks.in_call == std::set<std::int64_t>{3}, "the one that waits in it");
  const std::map<std::int64_t, std::int64_t> devices{{0, 1700}, {1, 1701}, {2, 1702}, {3, 1703}};
  context.Expect(ranks.device_of == devices, "all have called");
  context.Expect(LastCallOfRank(box, ranks, 0, now_ns) ==
                     "waits, since 1.0 s, in the call before (call 1 of device 1700)",
                 LastCallOfRank(box, ranks, 0, now_ns));
  RanksThere others = ranks;
  for (const std::int64_t device : DevicesIn(box)) {
    if (device != 1700 && device != 1704) {
      others.device_of[device] = device;
    }
  }
  others.device_of.erase(0);
  context.Expect(LastCallOfRank(box, others, 0, now_ns) == LastCallOfRank(box, ranks, 0, now_ns),
                 "the device on which no rank of the site is");
}

const Suite suite("black_box",
                  {{"OthersReadWhatIsWritten", OthersReadWhatIsWritten},
                   {"TheLatestTextsOfASite", TheLatestTextsOfASite},
                   {"OnlyBlackBoxesAreMapped", OnlyBlackBoxesAreMapped},
                   {"TextsOfAnyLength", TextsOfAnyLength},
                   {"StacksAreConsistent", StacksAreConsistent},
                   {"AnEmptyStackHasNoHeading", AnEmptyStackHasNoHeading},
                   {"AStackFromBeforeTheLastCallEndedIsNotTakenForWhatItDoes",
                    AStackFromBeforeTheLastCallEndedIsNotTakenForWhatItDoes},
                   {"AQuestionIsAnswered", AQuestionIsAnswered},
                   {"WhoCompilesOrPausesIsExcused", WhoCompilesOrPausesIsExcused},
                   {"TheLastCallOfADevice", TheLastCallOfADevice},
                   {"ADeviceIsFoundByItsNumberInTheJob", ADeviceIsFoundByItsNumberInTheJob},
                   {"TheRanksOfACall", TheRanksOfACall},
                   {"TheLatestSitesAreKept", TheLatestSitesAreKept}});

}  // namespace
}  // namespace jaxcoll::testing::black_box_test
