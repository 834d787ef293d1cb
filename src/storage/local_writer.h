// The machine's own file system, as far as it is written to.
#pragma once

#include "loadstone/storage.h"

namespace loadstone {

[[nodiscard]] WritableStorage& local_writer();

}  // namespace loadstone
