// Divides windows of a tensor into the runs that the kernels of modelopt.h encode.
#include <algorithm>
#include <array>
#include <bit>

#include "kernels/gguf/nvfp4_blocks.h"
#include "kernels/modelopt.h"
#include "kernels/modelopt/exact.h"
#include "kernels/modelopt/positions.h"
#include "kernels/modelopt/scales.h"
#include "kernels/number.h"

namespace loadstone {

namespace {

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

// Most values that are encoded at a time into blocks of GGUF.
constexpr std::uint64_t piece_elements = 2048;

// Calls encode(run), like by_runs(), for pieces of rows.
template <class Encode>
std::uint64_t by_pieces(const QuantizedLayout& form, std::uint64_t begin, std::uint64_t end,
                        Encode encode) {
  return by_runs(form, begin, end, form.columns, [&](const WindowRun& row) {
    std::uint64_t first_wrong = row.size();
    for (std::uint64_t at = row.begin; at < row.end; at += piece_elements) {
      const std::uint64_t stop = std::min(row.end, at + piece_elements);
      const std::uint64_t good = encode(WindowRun{at, stop, row.matrix});
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
void add_exact_scales(const QuantizedLayout& form, const WindowRun& run, const float* numbers,
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
  return by_runs(form, begin, end, form.matrix_elements(), [&](const WindowRun& run) {
    const std::byte* const from = numbers + (run.begin - begin) * bytes;
    if (!exact.empty()) add_exact_scales(form, run, floats_at(from), exact[run.matrix]);
    return join_amax(form.dtype, from, run.size(), amax[run.matrix]);
  });
}

namespace {

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
  return by_runs(form, cut.begin, cut.end, form.columns, [&](const WindowRun& row) {
    float amax = 0;
    (void)join_amax(form.dtype, cut.numbers_at(row.begin), row.size(), amax);
    const BlockValues values = {floats_at(cut.numbers_at(row.begin)), row.size()};
    const ScaledRun run = run_of(form, scale_of(form, amax, values));
    store_scale(dtype, run.scale, cut.part_at(1, row.begin));
    return encode_bytes(run, cut.numbers_at(row.begin), row.size(), cut.part_at(0, row.begin));
  });
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
  return by_runs(cut.form, cut.begin, cut.end, cut.form.matrix_elements(),
                 [&](const WindowRun& run) {
                   const float scale = scale_of(cut.form, matrices, run.matrix);
                   return encode_bytes(run_of(cut.form, scale), cut.numbers_at(run.begin),
                                       run.size(), cut.part_at(0, run.begin));
                 });
}

std::uint64_t encode_rows(const Encoded& cut, const MatrixStatistics& matrices) {
  const QuantizedLayout& form = cut.form;
  const bool is_compressed = form.dialect == QuantizeDialect::compressed;
  return by_runs(form, cut.begin, cut.end, form.columns, [&](const WindowRun& row) {
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
  return by_pieces(form, cut.begin, cut.end, [&](const WindowRun& run) {
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

std::uint64_t encode_groups(const Encoded& cut) {
  const QuantizedLayout& form = cut.form;
  const std::uint64_t count = cut.end - cut.begin;
  const auto good = encode_int4_groups(form.dtype, form.group_size, cut.numbers, count,
                                       cut.parts[0], cut.parts[1]);
  if (form.exact_first) {
    scaled::encode_int4_groups_exactly(form.group_size, floats_at(cut.numbers), count, cut.parts[0],
                                       cut.parts[1]);
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
    case QuantizeKind::int4_packed:
      return begin + encode_groups(cut);
    case QuantizeKind::int4_awq:
      return by_runs(form, begin, end, 2 * form.columns,
                     [&](const WindowRun& rows) { return encode_row_pair(cut, rows.begin); });
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

}  // namespace loadstone
