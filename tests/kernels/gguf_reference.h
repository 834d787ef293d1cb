// What each number of a block is, one at a time, from docs/formats/gguf-blocks.md: slow and plain.
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "loadstone/dtype.h"

namespace loadstone::reference {

// Where a block holds scales of 16 bits.
std::vector<std::size_t> half_places(BlockFormat format);

// scale * factor * code - minimum * minimum_factor; the two products with a factor are each a
// number of their own, which F16 arithmetic rounds.
struct Term {
  float scale = 0;
  int factor = 1;
  int code = 0;
  float minimum = 0;
  int minimum_factor = 0;
};

// Number `i` of a block; nothing for a format that has no numbers.
std::optional<Term> term_of(BlockFormat format, const std::byte* block, std::size_t i);

}  // namespace loadstone::reference
