// Finds the remote files that a path refers to.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "loadstone/storage.h"

namespace loadstone {

struct RemotePlace {
  std::string folder;  // pinned to a revision, if the path has a branch
  std::string file;    // a name below the folder; empty: the path refers to the folder
};

// Treats paths that end in a slash, and paths of repositories, as folders. Throws Error "io.*".
[[nodiscard]] RemotePlace find_remote(Storage& storage, const std::string& path);

// Returns false if the host reports that the file does not exist.
[[nodiscard]] bool has_remote(Storage& storage, const std::string& path);

// Returns the names in the folder; nullopt if the host does not list them or denies access.
[[nodiscard]] std::optional<std::vector<std::string>> list_remote(Storage& storage,
                                                                  const std::string& folder);

}  // namespace loadstone
