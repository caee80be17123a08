// ffi/token.cc: makes a token of a call's result, for the call that comes next (_order.py).
#include "ffi/handlers.h"
#include "xla/ffi/api/ffi.h"

namespace jaxcoll {

namespace ffi = xla::ffi;

namespace {

ffi::Error MakeToken(ffi::AnyBuffer /*result*/, ffi::Result<ffi::AnyBuffer> /*token*/) {
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxcollToken, MakeToken,
                              ffi::Ffi::Bind().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>());

}  // namespace jaxcoll
