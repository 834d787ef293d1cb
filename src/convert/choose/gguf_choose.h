// The choice of block formats for the tensors of a GGUF file.
#pragma once

#include <vector>

#include "convert/choose/choose.h"

namespace loadstone {

// Sets what general.file_type and general.quantization_version are then, and the dtypes of recipes
// that become another plain type: by these rules for language models under llama.cpp's names and
// models of images, by those of quantize_rules.h for others. Throws Error "plan.options" for
// invalid patterns, and for formats that a GGUF file or this version does not have.
[[nodiscard]] Choices choose_blocks(const ConvertOptions& options, const Catalog& catalog,
                                    Metadata& metadata, Recipes& recipes,
                                    std::vector<Finding>& findings);

// Erases the keys that name the importance matrix of the source's blocks, except those that are
// `given`.
void erase_importance(const Metadata& given, Metadata& metadata);

}  // namespace loadstone
