// F8_E4M3 with a scale beside it, and the largest magnitudes that scales are made of.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "kernels/modelopt.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/modelopt/fp8.cpp"
#include <hwy/foreach_target.h>
// After foreach_target.h, as Highway demands.
#include <hwy/highway.h>

#include "kernels/modelopt/small_inl.h"
#include "kernels/numbers_inl.h"

HWY_BEFORE_NAMESPACE();
namespace loadstone::simd::HWY_NAMESPACE {

// How many numbers are looked at, and then encoded out of the nearest cache.
constexpr std::uint64_t stretch = 4096;

template <Dtype source, bool rounds>
HWY_INLINE void encode_vector(VF scales, const std::byte* from, std::byte* to) {
  VF values = hn::Div(load_numbers<source>(from), scales);
  if constexpr (rounds) values = round_to<source>(values);
  write_u8(e4m3_of_bits(hn::BitCast(U32(), values)), to);
}

// One after the other: NaNs come in.
template <Dtype source, bool rounds>
void encode_plainly(float scale, const std::byte* from, std::uint64_t count, std::byte* to) {
  for (std::uint64_t i = 0; i < count; ++i) {
    float value = number::load<source>(from + i * number::bytes_of<source>) / scale;
    if constexpr (rounds) {
      std::array<std::byte, number::bytes_of<source>> rounded;
      store_number<source>(rounded.data(), value);
      value = number::load<source>(rounded.data());
    }
    number::store<Dtype::f8_e4m3>(to + i, value, 0);
  }
}

template <Dtype source, bool rounds>
void encode_stretch(float scale, const std::byte* from, std::uint64_t count, std::byte* to) {
  constexpr std::size_t bytes = number::bytes_of<source>;
  const std::size_t lanes = hn::Lanes(F32());
  const VF scales = hn::Set(F32(), scale);
  std::uint64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    encode_vector<source, rounds>(scales, from + i * bytes, to + i);
  }
  if (i < count) encode_plainly<source, rounds>(scale, from + i * bytes, count - i, to + i);
}

template <Dtype source, bool rounds>
std::uint64_t encode_run(float scale, const std::byte* from, std::uint64_t count, std::byte* to) {
  std::uint64_t first_wrong = count;
  for (std::uint64_t at = 0; at < count; at += stretch) {
    const std::uint64_t size = std::min(stretch, count - at);
    const std::byte* const numbers = from + at * number::bytes_of<source>;
    if (HWY_LIKELY(is_finite_number(largest_magnitude<source>(numbers, size)))) {
      encode_stretch<source, rounds>(scale, numbers, size, to + at);
      continue;
    }
    encode_plainly<source, rounds>(scale, numbers, size, to + at);
    if (first_wrong == count) {
      first_wrong = at + find_number<source>(numbers, size,
                                             [](float value) { return !is_finite_number(value); });
    }
  }
  return first_wrong;
}

std::uint64_t Encode(const ScaledRun& run, const std::byte* from, std::uint64_t count,
                     std::byte* to) {
  switch (run.source) {
    case Dtype::f32:
      return encode_run<Dtype::f32, false>(run.scale, from, count, to);
    case Dtype::f16:
      return run.rounds ? encode_run<Dtype::f16, true>(run.scale, from, count, to)
                        : encode_run<Dtype::f16, false>(run.scale, from, count, to);
    default:
      return run.rounds ? encode_run<Dtype::bf16, true>(run.scale, from, count, to)
                        : encode_run<Dtype::bf16, false>(run.scale, from, count, to);
  }
}

template <Dtype source>
std::uint64_t join_run(const std::byte* from, std::uint64_t count, float& amax) {
  std::uint64_t first_wrong = count;
  for (std::uint64_t at = 0; at < count; at += stretch) {
    const std::uint64_t size = std::min(stretch, count - at);
    const std::byte* const numbers = from + at * number::bytes_of<source>;
    const float most = largest_magnitude<source>(numbers, size);
    if (HWY_LIKELY(is_finite_number(most))) {
      amax = std::max(amax, most);
      continue;
    }
    for (std::uint64_t i = 0; i < size; ++i) {
      const float value = number::load<source>(numbers + i * number::bytes_of<source>);
      if (is_finite_number(value)) {
        amax = std::max(amax, std::abs(value));
      } else {
        first_wrong = std::min(first_wrong, at + i);
      }
    }
  }
  return first_wrong;
}

std::uint64_t Join(Dtype source, const std::byte* from, std::uint64_t count, float& amax) {
  switch (source) {
    case Dtype::f32:
      return join_run<Dtype::f32>(from, count, amax);
    case Dtype::f16:
      return join_run<Dtype::f16>(from, count, amax);
    default:
      return join_run<Dtype::bf16>(from, count, amax);
  }
}

}  // namespace loadstone::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace loadstone::simd {

HWY_EXPORT(Encode);
HWY_EXPORT(Join);

// Highway's dispatch is by a name that is looked up here.
std::uint64_t encode_scaled(const ScaledRun& run, const std::byte* numbers, std::uint64_t count,
                            std::byte* data) noexcept {
  return HWY_DYNAMIC_DISPATCH(Encode)(run, numbers, count, data);
}

std::uint64_t join(Dtype source, const std::byte* numbers, std::uint64_t count,
                   float& amax) noexcept {
  return HWY_DYNAMIC_DISPATCH(Join)(source, numbers, count, amax);
}

}  // namespace loadstone::simd

namespace loadstone {

std::uint64_t encode_fp8(const ScaledRun& run, const std::byte* numbers, std::uint64_t count,
                         std::byte* data) noexcept {
  return simd::encode_scaled(run, numbers, count, data);
}

std::uint64_t join_amax(Dtype source, const std::byte* numbers, std::uint64_t count,
                        float& amax) noexcept {
  return simd::join(source, numbers, count, amax);
}

}  // namespace loadstone
#endif
