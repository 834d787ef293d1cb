// How the values of GGUF metadata are made from their bytes.
#pragma once

#include <cstddef>

#include "loadstone/catalog.h"

namespace loadstone {

// Bytes of one number or bool; 0 for strings and arrays, whose length varies.
[[nodiscard]] std::size_t byte_count(MetadataType type) noexcept;

// A number or bool from its little-endian bytes.
[[nodiscard]] MetadataValue number_value(MetadataType type, const std::byte* bytes);

}  // namespace loadstone
