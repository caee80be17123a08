// ffi/ppermute.cc: attributes bytes and sources: sources[r] is the rank whose operand rank r gets,
// or -1 for zeros.
#include "ffi/handlers.h"
#include "ffi/site.h"
#include "host/copy_work.h"

namespace jaxcoll {
namespace {

namespace ffi = xla::ffi;

Instantiated MakePpermute(ffi::Dictionary attributes) {
  return Instantiate(attributes, [](AttributeReader& reader) -> std::unique_ptr<const Work> {
    const std::size_t bytes = reader.Size("bytes");
    const std::size_t group_size = reader.Size("group_size");
    std::vector<std::size_t> source_of;
    for (const std::int64_t source : reader.Ints("sources")) {
      source_of.push_back(source < 0 ? PermuteWork::kNone : static_cast<std::size_t>(source));
      if (source_of.back() != PermuteWork::kNone && source_of.back() >= group_size) {
        reader.Problem("sources: no rank " + std::to_string(source));
      }
    }
    if (reader.ok() && source_of.size() != group_size) {
      reader.Problem("sources: expected one for each rank");
    }
    return reader.ok() ? std::make_unique<PermuteWork>(std::move(source_of), bytes) : nullptr;
  });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxcollPpermute, MakePpermute, ffi::Ffi::BindInstantiate().Attrs());

}  // namespace jaxcoll
