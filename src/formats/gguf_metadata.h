// Reads the metadata section of a GGUF file: keys with values of 13 types.
#pragma once

#include <cstdint>

#include "formats/gguf_cursor.h"

namespace loadstone {

// Minimum size of an entry in a file: the length of the key, a key of one byte, the type, and a
// value of one byte.
inline constexpr std::uint64_t gguf_entry_bytes_min = 8 + 1 + 4 + 1;

// `bytes_after`: minimum number of header bytes that follow the section.
[[nodiscard]] Metadata read_gguf_metadata(GgufCursor& cursor, std::uint64_t entry_count,
                                          std::uint64_t bytes_after);

}  // namespace loadstone
