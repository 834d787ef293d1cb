#include <fmt/format.h>

#include "base/only_errors.h"
#include "base/text.h"
#include "kernels/cast.h"
#include "kernels/gguf.h"
#include "loadstone/decoding.h"
#include "loadstone/error.h"

namespace loadstone {

static void decode_floats(Encoding encoding, std::span<const std::byte> bytes,
                          std::span<float> floats) {
  const auto expected = encoding.byte_count(floats.size());
  if (expected != bytes.size()) {
    throw Error("usage", "the number of bytes does not match the number of values",
                {.found = counted(bytes.size(), "byte"),
                 .expected = fmt::format("{} values of {}", floats.size(), encoding.name())});
  }
  auto* const target = reinterpret_cast<std::byte*>(floats.data());
  if (encoding.is_dtype()) {
    const Cast cast = cast_between(encoding.dtype(), Dtype::f32);
    if (cast.run == nullptr) {
      throw Error("plan.dtype", "this dtype cannot be cast to floats",
                  {.found = std::string(encoding.name())});
    }
    return cast.run(bytes.data(), target, floats.size());
  }
  const BlockFormat format = encoding.block_format();
  const DecodeBlocks decoder = gguf_decoder(format, Dtype::f32, GgufMode::exact);
  if (decoder == nullptr) {
    throw Error("gg.no_dequant", "this type is for activations and cannot be dequantized",
                {.found = std::string(encoding.name())});
  }
  decoder(bytes.data(), floats.size() / layout(format).elements, target);
}

void decode(Encoding encoding, std::span<const std::byte> bytes, std::span<float> floats) {
  only_errors([&] { decode_floats(encoding, bytes, floats); });
}

}  // namespace loadstone
