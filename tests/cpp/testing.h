// tests/cpp/testing.h: the C++ tests' harness. A test is a function of a Context, and each file has
// a suite of them, which main.cc finds by its name:
//
//   void AddsUp(Context& context) { context.Expect(1 + 1 == 2, "1 + 1"); }
//   const Suite suite("sums", {{"AddsUp", AddsUp}});
#pragma once

#include <cstddef>          // std::size_t
#include <cstdio>           // std::printf
#include <functional>       // std::function
#include <source_location>  // std::source_location
#include <string>           // std::string
#include <string_view>      // std::string_view
#include <type_traits>      // std::is_invocable_v
#include <utility>          // std::move
#include <vector>           // std::vector

namespace jaxcoll::testing {

/// Counts one test's checks. Not thread-safe: threads hand their findings to the test's own.
class Context {
 public:
  /// Records a failure unless `ok`. `what` is a text, or a function that makes one: called on
  /// failure only, so that a check in a loop costs nothing. Returns `ok`.
  template <typename What>
  bool Expect(bool ok, const What& what,
              std::source_location where = std::source_location::current()) {
    ++checks_;
    if (!ok && ++failures_ <= kShown) {
      std::string text;
      if constexpr (std::is_invocable_v<What>) {
        text = what();
      } else {
        text = what;
      }
      std::printf("%s:%u: %s\n", where.file_name(), static_cast<unsigned>(where.line()),
                  text.c_str());
    }
    return ok;
  }

  std::size_t checks() const { return checks_; }
  std::size_t failures() const { return failures_; }

 private:
  static constexpr std::size_t kShown = 10;  ///< Failures printed per test; the rest are counted.
  std::size_t checks_ = 0;
  std::size_t failures_ = 0;
};

struct Test {
  std::string_view name;
  std::function<void(Context&)> run;
};

/// What a suite needs done in its process before its tests and after them.
struct Around {
  std::function<void()> before = [] {};
  std::function<void()> after = [] {};
};

/// A file's tests. Each suite runs in a process of its own: tests leave threads and settings
/// behind.
class Suite {
 public:
  Suite(std::string_view name, std::vector<Test> tests, Around around = {})
      : name_(name), tests_(std::move(tests)), around_(std::move(around)) {
    All().push_back(this);
  }
  Suite(const Suite&) = delete;
  Suite& operator=(const Suite&) = delete;

  /// The suites of this program.
  static std::vector<const Suite*>& All() {
    static std::vector<const Suite*> all;
    return all;
  }

  std::string_view name() const { return name_; }

  /// Runs the tests whose name contains `part`, prints failures, and returns whether there were any
  /// tests and all passed. A test without a single check fails: it tests nothing.
  bool Run(std::string_view part) const {
    around_.before();
    std::size_t ran = 0;
    std::size_t failed = 0;
    for (const Test& test : tests_) {
      if (test.name.find(part) == std::string_view::npos) {
        continue;
      }
      Context context;
      test.run(context);
      const bool ok = context.failures() == 0 && context.checks() > 0;
      std::printf("%s %.*s: %zu checks, %zu failed\n", ok ? "ok  " : "FAIL",
                  static_cast<int>(test.name.size()), test.name.data(), context.checks(),
                  context.failures());
      std::fflush(stdout);
      ++ran;
      failed += ok ? 0 : 1;
    }
    around_.after();
    return ran > 0 && failed == 0;
  }

 private:
  std::string_view name_;
  std::vector<Test> tests_;
  Around around_;
};

}  // namespace jaxcoll::testing
