// Prefixes that wrappers put before all names: "module." of DataParallel, "_orig_mod." of compile.
#pragma once

#include <string>
#include <vector>

#include "loadstone/catalog.h"
#include "loadstone/finding.h"
#include "loadstone/recipe.h"
#include "loadstone/skeleton.h"

namespace loadstone {

// The rule that replaces a literal prefix of names.
[[nodiscard]] Rule prefix_rule(std::string_view prefix, std::string_view replacement);

struct Stripping {
  Rules rules;  // with one for the prefix that all names have, if there is one
  std::vector<Finding> findings;
};

// Strips a prefix only if every name has it (possibly several in sequence) and no name matches the
// model unchanged: of several candidates, the shortest with the most matches. If only some names
// have it, a finding gives a rule. `rules` take precedence.
[[nodiscard]] Stripping strip_prefix(const Catalog& catalog, const Skeleton& skeleton,
                                     const std::vector<std::string>& prefixes, const Rules& rules);

}  // namespace loadstone
