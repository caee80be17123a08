// ffi/broadcast.cc: attributes bytes and root (a rank); a result may alias its operand: then the
// root's stays as it is.
#include "ffi/handlers.h"
#include "ffi/site.h"
#include "host/copy_work.h"

namespace jaxcoll {
namespace {

namespace ffi = xla::ffi;

Instantiated MakeBroadcast(ffi::Dictionary attributes) {
  return Instantiate(attributes, [](AttributeReader& reader) -> std::unique_ptr<const Work> {
    const std::size_t bytes = reader.Size("bytes");
    const std::size_t root = reader.Size("root");
    const std::size_t group_size = reader.Size("group_size");
    if (reader.ok() && root >= group_size) {
      reader.Problem("root: no rank " + std::to_string(root));
    }
    return reader.ok()
               ? std::make_unique<PermuteWork>(std::vector<std::size_t>(group_size, root), bytes)
               : nullptr;
  });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxcollBroadcast, MakeBroadcast, ffi::Ffi::BindInstantiate().Attrs());

}  // namespace jaxcoll
