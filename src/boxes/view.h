// A virtual tensor: the places of its elements in the sources. All rules are functions on views,
// which finally become boxes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "base/problem.h"
#include "loadstone/catalog.h"
#include "loadstone/recipe.h"
#include "loadstone/shape.h"

namespace loadstone {

// `extent` steps along dimension `dim` of the view, `step` indices each.
struct Factor {
  std::uint32_t dim = 0;
  std::uint64_t extent = 1;
  std::uint64_t step = 1;
  std::uint64_t source_stride = 0;  // elements
};

// Elements of one source at the indices begin + sum of the factors' steps. A dimension may have
// several factors (that is how a view interleaves) or none (one index). Value type.
struct ViewPiece {
  std::uint32_t source = 0;
  std::uint64_t source_offset = 0;
  std::vector<std::uint64_t> begin;  // one index for each dimension
  std::vector<Factor> factors;       // extents above 1, or 0 if the piece is empty
};

// The pieces cover each element once. Value type.
struct View {
  Shape shape;
  std::vector<ViewPiece> pieces;
};

// More would be no plan but a copy of the data's addresses.
inline constexpr std::size_t pieces_max = std::size_t{1} << 22;

[[nodiscard]] View whole_view(std::uint32_t source, const Shape& shape);
// Returns the view of a tensor in a file, which may be strided.
[[nodiscard]] View source_view(std::uint32_t source, const TensorInfo& tensor);

// Dimensions may be negative, counted from the end. Each leaves its argument unspecified on a
// problem.
[[nodiscard]] std::optional<Problem> transpose(View& view, std::int64_t dim_a, std::int64_t dim_b);
[[nodiscard]] std::optional<Problem> permute(View& view, const std::vector<std::int64_t>& order);
[[nodiscard]] std::optional<Problem> slice(View& view, std::int64_t dim, std::uint64_t start,
                                           std::uint64_t size);
[[nodiscard]] std::optional<Problem> reshape(View& view, const Shape& shape);
[[nodiscard]] std::optional<Problem> concat(std::vector<View> parts, std::int64_t dim,
                                            View& result);
[[nodiscard]] std::optional<Problem> stack(std::vector<View> parts, std::int64_t dim, View& result);

// Returns the index of a dimension counted from either end; nullopt outside of the rank.
[[nodiscard]] std::optional<std::size_t> dim_index(std::int64_t dim, std::size_t rank) noexcept;

// The answer to a view of more than pieces_max.
[[nodiscard]] Problem too_many_pieces();

// Boxes in the order of the pieces, with neighbouring dimensions joined.
[[nodiscard]] std::vector<Box> boxes_of(const View& view);

}  // namespace loadstone
