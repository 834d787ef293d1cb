// The metadata section of GGUF: keys with values of 13 types.
#pragma once

#include <cstdint>

#include "formats/gguf_cursor.h"

namespace loadstone {

// The least that an entry takes in a file: a key of one byte, its length, a type, a value of one
// byte.
inline constexpr std::uint64_t gguf_entry_bytes_min = 8 + 1 + 4 + 1;

// `bytes_after` is the least that is known to follow the section within the header.
[[nodiscard]] Metadata read_gguf_metadata(GgufCursor& cursor, std::uint64_t entry_count,
                                          std::uint64_t bytes_after);

}  // namespace loadstone
