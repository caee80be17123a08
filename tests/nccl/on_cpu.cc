// The handlers for GPUs on XLA's CPU devices, which have no streams and no "initialize" stage: with
// the libraries of tests/cpp/fake_cuda.cc, programs lowered for CUDA compute on the CPU.
#include "xla/ffi/api/c_api.h"

namespace {

XLA_FFI_Handler* initialize_handler = nullptr;
XLA_FFI_Handler* execute_handler = nullptr;

XLA_FFI_Error* NoStream(XLA_FFI_Stream_Get_Args* args) {
  args->stream = nullptr;
  return nullptr;
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
  XLA_FFI_CallFrame with_stream = *frame;
  with_stream.api = &api;
  with_stream.stage = XLA_FFI_ExecutionStage_INITIALIZE;
  if (XLA_FFI_Error* const error = initialize_handler(&with_stream); error != nullptr) {
    return error;
  }
  with_stream.stage = XLA_FFI_ExecutionStage_EXECUTE;
  return execute_handler(&with_stream);
}
