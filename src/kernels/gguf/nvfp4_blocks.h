// NVFP4 in the blocks of GGUF: four scales, and then the codes of 16 values for each.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/nibbles.h"
#include "loadstone/dtype.h"

namespace loadstone {

inline constexpr BlockLayout gguf_nvfp4 = {.elements = 64, .bytes = 36};
inline constexpr std::uint64_t nvfp4_code_bytes = 8;
inline constexpr std::uint64_t nvfp4_scales = 4;  // of a block

// Stores the scale and codes of 16 values, of which there are `index` x 16 before them since
// `blocks`.
inline void store_gguf_nvfp4(const std::byte* codes, std::byte scale, std::byte* blocks,
                             std::uint64_t index) noexcept {
  std::byte* const block = blocks + index / nvfp4_scales * gguf_nvfp4.bytes;
  const std::uint64_t inside = index % nvfp4_scales;
  block[inside] = scale;
  nibbles::to_gguf_16(codes, block + nvfp4_scales + inside * nvfp4_code_bytes);
}

// Reverses store_gguf_nvfp4(). Returns the scale.
inline std::byte load_gguf_nvfp4(const std::byte* blocks, std::uint64_t index,
                                 std::byte* codes) noexcept {
  const std::byte* const block = blocks + index / nvfp4_scales * gguf_nvfp4.bytes;
  const std::uint64_t inside = index % nvfp4_scales;
  nibbles::from_gguf_16(block + nvfp4_scales + inside * nvfp4_code_bytes, codes);
  return block[inside];
}

}  // namespace loadstone
