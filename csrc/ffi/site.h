// ffi/site.h: what the handlers of all ops share: the state of a call site, and its execution.
//
// Every op is one custom call with operands (logical id, token, leaves...) and results (token,
// leaves...), without the id where each process has one device, and with a large single result
// alone. XLA instantiates it once per call site of a compiled program, with its attributes; that is
// where an op differs from another: in the Work that it makes of them. Execution is the same for
// all.
#pragma once

#include <atomic>     // std::atomic
#include <cstddef>    // std::size_t
#include <cstdint>    // std::int64_t
#include <exception>  // std::exception
#include <memory>     // std::unique_ptr
#include <utility>    // std::move
#include <vector>     // std::vector

#include "core/pooled.h"
#include "core/types.h"
#include "ffi/attributes.h"
#include "host/call_site.h"
#include "host/work.h"
#include "kernels/reduce.h"
#include "xla/ffi/api/ffi.h"

namespace jaxcoll {

/// Owns the program's reference to a call site.
class SiteState : public Pooled {
 public:
  static xla::ffi::TypeId id;
  static const xla::ffi::TypeInfo info;

  explicit SiteState(CallSite* site)
      : site_(site),
        num_operands_(site->work().num_operands()),
        num_results_(site->work().num_results()) {}
  SiteState(const SiteState&) = delete;
  SiteState& operator=(const SiteState&) = delete;
  ~SiteState() { site_->Unref(); }

  [[nodiscard]] CallSite& site() const { return *site_; }
  [[nodiscard]] std::size_t num_operands() const { return num_operands_; }
  [[nodiscard]] std::size_t num_results() const { return num_results_; }
  /// Whether the buffers of a call were seen to have the right sizes.
  [[nodiscard]] bool is_checked() const { return is_checked_.load(std::memory_order_relaxed); }
  void NoteChecked() { is_checked_.store(true, std::memory_order_relaxed); }

 private:
  CallSite* site_;
  std::size_t num_operands_;
  std::size_t num_results_;
  std::atomic<bool> is_checked_{false};
};

using Instantiated = xla::ffi::ErrorOr<std::unique_ptr<SiteState>>;

/// The kernel, or a problem where the combination has none.
ReduceFn ReduceOf(AttributeReader& reader, DType dtype, ReduceOp op);

/// The call site for `work`, of the attributes "site", "groups", "group_size", "processes" and
/// "devices".
Instantiated MakeSite(AttributeReader& reader, std::unique_ptr<const Work> work);

/// Runs an op's `make` (AttributeReader& -> std::unique_ptr<const Work>; may return null after a
/// problem) with nothing thrown.
template <typename Make>
Instantiated Instantiate(const xla::ffi::Dictionary& attributes, Make make) {
  try {
    AttributeReader reader(attributes);
    std::unique_ptr<const Work> work = make(reader);
    return MakeSite(reader, std::move(work));
  } catch (const std::exception& e) {
    return xla::ffi::Unexpected(xla::ffi::Error::Internal(e.what()));
  }
}

}  // namespace jaxcoll
