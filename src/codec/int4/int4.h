// ModelOpt's integers of 4 bits, in two layouts that some shapes cannot tell apart.
// docs/formats/modelopt.md
#pragma once

#include <string_view>

#include "codec/families.h"
#include "loadstone/shape.h"

namespace loadstone {

extern const Family int4_family;

// Where shapes fit both layouts a conversion writes "int4" or "int4-awq" under this key of the
// header's metadata.
inline constexpr std::string_view int4_metadata_key = "loadstone.int4";

// Whether numbers of this shape, encoded so, would not be told by their shapes alone.
[[nodiscard]] bool is_ambiguous_int4(std::string_view encoding, const Shape& shape) noexcept;

}  // namespace loadstone
