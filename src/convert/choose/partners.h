// Reports weights that servers load as one matrix, but that would have different encodings.
#pragma once

#include <vector>

#include "convert/choose/choose.h"
#include "convert/choose/chooser.h"
#include "loadstone/finding.h"
#include "loadstone/recipe.h"

namespace loadstone {

// Adds one warning for all groups of Chooser::group_of() whose weights would have several
// encodings, or of which only some would be quantized. Omits experts, see Readers.
void report_mixed_partners(const Recipes& recipes, const Chooser& chooser, const Choices& choices,
                           std::vector<Finding>& findings);

}  // namespace loadstone
