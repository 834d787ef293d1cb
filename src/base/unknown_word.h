// Makes the message for an unknown word, with the most similar known words.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace loadstone {

// Returns "; did you mean 'load'?", with up to three equally similar words, or an empty string if
// no word is similar. A word that ends with a dot and `typed` counts as a single wrong letter.
[[nodiscard]] std::string did_you_mean(std::string_view typed,
                                       const std::vector<std::string>& known);

// Returns "unknown command 'lod'; did you mean 'load'?", or "...; expected a, b or c" if no word is
// similar.
[[nodiscard]] std::string unknown_word(std::string_view what, std::string_view typed,
                                       const std::vector<std::string>& known);

// Returns the number of insertions, deletions and substitutions; nullopt above `distance_max`.
[[nodiscard]] std::optional<unsigned> edit_distance(std::string_view a, std::string_view b,
                                                    unsigned distance_max);

}  // namespace loadstone
