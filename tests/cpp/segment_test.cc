// tests/cpp/segment_test.cc: the memory that processes share, and the lanes of a session.
#include <unistd.h>  // close, ftruncate, getpid

#include <array>       // std::array
#include <atomic>      // std::atomic
#include <cstddef>     // std::byte, std::size_t
#include <cstdint>     // std::uint64_t, std::uintptr_t
#include <filesystem>  // std::filesystem
#include <memory>      // std::make_shared, std::shared_ptr
#include <optional>    // std::optional
#include <set>         // std::set
#include <string>      // std::string, std::to_string
#include <vector>      // std::vector

#include "core/align.h"
#include "core/status.h"
#include "host/job.h"
#include "host/process_stat.h"
#include "host/segment.h"
#include "processes.h"
#include "ranks.h"
#include "testing.h"

namespace jaxcoll::testing::segment_test {
namespace {

void SegmentsRefuseWhatIsNotTheirs(Context& context) {
  int memory = -1;
  const SegmentShape shape{.num_seats = 3, .num_lanes = 5, .window_bytes = 8192};
  context.Expect(CreateSegment(shape, 77, memory).ok(), "it is made");
  {
    Segment segment;
    context.Expect(segment.Map(memory, 77).ok(), "it is mapped");
    context.Expect(segment.shape().num_seats == 3 && segment.shape().num_lanes == 5 &&
                       segment.shape().window_bytes == 8192,
                   "its measures");
    std::byte* const last = segment.window(2, 4) + 8191;
    *last = std::byte{7};
    Segment again;
    context.Expect(again.Map(memory, 77).ok() && again.window(2, 4)[8191] == std::byte{7},
                   "both see one memory, up to its end");
    std::shared_ptr<Session> session;
    const auto mapped = std::make_shared<Segment>();
    context.Expect(mapped->Map(memory, 77).ok(), "it is mapped once more");
    context.Expect(!Session::Begin(mapped, {4, 5}, 4, session).ok(), "a seat is left over");
    context.Expect(!Session::Begin(mapped, {4, 5, 6}, 7, session).ok(), "none has a seat");
    context.Expect(Session::Begin(mapped, {4, 5, 6}, 5, session).ok(), "all fits");
  }
  Segment other;
  context.Expect(!other.Map(memory, 78).ok(), "another job's nonce");
  context.Expect(ftruncate(memory, static_cast<off_t>(shape.bytes()) + 4096) == 0, "grows");
  context.Expect(!other.Map(memory, 77).ok(), "another size");
  context.Expect(ftruncate(memory, 100) == 0, "shrinks");
  context.Expect(!other.Map(memory, 77).ok(), "too small for a header");
  close(memory);
  context.Expect(!other.Map(memory, 77).ok(), "no file");
}

void TooLargeASegmentIsAnError(Context& context) {
  for (const SegmentShape& shape :
       {SegmentShape{1, 1, std::size_t{1} << 60}, SegmentShape{2, 8, std::size_t{1} << 60},
        SegmentShape{1, 1, std::size_t{1} << 45}, SegmentShape{1, 1, std::size_t{1} << 63}}) {
    int memory = -1;
    const Status status = CreateSegment(shape, 1, memory);
    context.Expect(!status.ok() && status.message.find("memory") != std::string::npos,
                   [&] { return "an error, not: " + status.message; });
  }
  for (const SegmentShape& shape : {SegmentShape{0, 1, 4096}, SegmentShape{1, 0, 4096},
                                    SegmentShape{1, 1, 0}, SegmentShape{1, 1, 100}}) {
    int memory = -1;
    context.Expect(CreateSegment(shape, 1, memory).code == Code::kInvalidArgument, "refused");
  }
}

void CausesOfAnyLength(Context& context) {
  for (const std::size_t length : Sizes{0, 1, 7, 8, 9, 24'575, 24'576, 24'577, 50'000}) {
    Host host(1);
    const std::string cause(length, 'x');
    context.Expect(!host.segment().failed(), "sound");
    context.Expect(host.segment().Fail(cause), "fails");
    context.Expect(host.segment().failed(), "failed");
    context.Expect(host.segment().failure() == cause.substr(0, 24'576), "the cause");
  }
  SharedText<16> text;
  for (const std::string line : {"longer than it", "short", "", "much longer than there is room"}) {
    text.Set(line);
    context.Expect(text.Get() == line.substr(0, 16), text.Get());
  }
  const std::string letters = "\u00e4\u20ac\U0001F600";  // of two, three and four bytes
  for (const std::size_t before : Sizes{7, 8, 9, 10, 11, 12, 13, 14, 15, 16}) {
    text.Set(std::string(before, 'x') + letters);
    const std::size_t room = 16 - before;
    const std::size_t whole = room >= 9 ? 9 : room >= 5 ? 5 : room >= 2 ? 2 : 0;
    context.Expect(text.Get() == std::string(before, 'x') + letters.substr(0, whole), text.Get());
  }
}

std::size_t SeatOf(const Host& host, std::size_t process) {
  return host.job(process).session()->seat();
}

/// Of any number of lanes: those of lanes in turn in lines of their own.
void PlacesOfEndedCallsDiffer(Context& context) {
  for (const std::size_t num_lanes : Sizes{1, 7, 8, 9, 34, 40, 72}) {
    const Host host(2, {.num_lanes = num_lanes, .window_bytes = 4096});
    const Segment& segment = host.segment();
    std::set<const void*> places;
    for (std::size_t seat = 0; seat < 2; ++seat) {
      for (std::size_t other = 0; other < 2; ++other) {
        for (std::size_t lane = 0; lane < num_lanes; ++lane) {
          const auto* const place = &segment.ended(seat, other, lane);
          places.insert(place);
          segment.ended(seat, other, lane) = ~std::uint64_t{0};
          const auto line = [&](std::size_t of) {
            return reinterpret_cast<std::uintptr_t>(&segment.ended(seat, other, of)) / kCacheLine;
          };
          context.Expect(lane == 0 || num_lanes <= 8 || line(lane) != line(lane - 1),
                         "another line than the lane's before");
        }
      }
    }
    context.Expect(places.size() == 4 * num_lanes, "each its own");
    bool is_untouched = true;
    for (std::size_t seat = 0; seat < 2; ++seat) {
      for (std::size_t lane = 0; lane < num_lanes; ++lane) {
        for (std::size_t at = 0; at < 4096; ++at) {
          is_untouched = is_untouched && segment.window(seat, lane)[at] == std::byte{0};
        }
        is_untouched = is_untouched && segment.lane(seat, lane).word == 0;
      }
    }
    context.Expect(is_untouched, "none lies in lanes or windows");
  }
}

/// Process `process` says that it has ended a call in a lane of process 0.
void EndCall(const Host& host, std::size_t process, int lane, std::uint64_t tag) {
  const auto number = static_cast<std::size_t>(lane);
  host.segment().ended(SeatOf(host, process), SeatOf(host, 0), number) = tag;
}

void LanesAreTakenAgainOnceAllHaveEndedTheCall(Context& context) {
  const Host host(3, {.num_lanes = 2, .window_bytes = 4096});
  Session& session = *host.job(0).session();
  const std::array<std::size_t, 2> both{SeatOf(host, 1), SeatOf(host, 2)};
  const std::array<std::size_t, 1> one{SeatOf(host, 2)};
  std::atomic<std::uint64_t> occurrences{0};
  Session::Turn first{&occurrences}, second = first, third = first, fourth = first, fifth = first;
  const int lane = session.TakeLane(first);
  const int other = session.TakeLane(second);
  context.Expect(lane >= 0 && other >= 0 && lane != other, "two lanes");
  context.Expect(session.TakeLane(third) < 0, "no third one");
  EndCall(host, 1, lane, 9);
  context.Expect(session.LeaveLane(lane, 9, both, /*is_ahead=*/false), "it is left");
  context.Expect(session.TakeLane(third) < 0, "one still looks");
  context.Expect(session.Laggards() == std::vector<std::size_t>{SeatOf(host, 2)}, "it is named");
  EndCall(host, 2, other, 9);
  context.Expect(session.TakeLane(third) < 0, "at another lane");
  EndCall(host, 2, lane, 8);
  context.Expect(session.TakeLane(third) < 0, "at an earlier call");
  EndCall(host, 2, lane, 9);
  context.Expect(session.TakeLane(fourth) < 0, "the third one is served first");
  context.Expect(session.TakeLane(third) == lane, "all have ended the call");
  context.Expect(session.LeaveLane(other, 9, one, /*is_ahead=*/false), "it is left");
  context.Expect(session.TakeLane(fourth) == other, "of one");
  context.Expect(session.LeaveLane(lane, 10, {}, /*is_ahead=*/false), "it is left");
  context.Expect(session.TakeLane(fifth) == lane, "of none");
  context.Expect(occurrences == 5 && third.occurrence == 3 && fourth.occurrence == 4,
                 "each comes once, however often it tries");
}

void WhatOthersHaveEndedIsHeardWithTheirNextCall(Context& context) {
  const Host host(5, {.num_lanes = 8, .window_bytes = 4096});
  Session& session = *host.job(0).session();
  for (std::size_t process = 1; process < 5; ++process) {
    Session& other = *host.job(process).session();
    const std::array<std::size_t, 1> looker{other.seat()};
    std::atomic<std::uint64_t> occurrences{0};
    Session::Turn turn{&occurrences}, next = turn;
    const int lane = session.TakeLane(turn);
    context.Expect(session.LeaveLane(lane, 9, looker, /*is_ahead=*/false), "it is left");
    Lane& told = host.segment().lane(other.seat(), 0);
    other.NoteEnded(session.seat(), 8);
    other.TellEnded(told);
    session.HearEnded(other.seat(), told);
    context.Expect(!session.HasEnded(other.seat(), lane, 9), "not another call's end");
    other.NoteEnded(session.seat(), 9);
    context.Expect(!session.HasEnded(other.seat(), lane, 9), "before it is told");
    other.TellEnded(told);
    session.HearEnded(other.seat(), told);
    // Of three seats before this one: the fourth has no place in a lane.
    const bool is_told = (session.seat() + 5 - other.seat()) % 5 <= 3;
    context.Expect(session.HasEnded(other.seat(), lane, 9) == is_told, "as far as it is told");
    EndCall(host, process, lane, 9);
    context.Expect(session.TakeLane(next) == lane, "the lane is free");
    context.Expect(session.LeaveLane(lane, 10, {}, /*is_ahead=*/false), "for the next process");
  }
}

/// The other lanes are for calls that the others have come to.
void FewLanesAreLeftAhead(Context& context) {
  const Host host(2, {.num_lanes = 4, .window_bytes = 4096});
  Session& session = *host.job(0).session();
  const std::array<std::size_t, 1> one{SeatOf(host, 1)};
  std::array<int, 4> lanes{};
  std::atomic<std::uint64_t> occurrences{0};
  const Session::Turn fresh_turn{&occurrences};
  for (int& lane : lanes) {
    Session::Turn turn = fresh_turn;
    lane = session.TakeLane(turn);
  }
  context.Expect(session.LeaveLane(lanes[0], 1, one, true), "the first");
  context.Expect(session.LeaveLane(lanes[1], 2, one, true), "the second");
  context.Expect(!session.LeaveLane(lanes[2], 3, one, true), "the third has to wait");
  context.Expect(session.LeaveLane(lanes[3], 4, one, false), "not one that all have come to");
  EndCall(host, 1, lanes[2], 3);
  context.Expect(session.LeaveLane(lanes[2], 3, one, true), "nor one that all have ended");
  EndCall(host, 1, lanes[0], 1);
  Session::Turn turn = fresh_turn;
  context.Expect(session.TakeLane(turn) == lanes[0], "the oldest");
  context.Expect(session.LeaveLane(lanes[0], 5, one, true), "those that have ended don't count");
  Session::Turn other = fresh_turn;
  const int next = session.TakeLane(other);
  context.Expect(!session.LeaveLane(next, 6, one, true), "two are left ahead again");
}

/// Also where the system refuses to read what it let open, as of a process that ends meanwhile.
void StatsOfWhatIsGone(Context& context) {
  const std::string mine = "/proc/" + std::to_string(getpid());
  const std::optional<ProcessStat> running = ReadProcessStat(mine);
  context.Expect(running.has_value() && running->state == 'R' && running->start_ticks > 0, "mine");
  context.Expect(!ReadProcessStat(mine + "/task/0").has_value(), "no such thread");
  const auto folder =
      std::filesystem::temp_directory_path() / ("jaxcoll-stat-" + std::to_string(getpid()));
  std::filesystem::create_directories(folder / "stat");  // opens, and can't be read
  context.Expect(!ReadProcessStat(folder).has_value(), "no text");
  std::filesystem::remove_all(folder);
}

const Suite suite("segment", {{"SegmentsRefuseWhatIsNotTheirs", SegmentsRefuseWhatIsNotTheirs},
                              {"TooLargeASegmentIsAnError", TooLargeASegmentIsAnError},
                              {"CausesOfAnyLength", CausesOfAnyLength},
                              {"PlacesOfEndedCallsDiffer", PlacesOfEndedCallsDiffer},
                              {"LanesAreTakenAgainOnceAllHaveEndedTheCall",
                               LanesAreTakenAgainOnceAllHaveEndedTheCall},
                              {"WhatOthersHaveEndedIsHeardWithTheirNextCall",
                               WhatOthersHaveEndedIsHeardWithTheirNextCall},
                              {"FewLanesAreLeftAhead", FewLanesAreLeftAhead},
                              {"StatsOfWhatIsGone", StatsOfWhatIsGone}});

}  // namespace
}  // namespace jaxcoll::testing::segment_test
