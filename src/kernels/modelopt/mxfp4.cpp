// Encodes mxfp4: E2M1 codes in blocks of 32 with a power-of-two scale each. A byte contains two
// codes, the first in the low bits.
#include <algorithm>
#include <array>

#include "kernels/modelopt.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/modelopt/mxfp4.cpp"
#include <hwy/foreach_target.h>
// Highway requires this include after foreach_target.h.
#include <hwy/highway.h>

#include "kernels/modelopt/small_inl.h"
#include "kernels/numbers_inl.h"

HWY_BEFORE_NAMESPACE();
namespace loadstone::simd::HWY_NAMESPACE {
namespace {

// Returns E2M1 codes. The sign bit is set for every value that is not above 0, including +0.
HWY_INLINE V codes_of(VF values) {
  const auto is_positive = hn::RebindMask(U32(), hn::Gt(values, hn::Zero(F32())));
  const V sign = hn::IfThenElse(is_positive, all(0), all(8));
  return hn::Or(e2m1_half_down_of_bits(hn::BitCast(U32(), values)), sign);
}

template <Dtype source>
HWY_INLINE void encode_block(float factor, const std::byte* from, std::byte* to) {
  const VF factors = hn::Set(F32(), factor);
  for (std::size_t i = 0; i < mx_block / 2; i += hn::Lanes(F32())) {
    VF even;
    VF odd;
    load_pairs<source>(from + 2 * i * number::bytes_of<source>, even, odd);
    const V low = codes_of(hn::Mul(even, factors));
    const V high = codes_of(hn::Mul(odd, factors));
    write_u8(hn::Or(low, hn::ShiftLeft<4>(high)), to + i);
  }
}

template <Dtype source>
std::uint64_t encode_blocks(bool is_rounded_log, const std::byte* from, std::uint64_t count,
                            std::byte* to, std::byte* scales) {
  constexpr std::size_t bytes = number::bytes_of<source>;
  std::uint64_t first_wrong = count;
  for (std::uint64_t at = 0; at < count; at += mx_block) {
    const std::byte* numbers = from + at * bytes;
    float most = largest_of<source, mx_block>(numbers);
    std::array<std::byte, mx_block * bytes> changed;
    if (HWY_UNLIKELY(!is_finite_number(most))) {
      most = finite_magnitude<source>(numbers, mx_block);
      if (first_wrong == count) first_wrong = at + find_not_finite<source>(numbers, mx_block);
      zero_nans<source>(numbers, mx_block, changed.data());
      numbers = changed.data();
    }
    const std::uint32_t exponent = mx_exponent<MxType::mxfp4>(most, is_rounded_log);
    scales[at / mx_block] = static_cast<std::byte>(exponent);
    constexpr MxTop top = mx_top<MxType::mxfp4>(source);
    if (HWY_UNLIKELY(exponent >= top.exponent)) {
      limit_magnitudes<source>(top.largest, numbers, mx_block, changed.data());
      numbers = changed.data();
    }
    encode_block<source>(one_by_power(exponent), numbers, to + at / 2);
  }
  return first_wrong;
}

std::uint64_t Encode(Dtype source, bool is_rounded_log, const std::byte* from, std::uint64_t count,
                     std::byte* to, std::byte* scales) {
  return with_numbers(source, [&]<Dtype dtype>() {
    return encode_blocks<dtype>(is_rounded_log, from, count, to, scales);
  });
}

}  // namespace
}  // namespace loadstone::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace loadstone::simd {

HWY_EXPORT(Encode);

std::uint64_t encode_mxfp4_blocks(Dtype source, bool is_rounded_log, const std::byte* numbers,
                                  std::uint64_t count, std::byte* data,
                                  std::byte* scales) noexcept {
  return HWY_DYNAMIC_DISPATCH(Encode)(source, is_rounded_log, numbers, count, data, scales);
}

int rounded_log_up(float value) noexcept {
  if (value == 0) return -127;
  const double log = std::log2(static_cast<double>(value));
  return static_cast<int>(std::ceil(static_cast<float>(log)));
}

}  // namespace loadstone::simd

namespace loadstone {

std::uint64_t encode_mxfp4(Dtype source, bool is_rounded_log, const std::byte* numbers,
                           std::uint64_t count, std::byte* data, std::byte* scales) noexcept {
  return simd::encode_mxfp4_blocks(source, is_rounded_log, numbers, count, data, scales);
}

}  // namespace loadstone
#endif
