// core/status.h: the only error type below the FFI layer.
#pragma once

#include <cstdint>  // std::uint8_t
#include <string>   // std::string
#include <utility>  // std::move

namespace jaxcoll {

enum class Code : std::uint8_t {
  kOk,
  kInvalidArgument,
  kDeadlineExceeded,
  kInternal,
};

struct Status {
  Code code = Code::kOk;
  std::string message;

  [[nodiscard]] bool ok() const { return code == Code::kOk; }
};

inline Status InvalidArgument(std::string message) {
  return {Code::kInvalidArgument, std::move(message)};
}
inline Status DeadlineExceeded(std::string message) {
  return {Code::kDeadlineExceeded, std::move(message)};
}
inline Status Internal(std::string message) { return {Code::kInternal, std::move(message)}; }

}  // namespace jaxcoll
