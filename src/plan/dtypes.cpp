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

}  // namespace

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
