// What the config beside a checkpoint says about its quantization, held against its tensors.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "catalog/open_file.h"
#include "loadstone/catalog.h"
#include "loadstone/finding.h"
#include "loadstone/storage.h"

namespace loadstone {

// Text of a config in the folder, as find_config() finds it; empty if there is none.
[[nodiscard]] std::string config_text(const FileOpener& opener, const std::string& folder,
                                      std::string_view name);

// Warnings "q.config": a library's config.json does not mention quantized tensors, or names
// an encoding where all tensors are plain floats. Null: the catalog's own storage.
[[nodiscard]] std::vector<Finding> check_claim(const Catalog& catalog, Storage* storage);

}  // namespace loadstone
