// This machine's file system, for writing.
#pragma once

#include "loadstone/storage.h"

namespace loadstone {

[[nodiscard]] WritableStorage& local_writer();

}  // namespace loadstone
