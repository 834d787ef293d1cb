// Searches for the scales whose codes fit the values best, as ggml does, one run per lane. Sums
// follow the order of a run's values; nothing is reordered or fused. Included by files that Highway
// compiles once per instruction set.
//
// A search does not store the codes of its best candidate, because they are needed only if a scale
// is 0 after it is encoded, which is rare. From `code_scales` and `code_minima` a caller can
// compute these codes again.

#include "kernels/gguf/lanes.h"
#include "kernels/gguf/scale_fits.h"

#if defined(LOADSTONE_KERNELS_GGUF_FIT_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef LOADSTONE_KERNELS_GGUF_FIT_INL_H
#undef LOADSTONE_KERNELS_GGUF_FIT_INL_H
#else
#define LOADSTONE_KERNELS_GGUF_FIT_INL_H
#endif

#include <hwy/highway.h>

#include "kernels/gguf/lanes_inl.h"

HWY_BEFORE_NAMESPACE();
namespace loadstone::simd::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using MaskF = hn::Mask<F32>;

HWY_INLINE VF where(MaskF mask, VF yes, VF no) { return hn::IfThenElse(mask, yes, no); }
HWY_INLINE VF square(VF value) { return hn::Mul(value, value); }

// ---- values = scale * code + minimum, codes from 0 to `top`

// Structs contain no vectors, because vectors of some instruction sets have no compile-time size.
HWY_INLINE VI affine_code(VF number, VF inverse, VF minimum, int top) {
  return clamped(nearest_integers(hn::Mul(inverse, hn::Sub(number, minimum))), 0, top);
}

// Computes the least value (at most 0), the largest value, and the sums of weights and of weighted
// values.
template <std::size_t run>
HWY_INLINE void affine_limits(const float* numbers, const float* weights, VF& lowest, VF& highest,
                              VF& sum_w, VF& sum_x) {
  const VF zero = hn::Zero(F32());
  lowest = row_at(numbers);
  highest = lowest;
  sum_w = row_at(weights);
  sum_x = hn::Mul(sum_w, lowest);
  for (std::size_t i = 1; i < run; ++i) {
    const VF number = row_at(numbers + i * lane_count);
    const VF weight = row_at(weights + i * lane_count);
    lowest = where(hn::Lt(number, lowest), number, lowest);
    highest = where(hn::Gt(number, highest), number, highest);
    sum_w = hn::Add(sum_w, weight);
    sum_x = hn::Add(sum_x, hn::Mul(weight, number));
  }
  lowest = where(hn::Gt(lowest, zero), zero, lowest);
}

// Writes the codes of a candidate as F32. Computes the sums for least squares: of weight * code,
// weight * code * code, and weight * code * value.
template <std::size_t run>
HWY_INLINE void affine_sums(const float* numbers, const float* weights, VF inverse, VF minimum,
                            int top, float* codes, VF& sum_l, VF& sum_l2, VF& sum_xl) {
  sum_l = hn::Zero(F32());
  sum_l2 = hn::Zero(F32());
  sum_xl = hn::Zero(F32());
  for (std::size_t i = 0; i < run; ++i) {
    const VF number = row_at(numbers + i * lane_count);
    const VF code = hn::ConvertTo(F32(), affine_code(number, inverse, minimum, top));
    hn::StoreU(code, F32(), codes + i * lane_count);
    const VF weighted = hn::Mul(row_at(weights + i * lane_count), code);
    sum_l = hn::Add(sum_l, weighted);
    sum_l2 = hn::Add(sum_l2, hn::Mul(weighted, code));
    sum_xl = hn::Add(sum_xl, hn::Mul(weighted, number));
  }
}

// Returns the weighted sum of the magnitudes of errors, or of their squares.
template <std::size_t run, bool is_absolute>
HWY_INLINE VF affine_error(const float* numbers, const float* weights, const float* codes, VF scale,
                           VF minimum) {
  VF sum = hn::Zero(F32());
  for (std::size_t i = 0; i < run; ++i) {
    const VF made = hn::Add(hn::Mul(scale, row_at(codes + i * lane_count)), minimum);
    const VF off = hn::Sub(made, row_at(numbers + i * lane_count));
    const VF error = is_absolute ? hn::Abs(off) : square(off);
    sum = hn::Add(sum, hn::Mul(row_at(weights + i * lane_count), error));
  }
  return sum;
}

