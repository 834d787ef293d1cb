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
// catalog/series.h. Adds an error for each layer whose experts break the rule. The error names the
// layer, the expert and the missing tensor. If the catalog has only a few of many shards, adds a
// warning instead, because other shards may contain the tensor. Returns the prefixes of the layers
// with findings, such as "model.layers.0.mlp.experts".
std::set<std::string, std::less<>> check_expert_series(const Catalog& catalog,
                                                       std::vector<Finding>& findings);

// Returns the maximum number of tensors that loadstone cuts from stacks of experts, because each
// takes memory and a header can claim any number of experts.
[[nodiscard]] std::uint64_t cut_experts_max(const Catalog& catalog) noexcept;

}  // namespace loadstone
