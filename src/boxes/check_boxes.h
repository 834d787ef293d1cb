// Checks that boxes write a target correctly: inside source and target, each element exactly once.
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

// Checks one box: its source or decoding exists, and it stays inside both sides. `elements` is the
// target's number of elements.
[[nodiscard]] std::optional<Problem> box_defect(const Box& box, std::uint64_t elements,
                                                const std::vector<TensorInfo>& sources,
                                                std::span<const Decoding> decodings);

// Checks everything but dtypes and the decodings themselves, see check_decoding(). Exact: an
// overlap with a hole of the same size is found. `elements` is the target's number of elements.
[[nodiscard]] std::optional<Problem> check_boxes(std::span<const Box> boxes, std::uint64_t elements,
                                                 const std::vector<TensorInfo>& sources,
                                                 std::span<const Decoding> decodings = {});

// The part of the source from the first to the last element that the box touches, in elements;
// empty for a box without elements. The box must have passed check_boxes().
struct ElementRange {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
};
[[nodiscard]] ElementRange source_range(const Box& box) noexcept;
// Returns the byte range of these elements, relative to the first one; it must be whole bytes.
[[nodiscard]] ByteRange bytes_of(ElementRange range, Dtype dtype) noexcept;

// Elements that the box moves. The box must have passed check_boxes().
[[nodiscard]] std::uint64_t volume(const Box& box) noexcept;

}  // namespace loadstone
