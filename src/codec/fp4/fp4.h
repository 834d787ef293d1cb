// E2M1 codes with scales of blocks: NVFP4 and MXFP4, under four sets of names.
// docs/formats/modelopt.md
#pragma once

#include "codec/families.h"

namespace loadstone {

extern const Family fp4_family;

}  // namespace loadstone
