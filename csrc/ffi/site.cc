#include "ffi/site.h"

#include <algorithm>  // std::any_of
#include <cstddef>    // std::ptrdiff_t, std::size_t
#include <cstdint>    // std::int64_t, std::uint32_t
#include <exception>  // std::exception
#include <memory>     // std::make_shared, std::make_unique
#include <string>     // std::string, std::to_string
#include <utility>    // std::move

#include "ffi/error.h"
#include "ffi/future_factory.h"
#include "ffi/handlers.h"
#include "host/job.h"
#include "host/recorder.h"
#include "host/threads.h"
#include "host/watchdog.h"
#include "host/witness.h"
#include "xla/ffi/api/c_api.h"

namespace jaxcoll {

namespace ffi = xla::ffi;

ffi::TypeId SiteState::id = {};
const ffi::TypeInfo SiteState::info = ffi::MakeTypeInfo<SiteState>();

ReduceFn ReduceOf(AttributeReader& reader, DType dtype, ReduceOp op) {
  ReduceFn reduce = GetReduce(dtype, op);
  if (reduce == nullptr) {
    reader.Problem("no " + std::string(Name(op)) + " of " + std::string(Name(dtype)));
  }
  return reduce;
}

namespace {

// Attributes "processes" and "devices", one for each id of "groups", or empty in a job of one
// process.
Placement ReadPlacement(AttributeReader& reader, std::size_t group_size, std::size_t num_ids) {
  const std::vector<std::int64_t> processes = reader.Ints("processes");
  const std::vector<std::int64_t> devices = reader.Ints("devices");
  Placement placement;
  if (!reader.ok() || processes.empty()) {
    return placement;
  }
  if (processes.size() != num_ids || devices.size() != num_ids) {
    reader.Problem("processes, devices: expected one for each id of groups");
    return placement;
  }
  placement.job = &Job::Get();
  for (std::size_t i = 0; i < num_ids; i += group_size) {
    const auto first = static_cast<std::ptrdiff_t>(i);
    const auto end = static_cast<std::ptrdiff_t>(i + group_size);
    placement.processes.emplace_back(processes.begin() + first, processes.begin() + end);
    placement.devices.emplace_back(devices.begin() + first, devices.begin() + end);
  }
  return placement;
}

}  // namespace

Instantiated MakeSite(AttributeReader& reader, std::unique_ptr<const Work> work) {
  const std::vector<std::int64_t> ids = reader.Ints("groups");
  const std::size_t group_size = reader.Size("group_size");
  const std::int64_t site_id = reader.Int("site");
  if (reader.ok() && (group_size < 1 || group_size > kMaxRanks || ids.size() % group_size != 0)) {
    reader.Problem("groups: " + std::to_string(ids.size()) + " ids don't make groups of " +
                   std::to_string(group_size));
  }
  std::vector<std::vector<std::int64_t>> groups;
  for (std::size_t i = 0; reader.ok() && i < ids.size(); ++i) {
    if (ids[i] < 0 || static_cast<std::size_t>(ids[i]) >= Recorder::kMaxDevices) {
      reader.Problem("groups: no device has number " + std::to_string(ids[i]));
    }
    if (i % group_size == 0) {
      groups.emplace_back();
    }
    groups.back().push_back(ids[i]);
  }
  const Placement placement = ReadPlacement(reader, group_size, ids.size());
  if (reader.ok()) {
    if (const std::string problem = CallSite::Problem(placement); !problem.empty()) {
      reader.Problem(problem);
    }
  }
  if (!reader.ok() || work == nullptr) {
    return ffi::Unexpected(ffi::Error::InvalidArgument("jaxcoll: " + reader.problem()));
  }
  return std::make_unique<SiteState>(
      new CallSite(static_cast<std::uint64_t>(site_id), groups, std::move(work), placement));
}

namespace {

// Fails the run, too: the other ranks must not wait for one that will not come.
XLA_FFI_Error* Refuse(const XLA_FFI_CallFrame& frame, const CallSite& site, std::int64_t run,
                      const std::string& message) {
  auto cause = std::make_shared<const Status>(Internal(SiteText(site.id()) + ": " + message));
  XLA_FFI_Error* const error = ffi::internal::CreateError(frame.api, ToError(*cause));
  site.FailJob(run, *cause);
  Watchdog::Get().FailRun(run, std::move(cause));
  Witness::Get().AwaitLook();
  return error;
}

// Of XLA's context; null where XLA has given an error instead.
SiteState* StateOf(const XLA_FFI_CallFrame& frame, XLA_FFI_Error*& error) {
  XLA_FFI_State_Get_Args args{};
  args.struct_size = XLA_FFI_State_Get_Args_STRUCT_SIZE;
  args.ctx = frame.ctx;
  args.stage = XLA_FFI_ExecutionStage_INSTANTIATE;
  args.type_id = &SiteState::id;
  error = frame.api->XLA_FFI_State_Get(&args);
  return static_cast<SiteState*>(args.state);
}

std::int64_t RunIdOf(const XLA_FFI_CallFrame& frame, XLA_FFI_Error*& error) {
  XLA_FFI_RunId_Get_Args args{};
  args.struct_size = XLA_FFI_RunId_Get_Args_STRUCT_SIZE;
  args.ctx = frame.ctx;
  error = frame.api->XLA_FFI_RunId_Get(&args);
  return args.run_id;
}

std::int64_t DeviceOf(const XLA_FFI_CallFrame& frame, XLA_FFI_Error*& error) {
  XLA_FFI_DeviceOrdinal_Get_Args args{};
  args.struct_size = XLA_FFI_DeviceOrdinal_Get_Args_STRUCT_SIZE;
  args.ctx = frame.ctx;
  error = frame.api->XLA_FFI_DeviceOrdinal_Get(&args);
  return args.device_ordinal;
}

const XLA_FFI_Buffer& BufferOf(void* of_frame) {
  return *static_cast<const XLA_FFI_Buffer*>(of_frame);
}

std::size_t BytesOf(const XLA_FFI_Buffer& buffer) {
  std::size_t count = ffi::ByteWidth(static_cast<ffi::DataType>(buffer.dtype));
  for (std::int64_t i = 0; i < buffer.rank; ++i) {
    count *= static_cast<std::size_t>(buffer.dims[i]);
  }
  return count;
}

// Of a frame with so many buffers before the operands and the results: what is wrong with these, or
// nothing.
std::string ProblemOf(const XLA_FFI_CallFrame& frame, const Work& work, std::size_t num_before,
                      std::size_t num_tokens) {
  if (static_cast<std::size_t>(frame.args.size) != work.num_operands() + num_before ||
      static_cast<std::size_t>(frame.rets.size) != work.num_results() + num_tokens) {
    return "wrong number of buffers";
  }
  if (std::any_of(frame.args.types, frame.args.types + frame.args.size,
                  [](XLA_FFI_ArgType type) { return type != XLA_FFI_ArgType_BUFFER; }) ||
      std::any_of(frame.rets.types, frame.rets.types + frame.rets.size,
                  [](XLA_FFI_RetType type) { return type != XLA_FFI_RetType_BUFFER; })) {
    return "other things than buffers";
  }
  if (num_before == 2 && (BufferOf(frame.args.args[0]).dtype != XLA_FFI_DataType_U32 ||
                          BufferOf(frame.args.args[0]).rank != 0)) {
    return "its first operand is not the device's number";
  }
  for (std::size_t i = 0; i < work.num_operands(); ++i) {
    if (BytesOf(BufferOf(frame.args.args[i + num_before])) != work.operand_bytes(i)) {
      return "operand " + std::to_string(i) + " has the wrong size";
    }
  }
  for (std::size_t i = 0; i < work.num_results(); ++i) {
    if (BytesOf(BufferOf(frame.rets.rets[i + num_tokens])) != work.result_bytes(i)) {
      return "result " + std::to_string(i) + " has the wrong size";
    }
  }
  return "";
}

XLA_FFI_Error* Visit(XLA_FFI_CallFrame& frame, SiteState& state, std::int64_t run) {
  CallSite& site = state.site();
  const auto num_args = static_cast<std::size_t>(frame.args.size);
  const auto num_rets = static_cast<std::size_t>(frame.rets.size);
  const bool has_id = num_args == state.num_operands() + 2;
  const std::size_t num_before = has_id ? 2 : 1;  // and the token
  const std::size_t num_tokens = num_rets == state.num_results() ? 0 : 1;
  if (!state.is_checked()) {  // the shapes of a compiled call are the same in all its runs
    const std::string problem = ProblemOf(frame, site.work(), num_before, num_tokens);
    if (!problem.empty()) {
      return Refuse(frame, site, run, problem);
    }
    state.NoteChecked();
  }
  const std::int64_t id =
      has_id ? std::int64_t{*static_cast<const std::uint32_t*>(BufferOf(frame.args.args[0]).data)}
             : site.only_member();
  site.Prefetch(id);
  if (Watchdog& watchdog = Watchdog::Get();
      !(watchdog.IsInline(run) && watchdog.IsOfMainThread(run)) && IsPythonThread()) {
    watchdog.NoteInline(run);
  }
  std::int64_t device = site.FixedDevice(id);
  if (device < 0) {
    XLA_FFI_Error* error = nullptr;
    device = DeviceOf(frame, error);
    if (error != nullptr) {
      return error;
    }
  }
  const CallSite::Visit visit = site.Begin(id, device, run);
  if (visit.meeting == nullptr) {
    return Refuse(
        frame, site, run,
        has_id ? "device " + std::to_string(id) + " is in none of the groups"
               : "its program was compiled for one device a process, and this process has none or "
                 "several in its groups: compile it here");
  }
  for (std::size_t i = 0; i < state.num_operands(); ++i) {
    visit.meeting->SetOperand(visit.rank, i, BufferOf(frame.args.args[i + num_before]).data);
  }
  for (std::size_t i = 0; i < state.num_results(); ++i) {
    visit.meeting->SetResult(visit.rank, i, BufferOf(frame.rets.rets[i + num_tokens]).data);
  }
  FutureFactory factory(frame.api);
  const Arrival arrival = site.Arrive(visit, factory);
  switch (arrival.answer) {
    case Answer::kReady:
      break;
    case Answer::kWaits:
      frame.future = factory.future();
      if (frame.future == nullptr) {
        return Refuse(frame, site, run, "XLA can't make a future");
      }
      break;
    case Answer::kFailed:
      return ffi::internal::CreateError(frame.api, ToError(*arrival.failure));
  }
  return nullptr;
}

XLA_FFI_Error* Call(XLA_FFI_CallFrame& frame, SiteState& state, std::int64_t run) noexcept {
  try {
    return Visit(frame, state, run);
  } catch (const std::exception& e) {
    return Refuse(frame, state.site(), run, e.what());
  }
}

bool IsCall(const XLA_FFI_CallFrame& frame) {
  return frame.stage == XLA_FFI_ExecutionStage_EXECUTE &&
         frame.struct_size == XLA_FFI_CallFrame_STRUCT_SIZE &&
         (frame.extension_start == nullptr ||
          frame.extension_start->type != XLA_FFI_Extension_Metadata);
}

// What XLA asks of a handler beside calls, and the errors of what it must not; never a call.
XLA_FFI_Error* AnswerOther(XLA_FFI_CallFrame& frame) {
  static auto* const handler =
      ffi::Ffi::Bind().To([] { return ffi::Error::Internal("jaxcoll: not a call"); }).release();
  return handler->Call(&frame);
}

}  // namespace

// Decodes its frame by itself. With ffi::Ffi::Bind, whose buffers compute their sizes in each call,
// and whose results hold strings, 256 bytes took 0.64 us between two processes instead of 0.54, in
// a loop on 2 cores of an EPYC.
XLA_FFI_Error* JaxcollExecute(XLA_FFI_CallFrame* frame) {
  if (!IsCall(*frame)) {
    return AnswerOther(*frame);
  }
  XLA_FFI_Error* error = nullptr;
  SiteState* const state = StateOf(*frame, error);
  if (error != nullptr) {
    return error;
  }
  const std::int64_t run = RunIdOf(*frame, error);
  if (error != nullptr) {
    return error;
  }
  frame->future = nullptr;
  return Call(*frame, *state, run);
}

}  // namespace jaxcoll
