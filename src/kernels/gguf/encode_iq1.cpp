// Encodes IQ1_S and IQ1_M. Eight values form a point of a grid, whose coordinates are -1, 0 and 1,
// each plus or minus an eighth, times the scale of the values' run.
//
// The search first ignores that not every combination of coordinates is a point. It sorts the
// values of a run and tries every split into three parts: the first part gets -1, the next 0, the
// last 1.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "kernels/gguf/codes.h"
#include "kernels/gguf/families.h"
#include "kernels/gguf/grid_maps.h"
#include "kernels/gguf/scale_fits.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/gguf/encode_iq1.cpp"
#include <hwy/foreach_target.h>
// Highway requires this include after foreach_target.h.
#include <hwy/highway.h>

#include "kernels/gguf/groups_inl.h"
#include "kernels/gguf/nearest_inl.h"

#ifndef LOADSTONE_KERNELS_GGUF_ENCODE_IQ1_ONCE
#define LOADSTONE_KERNELS_GGUF_ENCODE_IQ1_ONCE

namespace loadstone::simd {

// Results for 16 runs, one per lane. Each part of a run adds or subtracts an eighth. Bit
// `parts - 1 - i` of `shifts` is set if part i subtracts it.
template <std::size_t numbers_of_run, std::size_t parts_of_run>
struct Iq1Codes {
  static constexpr std::size_t run = numbers_of_run;
  static constexpr std::size_t parts = parts_of_run;
  static constexpr std::size_t groups = run / 8;
  alignas(64) LaneRows<run> numbers;
  alignas(64) LaneRows<run> weights;
  alignas(64) LaneNumbers scales;
  alignas(64) LaneWords<1> shifts;
  alignas(64) LaneWords<groups> points;  // packed codes of coordinates

  [[nodiscard]] bool is_less(std::size_t lane, std::size_t group) const noexcept {
    const std::size_t part = group * parts / groups;
    return (shifts[lane] >> (parts - 1 - part) & 1) != 0;
  }
  [[nodiscard]] std::uint32_t point(std::size_t lane, std::size_t group) const noexcept {
    return static_cast<std::uint32_t>(points[group * lane_count + lane]);
  }
};

constexpr float first_coordinate(bool is_less) noexcept { return is_less ? -1.125f : -0.875f; }

// Computes the codes of scales, 0 to 7. Code k represents the scale (2 * k + 1) * `scale`.
template <std::size_t count>
inline void odd_scale_codes(const float* scales, float scale, int* codes) noexcept {
  const float inverse = 1 / scale;
  for (std::size_t i = 0; i < count; ++i) {
    codes[i] = std::clamp(nearest_integer(0.5f * (inverse * scales[i] - 1)), 0, 7);
  }
}

struct Iq1SFormat {
  static constexpr std::size_t elements = 256;
  static constexpr std::size_t block_bytes = 50;
  static constexpr float smallest = 1e-12f;
  using Codes = Iq1Codes<32, 1>;

  static void store(const Codes& codes, std::size_t first, std::byte* block) noexcept {
    const auto map = iq1_map();
    const float* const scales = codes.scales.data() + first;
    const float most = *std::max_element(scales, scales + 8);
    std::array<int, 8> scale_codes{};
    store_f16(block, most / 15 * 1.125f);
    if (most != 0) odd_scale_codes<8>(scales, most / 15, scale_codes.data());
    for (std::size_t r = 0; r < 8; ++r) {
      std::uint32_t packed = static_cast<std::uint32_t>(scale_codes[r]) << 12;
      if (most != 0 && codes.is_less(first + r, 0)) packed |= 0x8000u;
      for (std::size_t i = 0; i < 4; ++i) {
        const std::uint32_t index = map.index(codes.point(first + r, i));
        block[2 + 4 * r + i] = static_cast<std::byte>(index);
        packed |= index >> 8 << (3 * i);
      }
      number::store_raw(block + 34 + 2 * r, static_cast<std::uint16_t>(packed));
    }
  }
};

struct Iq1MFormat {
  static constexpr std::size_t elements = 256;
  static constexpr std::size_t block_bytes = 56;
  static constexpr float smallest = 1e-7f;
  using Codes = Iq1Codes<16, 2>;

