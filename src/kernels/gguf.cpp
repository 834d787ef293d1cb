#include "kernels/gguf.h"

#include "kernels/gguf/families.h"

namespace loadstone {

DecodeBlocks gguf_decoder(BlockFormat format, Dtype target, GgufMode mode) noexcept {
  for (const auto family : {simd::legacy_decoder, simd::k_decoder, simd::table_decoder,
                            simd::grid_decoder, simd::low_bit_decoder}) {
    if (const DecodeBlocks decoder = family(format, target, mode)) return decoder;
  }
  return nullptr;
}

}  // namespace loadstone
