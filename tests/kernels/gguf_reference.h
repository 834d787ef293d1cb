// Reference decoder for one value of a block at a time, from docs/formats/gguf-blocks.md: slow and
// simple.
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "loadstone/dtype.h"

namespace loadstone::reference {

// Offsets of the 16-bit scales in a block.
std::vector<std::size_t> half_places(BlockFormat format);

// scale * factor * code - minimum * minimum_factor. F16 arithmetic rounds the two products with a
// factor separately.
struct Term {
  float scale = 0;
  int factor = 1;
  int code = 0;
  float minimum = 0;
  int minimum_factor = 0;
};

// Value `i` of a block; nullopt for a format without values.
std::optional<Term> term_of(BlockFormat format, const std::byte* block, std::size_t i);

}  // namespace loadstone::reference