// A search has these members:
//   run, top         values per run; the largest code
//   steps            index of the last candidate
//   first, step      candidate i divides the range of the values by top + first + step * i
//   is_absolute      true if the search sums the magnitudes of errors instead of squares
// Each candidate yields a least-squares scale and minimum, which are kept if their error is less.
template <class Search>
HWY_INLINE void fit_affine_lanes(const float* numbers, const float* weights, std::size_t lane,
                                 Fitted& fitted) {
  constexpr std::size_t run = Search::run;
  constexpr int top = Search::top;
  const F32 d;
  const VF zero = hn::Zero(d);
  alignas(64) LaneRows<run> codes;
  VF lowest, highest, sum_w, sum_x, sum_l, sum_l2, sum_xl;
  affine_limits<run>(numbers, weights, lowest, highest, sum_w, sum_x);
  const MaskF is_flat = hn::Eq(highest, lowest);
  VF minimum = lowest;
  VF code_minimum = lowest;
  VF code_scale = hn::Div(floats(top), hn::Sub(highest, lowest));
  VF scale = hn::Div(floats(1.0f), code_scale);
  affine_sums<run>(numbers, weights, code_scale, minimum, top, codes.data(), sum_l, sum_l2, sum_xl);
  VF least = affine_error<run, Search::is_absolute>(numbers, weights, codes.data(), scale, minimum);
  for (int i = 0; i <= Search::steps; ++i) {
    const VF inverse = hn::Div(floats(Search::first + Search::step * static_cast<float>(i) + top),
                               hn::Sub(highest, minimum));
    affine_sums<run>(numbers, weights, inverse, minimum, top, codes.data(), sum_l, sum_l2, sum_xl);
    const VF determinant = hn::Sub(hn::Mul(sum_w, sum_l2), square(sum_l));
    VF new_scale = hn::Div(hn::Sub(hn::Mul(sum_w, sum_xl), hn::Mul(sum_x, sum_l)), determinant);
    VF new_minimum = hn::Div(hn::Sub(hn::Mul(sum_l2, sum_x), hn::Mul(sum_l, sum_xl)), determinant);
    const MaskF is_above = hn::Gt(new_minimum, zero);
    if (!hn::AllFalse(d, is_above)) {
      new_scale = where(is_above, hn::Div(sum_xl, sum_l2), new_scale);
      new_minimum = where(is_above, zero, new_minimum);
    }
    const VF error = affine_error<run, Search::is_absolute>(numbers, weights, codes.data(),
                                                            new_scale, new_minimum);
    const MaskF is_better = hn::And(hn::Gt(determinant, zero), hn::Lt(error, least));
    code_scale = where(is_better, inverse, code_scale);
    code_minimum = where(is_better, minimum, code_minimum);
    least = where(is_better, error, least);
    scale = where(is_better, new_scale, scale);
    minimum = where(is_better, new_minimum, minimum);
  }
  hn::StoreU(where(is_flat, zero, scale), d, fitted.scales.data() + lane);
  hn::StoreU(hn::Neg(where(is_flat, lowest, minimum)), d, fitted.minima.data() + lane);
  hn::StoreU(where(is_flat, zero, code_scale), d, fitted.code_scales.data() + lane);
  hn::StoreU(where(is_flat, lowest, code_minimum), d, fitted.code_minima.data() + lane);
}

// The search for values with an importance.
template <std::size_t numbers, int largest_code>
struct WeightedSearch {
  static constexpr std::size_t run = numbers;
  static constexpr int top = largest_code;
  static constexpr int steps = 36;
  static constexpr float first = -0.9f;
  static constexpr float step = 0.05f;
  static constexpr bool is_absolute = false;
};

template <class Search>
HWY_INLINE void fit_affine(const LaneRows<Search::run>& numbers,
                           const LaneRows<Search::run>& weights, Fitted& fitted) {
  for (std::size_t lane = 0; lane < lane_count; lane += hn::Lanes(F32())) {
    fit_affine_lanes<Search>(numbers.data() + lane, weights.data() + lane, lane, fitted);
  }
}

