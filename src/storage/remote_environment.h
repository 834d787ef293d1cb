// Reads the environment variables for access to remote files, for the command and the Python
// package.
#pragma once

#include <functional>
#include <string>

#include "loadstone/remote.h"

namespace loadstone {

// `variable`: returns the value of an environment variable. If none has the hub's token, reads the
// token from its file.
[[nodiscard]] RemoteOptions remote_options_from(
    const std::function<std::string(const std::string& variable)>& variable);

}  // namespace loadstone
