// Encodes IQ4_NL, IQ4_XS and MXFP4, whose four-bit codes are indices into a table of values.
#include <algorithm>
#include <array>
#include <cmath>

#include "kernels/gguf/codes.h"
#include "kernels/gguf/families.h"
#include "kernels/gguf/tables.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/gguf/encode_table.cpp"
#include <hwy/foreach_target.h>
// Highway requires this include after foreach_target.h.
#include <hwy/highway.h>

#include "kernels/gguf/groups_inl.h"

#ifndef LOADSTONE_KERNELS_GGUF_ENCODE_TABLE_ONCE
#define LOADSTONE_KERNELS_GGUF_ENCODE_TABLE_ONCE

namespace loadstone::simd {

// Returns the midpoint between a value of IQ4 and the next value. ggml instead compares the
// distances to both values. The results are the same, because both distances are exact near the
// midpoint.
constexpr float middle_above(std::size_t code) noexcept {
  return (static_cast<float>(iq4_values[code]) + static_cast<float>(iq4_values[code + 1])) / 2;
}

// Returns the E8M0 byte that ggml computes from the largest magnitude of a block: the base-2
// logarithm is rounded to F32, then rounded down and reduced by 2. Below 2^-125 the exponent is out
// of range and wraps, because ggml stores the low byte of a negative integer.
inline std::uint8_t mxfp4_exponent(float most) noexcept {
  if (!(most > 0)) return 0;
  const auto bits = std::bit_cast<std::uint32_t>(most);
  int exponent = static_cast<int>(bits >> 23) - 127;
  // For magnitudes just below a power of two, F32 rounds the logarithm up to an integer.
  if (exponent == -127 || (bits & 0x7fffffu) >= 0x7fffffu - 63) {
    exponent =
        static_cast<int>(std::floor(static_cast<float>(std::log2(static_cast<double>(most)))));
  }
  return byte_of(exponent - 2 + 127);
}

}  // namespace loadstone::simd
#endif

HWY_BEFORE_NAMESPACE();
namespace loadstone::simd::HWY_NAMESPACE {

// Returns the nearest value of IQ4; for a NaN the last one, as in ggml.
HWY_INLINE VF nearest_value(VF number) {
  VF value = floats(iq4_values[0]);
  for (std::size_t i = 0; i + 1 < iq4_values.size(); ++i) {
    const auto is_below = hn::Lt(number, floats(middle_above(i)));
    value = hn::IfThenElse(is_below, value, floats(iq4_values[i + 1]));
  }
  return value;
}

HWY_INLINE VI nearest_code(VF number) {
  VI code = integers(0);
  for (std::size_t i = 0; i + 1 < iq4_values.size(); ++i) {
    const auto is_below = hn::RebindMask(I32(), hn::Lt(number, floats(middle_above(i))));
    code = hn::Add(code, hn::IfThenZeroElse(is_below, integers(1)));
  }
  return code;
}

template <std::size_t run>
HWY_INLINE void table_sums(const float* numbers, const float* weights, VF inverse, VF& sum_lx,
                           VF& sum_l2) {
  sum_lx = hn::Zero(F32());
  sum_l2 = hn::Zero(F32());
  for (std::size_t i = 0; i < run; ++i) {
    const VF number = row_at(numbers + i * lane_count);
    const VF value = nearest_value(hn::Mul(inverse, number));
    const VF weighted = hn::Mul(row_at(weights + i * lane_count), value);
    sum_lx = hn::Add(sum_lx, hn::Mul(weighted, number));
    sum_l2 = hn::Add(sum_l2, hn::Mul(weighted, value));
  }
}

// Finds the best scale of each run. Candidates are the scales with which the extreme value becomes
// the first value of the table plus an integer from -7 to 7.
template <std::size_t run>
HWY_INLINE void fit_table(const LaneRows<run>& rows, const LaneRows<run>& row_weights,
                          LaneNumbers& scales) {
  const F32 d;
  const VF zero = hn::Zero(d);
  constexpr float first = iq4_values[0];
  for (std::size_t lane = 0; lane < lane_count; lane += hn::Lanes(d)) {
    const float* const numbers = rows.data() + lane;
    const float* const weights = row_weights.data() + lane;
    MaskF is_small;
    VF sum_lx, sum_l2;
    const VF extreme = extremes<run>(numbers, is_small);
    const VF guess = hn::Div(hn::Neg(extreme), floats(first));
    table_sums<run>(numbers, weights, hn::Div(floats(1.0f), guess), sum_lx, sum_l2);
    VF scale = where(hn::Gt(sum_l2, zero), hn::Div(sum_lx, sum_l2), zero);
    VF best = hn::Mul(scale, sum_lx);
    for (int i = -7; i <= 7; ++i) {
      const VF inverse = hn::Div(floats(static_cast<float>(i) + first), extreme);
      table_sums<run>(numbers, weights, inverse, sum_lx, sum_l2);
      const MaskF is_better =
          hn::And(hn::Gt(sum_l2, zero), hn::Gt(square(sum_lx), hn::Mul(best, sum_l2)));
      scale = where(is_better, hn::Div(sum_lx, sum_l2), scale);
      best = where(is_better, hn::Mul(scale, sum_lx), best);
    }
    hn::StoreU(where(is_small, zero, scale), d, scales.data() + lane);
  }
}

template <std::size_t run>
HWY_INLINE void write_table_codes(const LaneRows<run>& rows, const LaneNumbers& inverses,
                                  LaneCodes<run>& codes) {
  for (std::size_t lane = 0; lane < lane_count; lane += hn::Lanes(F32())) {
    const VF inverse = row_at(inverses.data() + lane);
    for (std::size_t i = 0; i < run; ++i) {
      const std::size_t at = i * lane_count + lane;
      store_codes(nearest_code(hn::Mul(inverse, row_at(rows.data() + at))), codes.data() + at);
    }
  }
}

HWY_INLINE float inverse_of(float scale) { return scale != 0 ? 1 / scale : 0.0f; }

// A layout has the members of a group except encode(), and also:
//   store_scales(scales of runs, blocks, inverses)   stores the block except the codes
//   codes_at(run)                                    offset of the 16 bytes of a run's codes
template <class Layout>
struct TableGroup : Layout {
  static constexpr std::size_t run = 32;

