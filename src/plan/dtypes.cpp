#include "plan/dtypes.h"

#include "kernels/cast.h"

namespace loadstone {

namespace {

bool is_signed(Dtype dtype) noexcept {
  return dtype == Dtype::i8 || dtype == Dtype::i16 || dtype == Dtype::i32 || dtype == Dtype::i64;
}

bool fits_all(Dtype source, Dtype target) noexcept {
  if (source == Dtype::boolean) return true;
  if (target == Dtype::boolean) return false;
  if (is_signed(source) && !is_signed(target)) return false;
  // An unsigned number needs one bit more where the target has a sign.
  const unsigned needed = bits(source) + (is_signed(target) && !is_signed(source) ? 1 : 0);
  return bits(target) >= needed;
}

bool is_whole_number(DtypeKind kind) noexcept {
  return kind == DtypeKind::integer || kind == DtypeKind::boolean;
}

// Which powers of two a float has, and how many digits.
struct FloatRange {
  int digits = 0;  // 0: there are no casts of it
  int largest = 0;
  int smallest = 0;  // subnormal
};

FloatRange float_range(Dtype dtype) noexcept {
  switch (dtype) {
    case Dtype::f64:
      return {53, 1023, -1074};
    case Dtype::f32:
      return {24, 127, -149};
    case Dtype::bf16:
      return {8, 127, -133};
    case Dtype::f16:
      return {11, 15, -24};
    case Dtype::f8_e4m3:
      return {4, 8, -9};
    case Dtype::f8_e5m2:
      return {3, 15, -16};
    case Dtype::f8_e8m0:
      return {1, 127, -127};
    default:
      return {};
  }
}

}  // namespace

bool is_exact(Dtype source, Dtype target) noexcept {
  if (source == target) return true;
  if (!can_cast(source, target)) return false;
  if (is_whole_number(kind(source)) && is_whole_number(kind(target))) {
    return fits_all(source, target);
  }
  const FloatRange from = float_range(source);
  const FloatRange to = float_range(target);
  return from.digits > 0 && to.digits >= from.digits && to.largest >= from.largest &&
         to.smallest <= from.smallest;
}

Passage passage(Encoding source, Dtype target) noexcept {
  if (!source.is_dtype()) return Passage::no_cast;
  if (source.dtype() == target) return Passage::same;
  const DtypeKind from = kind(source.dtype());
  const DtypeKind to = kind(target);
  if (from != to && !(is_whole_number(from) && is_whole_number(to))) return Passage::mismatch;
  if (!can_cast(source.dtype(), target)) return Passage::no_cast;
  if (!is_whole_number(from)) return Passage::cast;
  return fits_all(source.dtype(), target) ? Passage::cast : Passage::lossy;
}

}  // namespace loadstone
