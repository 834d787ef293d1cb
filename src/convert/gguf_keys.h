// Keys of GGUF metadata whose type the format fixes.
#pragma once

#include "loadstone/catalog.h"

namespace loadstone {

// Throws Error "plan.options" for an entry that a caller gives to such a key with another type:
// ggml would refuse the file, or take the key for missing.
void check_key_types(const Metadata& given);

}  // namespace loadstone
