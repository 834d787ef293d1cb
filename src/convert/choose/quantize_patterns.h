// Expressions for modules in configs, which match the names that a library gives them.
// transformers renames `visual.blocks.0` to `model.visual.blocks.0` and `vit` to `vision_tower`, so
// names of the file alone would not match. Expressions are valid in Python's re and in RE2, and
// match from the first character.
#pragma once

#include <string>
#include <vector>

namespace loadstone {

// Returns expressions that together match as many of the modules as possible and no other: the
// default rule if it applies, otherwise single modules under any prefix.
[[nodiscard]] std::vector<std::string> patterns_of_plain(const std::vector<std::string>& plain,
                                                         const std::vector<std::string>& quantized);

// Returns an expression per stack of experts that matches everything inside it and nothing else.
[[nodiscard]] std::vector<std::string> patterns_of_stacks(
    const std::vector<std::string>& stacks, const std::vector<std::string>& quantized);

// Returns expressions for modules that no default rule chooses, and for no other: for all layers at
// once, or for single ones.
[[nodiscard]] std::vector<std::string> patterns_of_layers(const std::vector<std::string>& modules,
                                                          const std::vector<std::string>& others);

}  // namespace loadstone
