// Describes the options of a conversion, for messages about work that was begun with other options.
#pragma once

#include <map>
#include <string>

#include "loadstone/convert.h"

namespace loadstone {

// Returns Conversion::options.
[[nodiscard]] std::map<std::string, std::string> given_options(const ConvertOptions& options);

}  // namespace loadstone
