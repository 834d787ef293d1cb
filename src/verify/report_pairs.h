// Compares samples of pairs with different encodings, and reports all pairs of a comparison.
#pragma once

#include <cstdint>
#include <vector>

#include "catalog/open_shards.h"
#include "engine/jobs.h"
#include "loadstone/catalog.h"
#include "loadstone/verify.h"
#include "verify/error_size.h"
#include "verify/pairs.h"

namespace loadstone {

// Returns the bytes that a comparison reads: all tensors, except that it reads only samples of
// values whose encodings differ.
[[nodiscard]] std::uint64_t bytes_to_compare(const Pairs& pairs, const Catalog& first,
                                             const Catalog& second);

// Adds samples of differently quantized values, and values that are equal after decoding. `report`
// already lists the other differences. `rounded`: the errors that the tolerance of each pair
// allows. Also sets the bytes that `jobs` have read.
void report_pairs(const Pairs& pairs, const std::vector<ErrorSum>& rounded, const OpenShards& first,
                  const OpenShards& second, Jobs& jobs, VerifyReport& report);

}  // namespace loadstone
