// ffi/all_gather_matmul.cc: the attributes of ffi/matmul.h, and gathers_inner (0: rows).
#include "ffi/handlers.h"
#include "ffi/matmul.h"

namespace jaxcoll {
namespace {

namespace ffi = xla::ffi;

Instantiated MakeAllGatherMatmul(ffi::Dictionary attributes) {
  return Instantiate(attributes, [](AttributeReader& reader) {
    return ReadMatmul(reader, reader.Int("gathers_inner") != 0 ? MatmulKind::kGatherInner
                                                               : MatmulKind::kGatherRows);
  });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxcollAllGatherMatmul, MakeAllGatherMatmul,
                              ffi::Ffi::BindInstantiate().Attrs());

}  // namespace jaxcoll
