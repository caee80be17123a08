// host/direct_route.h: large copies across processes, read from where they lie.
//
// A process leaves the addresses of its operands in its window, the others read them through the
// system (host/peer_memory.h), one copy instead of two, and it goes on when they have read. One
// that gives up fails the job before its buffers become somebody else's; whoever has read looks for
// that.
#pragma once

#include <cstddef>     // std::byte, std::size_t
#include <functional>  // std::function
#include <vector>      // std::vector

#include "host/copy_work.h"
#include "host/route.h"
#include "host/work.h"

namespace jaxcoll {

/// Three phases, one round: leave addresses, read, wait for those that read.
class DirectRoute : public Route {
 public:
  explicit DirectRoute(const Membership& members) : members_(members) {}

  [[nodiscard]] std::size_t num_phases() const final { return 3; }
  [[nodiscard]] std::size_t num_rounds() const final { return 1; }
  [[nodiscard]] bool Run(std::size_t phase, std::size_t round, const Buffers& local,
                         const Processes& processes) const final;
  void Meanwhile(std::size_t round, const Buffers& local) const final;
  [[nodiscard]] bool Reads(std::size_t phase, std::size_t reader, std::size_t process) const final;
  [[nodiscard]] bool takes_one_by_one() const final { return true; }
  [[nodiscard]] bool Take(std::size_t round, std::size_t process, const Buffers& local,
                          const Processes& processes) const final;

 protected:
  /// Copies what rank `target`, of this process, gets from `source`'s operand at `from`, which is
  /// in process `pid`, or here where `pid` is 0.
  [[nodiscard]] virtual bool Read(std::size_t source, std::size_t target, std::int64_t pid,
                                  const std::byte* from, std::byte* result) const = 0;
  /// What `target` gets from `source`.
  [[nodiscard]] virtual bool Wants(std::size_t target, std::size_t source) const = 0;
  /// For what nobody sends.
  virtual void Begin(std::size_t target, std::byte* result) const = 0;

 private:
  const Membership& members_;
};

/// As ExchangeRoute.
class DirectExchange final : public DirectRoute {
 public:
  DirectExchange(const ExchangeLayout& layout, const Membership& members)
      : DirectRoute(members), layout_(layout) {}

 protected:
  [[nodiscard]] bool Read(std::size_t source, std::size_t target, std::int64_t pid,
                          const std::byte* from, std::byte* result) const override;
  [[nodiscard]] bool Wants(std::size_t, std::size_t) const override { return true; }
  void Begin(std::size_t, std::byte*) const override {}

 private:
  ExchangeLayout layout_;
};

/// As PermuteRoute.
class DirectPermute final : public DirectRoute {
 public:
  DirectPermute(std::vector<std::size_t> source_of, std::size_t bytes, const Membership& members);

 protected:
  [[nodiscard]] bool Read(std::size_t source, std::size_t target, std::int64_t pid,
                          const std::byte* from, std::byte* result) const override;
  [[nodiscard]] bool Wants(std::size_t target, std::size_t source) const override;
  void Begin(std::size_t target, std::byte* result) const override;

 private:
  std::vector<std::size_t> source_of_;
  std::size_t bytes_;
};

/// Whether so many bytes, of a rank's operand or of what it takes, in runs of `run_bytes`, are
/// worth a system call.
bool IsWorthReading(std::size_t bytes, std::size_t run_bytes);

/// Whether blocks that are read from where they lie come sooner than through windows. A rank
/// `wants(target, source)` the other's block; where `leaves_once`, all that want it have the same.
/// The answer is the same on all processes.
bool IsReadingFaster(const RouteOptions& options, const Membership& members, bool leaves_once,
                     const std::function<bool(std::size_t, std::size_t)>& wants);

}  // namespace jaxcoll
