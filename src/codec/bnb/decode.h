// Decoders of the weights of bitsandbytes.
#pragma once

#include <span>

#include "codec/decode.h"

namespace loadstone {

// "bnb_nf4", "bnb_fp4": packed bytes, F32 absmax; or U8 absmax, F32 nested_absmax, F32 nested_code
// [256], to which the request's offset is added. "bnb_int8": I8, F32 absmax of rows.
[[nodiscard]] std::span<const DecodeKernel> bnb_kernels() noexcept;

}  // namespace loadstone
