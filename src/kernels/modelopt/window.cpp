// Windows of a value cut into the runs that kernels of ModelOpt's encodings take.
#include <algorithm>
#include <bit>

#include "kernels/modelopt.h"
#include "kernels/modelopt/scales.h"
#include "kernels/number.h"

namespace loadstone {

namespace scaled {

float rounded(Dtype dtype, float value) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if (dtype == Dtype::f16) {
    return std::bit_cast<float>(number::f32_from_f16(number::f16_from_f32(bits)));
  }
  if (dtype != Dtype::bf16) return value;
  const std::uint32_t half = number::bf16_from_f32(bits, number::bf16_nan_scalar);
  return std::bit_cast<float>(half << 16);
}

float fp8_scale(const QuantizeForm& form, float amax) noexcept {
  float scale = amax / 448.0f;
  if (form.dialect == QuantizeDialect::compressed) scale = rounded(form.dtype, scale);
  return scale > 0 ? scale : 1.0f;
}

float nvfp4_scale_2(float amax) noexcept {
  const float scale = amax / 2688.0f;
  return scale > 0 ? scale : 1.0f;
}

}  // namespace scaled

namespace {

std::uint64_t width(Dtype dtype) { return bits(dtype) / 8; }

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

// Where the numbers from `at` on, the begin of a window or the end of all, stand in a part.
std::uint64_t place_in_part(const QuantizeForm& form, std::size_t part, std::uint64_t at) noexcept {
  const std::uint64_t row = at / form.columns;
  const std::uint64_t rest = at % form.columns;
  if (form.kind == QuantizeKind::fp8) return part == 0 ? at : 0;
  if (part == 2) return 0;
  const std::uint64_t blocks = row * scaled::blocks_of_row(form) + rest / scaled::nvfp4_block;
  return part == 0 ? blocks * 8 : blocks;
}

// A run of numbers that lie in one matrix, or in one row.
struct Run {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
  std::uint64_t matrix = 0;
  [[nodiscard]] std::uint64_t size() const noexcept { return end - begin; }
};

// Calls back with each run of the window that ends where a multiple of `length` does. Returns the
// first of the places that are no run's end.
template <class Encode>
std::uint64_t by_runs(const QuantizeForm& form, std::uint64_t begin, std::uint64_t end,
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

}  // namespace

void scaled_part_ranges(const QuantizeForm& form, std::uint64_t begin, std::uint64_t end,
                        std::span<PartRange> ranges) noexcept {
  for (std::size_t i = 0; i < ranges.size(); ++i) {
    ranges[i] = {place_in_part(form, i, begin), place_in_part(form, i, end)};
  }
}

std::uint64_t measure_window(const QuantizeForm& form, std::uint64_t begin, std::uint64_t end,
                             const std::byte* numbers, std::span<float> amax) noexcept {
  const std::uint64_t bytes = width(form.dtype);
  return by_runs(form, begin, end, form.matrix_elements(), [&](const Run& run) {
    return join_amax(form.dtype, numbers + (run.begin - begin) * bytes, run.size(),
                     amax[run.matrix]);
  });
}

std::uint64_t encode_scaled_window(const QuantizeForm& form, std::uint64_t begin, std::uint64_t end,
                                   const std::byte* numbers, std::span<std::byte* const> parts,
                                   std::span<const float> amax) noexcept {
  const std::uint64_t bytes = width(form.dtype);
  const auto numbers_of = [&](const Run& run) { return numbers + (run.begin - begin) * bytes; };
  const auto part_of = [&](const Run& run, std::size_t part) {
    return parts[part] + (place_in_part(form, part, run.begin) - place_in_part(form, part, begin));
  };
  if (form.kind == QuantizeKind::fp8) {
    const bool rounds = form.dialect != QuantizeDialect::exact;
    return by_runs(form, begin, end, form.matrix_elements(), [&](const Run& run) {
      return encode_fp8({form.dtype, rounds, scaled::fp8_scale(form, amax[run.matrix])},
                        numbers_of(run), run.size(), part_of(run, 0));
    });
  }
  return by_runs(form, begin, end, form.columns, [&](const Run& run) {
    return encode_nvfp4(form.dtype, scaled::nvfp4_scale_2(amax[run.matrix]), numbers_of(run),
                        run.size(), part_of(run, 0), part_of(run, 1));
  });
}

void finish_scaled(const QuantizeForm& form, std::span<std::byte* const> parts,
                   std::span<const float> amax) noexcept {
  if (!form.needs_amax) return;
  const std::size_t last = form.parts.size() - 1;
  const Dtype dtype = form.parts[last].dtype;
  for (std::uint64_t i = 0; i < form.stack; ++i) {
    const float scale = form.kind == QuantizeKind::fp8 ? scaled::fp8_scale(form, amax[i])
                                                       : scaled::nvfp4_scale_2(amax[i]);
    store_scale(dtype, scale, parts[last] + i * width(dtype));
  }
}

}  // namespace loadstone
