// The message for an unknown dtype.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace loadstone {

// "unknown dtype 'bf15'; did you mean 'bf16'?" `others`: further accepted words.
[[nodiscard]] std::string unknown_dtype(std::string_view text,
                                        std::vector<std::string> others = {});

}  // namespace loadstone
