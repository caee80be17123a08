// ffi/reduce_scatter.cc: attributes op, dtype, outer and inner: the operand is (outer, group_size,
// inner).
#include "ffi/handlers.h"
#include "ffi/site.h"
#include "host/reduce_work.h"

namespace jaxcoll {
namespace {

namespace ffi = xla::ffi;

Instantiated MakeReduceScatter(ffi::Dictionary attributes) {
  return Instantiate(attributes, [](AttributeReader& reader) -> std::unique_ptr<const Work> {
    const ReduceOp op = reader.Op("op");
    const DType dtype = reader.AsType(reader.Int("dtype"));
    const std::size_t outer = reader.Size("outer");
    const std::size_t inner = reader.Size("inner");
    const std::size_t group_size = reader.Size("group_size");
    ReduceFn reduce = ReduceOf(reader, dtype, op);
    return reader.ok()
               ? std::make_unique<ReduceScatterWork>(dtype, reduce, outer, group_size, inner)
               : nullptr;
  });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxcollReduceScatter, MakeReduceScatter,
                              ffi::Ffi::BindInstantiate().Attrs());

}  // namespace jaxcoll
