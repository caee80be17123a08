// tests/cpp/witness_test.cc: errors wait for a look, if somebody looks, and not for long.
#include <cstdint>  // std::int64_t
#include <memory>   // std::make_shared
#include <thread>   // std::thread

#include "core/clock.h"
#include "core/status.h"
#include "host/watchdog.h"
#include "host/witness.h"
#include "testing.h"

namespace jaxcoll::testing::witness_test {
namespace {

constexpr std::int64_t kMs = 1'000'000;

void FailOneMore() {
  static std::int64_t run = 0;
  Watchdog::Get().FailRun(++run, std::make_shared<const Status>(Internal("it failed")));
}

std::int64_t AwaitLookNs() {
  const std::int64_t begin_ns = NowNs();
  Witness::Get().AwaitLook();
  return NowNs() - begin_ns;
}

// In this order: there is one witness.
void AnErrorWaitsForALook(Context& context) {
  Witness& witness = Witness::Get();
  FailOneMore();
  context.Expect(AwaitLookNs() < 500 * kMs, "it waits where nobody looks");

  context.Expect(witness.AwaitFailure(0), "a look that nobody wants");
  bool is_noted = false;
  std::thread looker([&] {
    // The first look began before the failure: it is not the one.
    witness.NoteLook(Watchdog::Get().num_failures() - 1);
    context.Expect(witness.AwaitFailure(60'000 * kMs), "the one that looks is to go on");
    is_noted = true;
    witness.NoteLook(Watchdog::Get().num_failures());
  });
  const std::int64_t waited_ns = AwaitLookNs();
  looker.join();
  context.Expect(is_noted && waited_ns < 900 * kMs, "it waits for the look and no longer");
  context.Expect(AwaitLookNs() < 500 * kMs, "it waits for what was looked at");

  FailOneMore();
  const std::int64_t in_vain_ns = AwaitLookNs();
  context.Expect(in_vain_ns > 900 * kMs && in_vain_ns < 5'000 * kMs, "a second in vain");
  FailOneMore();
  context.Expect(AwaitLookNs() < 500 * kMs, "it waits again for one that does not answer");

  witness.NoteLook(Watchdog::Get().num_failures());
  FailOneMore();
  std::thread ender([&] { witness.End(); });
  context.Expect(AwaitLookNs() < 900 * kMs, "it waits for one that has ended");
  ender.join();
  witness.Stop();
  context.Expect(!witness.AwaitFailure(60'000 * kMs), "who is stopped is to go on");
}

const Suite suite("witness", {{"AnErrorWaitsForALook", AnErrorWaitsForALook}});

}  // namespace
}  // namespace jaxcoll::testing::witness_test
