// Lists of modules in configs that are copied while rules rename the modules.
#pragma once

#include <vector>

#include "loadstone/convert.h"

namespace loadstone {

// Warns ("convert.lists") of each list of the output's configs, such as "ignore", that selects
// other modules of the output than it does of the source.
void tell_old_names(const Conversion& conversion, std::vector<Finding>& findings);

}  // namespace loadstone
