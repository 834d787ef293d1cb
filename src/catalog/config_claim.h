// The word of the configs beside a checkpoint on how it is quantized.
#pragma once

#include <array>
#include <string>
#include <string_view>

#include "catalog/open_file.h"
#include "loadstone/catalog.h"

namespace loadstone {

// The members of a config that say it: at the top, or one level below where a model has several
// parts.
inline constexpr std::array<std::string_view, 3> quantization_members = {
    "quantization_config", "compression_config", "quantization"};

// A config that cannot be read may say so, and counts as if it did.
[[nodiscard]] QuantizationClaim quantization_claim(std::string_view config);

// Of config.json and hf_quant_config.json in the folder.
[[nodiscard]] QuantizationClaim quantization_claim(const FileOpener& opener,
                                                   const std::string& folder);

}  // namespace loadstone
