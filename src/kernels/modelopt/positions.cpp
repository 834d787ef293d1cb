#include "kernels/modelopt/positions.h"

#include "kernels/gguf/nvfp4_blocks.h"
#include "kernels/modelopt/scales.h"

namespace loadstone {

namespace {

// Returns the offset of the byte of element `at` in the data.
std::uint64_t first_number(const QuantizedLayout& form, std::uint64_t at) noexcept {
  switch (form.kind) {
    case QuantizeKind::int4:
    case QuantizeKind::int4_awq:
    case QuantizeKind::int4_packed:
    case QuantizeKind::mxfp4:
      return at / 2;
    case QuantizeKind::nvfp4:
      return at / form.columns * scaled::blocks_in(form.columns, scaled::nvfp4_block) * 8 +
             at % form.columns / 2;
    case QuantizeKind::nvfp4_gguf:
      return at / gguf_nvfp4.elements * gguf_nvfp4.bytes;
    case QuantizeKind::fp8:
    case QuantizeKind::fp8_channel:
    case QuantizeKind::fp8_block:
    case QuantizeKind::int8_channel:
    case QuantizeKind::mxfp8:
      return at;
    case QuantizeKind::bnb4:
    case QuantizeKind::bnb_int8:
    case QuantizeKind::gguf_blocks:
      break;
  }
  return 0;  // the other kinds do not use these kernels
}

std::uint64_t first_scale(const QuantizedLayout& form, std::uint64_t at) noexcept {
  const std::uint64_t row = at / form.columns;
  const std::uint64_t rest = at % form.columns;
  const auto by_rows = [&](std::uint64_t block) {
    return row * scaled::blocks_in(form.columns, block) + rest / block;
  };
  switch (form.kind) {
    case QuantizeKind::fp8:
    case QuantizeKind::nvfp4_gguf:
      return 0;
    case QuantizeKind::fp8_channel:
    case QuantizeKind::int8_channel:
      return row;
    case QuantizeKind::fp8_block: {
      constexpr std::uint64_t block = scaled::fp8_block;
      const std::uint64_t rows = row / form.rows * scaled::blocks_in(form.rows, block) +
                                 scaled::blocks_in(row % form.rows, block);
      return rows * scaled::blocks_in(form.columns, block);
    }
    case QuantizeKind::int4:
      return at / scaled::int4_block;
    case QuantizeKind::int4_awq:
      return by_rows(scaled::int4_block);
    case QuantizeKind::int4_packed:
      return by_rows(form.group_size);
    case QuantizeKind::nvfp4:
      return by_rows(scaled::nvfp4_block);
    case QuantizeKind::mxfp4:
    case QuantizeKind::mxfp8:
      return by_rows(simd::mx_block);
    case QuantizeKind::bnb4:
    case QuantizeKind::bnb_int8:
    case QuantizeKind::gguf_blocks:
      break;
  }
  return 0;
}

}  // namespace

std::uint64_t place_in_part(const QuantizedLayout& form, std::size_t part,
                            std::uint64_t at) noexcept {
  if (part == 0) return first_number(form, at);
  return part == 1 ? first_scale(form, at) * width(form.parts[1].dtype) : 0;
}

}  // namespace loadstone
