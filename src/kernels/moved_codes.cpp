#include "kernels/moved_codes.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <optional>

#include "base/ceil_div.h"
#include "kernels/cast.h"
#include "kernels/gguf/nvfp4_blocks.h"
#include "kernels/modelopt/scales.h"
#include "kernels/nibbles.h"

namespace loadstone {

namespace {

// The codes and scales of an encoding.
struct Stored {
  Dtype scale;
  float most;               // largest magnitude of a code
  bool has_halves = false;  // two codes per byte
  bool has_nan = false;     // codes in F8_E4M3
  bool has_signed_scale = false;
};

std::optional<Stored> stored_by(const QuantizedLayout& form) noexcept {
  switch (form.kind) {
    case QuantizeKind::nvfp4:
    case QuantizeKind::nvfp4_gguf:
      return Stored{Dtype::f8_e4m3, 6, true};
    case QuantizeKind::mxfp4:
      return Stored{Dtype::f8_e8m0, 6, true};
    case QuantizeKind::mxfp8:
      return Stored{.scale = Dtype::f8_e8m0, .most = 448, .has_nan = true};
    case QuantizeKind::fp8:
    case QuantizeKind::fp8_channel:
    case QuantizeKind::fp8_block:
      return Stored{.scale = Dtype::f32, .most = 448, .has_nan = true};
    case QuantizeKind::int8_channel:
      return Stored{Dtype::f32, 128};
    case QuantizeKind::gguf_blocks:
      if (form.block == BlockFormat::mxfp4) return Stored{Dtype::f8_e8m0, 6, true};
      if (form.block == BlockFormat::q4_0) return Stored{Dtype::f16, 8, true, false, true};
      if (form.block == BlockFormat::q8_0) return Stored{Dtype::f16, 128, false, false, true};
      break;
    case QuantizeKind::int4_packed:
      return Stored{Dtype::f32, 8, true, false, true};
    case QuantizeKind::int4:
    case QuantizeKind::int4_awq:
    case QuantizeKind::bnb4:
    case QuantizeKind::bnb_int8:
      break;
  }
  return std::nullopt;
}

// Scales in the dtype in which they are stored.
struct StoredScales {
  std::array<std::byte, moved_scales_max * sizeof(float)> bytes = {};
  std::array<bool, moved_scales_max> fits = {};
  bool all_fit = true;
};

void store_powers(std::span<const float> scales, StoredScales& to) noexcept {
  for (std::size_t i = 0; i < scales.size(); ++i) {
    const auto bits = std::bit_cast<std::uint32_t>(scales[i]);
    to.bytes[i] = static_cast<std::byte>(bits >> 23);
    // 2^-127 is subnormal.
    to.fits[i] = (bits & 0x7fffffu) == 0 ? scales[i] > 0 : bits == 0x400000u;
  }
}

// Stores scales that are values of F8_E4M3. The general cast is several times slower.
void store_e4m3(std::span<const float> scales, StoredScales& to) noexcept {
  constexpr std::uint32_t normal = 0x3c800000u;  // 2^-6
  for (std::size_t i = 0; i < scales.size(); ++i) {
    const auto bits = std::bit_cast<std::uint32_t>(scales[i]);
    const bool is_in_range = scales[i] > 0 && scales[i] <= 448;
    const float small = is_in_range && bits < normal ? scales[i] * 0x1p9f : 0;
    const auto small_code = static_cast<std::int32_t>(small);
    const bool is_exact = static_cast<float>(small_code) == small && (bits & 0xfffffu) == 0;
    to.bytes[i] = static_cast<std::byte>(bits < normal ? static_cast<std::uint32_t>(small_code)
                                                       : (bits >> 20) - (120u << 3));
    to.fits[i] = is_in_range && is_exact;
  }
}

void store_rounded(const Stored& stored, std::span<const float> scales, StoredScales& to) noexcept {
  const Dtype dtype = stored.scale;
  std::array<float, moved_scales_max> back;
  cast_between(Dtype::f32, dtype)
      .run(reinterpret_cast<const std::byte*>(scales.data()), to.bytes.data(), scales.size());
  cast_between(dtype, Dtype::f32)
      .run(to.bytes.data(), reinterpret_cast<std::byte*>(back.data()), scales.size());
  for (std::size_t i = 0; i < scales.size(); ++i) {
    to.fits[i] = back[i] == scales[i] && (stored.has_signed_scale ? scales[i] != 0 : scales[i] > 0);
  }
}

StoredScales stored_scales(const Stored& stored, const MovedRun& run) noexcept {
  StoredScales to;
  const std::span scales(run.scales, ceil_div(run.count, run.per_scale));
  if (stored.scale == Dtype::f8_e8m0) {
    store_powers(scales, to);
  } else if (stored.scale == Dtype::f8_e4m3) {
    store_e4m3(scales, to);
  } else {
    store_rounded(stored, scales, to);
  }
  // Every decoded value must be finite.
  const float most = stored.most * run.outer;
  for (std::size_t i = 0; i < scales.size(); ++i) {
    to.fits[i] &= std::abs(scales[i] * most) <= scaled::most_finite(Dtype::f32);
    to.all_fit &= to.fits[i];
  }
  return to;
}

// Calls write(first block, their number) for each run of blocks whose scales fit.
template <typename Write>
void by_fitting_blocks(const StoredScales& scales, std::uint64_t count, Write write) noexcept {
  if (scales.all_fit) return write(0, count);
  for (std::uint64_t i = 0; i < count; ++i) {
    if (scales.fits[i]) write(i, 1);
  }
}

// Writes blocks of GGUF, in which the scale precedes the codes.
void write_blocks(const Stored& stored, const MovedRun& run, const StoredScales& scales,
                  std::uint64_t first, std::uint64_t count, std::byte* to) noexcept {
  const std::uint64_t size = element_bytes(stored.scale);
  const std::uint64_t code_bytes = stored.has_halves ? run.per_scale / 2 : run.per_scale;
  to += first * (size + code_bytes);
  for (std::uint64_t i = first; i < first + count; ++i) {
    std::memcpy(to, scales.bytes.data() + i * size, size);
    to += size;
    const std::byte* const codes = run.codes + i * code_bytes;
    if (stored.has_halves) {
      nibbles::to_gguf(codes, to);
    } else {
      std::memcpy(to, codes, code_bytes);
    }
    to += code_bytes;
  }
}

// Writes codes and scales into the blocks of NVFP4 in GGUF. `blocks` begin at the element `begin`.
void write_nvfp4_blocks(const MovedRun& run, const StoredScales& scales, std::uint64_t first,
                        std::uint64_t count, std::uint64_t begin, std::byte* blocks) noexcept {
  const std::uint64_t before = (run.begin - begin) / scaled::nvfp4_block;
  for (std::uint64_t i = first; i < first + count; ++i) {
    store_gguf_nvfp4(run.codes + i * nvfp4_code_bytes, scales.bytes[i], blocks, before + i);
  }
}

// Returns the number of bytes of a component from the beginning of the window to an element.
std::array<std::uint64_t, 2> offsets(const QuantizedLayout& form, std::uint64_t begin,
                                     std::uint64_t at) noexcept {
  std::array<PartRange, 3> ranges;
  const auto ranges_to = [&](std::uint64_t end) {
    part_ranges(form, begin, end, std::span(ranges).first(form.parts.size()));
  };
  ranges_to(at);
  const std::uint64_t codes = ranges[0].size();
  if (form.kind != QuantizeKind::fp8_block) return {codes, ranges[1].size()};
  const std::uint64_t row = at / form.columns;
  const std::uint64_t tile_row = row - row % form.rows % scaled::fp8_block;
  ranges_to(tile_row * form.columns);
  return {codes, ranges[1].size() + at % form.columns / scaled::fp8_block * sizeof(float)};
}

}  // namespace

bool holds_moved_codes(const QuantizedLayout& form) noexcept { return stored_by(form).has_value(); }

bool write_codes(const QuantizedLayout& form, std::uint64_t begin, const MovedRun& run,
                 float matrix_scale, std::span<std::byte* const> parts) noexcept {
  const Stored stored = *stored_by(form);
  const bool is_fp8 = form.kind == QuantizeKind::fp8;
  if (form.needs_amax && (is_fp8 ? run.scales[0] : run.outer) != matrix_scale) return false;
  const StoredScales scales = stored_scales(stored, run);
  const auto at = offsets(form, begin, run.begin);
  const std::uint64_t count = ceil_div(run.count, run.per_scale);
  by_fitting_blocks(scales, count, [&](std::uint64_t first, std::uint64_t blocks) {
    if (form.kind == QuantizeKind::nvfp4_gguf) {
      return write_nvfp4_blocks(run, scales, first, blocks, begin, parts[0]);
    }
    if (form.kind == QuantizeKind::gguf_blocks) {
      return write_blocks(stored, run, scales, first, blocks, parts[0] + at[0]);
    }
    const std::uint64_t values =
        std::min(blocks * run.per_scale, run.count - first * run.per_scale);
    const std::uint64_t shift = stored.has_halves ? 1 : 0;
    const std::uint64_t codes = first * run.per_scale >> shift;
    std::memcpy(parts[0] + at[0] + codes, run.codes + codes, values >> shift);
    if (is_fp8) return;
    const std::uint64_t size = element_bytes(stored.scale);
    std::memcpy(parts[1] + at[1] + first * size, scales.bytes.data() + first * size, blocks * size);
  });
  return scales.all_fit;
}

std::uint64_t find_nan_code(const QuantizedLayout& form, const MovedRun& run) noexcept {
  if (!stored_by(form)->has_nan) return run.count;
  const std::span codes(run.codes, run.count);
  const auto is_nan = [](std::byte code) { return (code & std::byte{0x7f}) == std::byte{0x7f}; };
  const auto count = std::ranges::count_if(codes, is_nan);
  if (count == 0) return run.count;
  return static_cast<std::uint64_t>(std::ranges::find_if(codes, is_nan) - codes.begin());
}

}  // namespace loadstone