// ---- values = scale * code, codes from -middle to middle - 1

HWY_INLINE VI centered_code(VF number, VF inverse, int middle) {
  return clamped(nearest_integers(hn::Mul(inverse, number)), -middle, middle - 1);
}

// Adds `middle` to the code, because stored codes start at 0. If the run's values are too small for
// a scale, returns 0.
HWY_INLINE VI stored_centered_code(VF number, VF inverse, int middle) {
  const VI code = hn::Add(centered_code(number, inverse, middle), integers(middle));
  const auto has_scale = hn::Ne(inverse, hn::Zero(F32()));
  return hn::IfThenElseZero(hn::RebindMask(I32(), has_scale), code);
}

// Returns the first value with the largest magnitude in each lane. `is_small` is set for lanes
// whose values are too small for a scale.
template <std::size_t run>
HWY_INLINE VF extremes(const float* numbers, MaskF& is_small) {
  VF extreme = hn::Zero(F32());
  VF most = extreme;
  for (std::size_t i = 0; i < run; ++i) {
    const VF number = row_at(numbers + i * lane_count);
    const VF magnitude = hn::Abs(number);
    const MaskF is_more = hn::Gt(magnitude, most);
    most = where(is_more, magnitude, most);
    extreme = where(is_more, number, extreme);
  }
  is_small = hn::Lt(most, floats(smallest_fitted));
  return extreme;
}

// Sums weight * value * code, and weight * code * code.
template <std::size_t run, int middle>
HWY_INLINE void centered_sums(const float* numbers, const float* weights, VF inverse, VF& sum_lx,
                              VF& sum_l2) {
  sum_lx = hn::Zero(F32());
  sum_l2 = hn::Zero(F32());
  for (std::size_t i = 0; i < run; ++i) {
    const VF number = row_at(numbers + i * lane_count);
    const VF weight = row_at(weights + i * lane_count);
    const VF code = hn::ConvertTo(F32(), centered_code(number, inverse, middle));
    sum_lx = hn::Add(sum_lx, hn::Mul(hn::Mul(weight, number), code));
    sum_l2 = hn::Add(sum_l2, hn::Mul(hn::Mul(weight, code), code));
  }
}

// Candidates map the extreme value to -(middle + i / 10), for i from -9 to 9.
template <std::size_t run, int middle>
HWY_INLINE void fit_centered(const LaneRows<run>& rows, const LaneRows<run>& row_weights,
                             Fitted& fitted) {
  const F32 d;
  const VF zero = hn::Zero(d);
  for (std::size_t lane = 0; lane < lane_count; lane += hn::Lanes(d)) {
    const float* const numbers = rows.data() + lane;
    const float* const weights = row_weights.data() + lane;
    MaskF is_small;
    const VF extreme = extremes<run>(numbers, is_small);
    VF code_scale = hn::Div(floats(-middle), extreme);
    VF sum_lx, sum_l2;
    centered_sums<run, middle>(numbers, weights, code_scale, sum_lx, sum_l2);
    VF scale = where(hn::Eq(sum_l2, zero), zero, hn::Div(sum_lx, sum_l2));
    VF best = hn::Mul(scale, sum_lx);
    for (int i = -9; i <= 9; ++i) {
      if (i == 0) continue;
      const VF inverse = hn::Div(floats(-(middle + 0.1f * static_cast<float>(i))), extreme);
      centered_sums<run, middle>(numbers, weights, inverse, sum_lx, sum_l2);
      const MaskF is_better =
          hn::And(hn::Gt(sum_l2, zero), hn::Gt(square(sum_lx), hn::Mul(best, sum_l2)));
      scale = where(is_better, hn::Div(sum_lx, sum_l2), scale);
      best = where(is_better, hn::Mul(scale, sum_lx), best);
      code_scale = where(is_better, inverse, code_scale);
    }
    hn::StoreU(where(is_small, zero, scale), d, fitted.scales.data() + lane);
    hn::StoreU(where(is_small, zero, code_scale), d, fitted.code_scales.data() + lane);
  }
}

