// The configs of a checkpoint's folder: files of JSON that decide what its tensors mean.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "catalog/open_file.h"

namespace loadstone {

// Throws Error "format.config" for text that is not an object (of modules.json: an array) of JSON
// as Python's json module reads it, and "q.config" for one that gives a field twice.
void check_config(std::string_view text, const std::string& path);

// The original text of a config that passed check_config(). Throws Error "format.config" also for a
// file of more than 64 MiB, and "io.*".
[[nodiscard]] std::string read_config(ByteSource& file);

// Reads a file of the folder in the same way; nullopt if it is missing; an empty text if a link
// leads out of the folder or the host denies it. Throws Error "ix.not_regular" for a folder of this
// name.
[[nodiscard]] std::optional<std::string> find_config(const FileOpener& opener,
                                                     const std::string& folder,
                                                     std::string_view name);

}  // namespace loadstone
