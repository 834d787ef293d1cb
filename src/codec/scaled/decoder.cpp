#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "base/ceil_div.h"
#include "codec/scaled/scaled.h"
#include "kernels/cast.h"
#include "kernels/nibbles.h"
#include "kernels/number.h"

namespace loadstone::scaled {

namespace {

// Number of F32 values that fit the L1 cache.
constexpr std::uint64_t run_max = 1024;

// Extents of a tile of scales, see Layout::is_tiled.
constexpr std::uint64_t tile_rows = 128;
constexpr std::uint64_t tile_columns = 4;

// By code; e2m1_codes are sorted.
constexpr std::array<float, 16> e2m1_values = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,
                                               4.0f,  6.0f,  -0.0f, -0.5f, -1.0f, -1.5f,
                                               -2.0f, -3.0f, -4.0f, -6.0f};

float e8m0_value(std::uint8_t byte) noexcept {
  return std::bit_cast<float>(byte == 0 ? 0x00400000u : static_cast<std::uint32_t>(byte) << 23);
}

float scale_at(Dtype dtype, const std::byte* from, std::uint64_t index) noexcept {
  switch (dtype) {
    case Dtype::f32:
      return number::load<Dtype::f32>(from + 4 * index);
    case Dtype::bf16:
      return number::load<Dtype::bf16>(from + 2 * index);
    case Dtype::f16:
      return number::load<Dtype::f16>(from + 2 * index);
    case Dtype::f8_e8m0:
      return number::load<Dtype::f8_e8m0>(from + index);
    case Dtype::f8_e4m3:
      return number::load<Dtype::f8_e4m3>(from + index);
    case Dtype::u8:
      return e8m0_value(number::load_raw<std::uint8_t>(from + index));
    default:  // set_scale_dtype() rejects other dtypes
      return std::numeric_limits<float>::quiet_NaN();
  }
}

using Pair = std::array<float, 2>;

using Pairs = std::array<Pair, 256>;

// Returns the two values packed in each byte. One look-up replaces the shifts.
constexpr Pairs make_pairs(bool is_high_first) {
  Pairs pairs = {};
  for (std::size_t byte = 0; byte < pairs.size(); ++byte) {
    pairs[byte] = {e2m1_values[byte & 0xf], e2m1_values[byte >> 4]};
    if (is_high_first) std::swap(pairs[byte][0], pairs[byte][1]);
  }
  return pairs;
}
constexpr Pairs low_first_pairs = make_pairs(false);
constexpr Pairs high_first_pairs = make_pairs(true);

void load_nibbles(const Pairs& pairs, const std::byte* weights, bool starts_second, float* values,
                  std::uint64_t count) noexcept {
  if (starts_second && count > 0) {
    *values++ = pairs[std::to_integer<std::size_t>(*weights++)][1];
    --count;
  }
  for (std::uint64_t i = 0; i < count / 2; ++i) {
    std::memcpy(values + 2 * i, &pairs[std::to_integer<std::size_t>(weights[i])], sizeof(Pair));
  }
  if (count % 2 != 0) {
    values[count - 1] = pairs[std::to_integer<std::size_t>(weights[count / 2])][0];
  }
}

// Loads the values of one row. Each byte contains a value of this row and one of the next or
// previous.
void load_row_half(const std::byte* weights, bool is_high, float* values,
                   std::uint64_t count) noexcept {
  for (std::uint64_t i = 0; i < count; ++i) {
    const unsigned code = std::to_integer<unsigned>(weights[i]) >> (is_high ? 4 : 0) & 15u;
    values[i] = static_cast<float>(static_cast<int>(code ^ 8u) - 8);
  }
}

void load_offset_codes(const std::byte* weights, bool starts_low, float* values,
                       std::uint64_t count) noexcept {
  for (std::uint64_t i = 0; i < count; ++i) {
    const std::uint64_t at = i + (starts_low ? 1 : 0);
    const unsigned code = std::to_integer<unsigned>(weights[at / 2]) >> (at % 2 == 0 ? 4 : 0) & 15u;
    values[i] = static_cast<float>(static_cast<int>(code) - 8);
  }
}

void divide(float* values, std::uint64_t count, float scale) noexcept {
  if (!number::is_plain_factor(scale)) {
    for (std::uint64_t i = 0; i < count; ++i) values[i] = number::quotient(values[i], scale);
    return;
  }
  for (std::uint64_t i = 0; i < count; ++i) values[i] /= scale;
}

class ScaledDecoder final : public Decoder {
 public:
  explicit ScaledDecoder(const Layout& form) : form_(form) {}

