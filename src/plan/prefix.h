// Strips prefixes that wrappers add to all names, such as DataParallel's "module." and "_orig_mod."
// of torch.compile.
#pragma once

#include <string>
#include <vector>

#include "loadstone/catalog.h"
#include "loadstone/finding.h"
#include "loadstone/recipe.h"
#include "loadstone/skeleton.h"

namespace loadstone {

// Returns the rule that replaces a literal prefix of names.
[[nodiscard]] Rule prefix_rule(std::string_view prefix, std::string_view replacement);

// Returns the same rule as JSON: {"PREFIX": "REPLACEMENT"}
[[nodiscard]] std::string prefix_rule_json(std::string_view prefix, std::string_view replacement);

struct Stripping {
  Rules rules;  // the given rules, and one for the common prefix if there is one
  std::vector<Finding> findings;
};

// Strips a prefix, or a sequence of prefixes, only if all names have it and no name matches the
// model unchanged. Strips the candidate that gives the most matches, or the shortest one of several
// such. If only some names have a prefix, a finding suggests a rule. `rules` take precedence.
[[nodiscard]] Stripping strip_prefix(const Catalog& catalog, const Skeleton& skeleton,
                                     const std::vector<std::string>& prefixes, const Rules& rules);

}  // namespace loadstone
