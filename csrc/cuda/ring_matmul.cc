#include "cuda/ring_matmul.h"

#include <numeric>  // std::iota
#include <span>     // std::span

#include "cuda/block_path.h"

namespace jaxcoll::cuda {
namespace {

const std::byte* At(const void* data, std::size_t bytes) {
  return static_cast<const std::byte*>(data) + bytes;
}
std::byte* At(void* data, std::size_t bytes) { return static_cast<std::byte*>(data) + bytes; }

/// The largest power of two, up to what XLA's buffers have, that divides all of them.
std::size_t AlignmentOf(std::initializer_list<std::size_t> offsets) {
  std::size_t alignment = 16;
  for (const std::size_t offset : offsets) {
    while (offset % alignment != 0) {
      alignment /= 2;
    }
  }
  return alignment;
}

}  // namespace

// ---- Of both ------------------------------------------------------------------------------------

RingMatmul::RingMatmul(const RingShape& shape) : shape_(shape) {
  const std::size_t p = shape.num_ranks;
  const std::size_t x = shape.batch * shape.rows * shape.inner * SizeOf(shape.operand);
  const std::size_t w = shape.inner * shape.columns * SizeOf(shape.operand);
  const std::size_t y = shape.batch * shape.rows * shape.columns * SizeOf(shape.result);
  x_bytes_ = shape.kind == RingKind::kScatterRows ? x * p : x;
  const bool splits_w =
      shape.kind == RingKind::kScatterColumns || shape.kind == RingKind::kGatherInner;
  const bool gathers = shape.kind == RingKind::kGatherRows || shape.kind == RingKind::kGatherInner;
  w_bytes_ = splits_w ? w * p : w;
  y_bytes_ = shape.kind == RingKind::kGatherRows ? y * p : y;
  slot_bytes_ = gathers ? x : y;
}

Status RingMatmul::MakeEvents(const Libraries& libraries, Tools& tools, std::size_t count) {
  while (tools.events.size() < count) {
    Event event = nullptr;
    if (const int error = libraries.runtime.event_create_with_flags(&event, kEventDisableTiming);
        error != kCudaSuccess) {
      return libraries.OfRuntime("cudaEventCreateWithFlags", error);
    }
    tools.events.push_back(event);
  }
  return {};
}

// ---- Gather -------------------------------------------------------------------------------------

RingGatherMatmul::RingGatherMatmul(const RingShape& shape) : RingMatmul(shape) {}

Status RingGatherMatmul::Prepare(const Libraries& libraries, const Seat& seat, BlockSeat* blocks) {
  std::unique_ptr<Tools>& tools = ToolsAt(seat);
  tools = std::make_unique<Tools>();
  tools->blocks = blocks;
  const bool is_flat = gathers_inner();  // where batch and rows are as one
  const std::size_t batch = is_flat ? 1 : shape_.batch;
  const std::size_t rows = is_flat ? shape_.batch * shape_.rows : shape_.rows;
  const std::size_t w_rows = shape_.inner * (gathers_inner() ? shape_.num_ranks : 1);
  const std::size_t width = SizeOf(shape_.operand);
  const ProductShape product{
      .batch = batch,
      .rows = rows,
      .inner = shape_.inner,
      .columns = shape_.columns,
      .x_leading = shape_.x_is_transposed ? rows : shape_.inner,
      .w_leading = shape_.w_is_transposed ? w_rows : shape_.columns,
      .y_leading = shape_.columns,
      .x_stride = rows * shape_.inner,
      .y_stride = shape_.num_ranks * rows * shape_.columns,
      .x_is_transposed = shape_.x_is_transposed,
      .w_is_transposed = shape_.w_is_transposed,
      .operand = shape_.operand,
      .result = shape_.result,
      .allows_tf32 = shape_.allows_tf32,
      .alignment = AlignmentOf({slot_bytes_, rows * shape_.inner * width, WOffset(1) * width,
                                rows * shape_.columns * SizeOf(shape_.result)})};
  if (Status status = tools->products[0].Plan(libraries, product, shape_.workspace_bytes);
      !status.ok()) {
    return status;
  }
  return MakeEvents(libraries, *tools, shape_.num_ranks + 1);
}

// In elements.
std::size_t RingGatherMatmul::WOffset(std::size_t owner) const {
  if (!gathers_inner()) {
    return 0;
  }
  return owner * shape_.inner * (shape_.w_is_transposed ? 1 : shape_.columns);
}

// That of the i-th rank after this one is in slot i - 1, which is also the arrival it comes with.
std::size_t RingGatherMatmul::SlotOf(const Seat& seat, std::size_t owner) const {
  return (owner + shape_.num_ranks - seat.rank - 1) % shape_.num_ranks;
}

// Event i + 1 is after the exchange of step i.
Status RingGatherMatmul::Gather(const Seat& seat, const BlockPath& path, const Places& places,
                                const std::vector<GatherStep>& steps) const {
  Status status;
  for (std::size_t i = 0; i + 1 < steps.size() && status.ok(); ++i) {
    std::vector<Parcel> parcels;
    for (const Transfer& transfer : steps[i].transfers) {
      const std::size_t slot = SlotOf(seat, transfer.received);
      parcels.push_back({.to = transfer.to,
                         .from = transfer.from,
                         .sent = places.Block(*this, seat, transfer.sent),
                         .received = At(places.slots, slot * slot_bytes_),
                         .bytes = slot_bytes_,
                         .offset = slot * slot_bytes_,
                         .arrival = slot});
      if (transfer.sent != seat.rank) {
        parcels.back().relayed = SlotOf(seat, transfer.sent);
      }
    }
    status = path.Exchange(parcels, ToolsOf(seat).events[i + 1]);
  }
  return status;
}

const void* RingGatherMatmul::Places::Block(const RingGatherMatmul& of, const Seat& seat,
                                            std::size_t owner) const {
  return owner == seat.rank ? x : At(slots, of.SlotOf(seat, owner) * of.slot_bytes_);
}

Status RingGatherMatmul::Enqueue(const Libraries& libraries, const Seat& seat, Stream stream,
                                 std::span<const void* const> operands,
                                 std::span<void* const> results) const {
  const Tools& tools = ToolsOf(seat);
  const Places places{.x = operands[0],
                      .slots = tools.blocks != nullptr ? tools.blocks->slots() : results[1]};
  const std::vector<GatherStep> steps = GatherSteps(seat.rank, shape_.num_ranks);
  BlockPath path(libraries, seat, tools.blocks, stream);
  Status status = path.Begin(tools.events.front());
  if (status.ok()) {
    status = Gather(seat, path, places, steps);
  }
  std::vector<std::size_t> order;
  std::vector<std::size_t> step_of(shape_.num_ranks);
  for (std::size_t step = 0; step < steps.size(); ++step) {
    for (const std::size_t owner : steps[step].products) {
      order.push_back(owner);
      step_of[owner] = step;
    }
  }
  if (gathers_inner()) {
    std::iota(order.begin(), order.end(), 0);
  }
  for (const std::size_t owner : order) {
    if (status.ok() && step_of[owner] > 0) {
      status = path.Await(SlotOf(seat, owner), tools.events[step_of[owner]]);
    }
    if (status.ok()) {
      const std::size_t at = gathers_inner() ? 0 : owner * shape_.rows * shape_.columns;
      void* const y = At(results[0], at * SizeOf(shape_.result));
      status = tools.products[0].Enqueue(stream, places.Block(*this, seat, owner),
                                         At(operands[1], WOffset(owner) * SizeOf(shape_.operand)),
                                         gathers_inner() && owner > 0 ? y : nullptr, y, results[2]);
    }
  }
  return status.ok() ? path.End(tools.events.back()) : status;
}

// ---- Scatter ------------------------------------------------------------------------------------

RingScatterMatmul::RingScatterMatmul(const RingShape& shape) : RingMatmul(shape), flat_(shape) {
  if (shape.kind == RingKind::kScatterColumns) {
    flat_.rows *= flat_.batch;
    flat_.batch = 1;
  }
  const std::size_t all = flat_.batch > 1 ? flat_.batch : flat_.rows;
  const std::size_t half = (all + 1) / 2;
  chains_[0] = {.first = 0, .count = half};
  chains_[1] = {.first = half, .count = all - half};
}

std::size_t RingScatterMatmul::Elements(const Chain& chain) const {
  return chain.count * flat_.columns * (flat_.batch > 1 ? flat_.rows : 1);
}

// In elements; of the part of x that gives a chain's part of an owner's block.
std::size_t RingScatterMatmul::XOffset(const Chain& chain, std::size_t owner) const {
  const std::size_t block = flat_.kind == RingKind::kScatterRows ? owner : 0;
  if (flat_.batch > 1) {
    return (chain.first * flat_.num_ranks + block) * flat_.rows * flat_.inner;
  }
  const std::size_t row = block * flat_.rows + chain.first;
  return flat_.x_is_transposed ? row : row * flat_.inner;
}

std::size_t RingScatterMatmul::WOffset(std::size_t owner) const {
  if (flat_.kind == RingKind::kScatterRows) {
    return 0;
  }
  return owner * flat_.columns * (flat_.w_is_transposed ? flat_.inner : 1);
}

Status RingScatterMatmul::Prepare(const Libraries& libraries, const Seat& seat, BlockSeat* blocks) {
  std::unique_ptr<Tools>& tools = ToolsAt(seat);
  tools = std::make_unique<Tools>();
  tools->blocks = blocks;
  const bool scatters_rows = flat_.kind == RingKind::kScatterRows;
  const std::size_t x_rows = flat_.rows * (scatters_rows ? flat_.num_ranks : 1);
  const std::size_t w_columns = flat_.columns * (scatters_rows ? 1 : flat_.num_ranks);
  const std::size_t width = SizeOf(flat_.operand);
  for (std::size_t i = 0; i < chains_.size(); ++i) {
    const Chain& chain = chains_[i];
    if (chain.count == 0) {
      continue;
    }
    const ProductShape product{
        .batch = flat_.batch > 1 ? chain.count : 1,
        .rows = flat_.batch > 1 ? flat_.rows : chain.count,
        .inner = flat_.inner,
        .columns = flat_.columns,
        .x_leading = flat_.x_is_transposed ? x_rows : flat_.inner,
        .w_leading = flat_.w_is_transposed ? flat_.inner : w_columns,
        .y_leading = flat_.columns,
        .x_stride = x_rows * flat_.inner,
        .y_stride = flat_.rows * flat_.columns,
        .x_is_transposed = flat_.x_is_transposed,
        .w_is_transposed = flat_.w_is_transposed,
        .operand = flat_.operand,
        .result = flat_.result,
        .allows_tf32 = flat_.allows_tf32,
        .alignment = AlignmentOf({XOffset(chain, 1) * width, XOffset(chain, 0) * width,
                                  XOffset(chain, flat_.num_ranks - 1) * width, WOffset(1) * width,
                                  x_rows * flat_.inner * width, slot_bytes_,
                                  Elements(chains_[0]) * SizeOf(flat_.result),
                                  flat_.rows * flat_.columns * SizeOf(flat_.result)})};
    if (Status status = tools->products[i].Plan(libraries, product, flat_.workspace_bytes);
        !status.ok()) {
      return status;
    }
  }
  return MakeEvents(libraries, *tools, 2 + 2 * chains_.size() * flat_.num_ranks);
}

Status RingScatterMatmul::Enqueue(const Libraries& libraries, const Seat& seat, Stream stream,
                                  std::span<const void* const> operands,
                                  std::span<void* const> results) const {
  const Tools& tools = ToolsOf(seat);
  const std::size_t last = flat_.num_ranks - 1;
  const std::size_t width = SizeOf(flat_.operand);
  const std::size_t wide = SizeOf(flat_.result);
  const std::array<std::vector<ScatterStep>, 2> steps{
      ScatterSteps(seat.rank, flat_.num_ranks, /*is_forward=*/true),
      ScatterSteps(seat.rank, flat_.num_ranks, /*is_forward=*/false)};
  const std::array<std::size_t, 2> parts{0, Elements(chains_[0]) * wide};  // of a slot, and of y
  // Where in the neighbours' slots the sum comes to that a step adds to.
  const auto offset = [&](std::size_t i, std::size_t step) {
    return (step - 1) * slot_bytes_ + parts.at(i);
  };
  // Where a chain's product of a step goes, added to what has come: in the end that is y.
  const auto place = [&](std::size_t i, std::size_t step) -> std::byte* {
    if (step == last) {
      return At(results[0], parts.at(i));
    }
    return step > 0 && tools.blocks != nullptr ? tools.blocks->slots() + offset(i, step)
                                               : At(results[1], step * slot_bytes_ + parts.at(i));
  };
  // Where the sum has come to that a step adds to.
  const auto arrived = [&](std::size_t i, std::size_t step) {
    return tools.blocks != nullptr ? tools.blocks->slots() + offset(i, step) : place(i, step);
  };
  std::size_t num_events = 0;
  BlockPath path(libraries, seat, tools.blocks, stream);
  Status status = path.Begin(tools.events[num_events++]);
  std::array<Event, 2> received{};
  for (std::size_t step = 0; step <= last; ++step) {
    for (std::size_t i = 0; i < chains_.size() && status.ok(); ++i) {
      const Chain& chain = chains_[i];
      if (chain.count == 0) {
        continue;
      }
      const ScatterStep& now = steps[i][step];
      if (step > 0) {
        status = path.Await(ArrivalOf(i, step), received[i]);
      }
      if (status.ok()) {
        status = tools.products[i].Enqueue(
            stream, At(operands[0], XOffset(chain, now.owner) * width),
            At(operands[1], WOffset(now.owner) * width), step > 0 ? arrived(i, step) : nullptr,
            place(i, step), results[2]);
      }
      if (step == last || !status.ok()) {
        continue;
      }
      status = path.Follow(tools.events[num_events++]);
      if (!status.ok()) {
        continue;
      }
      received[i] = tools.events[num_events++];
      const std::array parcel{Parcel{.to = now.to,
                                     .from = now.from,
                                     .sent = place(i, step),
                                     .received = arrived(i, step + 1),
                                     .bytes = Elements(chain) * wide,
                                     .offset = offset(i, step + 1),
                                     .arrival = ArrivalOf(i, step + 1)}};
      status = path.Exchange(parcel, received[i]);
    }
  }
  return status.ok() ? path.End(tools.events.back()) : status;
}

std::unique_ptr<Operation> MakeRingMatmul(const RingShape& shape) {
  if (shape.kind == RingKind::kGatherRows || shape.kind == RingKind::kGatherInner) {
    return std::make_unique<RingGatherMatmul>(shape);
  }
  return std::make_unique<RingScatterMatmul>(shape);
}

}  // namespace jaxcoll::cuda