// ---- values = scale * code without an importance: after a first fit, changes single codes while
// that improves the least-squares fit. Weights are the squares of values

template <std::size_t run, int middle>
HWY_INLINE void refined_begin(const float* numbers, VF inverse, float* codes, VF& sum_lx,
                              VF& sum_l2) {
  sum_lx = hn::Zero(F32());
  sum_l2 = hn::Zero(F32());
  for (std::size_t i = 0; i < run; ++i) {
    const VF number = row_at(numbers + i * lane_count);
    const VF weight = square(number);
    const VF code = hn::ConvertTo(F32(), centered_code(number, inverse, middle));
    hn::StoreU(code, F32(), codes + i * lane_count);
    sum_lx = hn::Add(sum_lx, hn::Mul(hn::Mul(weight, number), code));
    sum_l2 = hn::Add(sum_l2, hn::Mul(hn::Mul(weight, code), code));
  }
}

// Tries a different code for one value of each lane. Returns the lanes that accepted it.
template <int middle>
HWY_INLINE MaskF refine_code(VF number, float* place, VF& sum_lx, VF& sum_l2) {
  const VF zero = hn::Zero(F32());
  const VF code = row_at(place);
  const VF weight = square(number);
  const VF weighted = hn::Mul(weight, number);
  VF lx = hn::Sub(sum_lx, hn::Mul(weighted, code));
  VF l2 = hn::Sub(sum_l2, hn::Mul(hn::Mul(weight, code), code));
  const VI nearest = nearest_integers(hn::Div(hn::Mul(number, l2), lx));
  const VF other = hn::ConvertTo(F32(), clamped(nearest, -middle, middle - 1));
  const MaskF is_other = hn::And(hn::Gt(lx, zero), hn::Ne(other, code));
  lx = hn::Add(lx, hn::Mul(weighted, other));
  l2 = hn::Add(l2, hn::Mul(hn::Mul(weight, other), other));
  const MaskF is_less = hn::Gt(hn::Mul(square(lx), sum_l2), hn::Mul(square(sum_lx), l2));
  const MaskF is_better = hn::And(is_other, hn::And(hn::Gt(l2, zero), is_less));
  hn::StoreU(where(is_better, other, code), F32(), place);
  sum_lx = where(is_better, lx, sum_lx);
  sum_l2 = where(is_better, l2, sum_l2);
  return is_better;
}

template <std::size_t run, int middle>
HWY_INLINE void fit_refined(const LaneRows<run>& rows, LaneNumbers& scales, LaneCodes<run>& codes) {
  const F32 d;
  const VF zero = hn::Zero(d);
  for (std::size_t lane = 0; lane < lane_count; lane += hn::Lanes(d)) {
    const float* const numbers = rows.data() + lane;
    alignas(64) LaneRows<run> chosen;
    MaskF is_small;
    VF sum_lx, sum_l2;
    const VF inverse = hn::Div(floats(-middle), extremes<run>(numbers, is_small));
    refined_begin<run, middle>(numbers, inverse, chosen.data(), sum_lx, sum_l2);
    for (int turn = 0; turn < 5; ++turn) {
      MaskF is_changed = hn::Lt(zero, zero);
      for (std::size_t i = 0; i < run; ++i) {
        const VF number = row_at(numbers + i * lane_count);
        const MaskF is_better =
            refine_code<middle>(number, chosen.data() + i * lane_count, sum_lx, sum_l2);
        is_changed = hn::Or(is_changed, is_better);
      }
      if (hn::AllFalse(d, is_changed)) break;
    }
    const VF scale = where(hn::Gt(sum_l2, zero), hn::Div(sum_lx, sum_l2), zero);
    hn::StoreU(where(is_small, zero, scale), d, scales.data() + lane);
    for (std::size_t i = 0; i < run; ++i) {
      const VF code = hn::Add(row_at(chosen.data() + i * lane_count), floats(middle));
      store_codes(hn::ConvertTo(I32(), where(is_small, zero, code)),
                  codes.data() + i * lane_count + lane);
    }
  }
}

}  // namespace loadstone::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
