#include "kernels/encoding_loss.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/gguf/block_scales.h"
#include "kernels/gguf/nvfp4_blocks.h"
#include "kernels/modelopt/scales.h"

namespace loadstone {

namespace {

// A part of a window: rows of values, `stride` values apart.
struct Part {
  std::uint64_t begin = 0;
  std::uint64_t columns = 0;
  std::uint64_t rows = 1;
  std::uint64_t stride = 0;
};

// Calls visit(values of a row, their number) for each row.
template <class Visit>
void visit_rows(const Part& part, Visit visit) {
  for (std::uint64_t row = 0; row < part.rows; ++row) {
    visit(part.begin + row * part.stride, part.columns);
  }
}

// The error of a value that became finite, infinite or NaN: the block is not exact, but the change
// has no size.
constexpr float sizeless = std::numeric_limits<float>::denorm_min();

// Returns the largest error of a value, or 0 if all values are equal.
float largest_error(const Part& part, const float* values, const float* decoded) noexcept {
  float most = 0;
  visit_rows(part, [&](std::uint64_t at, std::uint64_t count) {
    if (std::memcmp(values + at, decoded + at, count * sizeof(float)) == 0) return;
    for (std::uint64_t i = at; i < at + count; ++i) {
      if (values[i] == decoded[i] || (std::isnan(values[i]) && std::isnan(decoded[i]))) continue;
      const float error = std::abs(values[i] - decoded[i]);
      most = std::max(most, std::isfinite(error) ? error : sizeless);
    }
  });
  return most;
}

float largest_magnitude(const Part& part, const float* values) noexcept {
  float most = 0;
  visit_rows(part, [&](std::uint64_t at, std::uint64_t count) {
    for (std::uint64_t i = at; i < at + count; ++i) {
      if (std::isfinite(values[i])) most = std::max(most, std::abs(values[i]));
    }
  });
  return most;
}

void count_block(float error, float most, EncodingLoss& loss) noexcept {
  ++loss.blocks;
  if (error == 0) {
    ++loss.exact_blocks;
  } else if (most > 0) {
    loss.largest_error = std::max(loss.largest_error, double{error} / double{most});
  }
}

// Returns the number of adjacent values in a block.
std::uint64_t block_columns(const QuantizedLayout& form) noexcept {
  switch (form.kind) {
    case QuantizeKind::int4:
    case QuantizeKind::int4_awq:
      return scaled::int4_block;
    case QuantizeKind::int4_packed:
      return form.group_size;
    case QuantizeKind::nvfp4:
    case QuantizeKind::nvfp4_gguf:
      return scaled::nvfp4_block;
    case QuantizeKind::mxfp4:
    case QuantizeKind::mxfp8:
      return simd::mx_block;
    case QuantizeKind::gguf_blocks:
      return layout(form.block).elements;
    case QuantizeKind::fp8_block:
      return scaled::fp8_block;
    case QuantizeKind::fp8:
    case QuantizeKind::fp8_channel:
    case QuantizeKind::int8_channel:
    case QuantizeKind::bnb4:
    case QuantizeKind::bnb_int8:
      break;
  }
  return form.columns;
}

// Calls visit(part) for each block of the window. Its positions are relative to the window.
template <class Visit>
void visit_blocks(const QuantizedLayout& form, std::uint64_t begin, std::uint64_t end,
                  Visit visit) {
  const std::uint64_t block = block_columns(form);
  const bool has_tiles = form.kind == QuantizeKind::fp8_block;
  // The blocks of int4 and GGUF run across rows.
  const bool is_flat = form.kind == QuantizeKind::int4 || form.kind == QuantizeKind::gguf_blocks;
  const std::uint64_t columns = is_flat ? form.elements : form.columns;
  for (std::uint64_t row = begin; row < end;) {
    const std::uint64_t row_end = std::min(end, row - row % columns + columns);
    const std::uint64_t left = form.rows - row / form.columns % form.rows;
    const std::uint64_t rows = has_tiles ? std::min(block, left) : 1;
    for (std::uint64_t at = row; at < row_end; at += block) {
      visit(Part{at - begin, std::min(block, row_end - at), rows, columns});
    }
    row = row_end + (rows - 1) * columns;
  }
}

template <typename Bits>
bool has_nonzero(const std::byte* from, std::uint64_t count) noexcept {
  Bits any = 0;
  for (std::uint64_t i = 0; i < count; ++i) {
    Bits bits;
    std::memcpy(&bits, from + i * sizeof bits, sizeof bits);
    any = static_cast<Bits>(any | bits);
  }
  return static_cast<Bits>(any << 1) != 0;  // without the sign
}

// Returns true if the two E2M1 codes of each byte are zeros, of either sign.
bool has_zero_codes(const std::byte* codes) noexcept {
  std::uint64_t bits = 0;
  static_assert(scaled::nvfp4_block == 2 * sizeof bits);
  std::memcpy(&bits, codes, sizeof bits);
  return (bits & 0x7777'7777'7777'7777u) == 0;
}

}  // namespace

std::uint64_t compared_matrices(const QuantizedLayout& form) noexcept {
  return form.kind == QuantizeKind::fp8 ? form.stack : 0;
}

void compare_window(const QuantizedLayout& form, std::uint64_t begin, std::uint64_t end,
                    const float* values, const float* decoded, std::span<float> matrix_errors,
                    EncodingLoss& loss) noexcept {
  if (form.kind != QuantizeKind::fp8) {
    return visit_blocks(form, begin, end, [&](const Part& block) {
      const float error = largest_error(block, values, decoded);
      count_block(error, error > 0 ? largest_magnitude(block, values) : 0, loss);
    });
  }
  for (std::uint64_t at = begin; at < end;) {
    const std::uint64_t matrix = at / form.matrix_elements();
    const std::uint64_t stop = std::min(end, (matrix + 1) * form.matrix_elements());
    float& error = matrix_errors[matrix];
    error = std::max(error, largest_error({at - begin, stop - at}, values, decoded));
    at = stop;
  }
}

void count_exact_window(const QuantizedLayout& form, std::uint64_t begin, std::uint64_t end,
                        EncodingLoss& loss) noexcept {
  if (form.kind == QuantizeKind::fp8) return;
  visit_blocks(form, begin, end, [&](const Part&) { count_block(0, 0, loss); });
}

std::uint64_t count_zeroed_blocks(const QuantizedLayout& form, std::uint64_t begin,
                                  std::uint64_t end, const std::byte* numbers,
                                  std::span<std::byte* const> parts) noexcept {
  const bool is_gguf = form.kind == QuantizeKind::gguf_blocks;
  const bool is_nvfp4_gguf = form.kind == QuantizeKind::nvfp4_gguf;
  if (!is_gguf && !is_nvfp4_gguf && form.kind != QuantizeKind::nvfp4) return 0;
  const std::uint64_t step = is_gguf ? layout(form.block).bytes : nvfp4_code_bytes;
  const bool is_f32 = form.dtype == Dtype::f32;
  std::uint64_t index = 0;
  std::uint64_t count = 0;
  visit_blocks(form, begin, end, [&](const Part& block) {
    const std::byte* const codes =
        is_nvfp4_gguf ? codes_of_gguf_nvfp4(parts.front(), index) : parts.front() + index * step;
    ++index;
    if (is_gguf ? has_zero_scales(form.block, codes) : has_zero_codes(codes)) {
      const std::byte* const from = numbers + block.begin * (is_f32 ? 4 : 2);
      const bool had_values = is_f32 ? has_nonzero<std::uint32_t>(from, block.columns)
                                     : has_nonzero<std::uint16_t>(from, block.columns);
      count += had_values ? 1 : 0;
    }
  });
  return count;
}

void count_matrices(std::span<const float> matrix_errors, std::span<const float> amax,
                    EncodingLoss& loss) noexcept {
  for (std::size_t i = 0; i < matrix_errors.size(); ++i) {
    count_block(matrix_errors[i], amax[i], loss);
  }
}

}  // namespace loadstone
