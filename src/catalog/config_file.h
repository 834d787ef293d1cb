// Reads the configs in a checkpoint's folder: JSON files that determine the meaning of its tensors.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "catalog/open_file.h"

namespace loadstone {

// Throws Error "format.config" if the text is not a JSON object (in modules.json: an array) by the
// rules of Python's json module, and "q.config" if it gives a field twice.
void check_config(std::string_view text, const std::string& path);

// Returns the unchanged text of a config that passed check_config(). Throws Error "format.config"
// also for a file of more than 64 MiB, and "io.*".
[[nodiscard]] std::string read_config(ByteSource& file);

// Reads a file of the folder as read_config() does. Returns nullopt if the file is missing, and an
// empty string if a link leads out of the folder or the host denies access. Throws Error
// "ix.not_regular" if the name is that of a folder.
[[nodiscard]] std::optional<std::string> find_config(const FileOpener& opener,
                                                     const std::string& folder,
                                                     std::string_view name);

}  // namespace loadstone
