// Vector versions of codes.h: rounds values to integers as ggml does, and stores integers as bytes.
// Included by files that Highway compiles once for each instruction set.

#include "kernels/gguf/codes.h"

#if defined(LOADSTONE_KERNELS_GGUF_CODES_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef LOADSTONE_KERNELS_GGUF_CODES_INL_H
#undef LOADSTONE_KERNELS_GGUF_CODES_INL_H
#else
#define LOADSTONE_KERNELS_GGUF_CODES_INL_H
#endif

#include <hwy/highway.h>

#include "kernels/numbers_inl.h"

HWY_BEFORE_NAMESPACE();
namespace loadstone::simd::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using VI = hn::Vec<I32>;

HWY_INLINE VI integers(int value) { return hn::Set(I32(), value); }
HWY_INLINE VF floats(float value) { return hn::Set(F32(), value); }

// Applies nearest_integer() to each lane.
HWY_INLINE VI nearest_integers(VF values) {
  const VI bits = hn::BitCast(I32(), hn::Add(values, floats(12582912.0f)));
  return hn::Sub(hn::And(bits, integers(0x7fffff)), integers(0x400000));
}

HWY_INLINE VI clamped(VI values, int least, int most) {
  return hn::Min(hn::Max(values, integers(least)), integers(most));
}

// Returns the nearest integers, ties away from zero, for magnitudes far below 2^22. Adds the
// largest float below a half, because adding a half could round a value past the next integer.
HWY_INLINE VI rounded_away(VF values) {
  const VF half = floats(0.49999997f);
  return hn::ConvertTo(I32(), hn::Add(values, hn::CopySign(half, values)));
}

// Stores one byte per lane. The values must fit a byte.
template <class Byte>
HWY_INLINE void store_codes(VI values, Byte* to) {
  const hn::Rebind<Byte, F32> d;
  hn::StoreU(hn::DemoteTo(d, values), d, to);
}

}  // namespace loadstone::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
