// Represents a virtual tensor by the positions of its elements in the sources. All rules are
// functions on views, which become boxes in the end.
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

// `extent` steps of `step` indices each along dimension `dim` of the view.
struct Factor {
  std::uint32_t dim = 0;
  std::uint64_t extent = 1;
  std::uint64_t step = 1;
  std::uint64_t source_stride = 0;  // elements
};

// The elements of one source at all indices that are reached from `begin` by steps of the factors.
// A dimension may have several factors (if a view interleaves), or none (a single index). Value
// type.
struct ViewPiece {
  std::uint32_t source = 0;
  std::uint64_t source_offset = 0;
  std::vector<std::uint64_t> begin;  // one index for each dimension
  std::vector<Factor> factors;       // extents above 1, or 0 if the piece is empty
};

// A tensor in which the pieces cover each element exactly once. Value type.
struct View {
  Shape shape;
  std::vector<ViewPiece> pieces;
};

// Maximum number of pieces, because more would amount to a list of the addresses of all elements.
inline constexpr std::size_t pieces_max = std::size_t{1} << 22;

[[nodiscard]] View whole_view(std::uint32_t source, const Shape& shape);
// Returns the view of a tensor in a file, which may be strided.
[[nodiscard]] View source_view(std::uint32_t source, const TensorInfo& tensor);

// Change a view. Negative dimensions count from the end. If a function returns a problem, its view
// is unspecified.
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

// Returns the problem for views of more than pieces_max pieces.
[[nodiscard]] Problem too_many_pieces();

// Returns boxes in the order of the pieces, with neighbouring dimensions joined.
[[nodiscard]] std::vector<Box> boxes_of(const View& view);

}  // namespace loadstone
