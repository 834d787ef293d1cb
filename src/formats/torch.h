// Reads torch checkpoints (.bin, .pt, .pth, .ckpt) as data, and calls nothing in them. They are zip
// archives, or the consecutive pickles of torch before 1.6. Byte layout and rules:
// docs/formats/torch.md.
#pragma once

#include <string_view>

#include "formats/file_header.h"
#include "loadstone/storage.h"

namespace loadstone {

// Returns true for names that end with ".bin", ".pt", ".pth" or ".ckpt".
[[nodiscard]] bool is_torch_name(std::string_view file_name) noexcept;

// Returns true for the name of a module's extra state (get_extra_state), or of a part of one:
// "a._extra_state", "a._extra_state.step", "a._extra_state/shard_0_2".
[[nodiscard]] bool is_extra_state(std::string_view name) noexcept;

// Reads the zip directory and the pickle, but no data. Throws Error "pt.*", "io.*".
[[nodiscard]] FileHeader read_torch(ByteSource& source);

}  // namespace loadstone
