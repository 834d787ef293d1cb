// Environment variables for access to other machines, which only the front ends read.
#pragma once

#include <functional>
#include <string>

#include "loadstone/remote.h"

namespace loadstone {

// `variable`: returns its value or nullopt. If no variable has the hub's token, reads its file.
[[nodiscard]] RemoteOptions remote_options_from(
    const std::function<std::string(const std::string& variable)>& variable);

}  // namespace loadstone
