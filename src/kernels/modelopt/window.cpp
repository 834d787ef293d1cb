// Divides windows of a tensor into the runs that the kernels of modelopt.h encode or decode.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>

#include "kernels/gguf/nvfp4_blocks.h"
#include "kernels/modelopt.h"
#include "kernels/modelopt/exact.h"
#include "kernels/modelopt/scales.h"
#include "kernels/number.h"

namespace loadstone {

namespace {

std::uint64_t width(Dtype dtype) { return bits(dtype) / 8; }

// Returns the address of F32 values, which must be aligned.
const float* floats_at(const std::byte* from) { return reinterpret_cast<const float*>(from); }

void store_scale(Dtype dtype, float value, std::byte* to) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if (dtype == Dtype::f32) {
    number::store_raw(to, value);
  } else if (dtype == Dtype::f16) {
    number::store_raw(to, number::f16_from_f32(bits));
  } else {
    number::store_raw(to, number::bf16_from_f32(bits, number::bf16_nan_scalar));
  }
}

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

// Returns the index of element `at` in the data. Each element of the data is one byte.
std::uint64_t first_number(const QuantizedLayout& form, std::uint64_t at) noexcept {
  switch (form.kind) {
    case QuantizeKind::int4:
    case QuantizeKind::int4_awq:
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

// Returns the byte offset in a component for element `at`, which begins a window or ends the
// tensor.
std::uint64_t place_in_part(const QuantizedLayout& form, std::size_t part,
                            std::uint64_t at) noexcept {
  if (part == 0) return first_number(form, at);  // its elements are bytes
  return part == 1 ? first_scale(form, at) * width(form.parts[1].dtype) : 0;
}

// A run of elements within one matrix or one row.
struct Run {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
  std::uint64_t matrix = 0;
  [[nodiscard]] std::uint64_t size() const noexcept { return end - begin; }
};

// Most values that are encoded at a time into blocks of GGUF.
constexpr std::uint64_t piece_elements = 2048;

// Divides the window into runs that end at multiples of `length`, and calls encode(run) for each.
// encode() returns the index in the run of the first non-finite value, or the run's size. Returns
// the index of the first non-finite value of the window, or `end`.
template <class Encode>
std::uint64_t by_runs(const QuantizedLayout& form, std::uint64_t begin, std::uint64_t end,
                      std::uint64_t length, Encode encode) {
  std::uint64_t first_wrong = end;
  for (std::uint64_t at = begin; at < end;) {
    const std::uint64_t stop = std::min(end, (at / length + 1) * length);
    const std::uint64_t good = encode(Run{at, stop, at / form.matrix_elements()});
    if (good < stop - at) first_wrong = std::min(first_wrong, at + good);
    at = stop;
  }
  return first_wrong;
}

// Calls encode(run), like by_runs(), for pieces of rows.
template <class Encode>
std::uint64_t by_pieces(const QuantizedLayout& form, std::uint64_t begin, std::uint64_t end,
                        Encode encode) {
  return by_runs(form, begin, end, form.columns, [&](const Run& row) {
    std::uint64_t first_wrong = row.size();
    for (std::uint64_t at = row.begin; at < row.end; at += piece_elements) {
      const std::uint64_t stop = std::min(row.end, at + piece_elements);
      const std::uint64_t good = encode(Run{at, stop, row.matrix});
      if (good < stop - at) first_wrong = std::min(first_wrong, at + good - row.begin);
    }
    return first_wrong;
  });
}

}  // namespace

void scaled_part_ranges(const QuantizedLayout& form, std::uint64_t begin, std::uint64_t end,
                        std::span<PartRange> ranges) noexcept {
  for (std::size_t i = 0; i < ranges.size(); ++i) {
    ranges[i] = {place_in_part(form, i, begin), place_in_part(form, i, end)};
  }
}

namespace {

// Adds values of one matrix.
void add_exact_scales(const QuantizedLayout& form, const Run& run, const float* numbers,
                      ExactScales& exact) noexcept {
  if (form.kind == QuantizeKind::fp8) return exact.add_values({numbers, run.size()});
  for (std::uint64_t at = run.begin; at < run.end;) {
    const std::uint64_t row_end = at - at % form.columns + form.columns;
    const std::uint64_t size = std::min(scaled::nvfp4_block, std::min(row_end, run.end) - at);
    exact.add_block({numbers + (at - run.begin), size});
    at += size;
  }
}

}  // namespace

std::uint64_t measure_window(const QuantizedLayout& form, std::uint64_t begin, std::uint64_t end,
                             const std::byte* numbers, std::span<float> amax,
                             std::span<ExactScales> exact) noexcept {
  const std::uint64_t bytes = width(form.dtype);
  return by_runs(form, begin, end, form.matrix_elements(), [&](const Run& run) {
    const std::byte* const from = numbers + (run.begin - begin) * bytes;
    if (!exact.empty()) add_exact_scales(form, run, floats_at(from), exact[run.matrix]);
    return join_amax(form.dtype, from, run.size(), amax[run.matrix]);
  });
}

namespace {

// A window and its components. Converts indices of elements to addresses.
template <class Byte, class Number>
struct Cut {
  const QuantizedLayout& form;
  std::uint64_t begin;
  std::uint64_t end;
  Number* numbers;
  std::uint64_t number_bytes;
  std::span<Byte* const> parts;

  [[nodiscard]] Number* numbers_at(std::uint64_t at) const {
    return numbers + (at - begin) * number_bytes;
  }
  [[nodiscard]] Byte* part_at(std::size_t part, std::uint64_t at) const {
    return parts[part] + (place_in_part(form, part, at) - place_in_part(form, part, begin));
  }
};
using Encoded = Cut<std::byte, const std::byte>;
using Decoded = Cut<const std::byte, std::byte>;

float most_of(const QuantizedLayout& form) {
  return form.kind == QuantizeKind::int8_channel ? 127.0f : 448.0f;
}

// Returns the scale of values with this largest magnitude.
float scale_of(const QuantizedLayout& form, float amax, const BlockValues& values) {
  const auto exact = form.exact_first ? scaled::exact_scale_of(form, values) : std::nullopt;
  return exact ? *exact : scaled::scale_of(form, amax, most_of(form));
}

// Returns the scale of a whole matrix.
float scale_of(const QuantizedLayout& form, const MatrixStatistics& matrices,
               std::uint64_t matrix) {
  if (!matrices.exact.empty() && matrices.exact[matrix] > 0) return matrices.exact[matrix];
  const float amax = matrices.amax[matrix];
  return form.kind == QuantizeKind::fp8 ? scaled::scale_of(form, amax, most_of(form))
                                        : scaled::nvfp4_scale_2(form, amax);
}

ScaledRun run_of(const QuantizedLayout& form, float scale) {
  const bool rounds = form.dialect != QuantizeDialect::exact;
  return {form.dtype, form.kind == QuantizeKind::int8_channel, rounds, scale};
}

std::uint64_t encode_channels(const Encoded& cut) {
  const QuantizedLayout& form = cut.form;
  const Dtype dtype = form.parts[1].dtype;
  return by_runs(form, cut.begin, cut.end, form.columns, [&](const Run& row) {
    float amax = 0;
    (void)join_amax(form.dtype, cut.numbers_at(row.begin), row.size(), amax);
    const BlockValues values = {floats_at(cut.numbers_at(row.begin)), row.size()};
    const ScaledRun run = run_of(form, scale_of(form, amax, values));
    store_scale(dtype, run.scale, cut.part_at(1, row.begin));
    return encode_bytes(run, cut.numbers_at(row.begin), row.size(), cut.part_at(0, row.begin));
  });
}

// Calls each(first element, rows, columns, index of the block in the window) for each block of
// 128 x 128 in the window.
template <class Each>
void by_blocks(const QuantizedLayout& form, std::uint64_t begin, std::uint64_t end, Each each) {
  constexpr std::uint64_t block = scaled::fp8_block;
  std::uint64_t count = 0;
  for (std::uint64_t row = begin / form.columns; row < end / form.columns;) {
    const std::uint64_t rows = std::min(block, form.rows - row % form.rows);
    for (std::uint64_t column = 0; column < form.columns; column += block) {
      each(row * form.columns + column, rows, std::min(block, form.columns - column), count++);
    }
    row += rows;
  }
}

std::uint64_t encode_tiles(const Encoded& cut) {
  const QuantizedLayout& form = cut.form;
  const Dtype dtype = form.parts[1].dtype;
  std::uint64_t first_wrong = cut.end;
  by_blocks(
      form, cut.begin, cut.end,
      [&](std::uint64_t first, std::uint64_t rows, std::uint64_t columns, std::uint64_t i) {
        float amax = 0;
        for (std::uint64_t row = 0; row < rows; ++row) {
          const std::uint64_t at = first + row * form.columns;
          (void)join_amax(form.dtype, cut.numbers_at(at), columns, amax);
        }
        const BlockValues values = {floats_at(cut.numbers_at(first)), columns, rows, form.columns};
        const ScaledRun run = run_of(form, scale_of(form, amax, values));
        store_scale(dtype, run.scale, cut.parts[1] + i * width(dtype));
        for (std::uint64_t row = 0; row < rows; ++row) {
          const std::uint64_t at = first + row * form.columns;
          const std::uint64_t good =
              encode_bytes(run, cut.numbers_at(at), columns, cut.part_at(0, at));
          if (good < columns) first_wrong = std::min(first_wrong, at + good);
        }
      });
  return first_wrong;
}

std::uint64_t encode_matrices(const Encoded& cut, const MatrixStatistics& matrices) {
  return by_runs(cut.form, cut.begin, cut.end, cut.form.matrix_elements(), [&](const Run& run) {
    const float scale = scale_of(cut.form, matrices, run.matrix);
    return encode_bytes(run_of(cut.form, scale), cut.numbers_at(run.begin), run.size(),
                        cut.part_at(0, run.begin));
  });
}

std::uint64_t encode_rows(const Encoded& cut, const MatrixStatistics& matrices) {
  const QuantizedLayout& form = cut.form;
  const bool is_compressed = form.dialect == QuantizeDialect::compressed;
  return by_runs(form, cut.begin, cut.end, form.columns, [&](const Run& row) {
    const std::byte* const numbers = cut.numbers_at(row.begin);
    std::byte* const data = cut.part_at(0, row.begin);
    std::byte* const scales = cut.part_at(1, row.begin);
    if (form.kind == QuantizeKind::nvfp4) {
      const float scale_2 = scale_of(form, matrices, row.matrix);
      const auto good = encode_nvfp4(form.dtype, scale_2, numbers, row.size(), data, scales);
      if (form.exact_first) {
        scaled::encode_nvfp4_exactly(scale_2, floats_at(numbers), row.size(), data, scales);
      }
      return good;
    }
    return encode_mxfp8(form.dtype, is_compressed, numbers, row.size(), data, scales);
  });
}

// Encodes pieces of rows, and copies their codes and scales into blocks.
std::uint64_t encode_blocks(const Encoded& cut, const MatrixStatistics& matrices) {
  const QuantizedLayout& form = cut.form;
  std::array<std::byte, piece_elements / 2> codes;
  std::array<std::byte, piece_elements / scaled::nvfp4_block> scales;
  return by_pieces(form, cut.begin, cut.end, [&](const Run& run) {
    const std::byte* const numbers = cut.numbers_at(run.begin);
    const float scale_2 = scale_of(form, matrices, run.matrix);
    const auto good =
        encode_nvfp4(form.dtype, scale_2, numbers, run.size(), codes.data(), scales.data());
    if (form.exact_first) {
      scaled::encode_nvfp4_exactly(scale_2, floats_at(numbers), run.size(), codes.data(),
                                   scales.data());
    }
    for (std::uint64_t i = 0; i < run.size() / scaled::nvfp4_block; ++i) {
      store_gguf_nvfp4(codes.data() + i * nvfp4_code_bytes, scales[i], cut.part_at(0, run.begin),
                       i);
    }
    return good;
  });
}

std::uint64_t encode_flat(const Encoded& cut) {
  const QuantizedLayout& form = cut.form;
  const std::uint64_t count = cut.end - cut.begin;
  const bool rounds = form.dialect == QuantizeDialect::compressed;
  const auto good = encode_int4(form.dtype, rounds, cut.numbers, count, cut.parts[0], cut.parts[1]);
  if (form.exact_first) {
    scaled::encode_int4_exactly(floats_at(cut.numbers), count, cut.parts[0], cut.parts[1]);
  }
  return good;
}

std::uint64_t encode_row_pair(const Encoded& cut, std::uint64_t at) {
  const QuantizedLayout& form = cut.form;
  const std::byte* const numbers = cut.numbers_at(at);
  std::byte* const data = cut.part_at(0, at);
  std::byte* const scales = cut.part_at(1, at);
  const auto good = encode_int4_rows(form.dtype, numbers, form.columns, data, scales);
  if (form.exact_first) {
    scaled::encode_int4_rows_exactly(floats_at(numbers), form.columns, data, scales);
  }
  return good;
}

}  // namespace

std::uint64_t encode_scaled_window(const QuantizedLayout& form, std::uint64_t begin,
                                   std::uint64_t end, const std::byte* numbers,
                                   std::span<std::byte* const> parts,
                                   const MatrixStatistics& matrices) noexcept {
  const Encoded cut = {form, begin, end, numbers, width(form.dtype), parts};
  const bool is_compressed = form.dialect == QuantizeDialect::compressed;
  const std::uint64_t count = end - begin;
  switch (form.kind) {
    case QuantizeKind::fp8:
      return encode_matrices(cut, matrices);
    case QuantizeKind::fp8_channel:
    case QuantizeKind::int8_channel:
      return encode_channels(cut);
    case QuantizeKind::fp8_block:
      return encode_tiles(cut);
    case QuantizeKind::int4:
      return begin + encode_flat(cut);
    case QuantizeKind::int4_awq:
      return by_runs(form, begin, end, 2 * form.columns,
                     [&](const Run& rows) { return encode_row_pair(cut, rows.begin); });
    case QuantizeKind::mxfp4:
      return begin + encode_mxfp4(form.dtype, is_compressed, numbers, count, parts[0], parts[1]);
    case QuantizeKind::nvfp4:
    case QuantizeKind::mxfp8:
      return encode_rows(cut, matrices);
    case QuantizeKind::nvfp4_gguf:
      return encode_blocks(cut, matrices);
    case QuantizeKind::bnb4:
    case QuantizeKind::bnb_int8:
    case QuantizeKind::gguf_blocks:
      break;
  }
  return begin;
}

void finish_scaled(const QuantizedLayout& form, std::span<std::byte* const> parts,
                   const MatrixStatistics& matrices) noexcept {
  if (!form.needs_amax) return;
  const std::size_t last = form.parts.size() - 1;
  const Dtype dtype = form.parts[last].dtype;
  for (std::uint64_t i = 0; i < form.stack; ++i) {
    store_scale(dtype, scale_of(form, matrices, i), parts[last] + i * width(dtype));
  }
}

namespace {

void decode_rows(const Decoded& cut, std::uint64_t length, Dtype target) {
  const QuantizedLayout& form = cut.form;
  const Dtype dtype = form.parts[1].dtype;
  const bool is_int8 = form.kind == QuantizeKind::int8_channel;
  (void)by_runs(form, cut.begin, cut.end, length, [&](const Run& run) {
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
  (void)by_runs(form, begin, end, form.columns, [&](const Run& row) {
    for (std::uint64_t at = row.begin; at < row.end; at += block) {
      each(at, std::min(block, row.end - at), row.matrix);
    }
    return row.size();
  });
}

void decode_halves(const Decoded& cut, std::uint64_t block, Dtype target) {
  const QuantizedLayout& form = cut.form;
  const Dtype dtype = form.parts[1].dtype;
  by_row_blocks(form, cut.begin, cut.end, block,
                [&](std::uint64_t at, std::uint64_t count, std::uint64_t matrix) {
                  float scale = load_scale(dtype, cut.part_at(1, at));
                  if (form.kind == QuantizeKind::nvfp4) {
                    scale *= load_scale(Dtype::f32, cut.parts[2] + matrix * sizeof(float));
                  }
                  decode_four_bit(FourBit::e2m1, scale, cut.part_at(0, at), 0, count, target,
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
