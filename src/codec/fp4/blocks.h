// Repacks MXFP4 without a change of values between GGUF's blocks, which contain scale and codes,
// and two separate tensors of scales and codes, in which the codes have a different order.
#pragma once

#include <array>
#include <optional>
#include <vector>

#include "codec/decode.h"
#include "loadstone/decoding.h"
#include "loadstone/tensor_info.h"

namespace loadstone {

// Kernels that output bytes. "mxfp4_blocks" joins codes and scales to blocks; "mxfp4_codes" and
// "mxfp4_scales" extract codes or scales from blocks.
extern const std::array<DecodeKernel, 3> mxfp4_block_kernels;

// Returns the decoding that repacks the same codes as `numbers` into GGUF's blocks. Returns nullopt
// unless `numbers` decodes MXFP4 in rows of whole blocks.
[[nodiscard]] std::optional<Decoding> mxfp4_blocks_of(const Decoding& numbers,
                                                      const std::vector<TensorInfo>& tensors);
// Returns true if the decoding outputs GGUF's blocks of MXFP4.
[[nodiscard]] bool gives_mxfp4_blocks(const Decoding& decoding) noexcept;

// Return the decodings that extract the codes [..., columns / 2] and the scales [..., columns /
// 32], both U8, from a tensor in MXFP4 blocks.
[[nodiscard]] Decoding mxfp4_codes_of(std::uint32_t tensor, const Shape& shape);
[[nodiscard]] Decoding mxfp4_scales_of(std::uint32_t tensor, const Shape& shape);

}  // namespace loadstone
