// Converts the system's file status to loadstone's types.
#pragma once

#include <sys/stat.h>

#include <string>

#include "loadstone/storage.h"

namespace loadstone {

[[nodiscard]] FileIdentity identity_of(const struct stat& status) noexcept;
[[nodiscard]] FileStatus status_of(const struct stat& status) noexcept;

// Returns true if the path is the root of a mounted file system, even if its parent folder is on
// the same file system (mount --bind). Does not follow a link. False if the system does not report
// this (before Linux 5.8).
[[nodiscard]] bool is_mount_point(const std::string& path) noexcept;

}  // namespace loadstone
