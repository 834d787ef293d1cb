// ModelOpt's integers of 4 bits, in two layouts that some shapes cannot tell apart.
// docs/formats/modelopt.md
#pragma once

#include "codec/families.h"

namespace loadstone {

extern const Family int4_family;

}  // namespace loadstone
