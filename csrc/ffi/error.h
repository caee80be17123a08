// ffi/error.h: a Status as XLA's error, with the name that users look for.
#pragma once

#include "core/status.h"
#include "xla/ffi/api/ffi.h"

namespace jaxcoll {

inline xla::ffi::Error ToError(const Status& status) {
  using xla::ffi::ErrorCode;
  ErrorCode code = ErrorCode::kInternal;
  switch (status.code) {
    case Code::kOk:
      return xla::ffi::Error::Success();
    case Code::kInvalidArgument:
      code = ErrorCode::kInvalidArgument;
      break;
    case Code::kDeadlineExceeded:
      code = ErrorCode::kDeadlineExceeded;
      break;
    case Code::kInternal:
      break;
  }
  return {code, "jaxcoll.CollectiveError: " + status.message};
}

}  // namespace jaxcoll
