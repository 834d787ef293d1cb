// Layouts that are known to be quantized and are not decoded: refused by name, never taken for
// numbers.
#pragma once

#include "codec/families.h"

namespace loadstone {

extern const Family unknown_family;

}  // namespace loadstone
