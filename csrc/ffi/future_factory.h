// ffi/future_factory.h: XLA's futures, for programs that wait in a call.
//
// XLA's own ffi::Future encoding needs a Promise, three allocations and a callback for each call.
// A handler here either finishes at once (no Future at all) or leaves a raw XLA_FFI_Future that a
// runner completes later.
#pragma once

#include "core/status.h"
#include "ffi/error.h"
#include "host/meeting.h"
#include "host/threads.h"
#include "xla/ffi/api/c_api.h"
#include "xla/ffi/api/ffi.h"

namespace jaxcoll {

/// Makes XLA futures for programs that wait, and completes them.
class FutureFactory final : public WaiterFactory {
 public:
  explicit FutureFactory(const XLA_FFI_Api* api) : api_(api) {}

  Waiter Make() override {
    XLA_FFI_Future_Create_Args args{};
    args.struct_size = XLA_FFI_Future_Create_Args_STRUCT_SIZE;
    // Fails only where the runtime is older than these headers, which registration refuses.
    if (XLA_FFI_Error* error = api_->XLA_FFI_Future_Create(&args); error != nullptr) {
      xla::ffi::internal::DestroyError(api_, error);
    }
    future_ = args.future;
    return {const_cast<XLA_FFI_Api*>(api_), args.future, &Resume};
  }

  // A thread of Python's may have to start the programs of other devices.
  [[nodiscard]] bool may_stay() const override { return !IsPythonThread(); }

  [[nodiscard]] XLA_FFI_Future* future() const { return future_; }

 private:
  static void Resume(const Waiter& waiter, const Status* status) {
    const auto* api = static_cast<const XLA_FFI_Api*>(waiter.context);
    auto* future = static_cast<XLA_FFI_Future*>(waiter.future);
    if (future == nullptr) {
      return;  // the handler has returned an error
    }
    XLA_FFI_Error* failed = nullptr;
    if (status == nullptr) {
      XLA_FFI_Future_SetAvailable_Args args{};
      args.struct_size = XLA_FFI_Future_SetAvailable_Args_STRUCT_SIZE;
      args.future = future;
      failed = api->XLA_FFI_Future_SetAvailable(&args);
    } else {
      XLA_FFI_Future_SetError_Args args{};
      args.struct_size = XLA_FFI_Future_SetError_Args_STRUCT_SIZE;
      args.future = future;
      args.error = xla::ffi::internal::CreateError(api, ToError(*status));
      failed = api->XLA_FFI_Future_SetError(&args);
    }
    if (failed != nullptr) {
      xla::ffi::internal::DestroyError(api, failed);
    }
  }

  const XLA_FFI_Api* api_;
  XLA_FFI_Future* future_ = nullptr;
};

}  // namespace jaxcoll
