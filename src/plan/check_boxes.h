// Whether boxes write a target as they must: inside source and target, each element exactly once.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "loadstone/catalog.h"
#include "loadstone/recipe.h"

namespace loadstone {

// What is wrong with boxes. `box` is the index of the culprit where there is one.
struct BoxDefect {
  std::string message;
  std::string found;
  std::string expected;
  std::optional<std::size_t> box;
};

// More dimensions than a tensor can have whose elements can be counted in 64 bits.
inline constexpr std::size_t box_dims_max = 64;

// Checks everything but dtypes and the decodings themselves, see check_decoding(). Exact: an
// overlap with a hole of the same size is found. `elements` is the target's number of elements.
[[nodiscard]] std::optional<BoxDefect> check_boxes(std::span<const Box> boxes,
                                                   std::uint64_t elements,
                                                   const std::vector<TensorInfo>& sources,
                                                   std::span<const Decoding> decodings = {});

// Whether a box can be moved in whole bytes between elements of `bits` bits on both sides.
[[nodiscard]] bool moves_whole_bytes(const Box& box, unsigned bits) noexcept;

// The part of the source from the first to the last element that the box touches, in elements;
// empty for a box without elements. The box must have passed check_boxes().
struct ElementRange {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
};
[[nodiscard]] ElementRange source_range(const Box& box) noexcept;

// Elements that the box moves. The box must have passed check_boxes().
[[nodiscard]] std::uint64_t volume(const Box& box) noexcept;

}  // namespace loadstone
