#include "kernels/exact_scale.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "kernels/gguf/tables.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/exact_scale.cpp"
#include <hwy/foreach_target.h>
// Highway requires this include after foreach_target.h.
#include <hwy/highway.h>

#include "kernels/modelopt/small_inl.h"
#include "kernels/numbers_inl.h"

HWY_BEFORE_NAMESPACE();
namespace loadstone::simd::HWY_NAMESPACE {
namespace {

// Returns the values of E2M1 codes without sign.
HWY_INLINE VF positive_of_e2m1(V codes) {
  const V shifted = hn::ShiftLeft<22>(codes);
  const V base = all(127u << 23);
  const V small = subtract_floats(hn::Add(shifted, base), base);
  const V large = hn::Add(shifted, all(126u << 23));
  return hn::BitCast(F32(), where_greater(all(2u << 22), shifted, small, large));
}

// Each of these functions returns the value of the code nearest to a quotient, and sets the code as
// the byte to store.

HWY_INLINE VF nearest_integer_value(VF quotient, float least, float most, V& code) {
  const VF limited = hn::Min(hn::Max(quotient, hn::Set(F32(), least)), hn::Set(F32(), most));
  const auto whole = hn::NearestInt(limited);
  code = hn::And(hn::BitCast(U32(), whole), all(0xff));
  return hn::ConvertTo(F32(), whole);
}

HWY_INLINE VF nearest_iq4_value(VF quotient, V& code) {
  code = all(0);
  VF value = hn::Set(F32(), iq4_values[0]);
  for (std::size_t i = 1; i < iq4_values.size(); ++i) {
    const auto next = static_cast<float>(iq4_values[i]);
    const float middle = (static_cast<float>(iq4_values[i - 1]) + next) / 2;
    const auto is_above = hn::Ge(quotient, hn::Set(F32(), middle));
    value = hn::IfThenElse(is_above, hn::Set(F32(), next), value);
    code =
        hn::IfThenElse(hn::RebindMask(U32(), is_above), all(static_cast<std::uint32_t>(i)), code);
  }
  return value;
}

HWY_INLINE VF nearest_float_value(VF quotient, bool is_e4m3, V& code) {
  const V bits = hn::BitCast(U32(), quotient);
  const V sign = hn::ShiftRight<31>(bits);
  V magnitude;
  if (is_e4m3) {
    code = e4m3_of_bits(bits);
    magnitude = hn::BitCast(U32(), positive_of_e4m3(hn::And(code, all(0x7f))));
  } else {
    const V positive = e2m1_of_bits(bits);
    magnitude = hn::BitCast(U32(), positive_of_e2m1(positive));
    code = hn::Or(positive, hn::ShiftLeft<3>(sign));
  }
  return hn::BitCast(F32(), hn::Or(magnitude, hn::ShiftLeft<31>(sign)));
}

template <CodeSet codes, bool is_inverse>
HWY_INLINE VF nearest_value_of(VF values, VF scale, V& code) {
  const VF quotient = is_inverse ? hn::Mul(values, scale) : hn::Div(values, scale);
  switch (codes) {
    case CodeSet::int4:
      return nearest_integer_value(quotient, -8.0f, 7.0f, code);
    case CodeSet::int5:
      return nearest_integer_value(quotient, -16.0f, 15.0f, code);
    case CodeSet::int8:
      return nearest_integer_value(quotient, -128.0f, 127.0f, code);
    case CodeSet::iq4:
      return nearest_iq4_value(quotient, code);
    case CodeSet::e4m3:
    case CodeSet::e2m1:
      break;
  }
  return nearest_float_value(quotient, codes == CodeSet::e4m3, code);
}

template <CodeSet codes, bool is_inverse>
HWY_INLINE bool fits_vector(VF values, float scale) {
  const VF scales = hn::Set(F32(), scale);
  V code;
  const VF value = nearest_value_of<codes, is_inverse>(values, scales, code);
  const VF decoded = is_inverse ? hn::Div(value, scales) : hn::Mul(value, scales);
  return hn::AllTrue(F32(), hn::Eq(decoded, values));
}

// Calls run(vector, index, size) for each vector of values. Repeats the first value to fill the
// last vector.
template <class Run>
HWY_INLINE bool all_vectors(const float* values, std::uint64_t count, Run run) {
  const std::size_t lanes = hn::Lanes(F32());
  std::uint64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    if (!run(hn::LoadU(F32(), values + i), i, lanes)) return false;
  }
  if (i == count) return true;
  std::array<float, 16> rest;
  rest.fill(values[i]);
  std::copy_n(values + i, count - i, rest.begin());
  return run(hn::LoadU(F32(), rest.data()), i, static_cast<std::size_t>(count - i));
}

template <CodeSet codes, bool is_inverse>
bool fits_run(float scale, const float* values, std::uint64_t count) {
  return all_vectors(values, count, [&](VF vector, std::uint64_t, std::size_t) {
    return fits_vector<codes, is_inverse>(vector, scale);
  });
}

template <CodeSet codes, bool is_inverse>
void write_run(float scale, const float* values, std::uint64_t count, std::uint8_t* to) {
  (void)all_vectors(values, count, [&](VF vector, std::uint64_t at, std::size_t size) {
    V code;
    (void)nearest_value_of<codes, is_inverse>(vector, hn::Set(F32(), scale), code);
    std::array<std::byte, 16> bytes;
    write_u8(code, bytes.data());
    std::memcpy(to + at, bytes.data(), size);
    return true;
  });
}

// Calls `run` with the code set and is_inverse as template arguments. Only int4 is ever inverse.
template <class Run>
auto with_codes(CodeSet codes, bool is_inverse, Run run) {
  if (is_inverse) return run.template operator()<CodeSet::int4, true>();
  switch (codes) {
    case CodeSet::e2m1:
      return run.template operator()<CodeSet::e2m1, false>();
    case CodeSet::int4:
      return run.template operator()<CodeSet::int4, false>();
    case CodeSet::int5:
      return run.template operator()<CodeSet::int5, false>();
    case CodeSet::int8:
      return run.template operator()<CodeSet::int8, false>();
    case CodeSet::iq4:
      return run.template operator()<CodeSet::iq4, false>();
    case CodeSet::e4m3:
      break;
  }
  return run.template operator()<CodeSet::e4m3, false>();
}

bool Fits(CodeSet codes, bool is_inverse, float scale, const float* values, std::uint64_t count) {
  return with_codes(codes, is_inverse, [&]<CodeSet set, bool inverse>() {
    return fits_run<set, inverse>(scale, values, count);
  });
}

void Write(CodeSet codes, bool is_inverse, float scale, const float* values, std::uint64_t count,
           std::uint8_t* to) {
  with_codes(codes, is_inverse, [&]<CodeSet set, bool inverse>() {
    write_run<set, inverse>(scale, values, count, to);
  });
}

float Largest(const float* values, std::uint64_t count) {
  return largest_magnitude<Dtype::f32>(reinterpret_cast<const std::byte*>(values), count);
}

}  // namespace
}  // namespace loadstone::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace loadstone::simd {

