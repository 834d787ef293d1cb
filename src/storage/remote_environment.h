// Which variables say how other machines are reached. The front ends read them, nobody else.
#pragma once

#include <functional>
#include <string>

#include "loadstone/remote.h"

namespace loadstone {

// `variable`: its value, or nothing. Reads the hub's token from its file where no variable has it.
[[nodiscard]] RemoteOptions remote_options_from(
    const std::function<std::string(const std::string& variable)>& variable);

}  // namespace loadstone
