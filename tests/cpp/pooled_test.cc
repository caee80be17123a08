// tests/cpp/pooled_test.cc: memory of objects that lie together, arrays within their owners, and
// what is asked for of them.
#include "core/pooled.h"

#include <algorithm>  // std::equal
#include <atomic>     // std::atomic
#include <cstddef>    // std::byte, std::size_t
#include <cstdint>    // std::uintptr_t
#include <memory>     // std::make_unique, std::unique_ptr
#include <string>     // std::to_string
#include <thread>     // std::thread
#include <vector>     // std::vector

#include "core/footprint.h"
#include "core/small_array.h"
#include "ops.h"
#include "testing.h"

namespace jaxcoll::testing::pooled_test {
namespace {

class Filled : public Pooled {
 public:
  Filled(std::size_t size, unsigned char value) : bytes_(size) {
    for (Byte& byte : bytes_) {
      byte.value = value;
    }
  }
  bool Holds(unsigned char value) const {
    for (const Byte& byte : bytes_) {
      if (byte.value != value) {
        return false;
      }
    }
    return true;
  }

 private:
  struct Byte : Pooled {
    unsigned char value = 0;
  };
  SmallArray<Byte, 100> bytes_;
};

/// Made and freed in any order, by several threads, up to more than a chunk each.
void ObjectsKeepWhatTheyHold(Context& context) {
  std::atomic<int> num_wrong{0};
  const auto churn = [&](std::size_t seed) {
    Random random(seed);
    std::vector<std::unique_ptr<Filled>> objects(40);
    std::vector<unsigned char> values(objects.size());
    for (int i = 0; i < 4000; ++i) {
      const std::size_t at = Below(random, objects.size());
      num_wrong += objects[at] == nullptr || objects[at]->Holds(values[at]) ? 0 : 1;
      values[at] = static_cast<unsigned char>(random());
      const std::size_t size = Below(random, 50) == 0 ? 100'000 : Below(random, 3000);
      objects[at] = Below(random, 4) == 0 ? nullptr : std::make_unique<Filled>(size, values[at]);
    }
  };
  std::vector<std::thread> threads;
  for (std::size_t seed = 1; seed <= 3; ++seed) {
    threads.emplace_back(churn, seed);
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  context.Expect(num_wrong == 0, std::to_string(num_wrong) + " objects hold something else");
}

void ArraysLieWithinWhereTheyAreSmall(Context& context) {
  for (const std::size_t size : {0, 1, 3, 4, 100}) {
    std::vector<int> values(size);
    for (std::size_t i = 0; i < size; ++i) {
      values[i] = static_cast<int>(i) + 5;
    }
    const auto array = std::make_unique<SmallArray<int, 3>>(values);
    const auto begin = reinterpret_cast<std::uintptr_t>(array.get());
    const auto data = reinterpret_cast<std::uintptr_t>(array->data());
    context.Expect(array->size() == size &&
                       std::equal(array->begin(), array->end(), values.begin(), values.end()),
                   "its values");
    context.Expect((data >= begin && data < begin + sizeof(*array)) == (size <= 3), "its place");
  }
}

void BlocksThatFollowEachOtherAreOne(Context& context) {
  std::vector<std::byte> memory(1 << 16);
  const auto at = [&](std::size_t i) { return memory.data() + i; };
  Footprint footprint;
  footprint.Add(at(4096), 512);
  footprint.Add(at(4608), 64);  // behind it
  footprint.Add(at(4700), 32);  // with a little in between
  footprint.Add(at(4160), 8);   // within it
  context.Expect(footprint.num_blocks() == 1, "one block");
  context.Expect(footprint.Holds(at(4096)) && footprint.Holds(at(4731)), "from begin to end");
  context.Expect(!footprint.Holds(at(4095)) && !footprint.Holds(at(4732)), "and no further");
  footprint.Add(at(0), 100);  // before it
  footprint.Add(at(8192));
  context.Expect(
      footprint.num_blocks() == 3 && footprint.Holds(at(99)) && footprint.Holds(at(8192)),
      "others are blocks of their own");
  for (std::size_t i = 3; i < 20; ++i) {
    footprint.Add(at(i * 3000), 1);
  }
  context.Expect(
      footprint.Holds(at(0)) && footprint.Holds(at(4096)) && !footprint.Holds(at(57'000)),
      "what does not fit is left out");
}

const Suite suite("pooled",
                  {{"BlocksThatFollowEachOtherAreOne", BlocksThatFollowEachOtherAreOne},
                   {"ObjectsKeepWhatTheyHold", ObjectsKeepWhatTheyHold},
                   {"ArraysLieWithinWhereTheyAreSmall", ArraysLieWithinWhereTheyAreSmall}});

}  // namespace
}  // namespace jaxcoll::testing::pooled_test
