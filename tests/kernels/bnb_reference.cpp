#include "kernels/bnb_reference.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <random>

#include "kernels/number.h"

namespace loadstone::reference {

namespace {

// FP4 magnitudes, indexed by the three bits below the sign bit.
constexpr std::array<float, 8> fp4_magnitudes = {0.0f,      0.0625f / 12, 8.0f / 12, 1.0f,
                                                 4.0f / 12, 6.0f / 12,    2.0f / 12, 3.0f / 12};

float value_of(Bnb4Code code, unsigned pattern) {
  if (code == Bnb4Code::nf4) return bnb4_values(code)[pattern];
  const float magnitude = fp4_magnitudes[pattern & 7u];
  return pattern > 8 ? -magnitude : magnitude;
}

// Returns the codes sorted by value. Positive zero precedes negative zero.
std::array<unsigned, 16> ascending(Bnb4Code code) {
  std::array<unsigned, 16> patterns{};
  for (unsigned i = 0; i < 16; ++i) patterns[i] = i;
  std::ranges::stable_sort(
      patterns, [&](unsigned a, unsigned b) { return value_of(code, a) < value_of(code, b); });
  return patterns;
}

unsigned code_on_cpu(Bnb4Code code, float scaled) {
  const auto patterns = ascending(code);
  unsigned rank = 0;
  while (rank < 15) {
    const float middle =
        (value_of(code, patterns[rank]) + value_of(code, patterns[rank + 1])) / 2.0f;
    if (scaled <= middle) break;  // NaN is encoded as the last code
    ++rank;
  }
  return patterns[rank];
}

unsigned code_on_cuda(Bnb4Code code, float scaled) {
  if (code == Bnb4Code::nf4) {
    unsigned rank = 0;
    for (unsigned i = 0; i < 15; ++i) {
      rank += scaled > (value_of(code, i) + value_of(code, i + 1)) / 2.0f ? 1u : 0u;
    }
    return rank;
  }
  constexpr std::array<float, 7> pivots = {0.00260417f, 0.0859375f, 0.20833333f, 0.29166667f,
                                           0.4166667f,  0.583333f,  0.8333333f};
  constexpr std::array<unsigned, 8> patterns = {0, 1, 6, 7, 4, 5, 2, 3};
  std::size_t rank = 0;
  for (const float pivot : pivots) rank += std::abs(scaled) > pivot ? 1u : 0u;
  return patterns[rank] + (scaled < 0 ? 8u : 0u);
}

// Returns the largest magnitude, or NaN if any value is NaN.
float largest(const std::vector<float>& numbers, std::size_t begin, std::size_t end) {
  float most = 0;
  for (std::size_t i = begin; i < end; ++i) {
    if (std::isnan(numbers[i])) return std::numeric_limits<float>::quiet_NaN();
    most = std::max(most, std::abs(numbers[i]));
  }
  return most;
}

float as_half(float value) {
  return std::bit_cast<float>(
      number::f32_from_f16(number::f16_from_f32(std::bit_cast<std::uint32_t>(value))));
}

unsigned nearest_in_map(float value) {
  const auto map = bnb_dynamic_map();
  unsigned code = 0;
  while (code < 255 && 0.5f * (map[code] + map[code + 1]) < value) ++code;
  return code;
}

float tie(std::mt19937& random) {
  const auto values = bnb4_values(random() % 2 == 0 ? Bnb4Code::nf4 : Bnb4Code::fp4);
  const float middle = (values[random() % 16] + values[random() % 16]) / 2;
  const auto step = random() % 3;
  return step == 0 ? middle : std::nextafter(middle, step == 1 ? 2.0f : -2.0f);
}

}  // namespace

Encoded encode_4bit(const Bnb4& form, const std::vector<float>& numbers) {
  Encoded encoded;
  std::vector<unsigned> codes;
  const bool on_cpu = form.dialect == BnbDialect::cpu;
  const auto code_of = [&](float scaled) {
    return on_cpu ? code_on_cpu(form.code, scaled) : code_on_cuda(form.code, scaled);
  };
  for (std::size_t begin = 0; begin < numbers.size(); begin += form.block_size) {
    const std::size_t end = std::min(numbers.size(), begin + form.block_size);
    const bool is_whole = end - begin == form.block_size;
    float absmax = largest(numbers, begin, end);
    const float clamped = on_cpu && absmax < 1e-38f ? 1e-38f : absmax;
    if (!is_whole) absmax = clamped;
    encoded.absmax.push_back(absmax);
    for (std::size_t i = begin; i < end; ++i) {
      const bool divides = on_cpu && !is_whole;
      const float scaled = divides ? numbers[i] / clamped : numbers[i] * (1.0f / clamped);
      codes.push_back(code_of(scaled));
    }
  }
  if (codes.size() % 2 != 0) codes.push_back(code_of(0.0f));
  for (std::size_t i = 0; i < codes.size(); i += 2) {
    encoded.data.push_back(static_cast<std::byte>(codes[i] * 16 + codes[i + 1]));
  }
  return encoded;
}

std::vector<float> decode_4bit(const Bnb4& form, const Encoded& encoded, std::size_t count) {
  std::vector<float> numbers;
  for (std::size_t i = 0; i < count; ++i) {
    const auto byte = std::to_integer<unsigned>(encoded.data[i / 2]);
    const unsigned code = i % 2 == 0 ? byte / 16 : byte % 16;
    numbers.push_back(value_of(form.code, code) * encoded.absmax[i / form.block_size]);
  }
  return numbers;
}

Encoded encode_int8(BnbDialect dialect, const std::vector<float>& numbers, std::size_t columns) {
  Encoded encoded;
  std::vector<float> halves;
  for (const float number : numbers) halves.push_back(as_half(number));
  for (std::size_t begin = 0; begin < halves.size(); begin += columns) {
    const float absmax = largest(halves, begin, begin + columns);
    encoded.absmax.push_back(absmax);
    const float factor = dialect == BnbDialect::cpu ? 1.0f / absmax * 127.0f : 127.0f / absmax;
    for (std::size_t i = begin; i < begin + columns; ++i) {
      const float scaled = std::nearbyint(halves[i] * factor);
      const auto code = std::isfinite(scaled) ? static_cast<std::int8_t>(scaled) : std::int8_t{0};
      encoded.data.push_back(static_cast<std::byte>(code));
    }
  }
  return encoded;
}

std::vector<float> decode_int8(const Encoded& encoded, std::size_t columns) {
  std::vector<float> numbers;
  for (std::size_t i = 0; i < encoded.data.size(); ++i) {
    const auto code = static_cast<float>(static_cast<std::int8_t>(encoded.data[i]));
    numbers.push_back(code * encoded.absmax[i / columns] * 0.007874015718698502f);
  }
  return numbers;
}

Encoded encode_nested(BnbDialect dialect, const std::vector<float>& scales, float offset) {
  Encoded encoded;
  for (std::size_t begin = 0; begin < scales.size(); begin += 256) {
    const std::size_t end = std::min(scales.size(), begin + 256);
    std::vector<float> rest;
    for (std::size_t i = begin; i < end; ++i) rest.push_back(scales[i] - offset);
    const float absmax = largest(rest, 0, rest.size());
    encoded.absmax.push_back(absmax);
    for (const float number : rest) {
      unsigned code = dialect == BnbDialect::cpu ? 0 : nearest_in_map(0);
      if (absmax != 0) {
        float scaled = number * (1.0f / absmax);
        if (dialect == BnbDialect::cpu) {
          scaled = std::clamp(scaled, -1.0f, 1.0f);
          const float step = std::floor(std::fma((scaled + 1.0f) * 0.5f, 65535.0f, 0.5f));
          scaled = -1.0f + 2.0f * step / 65535.0f;
        }
        code = nearest_in_map(scaled);
      }
      encoded.data.push_back(static_cast<std::byte>(code));
    }
  }
  return encoded;
}

std::vector<float> decode_nested(const Encoded& encoded, float offset) {
  std::vector<float> scales;
  for (std::size_t i = 0; i < encoded.data.size(); ++i) {
    const float product =
        bnb_dynamic_map()[std::to_integer<std::size_t>(encoded.data[i])] * encoded.absmax[i / 256];
    scales.push_back(product + offset);
  }
  return scales;
}

std::vector<float> ramp(std::size_t count) {
  std::vector<float> numbers;
  for (std::size_t i = 0; i < count; ++i) {
    numbers.push_back(static_cast<float>(static_cast<int>(37 * i % 101) - 50) / 64.0f);
  }
  return numbers;
}

std::vector<float> numbers_of(Kind kind, std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> numbers;
  for (std::size_t i = 0; i < count; ++i) {
    float value = normal(random);
    if (kind == Kind::wide) value = std::ldexp(value, static_cast<int>(random() % 250) - 125);
    if (kind == Kind::small) value = std::ldexp(value, -static_cast<int>(random() % 24));
    if (kind == Kind::ties) value = i % 13 == 0 ? 1.0f : tie(random);
    if (kind == Kind::zeros && (i / 64) % 3 != 1) value = i % 2 == 0 ? 0.0f : -0.0f;
    if (kind == Kind::subnormal) value = std::ldexp(value, -135);
    if (kind == Kind::special && random() % 40 == 0) {
      constexpr std::array<float, 3> specials = {INFINITY, -INFINITY, NAN};
      value = specials[random() % 3];
    }
    numbers.push_back(value);
  }
  return numbers;
}

}  // namespace loadstone::reference
