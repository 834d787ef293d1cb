// Checks that experts with separate tensors are complete.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "loadstone/catalog.h"
#include "loadstone/finding.h"

namespace loadstone {

// Checks the names of all weights and biases "PREFIX.experts.N.PROJECTION.weight" by the rule of
// catalog/series.h and adds an error for each layer whose experts break it: it names layer, expert
// and the tensor that is missing. For a few shards of many it is a warning: the rest is elsewhere.
// Returns the prefixes ("model.layers.0.mlp.experts") that the findings are of.
std::set<std::string, std::less<>> check_expert_series(const Catalog& catalog,
                                                       std::vector<Finding>& findings);

// Maximal number of tensors from cut stacks of experts: each takes memory, and a header can claim
// any number of them.
[[nodiscard]] std::uint64_t cut_experts_max(const Catalog& catalog) noexcept;

}  // namespace loadstone
