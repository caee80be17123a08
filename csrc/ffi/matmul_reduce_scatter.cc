// ffi/matmul_reduce_scatter.cc: the attributes of ffi/matmul.h, and scatters_columns (0: rows).
#include "ffi/handlers.h"
#include "ffi/matmul.h"

namespace jaxcoll {
namespace {

namespace ffi = xla::ffi;

Instantiated MakeMatmulReduceScatter(ffi::Dictionary attributes) {
  return Instantiate(attributes, [](AttributeReader& reader) {
    return ReadMatmul(reader, reader.Int("scatters_columns") != 0 ? MatmulKind::kScatterColumns
                                                                  : MatmulKind::kScatterRows);
  });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxcollMatmulReduceScatter, MakeMatmulReduceScatter,
                              ffi::Ffi::BindInstantiate().Attrs());

}  // namespace jaxcoll
