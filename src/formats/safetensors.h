// The safetensors format: 8 bytes of length, a JSON header, and the tensors' bytes without a gap.
// Rules and codes: docs/formats/safetensors.md.
#pragma once

#include <cstdint>

#include "formats/file_header.h"
#include "loadstone/storage.h"

namespace loadstone {

// The format's own limit.
inline constexpr std::uint64_t safetensors_header_bytes_max = 100'000'000;

// Reads length and header, not a byte of data, and checks every rule. Throws Error "st.*", "io.*".
[[nodiscard]] FileHeader read_safetensors(ByteSource& source);

}  // namespace loadstone
