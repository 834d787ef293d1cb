// Which file of another machine a path means.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "loadstone/storage.h"

namespace loadstone {

struct RemotePlace {
  std::string folder;  // of one revision, where the path names a moving one
  std::string file;    // a name below the folder; empty: the folder is meant
};

// Paths that end in a slash, and those of whole repositories, are folders. Throws Error "io.*".
[[nodiscard]] RemotePlace find_remote(Storage& storage, const std::string& path);

// False where the host says that there is no such file.
[[nodiscard]] bool has_remote(Storage& storage, const std::string& path);

// Names in the folder; nothing where the host lists none, or not for us.
[[nodiscard]] std::optional<std::vector<std::string>> list_remote(Storage& storage,
                                                                  const std::string& folder);

}  // namespace loadstone
