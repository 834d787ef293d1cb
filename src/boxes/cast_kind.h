// Classifies casts from a source dtype to a target dtype.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "loadstone/dtype.h"
#include "loadstone/recipe.h"

namespace loadstone {

enum class CastKind : std::uint8_t {
  same,      // the bytes are copied unchanged
  cast,      // float to float, or between integers if all values fit
  lossy,     // between integers if some values may not fit
  counted,   // I64 or bool values to float; done only if a recipe requests it
  mismatch,  // float with integer or bool, complex with real: probably a mistake
  no_cast,   // loadstone has no kernel for the pair, or one is a block format
};

// Returns true if `target` represents every value of `source`, so that a cast is lossless (except
// for the bits of a NaN).
[[nodiscard]] bool is_exact(Dtype source, Dtype target) noexcept;

// Returns the dtype of a kernel's result for this target. Kernels compute F32 values, and round
// them once if the target is BF16 or F16.
[[nodiscard]] constexpr Dtype decoded_dtype(Dtype wanted) noexcept {
  return wanted == Dtype::bf16 || wanted == Dtype::f16 ? wanted : Dtype::f32;
}

[[nodiscard]] CastKind cast_kind(Encoding source, Dtype target) noexcept;

// Casts a constant. Precondition: can_cast() accepts these dtypes.
[[nodiscard]] Constant cast_constant(const std::vector<std::byte>& constant, Dtype source,
                                     Dtype target);

}  // namespace loadstone
