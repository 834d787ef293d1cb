#include "execute/walk.h"

#include <algorithm>
#include <functional>
#include <optional>
#include <utility>

#include "base/checked.h"
#include "execute/copy_box.h"
#include "loadstone/error.h"
#include "plan/decodings.h"

namespace loadstone {

namespace {

// Shorter runs go through the staging ring: a run has its price in the kernel too.
constexpr std::uint64_t direct_run_bytes_min = 4096;
// Reading over a hole of this size is cheaper than a second call.
constexpr std::uint64_t hole_bytes_max = 64 << 10;
// What is cast goes through memory twice: once more from the second-level cache.
constexpr std::uint64_t staged_window_bytes = 1 << 20;

[[noreturn]] void refuse(const Plan& plan, const PlannedTarget& target, const Box& box,
                         const char* problem) {
  Where where;
  const auto& tensors = plan.catalog->tensors();
  if (box.source < tensors.size()) {
    where.path = plan.catalog->shards()[tensors[box.source].shard].path;
    where.field = tensors[box.source].name;
  }
  where.tensor = target.name;
  throw Error("plan.box", problem, where);
}

// One past the last element that the box touches on one side; nothing when it does not fit.
template <typename Stride>
std::optional<std::uint64_t> end_of(std::uint64_t offset, const Box& box, Stride stride) {
  std::optional<std::uint64_t> end = checked_add(offset, 1);
  for (const BoxDim& dim : box.dims) {
    if (end) end = checked_mul_add(dim.extent - 1, stride(dim), *end);
  }
  return end;
}

// Elements of a box whose elements stand one after the other on both sides.
std::optional<std::uint64_t> run_length(const Box& box) {
  std::optional<std::uint64_t> step = 1;
  for (std::size_t i = box.dims.size(); i-- > 0;) {
    const BoxDim& dim = box.dims[i];
    if (dim.extent == 1) continue;
    if (!step || dim.source_stride != *step || dim.target_stride != *step) return std::nullopt;
    step = checked_mul(*step, dim.extent);
  }
  return step;
}

// Elements of 4 or 6 bits: a run whose ends stand between bytes, as a run of bytes.
std::optional<Box> as_bytes(const Box& box, unsigned bit_count) {
  const auto length = run_length(box);
  if (!length) return std::nullopt;
  const auto bytes_of = [&](std::uint64_t elements) -> std::optional<std::uint64_t> {
    const auto bit_total = checked_mul(elements, bit_count);
    if (!bit_total || *bit_total % 8 != 0) return std::nullopt;
    return *bit_total / 8;
  };
  const auto source = bytes_of(box.source_offset);
  const auto target = bytes_of(box.target_offset);
  const auto extent = bytes_of(*length);
  if (!source || !target || !extent) return std::nullopt;
  return Box{.source = box.source,
             .source_offset = *source,
             .target_offset = *target,
             .dims = {{.extent = *extent, .source_stride = 1, .target_stride = 1}}};
}

// Of the numbers that boxes write, also where they are quantized after that.
std::uint64_t number_bytes(const PlannedTarget& target) {
  return Encoding(target.dtype).byte_count(target.shape.numel().value_or(0)).value_or(0);
}

}  // namespace

WindowLimits window_limits(std::uint64_t slot_bytes, std::uint64_t chunk_bytes) noexcept {
  WindowLimits limits;
  limits.direct_bytes = std::min(chunk_bytes, slot_bytes);
  limits.staged_bytes = std::min(limits.direct_bytes, staged_window_bytes);
  limits.turned_bytes = slot_bytes;
  limits.decoded_bytes = slot_bytes / 2 / element_bytes_max * element_bytes_max;
  return limits;
}

bool is_empty(const Box& box) noexcept {
  return std::ranges::any_of(box.dims, [](const BoxDim& dim) { return dim.extent == 0; });
}

ByteBox check_box(const Plan& plan, const PlannedTarget& target, const Box& box) {
  const auto& tensors = plan.catalog->tensors();
  if (box.source >= tensors.size()) refuse(plan, target, box, "the box's source does not exist");
  const TensorInfo& source = tensors[box.source];
  const bool decoded = box.decoding != no_decoding;
  if (decoded &&
      (box.decoding >= plan.decodings.size() || plan.decodings[box.decoding].sources.empty() ||
       plan.decodings[box.decoding].sources.front() != box.source)) {
    refuse(plan, target, box, "the box's decoding does not exist, or is another source's");
  }
  const Encoding encoding = encoding_of(box, tensors, plan.decodings);
  if (!encoding.is_dtype()) {
    refuse(plan, target, box, "blocks of numbers cannot be copied as numbers");
  }
  const Dtype dtype = encoding.dtype();
  const std::uint64_t source_size =
      decoded
          ? encoding.byte_count(plan.decodings[box.decoding].shape.numel().value_or(0)).value_or(0)
          : source.byte_count();
  ByteBox bytes = {.box = box,
                   .source_bytes = element_bytes(dtype),
                   .target_bytes = element_bytes(target.dtype),
                   .cast = cast_between(dtype, target.dtype),
                   .same_dtype = dtype == target.dtype};
  if (bytes.source_bytes == 0 && bytes.same_dtype) {
    auto run = as_bytes(box, bits(dtype));
    if (!run) refuse(plan, target, box, "parts of a byte cannot be copied apart");
    bytes.box = std::move(*run);
    bytes.source_bytes = bytes.target_bytes = 1;
    bytes.cast = cast_between(Dtype::u8, Dtype::u8);
  }
  if (std::ranges::count_if(box.dims, [](const BoxDim& d) { return d.extent > 1; }) >
      static_cast<std::ptrdiff_t>(box_rank_max)) {
    refuse(plan, target, box, "the box has too many dimensions");
  }
  if (bytes.cast.run == nullptr) {
    refuse(plan, target, box, "there is no cast from the source's dtype to the target's");
  }
  const auto ends_within = [&](std::uint64_t offset, auto stride, std::size_t size,
                               std::uint64_t byte_count) {
    const auto end = end_of(offset, bytes.box, stride);
    const auto end_bytes = end ? checked_mul(*end, size) : std::nullopt;
    return end_bytes && *end_bytes <= byte_count;
  };
  if (!ends_within(bytes.box.source_offset, std::mem_fn(&BoxDim::source_stride), bytes.source_bytes,
                   source_size)) {
    refuse(plan, target, box, "the box leaves its source");
  }
  if (!ends_within(bytes.box.target_offset, std::mem_fn(&BoxDim::target_stride), bytes.target_bytes,
                   number_bytes(target))) {
    refuse(plan, target, box, "the box leaves its target");
  }
  return bytes;
}

Walk::Walk(const Plan& plan, std::uint32_t target, const Box& box) : target_(target) {
  const ByteBox bytes = check_box(plan, plan.targets[target], box);
  source_ = bytes.box.source;
  element_bytes_ = bytes.source_bytes;
  decoded_ = box.decoding != no_decoding;
  file_at_ = bytes.box.source_offset * bytes.source_bytes;
  if (!decoded_) file_at_ += plan.catalog->tensors()[source_].offset_begin;
  target_at_ = bytes.box.target_offset * bytes.target_bytes;
  BoxDims sorted;
  for (const BoxDim& dim : bytes.box.dims) static_cast<void>(sorted.append(dim));
  sorted.sort_by_source();
  for (const BoxDim& dim : sorted.dims()) {
    dims_.push_back({.box = dim,
                     .source_step = dim.source_stride * bytes.source_bytes,
                     .target_step = dim.target_stride * bytes.target_bytes});
  }
  std::uint64_t span = element_bytes_;
  for (std::size_t level = dims_.size(); level-- > 0;) {
    dims_[level].step_bytes = span;
    span += (dims_[level].box.extent - 1) * dims_[level].source_step;
  }
  classify(bytes.same_dtype && !decoded_);
}

void Walk::classify(bool same_bytes) noexcept {
  if (dims_.empty()) {
    direct_ = same_bytes;
    return;
  }
  const BoxDim& inner = dims_.back().box;
  const bool run = inner.source_stride == 1 && inner.target_stride == 1;
  const bool long_run = dims_.size() == 1 || inner.extent >= direct_run_bytes_min / element_bytes_;
  direct_ = same_bytes && run && long_run;
  kept_from_ = dims_.size() - 1;
  if (direct_) return;
  turned_ = !run && dims_.size() > 1;
  while (kept_from_ > 0) {
    const Dim& outer = dims_[kept_from_ - 1];
    if (outer.source_step > outer.step_bytes + hole_bytes_max) break;
    --kept_from_;
  }
  // One step may still be too wide to be read over its holes: the same rule for the innermost.
  const Dim& last = dims_.back();
  if (kept_from_ == dims_.size() - 1 && last.source_step > last.step_bytes + hole_bytes_max) {
    kept_from_ = dims_.size();
  }
}

std::uint64_t Walk::source_bytes() const noexcept {
  std::uint64_t bytes = element_bytes_;
  for (const Dim& dim : dims_) bytes *= dim.box.extent;
  return bytes;
}

std::uint64_t Walk::window_bytes(const WindowLimits& limits) const noexcept {
  if (direct_) return limits.direct_bytes;
  const std::uint64_t bytes = turned_ ? limits.turned_bytes : limits.staged_bytes;
  return decoded_ ? std::min(bytes, limits.decoded_bytes) : bytes;
}

bool Walk::take(std::uint64_t window_begin, std::uint64_t window_end, Job& job) {
  if (file_at_ < window_begin) return false;
  if (dims_.empty()) {
    if (file_at_ + element_bytes_ > window_end) return false;
    emit(0, 1, file_at_ + element_bytes_, job);
    done_ = true;
    return true;
  }
  // Steps can be taken of the innermost dimension that has begun, and of those inside it.
  std::size_t level = dims_.size() - 1;
  while (level > 0 && dims_[level].index == 0) --level;
  level = std::max(level, kept_from_);
  for (; level < dims_.size(); ++level) {
    const Dim& dim = dims_[level];
    const std::uint64_t first_end = file_at_ + dim.step_bytes;
    if (first_end > window_end) continue;
    std::uint64_t steps = dim.box.extent - dim.index;
    if (dim.source_step != 0) {
      steps = std::min(steps, (window_end - first_end) / dim.source_step + 1);
    }
    emit(level, steps, first_end + (steps - 1) * dim.source_step, job);
    advance(level, steps);
    return true;
  }
  if (kept_from_ < dims_.size() || file_at_ + element_bytes_ > window_end) return false;
  emit(level, 1, file_at_ + element_bytes_, job);
  advance(dims_.size() - 1, 1);
  return true;
}

void Walk::emit(std::size_t level, std::uint64_t steps, std::uint64_t file_end, Job& job) {
  Piece piece = {.file_begin = file_at_,
                 .file_end = file_end,
                 .target_begin = target_at_,
                 .elements = steps,
                 .target = target_,
                 .source = source_,
                 .dims_begin = static_cast<std::uint32_t>(job.dims.size()),
                 .direct = direct_};
  for (std::size_t i = level; i < dims_.size(); ++i) {
    BoxDim dim = dims_[i].box;
    if (i == level) {
      dim.extent = steps;
    } else {
      piece.elements *= dim.extent;
    }
    job.dims.push_back(dim);
    ++piece.dims_count;
  }
  job.pieces.push_back(piece);
}

void Walk::advance(std::size_t level, std::uint64_t steps) noexcept {
  Dim* dim = &dims_[level];
  dim->index += steps;
  file_at_ += steps * dim->source_step;
  target_at_ += steps * dim->target_step;
  while (dim->index == dim->box.extent) {
    file_at_ -= dim->index * dim->source_step;
    target_at_ -= dim->index * dim->target_step;
    dim->index = 0;
    if (level == 0) {
      done_ = true;
      return;
    }
    dim = &dims_[--level];
    ++dim->index;
    file_at_ += dim->source_step;
    target_at_ += dim->target_step;
  }
}

}  // namespace loadstone
