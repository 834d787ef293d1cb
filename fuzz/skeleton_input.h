// Builds skeletons, rules and options from a fuzzer's decisions.
#pragma once

#include <memory>
#include <string>

#include "fuzz/input.h"
#include "loadstone/convert.h"
#include "loadstone/plan.h"
#include "loadstone/skeleton.h"

namespace loadstone::fuzz {

// Returns targets for most of the catalog's tensors, and some others. May throw Error.
[[nodiscard]] Skeleton skeleton_for(const Catalog& catalog, Input& input);

// Returns rules, recipes, dtypes, devices and budgets. May throw Error.
[[nodiscard]] PlanOptions plan_options_for(const std::shared_ptr<const Catalog>& catalog,
                                           const Skeleton& skeleton, Input& input,
                                           const std::string& offload_folder);

// Returns options for a conversion. May throw Error.
[[nodiscard]] ConvertOptions convert_options_for(const std::shared_ptr<const Catalog>& catalog,
                                                 Input& input);

}  // namespace loadstone::fuzz