  [[nodiscard]] ByteRange part_bytes(std::size_t part, std::uint64_t begin,
                                     std::uint64_t end) const noexcept override;
  [[nodiscard]] std::optional<BlockGrid> grid() const override;
  void decode(std::uint64_t begin, std::uint64_t end, std::span<const std::byte* const> parts,
              std::byte* target) const noexcept override;
  float take_codes(ByteRange range, const CodeRun& run, std::span<const std::byte* const> parts,
                   std::byte* codes, float* scales) const noexcept override;

 private:
  [[nodiscard]] std::span<const float> codes() const noexcept;
  [[nodiscard]] ByteRange code_bytes(std::uint64_t begin, std::uint64_t end) const noexcept;
  [[nodiscard]] ByteRange scale_bytes(std::uint64_t begin, std::uint64_t end) const noexcept;
  // Returns the number of scales in a row of tiles.
  [[nodiscard]] std::uint64_t tiles() const noexcept {
    return ceil_div(form_.scale_columns, tile_columns) * tile_columns * tile_rows;
  }
  [[nodiscard]] std::uint64_t tiled_index(std::uint64_t row, std::uint64_t column) const noexcept {
    return row / tile_rows * tiles() + column / tile_columns * tile_columns * tile_rows +
           row % 32 * 16 + row % tile_rows / 32 * 4 + column % tile_columns;
  }
  // Returns the index of the scale of a block in the row of the element `at`.
  [[nodiscard]] std::uint64_t scale_index(std::uint64_t at, std::uint64_t block) const noexcept {
    if (form_.is_tiled) return tiled_index(at / form_.columns, block);
    return at / form_.matrix_elements * form_.matrix_scales +
           at % form_.matrix_elements / form_.columns / form_.block_rows * form_.scale_columns +
           block;
  }
  // Returns the scale of the element's matrix. `begin`: the first element of the parts.
  [[nodiscard]] float global_of(std::uint64_t at, std::uint64_t begin,
                                std::span<const std::byte* const> parts) const noexcept {
    const std::uint64_t matrix =
        form_.global_count == 1 ? 0 : at / form_.matrix_elements - begin / form_.matrix_elements;
    return number::load<Dtype::f32>(parts[2] + matrix * sizeof(float));
  }
  void load(std::uint64_t at, const std::byte* codes, float* values,
            std::uint64_t count) const noexcept;
  void apply(float scale, float* values, std::uint64_t count) const noexcept;