HWY_EXPORT(Fits);
HWY_EXPORT(Write);
HWY_EXPORT(Largest);

namespace {

bool fits(const BlockArithmetic& block, float scale, const BlockValues& values) noexcept {
  for (std::uint64_t row = 0; row < values.rows; ++row) {
    const float* const from = values.values + row * values.stride;
    if (!HWY_DYNAMIC_DISPATCH(Fits)(block.codes, block.is_inverse, scale, from, values.columns)) {
      return false;
    }
  }
  return true;
}

void write(const BlockArithmetic& block, float scale, std::span<const float> values,
           std::uint8_t* codes) noexcept {
  HWY_DYNAMIC_DISPATCH(Write)
  (block.codes, block.is_inverse, scale, values.data(), values.size(), codes);
}

float largest(const float* values, std::uint64_t count) noexcept {
  return HWY_DYNAMIC_DISPATCH(Largest)(values, count);
}

}  // namespace
}  // namespace loadstone::simd

namespace loadstone {

namespace {

// Codes that the largest magnitude of a block can have, so that they determine its scale. A code
// set of floats contains half of each code. Therefore the codes of one binade are enough if the
// dtype of the scale has a wide range; 480 is not a code of E4M3, but 240 is.
constexpr std::array e4m3_tops = {448.0f, 416.0f, 384.0f, 352.0f, 320.0f, 288.0f, 256.0f, 240.0f};
constexpr std::array e2m1_tops = {6.0f, 4.0f, 3.0f, 2.0f, 1.5f, 1.0f, 0.5f};

// Returns -2^bits/2, and all positive integers, the largest first.
template <int most>
constexpr auto integer_tops() {
  std::array<float, most + 1> tops{};
  tops[0] = -static_cast<float>(most + 1);
  for (int i = 0; i < most; ++i) tops[i + 1] = static_cast<float>(most - i);
  return tops;
}
constexpr auto int4_tops = integer_tops<7>();
constexpr auto int5_tops = integer_tops<15>();
constexpr auto int8_tops = integer_tops<127>();
constexpr auto iq4_tops = [] {
  std::array<float, simd::iq4_values.size()> tops{};
  std::ranges::copy(simd::iq4_values, tops.begin());
  std::ranges::sort(tops, [](float a, float b) { return std::max(a, -a) > std::max(b, -b); });
  return tops;
}();

std::span<const float> tops_of(const BlockArithmetic& block) noexcept {
  switch (block.codes) {
    case CodeSet::e4m3:
      return e4m3_tops;
    case CodeSet::e2m1:
      return std::span(e2m1_tops).first(block.scale == Dtype::f32 ? 2 : e2m1_tops.size());
    case CodeSet::int4:
      return int4_tops;
    case CodeSet::int5:
      return int5_tops;
    case CodeSet::int8:
      return int8_tops;
    case CodeSet::iq4:
      break;
  }
  return iq4_tops;
}

// Returns the scale in the arithmetic of the values.
float effective(const BlockArithmetic& block, float stored) noexcept {
  return block.scale == Dtype::f8_e4m3 ? stored * block.outer : stored;
}

// Calls visit(scale) for each stored scale near `ratio` with which `code` decodes to the magnitude
// `most`, until it returns true. Returns true if a call did.
template <class Visit>
bool visit_near(const BlockArithmetic& block, float ratio, float code, float most, Visit visit) {
  const auto decodes = [&](float stored) {
    const float scale = effective(block, stored);
    return std::abs(block.is_inverse ? code / scale : code * scale) == most;
  };
  const auto bits = std::bit_cast<std::uint32_t>(ratio);
  switch (block.scale) {
    case Dtype::f32:
      // The ratio is rounded, so the scale may be one of its neighbours.
      for (const std::uint32_t near : {bits, bits + 1, bits - 1}) {
        const float scale = std::bit_cast<float>(near);
        if (scale != 0 && decodes(scale) && visit(scale)) return true;
      }
      return false;
    case Dtype::f16:
      ratio = std::bit_cast<float>(number::f32_from_f16(number::f16_from_f32(bits)));
      break;
    case Dtype::f8_e4m3:
      ratio = std::bit_cast<float>(number::f32_from_f8_e4m3(
          number::f8_e4m3_from_f32(std::bit_cast<std::uint32_t>(ratio / block.outer))));
      break;
    default:  // F8_E8M0: a power of two, of which the smallest is 2^-127
      if ((bits & 0x7fffffu) != 0 && bits != 0x400000u) return false;
  }
  return ratio != 0 && decodes(ratio) && visit(ratio);
}

// Returns the first value with the largest magnitude, or for codes with signs its magnitude; 0 if a
// value is not finite.
float extreme_of(CodeSet codes, const BlockValues& block) noexcept {
  float most = 0;
  for (std::uint64_t row = 0; row < block.rows; ++row) {
    most = std::max(most, simd::largest(block.values + row * block.stride, block.columns));
  }
  if (!std::isfinite(most) || most == 0) return 0;
  const bool has_signs = codes == CodeSet::e4m3 || codes == CodeSet::e2m1;
  if (has_signs) return most;
  for (std::uint64_t row = 0; row < block.rows; ++row) {
    for (std::uint64_t i = 0; i < block.columns; ++i) {
      const float value = block.values[row * block.stride + i];
      if (std::abs(value) == most) return value;
    }
  }
  return most;
}

}  // namespace

std::size_t exact_scales(const BlockArithmetic& block, const BlockValues& values,
                         std::span<float> found) noexcept {
  const float extreme = extreme_of(block.codes, values);
  std::size_t count = 0;
  if (extreme == 0) return count;
  const auto take = [&](float stored) {
    if (simd::fits(block, effective(block, stored), values)) found[count++] = stored;
    return count == found.size();
  };
  for (const float code : tops_of(block)) {
    float ratio = block.is_inverse ? code / extreme : extreme / code;
    if (ratio < 0 && !block.has_signed_scale) {
      if (code < 0) continue;  // the set has no such positive code
      ratio = -ratio;
    }
    if (visit_near(block, ratio, code, std::abs(extreme), take)) break;
  }
  return count;
}

std::optional<float> exact_scale(const BlockArithmetic& block, const BlockValues& values) noexcept {
  float scale = 0;
  return exact_scales(block, values, {&scale, 1}) > 0 ? std::optional(scale) : std::nullopt;
}

void write_codes(const BlockArithmetic& block, float scale, std::span<const float> values,
                 std::uint8_t* codes) noexcept {
  simd::write(block, effective(block, scale), values, codes);
}

// ---- Blocks with a scale and a minimum

namespace {

bool is_f16(double value) noexcept {
  const auto single = static_cast<float>(value);
  const auto half = number::f16_from_f32(std::bit_cast<std::uint32_t>(single));
  return std::bit_cast<float>(number::f32_from_f16(half)) == value && std::isfinite(value);
}

std::uint8_t affine_code(const AffineScale& scale, float value, int top) noexcept {
  if (scale.scale == 0) return 0;
  const float code = std::nearbyint((value - scale.minimum) / scale.scale);
  return static_cast<std::uint8_t>(std::clamp(code, 0.0f, static_cast<float>(top)));
}

bool fits_affine(const AffineScale& scale, int top, std::span<const float> values) noexcept {
  return std::ranges::all_of(values, [&](float value) {
    const auto code = static_cast<float>(affine_code(scale, value, top));
    return code * scale.scale + scale.minimum == value;
  });
}

}  // namespace

std::optional<AffineScale> exact_affine(int top, std::span<const float> values) noexcept {
  const auto [least, most] = std::ranges::minmax(values);
  if (!std::isfinite(least) || !std::isfinite(most)) return std::nullopt;
  if (least == most) {
    if (is_f16(least)) return AffineScale{0, least};
    for (int code = top; code > 0; --code) {
      const AffineScale scale = {least / static_cast<float>(code), 0};
      if (is_f16(scale.scale) && fits_affine(scale, top, values)) return scale;
    }
    return std::nullopt;
  }
  for (int codes = top; codes > 0; --codes) {
    // The first value has the code `low`, and the last one `low + codes`.
    for (const auto& [first, last] : {std::pair(least, most), std::pair(most, least)}) {
      const double step = (double{last} - double{first}) / codes;
      for (int low = 0; is_f16(step) && low + codes <= top; ++low) {
        const double minimum = first - step * low;
        const AffineScale scale = {static_cast<float>(step), static_cast<float>(minimum)};
        if (is_f16(minimum) && fits_affine(scale, top, values)) return scale;
      }
    }
  }
  return std::nullopt;
}

void write_affine_codes(const AffineScale& scale, int top, std::span<const float> values,
                        std::uint8_t* codes) noexcept {
  for (const float value : values) *codes++ = affine_code(scale, value, top);
}

}  // namespace loadstone
#endif
