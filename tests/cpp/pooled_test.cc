// tests/cpp/pooled_test.cc: memory of objects that lie together, and arrays within their owners.
#include "core/pooled.h"

#include <algorithm>  // std::equal
#include <atomic>     // std::atomic
#include <cstddef>    // std::size_t
#include <cstdint>    // std::uintptr_t
#include <memory>     // std::make_unique, std::unique_ptr
#include <string>     // std::to_string
#include <thread>     // std::thread
#include <vector>     // std::vector

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

const Suite suite("pooled",
                  {{"ObjectsKeepWhatTheyHold", ObjectsKeepWhatTheyHold},
                   {"ArraysLieWithinWhereTheyAreSmall", ArraysLieWithinWhereTheyAreSmall}});

}  // namespace
}  // namespace jaxcoll::testing::pooled_test
