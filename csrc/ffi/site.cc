#include "ffi/site.h"

#include <cstddef>  // std::ptrdiff_t, std::size_t
#include <cstdint>  // std::int32_t, std::int64_t, std::uint32_t
#include <string>   // std::string, std::to_string

#include "ffi/handlers.h"
#include "ffi/outcome.h"
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
Outcome Refuse(const CallSite& site, std::int64_t run, const std::string& message) {
  auto cause = std::make_shared<const Status>(Internal(SiteText(site.id()) + ": " + message));
  Outcome outcome{.error = ToError(*cause)};
  site.FailJob(run, *cause);
  Watchdog::Get().FailRun(run, std::move(cause));
  Witness::Get().AwaitLook();
  return outcome;
}

Outcome ExecuteImpl(ffi::RemainingArgs operands, ffi::RemainingRets results,
                    ffi::Dictionary /*attributes*/, SiteState* state, ffi::RunId run_id,
                    std::int32_t device, FutureFactory& factory) {
  CallSite& site = state->site();
  const Work& work = site.work();
  const bool has_id = operands.size() == work.num_operands() + 2;
  const std::size_t num_before = has_id ? 2 : 1;  // and the token
  const std::size_t num_tokens = results.size() == work.num_results() ? 0 : 1;
  std::int64_t id = site.only_member();
  if (has_id) {
    const auto first = operands.get<ffi::BufferR0<ffi::DataType::U32>>(0);
    id = first.has_value() ? std::int64_t{*first->typed_data()} : -1;
  }
  site.Prefetch(id);
  const std::int64_t run = run_id.run_id;
  if (IsPythonThread()) {
    Watchdog::Get().NoteInline(run);
  }
  if (operands.size() != work.num_operands() + num_before ||
      results.size() != work.num_results() + num_tokens) {
    return Refuse(site, run, "wrong number of buffers");
  }
  const CallSite::Visit visit = site.Begin(id, device, run);
  if (visit.meeting == nullptr) {
    return Refuse(
        site, run,
        has_id ? "device " + std::to_string(id) + " is in none of the groups"
               : "its program was compiled for one device a process, and this process has none or "
                 "several in its groups: compile it here");
  }
  for (std::size_t i = 0; i < work.num_operands(); ++i) {
    const auto buffer = operands.get<ffi::AnyBuffer>(i + num_before);
    if (!buffer.has_value() || buffer->size_bytes() != work.operand_bytes(i)) {
      return Refuse(site, run, "operand " + std::to_string(i) + " has the wrong size");
    }
    visit.meeting->SetOperand(visit.rank, i, buffer->untyped_data());
  }
  for (std::size_t i = 0; i < work.num_results(); ++i) {
    auto buffer = results.get<ffi::AnyBuffer>(i + num_tokens);
    if (!buffer.has_value() || (*buffer)->size_bytes() != work.result_bytes(i)) {
      return Refuse(site, run, "result " + std::to_string(i) + " has the wrong size");
    }
    visit.meeting->SetResult(visit.rank, i, (*buffer)->untyped_data());
  }
  const Arrival arrival = site.Arrive(visit, factory);
  switch (arrival.answer) {
    case Answer::kReady:
      return {};
    case Answer::kWaits:
      if (factory.future() == nullptr) {
        return Refuse(site, run, "XLA can't make a future");
      }
      return {.future = factory.future()};
    case Answer::kFailed:
      break;
  }
  return {.error = ToError(*arrival.failure)};
}

Outcome Execute(ffi::RemainingArgs operands, ffi::RemainingRets results, ffi::Dictionary attributes,
                SiteState* state, ffi::RunId run_id, std::int32_t device,
                FutureFactory factory) noexcept {
  try {
    return ExecuteImpl(operands, results, attributes, state, run_id, device, factory);
  } catch (const std::exception& e) {
    return Refuse(state->site(), run_id.run_id, e.what());
  }
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxcollExecute, Execute,
                              ffi::Ffi::Bind()
                                  .RemainingArgs()  // logical id if it needs one, token, leaves
                                  .RemainingRets()  // token if it gives one, leaves
                                  .Attrs()
                                  .Ctx<ffi::State<SiteState>>()
                                  .Ctx<ffi::RunId>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Ctx<FutureFactory>());

}  // namespace jaxcoll
