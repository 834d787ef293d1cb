// Encodes Q2_K, Q3_K, Q4_K, Q5_K and Q6_K: finds the best scale of each run, then encodes the
// scales of a block's runs.
#include <algorithm>
#include <array>
#include <cmath>

#include "kernels/gguf/families.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/gguf/encode_k.cpp"
#include <hwy/foreach_target.h>
// Highway requires this include after foreach_target.h.
#include <hwy/highway.h>

#include "kernels/gguf/groups_inl.h"
#include "kernels/gguf/k_layouts.h"
#include "kernels/gguf/scale_fits.h"

HWY_BEFORE_NAMESPACE();
namespace loadstone::simd::HWY_NAMESPACE {

// ---- searches and weights

struct Q4_KSearch {
  static constexpr std::size_t run = 32;
  static constexpr int top = 15;
  static constexpr int steps = 20;
  static constexpr float first = -1.0f;
  static constexpr float step = 0.1f;
  static constexpr bool is_absolute = false;
};

struct Q5_KSearch : Q4_KSearch {
  static constexpr int top = 31;
  static constexpr int steps = 15;
  static constexpr float first = -0.5f;
};

struct Q2_KSearch {
  static constexpr std::size_t run = 16;
  static constexpr int top = 3;
  static constexpr int steps = 15;
  static constexpr float first = -0.5f;
  static constexpr float step = 0.1f;
  static constexpr bool is_absolute = true;
};

// Computes weights for values without an importance: magnitudes, plus the root mean square of the
// run for runs of 32.
template <std::size_t run>
HWY_INLINE void weigh_magnitudes(const LaneRows<run>& rows, LaneRows<run>& weights) {
  for (std::size_t lane = 0; lane < lane_count; lane += hn::Lanes(F32())) {
    const float* const numbers = rows.data() + lane;
    VF more = hn::Zero(F32());
    if constexpr (run == 32) {
      VF sum = hn::Zero(F32());
      for (std::size_t i = 0; i < run; ++i) {
        sum = hn::Add(sum, square(row_at(numbers + i * lane_count)));
      }
      more = hn::Sqrt(hn::Div(sum, floats(run)));
    }
    for (std::size_t i = 0; i < run; ++i) {
      const VF weight = hn::Add(more, hn::Abs(row_at(numbers + i * lane_count)));
      hn::StoreU(weight, F32(), weights.data() + i * lane_count + lane);
    }
  }
}

// Computes weights from the importance. `factor` multiplies the mean square of the block, which is
// added to the square of each value.
template <class Layout>
HWY_INLINE void weigh_blocks(const GroupNumbers& group, float factor,
                             const LaneRows<Layout::run>& rows, LaneRows<Layout::run>& weights) {
  constexpr std::size_t run = Layout::run;
  constexpr std::size_t runs = k_elements / run;
  LaneNumbers means;
  for (std::size_t i = 0; i < lane_count; i += runs) {
    const float sum = sum_of_squares(group.numbers + i * run, k_elements);
    std::fill_n(means.begin() + i, runs, factor * sum / k_elements);
  }
  alignas(64) const LaneNumbers by_lanes = by_lane(means, lane_order<run>());
  spread_runs<run>(group.importance, lane_order<run>(), weights);
  weigh_importance<run>(rows, by_lanes, weights);
}

// Returns the sum of the weights of each run.
template <std::size_t run>
HWY_INLINE LaneNumbers weights_of_runs(const LaneRows<run>& weights) {
  alignas(64) LaneNumbers sums;
  sum_weights<run>(weights, sums);
  return by_run(sums, lane_order<run>());
}

// ---- scales and minima

HWY_INLINE VI shifted_code(VF number, VF scale, VF minimum, int top) {
  return clamped(nearest_integers(hn::Div(hn::Add(number, minimum), scale)), 0, top);
}

// Encodes the scales and minima of a block's runs, then replaces them by the decoded ones, which
// the codes of values are computed with. `weights`: one per run, or null.
template <class Layout>
HWY_INLINE void store_affine_scales(float* scales, float* minima, const float* weights,
                                    std::byte* block) {
  constexpr std::size_t runs = k_elements / Layout::run;
  std::array<int, runs> scale_codes;
  std::array<int, runs> minimum_codes;
  const auto choose = [&](const float* values, int* codes) {
    if (weights == nullptr) return Layout::choose(values, codes);
    const float scale = fit_positive<runs>(values, weights, Layout::top_scale, codes);
    if (Layout::limits_fitted) Layout::limit(codes);
    return scale;
  };
  std::byte* const place = block + Layout::scale_at;
  store_f16(place, choose(scales, scale_codes.data()));
  store_f16(place + 2, choose(minima, minimum_codes.data()));
  Layout::exchange(block, scale_codes.data(), minimum_codes.data());
  const float scale = number::load<Dtype::f16>(place);
  const float minimum = number::load<Dtype::f16>(place + 2);
  for (std::size_t i = 0; i < runs; ++i) {
    scales[i] = scale * static_cast<float>(scale_codes[i]);
    minima[i] = minimum * static_cast<float>(minimum_codes[i]);
  }
}

template <class Layout, class Search>
struct AffineGroup : Layout {
  static constexpr std::size_t run = Layout::run;
  static constexpr LaneOrder order = lane_order<run>();

