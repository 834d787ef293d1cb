// Lists modules by wildcards (fnmatch), as ModelOpt, vLLM and SGLang read them.
#pragma once

#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "convert/choose/quantize_config.h"

namespace loadstone {

// Returns true if a name begins with the prefix.
[[nodiscard]] bool has_prefix(const std::set<std::string>& names, std::string_view prefix);

// Returns wildcards that match all plain modules and no quantized module: PREFIX*, as ModelOpt
// writes them. In a long list, one wildcard with * instead of numbers replaces wildcards that
// differ only in these numbers.
[[nodiscard]] std::vector<std::string> summed_up(const QuantizedModules& modules);

}  // namespace loadstone
