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

// Returns the address of the codes of 16 values, of which there are `index` x 16 before them since
// `blocks`.
template <class Byte>
[[nodiscard]] Byte* codes_of_gguf_nvfp4(Byte* blocks, std::uint64_t index) noexcept {
  return blocks + index / nvfp4_scales * gguf_nvfp4.bytes + nvfp4_scales +
         index % nvfp4_scales * nvfp4_code_bytes;
}

// Stores the scale and codes of these values.
inline void store_gguf_nvfp4(const std::byte* codes, std::byte scale, std::byte* blocks,
                             std::uint64_t index) noexcept {
  blocks[index / nvfp4_scales * gguf_nvfp4.bytes + index % nvfp4_scales] = scale;
  nibbles::to_gguf_16(codes, codes_of_gguf_nvfp4(blocks, index));
}

// Reverses store_gguf_nvfp4(). Returns the scale.
inline std::byte load_gguf_nvfp4(const std::byte* blocks, std::uint64_t index,
                                 std::byte* codes) noexcept {
  nibbles::from_gguf_16(codes_of_gguf_nvfp4(blocks, index), codes);
  return blocks[index / nvfp4_scales * gguf_nvfp4.bytes + index % nvfp4_scales];
}

}  // namespace loadstone
