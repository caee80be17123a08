// tests/cpp/failures.h: calls that must fail, and what their errors say.
#pragma once

#include <cstddef>  // std::size_t
#include <cstdint>  // std::int64_t
#include <mutex>    // std::mutex
#include <string>   // std::string
#include <utility>  // std::move
#include <vector>   // std::vector

#include "host/call_site.h"
#include "host/watchdog.h"
#include "ranks.h"
#include "testing.h"

namespace jaxcoll::testing {

inline constexpr std::int64_t kMs = 1'000'000;
inline constexpr std::int64_t kForever = -1;

/// The process's limit, put back at the end of a test.
class Limit {
 public:
  explicit Limit(std::int64_t ns) { Watchdog::Get().SetTimeout(ns); }
  Limit(const Limit&) = delete;
  Limit& operator=(const Limit&) = delete;
  ~Limit() { Watchdog::Get().SetTimeout(300'000 * kMs); }
};

inline void Contains(Context& context, const std::string& text, const std::string& part) {
  context.Expect(text.find(part) != std::string::npos,
                 [&] { return "expected \"" + part + "\" in: " + text; });
}

/// Errors of one test's ranks, to compare.
class Errors {
 public:
  void Add(std::string text) {
    const std::lock_guard<std::mutex> lock(mutex_);
    texts_.push_back(std::move(text));
  }
  /// When all ranks are done.
  const std::vector<std::string>& texts() const { return texts_; }
  /// At any time.
  bool empty() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return texts_.empty();
  }

  /// There are `count`, all the same and with all `parts`.
  void Expect(Context& context, std::size_t count, const std::vector<std::string>& parts) const {
    context.Expect(texts_.size() == count, std::to_string(texts_.size()) + " errors");
    for (const std::string& text : texts_) {
      context.Expect(text == texts_[0], [&] { return "another text: " + text; });
      for (const std::string& part : parts) {
        Contains(context, text, part);
      }
    }
  }

 private:
  mutable std::mutex mutex_;
  std::vector<std::string> texts_;
};

/// One call that must fail and leave the rank's result alone; its error goes to `errors`.
inline Program Fails(CallSite& site, std::size_t num_ranks, std::size_t rank, std::int64_t run,
                     Errors& errors) {
  Stamped stamped(num_ranks);
  CallResult result = co_await stamped.Begin(site, rank, rank, run, 0);
  Check(!result.ok, "the call fails");
  Check(stamped.untouched(), "the result of a failed call is left alone");
  errors.Add(std::move(result.error));
}

inline Program Succeeds(CallSite& site, std::size_t num_ranks, std::size_t rank, std::int64_t run) {
  Stamped stamped(num_ranks);
  stamped.Verify(co_await stamped.Begin(site, rank, rank, run, 0));
}

}  // namespace jaxcoll::testing
