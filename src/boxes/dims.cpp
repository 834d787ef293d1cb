#include "boxes/dims.h"

#include <algorithm>
#include <functional>

#include "base/checked.h"

namespace loadstone {

bool run_on(BoxDim& outer, const BoxDim& inner) noexcept {
  if (checked_mul(inner.extent, inner.source_stride) != outer.source_stride ||
      checked_mul(inner.extent, inner.target_stride) != outer.target_stride ||
      !checked_mul(inner.extent, outer.extent)) {
    return false;
  }
  outer = {outer.extent * inner.extent, inner.source_stride, inner.target_stride};
  return true;
}

void normalise(std::vector<BoxDim>& dims) {
  std::erase_if(dims, [](const BoxDim& dim) { return dim.extent == 1; });
  std::ranges::stable_sort(dims, std::greater{}, &BoxDim::target_stride);
  dims.resize(join_neighbours(std::span(dims)));
}

bool BoxDims::append(const BoxDim& dim) noexcept {
  if (dim.extent == 1) return true;
  if (count_ == dims_.size()) return false;
  dims_[count_++] = dim;
  return true;
}

void BoxDims::sort_by_target() noexcept {
  std::ranges::sort(dims(), std::greater{}, &BoxDim::target_stride);
  count_ = join_neighbours(dims());
}

void BoxDims::sort_by_source() noexcept {
  std::ranges::sort(dims(), [](const BoxDim& a, const BoxDim& b) {
    return a.source_stride != b.source_stride ? a.source_stride > b.source_stride
                                              : a.target_stride > b.target_stride;
  });
  count_ = join_neighbours(dims());
}

BoxDims BoxDims::by_source(const Box& box) noexcept {
  BoxDims dims;
  for (const BoxDim& dim : box.dims) static_cast<void>(dims.append(dim));
  dims.sort_by_source();
  return dims;
}

InnerRun inner_run(std::span<const BoxDim> dims) noexcept {
  InnerRun run = {.elements = 1, .outer_dims = dims.size()};
  for (; run.outer_dims > 0; --run.outer_dims) {
    const BoxDim& dim = dims[run.outer_dims - 1];
    if (dim.extent == 1) continue;
    const auto longer = checked_mul(run.elements, dim.extent);
    if (dim.source_stride != run.elements || dim.target_stride != run.elements || !longer) break;
    run.elements = *longer;
  }
  return run;
}

InnerRun source_run(std::span<const BoxDim> dims, std::uint64_t hole_max) noexcept {
  InnerRun run = {.elements = 1, .outer_dims = dims.size()};
  for (; run.outer_dims > 0; --run.outer_dims) {
    const BoxDim& dim = dims[run.outer_dims - 1];
    if (dim.source_stride > run.elements + hole_max) break;
    run.elements += (dim.extent - 1) * dim.source_stride;
  }
  return run;
}

bool is_empty(const Box& box) noexcept {
  return std::ranges::any_of(box.dims, [](const BoxDim& dim) { return dim.extent == 0; });
}

bool copies_all(const Box& box, std::uint64_t elements) noexcept {
  return box.source_offset == 0 && box.target_offset == 0 &&
         inner_run(box.dims).elements == elements;
}

std::optional<Box> as_bytes(const Box& box, unsigned bits) {
  const InnerRun run = inner_run(box.dims);
  // Divides by 8 first to avoid an overflow, because 8 elements of any width fill whole bytes.
  const auto fills = [&](std::uint64_t elements) { return elements % 8 * bits % 8 == 0; };
  const auto bytes = [&](std::uint64_t elements) {
    return elements / 8 * bits + elements % 8 * bits / 8;
  };
  if (run.outer_dims > 0 || !fills(run.elements) || !fills(box.source_offset) ||
      !fills(box.target_offset)) {
    return std::nullopt;
  }
  return Box{.source = box.source,
             .source_offset = bytes(box.source_offset),
             .target_offset = bytes(box.target_offset),
             .dims = {{.extent = bytes(run.elements), .source_stride = 1, .target_stride = 1}}};
}

bool moves_whole_bytes(const Box& box, unsigned bits) {
  return bits % 8 == 0 || is_empty(box) || as_bytes(box, bits);
}

std::vector<std::uint64_t> row_strides(const Shape& shape) {
  std::vector<std::uint64_t> strides(shape.rank());
  std::uint64_t stride = 1;
  for (std::size_t d = shape.rank(); d-- > 0;) {
    strides[d] = stride;
    stride *= std::max<std::uint64_t>(shape[d], 1);
  }
  return strides;
}

}  // namespace loadstone
