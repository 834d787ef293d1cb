// Encodes IQ2 and IQ3. The magnitudes of 8 or 4 values form a point of a grid, whose coordinates
// are odd multiples of the scale of the values' run. Signs are stored separately.
#include <algorithm>
#include <array>

#include "kernels/gguf/families.h"
#include "kernels/gguf/grid_layouts.h"
#include "kernels/gguf/scale_fits.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/gguf/encode_grid.cpp"
#include <hwy/foreach_target.h>
// Highway requires this include after foreach_target.h.
#include <hwy/highway.h>

#include "kernels/gguf/groups_inl.h"
#include "kernels/gguf/nearest_inl.h"

HWY_BEFORE_NAMESPACE();
namespace loadstone::simd::HWY_NAMESPACE {

inline constexpr CodeNumbers odd_numbers = {1, 2};

template <class Format>
using CodesOf = GridCodes<Format::run, Format::L::dims>;

// ---- weights and signs

template <class Format>
HWY_INLINE void weigh_grid(const GroupNumbers& group, CodesOf<Format>& codes) {
  constexpr std::size_t run = Format::run;
  constexpr std::size_t runs = Format::elements / run;
  const F32 d;
  alignas(64) LaneNumbers means;
  for (std::size_t i = 0; i < lane_count; i += runs) {
    const float sum = sum_of_squares(group.numbers + i * run, Format::elements);
    std::fill_n(means.begin() + i, runs, Format::mean_factor * sum / Format::elements);
  }
  if (group.importance != nullptr) {
    spread_runs<run>(group.importance, order_of_runs, codes.weights);
    weigh_importance<run>(codes.numbers, means, codes.weights);
  } else {
    weigh_squares<run>(codes.numbers, codes.weights);
    if constexpr (Format::unweighted == Unweighted::quarter_of_mean_more) {
      for (std::size_t i = 0; i < run * lane_count; i += hn::Lanes(d)) {
        const VF more = hn::Mul(floats(0.25f), row_at(means.data() + i % lane_count));
        hn::StoreU(hn::Add(more, row_at(codes.weights.data() + i)), d, codes.weights.data() + i);
      }
    }
  }
  for (std::size_t i = 0; i < run * lane_count; i += hn::Lanes(d)) {
    hn::StoreU(hn::Sqrt(row_at(codes.weights.data() + i)), d, codes.roots.data() + i);
  }
}

HWY_INLINE VI ones_where(MaskF mask) {
  return hn::IfThenElseZero(hn::RebindMask(I32(), mask), integers(1));
}

// Replaces the values in eight rows by their magnitudes and returns the signs as bits. If the
// format requires an even number of minus signs, and the number is odd, this function flips the
// sign of the value with the least weight.
template <bool is_even>
HWY_INLINE VI take_signs(float* numbers, const float* weights) {
  const F32 d;
  const VF zero = hn::Zero(d);
  VI signs = integers(0);
  VI flips = integers(0);
  VI least_at = integers(0);
  VF least = zero;
  for (std::size_t i = 0; i < 8; ++i) {
    const VF number = row_at(numbers + i * lane_count);
    const VI is_negative = ones_where(hn::Lt(number, zero));
    signs = hn::Or(signs, hn::ShiftLeftSame(is_negative, static_cast<int>(i)));
    if constexpr (is_even) {
      const VF weight = hn::Mul(hn::Mul(row_at(weights + i * lane_count), number), number);
      const MaskF is_less = i == 0 ? hn::Eq(zero, zero) : hn::Lt(weight, least);
      least = where(is_less, weight, least);
      least_at =
          hn::IfThenElse(hn::RebindMask(I32(), is_less), integers(static_cast<int>(i)), least_at);
      flips = hn::Xor(flips, is_negative);
    }
    hn::StoreU(where(hn::Lt(number, zero), hn::Neg(number), number), d, numbers + i * lane_count);
  }
  if constexpr (is_even) {
    for (std::size_t i = 0; i < 8; ++i) {
      const auto is_this =
          hn::And(hn::Eq(least_at, integers(static_cast<int>(i))), hn::Eq(flips, integers(1)));
      const VF number = row_at(numbers + i * lane_count);
      hn::StoreU(where(hn::RebindMask(d, is_this), hn::Neg(number), number), d,
                 numbers + i * lane_count);
      signs = hn::Xor(signs, hn::IfThenElseZero(is_this, integers(1 << i)));
    }
  }
  return signs;
}

template <class Format>
HWY_INLINE void take_all_signs(CodesOf<Format>& codes) {
  for (std::size_t lane = 0; lane < lane_count; lane += hn::Lanes(F32())) {
    for (std::size_t octet = 0; octet < Format::run / 8; ++octet) {
      const std::size_t at = 8 * octet * lane_count + lane;
      const VI signs =
          take_signs<Format::has_even_signs>(codes.numbers.data() + at, codes.weights.data() + at);
      hn::StoreU(signs, I32(), codes.signs.data() + octet * lane_count + lane);
    }
  }
}

// ---- points

// Searches for the grid points that fit the values best. One run per lane.
template <class Format>
struct GridSearch {
  using L = typename Format::L;
  static constexpr std::size_t groups = Format::run / L::dims;
  static constexpr int top = 2 * static_cast<int>(L::levels) - 1;

