// Decodes one value of a GGUF block at a time, by docs/formats/gguf-blocks.md. Simple code for
// comparison with the kernels.
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "loadstone/dtype.h"

namespace loadstone::reference {

// Returns the offsets of the 16-bit scales in a block.
std::vector<std::size_t> half_places(BlockFormat format);

// A value as scale * factor * code - minimum * minimum_factor. F16 arithmetic rounds the products
// scale * factor and minimum * minimum_factor separately.
struct Term {
  float scale = 0;
  int factor = 1;
  int code = 0;
  float minimum = 0;
  int minimum_factor = 0;
};

// Returns the term of value `i` of a block, or nullopt if the format is not supported.
std::optional<Term> term_of(BlockFormat format, const std::byte* block, std::size_t i);

}  // namespace loadstone::reference
