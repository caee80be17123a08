// ffi/all_gather.cc: attributes outer and inner: the operand is (outer, inner) bytes, the result
// (outer, group_size, inner).
#include "ffi/handlers.h"
#include "ffi/site.h"
#include "host/copy_work.h"

namespace jaxcoll {
namespace {

namespace ffi = xla::ffi;

Instantiated MakeAllGather(ffi::Dictionary attributes) {
  return Instantiate(attributes, [](AttributeReader& reader) -> std::unique_ptr<const Work> {
    const std::size_t outer = reader.Size("outer");
    const std::size_t inner = reader.Size("inner");
    const std::size_t group_size = reader.Size("group_size");
    if (!reader.ok()) {
      return nullptr;
    }
    const ExchangeLayout layout{.rows = 1,
                                .columns = outer,
                                .bytes = inner,
                                .from_block = 0,
                                .from_row = 0,
                                .from_column = inner,
                                .to_block = inner,
                                .to_row = 0,
                                .to_column = group_size * inner};
    return std::make_unique<ExchangeWork>(layout, outer * inner, outer * group_size * inner);
  });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxcollAllGather, MakeAllGather, ffi::Ffi::BindInstantiate().Attrs());

}  // namespace jaxcoll
