// Counts unusual values in bytes of one encoding.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "loadstone/catalog.h"
#include "loadstone/dtype.h"
#include "loadstone/finding.h"

namespace loadstone {

struct ValueCounts {
  std::uint64_t nan = 0;
  std::uint64_t infinite = 0;
  std::uint64_t bad_bools = 0;   // bytes other than 0 and 1
  std::uint64_t bad_scales = 0;  // blocks whose scale is not finite

  ValueCounts& operator+=(const ValueCounts& other) noexcept;
  ValueCounts& operator-=(const ValueCounts& other) noexcept;
};

// Bytes of the smallest part that can be examined alone: an element or a block.
[[nodiscard]] std::size_t unit_bytes(Encoding encoding) noexcept;

// `bytes` must be whole units.
[[nodiscard]] ValueCounts count_values(Encoding encoding,
                                       std::span<const std::byte> bytes) noexcept;

[[nodiscard]] Finding finding_of(const Catalog& catalog, const TensorInfo& tensor, std::string code,
                                 std::string found, std::string expected);

}  // namespace loadstone
