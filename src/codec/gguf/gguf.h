// Blocks that hold their scales. docs/formats/gguf.md
#pragma once

#include "codec/families.h"

namespace loadstone {

extern const Family gguf_family;

}  // namespace loadstone
