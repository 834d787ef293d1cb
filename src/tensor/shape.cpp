#include "loadstone/shape.h"

#include "base/checked.h"
#include "base/only_errors.h"

namespace loadstone {

std::optional<std::uint64_t> Shape::numel() const noexcept {
  // Also rejects an overflow among the extents other than 0: [0, 2^40, 2^40] has 0 elements, but
  // every stride computed from it would wrap.
  std::uint64_t product = 1;
  bool empty = false;
  for (const std::uint64_t extent : extents_) {
    if (extent == 0) {
      empty = true;
      continue;
    }
    const auto next = checked_mul(product, extent);
    if (!next) return std::nullopt;
    product = *next;
  }
  return empty ? 0 : product;
}

std::string Shape::text() const {
  return only_errors([&] {
    std::string text = "[";
    for (const std::uint64_t extent : extents_) {
      if (text.size() > 1) text += ", ";
      text += std::to_string(extent);
    }
    return text + "]";
  });
}

bool Slice::is_inside(const Shape& whole) const noexcept {
  if (begin.size() != whole.rank() || shape.rank() != whole.rank()) return false;
  if (!groups.empty() && groups.size() != whole.rank()) return false;
  for (std::size_t dim = 0; dim < whole.rank(); ++dim) {
    const std::uint64_t count = groups_of(dim);
    if (count == 0 || whole[dim] % count != 0 || shape[dim] % count != 0) return false;
    const std::uint64_t group = whole[dim] / count;
    if (begin[dim] > group || shape[dim] / count > group - begin[dim]) return false;
  }
  return true;
}

std::string Slice::text() const {
  return only_errors([&] {
    std::string text = "[";
    for (std::size_t dim = 0; dim < begin.size(); ++dim) {
      const std::uint64_t extent = dim < shape.rank() ? shape[dim] : 0;
      if (text.size() > 1) text += ", ";
      const std::uint64_t count = dim < groups.size() && groups[dim] > 0 ? groups[dim] : 1;
      text += std::to_string(begin[dim]) + ":" + std::to_string(begin[dim] + extent / count);
      if (count > 1) text += " of " + std::to_string(count) + " groups";
    }
    return text + "]";
  });
}

}  // namespace loadstone
