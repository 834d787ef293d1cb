// Finds the nearest points of a grid, as ggml does, one run of values per lane. A vector contains
// several neighbours, so each neighbour's error is summed in the order of the coordinates, with the
// bits of a plain loop. Included by files that Highway compiles once per instruction set.

#include <algorithm>
#include <array>
#include <limits>

#include "kernels/gguf/grid_maps.h"
#include "kernels/gguf/lanes.h"

#ifndef LOADSTONE_KERNELS_GGUF_NEAREST_INL_ONCE
#define LOADSTONE_KERNELS_GGUF_NEAREST_INL_ONCE

namespace loadstone::simd {

// Length of a row of errors: the largest number of codes of a coordinate.
inline constexpr std::size_t error_row = 8;

}  // namespace loadstone::simd
#endif

#if defined(LOADSTONE_KERNELS_GGUF_NEAREST_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef LOADSTONE_KERNELS_GGUF_NEAREST_INL_H
#undef LOADSTONE_KERNELS_GGUF_NEAREST_INL_H
#else
#define LOADSTONE_KERNELS_GGUF_NEAREST_INL_H
#endif

#include <hwy/highway.h>

#include "kernels/gguf/lanes_inl.h"

HWY_BEFORE_NAMESPACE();
namespace loadstone::simd::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// Vectors with one neighbour per lane.
using NearF = hn::CappedTag<float, neighbour_step>;
using NearI = hn::RebindToSigned<NearF>;

// The values of one lane and their weights. Consecutive elements are lane_count apart.
struct Weighed {
  const float* numbers;
  const float* weights;
};

// A coordinate with code c has the value first + step * c.
struct CodeNumbers {
  float first;
  float step;
};

// Computes weight * (scale * coordinate - value)^2 for each code of each coordinate.
template <std::size_t dims>
HWY_INLINE void errors_of_codes(Weighed lane, float scale, CodeNumbers values, float* errors) {
  const NearF d;
  for (std::size_t code = 0; code < error_row; code += hn::Lanes(d)) {
    const auto codes = hn::Iota(d, static_cast<float>(code));
    const auto coordinates =
        hn::Add(hn::Set(d, values.first), hn::Mul(hn::Set(d, values.step), codes));
    const auto scaled = hn::Mul(hn::Set(d, scale), coordinates);
    for (std::size_t i = 0; i < dims; ++i) {
      const auto off = hn::Sub(scaled, hn::Set(d, lane.numbers[i * lane_count]));
      const auto weighted = hn::Mul(hn::Set(d, lane.weights[i * lane_count]), off);
      hn::Store(hn::Mul(weighted, off), d, errors + i * error_row + code);
    }
  }
}

HWY_INLINE hn::Vec<NearF> errors_at(const float* row, hn::Vec<NearI> codes) {
  const NearF d;
#if HWY_TARGET == HWY_SCALAR || HWY_HAVE_SCALABLE
  return hn::GatherIndex(d, row, codes);
#else
  if constexpr (hn::MaxLanes(d) == error_row) {
    return hn::TableLookupLanes(hn::Load(d, row), hn::IndicesFromVec(d, codes));
  } else {
    return hn::GatherIndex(d, row, codes);
  }
#endif
}

// Returns the first candidate with the least error, or the first of all if no error is finite.
template <class L>
HWY_INLINE std::uint32_t nearest_point(std::span<const std::uint16_t> points, Weighed lane,
                                       float scale, CodeNumbers values) {
  const NearF d;
  const NearI di;
  const hn::Rebind<std::uint16_t, NearF> d16;
  alignas(64) std::array<float, L::dims * error_row> errors;
  errors_of_codes<L::dims>(lane, scale, values, errors.data());
  const auto mask = hn::Set(di, static_cast<std::int32_t>(L::mask));
  auto least = hn::Set(d, std::numeric_limits<float>::max());
  auto places = hn::Iota(di, 0);
  for (std::size_t at = 0; at < points.size(); at += hn::Lanes(d)) {
    auto codes = hn::PromoteTo(di, hn::LoadU(d16, points.data() + at));
    auto sum = errors_at(errors.data(), hn::And(codes, mask));
    for (std::size_t i = 1; i < L::dims; ++i) {
      codes = hn::ShiftRight<L::bits>(codes);
      sum = hn::Add(sum, errors_at(errors.data() + i * error_row, hn::And(codes, mask)));
    }
    const auto is_less = hn::Lt(sum, least);
    least = hn::IfThenElse(is_less, sum, least);
    places = hn::IfThenElse(hn::RebindMask(di, is_less),
                            hn::Iota(di, static_cast<std::int32_t>(at)), places);
  }
  const auto is_least = hn::RebindMask(di, hn::Eq(least, hn::MinOfLanes(d, least)));
  const auto last = hn::Set(di, std::numeric_limits<std::int32_t>::max());
  const auto first = hn::MinOfLanes(di, hn::IfThenElse(is_least, places, last));
  return points[static_cast<std::size_t>(hn::GetLane(first))];
}

// Replaces the packed codes of each lane by the nearest point, unless they already are a point.
// Sets bit `group` of `off_grid` in lanes whose codes were replaced. Inactive lanes are unchanged.
template <class L>
HWY_INLINE void move_to_points(const GridMap<L>& map, std::size_t group, Weighed lanes,
                               const float* scales, const bool* is_active, CodeNumbers values,
                               std::int32_t* packed, std::int32_t* off_grid) {
  for (std::size_t lane = 0; lane < hn::Lanes(F32()); ++lane) {
    if (!is_active[lane]) continue;
    const auto near = map.near(static_cast<std::uint32_t>(packed[lane]));
    if (near.empty()) continue;
    off_grid[lane] |= 1 << group;
    const Weighed one = {lanes.numbers + lane, lanes.weights + lane};
    packed[lane] = static_cast<std::int32_t>(nearest_point<L>(near, one, scales[lane], values));
  }
}

}  // namespace loadstone::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
