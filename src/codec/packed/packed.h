// Integers of compressed-tensors, packed in words: docs/formats/compressed-tensors.md
#pragma once

#include "codec/families.h"

namespace loadstone {

extern const Family packed_family;

}  // namespace loadstone
