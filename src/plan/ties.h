// The names of one tensor when adapters change some of them.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "loadstone/catalog.h"
#include "loadstone/finding.h"
#include "plan/adapters.h"

namespace loadstone {

// The names of a tie with separate drafts, the root first.
using DraftTie = std::vector<std::string>;

// New roots by name.
using TieRoots = std::map<std::string, std::string, std::less<>>;

// Decides which names stay one tensor: those that no adapter changed, and those changed by equal
// values or products. Returns the new root of every name of a split tie. Adds a warning "merge.tie"
// for each.
[[nodiscard]] TieRoots split_roots(const Catalog& catalog, const std::vector<DraftTie>& ties,
                                   const MergeDrafts& drafts, std::vector<Finding>& findings);

}  // namespace loadstone
