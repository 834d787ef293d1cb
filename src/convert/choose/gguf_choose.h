// Chooses block formats for the tensors of a GGUF file.
#pragma once

#include <vector>

#include "convert/choose/choose.h"

namespace loadstone {

// Chooses the type of each tensor: by the rules of mixes for language models with llama.cpp's names
// and for image models, otherwise by quantize_rules.h. Also sets general.file_type and
// general.quantization_version, and the dtypes of recipes with a plain type. Throws Error
// "plan.options" for invalid patterns, and for formats that a GGUF file cannot store or this
// version cannot write.
[[nodiscard]] Choices choose_blocks(const ConvertOptions& options, const Catalog& catalog,
                                    Metadata& metadata, Recipes& recipes,
                                    std::vector<Finding>& findings);

// Erases the keys that name the importance matrix of the source's blocks, except those in `given`.
void erase_importance(const Metadata& given, Metadata& metadata);

}  // namespace loadstone
