// NF4, FP4 and rows of LLM.int8. docs/formats/bitsandbytes.md
#pragma once

#include "codec/families.h"

namespace loadstone {

extern const Family bnb_family;

}  // namespace loadstone
