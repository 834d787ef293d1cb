// Finds the best scale for a few values (such as the scales of a block), as ggml does for blocks
// with an importance. Sums follow the order of the values.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "kernels/gguf/codes.h"
#include "kernels/gguf/groups.h"

namespace loadstone::simd {

// Runs in which all magnitudes are smaller get scale 0.
inline constexpr float smallest_fitted = 1e-15f;

namespace fits {

// The sums for least squares: of weight * value * code, and of weight * code * code.
struct Sums {
  float lx = 0;
  float l2 = 0;
};

template <std::size_t count>
float error_of(const float* values, const float* weights, float scale, const int* codes) noexcept {
  float error = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const float off = values[i] - scale * static_cast<float>(codes[i]);
    error += weights[i] * off * off;
  }
  return error;
}

// Changes the code of one value if that improves the fit. Returns true if it changed the code.
inline bool refine_code(float value, float weight, int top, int& code, Sums& sums) noexcept {
  const auto old = static_cast<float>(code);
  float lx = sums.lx - weight * value * old;
  float l2 = sums.l2 - weight * old * old;
  if (!(lx > 0 && l2 > 0)) return false;
  const int other = std::min(top, nearest_integer(value * l2 / lx));
  if (other == code) return false;
  lx += weight * value * static_cast<float>(other);
  l2 += weight * static_cast<float>(other) * static_cast<float>(other);
  if (!(lx * lx * sums.l2 > sums.lx * sums.lx * l2)) return false;
  code = byte_of(other);
  sums = {lx, l2};
  return true;
}

}  // namespace fits

// Fits value = scale * code with codes from 0 to `top`. Returns the scale. Codes are stored in
// bytes, as in ggml, so a negative value gets a code that is far too large.
template <std::size_t count>
float fit_positive(const float* values, const float* weights, int top, int* codes) noexcept {
  float most = 0;
  for (std::size_t i = 0; i < count; ++i) most = most > values[i] ? most : values[i];
  std::fill_n(codes, count, 0);
  if (most < smallest_fitted) return 0.0f;
  float inverse = static_cast<float>(top) / most;
  for (std::size_t i = 0; i < count; ++i) {
    codes[i] = byte_of(nearest_integer(inverse * values[i]));
  }
  float least = fits::error_of<count>(values, weights, 1 / inverse, codes);
  for (int step = -4; step <= 4; ++step) {
    if (step == 0) continue;
    const float candidate = (0.1f * static_cast<float>(step) + static_cast<float>(top)) / most;
    std::array<int, count> tried;
    for (std::size_t i = 0; i < count; ++i) {
      tried[i] = std::min(top, nearest_integer(candidate * values[i]));
    }
    const float error = fits::error_of<count>(values, weights, 1 / candidate, tried.data());
    if (error < least) {
      least = error;
      inverse = candidate;
    }
  }
  fits::Sums sums;
  for (std::size_t i = 0; i < count; ++i) {
    const int code = std::min(top, nearest_integer(inverse * values[i]));
    codes[i] = byte_of(code);
    sums.lx += weights[i] * values[i] * static_cast<float>(code);
    sums.l2 += weights[i] * static_cast<float>(code) * static_cast<float>(code);
  }
  bool is_changed = true;
  for (int turn = 0; turn < 5 && is_changed; ++turn) {
    is_changed = false;
    for (std::size_t i = 0; i < count; ++i) {
      is_changed |= fits::refine_code(values[i], weights[i], top, codes[i], sums);
    }
  }
  return sums.l2 > 0 ? sums.lx / sums.l2 : 0.0f;
}

// Fits value = scale * code with codes from -middle to middle - 1. Returns the scale. If the values
// are too small for a scale, all codes are -middle.
template <std::size_t count, int middle>
float fit_around_zero(const float* values, const float* weights, int* codes) noexcept {
  const float extreme = extreme_of(values, count);
  std::fill_n(codes, count, -middle);
  if (std::abs(extreme) < smallest_fitted) return 0.0f;
  float scale = 0;
  float best = 0;
  const auto code_of = [](float inverse, float value) {
    return std::clamp(nearest_integer(inverse * value), -middle, middle - 1);
  };
  const auto try_inverse = [&](float inverse, bool is_first) {
    fits::Sums sums;
    for (std::size_t i = 0; i < count; ++i) {
      const auto code = static_cast<float>(code_of(inverse, values[i]));
      sums.lx += weights[i] * values[i] * code;
      sums.l2 += weights[i] * code * code;
    }
    const bool is_better = sums.l2 > 0 && sums.lx * sums.lx > best * sums.l2;
    if (!is_first && !is_better) return;
    scale = sums.l2 != 0 ? sums.lx / sums.l2 : 0.0f;
    best = scale * sums.lx;
    for (std::size_t i = 0; i < count; ++i) codes[i] = code_of(inverse, values[i]);
  };
  try_inverse(-middle / extreme, true);
  for (int step = -9; step <= 9; ++step) {
    if (step != 0) try_inverse(-(middle + 0.1f * static_cast<float>(step)) / extreme, false);
  }
  return scale;
}

}  // namespace loadstone::simd
