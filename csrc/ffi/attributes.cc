#include "ffi/attributes.h"

namespace jaxcoll {

namespace ffi = xla::ffi;

void AttributeReader::Problem(const std::string& text) {
  if (problem_.empty()) {
    problem_ = text;
  }
}

std::int64_t AttributeReader::Int(const char* name) {
  const ffi::ErrorOr<std::int64_t> value = attributes_.get<std::int64_t>(name);
  if (!value.has_value()) {
    Problem("attribute " + std::string(name) + ": expected int64");
    return 0;
  }
  return *value;
}

std::size_t AttributeReader::Size(const char* name) { return AsSize(Int(name)); }

std::size_t AttributeReader::AsSize(std::int64_t value) {
  if (value < 0) {
    Problem("expected at least 0, got " + std::to_string(value));
    return 0;
  }
  return static_cast<std::size_t>(value);
}

std::vector<std::int64_t> AttributeReader::Ints(const char* name) {
  const auto value = attributes_.get<ffi::Span<const std::int64_t>>(name);
  if (!value.has_value()) {
    Problem("attribute " + std::string(name) + ": expected an array of int64");
    return {};
  }
  return {value->begin(), value->end()};
}

DType AttributeReader::AsType(std::int64_t value) {
  if (value < 0 || static_cast<std::size_t>(value) >= kNumDTypes) {
    Problem("no dtype has number " + std::to_string(value));
    return DType::kF32;
  }
  return static_cast<DType>(value);
}

ReduceOp AttributeReader::Op(const char* name) {
  const std::size_t value = Size(name);
  if (value >= kNumReduceOps) {
    Problem("attribute " + std::string(name) + ": no reduction has number " +
            std::to_string(value));
    return ReduceOp::kSum;
  }
  return static_cast<ReduceOp>(value);
}

}  // namespace jaxcoll
