// The handlers for GPUs on XLA's CPU devices, which have no streams and no "initialize" stage: with
// the libraries of tests/cpp/fake_cuda.cc, programs lowered for CUDA compute on the CPU.
#include "xla/ffi/api/c_api.h"

namespace {

XLA_FFI_Handler* initialize_handler = nullptr;
XLA_FFI_Handler* execute_handler = nullptr;
XLA_FFI_DeviceOrdinal_Get* ordinal_of_xla = nullptr;

// Where a job has several processes, XLA numbers all of its CPU devices: so many of each process.
constexpr int kMostOfAProcess = 2048;

XLA_FFI_Error* NoStream(XLA_FFI_Stream_Get_Args* args) {
  args->stream = nullptr;
  return nullptr;
}

XLA_FFI_Error* LocalOrdinal(XLA_FFI_DeviceOrdinal_Get_Args* args) {
  XLA_FFI_Error* const error = ordinal_of_xla(args);
  args->device_ordinal %= kMostOfAProcess;
  return error;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) void on_cpu_connect(XLA_FFI_Handler* initialize,
                                                                      XLA_FFI_Handler* execute) {
  initialize_handler = initialize;
  execute_handler = execute;
}

extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* on_cpu(XLA_FFI_CallFrame* frame) {
  if (frame->extension_start != nullptr) {
    return execute_handler(frame);  // XLA asks for the handler's version
  }
  XLA_FFI_Api api = *frame->api;
  api.XLA_FFI_Stream_Get = &NoStream;
  ordinal_of_xla = frame->api->XLA_FFI_DeviceOrdinal_Get;
  api.XLA_FFI_DeviceOrdinal_Get = &LocalOrdinal;
  XLA_FFI_CallFrame with_stream = *frame;
  with_stream.api = &api;
  with_stream.stage = XLA_FFI_ExecutionStage_INITIALIZE;
  if (XLA_FFI_Error* const error = initialize_handler(&with_stream); error != nullptr) {
    return error;
  }
  with_stream.stage = XLA_FFI_ExecutionStage_EXECUTE;
  return execute_handler(&with_stream);
}
