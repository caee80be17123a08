// ffi/all_to_all.cc: attributes bytes (of the operand) and layout, the nine figures of
// ExchangeLayout.
#include "ffi/handlers.h"
#include "ffi/site.h"
#include "host/copy_work.h"

namespace jaxcoll {
namespace {

namespace ffi = xla::ffi;

Instantiated MakeAllToAll(ffi::Dictionary attributes) {
  return Instantiate(attributes, [](AttributeReader& reader) -> std::unique_ptr<const Work> {
    const std::size_t bytes = reader.Size("bytes");
    const std::vector<std::int64_t> figures = reader.Ints("layout");
    if (reader.ok() && figures.size() != 9) {
      reader.Problem("layout: expected 9 figures, got " + std::to_string(figures.size()));
    }
    if (!reader.ok()) {
      return nullptr;
    }
    const auto at = [&](std::size_t i) { return reader.AsSize(figures[i]); };
    const ExchangeLayout layout{.rows = at(0),
                                .columns = at(1),
                                .bytes = at(2),
                                .from_block = at(3),
                                .from_row = at(4),
                                .from_column = at(5),
                                .to_block = at(6),
                                .to_row = at(7),
                                .to_column = at(8)};
    return reader.ok() ? std::make_unique<ExchangeWork>(layout, bytes, bytes) : nullptr;
  });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxcollAllToAll, MakeAllToAll, ffi::Ffi::BindInstantiate().Attrs());

}  // namespace jaxcoll
