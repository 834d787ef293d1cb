// Processes 16 runs of values in parallel, one per lane. Each lane sums and compares in the order
// of a plain loop over its run, so results have the same bits on every instruction set. Included by
// files that Highway compiles once per instruction set.

#include "kernels/gguf/lanes.h"

#if defined(LOADSTONE_KERNELS_GGUF_LANES_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef LOADSTONE_KERNELS_GGUF_LANES_INL_H
#undef LOADSTONE_KERNELS_GGUF_LANES_INL_H
#else
#define LOADSTONE_KERNELS_GGUF_LANES_INL_H
#endif

#include <hwy/highway.h>

#include "kernels/gguf/codes_inl.h"

HWY_BEFORE_NAMESPACE();
namespace loadstone::simd::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// Transposes 16 consecutive runs, so that lane i contains run order[i].
template <std::size_t run>
HWY_INLINE void spread_runs(const float* numbers, const LaneOrder& order, LaneRows<run>& rows) {
#if HWY_TARGET == HWY_SCALAR
  for (std::size_t lane = 0; lane < lane_count; ++lane) {
    const float* const from = numbers + order[lane] * run;
    for (std::size_t i = 0; i < run; ++i) rows[i * lane_count + lane] = from[i];
  }
#else
  const hn::FixedTag<float, 4> d;
  for (std::size_t lane = 0; lane < lane_count; lane += 4) {
    for (std::size_t i = 0; i < run; i += 4) {
      const auto a = hn::LoadU(d, numbers + order[lane] * run + i);
      const auto b = hn::LoadU(d, numbers + order[lane + 1] * run + i);
      const auto c = hn::LoadU(d, numbers + order[lane + 2] * run + i);
      const auto e = hn::LoadU(d, numbers + order[lane + 3] * run + i);
      const auto first_ab = hn::InterleaveLower(d, a, b);
      const auto first_ce = hn::InterleaveLower(d, c, e);
      const auto last_ab = hn::InterleaveUpper(d, a, b);
      const auto last_ce = hn::InterleaveUpper(d, c, e);
      float* const to = rows.data() + i * lane_count + lane;
      hn::StoreU(hn::ConcatLowerLower(d, first_ce, first_ab), d, to);
      hn::StoreU(hn::ConcatUpperUpper(d, first_ce, first_ab), d, to + lane_count);
      hn::StoreU(hn::ConcatLowerLower(d, last_ce, last_ab), d, to + 2 * lane_count);
      hn::StoreU(hn::ConcatUpperUpper(d, last_ce, last_ab), d, to + 3 * lane_count);
    }
  }
#endif
}

HWY_INLINE VF row_at(const float* row) { return hn::LoadU(F32(), row); }

// Writes the codes of all values: new_code(value, lane), where `lane` is the first lane of the
// vector. In lanes with scale 0, writes old_code(value, lane, address of the code) instead.
template <std::size_t run, class NewCode, class OldCode>
HWY_INLINE void write_codes(const LaneRows<run>& rows, const LaneNumbers& scales, NewCode new_code,
                            OldCode old_code, LaneCodes<run>& codes) {
  const F32 d;
  for (std::size_t lane = 0; lane < lane_count; lane += hn::Lanes(d)) {
    const auto is_zero = hn::Eq(hn::LoadU(d, scales.data() + lane), hn::Zero(d));
    const bool has_zeros = !hn::AllFalse(d, is_zero);
    for (std::size_t i = 0; i < run; ++i) {
      const VF number = row_at(rows.data() + i * lane_count + lane);
      std::uint8_t* const place = codes.data() + i * lane_count + lane;
      VI code = new_code(number, lane);
      if (HWY_UNLIKELY(has_zeros)) {
        const VI old = old_code(number, lane, place);
        code = hn::IfThenElse(hn::RebindMask(I32(), is_zero), old, code);
      }
      store_codes(code, place);
    }
  }
}

}  // namespace loadstone::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
