#include "engine/walk.h"

#include <algorithm>

#include "engine/box_read.h"

namespace loadstone {

Walk::Walk(const ValueSet& values, std::uint32_t value, const Box& box) : target_(value) {
  const BoxRead read = check_box(values, values[value], box);
  source_ = read.source;
  element_bytes_ = read.source_bytes;
  decoded_ = read.decoding != nullptr;
  direct_ = read.is_direct;
  is_transposed_ = read.is_transposed;
  file_at_ = read.source_offset * read.source_bytes;
  if (!decoded_) file_at_ += values.tensors()[source_].offset_begin;
  target_at_ = read.target_offset * read.target_bytes;
  for (const BoxDim& dim : read.dims.dims()) {
    dims_.push_back({.box = dim,
                     .source_step = dim.source_stride * read.source_bytes,
                     .target_step = dim.target_stride * read.target_bytes});
  }
  std::uint64_t span = element_bytes_;
  for (std::size_t level = dims_.size(); level-- > 0;) {
    dims_[level].step_bytes = span;
    span += (dims_[level].box.extent - 1) * dims_[level].source_step;
  }
  kept_from_ =
      direct_ ? dims_.size() - std::min<std::size_t>(dims_.size(), 1) : read.run.outer_dims;
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
  // Only the innermost dimension that has begun, and the dimensions inside it, can advance.
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
                 .value = target_,
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
