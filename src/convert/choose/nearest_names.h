// Suggests tensor names for a pattern that matches none.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace loadstone {

// Returns the names that contain the components most similar to the pattern's, with * in place of
// numbers: "similar names: 'model.layers.*.self_attn.q_proj.weight'". If no name is similar,
// returns the first names.
[[nodiscard]] std::string nearest_names(std::string_view pattern,
                                        const std::vector<std::string>& names);

}  // namespace loadstone