  const float* numbers;
  const float* weights;
  const float* roots;
  const GridMap<L> map;
  std::array<bool, lane_count> is_active;

  // Writes the nearest points for coordinates in multiples of 1 / `inverse`. `off_grid` gets a bit
  // for each group whose codes are not a point.
  HWY_INLINE void find(VF inverse, VF scale, std::int32_t* points, std::int32_t* off_grid) const {
    const F32 d;
    alignas(64) LaneNumbers scales;
    hn::StoreU(scale, d, scales.data());
    hn::StoreU(integers(0), I32(), off_grid);
    for (std::size_t group = 0; group < groups; ++group) {
      const std::size_t at = group * L::dims * lane_count;
      VI packed = integers(0);
      for (std::size_t i = 0; i < L::dims; ++i) {
        const VF number = row_at(numbers + at + i * lane_count);
        const VF steps = hn::Sub(hn::Mul(inverse, number), floats(1));
        const VI code = clamped(nearest_integers(hn::Mul(floats(0.5f), steps)), 0,
                                static_cast<int>(L::levels) - 1);
        packed = hn::Or(packed, hn::ShiftLeftSame(code, static_cast<int>(L::bits * i)));
      }
      std::int32_t* const place = points + group * lane_count;
      hn::StoreU(packed, I32(), place);
      move_to_points<L>(map, group, {numbers + at, roots + at}, scales.data(), is_active.data(),
                        odd_numbers, place, off_grid);
    }
  }

