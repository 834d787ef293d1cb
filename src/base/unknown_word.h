// The message for an unknown word, with the nearest known one.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace loadstone {

// Returns "; did you mean 'load'?", or up to three equally near words; empty if none is near. A
// word that ends with `typed` after a dot is as near as one with a single wrong letter.
[[nodiscard]] std::string did_you_mean(std::string_view typed,
                                       const std::vector<std::string>& known);

// "unknown command 'lod'; did you mean 'load'?"; if none is near, "...; expected a, b or c".
[[nodiscard]] std::string unknown_word(std::string_view what, std::string_view typed,
                                       const std::vector<std::string>& known);

// Returns the number of insertions, deletions and changes; nullopt above `distance_max`.
[[nodiscard]] std::optional<unsigned> edit_distance(std::string_view a, std::string_view b,
                                                    unsigned distance_max);

}  // namespace loadstone
