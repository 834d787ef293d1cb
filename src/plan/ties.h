// Decides which names of a tie remain one tensor after adapters change some of them.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "loadstone/catalog.h"
#include "loadstone/finding.h"
#include "plan/adapters.h"

namespace loadstone {

// The names of a tie that have separate drafts, with the root first.
using DraftTie = std::vector<std::string>;

// The new root of each name.
using TieRoots = std::map<std::string, std::string, std::less<>>;

// Decides which names remain one tensor: names that no adapter changed, and names that adapters
// changed by equal values or products. Returns the new root of every name of a split tie. Adds a
// warning "merge.tie" for each split tie.
[[nodiscard]] TieRoots split_roots(const Catalog& catalog, const std::vector<DraftTie>& ties,
                                   const MergeDrafts& drafts, std::vector<Finding>& findings);

}  // namespace loadstone