  static void encode(const GroupNumbers& group, std::byte* to) {
    alignas(64) LaneRows<run> rows;
    alignas(64) LaneRows<run> weights;
    Fitted fitted;
    LaneNumbers run_weights;
    spread_runs<run>(group.numbers, order, rows);
    if (group.importance == nullptr) {
      weigh_magnitudes<run>(rows, weights);
      fit_affine<Search>(rows, weights, fitted);
    } else {
      weigh_blocks<Layout>(group, run == 32 ? 2.0f : 1.0f, rows, weights);
      run_weights = weights_of_runs<run>(weights);
      fit_affine<WeightedSearch<run, Search::top>>(rows, weights, fitted);
    }
    LaneNumbers run_scales = by_run(fitted.scales, order);
    LaneNumbers run_minima = by_run(fitted.minima, order);
    for (std::size_t i = 0; i < Layout::blocks; ++i) {
      const std::size_t first = i * (k_elements / run);
      store_affine_scales<Layout>(
          run_scales.data() + first, run_minima.data() + first,
          group.importance == nullptr ? nullptr : run_weights.data() + first,
          to + i * Layout::block_bytes);
    }
    store_numbers(rows, fitted, by_lane(run_scales, order), by_lane(run_minima, order), to);
  }

 private:
  static HWY_INLINE void store_numbers(const LaneRows<run>& rows, const Fitted& fitted,
                                       const LaneNumbers& scales, const LaneNumbers& minima,
                                       std::byte* to) {
    alignas(64) LaneCodes<run> codes;
    write_codes<run>(
        rows, scales,
        [&](VF number, std::size_t lane) {
          return shifted_code(number, row_at(scales.data() + lane), row_at(minima.data() + lane),
                              Search::top);
        },
        [&](VF number, std::size_t lane, const std::uint8_t* /*place*/) {
          return affine_code(number, row_at(fitted.code_scales.data() + lane),
                             row_at(fitted.code_minima.data() + lane), Search::top);
        },
        codes);
    Layout::store_codes(codes.data(), to);
  }
};

// ---- scales without minima

HWY_INLINE VI quotient_code(VF number, VF scale, int middle) {
  const VI code = clamped(nearest_integers(hn::Div(number, scale)), -middle, middle - 1);
  return hn::Add(code, integers(middle));
}

// Stores the scale of a block and the codes of its runs' scales. Returns the decoded scales of the
// runs, by lane.
template <class Layout>
HWY_INLINE LaneNumbers store_centered_scales(float scale, const int* codes, std::byte* block) {
  store_f16(block + Layout::scale_at, scale);
  Layout::store_scales(codes, block);
  const float stored = number::load<Dtype::f16>(block + Layout::scale_at);
  LaneNumbers scales;
  for (std::size_t i = 0; i < lane_count; ++i) scales[i] = stored * static_cast<float>(codes[i]);
  return by_lane(scales, lane_order<Layout::run>());
}

// Stores the codes of all values. `old_code`: see write_codes().
template <class Layout, class OldCode>
HWY_INLINE void store_quotients(const LaneRows<Layout::run>& rows, const LaneNumbers& scales,
                                OldCode old_code, LaneCodes<Layout::run>& codes, std::byte* to) {
  write_codes<Layout::run>(
      rows, scales,
      [&](VF number, std::size_t lane) {
        return quotient_code(number, row_at(scales.data() + lane), Layout::middle);
      },
      old_code, codes);
  Layout::store_codes(codes.data(), to);
}

template <class Layout>
HWY_INLINE void store_centered(const LaneRows<Layout::run>& rows, const Fitted& fitted,
                               const LaneNumbers& scales, std::byte* to) {
  alignas(64) LaneCodes<Layout::run> codes;
  store_quotients<Layout>(
      rows, scales,
      [&](VF number, std::size_t lane, const std::uint8_t* /*place*/) {
        return stored_centered_code(number, row_at(fitted.code_scales.data() + lane),
                                    Layout::middle);
      },
      codes, to);
}

struct Q3_KGroup : Q3_KLayout {
  static constexpr LaneOrder order = lane_order<run>();