  static void store(const Codes& codes, std::size_t /*first*/, std::byte* block) noexcept {
    const auto map = iq1_map();
    const float most = *std::max_element(codes.scales.begin(), codes.scales.end());
    std::array<int, 16> scale_codes{};
    std::uint16_t scale = 0;
    if (most != 0) {
      odd_scale_codes<16>(codes.scales.data(), most / 15, scale_codes.data());
      const float fitted = fitted_scale(codes, scale_codes, most / 15) * 1.1125f;
      scale = number::f16_from_f32(std::bit_cast<std::uint32_t>(fitted));
    }
    for (std::size_t i = 0; i < 4; ++i) {
      unsigned packed = (scale >> (4 * i) & 15u) << 12;
      for (std::size_t k = 0; k < 4; ++k) {
        packed |= static_cast<unsigned>(scale_codes[4 * i + k]) << (3 * k);
      }
      number::store_raw(block + 48 + 2 * i, static_cast<std::uint16_t>(packed));
    }
    for (std::size_t r = 0; r < 16; ++r) {
      std::uint32_t highs = 0;
      for (std::size_t i = 0; i < 2; ++i) {
        const std::uint32_t index = map.index(codes.point(r, i));
        const std::uint32_t shift = most != 0 && codes.is_less(r, i) ? 8 : 0;
        block[2 * r + i] = static_cast<std::byte>(index);
        highs |= (index >> 8 | shift) << (4 * i);
      }
      block[32 + r] = static_cast<std::byte>(highs);
    }
  }

 private:
  // Returns the least-squares scale of the whole block, or `scale` if all weights are zero.
  static float fitted_scale(const Codes& codes, const std::array<int, 16>& scale_codes,
                            float scale) noexcept {
    fits::Sums sums;
    for (std::size_t r = 0; r < 16; ++r) {
      const auto factor = static_cast<float>(2 * scale_codes[r] + 1);
      for (std::size_t i = 0; i < 16; ++i) {
        const auto code = codes.point(r, i / 8) >> (2 * (i % 8)) & 3;
        const float coordinate =
            (first_coordinate(codes.is_less(r, i / 8)) + static_cast<float>(code)) * factor;
        const float weighted = codes.weights[i * lane_count + r] * coordinate;
        sums.lx += weighted * codes.numbers[i * lane_count + r];
        sums.l2 += weighted * coordinate;
      }
    }
    return sums.l2 > 0 ? sums.lx / sums.l2 : scale;
  }
};

}  // namespace loadstone::simd
#endif

