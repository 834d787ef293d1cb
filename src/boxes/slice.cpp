#include "boxes/slice.h"

#include <cstddef>
#include <cstdint>
#include <utility>

namespace loadstone {

namespace {

// Returns a view in which the source of each piece is the index of the box that it comes from.
View flat_view(const std::vector<Box>& boxes, std::uint64_t elements) {
  View view{.shape = {elements}, .pieces = {}};
  view.pieces.reserve(boxes.size());
  for (const Box& box : boxes) {
    ViewPiece piece = {.source = static_cast<std::uint32_t>(view.pieces.size()),
                       .source_offset = box.source_offset,
                       .begin = {box.target_offset},
                       .factors = {}};
    for (const BoxDim& dim : box.dims) {
      if (dim.extent == 1) continue;
      piece.factors.push_back({0, dim.extent, dim.target_stride, dim.source_stride});
    }
    view.pieces.push_back(std::move(piece));
  }
  return view;
}

}  // namespace

std::optional<Problem> slice_boxes(std::vector<Box>& boxes, const Shape& whole,
                                   const Slice& slice) {
  View view = flat_view(boxes, whole.numel().value_or(0));
  // Splits each dimension in two: the groups, and the elements within a group.
  std::vector<std::uint64_t> extents;
  for (std::size_t dim = 0; dim < whole.rank(); ++dim) {
    extents.insert(extents.end(), {slice.groups_of(dim), whole[dim] / slice.groups_of(dim)});
  }
  if (auto misfit = reshape(view, Shape(extents))) return misfit;
  for (std::size_t dim = 0; dim < whole.rank(); ++dim) {
    if (slice.shape[dim] == whole[dim]) continue;
    auto misfit = loadstone::slice(view, static_cast<std::int64_t>(2 * dim + 1), slice.begin[dim],
                                   slice.shape[dim] / slice.groups_of(dim));
    if (misfit) return misfit;
  }
  std::vector<Box> made = boxes_of(view);
  for (Box& box : made) {
    const Box& from = boxes[box.source];
    box.source = from.source;
    box.decoding = from.decoding;
  }
  boxes = std::move(made);
  return std::nullopt;
}

}  // namespace loadstone
