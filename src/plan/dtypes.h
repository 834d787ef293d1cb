// What may become what on the way from a source to a target.
#pragma once

#include <cstdint>

#include "loadstone/dtype.h"

namespace loadstone {

enum class Passage : std::uint8_t {
  same,      // bytes are moved
  cast,      // float to float, or integers that all fit
  lossy,     // integers that may not fit
  mismatch,  // float against integer or bool, complex against real: somebody meant something else
  no_cast,   // no kernel for the pair, or a block format
};

// Whether every value of `source` is one of `target`, so that a cast on the way through it changes
// nothing (the bits of a NaN apart).
[[nodiscard]] bool is_exact(Dtype source, Dtype target) noexcept;

[[nodiscard]] Passage passage(Encoding source, Dtype target) noexcept;

}  // namespace loadstone
