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

EncodeBlocks gguf_encoder(BlockFormat format) noexcept {
  for (const auto family : {simd::legacy_encoder, simd::k_encoder, simd::table_encoder,
                            simd::grid_encoder, simd::iq1_encoder, simd::low_bit_encoder}) {
    if (const EncodeBlocks encoder = family(format)) return encoder;
  }
  return nullptr;
}

}  // namespace loadstone
