#include "boxes/view.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "base/checked.h"
#include "base/text.h"
#include "boxes/cut.h"
#include "boxes/dims.h"

namespace loadstone {

namespace {

Problem no_such_dim(std::int64_t dim, const Shape& shape) {
  return {fmt::format("dimension {} does not exist", dim), shape.text(),
          fmt::format("a dimension from {} to {}", -static_cast<std::int64_t>(shape.rank()),
                      static_cast<std::int64_t>(shape.rank()) - 1)};
}

// Appends the part of a piece that is in [begin, end) of one dimension. Cuts the piece's factors
// like the dimensions of a box.
void cut_piece(ViewPiece piece, std::size_t dim, std::uint64_t begin, std::uint64_t end,
               std::vector<ViewPiece>& kept) {
  Box box;
  box.source_offset = piece.source_offset;
  box.target_offset = piece.begin[dim];
  for (const Factor& factor : piece.factors) {
    if (factor.extent == 0) return;
    if (factor.dim == dim) box.dims.push_back({factor.extent, factor.source_stride, factor.step});
  }
  std::erase_if(piece.factors, [&](const Factor& factor) { return factor.dim == dim; });
  std::vector<Box> parts;
  if (order_to_cut(box)) cut_box(box, begin, end, parts, pieces_max);
  for (const Box& part : parts) {
    ViewPiece& made = kept.emplace_back(piece);
    made.source_offset = part.source_offset;
    made.begin[dim] = part.target_offset;
    for (const BoxDim& step : part.dims) {
      if (step.extent == 1) continue;
      made.factors.push_back(
          {static_cast<std::uint32_t>(dim), step.extent, step.target_stride, step.source_stride});
    }
  }
}

}  // namespace

std::optional<std::size_t> dim_index(std::int64_t dim, std::size_t rank) noexcept {
  const auto signed_rank = static_cast<std::int64_t>(rank);
  if (dim < -signed_rank || dim >= signed_rank) return std::nullopt;
  return static_cast<std::size_t>(dim < 0 ? dim + signed_rank : dim);
}

namespace {

View strided_view(std::uint32_t source, const Shape& shape,
                  const std::vector<std::uint64_t>& strides) {
  View view;
  view.shape = shape;
  ViewPiece piece;
  piece.source = source;
  piece.begin.assign(shape.rank(), 0);
  for (std::size_t d = 0; d < shape.rank(); ++d) {
    if (shape[d] == 1) continue;
    piece.factors.push_back({static_cast<std::uint32_t>(d), shape[d], 1, strides[d]});
  }
  view.pieces.push_back(std::move(piece));
  return view;
}

}  // namespace

View whole_view(std::uint32_t source, const Shape& shape) {
  return strided_view(source, shape, row_strides(shape));
}

View source_view(std::uint32_t source, const TensorInfo& tensor) {
  if (tensor.strides.empty()) return whole_view(source, tensor.shape);
  return strided_view(source, tensor.shape, tensor.strides);
}

std::optional<Problem> permute(View& view, const std::vector<std::int64_t>& order) {
  const std::size_t rank = view.shape.rank();
  std::vector<std::size_t> from;                    // old index of each new dimension
  std::vector<std::uint32_t> to(rank, UINT32_MAX);  // new index of each old dimension
  for (const std::int64_t dim : order) {
    const auto index = dim_index(dim, rank);
    if (!index) return no_such_dim(dim, view.shape);
    if (to[*index] != UINT32_MAX) {
      return Problem{fmt::format("the order contains dimension {} twice", dim)};
    }
    to[*index] = static_cast<std::uint32_t>(from.size());
    from.push_back(*index);
  }
  if (from.size() != rank) {
    return Problem{"the order has a different number of dimensions", view.shape.text(),
                   counted(order.size(), "dimension")};
  }
  std::vector<std::uint64_t> extents;
  for (const std::size_t dim : from) extents.push_back(view.shape[dim]);
  view.shape = Shape(std::move(extents));
  for (ViewPiece& piece : view.pieces) {
    std::vector<std::uint64_t> begin;
    for (const std::size_t dim : from) begin.push_back(piece.begin[dim]);
    piece.begin = std::move(begin);
    for (Factor& factor : piece.factors) factor.dim = to[factor.dim];
  }
  return std::nullopt;
}

std::optional<Problem> transpose(View& view, std::int64_t dim_a, std::int64_t dim_b) {
  const auto a = dim_index(dim_a, view.shape.rank());
  const auto b = dim_index(dim_b, view.shape.rank());
  if (!a || !b) return no_such_dim(a ? dim_b : dim_a, view.shape);
  std::vector<std::int64_t> order(view.shape.rank());
  std::iota(order.begin(), order.end(), 0);
  std::swap(order[*a], order[*b]);
  return permute(view, order);
}

std::optional<Problem> slice(View& view, std::int64_t dim, std::uint64_t start,
                             std::uint64_t size) {
  const auto index = dim_index(dim, view.shape.rank());
  if (!index) return no_such_dim(dim, view.shape);
  const auto end = checked_add(start, size);
  if (!end || *end > view.shape[*index]) {
    return Problem{
        fmt::format("the slice [{}, {} + {}) exceeds dimension {}", start, start, size, dim),
        view.shape.text()};
  }
  auto extents = view.shape.extents();
  extents[*index] = size;
  std::vector<ViewPiece> kept;
  if (view.shape.numel() == 0u || size == 0) {
    // Without elements, the pieces only name their sources.
    for (ViewPiece& piece : view.pieces) {
      piece.begin.assign(extents.size(), 0);
      piece.factors = {{static_cast<std::uint32_t>(*index), 0, 1, 1}};
    }
    kept = std::move(view.pieces);
  } else {
    for (ViewPiece& piece : view.pieces) {
      if (kept.size() > pieces_max) break;
      cut_piece(std::move(piece), *index, start, *end, kept);
    }
  }
  if (kept.size() > pieces_max) return too_many_pieces();
  view.pieces = std::move(kept);
  view.shape = Shape(std::move(extents));
  return std::nullopt;
}

std::optional<Problem> concat(std::vector<View> parts, std::int64_t dim, View& result) {
  if (parts.empty()) return Problem{"the list of parts to join is empty"};
  const auto index = dim_index(dim, parts.front().shape.rank());
  if (!index) return no_such_dim(dim, parts.front().shape);
  auto extents = parts.front().shape.extents();
  std::size_t piece_count = 0;
  for (const View& part : parts) {
    auto others = part.shape.extents();
    if (others.size() == extents.size()) others[*index] = extents[*index];
    if (others != extents) {
      return Problem{
          fmt::format("the parts to join have different shapes outside dimension {}", dim),
          fmt::format("{} and {}", parts.front().shape.text(), part.shape.text())};
    }
    piece_count += part.pieces.size();
  }
  if (piece_count > pieces_max) return too_many_pieces();
  std::uint64_t at = 0;
  result.pieces.clear();
  result.pieces.reserve(piece_count);
  for (View& part : parts) {
    for (ViewPiece& piece : part.pieces) {
      piece.begin[*index] += at;
      result.pieces.push_back(std::move(piece));
    }
    const auto next = checked_add(at, part.shape[*index]);
    if (!next) return Problem{"the joined size does not fit in 64 bits"};
    at = *next;
  }
  extents[*index] = at;
  result.shape = Shape(std::move(extents));
  if (!result.shape.numel()) return Problem{"the joined size does not fit in 64 bits"};
  return std::nullopt;
}

std::optional<Problem> stack(std::vector<View> parts, std::int64_t dim, View& result) {
  if (parts.empty()) return Problem{"the list of parts to stack is empty"};
  const std::size_t rank = parts.front().shape.rank();
  const auto index = dim_index(dim, rank + 1);
  if (!index) return no_such_dim(dim, Shape(std::vector<std::uint64_t>(rank + 1, parts.size())));
  const auto at = static_cast<std::ptrdiff_t>(*index);
  for (View& part : parts) {
    if (part.shape.rank() != rank) {
      return Problem{"the parts to stack have different shapes",
                     fmt::format("ranks {} and {}", rank, part.shape.rank())};
    }
    auto extents = part.shape.extents();
    extents.insert(extents.begin() + at, 1);
    part.shape = Shape(std::move(extents));
    for (ViewPiece& piece : part.pieces) {
      piece.begin.insert(piece.begin.begin() + at, 0);
      for (Factor& factor : piece.factors) factor.dim += factor.dim >= *index ? 1 : 0;
    }
  }
  auto misfit = concat(std::move(parts), static_cast<std::int64_t>(*index), result);
  if (misfit) misfit->message = "the parts to stack have different shapes, or are too many";
  return misfit;
}

Problem too_many_pieces() { return {"the recipe needs too many boxes", {}, {}}; }

std::vector<Box> boxes_of(const View& view) {
  const auto strides = row_strides(view.shape);
  const bool is_empty = view.shape.numel() == 0u;
  std::vector<Box> boxes;
  boxes.reserve(view.pieces.size());
  for (const ViewPiece& piece : view.pieces) {
    Box box;
    box.source = piece.source;
    if (is_empty) {
      box.dims = {{.extent = 0, .source_stride = 1, .target_stride = 1}};
      boxes.push_back(std::move(box));
      continue;
    }
    if (std::ranges::any_of(piece.factors, [](const Factor& f) { return f.extent == 0; })) continue;
    box.source_offset = piece.source_offset;
    for (std::size_t d = 0; d < strides.size(); ++d)
      box.target_offset += piece.begin[d] * strides[d];
    box.dims.reserve(piece.factors.size());
    for (const Factor& factor : piece.factors) {
      box.dims.push_back({factor.extent, factor.source_stride, factor.step * strides[factor.dim]});
    }
    normalise(box.dims);
    boxes.push_back(std::move(box));
  }
  return boxes;
}

}  // namespace loadstone
