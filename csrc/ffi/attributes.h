// ffi/attributes.h: reading what the lowering wrote into a program.
#pragma once

#include <cstddef>  // std::size_t
#include <cstdint>  // std::int64_t
#include <string>   // std::string
#include <vector>   // std::vector

#include "core/types.h"
#include "xla/ffi/api/ffi.h"

namespace jaxcoll {

/// Reads attributes by name and remembers the first problem, so that an op reads all that it needs
/// in a row and checks once.
class AttributeReader {
 public:
  explicit AttributeReader(const xla::ffi::Dictionary& attributes) : attributes_(attributes) {}

  std::int64_t Int(const char* name);
  /// As Int, for a figure that must not be negative.
  std::size_t Size(const char* name);
  std::vector<std::int64_t> Ints(const char* name);
  ReduceOp Op(const char* name);

  /// A figure read before, checked.
  std::size_t AsSize(std::int64_t value);
  DType AsType(std::int64_t value);

  [[nodiscard]] bool ok() const { return problem_.empty(); }
  [[nodiscard]] const std::string& problem() const { return problem_; }
  void Problem(const std::string& text);

 private:
  const xla::ffi::Dictionary& attributes_;
  std::string problem_;
};

}  // namespace jaxcoll
