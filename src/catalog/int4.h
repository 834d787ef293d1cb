// Integers of 4 bits in ModelOpt's two layouts, which some shapes cannot tell apart.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "loadstone/catalog.h"
#include "loadstone/shape.h"

namespace loadstone {

// Shapes of the numbers; nothing where weight and scales do not fit the layout.
struct Int4Shapes {
  std::optional<Shape> blocks;  // "int4": [..., rows, columns / 2], [..., blocks, 1]
  std::optional<Shape>
      row_pairs;  // "int4-awq": [..., rows / 2, columns], [..., rows, columns / 128]
};

[[nodiscard]] Int4Shapes int4_shapes(const Shape& weight, const Shape& scales);

// Where shapes fit both layouts a conversion writes "int4" or "int4-awq" under this key of the
// header's metadata.
inline constexpr std::string_view int4_metadata_key = "loadstone.int4";

// Empty where the metadata says neither.
[[nodiscard]] std::string_view int4_encoding(const std::map<std::string, MetadataValue>& metadata);

// Whether numbers of this shape, encoded so, would be told by their shapes alone.
[[nodiscard]] bool is_ambiguous_int4(std::string_view encoding, const Shape& shape) noexcept;

}  // namespace loadstone
