// Weights of bitsandbytes: how they are decoded and written.
#pragma once

#include <span>
#include <string_view>

#include "base/named.h"
#include "codec/decode.h"
#include "codec/encode.h"
#include "kernels/bnb.h"

namespace loadstone {

// "bnb-cpu", "bnb-cuda"
[[nodiscard]] constexpr std::string_view name(BnbDialect dialect) noexcept {
  return name_among({"bnb-cpu", "bnb-cuda"}, dialect);
}

// "bnb_nf4", "bnb_fp4": packed bytes, F32 absmax; or U8 absmax, F32 nested_absmax, F32 nested_code
// [256], to which the request's offset is added. "bnb_int8": I8, F32 absmax of rows.
[[nodiscard]] std::span<const DecodeKernel> bnb_kernels() noexcept;

[[nodiscard]] std::span<const WrittenEncoding> bnb_written() noexcept;

}  // namespace loadstone