  static HWY_INLINE void encode(const GroupNumbers& group, std::byte* to) {
    alignas(64) LaneRows<run> rows;
    alignas(64) LaneRows<run> weights;
    alignas(64) LaneNumbers scales;
    alignas(64) LaneNumbers inverses;
    alignas(64) LaneCodes<run> codes;
    spread_runs<run>(group.numbers, order_of_runs, rows);
    if (group.importance == nullptr) {
      weigh_squares<run>(rows, weights);
    } else {
      LaneNumbers mean_squares;
      constexpr std::size_t runs = Layout::elements / run;
      for (std::size_t i = 0; i < lane_count; i += runs) {
        const float sum = sum_of_squares(group.numbers + i * run, Layout::elements);
        std::fill_n(mean_squares.begin() + i, runs, sum * (2.0f / Layout::elements));
      }
      spread_runs<run>(group.importance, order_of_runs, weights);
      weigh_importance<run>(rows, mean_squares, weights);
    }
    fit_table<run>(rows, weights, scales);
    Layout::store_scales(scales, to, inverses);
    write_table_codes<run>(rows, inverses, codes);
    for (std::size_t i = 0; i < run / 2; ++i) {
      const std::uint8_t* const low = codes.data() + i * lane_count;
      const std::uint8_t* const high = low + run / 2 * lane_count;
      for (std::size_t lane = 0; lane < lane_count; ++lane) {
        to[Layout::codes_at(lane) + i] = std::byte(byte_of(low[lane] | high[lane] << 4));
      }
    }
  }
};

struct Iq4NlLayout {
  static constexpr std::size_t elements = 32;
  static constexpr std::size_t block_bytes = 18;
  static constexpr std::size_t blocks = 16;

  static void store_scales(const LaneNumbers& scales, std::byte* to, LaneNumbers& inverses) {
    for (std::size_t i = 0; i < lane_count; ++i) {
      // If the sums of squares overflow, the scale is NaN, whose sign depends on the processor.
      const float scale = scales[i] == scales[i] ? scales[i] : number::invalid_nan;
      store_f16(to + i * block_bytes, scale);
      inverses[i] = inverse_of(scale);
    }
  }
  static constexpr std::size_t codes_at(std::size_t run) { return run * block_bytes + 2; }
};

struct Iq4XsLayout {
  static constexpr std::size_t elements = 256;
  static constexpr std::size_t block_bytes = 136;
  static constexpr std::size_t blocks = 2;

