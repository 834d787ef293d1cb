// Enforces VerifyOptions::require_lossless.
#pragma once

#include "catalog/open_shards.h"
#include "engine/jobs.h"
#include "loadstone/verify.h"
#include "verify/pairs.h"

namespace loadstone {

// Measures all pairs that `report` lists as rounded or as quantized with an error, and adds an
// error "verify.lossy" for each change of encoding that changed values. Removes differences of
// bytes between values that are equal as real numbers. `report` already has the other results.
void report_losses(const Pairs& pairs, const OpenShards& first, const OpenShards& second,
                   Jobs& jobs, VerifyReport& report);

}  // namespace loadstone
