#include "codec/block_grid.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <vector>

#include "base/named.h"
#include "kernels/cast.h"

namespace loadstone {

namespace {

constexpr int integer_most = 255;  // 8 bits minus a zero point

constexpr auto integers = [] {
  std::array<float, 2 * integer_most + 1> all{};
  for (int i = -integer_most; i <= integer_most; ++i) {
    all[static_cast<std::size_t>(i + integer_most)] = static_cast<float>(i);
  }
  return all;
}();

std::vector<float> finite_values(Dtype dtype) {
  std::array<std::byte, 256> bytes;
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i);
  std::vector<float> values(bytes.size());
  cast_between(dtype, Dtype::f32)
      .run(bytes.data(), reinterpret_cast<std::byte*>(values.data()), bytes.size());
  std::erase_if(values, [](float value) { return !std::isfinite(value); });
  std::ranges::sort(values);
  const auto twice = std::ranges::unique(values);  // 0 and -0
  values.erase(twice.begin(), twice.end());
  return values;
}

// Returns true if the negative codes of `from` are codes of `to` too.
bool is_mirrored(const BlockGrid& to, const BlockGrid& from) {
  if (from.codes.empty() || from.codes.front() == -from.codes.back()) return true;
  BlockGrid all = from;
  const int most = static_cast<int>(std::max(from.codes.back(), -from.codes.front()));
  all.codes = integer_codes(-most, most);
  return contains_codes(to, all);
}

bool are_same(float factor, float divisor) noexcept {
  return std::ranges::all_of(float_codes(Dtype::f8_e4m3),
                             [&](float scale) { return scale * factor == scale / divisor; });
}

// Returns the reciprocal, or one of the two neighbouring floats: the first for which `is_same`
// returns true. Otherwise returns nullopt.
template <typename IsSame>
std::optional<float> inverse(float number, IsSame is_same) noexcept {
  constexpr float most = std::numeric_limits<float>::max();
  const float nearest = 1.0f / number;
  for (const float each : {nearest, std::nextafter(nearest, 0.0f), std::nextafter(nearest, most)}) {
    if (std::isnormal(each) && is_same(each)) return each;
  }
  return std::nullopt;
}

}  // namespace

std::string_view name(Fidelity fidelity) noexcept {
  return name_among({"exact", "exact where scales fit", "lossy"}, fidelity);
}

std::span<const float> integer_codes(int least, int most) noexcept {
  const auto first = static_cast<std::size_t>(least + integer_most);
  return std::span(integers).subspan(first, static_cast<std::size_t>(most - least) + 1);
}

std::span<const float> float_codes(Dtype dtype) noexcept {
  static const std::vector<float> e4m3 = finite_values(Dtype::f8_e4m3);
  static const std::vector<float> e5m2 = finite_values(Dtype::f8_e5m2);
  if (dtype == Dtype::f8_e4m3) return e4m3;
  if (dtype == Dtype::f8_e5m2) return e5m2;
  return {};
}

bool contains_codes(const BlockGrid& to, const BlockGrid& from) {
  if (to.codes.empty() || from.codes.empty() || (from.has_minimum && !to.has_minimum)) return false;
  const float least = to.has_minimum ? from.codes.front() : 0;
  return std::ranges::any_of(to.codes, [&](float top) {
    const float factor = top / (from.codes.back() - least);
    return factor > 0 && std::ranges::all_of(from.codes, [&](float code) {
             return std::ranges::binary_search(to.codes, (code - least) * factor);
           });
  });
}

bool has_same_codes(const BlockGrid& to, const BlockGrid& from) {
  const auto& codes = from.symmetric_codes.empty() ? from.codes : from.symmetric_codes;
  const bool is_plain = !to.has_minimum && !from.has_minimum && !to.is_flat && !from.is_flat;
  return is_plain && from.product == to.product && std::ranges::equal(codes, to.codes) &&
         (from.scale == Dtype::f8_e4m3) == (to.scale == Dtype::f8_e4m3);
}

bool has_headroom(const BlockGrid& to, const BlockGrid& from) {
  constexpr double share = 0.9;
  const auto has = [&](float code) { return std::ranges::binary_search(to.codes, code); };
  return std::ranges::any_of(to.codes, [&](float top) {
    const float factor = top / from.codes.back();
    const auto fits = [&](float code) { return has(code * factor); };
    if (!(factor > 0) || !std::ranges::all_of(from.codes, fits)) return false;
    const auto count =
        std::ranges::count_if(from.codes, [&](float code) { return has(2 * code * factor); });
    return static_cast<double>(count) >= share * static_cast<double>(from.codes.size());
  });
}

Fidelity fidelity_of_scales(const BlockGrid& from, const BlockGrid& to, bool is_within,
                            bool shares) {
  const bool is_same = from.scale == to.scale && from.product == to.product &&
                       from.divides_scales == to.divides_scales;
  const bool is_power = from.scale == Dtype::f8_e8m0;
  const bool is_half = to.scale == Dtype::f16 || to.scale == Dtype::bf16;
  const bool is_f32 = to.scale == Dtype::f32 && to.product == BlockProduct::code_times_scale &&
                      from.product == BlockProduct::code_times_scale;
  const bool is_signed = from.scale != Dtype::f8_e8m0 && from.scale != Dtype::f8_e4m3;
  const bool may_flip = is_signed && !to.has_signed_scales && !is_mirrored(to, from);
  // A minimum may exceed the range of its dtype even if the scale does not.
  const bool is_kept = (is_f32 || is_same) && !to.has_minimum;
  if (is_within && is_kept && !shares && !may_flip) return Fidelity::exact;
  // Powers of two are often a common multiple. Other scales of several blocks rarely have one.
  const bool may_fit = is_within && (is_half || to.scale == Dtype::f32 || to.scale == from.scale);
  return is_power || may_fit ? Fidelity::exact_where_scales_fit : Fidelity::lossy;
}

std::optional<float> same_divisor(float factor) noexcept {
  return inverse(factor, [&](float divisor) { return are_same(factor, divisor); });
}

std::optional<float> same_factor(float divisor) noexcept {
  return inverse(divisor, [&](float factor) { return are_same(factor, divisor); });
}

double change_of_scales(float factor, float divisor) noexcept {
  double largest = 0;
  for (const float scale : float_codes(Dtype::f8_e4m3)) {
    if (scale == 0) continue;
    const double product = double{scale * factor};
    largest = std::max(largest, std::abs(double{scale / divisor} / product - 1));
  }
  return largest;
}

}  // namespace loadstone
