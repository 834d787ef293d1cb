#include "catalog/tensor_values.h"

#include <algorithm>
#include <cstddef>
#include <vector>

#include "catalog/assembled_file.h"

namespace loadstone {

bool are_transposes(const Catalog& catalog, const TensorInfo& first, const TensorInfo& second) {
  const auto is_plain = [](const TensorInfo& each) {
    return each.encoding.is_dtype() && each.strides.empty() && each.shape.rank() == 2 &&
           element_bytes(each.encoding.dtype()) > 0;
  };
  if (!is_plain(first) || !is_plain(second) || first.encoding != second.encoding) return false;
  if (first.shape[0] != second.shape[1] || first.shape[1] != second.shape[0]) return false;
  std::vector<std::byte> row(first.byte_count() / std::max<std::uint64_t>(first.shape[0], 1));
  std::vector<std::byte> other(second.byte_count());
  const auto file = open_shard(catalog.storage(), catalog, first.shard);
  open_shard(catalog.storage(), catalog, second.shard)->read(second.offset_begin, other);
  const std::size_t size = element_bytes(first.encoding.dtype());
  for (std::uint64_t i = 0; i < first.shape[0]; ++i) {
    file->read(first.offset_begin + i * row.size(), row);
    for (std::uint64_t j = 0; j < first.shape[1]; ++j) {
      const auto at = other.begin() + static_cast<std::ptrdiff_t>((j * first.shape[0] + i) * size);
      if (!std::equal(at, at + static_cast<std::ptrdiff_t>(size),
                      row.begin() + static_cast<std::ptrdiff_t>(j * size))) {
        return false;
      }
    }
  }
  return true;
}

bool are_equal(const Catalog& catalog, const TensorInfo& first, const TensorInfo& second) {
  if (first.shape != second.shape || first.encoding != second.encoding) return false;
  if (first.shard == second.shard && first.offset_begin == second.offset_begin) return true;
  constexpr std::uint64_t window_bytes = 1 << 20;
  const auto file = open_shard(catalog.storage(), catalog, first.shard);
  const auto other = open_shard(catalog.storage(), catalog, second.shard);
  const std::uint64_t bytes = first.byte_count();
  std::vector<std::byte> left;
  std::vector<std::byte> right;
  for (std::uint64_t done = 0; done < bytes; done += left.size()) {
    left.resize(std::min(bytes - done, window_bytes));
    right.resize(left.size());
    file->read(first.offset_begin + done, left);
    other->read(second.offset_begin + done, right);
    if (left != right) return false;
  }
  return true;
}

}  // namespace loadstone
