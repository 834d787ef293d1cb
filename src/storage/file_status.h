// Converts the system's file status to loadstone's types.
#pragma once

#include <sys/stat.h>

#include "loadstone/storage.h"

namespace loadstone {

[[nodiscard]] FileIdentity identity_of(const struct stat& status) noexcept;
[[nodiscard]] FileStatus status_of(const struct stat& status) noexcept;

}  // namespace loadstone
