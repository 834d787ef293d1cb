// Which tensors of a GGUF file are quantized, and to which type: llama.cpp's rules for language
// models under llama.cpp's names, the rules of quantize_rules.h for others.
#pragma once

#include <string_view>
#include <vector>

#include "convert/choose.h"
#include "loadstone/catalog.h"
#include "loadstone/convert.h"
#include "loadstone/finding.h"
#include "loadstone/recipe.h"

namespace loadstone {

// Whether a name is that of a mix, or of a plain type.
[[nodiscard]] bool is_block_format(std::string_view name);

// Sets what general.file_type and general.quantization_version are then, and the dtypes of recipes
// that become another plain type. Throws Error "plan.options" for patterns that are none, and for
// formats that a GGUF file or this version does not have.
[[nodiscard]] Choices choose_blocks(const ConvertOptions& options, const Catalog& catalog,
                                    Metadata& metadata, Recipes& recipes,
                                    std::vector<Finding>& findings);

}  // namespace loadstone
