// A tensor of a shard: name, encoding, shape and byte range.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "loadstone/dtype.h"
#include "loadstone/shape.h"

namespace loadstone {

struct TensorInfo {
  std::string name;
  Encoding encoding = Dtype::u8;
  Shape shape;
  std::uint32_t shard = 0;         // index into Catalog::shards()
  std::uint64_t offset_begin = 0;  // counted from the start of the shard
  std::uint64_t offset_end = 0;
  // Strides in elements, outermost first, if the tensor is not contiguous (views that torch saved).
  // The byte range then spans the first to the last element: elements of other tensors may be in
  // between, and one element may have several indices. Empty: contiguous.
  std::vector<std::uint64_t> strides = {};

  // Returns the size of the byte range in the file.
  [[nodiscard]] std::uint64_t byte_count() const noexcept { return offset_end - offset_begin; }
};

}  // namespace loadstone
