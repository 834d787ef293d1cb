// The sentence for a word that is not known, with the nearest known one.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace loadstone {

// "; did you mean 'load'?", or up to three words that are equally near; empty if none is near. A
// word that ends with `typed` after a dot counts as near as one with a single wrong letter.
[[nodiscard]] std::string did_you_mean(std::string_view typed,
                                       const std::vector<std::string>& known);

// "unknown command 'lod'; did you mean 'load'?"; if none is near, "...; expected a, b or c".
[[nodiscard]] std::string unknown_word(std::string_view what, std::string_view typed,
                                       const std::vector<std::string>& known);

// Insertions, deletions and changes that make one of the other; nothing above `distance_max`.
[[nodiscard]] std::optional<unsigned> edit_distance(std::string_view a, std::string_view b,
                                                    unsigned distance_max);

}  // namespace loadstone