  static void store_scales(const LaneNumbers& scales, std::byte* to, LaneNumbers& inverses) {
    for (std::size_t block = 0; block < blocks; ++block, to += block_bytes) {
      const float scale = -extreme_of(scales.data() + 8 * block, 8) / 32;
      const float inverse = inverse_of(scale);
      store_f16(to, scale);
      unsigned high = 0;
      std::fill_n(to + 4, 4, std::byte{});
      for (std::size_t i = 0; i < 8; ++i) {
        const int code = std::clamp(nearest_integer(inverse * scales[8 * block + i]), -32, 31);
        inverses[8 * block + i] = inverse_of(scale * static_cast<float>(code));
        const auto stored = static_cast<unsigned>(code + 32);
        to[4 + i / 2] |= std::byte(stored & 15) << (4 * (i % 2));
        high |= stored >> 4 << (2 * i);
      }
      number::store_raw(to + 2, static_cast<std::uint16_t>(high));
    }
  }
  static constexpr std::size_t codes_at(std::size_t run) {
    return run / 8 * block_bytes + 8 + 16 * (run % 8);
  }
};

// Returns the code of the nearest value, and the first one if several are equally near.
HWY_INLINE VI nearest_e2m1(VF number, float scale) {
  VI code = integers(0);
  VF least = hn::Abs(hn::Sub(hn::Zero(F32()), number));
  for (std::size_t i = 1; i < e2m1_doubled.size(); ++i) {
    if (e2m1_doubled[i] == 0) continue;
    const VF value = floats(e2m1_doubled[i] * scale);
    const VF error = hn::Abs(hn::Sub(value, number));
    const MaskF is_less = hn::Lt(error, least);
    least = where(is_less, error, least);
    code = hn::IfThenElse(hn::RebindMask(I32(), is_less), integers(static_cast<int>(i)), code);
  }
  return code;
}

void encode_mxfp4(const float* numbers, std::uint64_t block_count,
                  const BlockImportance* /*importance*/, std::byte* blocks) noexcept {
  constexpr std::size_t elements = 32;
  const F32 d;
  for (std::uint64_t block = 0; block < block_count; ++block, numbers += elements, blocks += 17) {
    VF most = hn::Zero(d);
    for (std::size_t i = 0; i < elements; i += hn::Lanes(d)) {
      most = hn::Max(most, hn::Abs(row_at(numbers + i)));
    }
    const std::uint8_t exponent = mxfp4_exponent(hn::GetLane(hn::MaxOfLanes(d, most)));
    const float scale = half_of_e8m0(exponent);
    std::array<std::uint8_t, elements> codes;
    for (std::size_t i = 0; i < elements; i += hn::Lanes(d)) {
      store_codes(nearest_e2m1(row_at(numbers + i), scale), codes.data() + i);
    }
    blocks[0] = std::byte{exponent};
    for (std::size_t i = 0; i < 16; i += 8) {
      const std::uint64_t high = eight_codes(codes.data() + 16 + i) << 4;
      number::store_raw(blocks + 1 + i, eight_codes(codes.data() + i) | high);
    }
  }
}

template <class Layout>
void encode_by_table(const float* numbers, std::uint64_t block_count,
                     const BlockImportance* importance, std::byte* blocks) noexcept {
  encode_groups<TableGroup<Layout>>(numbers, block_count, importance, blocks);
}

EncodeBlocks FindTableEncoder(BlockFormat format) {
  switch (format) {
    case BlockFormat::iq4_nl:
      return encode_by_table<Iq4NlLayout>;
    case BlockFormat::iq4_xs:
      return encode_by_table<Iq4XsLayout>;
    case BlockFormat::mxfp4:
      return encode_mxfp4;
    default:
      return nullptr;
  }
}

}  // namespace loadstone::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace loadstone::simd {

HWY_EXPORT(FindTableEncoder);

EncodeBlocks table_encoder(BlockFormat format) noexcept {
  return HWY_DYNAMIC_DISPATCH(FindTableEncoder)(format);
}

}  // namespace loadstone::simd
#endif
