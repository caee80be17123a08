// tests/cpp/testing.h: the C++ tests' harness. A test is a function of a Context; main() hands a
// table of them to RunTests, which prints failures and returns the exit status.
//
//   void AddsUp(Context& context) { context.Expect(1 + 1 == 2, "1 + 1"); }
//   int main(int argc, char** argv) { return RunTests({{"AddsUp", AddsUp}}, argc, argv); }
#pragma once

#include <cstddef>           // std::size_t
#include <cstdio>            // std::printf
#include <functional>        // std::function
#include <initializer_list>  // std::initializer_list
#include <source_location>   // std::source_location
#include <string>            // std::string
#include <string_view>       // std::string_view
#include <type_traits>       // std::is_invocable_v

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

/// Runs the tests whose name contains argv[1] (all without it); 0 if there were any and all passed.
/// A test without a single check fails: it tests nothing.
inline int RunTests(std::initializer_list<Test> tests, int argc, char** argv) {
  const std::string_view filter = argc > 1 ? argv[1] : "";
  std::size_t ran = 0;
  std::size_t failed = 0;
  for (const Test& test : tests) {
    if (test.name.find(filter) == std::string_view::npos) {
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
  return ran > 0 && failed == 0 ? 0 : 1;
}

}  // namespace jaxcoll::testing