HWY_BEFORE_NAMESPACE();
namespace loadstone::simd::HWY_NAMESPACE {

// ---- the two splits of a sorted run

// Computes the rank of each value within its lane, ascending. Equal values keep their order.
template <std::size_t run>
HWY_INLINE void rank_numbers(const float* numbers, std::int32_t* ranks) {
  for (std::size_t i = 0; i < run; ++i) {
    hn::StoreU(integers(0), I32(), ranks + i * lane_count);
  }
  for (std::size_t i = 0; i < run; ++i) {
    const VF number = row_at(numbers + i * lane_count);
    VI rank = hn::LoadU(I32(), ranks + i * lane_count);
    for (std::size_t k = i + 1; k < run; ++k) {
      // -1 if value i comes before value k, 0 otherwise.
      const VI is_before = hn::VecFromMask(
          I32(), hn::RebindMask(I32(), hn::Le(number, row_at(numbers + k * lane_count))));
      const VI other = hn::LoadU(I32(), ranks + k * lane_count);
      hn::StoreU(hn::Sub(other, is_before), I32(), ranks + k * lane_count);
      rank = hn::Add(rank, hn::Add(is_before, integers(1)));
    }
    hn::StoreU(rank, I32(), ranks + i * lane_count);
  }
}

// Sums over the first i of the sorted values, for each i from 0 to `run`.
template <std::size_t run>
struct PrefixSums {
  alignas(64) LaneRows<run + 1> numbers;  // sums of weight * value
  alignas(64) LaneRows<run + 1> weights;
};

// Sums the values [begin, end) only. Other values add 0, which leaves each sum unchanged.
template <std::size_t run>
HWY_INLINE void sum_sorted(const float* numbers, const float* weights, const std::int32_t* ranks,
                           std::size_t begin, std::size_t end, PrefixSums<run>& sums) {
  const F32 d;
  sums.numbers.fill(0);
  sums.weights.fill(0);
  for (std::size_t i = begin; i < end; ++i) {
    for (std::size_t lane = 0; lane < hn::Lanes(d); ++lane) {
      const std::size_t at = i * lane_count + lane;
      const std::size_t to = (static_cast<std::size_t>(ranks[at]) + 1) * lane_count + lane;
      sums.numbers[to] = weights[at] * numbers[at];
      sums.weights[to] = weights[at];
    }
  }
  VF number = hn::Zero(d);
  VF weight = number;
  for (std::size_t i = lane_count; i <= run * lane_count; i += lane_count) {
    number = hn::Add(number, row_at(sums.numbers.data() + i));
    weight = hn::Add(weight, row_at(sums.weights.data() + i));
    hn::StoreU(number, d, sums.numbers.data() + i);
    hn::StoreU(weight, d, sums.weights.data() + i);
  }
}

// Keeps the better result. The bits of `choice` are the first split from bit 0, the second split
// from bit 8, and the shifts from bit 16. `chosen` is negative until there is a result.
HWY_INLINE void keep_better(VF sum_lx, VF sum_l2, int choice, VF& best, VF& scale, VI& chosen) {
  const MaskF is_better =
      hn::And(hn::Gt(sum_l2, hn::Zero(F32())), hn::Gt(square(sum_lx), hn::Mul(best, sum_l2)));
  if (HWY_LIKELY(hn::AllFalse(F32(), is_better))) return;
  scale = where(is_better, hn::Div(sum_lx, sum_l2), scale);
  best = where(is_better, hn::Mul(scale, sum_lx), best);
  chosen = hn::IfThenElse(hn::RebindMask(I32(), is_better), integers(choice), chosen);
}

constexpr int choice_of(std::size_t first, std::size_t second, int shifts) {
  return static_cast<int>(first | second << 8) | shifts << 16;
}

// Tries all pairs of splits of the 32 sorted values, with one shift for the whole run.
HWY_INLINE void try_parting(const LaneRows<32>& numbers, const LaneRows<32>& weights,
                            const LaneWords<32>& ranks, std::size_t lane, VF& scale, VI& chosen) {
  constexpr std::size_t run = 32;
  PrefixSums<run> sums;
  sum_sorted<run>(numbers.data() + lane, weights.data() + lane, ranks.data() + lane, 0, run, sums);
  const auto number_sum = [&](std::size_t i) {
    return row_at(sums.numbers.data() + i * lane_count);
  };
  const auto weight_sum = [&](std::size_t i) {
    return row_at(sums.weights.data() + i * lane_count);
  };
  // Contributions of the third part, for each position of the second split and each shift.
  std::array<PrefixSums<run>, 2> lasts;
  for (int less = 0; less < 2; ++less) {
    const VF last = floats(first_coordinate(less != 0) + 2);
    for (std::size_t i = 0; i <= run; ++i) {
      const VF number = hn::Mul(hn::Sub(number_sum(run), number_sum(i)), last);
      const VF weight = hn::Mul(hn::Mul(hn::Sub(weight_sum(run), weight_sum(i)), last), last);
      hn::StoreU(number, F32(), lasts[less].numbers.data() + i * lane_count);
      hn::StoreU(weight, F32(), lasts[less].weights.data() + i * lane_count);
    }
  }
  VF best = floats(-std::numeric_limits<float>::max());
  for (std::size_t i1 = 0; i1 <= run; ++i1) {
    for (std::size_t i2 = i1; i2 <= run; ++i2) {
      const VF number = hn::Sub(number_sum(i2), number_sum(i1));
      const VF weight = hn::Sub(weight_sum(i2), weight_sum(i1));
      for (int less = 0; less < 2; ++less) {
        const VF first = floats(first_coordinate(less != 0));
        const VF middle = floats(first_coordinate(less != 0) + 1);
        VF sum_lx = hn::Add(hn::Mul(number_sum(i1), first), hn::Mul(number, middle));
        VF sum_l2 = hn::Add(hn::Mul(hn::Mul(weight_sum(i1), first), first),
                            hn::Mul(hn::Mul(weight, middle), middle));
        sum_lx = hn::Add(sum_lx, row_at(lasts[less].numbers.data() + i2 * lane_count));
        sum_l2 = hn::Add(sum_l2, row_at(lasts[less].weights.data() + i2 * lane_count));
        keep_better(sum_lx, sum_l2, choice_of(i1, i2, less), best, scale, chosen);
      }
    }
  }
}

// Tries all pairs of splits of the 16 sorted values, with one shift for each half of the run.
// Neighbouring coordinates differ by 1, so the sum of value * coordinate is the last coordinate
// times the sum of all values, minus the prefix sums at both splits.
HWY_INLINE void try_parting(const LaneRows<16>& numbers, const LaneRows<16>& weights,
                            const LaneWords<16>& ranks, std::size_t lane, VF& scale, VI& chosen) {
  constexpr std::size_t run = 16;
  std::array<PrefixSums<run>, 2> sums;
  for (std::size_t half = 0; half < 2; ++half) {
    sum_sorted<run>(numbers.data() + lane, weights.data() + lane, ranks.data() + lane, 8 * half,
                    8 * half + 8, sums[half]);
  }
  // Index 2 * h + s contains the sums for half h and shift s.
  constexpr auto square_of = [](float value) { return value * value; };
  alignas(64) LaneRows<4> number_sums;
  alignas(64) LaneRows<4> weight_sums;
  VF best = floats(-std::numeric_limits<float>::max());
  for (std::size_t i1 = 0; i1 <= run; ++i1) {
    for (std::size_t i2 = i1; i2 <= run; ++i2) {
      for (std::size_t half = 0; half < 2; ++half) {
        const float* const number = sums[half].numbers.data();
        const float* const weight = sums[half].weights.data();
        const VF before =
            hn::Add(row_at(number + i1 * lane_count), row_at(number + i2 * lane_count));
        for (std::size_t less = 0; less < 2; ++less) {
          const float first = first_coordinate(less != 0);
          const VF last = floats(first + 2);
          const VF all_numbers = hn::Mul(row_at(number + run * lane_count), last);
          VF sum = hn::Mul(hn::Mul(row_at(weight + run * lane_count), last), last);
          sum = hn::Add(sum, hn::Mul(row_at(weight + i1 * lane_count),
                                     floats(square_of(first) - square_of(first + 1))));
          sum = hn::Add(sum, hn::Mul(row_at(weight + i2 * lane_count),
                                     floats(square_of(first + 1) - square_of(first + 2))));
          const std::size_t at = (2 * half + less) * lane_count;
          hn::StoreU(hn::Sub(all_numbers, before), F32(), number_sums.data() + at);
          hn::StoreU(sum, F32(), weight_sums.data() + at);
        }
      }
      for (std::size_t k = 0; k < 4; ++k) {
        const std::size_t low = k / 2 * lane_count;
        const std::size_t high = (2 + k % 2) * lane_count;
        const VF sum_lx =
            hn::Add(row_at(number_sums.data() + low), row_at(number_sums.data() + high));
        const VF sum_l2 =
            hn::Add(row_at(weight_sums.data() + low), row_at(weight_sums.data() + high));
        keep_better(sum_lx, sum_l2, choice_of(i1, i2, static_cast<int>(k)), best, scale, chosen);
      }
    }
  }
}

// ---- points

// Packs the codes of coordinates. If the scale is negative, all coordinates change their signs.
template <class Codes>
HWY_INLINE void pack_codes(const std::int32_t* ranks, VI chosen, MaskF is_negative,
                           std::int32_t* points) {
  const VI first = hn::And(chosen, integers(255));
  const VI second = hn::And(hn::ShiftRight<8>(chosen), integers(255));
  const auto is_turned = hn::RebindMask(I32(), is_negative);
  for (std::size_t group = 0; group < Codes::groups; ++group) {
    VI packed = integers(0);
    for (std::size_t i = 0; i < 8; ++i) {
      const VI rank = hn::LoadU(I32(), ranks + (8 * group + i) * lane_count);
      const VI zero_up = hn::IfThenZeroElse(hn::Lt(rank, first), integers(1));
      const VI one_up = hn::IfThenZeroElse(hn::Lt(rank, second), integers(1));
      VI code = hn::Add(zero_up, one_up);
      code = hn::IfThenElse(is_turned, hn::Sub(integers(2), code), code);
      packed = hn::Or(packed, hn::ShiftLeftSame(code, static_cast<int>(2 * i)));
    }
    hn::StoreU(packed, I32(), points + group * lane_count);
  }
}

// Returns the least-squares scale for the points of one lane, or `scale` if it is not positive.
template <class Codes>
HWY_INLINE float fit_to_points(const Codes& codes, std::size_t lane, float scale) {
  fits::Sums sums;
  for (std::size_t i = 0; i < Codes::run; ++i) {
    const auto code = codes.point(lane, i / 8) >> (2 * (i % 8)) & 3;
    const float coordinate =
        first_coordinate(codes.is_less(lane, i / 8)) + static_cast<float>(code);
    const float weighted = codes.weights[i * lane_count + lane] * coordinate;
    sums.lx += weighted * codes.numbers[i * lane_count + lane];
    sums.l2 += weighted * coordinate;
  }
  return sums.lx > 0 && sums.l2 > 0 ? sums.lx / sums.l2 : scale;
}

template <class Codes>
HWY_INLINE void move_run_to_points(const GridMap<Lattice8>& map, std::size_t lane, Codes& codes) {
  bool is_moved = false;
  for (std::size_t group = 0; group < Codes::groups; ++group) {
    const auto near = map.near(codes.point(lane, group));
    if (near.empty()) continue;
    is_moved = true;
    const std::size_t at = 8 * group * lane_count + lane;
    const CodeNumbers values = {first_coordinate(codes.is_less(lane, group)), 1};
    const std::uint32_t point = nearest_point<Lattice8>(
        near, {codes.numbers.data() + at, codes.weights.data() + at}, codes.scales[lane], values);
    codes.points[group * lane_count + lane] = static_cast<std::int32_t>(point);
  }
  if (is_moved) codes.scales[lane] = fit_to_points(codes, lane, codes.scales[lane]);
}

template <class Format>
HWY_INLINE void fit_iq1_lanes(std::size_t lane, typename Format::Codes& codes) {
  using Codes = typename Format::Codes;
  const F32 d;
  const VF zero = hn::Zero(d);
  alignas(64) LaneWords<Codes::run> ranks;
  VF scale = zero;
  VI chosen = integers(-1);
  rank_numbers<Codes::run>(codes.numbers.data() + lane, ranks.data() + lane);
  try_parting(codes.numbers, codes.weights, ranks, lane, scale, chosen);
  VF most = zero;
  for (std::size_t i = 0; i < Codes::run; ++i) {
    most = hn::Max(most, hn::Abs(row_at(codes.numbers.data() + i * lane_count + lane)));
  }
  const MaskF is_negative = hn::Lt(scale, zero);
  const VI every_shift = integers((1 << Codes::parts) - 1);
  VI shifts = hn::And(hn::ShiftRight<16>(chosen), every_shift);
  shifts = hn::Xor(shifts, hn::IfThenElseZero(hn::RebindMask(I32(), is_negative), every_shift));
  pack_codes<Codes>(ranks.data() + lane, chosen, is_negative, codes.points.data() + lane);
  scale = hn::Abs(scale);
  // The scale is NaN if squares overflowed. ggml stores zeros in this case.
  const MaskF is_fitted = hn::And(hn::Ge(most, floats(Format::smallest)), hn::Ge(scale, zero));
  const auto is_kept = hn::AndNot(hn::Lt(chosen, integers(0)), hn::RebindMask(I32(), is_fitted));
  hn::StoreU(hn::IfThenElseZero(hn::RebindMask(d, is_kept), scale), d, codes.scales.data() + lane);
  hn::StoreU(hn::IfThenElseZero(is_kept, shifts), I32(), codes.shifts.data() + lane);
  alignas(64) LaneWords<1> kept;
  hn::StoreU(hn::IfThenElseZero(is_kept, integers(1)), I32(), kept.data());
  for (std::size_t i = 0; i < hn::Lanes(d); ++i) {
    if (kept[i] != 0) {
      move_run_to_points(iq1_map(), lane + i, codes);
    } else {
      for (std::size_t group = 0; group < Codes::groups; ++group) {
        codes.points[group * lane_count + lane + i] = 0;
      }
    }
  }
}

template <class Format>
struct Iq1Group : Format {
  using Codes = typename Format::Codes;
  static constexpr std::size_t run = Codes::run;
  static constexpr std::size_t runs = Format::elements / run;
  static constexpr std::size_t blocks = lane_count / runs;

