// Checks that boxes write each element of a target exactly once, and stay inside source and target.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/problem.h"
#include "boxes/dims.h"
#include "loadstone/byte_range.h"
#include "loadstone/catalog.h"
#include "loadstone/recipe.h"

namespace loadstone {

// Checks that a box stays inside source and target, and that its source or decoding exists.
// `elements`: the number of elements of the target.
[[nodiscard]] std::optional<Problem> box_defect(const Box& box, std::uint64_t elements,
                                                const std::vector<TensorInfo>& sources,
                                                std::span<const Decoding> decodings);

// Checks everything except dtypes, and except the decodings themselves, see check_decoding(). The
// check is exact: it finds an overlap even if a gap of the same size balances it. `elements`: the
// number of elements of the target.
[[nodiscard]] std::optional<Problem> check_boxes(std::span<const Box> boxes, std::uint64_t elements,
                                                 const std::vector<TensorInfo>& sources,
                                                 std::span<const Decoding> decodings = {});

// The range of source elements from the first to the last that the box touches; empty for a box
// without elements. The box must have passed check_boxes().
struct ElementRange {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
};
[[nodiscard]] ElementRange source_range(const Box& box) noexcept;
// Returns the byte range of these elements, relative to the first one. The range must begin and end
// at whole bytes.
[[nodiscard]] ByteRange bytes_of(ElementRange range, Dtype dtype) noexcept;

// Returns the number of elements that the box copies. The box must have passed check_boxes().
[[nodiscard]] std::uint64_t volume(const Box& box) noexcept;

}  // namespace loadstone
