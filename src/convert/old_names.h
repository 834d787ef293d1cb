// Lists of modules in configs that are copied while rules rename the modules.
#pragma once

#include <vector>

#include "loadstone/convert.h"

namespace loadstone {

// Warns ("convert.lists") of each list of the output's configs, such as "ignore", with entries that
// match modules of the source and none of the output.
void tell_old_names(const Conversion& conversion, std::vector<Finding>& findings);

}  // namespace loadstone
