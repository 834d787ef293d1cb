// Encodes nested scales: subtracts the mean of all block scales, then stores 8-bit codes with one
// scale per 256 codes.
#include <algorithm>
#include <array>
#include <cmath>

#include "kernels/bnb.h"
#include "kernels/bnb/map_data.h"
#include "kernels/number.h"

namespace loadstone {

namespace {

using simd::bnb_map;

// The code of a value is the number of these thresholds that are below the value.
constexpr auto middles = [] {
  std::array<float, 255> between{};
  for (std::size_t i = 0; i < 255; ++i) between[i] = 0.5f * (bnb_map[i] + bnb_map[i + 1]);
  return between;
}();

std::uint8_t nearest_code(float value) noexcept {
  return static_cast<std::uint8_t>(std::ranges::lower_bound(middles, value) - middles.begin());
}

// bitsandbytes on a CPU divides [-1, 1] into 65,536 steps with one code each. A value gets the code
// of its step, which is not always the nearest code.
constexpr std::size_t step_count = 65536;

const std::array<std::uint8_t, step_count>& codes_of_steps() noexcept {
  static const auto codes = [] {
    std::array<std::uint8_t, step_count> made;
    for (std::size_t i = 0; i < step_count; ++i) {
      made[i] = nearest_code(-1.0f + 2.0f * static_cast<float>(i) / 65535.0f);
    }
    return made;
  }();
  return codes;
}

std::uint8_t code_by_step(float value) noexcept {
  const float clamped = std::clamp(value, -1.0f, 1.0f);
  const float share = (clamped + 1.0f) * 0.5f;
  // The product is exact in F64, so it is rounded once, like a fused multiply-add.
  const auto place = static_cast<float>(static_cast<double>(share) * 65535.0 + 0.5);
  return codes_of_steps()[std::min(static_cast<std::size_t>(place), step_count - 1)];
}

float load(const std::byte* from, std::uint64_t index) noexcept {
  return number::load_raw<float>(from + 4 * index);
}

}  // namespace

std::span<const float, 256> bnb_dynamic_map() noexcept { return bnb_map; }

float bnb_nested_offset(const std::byte* absmax, std::uint64_t count) noexcept {
  double sum = 0;
  for (std::uint64_t i = 0; i < count; ++i) sum += static_cast<double>(load(absmax, i));
  return count == 0 ? 0.0f : static_cast<float>(sum / static_cast<double>(count));
}

void encode_bnb_nested(BnbDialect dialect, const std::byte* absmax, std::uint64_t count,
                       float offset, float most, std::byte* data,
                       std::byte* nested_absmax) noexcept {
  for (std::uint64_t at = 0; at < count; at += bnb_nested_block_size) {
    const std::uint64_t end = std::min(at + bnb_nested_block_size, count);
    float widest = 0;
    for (std::uint64_t i = at; i < end; ++i) {
      widest = std::max(widest, std::abs(load(absmax, i) - offset));
    }
    number::store_raw(nested_absmax + at / bnb_nested_block_size * 4, widest);
    const float factor = 1.0f / widest;
    for (std::uint64_t i = at; i < end; ++i) {
      std::uint8_t code = 0;
      if (widest == 0.0f) {
        code = dialect == BnbDialect::cpu ? std::uint8_t{0} : nearest_code(0.0f);
      } else {
        const float difference = load(absmax, i) - offset;
        const float scaled = std::isfinite(factor) ? difference * factor : difference / widest;
        code = dialect == BnbDialect::cpu ? code_by_step(scaled) : nearest_code(scaled);
        while (code > 0 && !(bnb_map[code] * widest + offset <= most)) --code;
      }
      data[i] = static_cast<std::byte>(code);
    }
  }
}

void decode_bnb_nested(std::uint64_t begin, std::uint64_t end, const std::byte* data,
                       const std::byte* nested_absmax, const std::byte* map, float offset,
                       std::byte* absmax) noexcept {
  const std::uint64_t first_block = begin / bnb_nested_block_size;
  for (std::uint64_t i = begin; i < end; ++i) {
    const float value = load(map, std::to_integer<std::uint64_t>(data[i - begin]));
    const float scale = load(nested_absmax, i / bnb_nested_block_size - first_block);
    number::store_raw(absmax + 4 * (i - begin), value * scale + offset);
  }
}

}  // namespace loadstone