  static void encode(const GroupNumbers& group, std::byte* to) {
    alignas(64) LaneRows<run> rows;
    spread_runs<run>(group.numbers, order, rows);
    if (group.importance != nullptr) return encode_weighted(group, rows, to);
    alignas(64) LaneCodes<run> codes;
    alignas(64) LaneNumbers fitted;
    fit_refined<run, middle>(rows, fitted, codes);
    std::array<int, lane_count> scale_codes;
    const float scale = choose(by_run(fitted, order), scale_codes.data());
    const LaneNumbers scales = store_centered_scales<Q3_KLayout>(scale, scale_codes.data(), to);
    store_quotients<Q3_KLayout>(
        rows, scales,
        [](VF /*number*/, std::size_t /*lane*/, const std::uint8_t* place) {
          return hn::PromoteTo(I32(), hn::LoadU(U8(), place));
        },
        codes, to);
  }

 private:
  static void encode_weighted(const GroupNumbers& group, const LaneRows<run>& rows, std::byte* to) {
    alignas(64) LaneRows<run> weights;
    Fitted fitted;
    weigh_blocks<Q3_KLayout>(group, 2.0f, rows, weights);
    fit_centered<run, middle>(rows, weights, fitted);
    std::array<int, lane_count> scale_codes;
    const float scale =
        fit_around_zero<lane_count, 32>(by_run(fitted.scales, order).data(),
                                        weights_of_runs<run>(weights).data(), scale_codes.data());
    const LaneNumbers scales = store_centered_scales<Q3_KLayout>(scale, scale_codes.data(), to);
    store_centered<Q3_KLayout>(rows, fitted, scales, to);
  }
};

struct Q6_KGroup : Q6_KLayout {
  static constexpr LaneOrder order = lane_order<run>();

  static void encode(const GroupNumbers& group, std::byte* to) {
    alignas(64) LaneRows<run> rows;
    alignas(64) LaneRows<run> weights;
    Fitted fitted;
    spread_runs<run>(group.numbers, order, rows);
    if (group.importance == nullptr) {
      weigh_squares<run>(rows, weights);
    } else {
      spread_runs<run>(group.importance, order, weights);
    }
    fit_centered<run, middle>(rows, weights, fitted);
    const LaneNumbers by_runs = by_run(fitted.scales, order);
    if (std::abs(extreme_of(by_runs.data(), lane_count)) < smallest_fitted) {
      std::fill_n(to, block_bytes, std::byte{});
      return;
    }
    std::array<int, lane_count> scale_codes;
    const float scale = choose(by_runs, scale_codes.data());
    const LaneNumbers scales = store_centered_scales<Q6_KLayout>(scale, scale_codes.data(), to);
    store_centered<Q6_KLayout>(rows, fitted, scales, to);
  }
};

template <class Group>
void encode_k(const float* numbers, std::uint64_t block_count, const BlockImportance* importance,
              std::byte* blocks) noexcept {
  encode_groups<Group>(numbers, block_count, importance, blocks);
}

EncodeBlocks FindKEncoder(BlockFormat format) {
  switch (format) {
    case BlockFormat::q2_k:
      return encode_k<AffineGroup<Q2_KLayout, Q2_KSearch>>;
    case BlockFormat::q3_k:
      return encode_k<Q3_KGroup>;
    case BlockFormat::q4_k:
      return encode_k<AffineGroup<Q4_KLayout, Q4_KSearch>>;
    case BlockFormat::q5_k:
      return encode_k<AffineGroup<Q5_KLayout, Q5_KSearch>>;
    case BlockFormat::q6_k:
      return encode_k<Q6_KGroup>;
    default:
      return nullptr;
  }
}

}  // namespace loadstone::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace loadstone::simd {

HWY_EXPORT(FindKEncoder);

EncodeBlocks k_encoder(BlockFormat format) noexcept {
  return HWY_DYNAMIC_DISPATCH(FindKEncoder)(format);
}

}  // namespace loadstone::simd
#endif
