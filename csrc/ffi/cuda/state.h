// ffi/cuda/state.h: what XLA keeps for a call site on GPUs, and how a call reaches it.
//
// Every op is one custom call with operands (token, leaves...) and results (token, leaves...).
// Which rank a device is stands in the attribute "devices": global ids of the groups' members, in
// rank order; the host could not read an operand.
#pragma once

#include <cstddef>    // std::size_t
#include <cstdint>    // std::int32_t
#include <exception>  // std::exception
#include <memory>     // std::unique_ptr
#include <utility>    // std::move

#include "cuda/site.h"
#include "ffi/attributes.h"
#include "ffi/error.h"
#include "xla/ffi/api/ffi.h"

namespace jaxcoll::cuda {

class SiteState {
 public:
  static xla::ffi::TypeId id;
  static const xla::ffi::TypeInfo info;

  explicit SiteState(std::unique_ptr<Site> site) : site_(std::move(site)) {}

  [[nodiscard]] Site& site() const { return *site_; }

 private:
  std::unique_ptr<Site> site_;
};

using Instantiated = xla::ffi::ErrorOr<std::unique_ptr<SiteState>>;

/// The call site for `operation`, of the attributes "site", "devices" and "group_size".
Instantiated MakeSite(AttributeReader& reader, std::unique_ptr<Operation> operation);

/// Runs an op's `make` (AttributeReader& -> std::unique_ptr<Operation>; may return null after a
/// problem) with nothing thrown.
template <typename Make>
Instantiated Instantiate(const xla::ffi::Dictionary& attributes, Make make) {
  try {
    AttributeReader reader(attributes);
    std::unique_ptr<Operation> operation = make(reader);
    return MakeSite(reader, std::move(operation));
  } catch (const std::exception& e) {
    return xla::ffi::Unexpected(xla::ffi::Error::Internal(e.what()));
  }
}

/// Before each run of a program, for each of its call sites.
xla::ffi::Error Initialize(SiteState* state, Stream stream, std::int32_t ordinal) noexcept;

/// Puts the call on `stream`.
xla::ffi::Error Execute(xla::ffi::RemainingArgs operands, xla::ffi::RemainingRets results,
                        SiteState* state, Stream stream, xla::ffi::RunId run,
                        std::int32_t ordinal) noexcept;

}  // namespace jaxcoll::cuda
