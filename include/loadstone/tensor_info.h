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
  std::uint64_t offset_begin = 0;  // absolute in the shard
  std::uint64_t offset_end = 0;
  // Elements from one index to the next, outermost first, where the elements do not stand in C
  // order: views that torch saved. The range then reaches from the first element to the last, and
  // may hold others between them, or one for many indices. Empty: C order.
  std::vector<std::uint64_t> strides = {};

  // Of the range in the file.
  [[nodiscard]] std::uint64_t byte_count() const noexcept { return offset_end - offset_begin; }
};

}  // namespace loadstone