  const Layout form_;
};

ByteRange ScaledDecoder::code_bytes(std::uint64_t begin, std::uint64_t end) const noexcept {
  switch (form_.codes) {
    case Codes::bytes:
      return {begin, end};
    case Codes::fp4:
    case Codes::fp4_high_first:
    case Codes::offset_nibbles:
      return {begin / 2, end / 2 + end % 2};
    case Codes::row_pairs:
      break;
  }
  const std::uint64_t columns = form_.columns;
  const std::uint64_t first = begin / columns;
  const std::uint64_t last = (end - 1) / columns;
  const std::uint64_t bytes = first / 2 * columns;
  if (first == last) return {bytes + begin % columns, bytes + (end - 1) % columns + 1};
  return {bytes, (last / 2 + 1) * columns};
}

ByteRange ScaledDecoder::scale_bytes(std::uint64_t begin, std::uint64_t end) const noexcept {
  const std::uint64_t size = element_bytes(form_.scale);
  const std::uint64_t last = end - 1;
  const std::uint64_t matrix = form_.matrix_elements;
  if (form_.is_tiled) {
    return {begin / form_.columns / tile_rows * tiles() * size,
            (last / form_.columns / tile_rows + 1) * tiles() * size};
  }
  if (form_.matrix_scales == 0 && begin / matrix != last / matrix) {
    return {0, form_.scale_count * size};
  }
  const auto block_row = [&](std::uint64_t element) {
    return element / matrix * form_.matrix_scales +
           element % matrix / form_.columns / form_.block_rows * form_.scale_columns;
  };
  std::uint64_t first_scale = block_row(begin);
  std::uint64_t end_scale = block_row(last) + form_.scale_columns;
  if (begin / form_.columns == last / form_.columns) {
    end_scale = first_scale + last % form_.columns / form_.block_columns + 1;
    first_scale += begin % form_.columns / form_.block_columns;
  }
  return {first_scale * size, end_scale * size};
}

ByteRange ScaledDecoder::part_bytes(std::size_t part, std::uint64_t begin,
                                    std::uint64_t end) const noexcept {
  if (part == 0) return code_bytes(begin, end);
  if (part == 1) return scale_bytes(begin, end);
  if (part == 2 && form_.has_zeros) {
    const ByteRange scales = scale_bytes(begin, end);
    return {scales.begin / element_bytes(form_.scale), scales.end / element_bytes(form_.scale)};
  }
  if (part > 2 || form_.global == Global::none) return {};
  if (form_.global_count == 1) return {0, sizeof(float)};
  return {begin / form_.matrix_elements * sizeof(float),
          ((end - 1) / form_.matrix_elements + 1) * sizeof(float)};
}

// Loads values of one row. `codes` begin with the byte that contains value `at`.
void ScaledDecoder::load(std::uint64_t at, const std::byte* codes, float* values,
                         std::uint64_t count) const noexcept {
  switch (form_.codes) {
    case Codes::bytes:
      cast_between(form_.weight, Dtype::f32)
          .run(codes, reinterpret_cast<std::byte*>(values), count);
      return;
    case Codes::fp4:
      return load_nibbles(low_first_pairs, codes, at % 2 != 0, values, count);
    case Codes::fp4_high_first:
      return load_nibbles(high_first_pairs, codes, at % 2 != 0, values, count);
    case Codes::offset_nibbles:
      return load_offset_codes(codes, at % 2 != 0, values, count);
    case Codes::row_pairs:
      return load_row_half(codes, at / form_.columns % 2 != 0, values, count);
  }
}

std::span<const float> ScaledDecoder::codes() const noexcept {
  switch (form_.codes) {
    case Codes::fp4:
    case Codes::fp4_high_first:
      return e2m1_codes;
    case Codes::offset_nibbles:
    case Codes::row_pairs:
      return integer_codes(-8, 7);
    case Codes::bytes:
      break;
  }
  if (form_.has_zeros) return integer_codes(-255, 255);
  return form_.weight == Dtype::i8 ? integer_codes(-128, 127) : float_codes(form_.weight);
}

std::optional<BlockGrid> ScaledDecoder::grid() const {
  const bool is_divided = form_.codes == Codes::offset_nibbles;
  return BlockGrid{
      .codes = codes(),
      .symmetric_codes = form_.has_zeros ? integer_codes(-128, 127) : std::span<const float>(),
      .scale = form_.scale == Dtype::u8 ? Dtype::f8_e8m0 : form_.scale,
      .product = is_divided ? BlockProduct::code_over_scale : BlockProduct::code_times_scale,
      .divides_scales = form_.global == Global::divisor,
      .rows = form_.block_rows,
      .columns = form_.block_columns,
      .is_flat = is_divided,
      .gives_codes = !form_.has_zeros && !is_divided};
}

void ScaledDecoder::apply(float scale, float* values, std::uint64_t count) const noexcept {
  if (form_.codes == Codes::offset_nibbles) return divide(values, count, scale);
  if (form_.by_exponent && std::isinf(scale)) {
    number::multiply(values, count, 0x1p127f);
    scale = 2.0f;
  }
  number::multiply(values, count, scale);
}

void ScaledDecoder::decode(std::uint64_t begin, std::uint64_t end,
                           std::span<const std::byte* const> parts,
                           std::byte* target) const noexcept {
  alignas(64) std::array<float, run_max> values;
  const std::uint64_t first_code = code_bytes(begin, end).begin;
  const std::uint64_t first_scale = scale_bytes(begin, end).begin / element_bytes(form_.scale);
  const Cast round = cast_between(Dtype::f32, form_.dtype);
  const std::size_t target_bytes = element_bytes(form_.dtype);
  for (std::uint64_t at = begin; at < end;) {
    const std::uint64_t column = at % form_.columns;
    const std::uint64_t count = std::min({run_max, form_.columns - column, end - at});
    load(at, parts[0] + (code_bytes(at, at + count).begin - first_code), values.data(), count);
    const std::uint64_t row_scale = scale_index(at, 0);
    for (std::uint64_t i = 0; i < count;) {
      const std::uint64_t block = (column + i) / form_.block_columns;
      const std::uint64_t run = std::min((block + 1) * form_.block_columns - column - i, count - i);
      const std::uint64_t index =
          (form_.is_tiled ? scale_index(at, block) : row_scale + block) - first_scale;
      float scale = scale_at(form_.scale, parts[1], index);
      if (form_.global != Global::none) {
        const float global = global_of(at, begin, parts);
        scale = form_.global == Global::factor ? number::product(scale, global)
                                               : number::quotient(scale, global);
      }
      if (form_.has_zeros) {
        const auto zero = static_cast<std::int8_t>(parts[2][index]);
        for (std::uint64_t k = i; k < i + run; ++k) values[k] -= static_cast<float>(zero);
      }
      apply(scale, values.data() + i, run);
      i += run;
    }
    round.run(reinterpret_cast<const std::byte*>(values.data()),
              target + (at - begin) * target_bytes, count);
    at += count;
  }
}

float ScaledDecoder::take_codes(ByteRange range, const CodeRun& run,
                                std::span<const std::byte* const> parts, std::byte* codes,
                                float* scales) const noexcept {
  const ByteRange bytes = code_bytes(run.begin, run.end);
  const std::byte* const from = parts[0] + (bytes.begin - code_bytes(range.begin, range.end).begin);
  if (form_.codes == Codes::fp4_high_first) {
    nibbles::swap_halves(from, bytes.size(), codes);
  } else if (form_.codes == Codes::row_pairs) {
    nibbles::from_row_pair(from, bytes.size(), run.begin / form_.columns % 2 != 0, codes);
  } else {
    std::memcpy(codes, from, bytes.size());
  }
  const std::uint64_t size = element_bytes(form_.scale);
  const std::uint64_t first_scale = scale_bytes(range.begin, range.end).begin / size;
  const std::uint64_t column = run.begin % form_.columns;
  const std::uint64_t count = ceil_div(run.end - run.begin, run.per_scale);
  if (run.per_scale == form_.block_columns && !form_.is_tiled) {
    const std::uint64_t index = scale_index(run.begin, column / form_.block_columns) - first_scale;
    cast_between(form_.scale == Dtype::u8 ? Dtype::f8_e8m0 : form_.scale, Dtype::f32)
        .run(parts[1] + index * size, reinterpret_cast<std::byte*>(scales), count);
  } else {
    for (std::uint64_t i = 0; i < count; ++i) {
      const std::uint64_t block = (column + i * run.per_scale) / form_.block_columns;
      scales[i] = scale_at(form_.scale, parts[1], scale_index(run.begin, block) - first_scale);
    }
  }
  return form_.global == Global::none ? 1 : global_of(run.begin, range.begin, parts);
}

}  // namespace

void finish(const Layout& form, PreparedDecoder& made) {
  made.decoder = std::make_shared<const ScaledDecoder>(form);
}

}  // namespace loadstone::scaled
