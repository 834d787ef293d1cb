// Between the system's status of a file and ours.
#pragma once

#include <sys/stat.h>

#include "loadstone/storage.h"

namespace loadstone {

[[nodiscard]] FileIdentity identity_of(const struct stat& status) noexcept;
[[nodiscard]] FileStatus status_of(const struct stat& status) noexcept;

}  // namespace loadstone
