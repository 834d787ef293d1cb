// Decodes windows of a tensor in the encodings of modelopt.h.
#include <algorithm>
#include <array>
#include <limits>

#include "kernels/gguf/nvfp4_blocks.h"
#include "kernels/modelopt.h"
#include "kernels/modelopt/positions.h"
#include "kernels/modelopt/scales.h"
#include "kernels/number.h"

namespace loadstone {

namespace {

float load_scale(Dtype dtype, const std::byte* from) noexcept {
  switch (dtype) {
    case Dtype::f32:
      return number::load<Dtype::f32>(from);
    case Dtype::f16:
      return number::load<Dtype::f16>(from);
    case Dtype::bf16:
      return number::load<Dtype::bf16>(from);
    case Dtype::f8_e4m3:
      return number::load<Dtype::f8_e4m3>(from);
    case Dtype::u8:
      return number::load<Dtype::f8_e8m0>(from);
    default:  // no encoding of modelopt.h has scales of a different dtype
      return std::numeric_limits<float>::quiet_NaN();
  }
}

void decode_rows(const Decoded& cut, std::uint64_t length, Dtype target) {
  const QuantizedLayout& form = cut.form;
  const Dtype dtype = form.parts[1].dtype;
  const bool is_int8 = form.kind == QuantizeKind::int8_channel;
  (void)by_runs(form, cut.begin, cut.end, length, [&](const WindowRun& run) {
    const float scale = form.kind == QuantizeKind::fp8
                            ? load_scale(dtype, cut.parts[1] + run.matrix * width(dtype))
                            : load_scale(dtype, cut.part_at(1, run.begin));
    decode_bytes(is_int8, scale, cut.part_at(0, run.begin), run.size(), target,
                 cut.numbers_at(run.begin));
    return run.size();
  });
}

void decode_tiles(const Decoded& cut, Dtype target) {
  const QuantizedLayout& form = cut.form;
  const Dtype dtype = form.parts[1].dtype;
  by_blocks(form, cut.begin, cut.end,
            [&](std::uint64_t first, std::uint64_t rows, std::uint64_t columns, std::uint64_t i) {
              const float scale = load_scale(dtype, cut.parts[1] + i * width(dtype));
              for (std::uint64_t row = 0; row < rows; ++row) {
                const std::uint64_t at = first + row * form.columns;
                decode_bytes(false, scale, cut.part_at(0, at), columns, target, cut.numbers_at(at));
              }
            });
}

// Calls each(begin, size, matrix) for the blocks of each row. The last block of a row may be short.
template <class Each>
void by_row_blocks(const QuantizedLayout& form, std::uint64_t begin, std::uint64_t end,
                   std::uint64_t block, Each each) {
  (void)by_runs(form, begin, end, form.columns, [&](const WindowRun& row) {
    for (std::uint64_t at = row.begin; at < row.end; at += block) {
      each(at, std::min(block, row.end - at), row.matrix);
    }
    return row.size();
  });
}

void decode_halves(const Decoded& cut, std::uint64_t block, Dtype target) {
  const QuantizedLayout& form = cut.form;
  const Dtype dtype = form.parts[1].dtype;
  const FourBit type = form.kind == QuantizeKind::int4_packed ? FourBit::packed : FourBit::e2m1;
  by_row_blocks(form, cut.begin, cut.end, block,
                [&](std::uint64_t at, std::uint64_t count, std::uint64_t matrix) {
                  float scale = load_scale(dtype, cut.part_at(1, at));
                  if (form.kind == QuantizeKind::nvfp4) {
                    scale *= load_scale(Dtype::f32, cut.parts[2] + matrix * sizeof(float));
                  }
                  decode_four_bit(type, scale, cut.part_at(0, at), 0, count, target,
                                  cut.numbers_at(at));
                });
}

void decode_blocks(const Decoded& cut, Dtype target) {
  std::array<std::byte, nvfp4_code_bytes> codes;
  by_row_blocks(cut.form, cut.begin, cut.end, scaled::nvfp4_block,
                [&](std::uint64_t at, std::uint64_t count, std::uint64_t matrix) {
                  const std::uint64_t inside = at % gguf_nvfp4.elements;
                  const std::byte scale = load_gguf_nvfp4(
                      cut.part_at(0, at - inside), inside / scaled::nvfp4_block, codes.data());
                  decode_four_bit(FourBit::e2m1,
                                  load_scale(Dtype::f8_e4m3, &scale) *
                                      load_scale(Dtype::f32, cut.parts[1] + matrix * sizeof(float)),
                                  codes.data(), 0, count, target, cut.numbers_at(at));
                });
}

void decode_flat(const Decoded& cut, Dtype target) {
  const Dtype dtype = cut.form.parts[1].dtype;
  constexpr std::uint64_t block = scaled::int4_block;
  for (std::uint64_t at = cut.begin; at < cut.end; at += block) {
    const float scale = load_scale(dtype, cut.part_at(1, at));
    decode_four_bit(FourBit::offset, scale, cut.part_at(0, at), 0, block, target,
                    cut.numbers_at(at));
  }
}

void decode_row_pairs(const Decoded& cut, Dtype target) {
  const QuantizedLayout& form = cut.form;
  constexpr std::uint64_t block = scaled::int4_block;
  const std::uint64_t row_scales = form.columns / block * sizeof(float);
  for (std::uint64_t row = cut.begin; row < cut.end; row += 2 * form.columns) {
    for (std::uint64_t column = 0; column < form.columns; column += block) {
      const std::byte* const scale = cut.part_at(1, row + column);
      decode_int4_rows(load_scale(Dtype::f32, scale), load_scale(Dtype::f32, scale + row_scales),
                       cut.part_at(0, row) + column, block, target, cut.numbers_at(row + column),
                       cut.numbers_at(row + form.columns + column));
    }
  }
}

}  // namespace

void decode_scaled_window(const QuantizedLayout& form, std::uint64_t begin, std::uint64_t end,
                          std::span<const std::byte* const> parts, Dtype target,
                          std::byte* numbers) noexcept {
  const Decoded cut = {form, begin, end, numbers, width(target), parts};
  switch (form.kind) {
    case QuantizeKind::fp8:
      return decode_rows(cut, form.matrix_elements(), target);
    case QuantizeKind::fp8_channel:
    case QuantizeKind::int8_channel:
      return decode_rows(cut, form.columns, target);
    case QuantizeKind::fp8_block:
      return decode_tiles(cut, target);
    case QuantizeKind::int4:
      return decode_flat(cut, target);
    case QuantizeKind::int4_awq:
      return decode_row_pairs(cut, target);
    case QuantizeKind::mxfp8:
      return by_row_blocks(form, begin, end, simd::mx_block,
                           [&](std::uint64_t at, std::uint64_t count, std::uint64_t) {
                             decode_bytes(false, load_scale(Dtype::u8, cut.part_at(1, at)),
                                          cut.part_at(0, at), count, target, cut.numbers_at(at));
                           });
    case QuantizeKind::int4_packed:
      return decode_halves(cut, form.group_size, target);
    case QuantizeKind::mxfp4:
      return decode_halves(cut, simd::mx_block, target);
    case QuantizeKind::nvfp4:
      return decode_halves(cut, scaled::nvfp4_block, target);
    case QuantizeKind::nvfp4_gguf:
      return decode_blocks(cut, target);
    case QuantizeKind::bnb4:
    case QuantizeKind::bnb_int8:
    case QuantizeKind::gguf_blocks:
      break;
  }
}

}  // namespace loadstone
