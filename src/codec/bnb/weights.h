// Declares the kernels that decode bitsandbytes weights, and the encodings that loadstone writes.
#pragma once

#include <span>
#include <string_view>

#include "base/named.h"
#include "codec/decode.h"
#include "codec/encode.h"
#include "kernels/bnb.h"

namespace loadstone {

// Returns "bnb-cpu" or "bnb-cuda".
[[nodiscard]] constexpr std::string_view name(BnbDialect dialect) noexcept {
  return name_among({"bnb-cpu", "bnb-cuda"}, dialect);
}

// Kernels and their components. "bnb_nf4", "bnb_fp4": packed bytes and F32 absmax; or packed bytes,
// U8 absmax, F32 nested_absmax and F32 nested_code [256], in which case the request's offset is
// added to the scales. "bnb_int8": I8, and F32 absmax of rows.
[[nodiscard]] std::span<const DecodeKernel> bnb_kernels() noexcept;

[[nodiscard]] std::span<const WrittenEncoding> bnb_written() noexcept;

}  // namespace loadstone