  // Sums weight * number * coordinate, and weight * coordinate * coordinate.
  HWY_INLINE void sums(const std::int32_t* points, VF& sum_lx, VF& sum_l2) const {
    sum_lx = hn::Zero(F32());
    sum_l2 = hn::Zero(F32());
    for (std::size_t group = 0; group < groups; ++group) {
      VI packed = hn::LoadU(I32(), points + group * lane_count);
      for (std::size_t i = 0; i < L::dims; ++i) {
        const std::size_t at = (group * L::dims + i) * lane_count;
        const VI code = hn::And(packed, integers(static_cast<int>(L::mask)));
        const VF coordinate = hn::ConvertTo(F32(), hn::Add(hn::Add(code, code), integers(1)));
        const VF weight = row_at(weights + at);
        sum_lx = hn::Add(sum_lx, hn::Mul(hn::Mul(weight, row_at(numbers + at)), coordinate));
        sum_l2 = hn::Add(sum_l2, hn::Mul(hn::Mul(weight, coordinate), coordinate));
        packed = hn::ShiftRight<L::bits>(packed);
      }
    }
  }
};

template <std::size_t groups>
HWY_INLINE void keep_where(MaskF mask, const std::int32_t* found, std::int32_t* points) {
  const auto is_kept = hn::RebindMask(I32(), mask);
  for (std::size_t i = 0; i < groups * lane_count; i += lane_count) {
    const VI old = hn::LoadU(I32(), points + i);
    hn::StoreU(hn::IfThenElse(is_kept, hn::LoadU(I32(), found + i), old), I32(), points + i);
  }
}

// Tries candidates of the scale, which divide `first` by different numbers of steps.
template <class Format>
HWY_INLINE VF try_scales(const GridSearch<Format>& search, VF first, VF scale, std::int32_t* points,
                         VI& off_grid) {
  using Search = GridSearch<Format>;
  const VF zero = hn::Zero(F32());
  alignas(64) LaneWords<Search::groups> tried;
  alignas(64) LaneWords<1> tried_off;
  VF best = zero;
  for (int i = -Format::candidates; i <= Format::candidates; ++i) {
    const float steps = Search::top + static_cast<float>(i) * Format::candidate_step;
    const VF inverse = hn::Div(floats(steps), first);
    search.find(inverse, hn::Div(floats(1), inverse), tried.data(), tried_off.data());
    VF sum_lx, sum_l2;
    search.sums(tried.data(), sum_lx, sum_l2);
    const MaskF is_better =
        hn::And(hn::Gt(sum_l2, zero), hn::Gt(square(sum_lx), hn::Mul(best, sum_l2)));
    scale = where(is_better, hn::Div(sum_lx, sum_l2), scale);
    best = where(is_better, hn::Mul(scale, sum_lx), best);
    keep_where<Search::groups>(is_better, tried.data(), points);
    off_grid = hn::IfThenElse(hn::RebindMask(I32(), is_better), hn::LoadU(I32(), tried_off.data()),
                              off_grid);
  }
  return scale;
}

// Chooses points again for the best scale, and returns the least-squares scale of these points.
template <class Format>
HWY_INLINE VF refit(GridSearch<Format>& search, VF scale, VI off_grid, std::int32_t* points) {
  using Search = GridSearch<Format>;
  const VF zero = hn::Zero(F32());
  MaskF is_refit = hn::Gt(scale, zero);
  if constexpr (Format::refit != Refit::always) {
    const auto is_off = hn::RebindMask(F32(), hn::Ne(off_grid, integers(0)));
    is_refit = hn::And(is_refit, is_off);
  }
  if (hn::AllFalse(F32(), is_refit)) return scale;
  alignas(64) LaneWords<Search::groups> found;
  alignas(64) LaneWords<1> found_off;
  search.find(hn::Div(floats(1), scale), scale, found.data(), found_off.data());
  for (std::size_t group = 0; group < Search::groups; ++group) {
    MaskF is_kept = is_refit;
    if constexpr (Format::refit == Refit::off_grid) {
      const VI bit = hn::And(off_grid, integers(1 << group));
      is_kept = hn::And(is_kept, hn::RebindMask(F32(), hn::Ne(bit, integers(0))));
    }
    keep_where<1>(is_kept, found.data() + group * lane_count, points + group * lane_count);
  }
  VF sum_lx, sum_l2;
  search.sums(points, sum_lx, sum_l2);
  return where(hn::And(is_refit, hn::Gt(sum_l2, zero)), hn::Div(sum_lx, sum_l2), scale);
}

// Returns `most`, or if the format needs it, the scale that fits codes 0 to 4 best.
template <class Format>
HWY_INLINE VF first_scales(const CodesOf<Format>& codes, std::size_t lane, VF most) {
  if constexpr (!Format::fits_first) return most;
  alignas(64) LaneNumbers scales{};
  for (std::size_t i = 0; i < hn::Lanes(F32()); ++i) {
    std::array<float, Format::run> numbers;
    std::array<float, Format::run> weights;
    std::array<int, Format::run> unused;
    for (std::size_t k = 0; k < Format::run; ++k) {
      numbers[k] = codes.numbers[k * lane_count + lane + i];
      weights[k] = codes.weights[k * lane_count + lane + i];
    }
    scales[i] = fit_positive<Format::run>(numbers.data(), weights.data(), 4, unused.data());
  }
  return row_at(scales.data());
}

template <class Format>
HWY_INLINE void fit_grid_lanes(const GridMap<typename Format::L>& map, std::size_t lane,
                               CodesOf<Format>& codes) {
  using Search = GridSearch<Format>;
  const F32 d;
  const VF zero = hn::Zero(d);
  Search search = {
      codes.numbers.data() + lane, codes.weights.data() + lane, codes.roots.data() + lane, map, {}};
  VF most = row_at(search.numbers);
  for (std::size_t i = 1; i < Format::run; ++i) {
    most = hn::Max(most, row_at(search.numbers + i * lane_count));
  }
  MaskF is_active = hn::Not(hn::Lt(most, floats(Format::smallest)));
  VF scale = hn::Div(most, floats(Search::top));
  VF first = most;
  if constexpr (Format::fits_first) {
    scale = first_scales<Format>(codes, lane, most);
    first = hn::Mul(scale, floats(static_cast<float>(Search::L::levels)));
    is_active = hn::And(is_active, hn::Not(hn::Le(first, zero)));
  }
  alignas(64) LaneNumbers active;
  hn::StoreU(where(is_active, floats(1), zero), d, active.data());
  for (std::size_t i = 0; i < hn::Lanes(d); ++i) search.is_active[i] = active[i] != 0;
  std::int32_t* const points = codes.points.data() + lane;
  for (std::size_t i = 0; i < Search::groups * lane_count; i += lane_count) {
    hn::StoreU(integers(0), I32(), points + i);
  }
  VI off_grid = integers(Format::refit == Refit::all_of_run ? -1 : 0);
  scale = try_scales<Format>(search, first, scale, points, off_grid);
  scale = refit<Format>(search, scale, off_grid, points);
  const MaskF is_negative = hn::And(is_active, hn::Lt(scale, zero));
  scale = hn::Abs(scale);
  // The scale is NaN if squares overflowed. ggml stores zeros in this case.
  is_active = hn::And(is_active, hn::Ge(scale, zero));
  hn::StoreU(where(is_active, scale, zero), d, codes.scales.data() + lane);
  const VI is_kept = hn::IfThenElseZero(hn::RebindMask(I32(), is_active), integers(-1));
  const VI flips = hn::IfThenElseZero(hn::RebindMask(I32(), is_negative), integers(255));
  for (std::size_t i = 0; i < Format::run / 8 * lane_count; i += lane_count) {
    std::int32_t* const place = codes.signs.data() + lane + i;
    hn::StoreU(hn::And(is_kept, hn::Xor(hn::LoadU(I32(), place), flips)), I32(), place);
  }
  for (std::size_t i = 0; i < Search::groups * lane_count; i += lane_count) {
    hn::StoreU(hn::And(is_kept, hn::LoadU(I32(), points + i)), I32(), points + i);
  }
}

template <class Format>
struct GridGroup : Format {
  static constexpr std::size_t blocks = lane_count * Format::run / Format::elements;

