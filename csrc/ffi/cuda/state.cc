#include "ffi/cuda/state.h"

#include <string>  // std::string, std::to_string
#include <vector>  // std::vector

#include "core/small_array.h"
#include "core/status.h"

namespace jaxcoll::cuda {

namespace ffi = xla::ffi;

ffi::TypeId SiteState::id = {};
const ffi::TypeInfo SiteState::info = ffi::MakeTypeInfo<SiteState>();

namespace {

constexpr std::size_t kFewBuffers = 32;

// The results after the first, the operands after the first: those are tokens.
Status ExecuteChecked(ffi::RemainingArgs operands, ffi::RemainingRets results, Site& site,
                      Stream stream, std::int64_t run, std::int32_t ordinal) {
  if (operands.empty() || results.empty()) {
    return Internal("expected a token");
  }
  SmallArray<Operand, kFewBuffers> from(operands.size() - 1);
  SmallArray<Result, kFewBuffers> to(results.size() - 1);
  for (std::size_t i = 0; i < from.size(); ++i) {
    const auto buffer = operands.get<ffi::AnyBuffer>(i + 1);
    if (!buffer.has_value()) {
      return Internal("operand " + std::to_string(i) + " is no buffer");
    }
    from[i] = {.data = buffer->untyped_data(), .bytes = buffer->size_bytes()};
  }
  for (std::size_t i = 0; i < to.size(); ++i) {
    auto buffer = results.get<ffi::AnyBuffer>(i + 1);
    if (!buffer.has_value()) {
      return Internal("result " + std::to_string(i) + " is no buffer");
    }
    to[i] = {.data = (*buffer)->untyped_data(), .bytes = (*buffer)->size_bytes()};
  }
  return site.Execute(ordinal, stream, run, {from.data(), from.size()}, {to.data(), to.size()});
}

}  // namespace

Instantiated MakeSite(AttributeReader& reader, std::unique_ptr<Operation> operation) {
  const std::vector<std::int64_t> ids = reader.Ints("devices");
  const std::size_t group_size = reader.Size("group_size");
  const std::int64_t site = reader.Int("site");
  if (reader.ok() && (group_size < 1 || ids.empty() || ids.size() % group_size != 0)) {
    reader.Problem("devices: " + std::to_string(ids.size()) + " ids don't make groups of " +
                   std::to_string(group_size));
  }
  if (!reader.ok() || operation == nullptr) {
    return ffi::Unexpected(ffi::Error::InvalidArgument("jaxcoll: " + reader.problem()));
  }
  std::vector<std::vector<std::int64_t>> groups;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (i % group_size == 0) {
      groups.emplace_back();
    }
    groups.back().push_back(ids[i]);
  }
  return std::make_unique<SiteState>(std::make_unique<Site>(
      Engine::Get(), static_cast<std::uint64_t>(site), std::move(groups), std::move(operation)));
}

ffi::Error Initialize(SiteState* state, Stream stream, std::int32_t ordinal) noexcept {
  try {
    const Status status = state->site().Initialize(ordinal, stream);
    return status.ok() ? ffi::Error::Success() : ToError(status);
  } catch (const std::exception& e) {
    return ffi::Error::Internal(e.what());
  }
}

ffi::Error Execute(ffi::RemainingArgs operands, ffi::RemainingRets results, SiteState* state,
                   Stream stream, ffi::RunId run, std::int32_t ordinal) noexcept {
  try {
    const Status status =
        ExecuteChecked(operands, results, state->site(), stream, run.run_id, ordinal);
    return status.ok() ? ffi::Error::Success() : ToError(status);
  } catch (const std::exception& e) {
    return ffi::Error::Internal(e.what());
  }
}

}  // namespace jaxcoll::cuda
