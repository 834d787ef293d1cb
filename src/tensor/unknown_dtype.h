// Builds the error message for an unknown dtype.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace loadstone {

// Returns, for example, "unknown dtype 'bf15'; did you mean 'bf16'?". `others` are further accepted
// names.
[[nodiscard]] std::string unknown_dtype(std::string_view text,
                                        std::vector<std::string> others = {});

}  // namespace loadstone
