// Opens the files of a checkpoint: remote files concurrently, because each request waits for the
// network.
#pragma once

#include <cstddef>
#include <functional>

#include "loadstone/storage.h"

namespace loadstone {

// Calls `open` for each number below `count`. If `at_once` is 0, as for local files
// (ByteSource::reads_at_once()), this thread makes one call after the other; otherwise up to
// `at_once` threads make the calls. Throws the failure of the lowest number, for which all lower
// numbers have succeeded, and cancels the calls for higher numbers. `storage` reports if the caller
// has cancelled the work.
void for_each_file(Storage& storage, std::size_t count, unsigned at_once,
                   const std::function<void(std::size_t)>& open);

}  // namespace loadstone
