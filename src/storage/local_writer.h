// Declares the writing part of the local file system.
#pragma once

#include "loadstone/storage.h"

namespace loadstone {

[[nodiscard]] WritableStorage& local_writer();

}  // namespace loadstone
