// ffi/all_reduce.cc: attributes op, dtypes[i], counts[i] (elements of leaf i).
#include "ffi/handlers.h"
#include "ffi/site.h"
#include "host/reduce_work.h"

namespace jaxcoll {
namespace {

namespace ffi = xla::ffi;

Instantiated MakeAllReduce(ffi::Dictionary attributes) {
  return Instantiate(attributes, [](AttributeReader& reader) -> std::unique_ptr<const Work> {
    const ReduceOp op = reader.Op("op");
    const std::vector<std::int64_t> dtypes = reader.Ints("dtypes");
    const std::vector<std::int64_t> counts = reader.Ints("counts");
    if (reader.ok() && dtypes.size() != counts.size()) {
      reader.Problem("dtypes and counts differ in length");
    }
    std::vector<AllReduceWork::Leaf> leaves;
    for (std::size_t i = 0; reader.ok() && i < counts.size(); ++i) {
      const DType dtype = reader.AsType(dtypes[i]);
      leaves.push_back({dtype, reader.AsSize(counts[i]), ReduceOf(reader, dtype, op)});
    }
    return reader.ok() ? std::make_unique<AllReduceWork>(leaves) : nullptr;
  });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxcollAllReduce, MakeAllReduce, ffi::Ffi::BindInstantiate().Attrs());

}  // namespace jaxcoll
