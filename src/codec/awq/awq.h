// AWQ, in the order of its GEMM kernel: docs/formats/awq.md
#pragma once

#include "codec/families.h"

namespace loadstone {

extern const Family awq_family;

}  // namespace loadstone
