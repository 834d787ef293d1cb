// What a checkpoint's tensors mean, before rules give them names: numbers that are stored
// quantized, and experts that are stored one by one or all in one tensor.
#pragma once

#include <memory>
#include <vector>

#include "loadstone/catalog.h"
#include "loadstone/convert.h"
#include "loadstone/finding.h"
#include "loadstone/recipe.h"

namespace loadstone {

struct Values {
  Recipes recipes;                     // of what is decoded, fused or separated
  std::vector<std::uint32_t> dropped;  // sources that mean nothing beside it any more
};

// As `options.dequantize` and `options.experts` ask for.
[[nodiscard]] Values values_of(const std::shared_ptr<const Catalog>& catalog,
                               const ConvertOptions& options, std::vector<Finding>& findings);

}  // namespace loadstone