  static void encode(const GroupNumbers& group, std::byte* to) {
    const auto map = Format::map();
    CodesOf<Format> codes;
    spread_runs<Format::run>(group.numbers, order_of_runs, codes.numbers);
    weigh_grid<Format>(group, codes);
    take_all_signs<Format>(codes);
    for (std::size_t lane = 0; lane < lane_count; lane += hn::Lanes(F32())) {
      fit_grid_lanes<Format>(map, lane, codes);
    }
    for (std::size_t i = 0; i < codes.points.size(); ++i) {
      codes.indices[i] =
          static_cast<std::int32_t>(map.index(static_cast<std::uint32_t>(codes.points[i])));
    }
    for (std::size_t i = 0; i < blocks; ++i) {
      store_block<Format>(codes, i * (lane_count / blocks), to + i * Format::block_bytes);
    }
  }
};

template <class Format>
void encode_grid(const float* numbers, std::uint64_t block_count, const BlockImportance* importance,
                 std::byte* blocks) noexcept {
  encode_groups<GridGroup<Format>>(numbers, block_count, importance, blocks);
}

EncodeBlocks FindGridEncoder(BlockFormat format) {
  switch (format) {
    case BlockFormat::iq2_xxs:
      return encode_grid<Iq2XxsFormat>;
    case BlockFormat::iq2_xs:
      return encode_grid<Iq2XsFormat>;
    case BlockFormat::iq2_s:
      return encode_grid<Iq2SFormat>;
    case BlockFormat::iq3_xxs:
      return encode_grid<Iq3XxsFormat>;
    case BlockFormat::iq3_s:
      return encode_grid<Iq3SFormat>;
    default:
      return nullptr;
  }
}

}  // namespace loadstone::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace loadstone::simd {

HWY_EXPORT(FindGridEncoder);

EncodeBlocks grid_encoder(BlockFormat format) noexcept {
  return HWY_DYNAMIC_DISPATCH(FindGridEncoder)(format);
}

}  // namespace loadstone::simd
#endif
