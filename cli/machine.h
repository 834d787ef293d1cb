// Identifies this machine.
#pragma once

#include <string>

namespace loadstone::cli {

// Return an empty text if the system does not report the name.
[[nodiscard]] std::string host_name();
[[nodiscard]] std::string processor_name();

}  // namespace loadstone::cli
