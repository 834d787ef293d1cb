// Which tensors an output has, without any model: what rules and recipes make of the sources.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "loadstone/catalog.h"
#include "loadstone/convert.h"
#include "loadstone/finding.h"
#include "loadstone/recipe.h"

namespace loadstone {

struct Outputs {
  Recipes recipes{};  // one for each tensor of the output, in the file's order
  std::vector<std::string> known_sources{};  // that are left out on purpose
  std::vector<RepackedTensor> repacked{};
  bool unties = false;  // names that the source's config ties have values of their own
};

// What stands in the way is added to `findings`.
[[nodiscard]] Outputs output_recipes(const std::shared_ptr<const Catalog>& catalog,
                                     const ConvertOptions& options, bool is_decoded,
                                     std::vector<Finding>& findings);

}  // namespace loadstone
