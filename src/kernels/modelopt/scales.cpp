// Computes the scales of modelopt.h from the largest magnitude of their values.
#include "kernels/modelopt/scales.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "kernels/number.h"

namespace loadstone::scaled {

float rounded(Dtype dtype, float value) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if (dtype == Dtype::f16) {
    return std::bit_cast<float>(number::f32_from_f16(number::f16_from_f32(bits)));
  }
  if (dtype != Dtype::bf16) return value;
  const std::uint32_t half = number::bf16_from_f32(bits, number::bf16_nan_scalar);
  return std::bit_cast<float>(half << 16);
}

namespace {

// Returns the value of `dtype` next to a positive scale: `step` is 1 for the next larger value, or
// -1 for the next smaller one.
float neighbour(Dtype dtype, float value, int step) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if (dtype == Dtype::f16) {
    const auto half = static_cast<std::uint16_t>(number::f16_from_f32(bits) + step);
    return std::bit_cast<float>(number::f32_from_f16(half));
  }
  const std::uint32_t unit = dtype == Dtype::bf16 ? 1u << 16 : 1u;
  return std::bit_cast<float>(step < 0 ? bits - unit : bits + unit);
}

Dtype dtype_of_scales(const QuantizedLayout& form) noexcept {
  return form.dialect == QuantizeDialect::compressed ? form.dtype : Dtype::f32;
}

}  // namespace

float scale_of(const QuantizedLayout& form, float amax, float most) noexcept {
  const Dtype dtype = dtype_of_scales(form);
  float scale = rounded(dtype, amax / most);
  if (!(scale > 0)) return 1.0f;
  // An `amax` above the limit can only come from other tensors that share the scale.
  const float limit = most_finite(form.dtype);
  if (most * scale <= limit || amax > limit) return scale;
  // For I8, 128 * scale must be finite too, because a smaller scale can yield the code -128.
  const float reach = form.kind == QuantizeKind::int8_channel ? most + 1 : most;
  while (!(reach * scale <= limit)) scale = neighbour(dtype, scale, -1);
  return scale;
}

float inverse_int4_scale(bool is_exact, Dtype dtype, float amax) noexcept {
  if (amax == 0) return 1.0f;
  const Dtype stored = is_exact ? Dtype::f32 : dtype;
  float scale = is_exact ? 7.0f / amax : rounded(dtype, 7.0f * rounded(dtype, 1.0f / amax));
  // If 7 / amax is infinite, uses the largest finite value.
  if (!std::isfinite(scale)) {
    return stored == Dtype::f16    ? 65504.0f
           : stored == Dtype::bf16 ? std::bit_cast<float>(0x7f7f0000u)
                                   : std::numeric_limits<float>::max();
  }
  while (!(7.0f / scale <= most_finite(dtype))) scale = neighbour(stored, scale, 1);
  return scale;
}

float int4_group_scale(Dtype dtype, float amax) noexcept {
  const bool is_f16 = dtype == Dtype::f16;
  const bool is_bf16 = dtype == Dtype::bf16;
  // The library gives zeros the difference between 1 and the next value of the dtype.
  if (amax == 0) return is_f16 ? 0x1p-10f : is_bf16 ? 0x1p-7f : 0x1p-23f;
  const float scale = rounded(dtype, amax / 7.5f);
  // For a scale that is rounded to 0, the library does the same, which makes all values 0. The
  // smallest scale keeps them.
  if (scale == 0) return is_f16 ? 0x1p-24f : is_bf16 ? 0x1p-133f : 0x1p-149f;
  // -8 times the scale must be finite too.
  const float most = is_f16 ? 0x1p13f : 0x1p125f;
  return scale < most ? scale : neighbour(dtype, most, -1);
}

// Returns true if the largest code is finite, also if files store the reciprocal of the scale.
static bool is_finite_scale_2(const QuantizedLayout& form, float scale) noexcept {
  const float limit = most_finite(form.dtype);
  const bool is_exact = form.dialect == QuantizeDialect::exact;
  const bool divided = !is_exact || 448.0f / (1.0f / scale) * 6.0f <= limit;
  return 448.0f * scale * 6.0f <= limit && divided;
}

float nvfp4_scale_2(const QuantizedLayout& form, float amax) noexcept {
  constexpr float smallest = std::numeric_limits<float>::min();
  const bool is_exact = form.dialect == QuantizeDialect::exact;
  float scale = amax / 2688.0f;
  if (amax > 0 && is_exact) scale = std::max(scale, smallest);
  if (!(scale > 0)) return 1.0f;
  const bool can_be_finite = amax <= most_finite(form.dtype);
  while (can_be_finite && !is_finite_scale_2(form, scale)) scale = neighbour(Dtype::f32, scale, -1);
  return scale;
}

float exact_nvfp4_scale_2(const QuantizedLayout& form, float amax,
                          const ExactScales& exact) noexcept {
  // Slightly less than amax / 6, whose rounding must not double the scale.
  const float scale = exact.scale(amax * 0.16666f, false);
  return is_finite_scale_2(form, scale) ? scale : 0.0f;
}

}  // namespace loadstone::scaled
