#include "engine/walk.h"

#include <algorithm>
#include <string>
#include <utility>

#include "boxes/check_boxes.h"
#include "boxes/direct_read.h"
#include "boxes/sources.h"
#include "engine/box_read.h"
#include "loadstone/error.h"

namespace loadstone {

namespace {

[[noreturn]] void refuse_box(const ValueSet& values, const Value& target, const Box& box,
                             const std::string& problem) {
  Where where;
  const auto& tensors = values.tensors();
  if (box.source < tensors.size()) {
    where.path = values.catalog.shards()[tensors[box.source].shard].path;
    where.field = tensors[box.source].name;
  }
  where.tensor = std::string(target.name);
  throw Error("plan.box", problem, where);
}

}  // namespace

ByteBox check_box(const ValueSet& values, const Value& target, const Box& box) {
  const auto& tensors = values.tensors();
  const auto elements = target.elements();
  if (const auto defect = box_defect(box, elements, tensors, values.decodings)) {
    refuse_box(values, target, box, defect->message);
  }
  const Encoding encoding = encoding_of(box, tensors, values.decodings);
  if (!encoding.is_dtype()) {
    refuse_box(values, target, box, "blocks of numbers cannot be copied as numbers");
  }
  const Dtype dtype = encoding.dtype();
  ByteBox bytes = {.box = box,
                   .source_bytes = element_bytes(dtype),
                   .target_bytes = element_bytes(target.dtype),
                   .cast = cast_between(dtype, target.dtype),
                   .same_dtype = dtype == target.dtype};
  if (bytes.source_bytes == 0 && bytes.same_dtype) {
    auto run = as_bytes(box, bits(dtype));
    if (!run) refuse_box(values, target, box, "parts of a byte cannot be copied apart");
    bytes.box = std::move(*run);
    bytes.source_bytes = bytes.target_bytes = 1;
    bytes.cast = cast_between(Dtype::u8, Dtype::u8);
  }
  if (bytes.cast.run == nullptr) {
    refuse_box(values, target, box, "the source's dtype cannot be cast to the target's");
  }
  return bytes;
}

Walk::Walk(const ValueSet& values, std::uint32_t target, const Box& box) : target_(target) {
  const ByteBox bytes = check_box(values, values[target], box);
  source_ = bytes.box.source;
  element_bytes_ = bytes.source_bytes;
  decoded_ = box.decoding != no_decoding;
  file_at_ = bytes.box.source_offset * bytes.source_bytes;
  if (!decoded_) file_at_ += values.tensors()[source_].offset_begin;
  target_at_ = bytes.box.target_offset * bytes.target_bytes;
  const BoxDims sorted = BoxDims::by_source(bytes.box);
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
  direct_ = bytes.same_dtype && !decoded_ && reads_directly(sorted.dims(), element_bytes_);
  is_transposed_ = !direct_ && transposes(sorted.dims());
  kept_from_ = source_run(sorted.dims(), staged_hole_bytes_max / element_bytes_).outer_dims;
  if (direct_ && !dims_.empty()) kept_from_ = dims_.size() - 1;
}

std::uint64_t Walk::source_bytes() const noexcept {
  std::uint64_t bytes = element_bytes_;
  for (const Dim& dim : dims_) bytes *= dim.box.extent;
  return bytes;
}

std::uint64_t Walk::window_bytes(const WindowLimits& limits) const noexcept {
  if (direct_) return limits.direct_bytes;
  const std::uint64_t bytes = is_transposed_ ? limits.transposed_bytes : limits.staged_bytes;
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
