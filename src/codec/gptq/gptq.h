// GPTQ: docs/formats/gptq.md
#pragma once

#include "codec/families.h"

namespace loadstone {

extern const Family gptq_family;

}  // namespace loadstone