  static void encode(const GroupNumbers& group, std::byte* to) {
    Codes codes;
    spread_runs<run>(group.numbers, order_of_runs, codes.numbers);
    if (group.importance == nullptr) {
      weigh_squares<run>(codes.numbers, codes.weights);
    } else {
      alignas(64) LaneNumbers means;
      for (std::size_t i = 0; i < lane_count; i += runs) {
        const float sum = sum_of_squares(group.numbers + i * run, Format::elements);
        std::fill_n(means.begin() + i, runs, 2 * sum / Format::elements);
      }
      spread_runs<run>(group.importance, order_of_runs, codes.weights);
      weigh_importance<run>(codes.numbers, means, codes.weights);
    }
    for (std::size_t lane = 0; lane < lane_count; lane += hn::Lanes(F32())) {
      fit_iq1_lanes<Format>(lane, codes);
    }
    for (std::size_t i = 0; i < blocks; ++i) {
      Format::store(codes, i * runs, to + i * Format::block_bytes);
    }
  }
};

template <class Format>
void encode_iq1(const float* numbers, std::uint64_t block_count, const BlockImportance* importance,
                std::byte* blocks) noexcept {
  encode_groups<Iq1Group<Format>>(numbers, block_count, importance, blocks);
}

EncodeBlocks FindIq1Encoder(BlockFormat format) {
  switch (format) {
    case BlockFormat::iq1_s:
      return encode_iq1<Iq1SFormat>;
    case BlockFormat::iq1_m:
      return encode_iq1<Iq1MFormat>;
    default:
      return nullptr;
  }
}

}  // namespace loadstone::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace loadstone::simd {

HWY_EXPORT(FindIq1Encoder);

EncodeBlocks iq1_encoder(BlockFormat format) noexcept {
  return HWY_DYNAMIC_DISPATCH(FindIq1Encoder)(format);
}

}  // namespace loadstone::simd
#endif
