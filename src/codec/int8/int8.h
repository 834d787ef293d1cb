// Integers of 8 bits with a scale for each row. docs/formats/modelopt.md
#pragma once

#include "codec/families.h"

namespace loadstone {

extern const Family int8_family;

}  // namespace loadstone
