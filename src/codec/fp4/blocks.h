// MXFP4 as GGUF has it, scale and codes in one block, and as others have it, in two tensors: the
// same codes in another order.
#pragma once

#include <array>
#include <optional>
#include <vector>

#include "codec/decode.h"
#include "loadstone/decoding.h"
#include "loadstone/tensor_info.h"

namespace loadstone {

// They give bytes: "mxfp4_blocks" of codes and scales; "mxfp4_codes" and "mxfp4_scales" of blocks.
extern const std::array<DecodeKernel, 3> mxfp4_block_kernels;

// Returns a decoding to GGUF's blocks for the codes that `numbers` decodes; nullopt unless they are
// MXFP4 in rows of whole blocks.
[[nodiscard]] std::optional<Decoding> mxfp4_blocks_of(const Decoding& numbers,
                                                      const std::vector<TensorInfo>& tensors);
// Returns true if a decoding yields GGUF's blocks of MXFP4.
[[nodiscard]] bool gives_mxfp4_blocks(const Decoding& decoding) noexcept;

// Components of a tensor in blocks of MXFP4: its codes [..., columns / 2] and its scales
// [..., columns / 32], both U8.
[[nodiscard]] Decoding mxfp4_codes_of(std::uint32_t tensor, const Shape& shape);
[[nodiscard]] Decoding mxfp4_scales_of(std::uint32_t tensor, const Shape& shape);

}  // namespace loadstone
