// Makes the regular expressions by which a config selects modules. They match the names that the
// library uses, which can differ from the names in the file: transformers renames `visual.blocks.0`
// to `model.visual.blocks.0` and `vit` to `vision_tower`. The expressions are valid in Python's re
// and in RE2, and match from the first character.
#pragma once

#include <string>
#include <vector>

namespace loadstone {

// Returns expressions that together match as many of the plain modules as possible and no quantized
// module: default rules if they apply, otherwise single modules under any prefix.
[[nodiscard]] std::vector<std::string> patterns_of_plain(const std::vector<std::string>& plain,
                                                         const std::vector<std::string>& quantized);

// Returns one expression per stack of experts, which matches everything inside the stack and
// nothing else.
[[nodiscard]] std::vector<std::string> patterns_of_stacks(
    const std::vector<std::string>& stacks, const std::vector<std::string>& quantized);

// Returns expressions for modules that no default rule chooses, and for no other modules. Each
// expression covers all layers at once or a single layer.
[[nodiscard]] std::vector<std::string> patterns_of_layers(const std::vector<std::string>& modules,
                                                          const std::vector<std::string>& others);

}  // namespace loadstone
