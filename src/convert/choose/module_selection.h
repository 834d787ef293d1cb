// Selects module names by few patterns that match no other name. The patterns are valid in
// Python's re and in RE2, and match from the first character.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace loadstone {

// A list of up to this many names contains the names, even if patterns match them.
inline constexpr std::size_t listed_names_max = 8;

struct Selection {
  std::vector<std::string> patterns;
  std::vector<std::string> unmatched;  // names that no pattern matches, in their order

  // Returns the entries of a list of compressed-tensors that selects all of `names`.
  [[nodiscard]] std::vector<std::string> entries(const std::vector<std::string>& names) const;
};

// Returns patterns that match none of `others`. A pattern also matches the modules under other
// prefixes, unless it would then match one of `others`, because libraries rename modules:
// transformers renames `visual.blocks.0` to `model.visual.blocks.0`, and `layer.0` to `layers.0`. A
// pattern matches any number if all numbers are selected.
[[nodiscard]] Selection select_modules(const std::vector<std::string>& names,
                                       const std::vector<std::string>& others);

// Returns patterns that match everything inside the modules, and nothing else.
[[nodiscard]] std::vector<std::string> patterns_inside(const std::vector<std::string>& modules,
                                                       const std::vector<std::string>& others);

}  // namespace loadstone
