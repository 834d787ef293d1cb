// Supported casts from a source to a target.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "loadstone/dtype.h"
#include "loadstone/recipe.h"

namespace loadstone {

enum class CastKind : std::uint8_t {
  same,      // bytes are moved
  cast,      // float to float, or integers that all fit
  lossy,     // integers that may not fit
  counted,   // I64 or bool, which are not codes, to float: only if a recipe casts them
  mismatch,  // float against integer or bool, complex against real: somebody meant something else
  no_cast,   // no kernel for the pair, or a block format
};

// Returns true if `target` represents every value of `source`, so that a cast to it is lossless
// (except for the bits of a NaN).
[[nodiscard]] bool is_exact(Dtype source, Dtype target) noexcept;

// The dtype that a kernel returns for this target: kernels compute F32 and round it once, to a
// narrower dtype if they support it.
[[nodiscard]] constexpr Dtype decoded_dtype(Dtype wanted) noexcept {
  return wanted == Dtype::bf16 || wanted == Dtype::f16 ? wanted : Dtype::f32;
}

[[nodiscard]] CastKind cast_kind(Encoding source, Dtype target) noexcept;

// Casts between dtypes that can_cast().
[[nodiscard]] Constant cast_constant(const std::vector<std::byte>& constant, Dtype source,
                                     Dtype target);

}  // namespace loadstone
