// ffi/handlers.h: every handler symbol. Each op has its own instantiate handler, in the file of its
// name; all share JaxcollExecute (ffi/site.h). JaxcollToken is no op and has this stage alone.
#pragma once

#include "xla/ffi/api/api.h"
#include "xla/ffi/api/c_api.h"

namespace jaxcoll {

XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxcollExecute);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxcollToken);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxcollAllReduce);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxcollAllGather);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxcollReduceScatter);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxcollAllToAll);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxcollPpermute);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxcollBroadcast);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxcollAllGatherMatmul);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxcollMatmulReduceScatter);

}  // namespace jaxcoll
