// FP8 codes with scales: one for all, one a row, one a block. docs/formats/fp8.md
#pragma once

#include "codec/families.h"

namespace loadstone {

extern const Family fp8_family;

}  // namespace loadstone
