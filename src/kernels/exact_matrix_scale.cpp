#include "kernels/exact_matrix_scale.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <tuple>

#include "kernels/exact_scale.h"

namespace loadstone {

namespace {

constexpr unsigned mantissa_bits = 23;
constexpr std::uint32_t one_bits = 127u << mantissa_bits;
constexpr std::uint32_t mantissa_mask = (1u << mantissa_bits) - 1;
// A code is an integer from 8 to 15 times a power of two, and a multiple of 2^-9.
constexpr unsigned code_least = 8;
constexpr unsigned code_most = 15;
constexpr int code_exponent = 3;
constexpr int lowest_bit = -9;
constexpr float largest_code = 448;
// The codes of a block's largest magnitude, times the scales next to each quotient.
constexpr std::size_t block_scales_max = 2 * 3;

std::uint32_t bits_of(float value) noexcept { return std::bit_cast<std::uint32_t>(value); }

bool is_normal_magnitude(float value) noexcept {
  return value >= std::numeric_limits<float>::min() && value <= std::numeric_limits<float>::max();
}

// Returns the significand of a normal magnitude, in [1, 2).
float significand_of(float magnitude) noexcept {
  return std::bit_cast<float>((bits_of(magnitude) & mantissa_mask) | one_bits);
}

constexpr int exponent_of(std::uint32_t bits) noexcept {
  return static_cast<int>(bits >> mantissa_bits) - 127;
}

}  // namespace

bool ExactScales::fit(Part part, Candidate& candidate) noexcept {
  bool is_fitting = false;
  float top = 0;
  int low = 0;
  for (const float number : part) {
    const float significand = significand_of(number);
    // Rounds the quotient to the four bits of a code.
    const std::uint32_t quotient = bits_of(significand / candidate.significand) + (1u << 19);
    const unsigned code = code_least + ((quotient & mantissa_mask) >> 20);
    const int exponent = exponent_of(quotient);  // -1, 0 or 1
    const float product = static_cast<float>(code) / code_least * candidate.significand;
    // The product by a power of two is exact.
    const std::uint32_t shifted =
        bits_of(product) + (static_cast<std::uint32_t>(exponent) << mantissa_bits);
    if (shifted != bits_of(significand)) continue;
    const int lowest =
        exponent_of(bits_of(number)) + exponent - code_exponent + std::countr_zero(code);
    top = is_fitting ? std::min(top, number) : number;
    low = is_fitting ? std::max(low, lowest) : lowest;
    is_fitting = true;
  }
  if (!is_fitting) return false;
  const bool is_first = candidate.top == 0;
  candidate.top = std::max(candidate.top, top);
  candidate.low = is_first ? low : std::min(candidate.low, low);
  return true;
}

// Finds all significands that fit() accepts: they are the nearest floats to number / code, or next
// to them, because a step of the product is less than three steps of the scale.
void ExactScales::begin(Part part) noexcept {
  has_parts_ = true;
  for (const float number : part) {
    const float significand = significand_of(number);
    for (unsigned i = code_least; i <= code_most; ++i) {
      const float code = static_cast<float>(i) / code_least;
      const std::uint32_t middle = bits_of(significand / code);
      for (const std::uint32_t bits : {middle - 1, middle, middle + 1}) {
        const auto near = std::bit_cast<float>(bits);
        if (code * near != significand) continue;
        Candidate candidate = {.significand = significand_of(near)};
        const auto known = std::span(candidates_).first(count_);
        if (std::ranges::count(known, candidate.significand, &Candidate::significand) > 0) continue;
        if (fit(part, candidate)) candidates_[count_++] = candidate;
      }
    }
  }
}

void ExactScales::add(Part part) noexcept {
  if (!has_parts_) return begin(part);
  std::uint32_t kept = 0;
  for (std::uint32_t i = 0; i < count_; ++i) {
    Candidate candidate = candidates_[i];
    if (fit(part, candidate)) candidates_[kept++] = candidate;
  }
  count_ = kept;
}

void ExactScales::add_values(std::span<const float> values) noexcept {
  for (const float value : values) {
    if (value == 0) continue;
    const float magnitude = std::abs(value);
    if (!is_normal_magnitude(magnitude)) {
      has_all_ = false;
      continue;
    }
    add({&magnitude, 1});
    if (count_ == 0) return;
  }
}

void ExactScales::add_block(std::span<const float> values) noexcept {
  if (has_parts_ && count_ == 0) return;
  if (std::ranges::all_of(values, [](float value) { return value == 0; })) return;
  std::array<float, block_scales_max> scales;
  const std::size_t count =
      exact_scales({.codes = CodeSet::e2m1}, {values.data(), values.size()}, scales);
  const auto end = std::remove_if(scales.begin(), scales.begin() + count,
                                  [](float scale) { return !is_normal_magnitude(scale); });
  if (end == scales.begin()) {
    has_all_ = false;
  } else {
    add({scales.begin(), end});
  }
}

void ExactScales::join(const ExactScales& other) noexcept {
  has_all_ = has_all_ && other.has_all_;
  if (!other.has_parts_) return;
  if (!has_parts_) {
    const bool has_all = has_all_;
    *this = other;
    has_all_ = has_all;
    return;
  }
  std::uint32_t kept = 0;
  for (Candidate candidate : std::span(candidates_).first(count_)) {
    const auto others = std::span(other.candidates_).first(other.count_);
    const auto same = std::ranges::find(others, candidate.significand, &Candidate::significand);
    if (same == others.end()) continue;
    candidate.top = std::max(candidate.top, same->top);
    candidate.low = std::min(candidate.low, same->low);
    candidates_[kept++] = candidate;
  }
  count_ = kept;
}

float ExactScales::scale(float largest, bool needs_all) const noexcept {
  float best = 0;
  std::tuple<bool, bool, float> best_rank;
  for (const Candidate& candidate : std::span(candidates_).first(count_)) {
    const float top = std::max(candidate.top, largest);
    int exponent = std::ilogb(top / candidate.significand) - std::ilogb(largest_code);
    if (std::ldexp(candidate.significand, exponent) * largest_code < top) ++exponent;
    const float scale = std::ldexp(candidate.significand, exponent);
    const bool is_all = has_all_ && candidate.low - exponent >= lowest_bit;
    if (!is_normal_magnitude(scale) || (needs_all && !is_all)) continue;
    // Prefers powers of two, because their reciprocals, which some files store, are exact.
    const bool is_power = candidate.significand == 1;
    const std::tuple rank(is_all, is_power, -candidate.significand);
    if (best != 0 && rank < best_rank) continue;
    best = scale;
    best_rank = rank;
  }
  return best;
}

}  // namespace loadstone
