#include "ffi/cuda/handlers.h"

#include <cstddef>  // std::size_t
#include <cstdint>  // std::int64_t
#include <memory>   // std::make_unique, std::unique_ptr
#include <string>   // std::string, std::to_string
#include <utility>  // std::move
#include <vector>   // std::vector

#include "cuda/collectives.h"
#include "cuda/reductions.h"
#include "cuda/ring_matmul.h"
#include "ffi/cuda/state.h"

namespace jaxcoll::cuda {
namespace {

namespace ffi = xla::ffi;

using Made = std::unique_ptr<Operation>;

Reduction ReadReduction(AttributeReader& reader, DType dtype, ReduceOp op) {
  const auto reduction = ReductionOf(dtype, op, reader.Size("group_size"));
  if (!reduction) {
    reader.Problem("NCCL has no " + std::string(Name(op)) + " of " + std::string(Name(dtype)));
  }
  return reduction.value_or(Reduction{.type = NcclType::kI8, .op = NcclOp::kSum, .parts = 1});
}

// Attributes op, dtypes and counts of the leaves, and whether they go over peer memory.
Instantiated AllReduceOf(ffi::RemainingArgs /*operands*/, ffi::RemainingRets /*results*/,
                         ffi::Dictionary attributes) {
  return Instantiate(attributes, [](AttributeReader& reader) -> Made {
    const ReduceOp op = reader.Op("op");
    const std::vector<std::int64_t> dtypes = reader.Ints("dtypes");
    const std::vector<std::int64_t> counts = reader.Ints("counts");
    if (reader.ok() && dtypes.size() != counts.size()) {
      reader.Problem("dtypes and counts differ in length");
    }
    const bool is_small_sum = reader.Int("is_small_sum") != 0;
    std::vector<AllReduce::Leaf> leaves;
    for (std::size_t i = 0; reader.ok() && i < counts.size(); ++i) {
      const DType dtype = reader.AsType(dtypes[i]);
      const std::size_t count = reader.AsSize(counts[i]);
      leaves.push_back({.reduction = ReadReduction(reader, dtype, op),
                        .count = count,
                        .bytes = count * SizeOf(dtype)});
      const Reduction& reduction = leaves.back().reduction;
      if (is_small_sum && (reduction.op != NcclOp::kSum ||
                           !PeerSeat::Fits(reduction.type, count * reduction.parts))) {
        reader.Problem("is_small_sum: expected small sums");
      }
    }
    return reader.ok() ? std::make_unique<AllReduce>(std::move(leaves), is_small_sum) : nullptr;
  });
}

// Attribute bytes, of the operand.
Instantiated AllGatherOf(ffi::RemainingArgs /*operands*/, ffi::RemainingRets /*results*/,
                         ffi::Dictionary attributes) {
  return Instantiate(attributes, [](AttributeReader& reader) -> Made {
    const std::size_t bytes = reader.Size("bytes");
    const std::size_t group_size = reader.Size("group_size");
    return reader.ok() ? std::make_unique<AllGather>(bytes, group_size) : nullptr;
  });
}

// Attributes op, dtype and count, of a block.
Instantiated ReduceScatterOf(ffi::RemainingArgs /*operands*/, ffi::RemainingRets /*results*/,
                             ffi::Dictionary attributes) {
  return Instantiate(attributes, [](AttributeReader& reader) -> Made {
    const ReduceOp op = reader.Op("op");
    const DType dtype = reader.AsType(reader.Int("dtype"));
    const std::size_t count = reader.Size("count");
    const std::size_t group_size = reader.Size("group_size");
    const Reduction reduction = ReadReduction(reader, dtype, op);
    return reader.ok() ? std::make_unique<ReduceScatter>(reduction, count, count * SizeOf(dtype),
                                                         group_size)
                       : nullptr;
  });
}

// Attribute bytes, of a block.
Instantiated AllToAllOf(ffi::RemainingArgs /*operands*/, ffi::RemainingRets /*results*/,
                        ffi::Dictionary attributes) {
  return Instantiate(attributes, [](AttributeReader& reader) -> Made {
    const std::size_t bytes = reader.Size("bytes");
    const std::size_t group_size = reader.Size("group_size");
    return reader.ok() ? std::make_unique<AllToAll>(bytes, group_size) : nullptr;
  });
}

// Attributes bytes and sources, as csrc/ffi/ppermute.cc.
Instantiated PpermuteOf(ffi::RemainingArgs /*operands*/, ffi::RemainingRets /*results*/,
                        ffi::Dictionary attributes) {
  return Instantiate(attributes, [](AttributeReader& reader) -> Made {
    const std::size_t bytes = reader.Size("bytes");
    const std::size_t group_size = reader.Size("group_size");
    std::vector<int> sources;
    for (const std::int64_t source : reader.Ints("sources")) {
      if (source >= static_cast<std::int64_t>(group_size)) {
        reader.Problem("sources: no rank " + std::to_string(source));
      }
      sources.push_back(source < 0 ? -1 : static_cast<int>(source));
    }
    if (reader.ok() && sources.size() != group_size) {
      reader.Problem("sources: expected one for each rank");
    }
    return reader.ok() ? std::make_unique<Permute>(std::move(sources), bytes) : nullptr;
  });
}

// Attributes bytes and root (a rank).
Instantiated BroadcastOf(ffi::RemainingArgs /*operands*/, ffi::RemainingRets /*results*/,
                         ffi::Dictionary attributes) {
  return Instantiate(attributes, [](AttributeReader& reader) -> Made {
    const std::size_t bytes = reader.Size("bytes");
    const std::size_t root = reader.Size("root");
    if (reader.ok() && root >= reader.Size("group_size")) {
      reader.Problem("root: no rank " + std::to_string(root));
    }
    return reader.ok() ? std::make_unique<Broadcast>(static_cast<int>(root), bytes) : nullptr;
  });
}

// The attributes that RingShape has.
Instantiated RingMatmulOf(ffi::RemainingArgs /*operands*/, ffi::RemainingRets /*results*/,
                          ffi::Dictionary attributes) {
  return Instantiate(attributes, [](AttributeReader& reader) -> Made {
    const std::size_t kind = reader.Size("kind");
    const RingShape shape{.kind = static_cast<RingKind>(kind),
                          .num_ranks = reader.Size("group_size"),
                          .batch = reader.Size("batch"),
                          .rows = reader.Size("rows"),
                          .inner = reader.Size("inner"),
                          .columns = reader.Size("columns"),
                          .x_is_transposed = reader.Int("x_is_transposed") != 0,
                          .w_is_transposed = reader.Int("w_is_transposed") != 0,
                          .operand = reader.AsType(reader.Int("operand")),
                          .result = reader.AsType(reader.Int("result")),
                          .allows_tf32 = reader.Int("allows_tf32") != 0,
                          .workspace_bytes = reader.Size("workspace_bytes")};
    if (kind > static_cast<std::size_t>(RingKind::kGatherInner)) {
      reader.Problem("kind: no ring has number " + std::to_string(kind));
    }
    if (reader.ok() && (shape.num_ranks < 2 || shape.batch == 0 || shape.rows == 0 ||
                        shape.inner == 0 || shape.columns == 0)) {
      reader.Problem("batch, rows, inner, columns: nothing to multiply");
    }
    if (reader.ok() && shape.x_is_transposed && shape.batch != 1) {
      reader.Problem("x_is_transposed: expected a batch of 1");
    }
    return reader.ok() ? MakeRingMatmul(shape) : nullptr;
  });
}

ffi::Error InitializeOf(ffi::RemainingArgs /*operands*/, ffi::RemainingRets /*results*/,
                        ffi::Dictionary /*attributes*/, SiteState* state, Stream stream,
                        std::int32_t ordinal) noexcept {
  return Initialize(state, stream, ordinal);
}

ffi::Error ExecuteOf(ffi::RemainingArgs operands, ffi::RemainingRets results,
                     ffi::Dictionary /*attributes*/, SiteState* state, Stream stream,
                     ffi::RunId run, std::int32_t ordinal) noexcept {
  return Execute(operands, results, state, stream, run, ordinal);
}

// Some versions of XLA pass operands without memory here, others none.
auto AtInstantiation() {
  return ffi::Ffi::BindInstantiate().RemainingArgs().RemainingRets().Attrs();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxcollCudaAllReduce, AllReduceOf, AtInstantiation());
XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxcollCudaAllGather, AllGatherOf, AtInstantiation());
XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxcollCudaReduceScatter, ReduceScatterOf, AtInstantiation());
XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxcollCudaAllToAll, AllToAllOf, AtInstantiation());
XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxcollCudaPpermute, PpermuteOf, AtInstantiation());
XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxcollCudaBroadcast, BroadcastOf, AtInstantiation());
XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxcollCudaRingMatmul, RingMatmulOf, AtInstantiation());

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxcollCudaInitialize, InitializeOf,
                              ffi::Ffi::BindInitialize()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs()
                                  .Ctx<ffi::State<SiteState>>()
                                  .Ctx<ffi::PlatformStream<Stream>>()
                                  .Ctx<ffi::DeviceOrdinal>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxcollCudaExecute, ExecuteOf,
                              ffi::Ffi::Bind()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs()
                                  .Ctx<ffi::State<SiteState>>()
                                  .Ctx<ffi::PlatformStream<Stream>>()
                                  .Ctx<ffi::RunId>()
                                  .Ctx<ffi::DeviceOrdinal>());

}  // namespace jaxcoll::cuda
