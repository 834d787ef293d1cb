// Torch checkpoints (.bin, .pt, .pth, .ckpt), read as data: zip archives, and the stacked pickles
// of torch before 1.6. Nothing in them is called. The bytes and the rules: docs/formats/torch.md.
#pragma once

#include <string_view>

#include "formats/file_header.h"
#include "loadstone/storage.h"

namespace loadstone {

// ".bin", ".pt", ".pth", ".ckpt"
[[nodiscard]] bool is_torch_name(std::string_view file_name) noexcept;

// Returns true for the name of a module's extra state (get_extra_state), or of a part of one:
// "a._extra_state", "a._extra_state.step", "a._extra_state/shard_0_2".
[[nodiscard]] bool is_extra_state(std::string_view name) noexcept;

// Reads the directory and the pickle, and nothing of the data. Throws Error "pt.*", "io.*".
[[nodiscard]] FileHeader read_torch(ByteSource& source);

}  // namespace loadstone
