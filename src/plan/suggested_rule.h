// A rule for somebody to copy who has the right tensor under another name.
#pragma once

#include <string>
#include <string_view>

namespace loadstone {

// The rename rule, as JSON, that makes `target` of `source`. Where both hold the same numbers in
// the same order, it holds for any numbers: one rule for all layers.
[[nodiscard]] std::string suggested_rule(std::string_view source, std::string_view target);

}  // namespace loadstone
