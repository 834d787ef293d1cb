// The dtype that config.json declares for a converted model.
#pragma once

#include <string>
#include <string_view>

#include "loadstone/plan.h"

namespace loadstone {

// Returns true for F16, BF16, F32 and F64.
[[nodiscard]] constexpr bool is_wide_float(Dtype dtype) noexcept {
  return kind(dtype) == DtypeKind::floating && bits(dtype) >= 16;
}

// Returns true if a plain floating tensor of the output is decoded, or none of its sources has its
// dtype.
[[nodiscard]] bool changes_dtype(const Plan& plan);

// The config with the output's dtype for "dtype" and "torch_dtype", in configs of the model's parts
// too. The output's dtype is the one of most numbers in unquantized floating tensors of 16 bits
// and more; without such a tensor, or such a member, the config stays as it is.
[[nodiscard]] std::string with_dtype_of(const Plan& plan, std::string_view config);

}  // namespace loadstone
