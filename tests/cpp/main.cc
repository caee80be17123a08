// tests/cpp/main.cc: runs one suite of this program: SUITE [part of a test's name].
#include <cstdio>       // std::fprintf
#include <string_view>  // std::string_view

#include "testing.h"

int main(int argc, char** argv) {
  using jaxcoll::testing::Suite;
  const std::string_view name = argc > 1 ? argv[1] : "";
  for (const Suite* suite : Suite::All()) {
    if (suite->name() == name) {
      return suite->Run(argc > 2 ? argv[2] : "") ? 0 : 1;
    }
  }
  std::fprintf(stderr, "usage: %s SUITE [part of a test's name], of these suites:\n", argv[0]);
  for (const Suite* suite : Suite::All()) {
    std::fprintf(stderr, "  %.*s\n", static_cast<int>(suite->name().size()), suite->name().data());
  }
  return 2;
}
