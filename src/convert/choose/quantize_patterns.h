// Expressions for modules in configs. They find modules under the names that a library gives them.
// transformers calls `visual.blocks.0` `model.visual.blocks.0` and `vit` `vision_tower`: names of
// the file alone do not find them. Expressions are those of Python's re and RE2, and match from the
// first character on.
#pragma once

#include <string>
#include <vector>

namespace loadstone {

// Expressions that together match as many of the modules as they can, and none of the others: what
// chooses modules by default where it holds, single modules under any prefix elsewhere.
[[nodiscard]] std::vector<std::string> patterns_of_plain(const std::vector<std::string>& plain,
                                                         const std::vector<std::string>& quantized);

// An expression for each stack of experts, that matches all inside it and none of the others.
[[nodiscard]] std::vector<std::string> patterns_of_stacks(
    const std::vector<std::string>& stacks, const std::vector<std::string>& quantized);

// Expressions for modules that nothing chooses by default, and none of the others: for those of all
// layers at once, or for single ones.
[[nodiscard]] std::vector<std::string> patterns_of_layers(const std::vector<std::string>& modules,
                                                          const std::vector<std::string>& others);

}  // namespace loadstone
