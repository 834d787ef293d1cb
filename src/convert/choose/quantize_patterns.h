// Selects the plain modules of a model by the rules that leave them plain.
#pragma once

#include <string>
#include <vector>

#include "convert/choose/module_selection.h"

namespace loadstone {

// Returns patterns that match plain modules and no quantized module: default rules if they apply,
// otherwise the patterns of select_modules().
[[nodiscard]] Selection select_plain(const std::vector<std::string>& plain,
                                     const std::vector<std::string>& quantized);

}  // namespace loadstone
