#include "boxes/cast_kind.h"

#include <memory>
#include <utility>

#include "kernels/cast.h"

namespace loadstone {

namespace {

bool fits_all(Dtype source, Dtype target) noexcept {
  if (source == Dtype::boolean) return true;
  if (target == Dtype::boolean) return false;
  if (dtype_info(source).is_signed && !dtype_info(target).is_signed) return false;
  // An unsigned integer needs one more bit in a signed target.
  const unsigned needed =
      bits(source) + (dtype_info(target).is_signed && !dtype_info(source).is_signed ? 1 : 0);
  return bits(target) >= needed;
}

bool is_whole_number(DtypeKind kind) noexcept {
  return kind == DtypeKind::integer || kind == DtypeKind::boolean;
}

}  // namespace

bool is_exact(Dtype source, Dtype target) noexcept {
  if (source == target) return true;
  if (!can_cast(source, target)) return false;
  if (is_whole_number(kind(source)) && is_whole_number(kind(target))) {
    return fits_all(source, target);
  }
  const FloatFormat& from = dtype_info(source).format;
  const FloatFormat& to = dtype_info(target).format;
  return from.digits > 0 && to.digits >= from.digits && to.largest >= from.largest &&
         to.smallest <= from.smallest;
}

CastKind cast_kind(Encoding source, Dtype target) noexcept {
  if (!source.is_dtype()) return CastKind::no_cast;
  if (source.dtype() == target) return CastKind::same;
  const DtypeKind from = kind(source.dtype());
  const DtypeKind to = kind(target);
  const bool is_count = source == Dtype::i64 || source == Dtype::boolean;
  if (is_count && to == DtypeKind::floating && can_cast(source.dtype(), target)) {
    return CastKind::counted;
  }
  if (from != to && !(is_whole_number(from) && is_whole_number(to))) return CastKind::mismatch;
  if (!can_cast(source.dtype(), target)) return CastKind::no_cast;
  if (!is_whole_number(from)) return CastKind::cast;
  return fits_all(source.dtype(), target) ? CastKind::cast : CastKind::lossy;
}

Constant cast_constant(const std::vector<std::byte>& constant, Dtype source, Dtype target) {
  const std::uint64_t elements = constant.size() / element_bytes(source);
  std::vector<std::byte> bytes(elements * element_bytes(target));
  cast_between(source, target).run(constant.data(), bytes.data(), elements);
  return std::make_shared<const std::vector<std::byte>>(std::move(bytes));
}

}  // namespace loadstone
